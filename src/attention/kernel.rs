//! Attention of a few queries in one launch on CUDA, where MLX has a plan for each pair of lengths or
//! ten launches a layer. Everywhere else, and for what the kernel does not take, there is no result
//! and MLX computes it.
//!
//! A launch costs the host 6 to 10 µs, which is most of the time of a step of a few tokens. So the
//! kernel does not leave the merging of slices to a second one: its blocks count themselves, and the
//! last merges. See `kernels/few_queries.cuh`.

use std::collections::HashMap;
use std::ffi::CString;

use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};
use parking_lot::Mutex;
use smallvec::SmallVec;
use tracing::warn;

use super::Mask;
use crate::error::{Error, Result, Status};
use crate::mlx::{self, slice_axis};

mod raw;
#[cfg(test)]
mod tests;

use raw::Kernel;

/// The most queries of a call. One query has MLX's own kernel; for many, products of matrices are
/// faster.
pub const MOST_QUERIES: i32 = 64;

/// The most queries of one sequence, such as tokens to verify. For more, the steps of a prompt, MLX's
/// attention is fast enough, and needs no kernel that each process compiles.
const MOST_OF_ONE: i32 = 16;

/// The dimensions of a row that the kernel takes, in multiples of 16.
const DIMS: std::ops::RangeInclusive<i32> = 32..=256;

/// Keys that a block reads at a time, rows of a warp, and threads of a block: as in the kernel.
const TILE: i32 = 64;
const ROWS: i32 = 16;
const THREADS: i32 = 128;

/// Blocks that keep a large GPU busy: four on each multiprocessor of an H100.
const BLOCKS: i32 = 528;

/// The most slices of the keys. The last block reads what each has left.
const MOST_SLICES: i32 = 64;

/// The fewest tiles of a slice.
const FEWEST_TILES: i32 = 1;

/// Shared memory that every GPU since Ampere has.
const MOST_SHARED: i32 = 96 << 10;

/// Kernels that a process compiles, in 1 to 3 s each. A program has one or two; one with a scale
/// for each layer would never end.
const MOST_KERNELS: usize = 64;

/// Slices that are merged at once, as in the kernel.
const MOST_MERGED: i32 = 16;

/// Counters of a call, and the calls that have counters of their own. Rows of blocks need one, or 9
/// where there are more slices than are merged at once; many rows of blocks have few slices. The
/// kernels of calls that are further apart never run at a time: MLX's graphs have 100 operations or
/// fewer.
const COUNTERS: i32 = 600;
const CALLS: i32 = 512;

/// What is compiled into a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Template {
    dtype: Dtype,
    k_dim: i32,
    v_dim: i32,
    mask: u8,
    scale: u32,
}

/// A template's kernel, or `None` if it cannot be compiled.
type Compiled = HashMap<Template, Option<Kernel>>;

/// The kernels of this process, and the counters of its calls. Used under the lock of MLX only.
#[derive(Default)]
struct Kernels {
    compiled: Compiled,
    counters: Vec<Array>,
    calls: usize,
}

static KERNELS: Mutex<Option<Kernels>> = Mutex::new(None);

/// Returns the attention of `q` over `k` and `v`, in the dtype of `q`, if the kernel takes it.
///
/// Keys and values may be views of any strides. A query that sees nothing gets the mean of all
/// values, as with MLX's composed attention; a query of our caches sees at least its own key.
pub fn few_queries(
    q: &Array,
    k: &Array,
    v: &Array,
    mask: &Mask,
    scale: f32,
) -> Result<Option<Array>> {
    let most = match mask {
        Mask::Explicit(_) => MOST_QUERIES,
        Mask::None | Mask::Causal => MOST_OF_ONE,
    };
    if q.ndim() != 4 || !(2..=most).contains(&q.dim(2)) {
        return Ok(None);
    }
    attend(q, k, v, mask, scale)
}

/// [`few_queries`] for one query, too.
pub fn attend(q: &Array, k: &Array, v: &Array, mask: &Mask, scale: f32) -> Result<Option<Array>> {
    if cfg!(target_os = "macos") || !mlx::on_gpu()? {
        return Ok(None);
    }
    let Some(call) = Call::of(q, k, v, mask, scale) else {
        return Ok(None);
    };
    // A host may run a program on a CPU's stream all the same.
    if !mlx::is_stream_on_gpu()? {
        return Ok(None);
    }
    let mut kernels = KERNELS.lock();
    kernels.get_or_insert_default().attend([q, k, v], mask, &call)
}

/// A call that the kernel takes.
struct Call {
    template: Template,
    /// Blocks along keys, KV heads, and rows.
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
            && (1..=MOST_QUERIES).contains(&t)
            && n > 0
            && (heads / kv_heads) <= i32::MAX / MOST_QUERIES;
        if !fits || !template.is_supported() {
            return None;
        }
        let row_warps = row_warps(heads / kv_heads * t, template.most_row_warps());
        let rows_of_block = ROWS * row_warps;
        let blocks_of_rows = (heads / kv_heads * t + rows_of_block - 1) / rows_of_block;
        let slices = slices_of(n, kv_heads.checked_mul(blocks_of_rows)?);
        // MLX counts threads.
        slices.checked_mul(kv_heads)?.checked_mul(blocks_of_rows)?.checked_mul(THREADS)?;
        Some(Self {
            template,
            grid: [slices, kv_heads, blocks_of_rows],
            rows_of_block,
            out: [1, heads, t, v_dim],
        })
    }

    /// Returns the floats in which the blocks leave their sums, their weights and their largest
    /// scores.
    fn floats_between_blocks(&self) -> i32 {
        let [slices, heads, blocks] = self.grid;
        match slices {
            1 => 1,
            // At most 64 slices of 64 rows in 528 blocks.
            _ => slices * heads * blocks * self.rows_of_block * (self.template.v_dim + 2),
        }
    }
}

