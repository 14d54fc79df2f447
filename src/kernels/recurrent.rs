//! Kernels of recurrent layers on CUDA: a convolution in one launch, and the recurrence of a few tokens in another.
//! MLX's operations would need some thirty launches. See `recurrent.cuh` of `etkv_cuda`.

use std::ffi::CStr;
use std::fmt::Write;

use etkv_cuda::text;
use mlx_rs::{Array, Dtype};
use parking_lot::Mutex;

use super::by_text::TextKernels;
use super::{can_run, elements_of};
use crate::error::{Error, Result, Status};

/// The maximum number of tokens of a group, as in the kernel.
pub const MAX_GROUP_TOKENS: usize = 16;
/// The maximum number of rows before a group, as in the kernel.
pub const MAX_GROUP_ROWS: usize = 64;

/// The number of columns of a state that a block computes, and the number of warps of the block, as in the kernel.
const STATE_COLUMNS: i32 = 32;
const STATE_WARPS: i32 = 8;

const THREADS: i32 = 256;

/// The maximum size of a key. A thread holds a part of a state in registers.
const MAX_K_DIM: i32 = 256;

/// The maximum number of blocks of a launch along its second and third axes.
const MAX_BLOCKS: i32 = 65_535;

/// The maximum number of elements of a result. Threads are counted in 32 bits.
const MAX_ELEMENTS: i32 = i32::MAX - THREADS;

/// A convolution of the tokens of a step, with its inputs.
#[derive(Debug, Clone, Copy)]
pub struct Convolution<'a> {
    /// The columns of the tokens, `[1, channels, T]`.
    pub x: &'a Array,
    /// `[channels, width]`.
    pub weight: &'a Array,
    /// `[channels]`.
    pub bias: Option<&'a Array>,
    /// The columns in slots, float32 `[1, 1, L, channels]`.
    pub stored: Option<&'a Array>,
    /// The `width - 1` columns before each token, int32 `[T, width - 1]`. A number of at least 0 is a slot, -1 is a
    /// column of zeros, and `-2 - i` is token `i` of the step.
    pub before: &'a Array,
    /// Whether SiLU is applied to the sums.
    pub silu: bool,
    /// The dtype of the result.
    pub out_dtype: Dtype,
}

/// The inputs of a recurrence over groups of a few tokens. States in slots are float32, and each head has one decay.
#[derive(Debug, Clone, Copy)]
pub struct Scan<'a> {
    /// `[1, k_heads, T, k_dim]`.
    pub q: &'a Array,
    /// `[1, k_heads, T, k_dim]`.
    pub k: &'a Array,
    /// `[1, heads, T, v_dim]`.
    pub v: &'a Array,
    /// `[1, heads, T]`.
    pub g: &'a Array,
    /// `[1, heads, T]`, if the recurrence uses the delta rule.
    pub beta: Option<&'a Array>,
    /// The layer's buffers of slots.
    pub stored: Stored<'a>,
    /// The states that the step itself computed, `[1, heads, F, k_dim * v_dim]`.
    pub folds: Option<&'a Array>,
    /// The groups, int32, encoded as in the kernel.
    pub groups: &'a Array,
    /// The number of groups.
    pub n_groups: i32,
    /// The factor that multiplies the outputs.
    pub scale: f32,
    /// The dtype of the outputs.
    pub out_dtype: Dtype,
}

/// The buffers of a recurrent layer, which are indexed by slot.
#[derive(Debug, Clone, Copy)]
pub struct Stored<'a> {
    /// `[1, k_heads, L, k_dim]`.
    pub keys: Option<&'a Array>,
    /// `[1, heads, L, v_dim + 1]`.
    pub updates: Option<&'a Array>,
    /// `[1, heads, A, k_dim * v_dim]`.
    pub anchors: Option<&'a Array>,
}

/// The results of a [`Scan`] for each token of the step.
pub struct Scanned {
    /// `[1, heads, T, v_dim]`.
    pub out: Array,
    /// Float32 `[1, k_heads, T, k_dim]`.
    pub keys: Array,
    /// Float32 `[1, heads, T, v_dim + 1]`.
    pub updates: Array,
}

static KERNELS: Mutex<TextKernels> = Mutex::new(TextKernels::new("recurrent", text::RECURRENT));

