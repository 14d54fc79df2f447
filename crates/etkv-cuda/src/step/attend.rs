//! Launch parameters of attention: arguments, grids, and shared memory.

use std::ffi::CStr;

use crate::step::error::{fail, Result};
use crate::step::formats::stage_bytes;
use crate::step::launch::{Limits, SYSTEM_SHARED};
use crate::step::mask::{RowBlocks, TILE};
use crate::step::plan::{Attend, Launch, Plan};
use crate::step::pools::{format_of, Planes};
use crate::step::source::Source;

/// The rows of a warp, and the most slices, as in the kernel.
const ROWS: usize = 16;
const MAX_SLICES: usize = 64;
/// Threads and warps of a block, as in the kernel.
pub(crate) const ATTEND_THREADS: usize = 32 * WARPS;
const WARPS: usize = 4;
/// The most tiles of plain pools that a block holds at a time.
const MAX_TILES: usize = 3;
/// The most merging blocks for each multiprocessor that count as few, and as some.
const FEW_MERGING: usize = 1;
const SOME_MERGING: usize = 4;
/// The most blocks along the second and third axes.
const MAX_BLOCKS: usize = 65_535;
/// Shared memory for the tiles of packed pools in a block.
const MAX_PACKED_SHARED: usize = 96 << 10;
/// The most tiles of packed pools that a block holds at a time. A multiprocessor runs fewer blocks rather
/// than fewer tiles.
const MAX_STAGES: usize = 4;
/// The largest head with which a warp takes more rows, or a multiprocessor runs more than two blocks: the
/// sums are in registers.
const MAX_SHARED_DIM: usize = 128;
/// Rows of a row tile over packed pools.
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
    pub(crate) unused: i32,
}

// The kernels' file has the same size.
const _: () = assert!(size_of::<AttendWork>() == 128);

/// The launch parameters of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AttendShape {
    pub(crate) source: Source,
    pub(crate) grid: [usize; 3],
    pub(crate) bytes_shared: usize,
    /// The floats that slices leave for merging, the blocks that merge, and their kernel.
    pub(crate) floats: usize,
    pub(crate) merging: [usize; 3],
    pub(crate) merge: MergeKernel,
}

impl AttendShape {
    pub(crate) fn of(plan: &Plan, attend: &Attend, limits: Limits) -> Result<Self> {
        let dim = attend.head_dim;
        let division = Division::of(plan, attend);
        let Division { rows, rows_of_block, .. } = division;
        let (source, blocks, bytes_shared) = Self::source(plan, attend, division, limits);
        let row_blocks = rows.div_ceil(rows_of_block);
        if row_blocks > MAX_BLOCKS {
            fail!(Plan, "{rows} rows of queries, expected {} or fewer", MAX_BLOCKS * ROWS);
        }
        if bytes_shared > limits.block_shared {
            let most = limits.block_shared;
            fail!(Plan, "heads of {dim} take {bytes_shared} bytes, the device has {most}");
        }
        let blocks = plan.attention_blocks.unwrap_or(blocks * limits.processors);
        let tiles = attend.keys.capacity.min(attend.values.capacity).div_ceil(TILE);
        let slices = (blocks / (attend.n_kv * row_blocks)).min(tiles).clamp(1, MAX_SLICES);
        Ok(Self {
            source,
            grid: [slices, attend.n_kv, row_blocks],
            bytes_shared,
            floats: slices * attend.n_kv * row_blocks * rows_of_block * (dim + 2),
            merging: [rows, attend.n_kv, 1],
            merge: MergeKernel::of((rows * attend.n_kv).div_ceil(limits.processors)),
        })
    }

