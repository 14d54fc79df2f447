//! Launch parameters of attention: arguments, grids, and shared memory.

use std::ffi::CStr;

use crate::step::error::{fail, Result};
use crate::step::formats::stage_bytes;
use crate::step::launch::{Limits, SYSTEM_SHARED};
use crate::step::mask::{RowBlocks, TILE};
use crate::step::plan::{Attend, Launch, Plan};
use crate::step::pools::{format_of, Planes};
use crate::step::source::Source;

/// The rows of a warp, as in the kernel.
const ROWS: usize = 16;
/// The maximum number of slices, as in the kernel.
const MAX_SLICES: usize = 64;
/// Threads and warps of a block, as in the kernel.
pub(crate) const ATTEND_THREADS: usize = 32 * WARPS;
const WARPS: usize = 4;
/// The maximum number of tiles of plain pools in a block's shared memory.
const MAX_TILES: usize = 3;
/// The maximum number of merging blocks per multiprocessor for [`MergeKernel::Few`], and for
/// [`MergeKernel::Some`].
const FEW_MERGING: usize = 1;
const SOME_MERGING: usize = 4;
/// The maximum number of blocks along the second and third axes of a grid.
const MAX_BLOCKS: usize = 65_535;
/// The maximum bytes of shared memory for the tiles of packed pools in a block.
const MAX_PACKED_SHARED: usize = 96 << 10;
/// The maximum number of tiles of packed pools in a block's shared memory. If they do not fit, a
/// multiprocessor runs fewer blocks.
const MAX_STAGES: usize = 4;
/// The maximum head dim with which a warp computes more than 16 rows, or a multiprocessor runs more than two
/// blocks. The limit exists because the sums are in registers.
const MAX_SHARED_DIM: usize = 128;
/// The rows of a row tile, for packed pools.
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

// The type in the kernels' file has the same size.
const _: () = assert!(size_of::<AttendWork>() == 128);

/// The launch parameters of attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AttendShape {
    pub(crate) source: Source,
    pub(crate) grid: [usize; 3],
    pub(crate) bytes_shared: usize,
    /// The number of floats of the slices' partial results.
    pub(crate) floats: usize,
    /// The grid of the blocks that merge the partial results.
    pub(crate) merging: [usize; 3],
    /// The kernel that merges the partial results.
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
            fail!(Plan, "heads of {dim} need {bytes_shared} shared bytes, the device has {most}");
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

    /// Returns the source of the kernel, the number of blocks that a multiprocessor runs at a time, and the
    /// bytes of shared memory of a block.
    fn source(
        plan: &Plan,
        attend: &Attend,
        division: Division,
        limits: Limits,
    ) -> (Source, usize, usize) {
        let Division { rows_of_block, row_warps, row_tiles, .. } = division;
        let (element, dim, masked) = (plan.element, attend.head_dim, plan.is_masked(attend.group));
        // After the last tile, the same memory holds the sums of all warps.
        let sums = WARPS * ROWS * (dim + 8 + 2) * 4;
        let shared =
            |blocks: usize| (limits.processor_shared / blocks).saturating_sub(SYSTEM_SHARED);
        let [keys, values] = [attend.keys, attend.values].map(format_of);
        let Some(row_tiles) = row_tiles else {
            // A tile of keys and values. Rows are padded by 16 bytes, and an element has 2 bytes.
            let tile = TILE * 2 * (dim + 8) * 2;
            // With many rows, fewer blocks are faster: there is less to merge, and each block has room for
            // more tiles.
            let blocks = if rows_of_block == ROWS && dim <= MAX_SHARED_DIM { 3 } else { 2 };
            let tiles = (shared(blocks) / tile).clamp(1, MAX_TILES);
            let source = Source::Attend { element, dim, tiles, row_warps, blocks, masked };
            return (source, blocks, (tiles * tile).max(sums));
        };
        let stage = stage_bytes(keys, values, dim);
        // Fewer row tiles need fewer registers, so a multiprocessor can run more blocks.
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

/// The kernels that merge slices. `Few` has more threads in a block than the others. In `Few` and `Some` a
/// thread loads more slices at a time than in `Many`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MergeKernel {
    Few,
    Some,
    Many,
}

impl MergeKernel {
    /// Returns the kernel for a number of blocks per multiprocessor.
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

/// The division of the query rows of one KV head among blocks and warps.
#[derive(Debug, Clone, Copy)]
struct Division {
    rows: usize,
    /// The number of row tiles of a warp, for packed pools.
    row_tiles: Option<usize>,
    /// The number of warps among which a block divides its rows.
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
            // With four row tiles, twice as many rows share the keys that a warp unpacks as with two.
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

/// Returns the blocks of rows of a layer group, or `None` if the group is not masked. Each block reads one
/// list of tiles. The blocks are the same for all layers of the group.
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
