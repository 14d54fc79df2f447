//! Launch parameters of the kernels: arguments, grids, and shared memory.

use std::ffi::c_void;

use cudarc::driver::sys;

use crate::step::check::rows;
use crate::step::driver::{Kernel, Stream};
use crate::step::error::{check, fail, Result};
use crate::step::plan::{Address, Plan, Product, Weight, MAX_FEW, MAX_TOKENS};

/// Threads of a block, as in the kernels.
pub(crate) const PRODUCT_THREADS: usize = 256;
pub(crate) const EMBED_THREADS: usize = 128;
pub(crate) const CHOOSE_THREADS: usize = 1024;
pub(crate) const NORMALIZE_THREADS: usize = 256;

/// The outputs of a product's tile, as in the kernel.
const OUTPUTS: usize = 16;
/// The elements of padding between two rows in shared memory.
const PAD: usize = 32;
/// The maximum elements of a block's rows with which every device runs two blocks on a multiprocessor.
const FEW_SHARED: usize = 33_280;
/// The number of blocks on each multiprocessor in the product of a single row. With one block there would be
/// room for the next kernel's blocks, but the product takes a quarter longer on an H200.
const ROW_BLOCKS: usize = 2;
/// The warps of a block in the product of a single row.
const ROW_WARPS: usize = PRODUCT_THREADS / 32;
/// The minimum elements of the inner axis for a warp of such a block. With 1024 a product took a quarter
/// longer on an H200.
const ROW_SPAN: usize = 2048;
/// The bytes of shared memory that a product needs in addition to the rows.
const STATIC_SHARED: usize = 4 * (2 * 8 * 16 * 16 + 16 * 8);
/// The bytes of a multiprocessor's shared memory that the system reserves for each block.
pub(crate) const SYSTEM_SHARED: usize = 1024;

/// The parameters of the kernel with rings. The kernel's file has the same values. `WIDE` is the number of
/// elements of a row that a warp multiplies at a time, and `DEPTH` is the number of slots of the warp's ring.
/// `HELD` is for rows that stay in registers: rows of at most `MAX_HELD` elements. `OTHER` is for longer
/// rows.
const TILED_WARPS: usize = 16;
const HELD_WIDE: usize = 128;
const HELD_DEPTH: usize = 2;
const OTHER_WIDE: usize = 64;
const OTHER_DEPTH: usize = 3;
const MAX_HELD: usize = TILED_WARPS * HELD_WIDE;

/// The parameters of the kernel of many rows. The kernel's file has the same values. A tile has `MANY_TILE`
/// rows of the weight, and a slot of the ring has `MANY_WIDE` elements of each row. `MANY_ROWS` is the
/// maximum number of rows of `x`, and `MANY_DEPTHS` is the range of possible numbers of slots.
const MANY_THREADS: usize = 256;
const MANY_TILE: usize = 128;
const MANY_PAIRS: usize = MANY_TILE / 2;
const MANY_WIDE: usize = 64;
const MANY_ROWS: usize = 64;
const MANY_DEPTHS: std::ops::RangeInclusive<usize> = 3..=9;
/// The maximum number of blocks that share a tile. Each block writes partial sums, and the last block adds
/// them.
const MAX_SPLITS: usize = 8;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// The number of multiprocessors.
    pub(crate) processors: usize,
    /// The bytes of shared memory that a block may use.
    pub(crate) block_shared: usize,
    /// The bytes of shared memory of a multiprocessor.
    pub(crate) processor_shared: usize,
}

impl Limits {
    /// Returns the bytes of dynamic shared memory that a product may use.
    pub(crate) fn product_shared(&self) -> usize {
        self.block_shared.saturating_sub(STATIC_SHARED)
    }
}

/// A step in the layout that the kernels read.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    pub(crate) keys: i32,
    pub(crate) before_tiles: i32,
    pub(crate) unused: [i32; 2],
    pub(crate) ids: [i32; MAX_TOKENS],
    pub(crate) positions: [i32; MAX_TOKENS],
    pub(crate) slots: [i32; MAX_TOKENS],
}

/// The argument of a product. An absent address is 0.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ProductWork {
    pub(crate) x: u64,
    pub(crate) w: u64,
    pub(crate) bias: u64,
    pub(crate) norm: u64,
    pub(crate) residual: u64,
    pub(crate) out: u64,
    pub(crate) periods: u64,
    pub(crate) keys: u64,
    pub(crate) values: u64,
    pub(crate) step: u64,
    pub(crate) keys_head: i64,
    pub(crate) values_head: i64,
    pub(crate) eps: f32,
    pub(crate) normalizes: i32,
    pub(crate) gate: i32,
    pub(crate) rows: i32,
    pub(crate) outputs: i32,
    pub(crate) inner: i32,
    pub(crate) head_dim: i32,
    pub(crate) rotated: i32,
    pub(crate) queries: i32,
    pub(crate) each: i32,
    pub(crate) max_shared: i32,
    /// The warps that share the inner axis of a single row.
    pub(crate) team: i32,
}

