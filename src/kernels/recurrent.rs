//! Kernels of recurrent layers on CUDA: a convolution in one launch, and the recurrence of a few tokens in another.
//! MLX's operations would need some thirty launches. See `recurrent.cuh` of `etkv_cuda`.

use std::ffi::CStr;

use etkv_cuda::text;
use mlx_rs::{Array, Dtype};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::by_text::{Template, TextKernels};
use super::{can_run, element, elements_of, Function};
use crate::error::Result;

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

/// A recurrence over groups of a few tokens. States in slots are float32, and each head has one decay.
#[derive(Debug, Clone, Copy)]
pub struct Scan<'a> {
    /// The number of tokens of the step, `T`.
    pub n_tokens: i32,
    /// The number of heads of keys.
    pub k_heads: i32,
    /// The number of heads, a multiple of `k_heads`.
    pub heads: i32,
    /// The number of elements of a key.
    pub k_dim: i32,
    /// The number of elements of a value.
    pub v_dim: i32,
    /// The operands.
    pub operands: Operands<'a>,
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

/// The operands of a recurrence.
#[derive(Debug, Clone, Copy)]
pub struct Operands<'a> {
    /// The queries and keys of the heads of keys, and the values of all heads.
    pub rows: [Rows<'a>; 3],
    /// The log decays, one for each head.
    pub decays: Numbers<'a>,
    /// The write strengths, if the recurrence uses the delta rule.
    pub strengths: Option<Numbers<'a>>,
}

/// A vector for each head of each token.
#[derive(Debug, Clone, Copy)]
pub enum Rows<'a> {
    /// `[1, heads, T, dim]`.
    Heads(&'a Array),
    /// Columns of `[1, T, columns]`: the vectors of all heads, one after the other, from column `start` on.
    Columns {
        /// The array.
        x: &'a Array,
        /// The first column.
        start: i32,
        /// The norm of each vector. The kernel does not normalize values.
        norm: Option<HeadNorm>,
    },
}

/// An RMS norm of the vector of a head, times a factor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeadNorm {
    /// Added to the mean square.
    pub eps: f32,
    /// Multiplies the normalized elements.
    pub factor: f32,
}

