//! Recurrent layers of a step: causal convolutions, and linear recurrences with or without the delta rule.
//!
//! A step's [`RecurrentPlan`](etkv_core::bookkeeping::RecurrentPlan) contains the rows that precede each token, and
//! the anchors from which a recurrence starts. MLX's operations compute in float32 on whole arrays. A token needs few
//! operations. A long text needs matrix products over its blocks. MLX chooses the order of sums, so results differ by
//! rounding errors if a text is split into steps differently. On a GPU with matrix units MLX rounds the factors of
//! float32 products to TF32, unless `MLX_ENABLE_TF32` is 0.

mod blocks;
mod convolve;
mod decays;
mod groups;
mod on_cuda;
mod rows;
mod scan;
mod short;
mod sizes;
#[cfg(test)]
mod tests;

pub use convolve::{convolve, Activation, ConvolveInputs};
#[doc(hidden)]
pub use decays::{inverse, matrix};
pub use scan::{fused_scan, scan, ScanInputs};

use mlx_rs::Array;

use crate::error::{fail, Result};
use crate::store::KvView;

/// The stored rows that a recurrent layer reads in a step.
pub type RecurrentSpec = etkv_core::RecurrentSpec<KvView>;

/// The rows that a recurrent layer writes in a step.
pub type RecurrentRows = etkv_core::RecurrentRows<Array>;

fn check_shape(array: &Array, name: &str, expected: &[i32]) -> Result<()> {
    if array.shape() != expected {
        fail!(Shape, "expected {name} of shape {expected:?}, got {:?}", array.shape());
    }
    Ok(())
}
