//! The kernels of recurrent layers: causal convolutions, and linear recurrences with or without the delta
//! rule.
//!
//! A step's [`RecurrentPlan`](etkv_core::bookkeeping::RecurrentPlan) says which rows precede each token, and
//! from which anchor a recurrence starts. Every element of an output, a row or an anchor comes from one
//! sequence of float operations, whatever the step, the number of threads and the chains are: sums go over
//! the channels of a key and over the rows of a block in ascending order, with the elements of a value in
//! lanes of their own, and products of keys use the same lanes everywhere. So the same text gives the same
//! bits however it is cut into steps.

mod channels;
mod check;
mod convolve;
mod exp;
mod fold;
mod kernels;
mod layout;
mod load;
mod scan;
// The vectors of attention, compiled a second time: their types are private to that module.
#[allow(clippy::duplicate_mod, dead_code, unused_imports)]
#[path = "../attention/simd/mod.rs"]
mod simd;
mod task;
#[cfg(test)]
mod tests;
mod workspace;

pub use convolve::{convolve, convolve_into, Activation, ConvolveInputs};
pub use scan::{scan, scan_into, Scan, ScanInputs};
pub use workspace::Workspace;

/// An instruction set that the kernels are compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Instructions {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "aarch64")]
    Neon,
    Portable,
}

impl Instructions {
    /// Returns the instruction sets of this machine, the best first.
    fn available() -> impl Iterator<Item = Self> {
        [
            #[cfg(target_arch = "x86_64")]
            simd::Avx512::detected().then_some(Self::Avx512),
            #[cfg(target_arch = "x86_64")]
            simd::Avx2::detected().then_some(Self::Avx2),
            #[cfg(target_arch = "aarch64")]
            Some(Self::Neon),
            Some(Self::Portable),
        ]
        .into_iter()
        .flatten()
    }

    fn best() -> Self {
        Self::available().next().unwrap_or(Self::Portable)
    }
}

/// Runs an expression with the type of an instruction set.
macro_rules! with_simd {
    ($instructions:expr, |$S:ident| $body:expr) => {{
        use $crate::recurrent::{simd, Instructions};
        match $instructions {
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx512 => {
                type $S = simd::Avx512;
                $body
            }
            #[cfg(target_arch = "x86_64")]
            Instructions::Avx2 => {
                type $S = simd::Avx2;
                $body
            }
            #[cfg(target_arch = "aarch64")]
            Instructions::Neon => {
                type $S = simd::Neon;
                $body
            }
            Instructions::Portable => {
                type $S = simd::Portable;
                $body
            }
        }
    }};
}
use with_simd;
