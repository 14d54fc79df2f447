//! Selects the kernels for a format of weights and an instruction set.

use super::blocks::{Block, Packed, BLOCK};
use super::float_tile::FloatTile;
use super::integer_tile::{Dot, IntegerTile};
use super::quantize::Quantize;
use super::weights::{WeightFormat, MAX_GROUP, ROWS};
use crate::simd::{with_simd, Instructions, Kernel, Simd};

/// The results of a tile and a block, `[n, 16]`.
pub(crate) type Sums = [f32; BLOCK * ROWS];

/// Adds the biases of a tile's rows to the results for the `n` rows of a block.
pub(crate) fn add_bias(sums: &mut Sums, n: usize, bias: Option<&[f32]>) {
    let Some(bias) = bias else { return };
    for sums in sums.chunks_exact_mut(ROWS).take(n) {
        sums.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += bias);
    }
}

/// Multiplies tiles of weights by blocks of inputs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tiles {
    instructions: Instructions,
    dot: Dot,
    format: WeightFormat,
}

impl Tiles {
    /// Returns the kernels for weights in `format` on a machine with these instructions.
    pub fn of(instructions: Instructions, format: WeightFormat) -> Self {
        Self { instructions, dot: Dot::of(instructions), format }
    }

    /// Returns the maximum number of rows of a block.
    pub fn most(&self) -> usize {
        match self.format.group() {
            Some(_) => self.dot.most(),
            // With narrower vectors, the sums of fewer rows fit the registers.
            None => BLOCK * with_simd!(self.instructions, |S| S::WIDTH) / ROWS,
        }
    }

    /// Runs a kernel.
    ///
    /// # Safety
    /// Pointers of the kernel must be valid as its fields document.
    pub unsafe fn enter(&self, kernel: impl Kernel) {
        // SAFETY: the machine has the instructions, and the caller ensures the rest.
        with_simd!(self.instructions, |S| unsafe { S::enter(kernel) });
    }

    /// Rounds one group of numbers to integers. Returns the scale and the start of the group's sums. Without
    /// biases, the start is minus the sum of the inputs times the code of zero, because codes of weights are
    /// unsigned. With biases, it is the sum of the inputs.
    pub fn quantize(&self, from: &[f32], codes: &mut [i8]) -> (f32, i32) {
        let (mut scale, mut sum) = (0.0, 0);
        let codes = &mut codes[..from.len()];
        // SAFETY: the references are valid, and there are as many codes as numbers.
        unsafe { self.enter(Quantize { from, codes, scale: &mut scale, sum: &mut sum }) };
        let start = match self.format.in_groups() {
            Some((codes, _, scales)) if !scales.are_biased() => -i32::from(codes.zero()) * sum,
            _ => sum,
        };
        (scale, start)
    }

    /// Writes row `i` of a block. Rounds it to integers if weights are integers.
    ///
    /// # Safety
    /// The block must have memory, row `i`, and as many columns as `row`. Nothing else may access the row.
    pub unsafe fn put(&self, to: &Packed, block: Block, i: usize, row: &[f32]) {
        // SAFETY: the caller upholds the contract.
        unsafe {
            if to.group == 0 {
                to.put_floats(block, i, 0, row);
                return;
            }
            let mut codes = [0; MAX_GROUP];
            for (at, group) in row.chunks_exact(to.group).enumerate() {
                let (scale, start) = self.quantize(group, &mut codes);
                to.put_integers(block, i, at, &codes[..to.group], &[scale], &[start]);
            }
        }
    }

    /// Computes the products of tile `tile` of `weights` and a block.
    ///
    /// # Safety
    /// The rows of the block must be written, and no other thread may write to them.
    pub unsafe fn multiply(
        &self,
        weights: &[u8],
        tile: usize,
        inputs: &Packed,
        block: Block,
        sums: &mut Sums,
    ) {
        let size = self.format.tile_size(inputs.columns);
        let weights = weights[tile * size..][..size].as_ptr();
        let (n, out) = (block.n, sums.as_mut_ptr());
        match self.format.in_groups() {
            None => {
                let is_bf16 = self.format == WeightFormat::Bf16;
                let (columns, inputs) = (inputs.columns, inputs.floats(block));
                // SAFETY: the weights are those of a tile, and the caller ensures the rest.
                unsafe { self.enter(FloatTile { weights, is_bf16, columns, inputs, n, out }) };
            }
            Some((codes, group, stored)) => {
                let (scales, starts) = inputs.of_groups(block);
                let tile = IntegerTile {
                    weights,
                    codes,
                    stored,
                    n_groups: inputs.n_groups(),
                    group,
                    inputs: inputs.integers(block),
                    scales,
                    starts,
                    n,
                    out,
                };
                // SAFETY: the machine has the instructions, the block has at most `most` rows, and the caller
                // ensures the rest.
                unsafe { tile.run(self.dot) };
            }
        }
    }
}
