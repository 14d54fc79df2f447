//! Runs a call: its checks and its tasks.

use etkv_core::{fail, Result};

use super::activation::Activate;
use super::routing::{Chosen, Routing};
use super::sizes::Experts;
use super::workspace::{Pieces, Workspace};
use crate::linear::blocks::{blocks_of, Block, BLOCK};
use crate::linear::tiles::{add_bias, Sums, Tiles};
use crate::linear::weights::{check_sizes, MAX_GROUP, ROWS};
use crate::parallel::{Parallel, Serial};
use crate::simd::Instructions;

/// The number of tasks for each thread. With several, other load on the machine delays the call less.
const TASKS: usize = 8;

/// The minimum number of pairs for which several threads prepare inputs.
const MANY: usize = 64;

/// The inputs of a step of `T` tokens with `k` experts each.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// Hidden states, `[T, hidden]`.
    pub x: &'a [f32],
    /// The number of experts of a token.
    pub k: usize,
    /// The experts of each token, `[T, k]`: little-endian integers of 64 bits.
    pub experts: &'a [u8],
    /// The factors of the experts' outputs, `[T, k]`.
    pub routing_weights: &'a [f32],
    /// The weights of the first products of all experts.
    pub first: &'a [u8],
    /// The weights of the second products.
    pub second: &'a [u8],
    /// `[n_experts, 16 * tiles]`, in the order of the tiles' rows.
    pub first_bias: Option<&'a [f32]>,
    /// `[n_experts, hidden]`.
    pub second_bias: Option<&'a [f32]>,
}

/// Writes for each token the sum of its experts' outputs, multiplied by their factors: `[T, hidden]`.
///
/// The output of a token depends neither on other tokens of the step nor on the number of threads.
///
/// # Errors
/// [`InvalidArgument`](etkv_core::Status::InvalidArgument) for an index without an expert,
/// [`Shape`](etkv_core::Status::Shape) if sizes do not match, and [`Backend`](etkv_core::Status::Backend) if
/// memory is lacking. An error does not write the output.
pub fn route_into(
    experts: &Experts,
    inputs: &Inputs,
    out: &mut [f32],
    workspace: &mut Workspace,
    parallel: &dyn Parallel,
) -> Result<()> {
    route_with(Instructions::best(), experts, inputs, out, workspace, parallel)
}

/// The same as [`route_into`], with a given instruction set of this machine.
pub(super) fn route_with(
    instructions: Instructions,
    experts: &Experts,
    inputs: &Inputs,
    out: &mut [f32],
    workspace: &mut Workspace,
    parallel: &dyn Parallel,
) -> Result<()> {
    experts.check()?;
    check(experts, inputs, out)?;
    let Workspace { memory, routing } = workspace;
    routing.sort(inputs.experts, inputs.k, experts.n_experts)?;
    let n_tokens = out.len() / experts.hidden;
    let pieces = Pieces::of(memory, experts, n_tokens, routing.pairs.len())?;
    // Less than about ten microseconds of work is not worth waking another thread.
    let work = experts.hidden * experts.intermediate * routing.chosen.len();
    let parallel = if work < 1 << 15 { &Serial } else { parallel };
    let [first, second] = experts.weights.map(|format| Tiles::of(instructions, format));
    let step = Step {
        most: first.most().min(second.most()),
        tiles: [first, second],
        experts,
        inputs,
        routing,
        pieces,
        out: out.as_mut_ptr(),
        n_tokens,
    };
    // The host may lock a mutex in this call, so it is called once.
    step.run(parallel, parallel.threads());
    Ok(())
}

/// Checks that the sizes of inputs and output match those of the experts.
fn check(experts: &Experts, inputs: &Inputs, out: &[f32]) -> Result<()> {
    let Experts { n_experts, hidden, .. } = *experts;
    let Inputs { x, k, first, second, .. } = *inputs;
    let n_tokens = x.len() / hidden;
    let first_rows = experts.first_tiles() * ROWS;
    let bias = |bias: Option<&[f32]>, rows| bias.map_or(n_experts * rows, <[f32]>::len);
    check_sizes(&[
        ("hidden states", n_tokens * hidden, x.len()),
        ("output", n_tokens * hidden, out.len()),
        ("experts of the tokens", n_tokens * k * 8, inputs.experts.len()),
        ("factors", n_tokens * k, inputs.routing_weights.len()),
        ("weights of the first products", experts.first_size(), first.len()),
        ("weights of the second products", experts.second_size(), second.len()),
        (
            "biases of the first products",
            n_experts * first_rows,
            bias(inputs.first_bias, first_rows),
        ),
        ("biases of the second products", n_experts * hidden, bias(inputs.second_bias, hidden)),
    ])?;
    for (weights, format) in [first, second].iter().zip(experts.weights) {
        let alignment = format.alignment();
        if weights.as_ptr().align_offset(alignment) != 0 {
            fail!(
                Shape,
                "weights of experts: expected an address that is a multiple of {alignment}"
            );
        }
    }
    Ok(())
}

