//! Rows of packed embeddings.

use std::slice::from_mut;

use etkv_core::{fail, Result};

use super::scales::Scales;
use super::weights::{check_size, check_sizes, check_width, WeightFormat, MAX_SIZE, ROWS};
use crate::floats::load_bf16;
use crate::parallel::{Parallel, Serial};

/// The minimum number of tokens for which other threads are woken.
const MANY: usize = 32;

/// A packed embedding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Embedding {
    /// The number of rows: the size of the vocabulary.
    pub rows: usize,
    /// The elements of a row.
    pub width: usize,
    /// The storage format of the weights.
    pub format: WeightFormat,
}

impl Embedding {
    /// Checks the sizes.
    ///
    /// # Errors
    /// [`Program`](etkv_core::Status::Program) for invalid sizes.
    pub fn check(&self) -> Result<()> {
        check_width(self.width, self.format)?;
        check_size("rows", self.rows, MAX_SIZE)
    }

    /// Unpacks row `row` of packed weights to `out`.
    fn row_into(&self, weights: &[u8], row: usize, out: &mut [f32]) {
        let (tile, lane) = (row / ROWS, row % ROWS);
        let size = self.format.tile_size(self.width);
        let tile = &weights[tile * size..][..size];
        let Some((codes, group, scales)) = self.format.in_groups() else {
            if self.format == WeightFormat::F32 {
                let lane = tile.as_chunks::<4>().0.iter().skip(lane).step_by(ROWS);
                out.iter_mut().zip(lane).for_each(|(out, x)| *out = f32::from_le_bytes(*x));
            } else {
                let lane = tile.as_chunks::<2>().0.iter().skip(lane).step_by(ROWS);
                out.iter_mut().zip(lane).for_each(|(out, x)| load_bf16(x, from_mut(out)));
            }
            return;
        };
        let zero = if scales.are_biased() { 0.0 } else { f32::from(codes.zero()) };
        let number = |code| f32::from(codes.number(code)) - zero;
        let size = ROWS * group * codes.bits() / 8;
        each_group(tile, group, scales, size, lane, out, |out, quads, weight| {
            let quads = quads.iter().skip(lane).step_by(ROWS);
            if codes.bits() == 8 {
                for (out, quad) in out.as_chunks_mut::<4>().0.iter_mut().zip(quads) {
                    *out = quad.map(|code| weight(number(code)));
                }
                return;
            }
            for (out, quad) in out.as_chunks_mut::<8>().0.iter_mut().zip(quads) {
                for (j, &two) in quad.iter().enumerate() {
                    out[j] = weight(number(two & 15));
                    out[4 + j] = weight(number(two >> 4));
                }
            }
        });
    }
}

/// Calls `unpack` for each group of row `lane` of a tile, with three arguments: the group's part of `out`,
/// its codes (`codes` bytes, in fours), and a function that converts a code to a weight.
fn each_group(
    tile: &[u8],
    group: usize,
    scales: Scales,
    codes: usize,
    lane: usize,
    out: &mut [f32],
    unpack: impl Fn(&mut [f32], &[[u8; 4]], &dyn Fn(f32) -> f32),
) {
    let ((sharing, factors), size) = (scales.shared(), scales.size());
    let tile = tile.chunks_exact(factors + sharing * (size + codes));
    for (out, shared) in out.chunks_exact_mut(sharing * group).zip(tile) {
        let (factors, groups) = shared.split_at(factors);
        let groups = groups.chunks_exact(size + codes);
        for (out, packed) in out.chunks_exact_mut(group).zip(groups) {
            let (numbers, codes) = packed.split_at(size);
            // SAFETY: the slices have the scales and biases of a group and their factors.
            let [scales, biases] = unsafe { scales.all(numbers.as_ptr(), factors.as_ptr()) };
            unpack(out, codes.as_chunks::<4>().0, &|code| scales[lane] * code + biases[lane]);
        }
    }
}

/// Writes the rows `[T, width]` of `ids`, which are little-endian integers of 64 bits.
///
/// # Errors
/// [`InvalidArgument`](etkv_core::Status::InvalidArgument) for an id without a row, and
/// [`Shape`](etkv_core::Status::Shape) if sizes do not match. An error writes nothing.
pub fn embed_into(
    embedding: &Embedding,
    ids: &[u8],
    weights: &[u8],
    out: &mut [f32],
    parallel: &dyn Parallel,
) -> Result<()> {
    embedding.check()?;
    let Embedding { rows, width, format } = *embedding;
    let (ids, _) = ids.as_chunks::<8>();
    check_sizes(&[
        ("weights", rows.div_ceil(ROWS) * format.tile_size(width), weights.len()),
        ("output", ids.len() * width, out.len()),
    ])?;
    for id in ids {
        let id = i64::from_le_bytes(*id);
        if !usize::try_from(id).is_ok_and(|id| id < rows) {
            fail!(InvalidArgument, "ids: expected 0 to {}, got {id}", rows - 1);
        }
    }
    let rows = Rows(out.as_mut_ptr());
    let parallel = if ids.len() < MANY { &Serial } else { parallel };
    parallel.run(ids.len(), &|at| {
        // SAFETY: only this task uses the row.
        let out = unsafe { std::slice::from_raw_parts_mut(rows.at(at * width), width) };
        // The check above ensures that the row exists.
        embedding.row_into(weights, i64::from_le_bytes(ids[at]) as usize, out);
    });
    Ok(())
}

/// The output, whose rows tasks write.
struct Rows(*mut f32);

// SAFETY: tasks write different rows.
unsafe impl Sync for Rows {}

impl Rows {
    fn at(&self, at: usize) -> *mut f32 {
        self.0.wrapping_add(at)
    }
}
