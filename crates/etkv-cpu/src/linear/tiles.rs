//! The kernels of one format of weights on one instruction set.

use super::blocks::{Block, Packed, BLOCK};
use super::float_tile::FloatTile;
use super::integer_tile::{Dot, IntegerTile};
use super::quantize::Quantize;
use super::weights::{WeightFormat, MAX_GROUP, ROWS};
use crate::simd::{with_simd, Instructions, Kernel, Simd};

/// The sums of a block: a tile's rows for each row of inputs.
pub(crate) type Sums = [f32; BLOCK * ROWS];

/// Multiplies tiles of weights with blocks of inputs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tiles {
    instructions: Instructions,
    dot: Dot,
    format: WeightFormat,
}

impl Tiles {
    /// Returns the kernels of weights in `format` on a machine with these instructions.
    pub fn of(instructions: Instructions, format: WeightFormat) -> Self {
        Self { instructions, dot: Dot::of(instructions), format }
    }

    /// Returns the most rows of a block.
    pub fn most(&self) -> usize {
        match self.format.group() {
            Some(_) => self.dot.most(),
            // Sums of twice as many vectors fill the registers.
            None => BLOCK * with_simd!(self.instructions, |S| S::WIDTH) / ROWS,
        }
    }

    /// Runs a kernel.
    ///
    /// # Safety
    /// The fields of the kernel point to what their comments say.
    pub unsafe fn enter(&self, kernel: impl Kernel) {
        // SAFETY: the machine has the instructions; the caller's.
        with_simd!(self.instructions, |S| unsafe { S::enter(kernel) });
    }

    /// Rounds one group of numbers to as many integers. Returns their scale, and what their products begin with: codes
    /// of weights have no sign, so the products of the inputs and the code of zero are subtracted.
    pub fn quantize(&self, from: &[f32], codes: &mut [i8]) -> (f32, i32) {
        let (mut scale, mut sum) = (0.0, 0);
        let codes = &mut codes[..from.len()];
        // SAFETY: references, to as many codes as numbers.
        unsafe { self.enter(Quantize { from, codes, scale: &mut scale, sum: &mut sum }) };
        let zero = if matches!(self.format, WeightFormat::Int4 { .. }) { 8 } else { 128 };
        (scale, -zero * sum)
    }

    /// Writes row `i` of a block, which is rounded if weights are integers.
    ///
    /// # Safety
    /// The block has memory and row `i`, and nothing else accesses that row. It has as many columns as `row`.
    pub unsafe fn put(&self, to: &Packed, block: Block, i: usize, row: &[f32]) {
        // SAFETY: the caller's.
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
    /// The rows of the block are written, and no other thread writes to them.
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
        match self.format {
            WeightFormat::F32 | WeightFormat::Bf16 => {
                let is_bf16 = self.format == WeightFormat::Bf16;
                let (columns, inputs) = (inputs.columns, inputs.floats(block));
                // SAFETY: the weights are those of a tile; the caller's.
                unsafe { self.enter(FloatTile { weights, is_bf16, columns, inputs, n, out }) };
            }
            WeightFormat::Int8 { group, scales: stored }
            | WeightFormat::Int4 { group, scales: stored } => {
                let (scales, starts) = inputs.of_groups(block);
                let tile = IntegerTile {
                    weights,
                    is_int4: matches!(self.format, WeightFormat::Int4 { .. }),
                    stored,
                    n_groups: inputs.n_groups(),
                    group,
                    inputs: inputs.integers(block),
                    scales,
                    starts,
                    n,
                    out,
                };
                // SAFETY: the machine has the instructions; the block has at most `most` rows; the caller's.
                unsafe { tile.run(self.dot) };
            }
        }
    }
}
