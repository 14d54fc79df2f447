//! Attention: the op that reads and writes the cache, and MLX's function.

use mlx_rs::{Array, Dtype};

use super::calls::{decode, none, Arguments};
use super::{instruction, layer_id};
use crate::dtype::dtype_of;
use crate::error::{fail, Result};
use crate::fb;
use crate::ir::{Function, Instruction, Op, Value};
use crate::ops::frame::Frame;
use crate::ops::slots::Slots;
use etkv::mlx::{call, cast, slice_axis};
use etkv::{attend, Mask, Scoring};

pub fn update_and_attend(slots: &mut Slots, node: fb::UpdateAndAttendNode) -> Result<Instruction> {
    let (layer, scale) = constants("UpdateAndAttend", node.layer_id(), node.scale())?;
    let op = Op::UpdateAndAttend {
        q: slots.read(node.q())?,
        k: slots.read(node.k())?,
        v: slots.read(node.v())?,
        position: slots.read(node.position())?,
        layer,
        scale,
        softcap: None,
        sinks: None,
        out_dtype: node.out_dtype().map(dtype_of).transpose()?,
        last_query: false,
    };
    Ok(instruction(op, slots.write(node.out())?))
}

pub fn update_and_attend_sinks(
    slots: &mut Slots,
    node: fb::UpdateAndAttendSinksNode,
) -> Result<Instruction> {
    let name = "UpdateAndAttendSinks";
    let (layer, scale) = constants(name, node.layer_id(), node.scale())?;
    let softcap = node.softcap();
    if let Err(error) = (Scoring { softcap, ..scale.into() }).check() {
        fail!(Program, "{name} of layer {layer}: {}", error.message());
    }
    let op = Op::UpdateAndAttend {
        q: slots.read(node.q())?,
        k: slots.read(node.k())?,
        v: slots.read(node.v())?,
        position: slots.read(node.position())?,
        layer,
        scale,
        softcap,
        sinks: slots.read_optional(node.sinks())?,
        out_dtype: node.out_dtype().map(dtype_of).transpose()?,
        last_query: false,
    };
    Ok(instruction(op, slots.write(node.out())?))
}

/// Returns the layer and the scale.
fn constants(name: &str, layer: Option<i32>, scale: Option<f32>) -> Result<(usize, f32)> {
    let layer = layer_id(name, layer)?;
    let Some(scale) = scale else {
        fail!(Program, "expected a scale of {name} of layer {layer}, got none");
    };
    Ok((layer, scale))
}

pub fn sdpa(slots: &mut Slots, node: fb::SdpaNode) -> Result<Instruction> {
    let mask = node.mask();
    let function = Function::Sdpa {
        scale: node.scale(),
        causal: node.causal(),
        mask: mask.is_some(),
        last_query: false,
    };
    let tensors: Vec<_> =
        [Some(node.q()), Some(node.k()), Some(node.v()), mask].into_iter().flatten().collect();
    decode(slots, function, &tensors, Vec::new(), node.out())
}

/// Runs MLX's attention of `q`, `[B, n_heads, T, head_dim]`. With `last_query` only the last query is computed: `[B,
/// n_heads, 1, head_dim]`.
pub fn run_sdpa(
    arguments: &Arguments,
    scale: f32,
    [mut causal, mask]: [bool; 2],
    last_query: bool,
) -> Result<Array> {
    let [q, k, v] = [0, 1, 2].map(|index| arguments.tensor(index));
    let (q, k, v) = (q?, k?, v?);
    if causal && mask {
        fail!(Program, "expected causal attention or a mask, got both");
    }
    let mask = match mask {
        true => Some(arguments.tensor(3)?),
        false => None,
    };
    // A boolean mask is used as it is. An additive mask is converted to the dtype of the queries.
    let mask = mask.map(|mask| match mask.dtype() {
        Dtype::Bool => Ok(mask.clone()),
        _ => cast(mask, q.dtype()),
    });
    let mut mask = mask.transpose()?;
    let last;
    let q = if last_query {
        last = last_of(q, arguments.int(0)?)?;
        // The last query sees every key.
        causal = false;
        mask = mask.map(|mask| last_row_of_mask(mask, q.dim(TOKENS as i32))).transpose()?;
        &last
    } else {
        q
    };
    let handle = mask.as_ref().map_or(none(), Array::as_ptr);
    let mode = if causal { c"causal" } else { c"" };
    let (q, k, v) = (q.as_ptr(), k.as_ptr(), v.as_ptr());
    // SAFETY: the arrays are live, or empty handles.
    call(|made, stream| unsafe {
        mlx_sys::mlx_fast_scaled_dot_product_attention(
            made,
            q,
            k,
            v,
            scale,
            mode.as_ptr(),
            handle,
            none(),
            false,
            stream,
        )
    })
}

/// The axis of tokens in `[1, heads, T, head_dim]`.
const TOKENS: usize = 2;

/// Returns the last query of a step of `n` tokens.
fn last_of(q: &Array, n: i32) -> Result<Array> {
    // If queries broadcast or have another number of tokens, their last row does not belong to the last token.
    if n < 1 || q.ndim() != 4 || q.dim(TOKENS as i32) != n {
        fail!(
            Program,
            "cannot select the last query: queries have shape {:?}, in a step of {n} tokens",
            q.shape()
        );
    }
    slice_axis(q, TOKENS, n - 1, n, 1)
}

/// Returns the row of a mask `[..., T, L]` for the last of `n` queries. A mask with fewer axes, or with one row,
/// applies to every query.
fn last_row_of_mask(mask: Array, n: i32) -> Result<Array> {
    match mask.ndim().checked_sub(2) {
        Some(queries) if mask.dim(queries as i32) == n => slice_axis(&mask, queries, n - 1, n, 1),
        _ => Ok(mask),
    }
}

/// The constants of one call of the op.
pub struct Call {
    pub layer: usize,
    pub scale: f32,
    pub softcap: Option<f32>,
    pub sinks: Option<Value>,
    pub out_dtype: Option<Dtype>,
    pub last_query: bool,
}

/// Runs the op. `q` is `[1, n_heads, T, head_dim]`; `k` and `v` have the cache's number of heads.
pub fn run_update_and_attend(
    frame: &mut Frame,
    [q, k, v]: [Value; 3],
    position: Value,
    call: Call,
) -> Result<Array> {
    frame.begin_step(position)?;
    let n_tokens = frame.tensor(k)?.shape().get(TOKENS).copied();
    let queries = frame.tensor(q)?.shape();
    if queries.len() != 4 || queries.get(TOKENS).copied() != n_tokens {
        fail!(Shape, "expected queries of {n_tokens:?} tokens, as many as keys, got {queries:?}");
    }
    let mut spec = frame.update_and_fetch(call.layer, k, v)?;
    let q = frame.tensor(q)?;
    let sinks = frame.optional(call.sinks)?;
    let scoring = Scoring { scale: call.scale, softcap: call.softcap, sinks };
    if !call.last_query {
        return attend(q, &spec, scoring, call.out_dtype);
    }
    let n = q.dim(TOKENS as i32);
    let q = slice_axis(q, TOKENS, n - 1, n, 1)?;
    spec.mask = match spec.mask {
        // The last query sees everything.
        Mask::None | Mask::Causal => Mask::None,
        Mask::Explicit(mask) => Mask::Explicit(last_row_of_mask(mask, n)?),
    };
    attend(&q, &spec, scoring, call.out_dtype)
}
