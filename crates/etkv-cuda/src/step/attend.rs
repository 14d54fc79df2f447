//! Attention as it is launched: arguments, grids, and shared memory.

use crate::step::compile::Source;
use crate::step::error::{fail, Result};
use crate::step::launch::{Limits, SYSTEM_SHARED};
use crate::step::mask::RowBlocks;
use crate::step::plan::{Attend, Launch, Plan};
use crate::step::pools::{format_of, stage_bytes, Planes};

/// Threads of a block, and of one that merges, as in the kernels.
pub(crate) const ATTEND_THREADS: usize = 128;
pub(crate) const MERGE_THREADS: usize = 256;
/// Keys that attention reads at a time, rows of a warp, and the most slices, as in the kernel.
pub(crate) const TILE: usize = 64;
const ROWS: usize = 16;
const MOST_SLICES: usize = 64;
/// The most tiles of plain pools that a block holds at a time.
const MOST_TILES: usize = 3;
/// The most blocks along the second and third axis.
const MOST_BLOCKS: usize = 65_535;
/// Shared memory for the tiles of packed pools in a block.
const MOST_PACKED_SHARED: usize = 96 << 10;
/// The most tiles of packed pools that a block holds at a time, and as many as are enough.
const MOST_STAGES: usize = 4;
/// The largest heads of which a warp takes more rows, or of which a multiprocessor has more than two blocks: their
/// sums are in registers.
const MOST_SHARED_DIM: usize = 128;
/// Rows of a tile of rows over packed pools.
const ROW_TILE: usize = 8;

/// The argument of attention.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct AttendWork {
    pub(crate) q: u64,
    pub(crate) out: u64,
    pub(crate) step: u64,
    pub(crate) tiles: u64,
    pub(crate) partial: u64,
    pub(crate) keys: Planes,
    pub(crate) values: Planes,
    pub(crate) scale: f32,
    pub(crate) tokens: i32,
    pub(crate) queries: i32,
    pub(crate) each: i32,
    pub(crate) slices: i32,
    pub(crate) row_warps: i32,
}

// The kernels' file has the same size.
const _: () = assert!(size_of::<AttendWork>() == 128);

/// How attention is launched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AttendShape {
    pub(crate) source: Source,
    pub(crate) grid: [usize; 3],
    pub(crate) bytes_shared: usize,
    /// Floats that slices leave to be merged, and the blocks that merge.
    pub(crate) floats: usize,
    pub(crate) merging: [usize; 3],
}

impl AttendShape {
    pub(crate) fn of(plan: &Plan, attend: &Attend, limits: Limits) -> Result<Self> {
        let dim = attend.head_dim;
        let rows = attend.n_q / attend.n_kv * plan.tokens;
        let (source, bytes_shared) = Self::source(plan, attend, rows, limits);
        // Two parts of a warp's rows share what the warp unpacks.
        let parts = match source {
            Source::AttendPacked { row_tiles, .. } => (row_tiles * ROW_TILE).div_ceil(ROWS),
            _ => 1,
        };
        let rows_of_block = rows_of_block(plan, rows, parts);
        let row_blocks = rows.div_ceil(rows_of_block);
        if row_blocks > MOST_BLOCKS {
            fail!(Plan, "{rows} rows of queries, expected {} or fewer", MOST_BLOCKS * ROWS);
        }
        if bytes_shared > limits.block_shared {
            let most = limits.block_shared;
            fail!(Plan, "heads of {dim} take {bytes_shared} bytes, the device has {most}");
        }
        let each = match source {
            Source::AttendPacked { blocks, .. } => blocks,
            _ => plain_blocks(rows_of_block, dim),
        };
        let blocks = plan.attention_blocks.unwrap_or(each * limits.processors);
        let tiles = attend.keys.capacity.min(attend.values.capacity).div_ceil(TILE);
        let slices = (blocks / (attend.n_kv * row_blocks)).min(tiles).clamp(1, MOST_SLICES);
        Ok(Self {
            source,
            grid: [slices, attend.n_kv, row_blocks],
            bytes_shared,
            floats: slices * attend.n_kv * row_blocks * rows_of_block * (dim + 2),
            merging: [rows, attend.n_kv, 1],
        })
    }

