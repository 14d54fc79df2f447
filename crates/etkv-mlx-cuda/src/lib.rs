//! Steps of decoders on NVIDIA GPUs, each as one CUDA graph.
//!
//! When `etkv-mlx-program` loads a program, it asks [`step_compiler`] for an executor of the program's steps.
//! The executor of a decoder captures steps of a few tokens as CUDA graphs (`etkv-cuda`), whose kernels read
//! and write MLX's arrays in place. The interpreter runs all other steps.

#[cfg(target_os = "linux")]
mod steps;

use etkv_mlx_program::StepCompiler;

/// Returns the compiler that captures steps on NVIDIA GPUs, or `None` on systems for which MLX has no CUDA.
pub fn step_compiler() -> Option<&'static dyn StepCompiler> {
    #[cfg(target_os = "linux")]
    {
        Some(&steps::CudaSteps)
    }
    #[cfg(not(target_os = "linux"))]
    {
        None
    }
}
