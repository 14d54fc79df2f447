//! Calls of recurrent layers.

use etkv::recurrent::Activation;
use etkv_core::RecurrentLayer;
use mlx_rs::Dtype;
use smallvec::SmallVec;

use super::Value;

/// A call of a recurrent layer of the cache.
#[derive(Debug, Clone, PartialEq)]
pub struct RecurrentCall {
    /// The number of the layer among the recurrent layers.
    pub layer: usize,
    /// The sizes that the program declares.
    pub config: RecurrentLayer,
    /// The function that the layer computes.
    pub function: RecurrentFunction,
    /// The operands, as the function documents them.
    pub tensors: SmallVec<[Value; 5]>,
    /// The positions of the tokens.
    pub position: Value,
    /// The dtype of the result; `None` for the dtype of the first operand.
    pub out_dtype: Option<Dtype>,
}

/// What a recurrent layer computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RecurrentFunction {
    /// A convolution of `x`, `[1, channels, T]`, with a weight `[channels, width]` and maybe a bias.
    Convolve {
        /// The function that is applied to the sums.
        activation: Activation,
    },
    /// A recurrence over q, k, v, g and maybe beta, `[1, heads, T, ...]`.
    Scan {
        /// The factor of the outputs.
        scale: f32,
    },
}

impl RecurrentCall {
    /// Returns the name of the operation.
    pub fn kind(&self) -> &'static str {
        match self.function {
            RecurrentFunction::Convolve { .. } => "UpdateAndConvolve",
            RecurrentFunction::Scan { .. } => "UpdateAndScan",
        }
    }
}