    /// Returns what is compiled, and a block's bytes of shared memory.
    fn source(plan: &Plan, attend: &Attend, rows: usize, limits: Limits) -> (Source, usize) {
        let (element, dim, masked) = (plan.element, attend.head_dim, plan.is_masked(attend.group));
        // The same memory takes the sums of all warps and what they end with.
        let sums = 4 * ROWS * (dim + 8 + 2) * 4;
        let [keys, values] = [attend.keys, attend.values].map(format_of);
        if keys.is_none() && values.is_none() {
            // Rows are 16 bytes apart. Elements have 2.
            let tile = TILE * 2 * (dim + 8) * 2;
            let each = plain_blocks(rows_of_block(plan, rows, 1), dim);
            let most = (limits.processor_shared / each).saturating_sub(SYSTEM_SHARED);
            let tiles = (most / tile).clamp(1, MOST_TILES);
            return (Source::Attend { element, dim, tiles, masked }, (tiles * tile).max(sums));
        }
        let stage = stage_bytes(keys, values, dim);
        // Fewer tiles of rows leave more registers, so that a multiprocessor has more blocks, which wait for each
        // other less than one does for itself.
        let (row_tiles, most_blocks) = match rows {
            _ if dim > MOST_SHARED_DIM => (if rows <= ROW_TILE { 1 } else { 2 }, 2),
            ..=ROW_TILE => (1, 4),
            _ if rows > ROWS && !plan.apart => (4, 2),
            _ => (2, 3),
        };
        let shared = |blocks: usize| {
            let each = (limits.processor_shared / blocks).saturating_sub(SYSTEM_SHARED);
            each.min(MOST_PACKED_SHARED)
        };
        let is_enough = |blocks: &usize| MOST_STAGES * stage <= shared(*blocks);
        let blocks = (2..=most_blocks).rev().find(is_enough).unwrap_or(most_blocks.min(3));
        let stages = (shared(blocks) / stage).clamp(2, MOST_STAGES);
        let source =
            Source::AttendPacked { element, dim, stages, row_tiles, blocks, masked, keys, values };
        (source, (stages * stage).max(sums))
    }
}

/// Returns the blocks of attention over plain pools that a multiprocessor has at a time. Of many rows fewer leave
/// less to be merged, and hold more tiles each.
fn plain_blocks(rows_of_block: usize, dim: usize) -> usize {
    if rows_of_block == ROWS && dim <= MOST_SHARED_DIM {
        3
    } else {
        2
    }
}

/// Returns the rows of a block of threads, of which a warp has so many parts.
fn rows_of_block(plan: &Plan, rows: usize, parts: usize) -> usize {
    let row_warps = match rows.div_ceil(ROWS * parts) {
        _ if plan.apart => 1,
        ..=1 => 1,
        2 => 2,
        _ => 4 / parts,
    };
    ROWS * parts * row_warps
}

/// Returns the blocks of rows that read a list of tiles each, if a group of layers is masked. Those of all its
/// attentions are alike.
pub(crate) fn row_blocks(plan: &Plan, group: usize) -> Option<RowBlocks> {
    let each = |launch: &Launch| match launch {
        Launch::Attend(attend) if attend.group == group => Some(attend.n_q / attend.n_kv),
        _ => None,
    };
    let each = plan.launches.iter().find_map(each).filter(|_| plan.is_masked(group))?;
    // With one part or two, a block has as many rows.
    Some(RowBlocks::of(plan.tokens, each, rows_of_block(plan, each * plan.tokens, 1)))
}

#[cfg(test)]
mod tests;
