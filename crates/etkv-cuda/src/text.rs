//! The source texts of the kernels, for callers that compile them themselves.
//!
//! All texts except [`PRELUDE`] need `__half`, `__nv_bfloat16`, `INFINITY` and `cuda::std::is_same_v` from
//! CUDA's headers. If `ETKV_OVERLAPS` is defined, kernels may begin before the previous kernels have ended.
//! Otherwise the texts have no instructions for this.

/// The parts of CUDA's headers that the other texts need.
pub const PRELUDE: &str = include_str!("kernels/prelude.cuh");
/// GPU instructions for which C++ has no syntax.
pub const INSTRUCTIONS: &str = include_str!("kernels/instructions.cuh");
/// The rotation of two elements in a rotary embedding.
pub const ROTATION: &str = include_str!("kernels/rotation.cuh");
/// Products of a few rows with a weight. Needs [`INSTRUCTIONS`] and [`ROTATION`].
pub const FEW_ROWS: &str = include_str!("kernels/few_rows.cuh");
/// Products of one row with a weight. Needs [`FEW_ROWS`].
pub const ONE_ROW: &str = include_str!("kernels/one_row.cuh");
/// Views of rows, and masks, for attention.
pub const ROWS: &str = include_str!("kernels/rows.cuh");
/// Attention over a slice of the keys. Needs [`INSTRUCTIONS`] and [`ROWS`].
pub const SLICE: &str = include_str!("kernels/slice.cuh");
/// Attention over all slices. Needs [`SLICE`].
pub const ATTENTION: &str = include_str!("kernels/attention.cuh");
/// Rotary embedding of heads. Needs [`ROTATION`].
pub const ROTARY: &str = include_str!("kernels/rotary.cuh");
/// The search for elements that are not finite.
pub const FINITE: &str = include_str!("kernels/finite.cuh");
/// Element-wise functions.
pub const ELEMENTWISE: &str = include_str!("kernels/elementwise.cuh");
/// RMS norms of rows with any strides.
pub const NORM_ROWS: &str = include_str!("kernels/norm_rows.cuh");
/// Convolutions, and linear recurrences of a few tokens.
pub const RECURRENT: &str = include_str!("kernels/recurrent.cuh");
/// The body of the MLX kernel that calls [`ATTENTION`], up to its mask.
pub const MLX_ATTENTION: &str = include_str!("kernels/mlx_attention.cuh");
/// The rest of this body if there is a mask.
pub const MLX_ATTENTION_MASKED: &str = include_str!("kernels/mlx_attention_masked.cuh");
/// The parts of MLX's headers and of the standard library that MLX's kernels use.
pub const MLX_HEADERS: &str = include_str!("kernels/mlx_headers.cuh");
