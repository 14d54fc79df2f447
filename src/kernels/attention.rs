//! Attention of several queries in one kernel launch on CUDA. MLX needs a cuDNN plan for each pair of query and key
//! length, or ten launches for each layer.
//!
//! A launch costs the host 6 to 10 µs, which is most of the time of a step of a few tokens. So the kernel also merges
//! its slices: each block counts the blocks that have finished, and the last block merges. See `attention.cuh` of
//! `etkv_cuda`.

use etkv_cuda::text;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::raw::Kernel;
use super::{can_run, element, header, source, CompiledKernels};
use crate::attention::Mask;
use crate::error::{Error, Result};
use crate::mlx::slice_axis;

#[cfg(test)]
mod tests;

/// The maximum number of queries of a call in half precision, enough for the steps of a prompt. For a single query
/// MLX has a kernel.
const MAX_QUERIES: i32 = 1 << 16;

/// The maximum number of queries of a call in float32. The kernel's float32 products are slow because they use no
/// tensor cores, so MLX's attention is faster for more queries.
const MAX_F32: i32 = 64;

/// The value of [`MAX_F32`] for a cache of one sequence.
const MAX_F32_OF_ONE: i32 = 16;

/// The range of row dimensions that the kernel supports. They must also be multiples of 16.
const DIMS: std::ops::RangeInclusive<i32> = 32..=256;

/// The number of keys in a tile that a block reads, the number of rows of a warp, and the number of threads of a
/// block. The kernel has the same constants.
const TILE: i32 = 64;
const ROWS: i32 = 16;
const THREADS: i32 = 128;

/// The number of blocks that keep a large GPU busy: four on each multiprocessor of an H100.
const BLOCKS: i32 = 528;

/// The maximum number of blocks of a launch along its second and third axes.
const MAX_BLOCKS: i32 = 65_535;

/// The maximum number of slices of the keys. The last block reads the result of each slice.
const MAX_SLICES: i32 = 64;

/// The bytes of shared memory that every GPU since Ampere has.
const MAX_SHARED: i32 = 96 << 10;

/// The number of slices that are merged at once, as in the kernel.
const MAX_MERGED: i32 = 16;

/// The number of counters of one call, and the number of calls with separate counters. A row of blocks needs one
/// counter, or 9 counters if it has more slices than are merged at once. Calls with many rows of blocks have few
/// slices. MLX's graphs have at most 100 operations, so kernels of calls that are `CALLS` apart never run at the same
/// time.
const COUNTERS: i32 = 600;
const CALLS: i32 = 512;

/// The parameters that are compiled into a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Template {
    dtype: Dtype,
    k_dim: i32,
    v_dim: i32,
    mask: u8,
    scale: u32,
}

/// The kernels of this process, and the counters of their calls. Used only under the lock of MLX.
#[derive(Default)]
struct Kernels {
    compiled: CompiledKernels<Template>,
    counters: Vec<Array>,
    calls: usize,
}

static KERNELS: Mutex<Option<Kernels>> = Mutex::new(None);

/// Returns the attention of `q` over `k` and `v`, in the dtype of `q`, if the kernel supports it.
///
/// Keys and values may be views with any strides. A query that sees no keys gets the mean of all values, as in MLX's
/// composed attention. Queries of etkv's caches see at least their own key.
pub fn several_queries(
    q: &Array,
    k: &Array,
    v: &Array,
    mask: &Mask,
    scale: f32,
) -> Result<Option<Array>> {
    let most = match (q.dtype(), mask) {
        (Dtype::Float32, Mask::Explicit(_)) => MAX_F32,
        (Dtype::Float32, Mask::None | Mask::Causal) => MAX_F32_OF_ONE,
        _ => MAX_QUERIES,
    };
    if q.ndim() != 4 || !(2..=most).contains(&q.dim(2)) {
        return Ok(None);
    }
    attend(q, k, v, mask, scale)
}

/// Does the same as [`several_queries`], but also for a single query.
pub fn attend(q: &Array, k: &Array, v: &Array, mask: &Mask, scale: f32) -> Result<Option<Array>> {
    let Some(call) = Call::of(q, k, v, mask, scale) else {
        return Ok(None);
    };
    if !can_run()? {
        return Ok(None);
    }
    let mut kernels = KERNELS.lock();
    kernels.get_or_insert_default().attend([q, k, v], mask, &call)
}

/// Compiles the masked variants of all kernels that have run without a mask. A sequence whose layers have windows
/// needs a mask only once it is longer than the windows.
pub fn compile_masked() -> Result<()> {
    if !can_run()? {
        return Ok(());
    }
    let mut kernels = KERNELS.lock();
    let kernels = kernels.get_or_insert_default();
    let plain: Vec<Template> = kernels.compiled.templates().copied().collect();
    for template in plain {
        let counters = kernels.next_counters()?;
        let masked = Template { mask: 2, ..template };
        kernels.compiled.get(masked, |template| compile_and_run(template, &counters));
    }
    Ok(())
}

