//! The texts of the kernels, for those who compile them by themselves.
//!
//! All but [`PRELUDE`] expect `__half` and `__nv_bfloat16`, `INFINITY` and `cuda::std::is_same_v`, which
//! CUDA's headers have. `ETKV_OVERLAPS` is defined where kernels may begin before those that they need
//! have ended; without it no instruction of that kind is in the texts.

/// What the others expect of CUDA's headers.
pub const PRELUDE: &str = include_str!("kernels/prelude.cuh");
/// The instructions that C++ has no words for.
pub const INSTRUCTIONS: &str = include_str!("kernels/instructions.cuh");
/// The rotation of two elements in rotary embedding.
pub const ROTATION: &str = include_str!("kernels/rotation.cuh");
/// Products of a few rows with a weight. Needs [`INSTRUCTIONS`] and [`ROTATION`].
pub const FEW_ROWS: &str = include_str!("kernels/few_rows.cuh");
/// Rows as attention gets them.
pub const ROWS: &str = include_str!("kernels/rows.cuh");
/// Attention over a slice of the keys. Needs [`INSTRUCTIONS`] and [`ROWS`].
pub const SLICE: &str = include_str!("kernels/slice.cuh");
/// Attention over all slices. Needs [`SLICE`].
pub const ATTENTION: &str = include_str!("kernels/attention.cuh");
/// Rotary embedding of heads. Needs [`ROTATION`].
pub const ROTARY: &str = include_str!("kernels/rotary.cuh");
/// The search for values that are not finite.
pub const FINITE: &str = include_str!("kernels/finite.cuh");
/// The body of MLX's kernel that calls [`ATTENTION`], up to its mask.
pub const MLX_ATTENTION: &str = include_str!("kernels/mlx_attention.cuh");
/// What follows it if there is a mask.
pub const MLX_ATTENTION_MASKED: &str = include_str!("kernels/mlx_attention_masked.cuh");
/// What MLX's kernels have of MLX's headers and of the standard library.
pub const MLX_HEADERS: &str = include_str!("kernels/mlx_headers.cuh");
