//! Calls of recurrent layers.

use std::sync::Arc;

use etkv::kernels::recurrent::HeadNorm;
use etkv::recurrent::Activation;
use etkv_core::RecurrentLayer;
use mlx_rs::Dtype;
use smallvec::SmallVec;

use super::{Expression, Value};

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
#[derive(Debug, Clone, PartialEq)]
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
    /// Created by a pass: a recurrence with some of the operations that compute its operands. One kernel launch on a
    /// GPU for a few tokens.
    FusedScan {
        /// The factor of the outputs.
        scale: f32,
        /// The vectors of q, k and v. Each of the three comes from one of the first three tensors, in this
        /// order.
        rows: [ScanRows; 3],
        /// The numbers of g and maybe of beta. They are computed from the tensors that follow.
        numbers: Vec<ScanNumbers>,
    },
}

/// The vectors of an operand of a recurrence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ScanRows {
    /// The tensor, `[1, heads, T, dim]`.
    Tensor,
    /// Columns of the tensor, `[1, T, columns]`.
    Columns {
        /// The first column of the first head.
        start: i32,
        /// The norm of each vector, in float32.
        norm: Option<HeadNorm>,
    },
}

/// A number for each head of each token.
#[derive(Debug, Clone, PartialEq)]
pub enum ScanNumbers {
    /// A tensor, `[1, heads, T]`.
    Tensor,
    /// A function of several tensors, `[1, T, heads]`.
    Function {
        /// The function.
        expression: Arc<Expression>,
        /// The number of tensors.
        n_inputs: usize,
    },
}

impl RecurrentCall {
    /// Returns the name of the operation.
    pub fn kind(&self) -> &'static str {
        match self.function {
            RecurrentFunction::Convolve { .. } => "UpdateAndConvolve",
            RecurrentFunction::Scan { .. } | RecurrentFunction::FusedScan { .. } => "UpdateAndScan",
        }
    }
}
