//! The sizes of a layer's experts.

use etkv_core::{fail, Result};

use super::activation::Activation;
use crate::linear::weights::{check_size, check_width, WeightFormat, ROWS};

/// The maximum number of elements of a row, and the maximum number of experts. No model has that many, and
/// with this limit sizes in bytes fit 64 bits.
const MAX_SIZE: usize = 1 << 20;

/// The experts of one layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experts {
    /// The number of experts.
    pub n_experts: usize,
    /// The elements of a hidden state.
    pub hidden: usize,
    /// The elements between the two products, in whole tiles.
    pub intermediate: usize,
    /// The storage formats of the first and the second products' weights.
    pub weights: [WeightFormat; 2],
    /// The activation between the products.
    pub activation: Activation,
}

impl Experts {
    /// Checks the sizes.
    ///
    /// # Errors
    /// [`Program`](etkv_core::Status::Program) for invalid sizes.
    pub fn check(&self) -> Result<()> {
        let Self { n_experts, hidden, intermediate, weights, .. } = *self;
        for (name, size) in
            [("experts", n_experts), ("hidden", hidden), ("intermediate", intermediate)]
        {
            check_size(name, size, MAX_SIZE)?;
        }
        if intermediate % ROWS != 0 {
            fail!(Program, "intermediate: expected a multiple of {ROWS}, got {intermediate}");
        }
        check_width(hidden, weights[0])?;
        check_width(intermediate, weights[1])?;
        self.activation.check()
    }

    /// Returns the number of tiles of an expert's first product. With a gate, it includes those of the gate.
    pub(super) fn first_tiles(&self) -> usize {
        self.intermediate / ROWS * if self.activation.gated { 2 } else { 1 }
    }

    /// Returns the number of tiles of an expert's second product.
    pub(super) fn second_tiles(&self) -> usize {
        self.hidden.div_ceil(ROWS)
    }

    /// Returns the bytes of the weights of all experts' first products.
    pub fn first_size(&self) -> usize {
        self.n_experts * self.first_tiles() * self.weights[0].tile_size(self.hidden)
    }

    /// Returns the bytes of the weights of all experts' second products.
    pub fn second_size(&self) -> usize {
        self.n_experts * self.second_tiles() * self.weights[1].tile_size(self.intermediate)
    }
}
