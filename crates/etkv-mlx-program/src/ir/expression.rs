//! Element-wise functions of several tensors, made of several operations.

use mlx_rs::Dtype;

use super::{Binary, Unary};

/// An element-wise function of some tensors, which broadcast.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Expression {
    /// The operations. Each one follows the operations that it reads. The last one is the result.
    pub nodes: Vec<Node>,
}

/// An operation of an [`Expression`]. It reads nodes by their indices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Node {
    /// One of the tensors, by its index.
    Input(usize),
    Unary(Unary, usize),
    Binary(Binary, usize, usize),
    AsType(usize, Dtype),
    /// The concatenation of two nodes along the last axis.
    Concatenate([usize; 2], i32),
}