/// The argument of a product with a packed weight. Its codes are `product.w`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PackedWork {
    pub(crate) product: ProductWork,
    pub(crate) scales: u64,
    pub(crate) biases: u64,
    /// The logarithm of a group's size.
    pub(crate) group_shift: i32,
    pub(crate) unused: i32,
}

/// The argument of a product of many rows.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ManyWork {
    pub(crate) product: ProductWork,
    pub(crate) sums: u64,
    pub(crate) counts: u64,
    pub(crate) splits: i32,
    pub(crate) unused: i32,
}

// The types in the kernels' files have the same sizes.
const _: () = assert!(size_of::<Step>() == 784);
const _: () = assert!(size_of::<ProductWork>() == 144);
const _: () = assert!(size_of::<PackedWork>() == 168);
const _: () = assert!(size_of::<ManyWork>() == 168);

/// The kernels of products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ProductKernel {
    /// For a single row. `team` warps share the inner axis.
    Row { team: usize },
    /// For few rows, which are in shared memory, or are read again for each tile.
    Few,
    /// For few rows, which are in registers or rings. The weight is in rings.
    Tiled,
    /// For many rows, with rings. `splits` blocks share each of the `tiles` tiles.
    Many { tiles: usize, splits: usize },
}

/// The launch parameters of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ProductShape {
    pub(crate) kernel: ProductKernel,
    pub(crate) blocks: usize,
    /// The threads of a block.
    pub(crate) threads: usize,
    /// The bytes of dynamic shared memory of a block.
    pub(crate) shared: usize,
}

impl ProductShape {
    /// Returns the launch parameters of a product.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) if normalized rows do not fit shared memory, or if no kernel
    /// supports this number of rows with the weight.
    pub(crate) fn of(plan: &Plan, product: &Product, limits: Limits) -> Result<Self> {
        let n = rows(plan, product);
        if n > MAX_FEW {
            return Self::many(n, product, limits);
        }
        if let Some(shape) = Self::tiled(n, product, limits) {
            return Ok(shape);
        }
        let elements = n * (product.inner + PAD);
        let most = match product.norm {
            Some(_) => limits.product_shared() / 2,
            None => FEW_SHARED.min(limits.product_shared() / 2),
        };
        if elements > most && product.norm.is_some() {
            fail!(
                Plan,
                "{elements} elements of normalized rows, with {PAD} of padding after each row, \
                 expected {most} or fewer on this device"
            );
        }
        let is_plain = matches!(product.weight, Weight::Plain(_));
        if is_plain && n == 1 && elements <= limits.product_shared() / 2 {
            let halves = if product.gate.is_some() { 1 } else { 2 };
            let pairs = product.outputs.div_ceil(halves);
            let team = team_of(pairs, product.inner, limits.processors);
            let blocks = (team * pairs).div_ceil(ROW_WARPS).min(ROW_BLOCKS * limits.processors);
            let (kernel, threads) = (ProductKernel::Row { team }, PRODUCT_THREADS);
            return Ok(Self { kernel, blocks, threads, shared: 2 * elements });
        }
        let shared = if elements <= most { elements } else { 0 };
        let block = 2 * shared + STATIC_SHARED + SYSTEM_SHARED;
        let each = if 2 * block <= limits.processor_shared { 2 } else { 1 };
        let width = if product.gate.is_some() { OUTPUTS / 2 } else { OUTPUTS };
        let tiles = product.outputs.div_ceil(width);
        let blocks = tiles.min(each * limits.processors).max(1);
        let (kernel, threads) = (ProductKernel::Few, PRODUCT_THREADS);
        Ok(Self { kernel, blocks, threads, shared: 2 * shared })
    }

    /// Returns the launch parameters of the kernel with rings, if it supports the product. The kernel does
    /// not support a single row: its blocks fill a whole multiprocessor, so the next kernel cannot overlap
    /// it, and on an H200 a kernel that overlaps the next one is faster.
    fn tiled(rows: usize, product: &Product, limits: Limits) -> Option<Self> {
        let Weight::Plain(weight) = product.weight else {
            return None;
        };
        let is_held = product.inner <= MAX_HELD;
        let shared = tiled_shared(rows, is_held);
        let takes = rows > 1
            && shared <= limits.block_shared
            && weight.0 % 16 == 0
            && (is_held || product.norm.is_none());
        takes.then_some(())?;
        let columns = if product.gate.is_some() { OUTPUTS / 2 } else { OUTPUTS };
        let blocks = product.outputs.div_ceil(columns).min(limits.processors);
        Some(Self { kernel: ProductKernel::Tiled, blocks, threads: 32 * TILED_WARPS, shared })
    }
}