/// A call that the kernel supports.
struct Call {
    template: Template,
    /// The numbers of blocks along keys, KV heads, and rows.
    grid: [i32; 3],
    rows_of_block: i32,
    out: [i32; 4],
}

impl Call {
    fn of(q: &Array, k: &Array, v: &Array, mask: &Mask, scale: f32) -> Option<Self> {
        let all_rows = [q, k, v].into_iter().all(|x| x.ndim() == 4 && x.dim(0) == 1);
        if !all_rows || k.dtype() != q.dtype() || v.dtype() != q.dtype() {
            return None;
        }
        let (heads, t, dim) = (q.dim(1), q.dim(2), q.dim(3));
        let (kv_heads, n, v_dim) = (k.dim(1), k.dim(2), v.dim(3));
        let mask = kind_of(mask, t, n)?;
        let template =
            Template { dtype: q.dtype(), k_dim: dim, v_dim, mask, scale: scale.to_bits() };
        let fits = kv_heads > 0
            && heads % kv_heads == 0
            && (v.dim(1), v.dim(2), k.dim(3)) == (kv_heads, n, dim)
            && (1..=MAX_QUERIES).contains(&t)
            && n > 0
            && (heads / kv_heads) <= i32::MAX / MAX_QUERIES;
        if !fits || !template.is_supported() {
            return None;
        }
        let row_warps = row_warps(heads / kv_heads * t, template.max_row_warps());
        let rows_of_block = ROWS * row_warps;
        let blocks_of_rows = (heads / kv_heads * t + rows_of_block - 1) / rows_of_block;
        let slices = slices_of(n, kv_heads.checked_mul(blocks_of_rows)?);
        if blocks_of_rows.max(kv_heads) > MAX_BLOCKS {
            return None;
        }
        // MLX counts threads, not blocks.
        slices.checked_mul(kv_heads)?.checked_mul(blocks_of_rows)?.checked_mul(THREADS)?;
        Some(Self {
            template,
            grid: [slices, kv_heads, blocks_of_rows],
            rows_of_block,
            out: [1, t, heads, v_dim],
        })
    }

    /// Returns the number of floats for the sums, the weights and the largest scores of the blocks.
    fn floats_between_blocks(&self) -> i32 {
        let [slices, heads, blocks] = self.grid;
        match slices {
            1 => 1,
            // There are at most `BLOCKS` blocks, of up to 64 rows each.
            _ => slices * heads * blocks * self.rows_of_block * (self.template.v_dim + 2),
        }
    }
}

/// Returns the number of warps of a block that work on different rows.
fn row_warps(rows: i32, most: i32) -> i32 {
    match rows {
        ..=16 => 1,
        17..=32 => 2,
        _ => most,
    }
}

/// Returns the number of slices of `n` keys if each slice has `rows` blocks.
fn slices_of(n: i32, rows: i32) -> i32 {
    let most = n / TILE + i32::from(n % TILE != 0);
    (BLOCKS / rows.max(1)).min(most).clamp(1, MAX_SLICES)
}

/// Returns the number by which the kernel identifies the kind of `mask`, if it supports that kind.
fn kind_of(mask: &Mask, t: i32, n: i32) -> Option<u8> {
    match mask {
        Mask::None => Some(0),
        Mask::Causal => (t <= n).then_some(1),
        Mask::Explicit(mask) => {
            let shape = mask.shape();
            let (rest, [queries, keys]) = shape.split_last_chunk()?;
            let fits = [1, t].contains(queries) && [1, n].contains(keys);
            let shared = rest.len() <= 2 && rest.iter().all(|&n| n == 1);
            (fits && shared && mask.dtype() == Dtype::Bool).then_some(2)
        }
    }
}

impl Template {
    fn is_supported(&self) -> bool {
        [self.k_dim, self.v_dim].iter().all(|dim| DIMS.contains(dim) && dim % 16 == 0)
            && self.memory().is_some_and(|(_, bytes)| bytes <= MAX_SHARED)
    }

    /// In float32 a block also keeps its queries in shared memory, so it has fewer warps.
    fn max_row_warps(&self) -> i32 {
        if self.dtype == Dtype::Float32 {
            2
        } else {
            4
        }
    }