/// A number for each head of each token.
#[derive(Debug, Clone, Copy)]
pub enum Numbers<'a> {
    /// `[1, heads, T]`.
    Heads(&'a Array),
    /// A function of the token and the head, whose inputs are named `g0`, `g1`… for decays, and `b0`, `b1`… for write
    /// strengths. It reads the variables `token` and `head`.
    Function(&'a Function, &'a [&'a Array]),
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

static KERNELS: Mutex<TextKernels<RecurrentTemplate>> =
    Mutex::new(TextKernels::new("recurrent", &[text::ELEMENTWISE, text::RECURRENT]));

/// Launches a kernel in blocks of [`THREADS`].
fn launch(
    template: RecurrentTemplate,
    inputs: &[(&CStr, Option<&Array>)],
    outputs: &[(&CStr, &[i32], Dtype)],
    [x, y, z]: [i32; 3],
) -> Result<Option<Vec<Array>>> {
    KERNELS.lock().launch(template, inputs, outputs, [x * THREADS, y, z], THREADS)
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
    let template = RecurrentTemplate::Convolve {
        elements: types,
        has_bias: call.bias.is_some(),
        silu: call.silu,
    };
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
    match launch(template, &inputs, &outputs, blocks)?.as_deref() {
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
    let Scan { n_tokens, k_heads, heads, k_dim, v_dim, .. } = *call;
    if call.n_groups > MAX_BLOCKS {
        return Ok(None);
    }
    let Some(template) = ScanTemplate::of(call) else {
        return Ok(None);
    };
    let [q, k, v] = call.operands.rows.map(|rows| match rows {
        Rows::Heads(x) | Rows::Columns { x, .. } => Some(x),
    });
    let mut inputs: SmallVec<[(&CStr, Option<&Array>); 24]> = SmallVec::from_slice(&[
        (c"q", q),
        (c"k", k),
        (c"v", v),
        (c"keys", call.stored.keys),
        (c"updates", call.stored.updates),
        (c"anchors", call.stored.anchors),
        (c"folds", call.folds),
        (c"plan", Some(call.groups)),
    ]);
    for (names, numbers) in
        GATE_NAMES.iter().zip([Some(call.operands.decays), call.operands.strengths])
    {
        match numbers {
            Some(Numbers::Heads(x)) => inputs.push((names[0], Some(x))),
            Some(Numbers::Function(_, of)) => {
                inputs.extend(names.iter().zip(of).map(|(&name, &x)| (name, Some(x))));
            }
            None => {}
        }
    }
    let shapes = [
        [1, n_tokens, heads, v_dim],
        [1, k_heads, n_tokens, k_dim],
        [1, heads, n_tokens, v_dim + 1],
    ];
    let outputs = [
        (c"out", &shapes[0][..], call.out_dtype),
        (c"new_keys", &shapes[1][..], Dtype::Float32),
        (c"new_updates", &shapes[2][..], Dtype::Float32),
    ];
    let blocks = [(v_dim + STATE_COLUMNS - 1) / STATE_COLUMNS, heads, call.n_groups];
    let template = RecurrentTemplate::Scan(Box::new(template));
    match launch(template, &inputs, &outputs, blocks)?.as_deref() {
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
    let template = RecurrentTemplate::Fold { k_dim, share: heads / keys.dim(1), v_dim };
    let made = launch(template, &inputs, &outputs, grid)?;
    Ok(made.and_then(|made| made.into_iter().next()))
}

/// What the text of a kernel depends on.
#[derive(Debug, PartialEq, Eq, Hash)]
enum RecurrentTemplate {
    Convolve {
        /// The names of the dtypes of the columns, the weight, the bias and the result in CUDA.
        elements: [&'static str; 4],
        has_bias: bool,
        silu: bool,
    },
    Scan(Box<ScanTemplate>),
    Fold {
        k_dim: i32,
        share: i32,
        v_dim: i32,
    },
}

/// What the text of a scan depends on.
#[derive(Debug, PartialEq, Eq, Hash)]
struct ScanTemplate {
    k_dim: i32,
    share: i32,
    v_dim: i32,
    /// Queries, keys and values.
    rows: [RowsTemplate; 3],
    /// The names of their dtypes in CUDA.
    elements: [&'static str; 3],
    decays: NumbersTemplate,
    strengths: Option<NumbersTemplate>,
    /// The bits of the factor.
    scale: i32,
    /// The name of the dtype of the outputs in CUDA.
    out: &'static str,
}

#[derive(Debug, PartialEq, Eq, Hash)]
enum RowsTemplate {
    Heads,
    /// The first column, and the bits of the norm's numbers.
    Columns(i32, Option<[i32; 2]>),
}

/// How a kernel reads [`Numbers`], with the names of the dtypes of the inputs in CUDA.
#[derive(Debug, PartialEq, Eq, Hash)]
enum NumbersTemplate {
    Heads(&'static str),
    Function(Function, SmallVec<[&'static str; 4]>),
}

/// The names of the inputs of decays and write strengths.
const GATE_NAMES: [[&CStr; Function::MAX_INPUTS]; 2] = [
    [c"g0", c"g1", c"g2", c"g3", c"g4", c"g5", c"g6", c"g7"],
    [c"b0", c"b1", c"b2", c"b3", c"b4", c"b5", c"b6", c"b7"],
];

impl ScanTemplate {
    /// Returns `None` if the kernel does not support a dtype, or a norm of values.
    fn of(call: &Scan) -> Option<Self> {
        let name = |x: &Array| element(x.dtype()).map(|(name, _)| name);
        let rows = call.operands.rows.map(|rows| match rows {
            Rows::Heads(x) => (x, RowsTemplate::Heads),
            Rows::Columns { x, start, norm } => {
                let bits = |number: f32| number.to_bits() as i32;
                let norm = norm.map(|norm| [bits(norm.eps), bits(norm.factor)]);
                (x, RowsTemplate::Columns(start, norm))
            }
        });
        let [(q, _), (k, _), (v, values)] = &rows;
        if matches!(values, RowsTemplate::Columns(_, Some(_))) {
            return None;
        }
        let numbers = |numbers: Numbers| match numbers {
            Numbers::Heads(x) => name(x).map(NumbersTemplate::Heads),
            Numbers::Function(function, of) => {
                let names = of.iter().map(|x| name(x)).collect::<Option<SmallVec<_>>>()?;
                (of.len() <= Function::MAX_INPUTS)
                    .then(|| NumbersTemplate::Function(function.clone(), names))
            }
        };
        let strengths = match call.operands.strengths {
            Some(strengths) => Some(numbers(strengths)?),
            None => None,
        };
        Some(Self {
            k_dim: call.k_dim,
            share: call.heads / call.k_heads,
            v_dim: call.v_dim,
            elements: elements_of([q.dtype(), k.dtype(), v.dtype()])?,
            rows: rows.map(|(_, rows)| rows),
            decays: numbers(call.operands.decays)?,
            strengths,
            scale: call.scale.to_bits() as i32,
            out: element(call.out_dtype)?.0,
        })
    }

    fn text(&self) -> String {
        let Self { k_dim, share, v_dim, elements: [q, k, v], scale, out, .. } = self;
        let delta = self.strengths.is_some();
        let mut text = format!("etkv::Scan<{k_dim}, {delta}, {q}, {k}, {v}, {out}> work;\n");
        for rows in ["keys", "updates", "anchors", "folds"] {
            text += &head_rows(rows);
        }
        for ((name, rows), dim) in ["q", "k", "v"].iter().zip(&self.rows).zip([k_dim, k_dim, v_dim])
        {
            text += &match rows {
                RowsTemplate::Heads => head_rows(name),
                RowsTemplate::Columns(start, _) => format!(
                    "work.{name} = {{{name} + {start} * {name}_strides[2], {dim} * {name}_strides[2],\n\
                     {name}_strides[1], {name}_strides[2]}};\n"
                ),
            };
        }
        for (name, rows) in ["q", "k"].iter().zip(&self.rows) {
            let norm = match rows {
                RowsTemplate::Columns(_, norm) => norm,
                RowsTemplate::Heads => &None,
            };
            let ([eps, factor], is_on) = (norm.unwrap_or_default(), norm.is_some());
            text += &format!(
                "work.{name}_norm = {{{is_on}, __int_as_float({eps}), __int_as_float({factor})}};\n"
            );
        }
        for (name, numbers) in ["g", "b"].iter().zip([Some(&self.decays), self.strengths.as_ref()])
        {
            let body = match numbers {
                Some(NumbersTemplate::Function(function, _)) => function.body(),
                Some(NumbersTemplate::Heads(_)) => &format!(
                    "return static_cast<float>({name}0[head * {name}0_strides[1] + token * {name}0_strides[2]]);\n"
                ),
                None => "return 0.0f;\n",
            };
            text += &format!("auto {name}_at = [&](int head, int token) -> float {{\n{body}}};\n");
        }
        // The axis of the tokens in the array of the values.
        let axis = match self.rows[2] {
            RowsTemplate::Heads => 2,
            RowsTemplate::Columns(..) => 1,
        };
        text += &format!(
            "work.plan = plan; work.share = {share}; work.v_dim = {v_dim}; work.tokens = v_shape[{axis}];\n\
             work.scale = __int_as_float({scale});\n\
             work.run(g_at, b_at, out, new_keys, new_updates);\n"
        );
        text
    }
}

impl Template for RecurrentTemplate {
    fn name(&self) -> &'static CStr {
        match self {
            Self::Convolve { .. } => c"etkv_convolve",
            Self::Scan(_) => c"etkv_scan",
            Self::Fold { .. } => c"etkv_fold",
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Convolve { elements: [x, weight, bias, out], has_bias, silu } => format!(
                "etkv::Convolution<{x}, {weight}, {bias}, {out}, {has_bias}, {silu}> work;\n\
                 work.x = {{x, 0, x_strides[1], x_strides[2]}};\n\
                 work.weight = {{weight, 0, weight_strides[0], weight_strides[1]}};\n\
                 work.bias = bias; work.bias_step = bias_strides[0];\n\
                 work.stored = {{stored, 0, stored_strides[2], stored_strides[3]}};\n\
                 work.before = before;\n\
                 work.channels = x_shape[1]; work.tokens = x_shape[2]; work.width = weight_shape[1];\n\
                 work.run(out, columns);\n"
            ),
            Self::Scan(scan) => scan.text(),
            Self::Fold { k_dim, share, v_dim } => {
                let mut text = format!("etkv::Fold<{k_dim}> work;\n");
                for rows in ["keys", "updates", "anchors"] {
                    text += &head_rows(rows);
                }
                text += &format!(
                    "work.plan = plan; work.share = {share}; work.v_dim = {v_dim};\nwork.run(out);\n"
                );
                text
            }
        }
    }
}

/// Returns the CUDA statement that passes an array `[1, heads, rows, columns]` and its strides to the field `name` of
/// `work`.
fn head_rows(name: &str) -> String {
    format!("work.{name} = {{{name}, {name}_strides[1], {name}_strides[2], {name}_strides[3]}};\n")
}
