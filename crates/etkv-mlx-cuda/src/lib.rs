//! Steps of decoders on NVIDIA GPUs, each as one CUDA graph.
//!
//! `etkv-mlx-program` asks [`step_compiler`] for an executor of a program's steps when it loads it. A program that is
//! a decoder has one: its steps of a few tokens are captured as CUDA graphs (`etkv-cuda`), whose kernels read and
//! write MLX's arrays where these are. All other steps are the interpreter's.

#[cfg(target_os = "linux")]
mod steps;

use etkv_mlx_program::StepCompiler;

/// Returns what captures steps on NVIDIA GPUs, or `None` on systems that MLX has no CUDA for.
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