    /// Returns the number of tiles that a block keeps in shared memory, and the bytes of that memory.
    fn memory(&self) -> Option<(i32, i32)> {
        let (_, size) = element(self.dtype)?;
        let pad = 16 / size;
        let tile = TILE * (self.k_dim + self.v_dim + 2 * pad) * size;
        let queries = match self.dtype {
            Dtype::Float32 => ROWS * self.max_row_warps() * (self.k_dim + pad) * size,
            _ => 0,
        };
        let tiles = if 2 * tile + queries <= MAX_SHARED { 2 } else { 1 };
        // The tiles' memory is reused, first for the sums and weights of all warps, and then for the sums and weights
        // of the slices that are merged.
        let sums = 4 * ROWS * (self.v_dim + 8 + 2) * 4;
        let weights = (2 * MAX_MERGED + 1) * 4 * ROWS * 4;
        Some((tiles, (tiles * tile + queries).max(sums).max(weights)))
    }

    fn compile(&self) -> Result<Option<Kernel>> {
        let (Some((name, _)), Some((tiles, bytes))) = (element(self.dtype), self.memory()) else {
            return Ok(None);
        };
        let mut call = format!(
            "using Element = {name};\nconstexpr int DK = {}, DV = {}, MASK = {}, STAGES = {tiles}, \
             ROW_WARPS = {}, SCALE = {};\n",
            self.k_dim,
            self.v_dim,
            self.mask,
            self.max_row_warps(),
            self.scale as i32,
        );
        call.push_str(text::MLX_ATTENTION);
        let mut inputs = vec![c"q", c"k", c"v"];
        if self.mask == 2 {
            call.push_str(text::MLX_ATTENTION_MASKED);
            inputs.push(c"mask");
        }
        call.push_str("work.run(out, partial, const_cast<unsigned*>(done));\n");
        inputs.push(c"done");
        let header = header(
            "attention",
            &[text::INSTRUCTIONS, text::ROWS, text::SLICE, text::ATTENTION].concat(),
        )?;
        let outputs = [c"out", c"partial"];
        Kernel::new(c"etkv_attention", &inputs, &outputs, &source(&call)?, &header, bytes).map(Some)
    }
}

impl Kernels {
    fn attend(&mut self, rows: [&Array; 3], mask: &Mask, call: &Call) -> Result<Option<Array>> {
        let counters = self.next_counters()?;
        match self.compiled.get(call.template, |template| compile_and_run(template, &counters)) {
            Some(kernel) => launch(kernel, rows, mask, &counters, call).map(Some),
            None => Ok(None),
        }
    }

    /// Returns the next counters. Counters are zero whenever no kernel of their call runs.
    fn next_counters(&mut self) -> Result<Array> {
        if self.counters.is_empty() {
            let all = Array::zeros::<u32>(&[CALLS, COUNTERS])?;
            let mut counters = Vec::new();
            for call in 0..CALLS {
                counters.push(slice_axis(&all, 0, call, call + 1, 1)?);
            }
            eval(&counters)?;
            self.counters = counters;
        }
        self.calls = (self.calls + 1) % self.counters.len();
        Ok(self.counters[self.calls].clone())
    }
}

/// Compiles a kernel and runs it over one key.
fn compile_and_run(template: &Template, counters: &Array) -> Result<Option<Kernel>> {
    let Some(kernel) = template.compile()? else {
        return Ok(None);
    };
    let rows =
        |dim: i32| Ok::<_, Error>(Array::ones::<f32>(&[1, 1, 1, dim])?.as_dtype(template.dtype)?);
    let [q, k, v] = [rows(template.k_dim)?, rows(template.k_dim)?, rows(template.v_dim)?];
    let mask = match template.mask {
        0 => Mask::None,
        1 => Mask::Causal,
        _ => Mask::Explicit(Array::ones::<bool>(&[1, 1])?),
    };
    if let Some(call) = Call::of(&q, &k, &v, &mask, f32::from_bits(template.scale)) {
        eval([&launch(&kernel, [&q, &k, &v], &mask, counters, &call)?])?;
    }
    Ok(Some(kernel))
}

fn launch(
    kernel: &Kernel,
    rows: [&Array; 3],
    mask: &Mask,
    counters: &Array,
    call: &Call,
) -> Result<Array> {
    let mut inputs: SmallVec<[&Array; 5]> = SmallVec::from_slice(&rows);
    if let Mask::Explicit(mask) = mask {
        inputs.push(mask);
    }
    inputs.push(counters);
    let [slices, heads, blocks] = call.grid;
    let between = [call.floats_between_blocks()];
    let by_token = kernel.launch(
        &inputs,
        &[(&call.out, call.template.dtype), (&between, Dtype::Float32)],
        [slices * THREADS, heads, blocks],
        THREADS,
    )?;
    Ok(by_token.transpose_axes(&[0, 2, 1, 3])?)
}