    /// Returns what is compiled, the number of blocks that a multiprocessor runs at a time, and a block's
    /// bytes of shared memory.
    fn source(
        plan: &Plan,
        attend: &Attend,
        division: Division,
        limits: Limits,
    ) -> (Source, usize, usize) {
        let Division { rows_of_block, row_warps, row_tiles, .. } = division;
        let (element, dim, masked) = (plan.element, attend.head_dim, plan.is_masked(attend.group));
        // The same memory holds the sums of all warps and their results.
        let sums = WARPS * ROWS * (dim + 8 + 2) * 4;
        let shared =
            |blocks: usize| (limits.processor_shared / blocks).saturating_sub(SYSTEM_SHARED);
        let [keys, values] = [attend.keys, attend.values].map(format_of);
        let Some(row_tiles) = row_tiles else {
            // Rows are aligned to 16 bytes. Elements have 2.
            let tile = TILE * 2 * (dim + 8) * 2;
            // With many rows, fewer blocks leave less to merge, and hold more tiles each.
            let blocks = if rows_of_block == ROWS && dim <= MAX_SHARED_DIM { 3 } else { 2 };
            let tiles = (shared(blocks) / tile).clamp(1, MAX_TILES);
            let source = Source::Attend { element, dim, tiles, row_warps, blocks, masked };
            return (source, blocks, (tiles * tile).max(sums));
        };
        let stage = stage_bytes(keys, values, dim);
        // Fewer row tiles leave more registers, so that a multiprocessor runs more blocks.
        let max_blocks = match row_tiles {
            _ if dim > MAX_SHARED_DIM => 2,
            1 => 4,
            2 => 3,
            _ => 2,
        };
        let stages = |blocks: usize| shared(blocks).min(MAX_PACKED_SHARED) / stage;
        let is_enough = |blocks: &usize| stages(*blocks) >= MAX_STAGES;
        let blocks = (2..=max_blocks).rev().find(is_enough).unwrap_or(max_blocks.min(3));
        let stages = stages(blocks).clamp(2, MAX_STAGES);
        let source = Source::AttendPacked {
            element,
            dim,
            stages,
            row_tiles,
            row_warps,
            blocks,
            masked,
            keys,
            values,
        };
        (source, blocks, (stages * stage).max(sums))
    }
}

/// The kernels that merge. With few blocks, each has more threads; with few or some, a thread requests more
/// slices at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MergeKernel {
    Few,
    Some,
    Many,
}

impl MergeKernel {
    /// Returns the kernel for this number of blocks for each multiprocessor.
    fn of(blocks: usize) -> Self {
        if blocks <= FEW_MERGING {
            Self::Few
        } else if blocks <= SOME_MERGING {
            Self::Some
        } else {
            Self::Many
        }
    }

    pub(crate) fn name(self) -> &'static CStr {
        match self {
            Self::Few => c"etkv_merge_few",
            Self::Some => c"etkv_merge_some",
            Self::Many => c"etkv_merge_many",
        }
    }

    pub(crate) fn threads(self) -> usize {
        match self {
            Self::Few => 256,
            Self::Some | Self::Many => 128,
        }
    }
}

/// The division of the rows of queries for one head of keys.
#[derive(Debug, Clone, Copy)]
struct Division {
    rows: usize,
    /// Tiles of 8 rows that a warp has, for packed pools.
    row_tiles: Option<usize>,
    /// Warps of a block that share its rows.
    row_warps: usize,
    rows_of_block: usize,
}

impl Division {
    fn of(plan: &Plan, attend: &Attend) -> Self {
        let rows = attend.n_q / attend.n_kv * plan.tokens;
        let is_shared = rows > ROWS && attend.head_dim <= MAX_SHARED_DIM && !plan.small_blocks;
        let is_packed = [attend.keys, attend.values].iter().any(|pool| format_of(*pool).is_some());
        let row_tiles = match rows {
            ..=ROW_TILE => 1,
            // Two parts of a warp's rows share the unpacked keys of the warp.
            _ if is_shared => 4,
            _ => 2,
        };
        let parts = if is_packed { (row_tiles * ROW_TILE).div_ceil(ROWS) } else { 1 };
        let row_warps = match rows.div_ceil(ROWS * parts) {
            _ if plan.small_blocks => 1,
            needed => needed.next_power_of_two().min(WARPS / parts),
        };
        Self {
            rows,
            row_tiles: is_packed.then_some(row_tiles),
            row_warps,
            rows_of_block: ROWS * parts * row_warps,
        }
    }
}

/// Returns the blocks of rows that read one list of tiles each, if a layer group is masked. All attentions of
/// a group have the same.
pub(crate) fn row_blocks(plan: &Plan, group: usize) -> Option<RowBlocks> {
    let of_group = |launch: &Launch| match launch {
        Launch::Attend(attend) if attend.group == group => Some(*attend),
        _ => None,
    };
    let attend = plan.launches.iter().find_map(of_group).filter(|_| plan.is_masked(group))?;
    let rows_of_block = Division::of(plan, &attend).rows_of_block;
    Some(RowBlocks::of(plan.tokens, attend.n_q / attend.n_kv, rows_of_block))
}

#[cfg(test)]
mod tests;
