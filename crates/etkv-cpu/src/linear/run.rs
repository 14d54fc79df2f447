//! Runs a call: the products of one input with one or more matrices.

use std::ops::Range;

use etkv_core::{fail, Result};

use super::blocks::{blocks_of, Block, Packed, BLOCK};
use super::tiles::{add_bias, Sums, Tiles};
use super::weights::{check_size, check_sizes, check_width, WeightFormat, MAX_SIZE, ROWS};
use super::workspace::Workspace;
use crate::memory::pieces::divide;
use crate::parallel::{Parallel, Serial};
use crate::simd::Instructions;

/// The number of tasks for each thread. With several, other load on the machine delays the call less.
const TASKS: usize = 8;

/// The minimum number of multiplications for which other threads are woken. This many multiplications take
/// some microseconds.
const SMALL: usize = 1 << 16;

/// The maximum bytes of a task's weights if there are many input rows. The weights stay in a core's cache
/// while the task processes the rows.
const CACHED: usize = 256 << 10;

/// The matrices of a call, all of which multiply the same input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Linear {
    /// The elements of an input row.
    pub columns: usize,
    /// The storage format of the weights.
    pub format: WeightFormat,
    /// The number of rows of each matrix, which is the number of its outputs.
    pub rows: Vec<usize>,
}

impl Linear {
    /// Checks the sizes.
    ///
    /// # Errors
    /// [`Program`](etkv_core::Status::Program) for invalid sizes.
    pub fn check(&self) -> Result<()> {
        check_width(self.columns, self.format)?;
        if self.rows.is_empty() {
            fail!(Program, "expected a matrix at least, got none");
        }
        self.rows.iter().try_for_each(|&rows| check_size("rows", rows, MAX_SIZE))
    }
}

/// One product of a call.
#[derive(Debug)]
pub struct Product<'a> {
    /// The packed weights.
    pub weights: &'a [u8],
    /// `[rows]`.
    pub bias: Option<&'a [f32]>,
    /// `[T, rows]`.
    pub out: &'a mut [f32],
}

/// Writes the products of the inputs `x`, `[T, columns]`, with each matrix.
///
/// The outputs of an input row depend neither on other rows nor on the number of threads.
///
/// # Errors
/// [`Shape`](etkv_core::Status::Shape) if sizes do not match, and [`Backend`](etkv_core::Status::Backend) if
/// memory is lacking. An error writes nothing.
pub fn multiply_into(
    linear: &Linear,
    x: &[f32],
    products: &mut [Product],
    workspace: &mut Workspace,
    parallel: &dyn Parallel,
) -> Result<()> {
    multiply_with(Instructions::best(), linear, x, products, workspace, parallel)
}

/// The same as [`multiply_into`], with a given instruction set of this machine.
pub(super) fn multiply_with(
    instructions: Instructions,
    linear: &Linear,
    x: &[f32],
    products: &mut [Product],
    workspace: &mut Workspace,
    parallel: &dyn Parallel,
) -> Result<()> {
    linear.check()?;
    check(linear, x, products)?;
    let (columns, format) = (linear.columns, linear.format);
    let n_tokens = x.len() / columns;
    let inputs = divide(&mut workspace.memory, |pieces| {
        Packed::of(pieces, n_tokens, columns, format.group())
    })?;
    let tiles = Tiles::of(instructions, format);
    let matrices = products.iter_mut().zip(&linear.rows).map(|(product, &rows)| Matrix {
        weights: product.weights,
        bias: product.bias,
        out: product.out.as_mut_ptr(),
        rows,
    });
    let step = Step {
        tiles,
        most: tiles.most(),
        tile_size: format.tile_size(columns),
        x,
        inputs,
        n_tokens,
        matrices: matrices.collect(),
    };
    step.run(parallel);
    Ok(())
}