/// The data of a call that all tasks use.
struct Step<'a> {
    /// The kernels of both products.
    tiles: [Tiles; 2],
    /// The maximum number of pairs of a block.
    most: usize,
    experts: &'a Experts,
    inputs: &'a Inputs<'a>,
    routing: &'a Routing,
    pieces: Pieces,
    out: *mut f32,
    n_tokens: usize,
}

// SAFETY: the tasks of a phase write different pieces or columns, and read only the results of earlier
// phases.
unsafe impl Sync for Step<'_> {}

impl Step<'_> {
    fn run(&self, parallel: &dyn Parallel, threads: usize) {
        let chosen = &self.routing.chosen;
        let prepares: &dyn Parallel =
            if self.routing.pairs.len() < MANY { &Serial } else { parallel };
        if self.pieces.tokens.group != 0 {
            prepares.run(self.n_tokens, &|token| self.quantize(token));
        }
        prepares.run(chosen.len(), &|at| self.pack(&chosen[at]));

        // The columns of a unit of the first products are a complete group of the second products' inputs.
        let unit = self.experts.weights[1].group().unwrap_or(ROWS);
        let n_units = self.experts.intermediate / unit;
        let each = (chosen.len() * n_units).div_ceil(TASKS * threads).clamp(1, n_units);
        let parts = n_units.div_ceil(each);
        parallel.run(chosen.len() * parts, &|task| {
            let begin = task % parts * each;
            self.first(&chosen[task / parts], begin..n_units.min(begin + each), unit);
        });

        let n_tiles = self.experts.second_tiles();
        let each = n_tiles.div_ceil(TASKS * threads).max(1);
        parallel.run(n_tiles.div_ceil(each), &|task| {
            let begin = task * each;
            (begin..n_tiles.min(begin + each)).for_each(|tile| self.clear(tile));
            for chosen in chosen {
                (begin..n_tiles.min(begin + each)).for_each(|tile| self.second(chosen, tile));
            }
        });
    }

    /// Rounds the hidden states of a token to 8 bits.
    fn quantize(&self, token: usize) {
        let tokens = &self.pieces.tokens;
        let (columns, group, n_groups) = (tokens.columns, tokens.group, tokens.n_groups());
        let row = &self.inputs.x[token * columns..(token + 1) * columns];
        let block = Block { first: token, n: 1 };
        let (scales, starts) = tokens.of_groups(block);
        // SAFETY: only this task uses the row of the token, and its numbers are initialized.
        let (codes, scales, starts) = unsafe {
            (
                std::slice::from_raw_parts_mut(tokens.integers(block), columns),
                std::slice::from_raw_parts_mut(scales, n_groups),
                std::slice::from_raw_parts_mut(starts, n_groups),
            )
        };
        let groups = row.chunks_exact(group).zip(codes.chunks_exact_mut(group));
        for ((from, codes), (scale, start)) in groups.zip(scales.iter_mut().zip(starts)) {
            (*scale, *start) = self.tiles[0].quantize(from, codes);
        }
    }

    /// Packs the inputs of an expert's tokens into blocks.
    fn pack(&self, chosen: &Chosen) {
        let (to, tokens) = (&self.pieces.first, &self.pieces.tokens);
        for block in blocks_of(chosen.pairs(), self.most) {
            for i in 0..block.n {
                let token = self.token(block.first + i);
                if to.group == 0 {
                    let row = &self.inputs.x[token * to.columns..(token + 1) * to.columns];
                    // SAFETY: only this task uses the pairs of the expert.
                    unsafe { to.put_floats(block, i, 0, row) };
                    continue;
                }
                let of_token = Block { first: token, n: 1 };
                let (scales, starts) = tokens.of_groups(of_token);
                let n = tokens.n_groups();
                // SAFETY: the same as above, and an earlier phase wrote the token.
                unsafe {
                    let codes = std::slice::from_raw_parts(tokens.integers(of_token), to.columns);
                    let scales = std::slice::from_raw_parts(scales, n);
                    to.put_integers(
                        block,
                        i,
                        0,
                        codes,
                        scales,
                        std::slice::from_raw_parts(starts, n),
                    );
                }
            }
        }
    }

    /// Computes some units of an expert's first products, applies the activation, and packs the results as
    /// inputs of the second products.
    fn first(&self, chosen: &Chosen, units: std::ops::Range<usize>, unit: usize) {
        let (to, gated) = (&self.pieces.second, self.experts.activation.gated);
        let (mut gates, mut ups): (Sums, Sums) = ([0.0; BLOCK * ROWS], [0.0; BLOCK * ROWS]);
        let mut rows = [[0.0f32; MAX_GROUP]; BLOCK];
        for (unit_at, block) in
            units.flat_map(|at| blocks_of(chosen.pairs(), self.most).map(move |block| (at, block)))
        {
            for tile in 0..unit / ROWS {
                let column = unit_at * unit + tile * ROWS;
                let at = column / ROWS;
                if gated {
                    self.first_tile(chosen.expert, 2 * at, block, &mut gates);
                    self.first_tile(chosen.expert, 2 * at + 1, block, &mut ups);
                } else {
                    self.first_tile(chosen.expert, at, block, &mut gates);
                }
                let activation = self.experts.activation;
                let (gates_at, ups_at) = (gates.as_mut_ptr(), ups.as_ptr());
                // SAFETY: both arrays have rows for all pairs of a block.
                unsafe {
                    self.tiles[1].enter(Activate {
                        activation,
                        gates: gates_at,
                        ups: ups_at,
                        n: block.n,
                    });
                }
                for (i, made) in gates.chunks_exact(ROWS).take(block.n).enumerate() {
                    if to.group == 0 {
                        // SAFETY: only this task uses the columns of these pairs.
                        unsafe { to.put_floats(block, i, column, made) };
                    } else {
                        rows[i][tile * ROWS..][..ROWS].copy_from_slice(made);
                    }
                }
            }
            if to.group != 0 {
                for (i, row) in rows[..block.n].iter().enumerate() {
                    let mut codes = [0; MAX_GROUP];
                    let (scale, start) = self.tiles[1].quantize(&row[..unit], &mut codes);
                    // SAFETY: only this task uses the columns of these pairs.
                    unsafe {
                        to.put_integers(block, i, unit_at, &codes[..unit], &[scale], &[start]);
                    }
                }
            }
        }
    }

    fn first_tile(&self, expert: usize, tile: usize, block: Block, sums: &mut Sums) {
        let tiles = self.experts.first_tiles();
        let (weights, inputs) = (self.inputs.first, &self.pieces.first);
        // SAFETY: an earlier phase wrote the block.
        unsafe { self.tiles[0].multiply(weights, expert * tiles + tile, inputs, block, sums) };
        let bias = self.inputs.first_bias;
        add_bias(sums, block.n, bias.map(|bias| &bias[(expert * tiles + tile) * ROWS..][..ROWS]));
    }

    /// Sets a tile's columns of the output to zero.
    fn clear(&self, tile: usize) {
        let (column, width) = self.columns(tile);
        for token in 0..self.n_tokens {
            // SAFETY: only this task uses the columns.
            unsafe { self.out.add(token * self.experts.hidden + column).write_bytes(0, width) };
        }
    }

    /// Adds the second products of an expert to a tile's columns of the output.
    fn second(&self, chosen: &Chosen, tile: usize) {
        let (hidden, expert) = (self.experts.hidden, chosen.expert);
        let tiles = self.experts.second_tiles();
        let (column, width) = self.columns(tile);
        let bias = self.inputs.second_bias.map(|bias| &bias[expert * hidden + column..][..width]);
        let mut sums: Sums = [0.0; BLOCK * ROWS];
        for block in blocks_of(chosen.pairs(), self.most) {
            let (weights, inputs) = (self.inputs.second, &self.pieces.second);
            // SAFETY: an earlier phase wrote the block.
            unsafe {
                self.tiles[1].multiply(weights, expert * tiles + tile, inputs, block, &mut sums);
            }
            add_bias(&mut sums, block.n, bias);
            for (i, sums) in sums.chunks_exact(ROWS).take(block.n).enumerate() {
                let factor = self.inputs.routing_weights[self.pair(block.first + i)];
                let at = self.token(block.first + i) * hidden + column;
                // SAFETY: only this task uses the columns.
                let out = unsafe { std::slice::from_raw_parts_mut(self.out.add(at), width) };
                out.iter_mut().zip(sums).for_each(|(out, sum)| *out += factor * sum);
            }
        }
    }

    /// Returns the first column of a tile in the output, and the number of columns.
    fn columns(&self, tile: usize) -> (usize, usize) {
        let column = tile * ROWS;
        (column, ROWS.min(self.experts.hidden - column))
    }

    /// Returns the position of a pair in the indices.
    fn pair(&self, at: usize) -> usize {
        self.routing.pairs[at] as usize
    }

    fn token(&self, at: usize) -> usize {
        self.pair(at) / self.inputs.k
    }
}