/// Launches the kernel of a text in blocks of [`THREADS`].
fn launch(
    name: &CStr,
    call: String,
    inputs: &[(&CStr, Option<&Array>)],
    outputs: &[(&CStr, &[i32], Dtype)],
    [x, y, z]: [i32; 3],
) -> Result<Option<Vec<Array>>> {
    KERNELS.lock().launch(name, call, inputs, outputs, [x * THREADS, y, z], THREADS)
}

/// Computes a convolution. Returns the outputs, `[1, channels, T]`, and the columns of the tokens in float32, `[1, 1,
/// T, channels]`. Returns `None` if the kernel does not support the call.
pub fn convolve(call: &Convolution) -> Result<Option<(Array, Array)>> {
    let (channels, tokens) = (call.x.dim(1), call.x.dim(2));
    let Some(elements) = channels.checked_mul(tokens).filter(|&n| n <= MAX_ELEMENTS) else {
        return Ok(None);
    };
    let bias_dtype = call.bias.map_or(Dtype::Float32, Array::dtype);
    let Some(types) =
        elements_of([call.x.dtype(), call.weight.dtype(), bias_dtype, call.out_dtype])
    else {
        return Ok(None);
    };
    if !can_run()? {
        return Ok(None);
    }
    let [x, weight, bias, out] = types;
    let (has_bias, silu) = (call.bias.is_some(), call.silu);
    let text = format!(
        "etkv::Convolution<{x}, {weight}, {bias}, {out}, {has_bias}, {silu}> work;\n\
         work.x = {{x, 0, x_strides[1], x_strides[2]}};\n\
         work.weight = {{weight, 0, weight_strides[0], weight_strides[1]}};\n\
         work.bias = bias; work.bias_step = bias_strides[0];\n\
         work.stored = {{stored, 0, stored_strides[2], stored_strides[3]}};\n\
         work.before = before;\n\
         work.channels = x_shape[1]; work.tokens = x_shape[2]; work.width = weight_shape[1];\n\
         work.run(out, columns);\n"
    );
    let inputs = [
        (c"x", Some(call.x)),
        (c"weight", Some(call.weight)),
        (c"bias", call.bias),
        (c"stored", call.stored),
        (c"before", Some(call.before)),
    ];
    let shape = [1, tokens, channels];
    let rows = [1, 1, tokens, channels];
    let outputs = [(c"out", &shape[..], call.out_dtype), (c"columns", &rows[..], Dtype::Float32)];
    let blocks = [(elements + THREADS - 1) / THREADS, 1, 1];
    match launch(c"etkv_convolve", text, &inputs, &outputs, blocks)?.as_deref() {
        Some([out, columns]) => Ok(Some((out.transpose_axes(&[0, 2, 1])?, columns.clone()))),
        _ => Ok(None),
    }
}

/// Returns whether the kernels support a recurrence of these sizes.
pub fn takes(k_dim: i32, v_dim: i32, heads: i32) -> Result<bool> {
    let fits = k_dim % STATE_WARPS == 0 && (STATE_WARPS..=MAX_K_DIM).contains(&k_dim);
    Ok(fits && k_dim.checked_mul(v_dim).is_some() && heads <= MAX_BLOCKS && can_run()?)
}