/// Checks that inputs and outputs have the sizes of the matrices.
fn check(linear: &Linear, x: &[f32], products: &[Product]) -> Result<()> {
    let n_tokens = x.len() / linear.columns;
    if x.len() != n_tokens * linear.columns || products.len() != linear.rows.len() {
        fail!(
            Shape,
            "expected {} products of rows of {}, got {} of {} numbers",
            linear.rows.len(),
            linear.columns,
            products.len(),
            x.len()
        );
    }
    let alignment = linear.format.alignment();
    for (product, &rows) in products.iter().zip(&linear.rows) {
        let size = rows.div_ceil(ROWS) * linear.format.tile_size(linear.columns);
        check_sizes(&[
            ("weights", size, product.weights.len()),
            ("bias", rows, product.bias.map_or(rows, <[f32]>::len)),
            ("output", n_tokens * rows, product.out.len()),
        ])?;
        if product.weights.as_ptr().align_offset(alignment) != 0 {
            fail!(Shape, "weights: expected an address that is a multiple of {alignment}");
        }
    }
    Ok(())
}

struct Matrix<'a> {
    weights: &'a [u8],
    bias: Option<&'a [f32]>,
    out: *mut f32,
    rows: usize,
}

/// The data of a call that all tasks use.
struct Step<'a> {
    tiles: Tiles,
    /// The maximum number of rows of a block.
    most: usize,
    tile_size: usize,
    x: &'a [f32],
    inputs: Packed,
    n_tokens: usize,
    matrices: Vec<Matrix<'a>>,
}

// SAFETY: the tasks of a phase write different blocks or columns, and read only the results of earlier
// phases.
unsafe impl Sync for Step<'_> {}

impl Step<'_> {
    fn run(&self, parallel: &dyn Parallel) {
        let n_tiles: usize = self.matrices.iter().map(|matrix| matrix.rows.div_ceil(ROWS)).sum();
        let work = n_tiles * ROWS * self.inputs.columns * self.n_tokens;
        let parallel = if work < SMALL { &Serial } else { parallel };
        // The host may lock a mutex in this call, so it is called once.
        let threads = parallel.threads();
        let blocks: Vec<Block> = blocks_of(0..self.n_tokens, self.most).collect();
        let prepares: &dyn Parallel = if self.n_tokens <= BLOCK { &Serial } else { parallel };
        prepares.run(blocks.len(), &|at| self.pack(blocks[at]));

        let mut each = n_tiles.div_ceil(TASKS * threads);
        if blocks.len() > 1 {
            each = each.min(CACHED / self.tile_size);
        }
        let each = each.max(1);
        parallel.run(n_tiles.div_ceil(each), &|task| {
            let tiles = task * each..n_tiles.min((task + 1) * each);
            blocks.iter().for_each(|&block| self.multiply(tiles.clone(), block));
        });
    }

    /// Writes the packed inputs of a block.
    fn pack(&self, block: Block) {
        let columns = self.inputs.columns;
        for i in 0..block.n {
            let row = &self.x[(block.first + i) * columns..][..columns];
            // SAFETY: only this task uses the rows of the block.
            unsafe { self.tiles.put(&self.inputs, block, i, row) };
        }
    }

    /// Computes the products of some tiles with a block. Tiles are counted over all matrices.
    fn multiply(&self, tiles: Range<usize>, block: Block) {
        let mut sums: Sums = [0.0; BLOCK * ROWS];
        let mut first = 0;
        for matrix in &self.matrices {
            let end = first + matrix.rows.div_ceil(ROWS);
            for at in tiles.start.max(first)..tiles.end.min(end) {
                let tile = at - first;
                // SAFETY: an earlier phase wrote the block.
                unsafe {
                    self.tiles.multiply(matrix.weights, tile, &self.inputs, block, &mut sums);
                }
                let column = tile * ROWS;
                let width = ROWS.min(matrix.rows - column);
                add_bias(&mut sums, block.n, matrix.bias.map(|bias| &bias[column..][..width]));
                for (i, sums) in sums.chunks_exact(ROWS).take(block.n).enumerate() {
                    let at = (block.first + i) * matrix.rows + column;
                    // SAFETY: only this task uses the columns of these tokens.
                    unsafe {
                        let out = matrix.out.add(at);
                        match sums.as_chunks::<ROWS>().0 {
                            // With a constant size, the compiler does not generate a call of `memcpy`.
                            [whole] if width == ROWS => {
                                out.cast::<[f32; ROWS]>().write_unaligned(*whole);
                            }
                            _ => out.copy_from_nonoverlapping(sums.as_ptr(), width),
                        }
                    }
                }
            }
            first = end;
        }
    }
}