/// Returns the warps of a block that have rows of their own.
fn row_warps(rows: i32, most: i32) -> i32 {
    match rows {
        ..=16 => 1,
        17..=32 => 2,
        _ => most,
    }
}

/// Returns into how many slices `n` keys are divided where `rows` blocks read each.
fn slices_of(n: i32, rows: i32) -> i32 {
    let most = (n / TILE + i32::from(n % TILE != 0)) / FEWEST_TILES;
    (BLOCKS / rows.max(1)).min(most).clamp(1, MOST_SLICES)
}

/// Returns the kernel's number for a mask that it takes.
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
    fn element(&self) -> Option<(&'static str, i32)> {
        match self.dtype {
            Dtype::Float16 => Some(("__half", 2)),
            Dtype::Bfloat16 => Some(("__nv_bfloat16", 2)),
            Dtype::Float32 => Some(("float", 4)),
            _ => None,
        }
    }

    fn is_supported(&self) -> bool {
        [self.k_dim, self.v_dim].iter().all(|dim| DIMS.contains(dim) && dim % 16 == 0)
            && self.memory().is_some_and(|(_, bytes)| bytes <= MOST_SHARED)
    }

    /// In float32 the queries take shared memory too, so there are fewer.
    fn most_row_warps(&self) -> i32 {
        if self.dtype == Dtype::Float32 {
            2
        } else {
            4
        }
    }

    /// Returns the tiles that a block holds at a time, and its bytes of shared memory.
    fn memory(&self) -> Option<(i32, i32)> {
        let (_, size) = self.element()?;
        let pad = 16 / size;
        let tile = TILE * (self.k_dim + self.v_dim + 2 * pad) * size;
        let queries = match self.dtype {
            Dtype::Float32 => ROWS * self.most_row_warps() * (self.k_dim + pad) * size,
            _ => 0,
        };
        let tiles = if 2 * tile + queries <= MOST_SHARED { 2 } else { 1 };
        // The same memory takes the sums of all warps with their weights, and then those of the
        // slices that are merged.
        let sums = 4 * ROWS * (self.v_dim + 8 + 2) * 4;
        let weights = (2 * MOST_MERGED + 1) * 4 * ROWS * 4;
        Some((tiles, (tiles * tile + queries).max(sums).max(weights)))
    }

    fn compile(&self) -> Result<Option<Kernel>> {
        let (Some((element, _)), Some((tiles, bytes))) = (self.element(), self.memory()) else {
            return Ok(None);
        };
        let mut source = format!(
            "using Element = {element};\nconstexpr int DK = {}, DV = {}, MASK = {}, STAGES = {tiles}, \
             ROW_WARPS = {}, SCALE = {};\n",
            self.k_dim,
            self.v_dim,
            self.mask,
            self.most_row_warps(),
            self.scale as i32,
        );
        source.push_str(&bare(include_str!("kernels/call.cuh")));
        let mut inputs = vec![c"q", c"k", c"v"];
        if self.mask == 2 {
            source.push_str(&bare(include_str!("kernels/call_marked.cuh")));
            inputs.push(c"mask");
        }
        source.push_str("work.run(out, partial, const_cast<unsigned*>(done));\n");
        inputs.push(c"done");
        let header = bare(concat!(
            include_str!("kernels/instructions.cuh"),
            include_str!("kernels/rows.cuh"),
            include_str!("kernels/slice.cuh"),
            include_str!("kernels/few_queries.cuh"),
        ));
        let text = |text: String| {
            CString::new(text).map_err(|_| Error::new(Status::Internal, "a zero byte in a kernel"))
        };
        let outputs = [c"out", c"partial"];
        Kernel::new(c"etkv_few_queries", &inputs, &outputs, &text(source)?, &text(header)?, bytes)
            .map(Some)
    }
}

/// Returns a kernel's text without comments and indentation: MLX copies and hashes it in each call.
fn bare(text: &str) -> String {
    text.lines()
        .map(|line| line.split("//").next().unwrap_or_default().trim())
        .filter(|line| !line.is_empty())
        .flat_map(|line| [line, "\n"])
        .collect()
}

impl Kernels {
    fn attend(&mut self, rows: [&Array; 3], mask: &Mask, call: &Call) -> Result<Option<Array>> {
        let counters = self.next_counters()?;
        if !self.compiled.contains_key(&call.template) {
            if self.compiled.len() >= MOST_KERNELS {
                return Ok(None);
            }
            let kernel = match tried(&call.template, &counters) {
                Ok(kernel) => kernel,
                Err(error) => {
                    warn!(%error, "attention of several queries stays with MLX: no kernel");
                    None
                }
            };
            self.compiled.insert(call.template, kernel);
        }
        match self.compiled.get(&call.template) {
            Some(Some(kernel)) => launch(kernel, rows, mask, &counters, call).map(Some),
            _ => Ok(None),
        }
    }

    /// Returns counters that are zero whenever no kernel of their call runs.
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
fn tried(template: &Template, counters: &Array) -> Result<Option<Kernel>> {
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
    kernel.launch(
        &inputs,
        &[(&call.out, call.template.dtype), (&between, Dtype::Float32)],
        [slices * THREADS, heads, blocks],
        THREADS,
    )
}