/// Computes a recurrence whose sizes [`takes`] accepts. Returns `None` if the kernel does not support the dtypes.
pub fn scan(call: &Scan) -> Result<Option<Scanned>> {
    let (k_heads, tokens, k_dim) = (call.k.dim(1), call.k.dim(2), call.k.dim(3));
    let (heads, v_dim) = (call.v.dim(1), call.v.dim(3));
    let beta_dtype = call.beta.map_or(Dtype::Float32, Array::dtype);
    let dtypes = [call.q.dtype(), call.k.dtype(), call.v.dtype(), call.g.dtype(), beta_dtype];
    let (Some([q, k, v, g, beta]), Some([out])) =
        (elements_of(dtypes), elements_of([call.out_dtype]))
    else {
        return Ok(None);
    };
    if call.n_groups > MAX_BLOCKS {
        return Ok(None);
    }
    let (delta, scale) = (call.beta.is_some(), call.scale.to_bits() as i32);
    let mut text =
        format!("etkv::Scan<{k_dim}, {delta}, {q}, {k}, {v}, {g}, {beta}, {out}> work;\n");
    for rows in ["q", "k", "v", "keys", "updates", "anchors", "folds"] {
        add_rows(&mut text, rows)?;
    }
    for vector in ["g", "beta"] {
        add(
            &mut text,
            format_args!(
                "work.{vector} = {{{vector}, {vector}_strides[1], {vector}_strides[2], 0}};\n"
            ),
        )?;
    }
    add(
        &mut text,
        format_args!(
            "work.plan = plan;\n\
             work.share = v_shape[1] / k_shape[1]; work.v_dim = v_shape[3]; work.tokens = v_shape[2];\n\
             work.scale = __int_as_float({scale});\n\
             work.run(out, new_keys, new_updates);\n"
        ),
    )?;
    let inputs = [
        (c"q", Some(call.q)),
        (c"k", Some(call.k)),
        (c"v", Some(call.v)),
        (c"g", Some(call.g)),
        (c"beta", call.beta),
        (c"keys", call.stored.keys),
        (c"updates", call.stored.updates),
        (c"anchors", call.stored.anchors),
        (c"folds", call.folds),
        (c"plan", Some(call.groups)),
    ];
    let shapes =
        [[1, tokens, heads, v_dim], [1, k_heads, tokens, k_dim], [1, heads, tokens, v_dim + 1]];
    let outputs = [
        (c"out", &shapes[0][..], call.out_dtype),
        (c"new_keys", &shapes[1][..], Dtype::Float32),
        (c"new_updates", &shapes[2][..], Dtype::Float32),
    ];
    let blocks = [(v_dim + STATE_COLUMNS - 1) / STATE_COLUMNS, heads, call.n_groups];
    match launch(c"etkv_scan", text, &inputs, &outputs, blocks)?.as_deref() {
        Some([out, keys, updates]) => Ok(Some(Scanned {
            out: out.transpose_axes(&[0, 2, 1, 3])?,
            keys: keys.clone(),
            updates: updates.clone(),
        })),
        _ => Ok(None),
    }
}

/// Returns the states after blocks of rows, `[1, heads, F, k_dim * v_dim]`. For each of `n` blocks, `blocks` has the
/// slot of the state before the block, or -1 for zeros, and the slots of the block's 64 rows.
pub fn fold(
    stored: &Stored,
    k_dim: i32,
    v_dim: i32,
    blocks: &Array,
    n: i32,
) -> Result<Option<Array>> {
    let (Some(keys), Some(updates)) = (stored.keys, stored.updates) else {
        return Ok(None);
    };
    if n > MAX_BLOCKS {
        return Ok(None);
    }
    let mut text = format!("etkv::Fold<{k_dim}> work;\n");
    for rows in ["keys", "updates", "anchors"] {
        add_rows(&mut text, rows)?;
    }
    add(
        &mut text,
        format_args!(
            "work.plan = plan;\n\
             work.share = updates_shape[1] / keys_shape[1]; work.v_dim = updates_shape[3] - 1;\n\
             work.run(out);\n"
        ),
    )?;
    let inputs = [
        (c"keys", Some(keys)),
        (c"updates", Some(updates)),
        (c"anchors", stored.anchors),
        (c"plan", Some(blocks)),
    ];
    let heads = updates.dim(1);
    let shape = [1, heads, n, k_dim * v_dim];
    let outputs = [(c"out", &shape[..], Dtype::Float32)];
    let grid = [(v_dim + STATE_COLUMNS - 1) / STATE_COLUMNS, heads, n];
    let made = launch(c"etkv_fold", text, &inputs, &outputs, grid)?;
    Ok(made.and_then(|made| made.into_iter().next()))
}

/// Appends the assignment of an array `[1, heads, rows, columns]` to `text`.
fn add_rows(text: &mut String, name: &str) -> Result<()> {
    add(
        text,
        format_args!(
            "work.{name} = {{{name}, {name}_strides[1], {name}_strides[2], {name}_strides[3]}};\n"
        ),
    )
}

fn add(text: &mut String, line: std::fmt::Arguments) -> Result<()> {
    text.write_fmt(line)
        .map_err(|_| Error::new(Status::Internal, "cannot write the text of a kernel"))
}