impl ProductShape {
    /// Returns the launch parameters of the kernel of many rows.
    fn many(rows: usize, product: &Product, limits: Limits) -> Result<Self> {
        match product.weight {
            Weight::Plain(Address(address)) if address % 16 == 0 => {}
            Weight::Plain(_) => {
                fail!(Plan, "{rows} rows and a weight that is not aligned to 16 bytes")
            }
            Weight::Packed(_) => {
                fail!(Plan, "{rows} rows and a packed weight, expected {MAX_FEW} or fewer rows");
            }
        }
        let depth = many_depth(limits);
        if depth < *MANY_DEPTHS.start() {
            let shared = MANY_DEPTHS.start() * MANY_PLACE;
            fail!(
                Plan,
                "{rows} rows need {shared} shared bytes, the device has {}",
                limits.block_shared
            );
        }
        let pairs = match product.gate {
            Some(_) => product.outputs,
            None => product.outputs.div_ceil(2),
        };
        let tiles = pairs.div_ceil(MANY_PAIRS);
        let splits = splits_of(tiles, product.inner, limits.processors);
        let blocks = (tiles * splits).min(limits.processors);
        let kernel = ProductKernel::Many { tiles, splits };
        Ok(Self { kernel, blocks, threads: MANY_THREADS, shared: depth * MANY_PLACE })
    }

    /// Returns the number of floats of the partial sums, and the number of tile counters, of blocks that
    /// share tiles.
    pub(crate) fn scratch(&self, rows: usize) -> (usize, usize) {
        match self.kernel {
            ProductKernel::Many { tiles, splits } if splits > 1 => {
                (tiles * splits * many_rows(rows) * MANY_TILE, tiles)
            }
            _ => (0, 0),
        }
    }
}

/// Returns the number of warps that compute a pair of outputs of a single row. They share the inner axis.
fn team_of(pairs: usize, inner: usize, processors: usize) -> usize {
    let most = ROW_BLOCKS * processors * ROW_WARPS / pairs.max(1);
    let fits = |team: &usize| *team <= most && inner >= team * ROW_SPAN;
    [8, 4, 2].into_iter().find(fits).unwrap_or(1)
}

/// Returns the number of blocks that share a tile: the number with which the product ends first. The time is
/// estimated in steps of the inner axis. The end of a tile counts as one step, or as more if blocks write and
/// add partial sums.
fn splits_of(tiles: usize, inner: usize, processors: usize) -> usize {
    let steps = inner.div_ceil(MANY_WIDE);
    let time = |splits: &usize| {
        let end = if *splits > 1 { 4 + splits / 2 } else { 1 };
        (tiles * splits).div_ceil(processors) * (steps.div_ceil(*splits) + end)
    };
    (1..=steps.min(MAX_SPLITS)).min_by_key(time).unwrap_or(1)
}

/// Returns the number of rows that the kernel of many rows computes: `rows`, rounded up to a multiple of 32.
fn many_rows(rows: usize) -> usize {
    rows.next_multiple_of(32)
}

/// The bytes of a slot of the ring in the kernel of many rows.
const MANY_PLACE: usize = 2 * (MANY_TILE + MANY_ROWS) * MANY_WIDE;

/// Returns the number of slots of the ring in the kernel of many rows. If it is below the minimum of
/// `MANY_DEPTHS`, the device cannot run the kernel.
pub(crate) fn many_depth(limits: Limits) -> usize {
    (limits.block_shared.saturating_sub(SYSTEM_SHARED) / MANY_PLACE).min(*MANY_DEPTHS.end())
}

/// Returns the bytes of shared memory of a block of the kernel with rings.
fn tiled_shared(rows: usize, is_held: bool) -> usize {
    let x_rows = rows.next_multiple_of(8);
    let ring = match is_held {
        true => HELD_DEPTH * OUTPUTS * HELD_WIDE,
        false => OTHER_DEPTH * (OUTPUTS + x_rows) * OTHER_WIDE,
    };
    TILED_WARPS * (2 * ring + 4 * 2 * x_rows * OUTPUTS + 4 * x_rows)
}

/// Returns an address, or 0 for `None`.
pub(crate) fn or_null(address: Option<Address>) -> u64 {
    address.map_or(0, |address| address.0)
}

/// Converts a size, which the check of the plan has limited to 31 bits.
pub(crate) fn int(size: usize) -> i32 {
    i32::try_from(size).unwrap_or(i32::MAX)
}

/// Launches a kernel. With `overlaps` it may begin before the previous kernel has ended.
///
/// # Safety
/// `arguments` must point to the kernel's arguments, in order. Addresses in them must be valid until the
/// kernel has run.
pub(crate) unsafe fn launch(
    stream: &Stream,
    kernel: &Kernel,
    grid: [usize; 3],
    threads: usize,
    shared: usize,
    arguments: &mut [*mut c_void],
    overlaps: bool,
) -> Result<()> {
    let [x, y, z] = grid.map(|n| int(n) as u32);
    let mut attribute = sys::CUlaunchAttribute {
        id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
        pad: [0; 4],
        value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
    };
    let config = sys::CUlaunchConfig {
        gridDimX: x,
        gridDimY: y,
        gridDimZ: z,
        blockDimX: int(threads) as u32,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: int(shared) as u32,
        hStream: stream.raw,
        attrs: &mut attribute,
        numAttrs: u32::from(overlaps),
    };
    let arguments = arguments.as_mut_ptr();
    // SAFETY: the stream and the kernel are live; the driver copies the arguments.
    let result =
        unsafe { sys::cuLaunchKernelEx(&config, kernel.raw, arguments, std::ptr::null_mut()) };
    check("cuLaunchKernelEx", result)
}

#[cfg(test)]
mod tests;
