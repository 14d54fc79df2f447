//! Recurrent layers: the ops that read and write the cache.

use etkv::recurrent::{convolve, scan, Activation, ConvolveInputs, RecurrentRows, ScanInputs};
use etkv_core::RecurrentLayer;
use mlx_rs::Array;
use smallvec::{smallvec, SmallVec};

use super::{instruction, layer_id};
use crate::dtype::dtype_of;
use crate::error::{fail, Result};
use crate::fb;
use crate::ir::{Instruction, Op, RecurrentCall, RecurrentFunction};
use crate::ops::frame::Frame;
use crate::ops::fused_scan::FusedScan;
use crate::ops::slots::Slots;

pub fn update_and_convolve(
    slots: &mut Slots,
    node: fb::UpdateAndConvolveNode,
) -> Result<Instruction> {
    let name = "UpdateAndConvolve";
    let layer = layer_id(name, node.layer_id())?;
    let activation = match node.activation() {
        "silu" => Activation::Silu,
        "none" => Activation::None,
        other => fail!(Unsupported, "unknown activation `{other}` of {name} of layer {layer}"),
    };
    let [channels, width] =
        sizes(name, layer, [("channels", node.channels()), ("width", node.width())])?;
    let mut tensors = smallvec![slots.read(node.x())?, slots.read(node.weight())?];
    if let Some(bias) = node.bias() {
        tensors.push(slots.read(bias)?);
    }
    let call = RecurrentCall {
        layer,
        config: RecurrentLayer::Convolution { channels, width },
        function: RecurrentFunction::Convolve { activation },
        tensors,
        position: slots.read(node.position())?,
        out_dtype: node.out_dtype().map(dtype_of).transpose()?,
    };
    finish(call, slots, node.out())
}

pub fn update_and_scan(slots: &mut Slots, node: fb::UpdateAndScanNode) -> Result<Instruction> {
    let name = "UpdateAndScan";
    let layer = layer_id(name, node.layer_id())?;
    let Some(scale) = node.scale() else {
        fail!(Program, "expected a scale of {name} of layer {layer}, got none");
    };
    let sizes_of = [
        ("k_heads", node.k_heads()),
        ("heads", node.heads()),
        ("k_dim", node.k_dim()),
        ("v_dim", node.v_dim()),
    ];
    let [k_heads, heads, k_dim, v_dim] = sizes(name, layer, sizes_of)?;
    let channel_decay = node.channel_decay();
    let mut tensors = SmallVec::new();
    for operand in [node.q(), node.k(), node.v(), node.g()].into_iter().chain(node.beta()) {
        tensors.push(slots.read(operand)?);
    }
    let call = RecurrentCall {
        layer,
        config: RecurrentLayer::Recurrence { k_heads, heads, k_dim, v_dim, channel_decay },
        function: RecurrentFunction::Scan { scale },
        tensors,
        position: slots.read(node.position())?,
        out_dtype: node.out_dtype().map(dtype_of).transpose()?,
    };
    finish(call, slots, node.out())
}

fn finish(call: RecurrentCall, slots: &mut Slots, out: &fb::Tid) -> Result<Instruction> {
    let place = || format!("{} of layer {}", call.kind(), call.layer);
    if let Err(error) = call.config.validate() {
        fail!(Program, "{}: {}", place(), error.message());
    }
    Ok(instruction(Op::UpdateRecurrent(Box::new(call)), slots.write(out)?))
}

fn sizes<const N: usize>(
    name: &str,
    layer: usize,
    fields: [(&str, Option<i32>); N],
) -> Result<[i32; N]> {
    let mut sizes = [0; N];
    for (size, (field, value)) in sizes.iter_mut().zip(fields) {
        match value {
            Some(value) => *size = value,
            None => fail!(Program, "expected a {field} of {name} of layer {layer}, got none"),
        }
    }
    Ok(sizes)
}

/// Runs the op: reads and writes the layer of the cache, and returns the outputs.
pub fn run(frame: &mut Frame, call: &RecurrentCall) -> Result<Array> {
    frame.begin_step(call.position)?;
    let operands = call
        .tensors
        .iter()
        .map(|&value| frame.tensor(value).cloned())
        .collect::<Result<SmallVec<[Array; 12]>>>()?;
    let mut made = None;
    let mut keep = |(out, rows): (Array, RecurrentRows)| {
        made = Some(out);
        rows
    };
    let dtype = call.out_dtype;
    match (&call.function, &operands[..]) {
        (RecurrentFunction::Convolve { activation }, [x, weight, bias @ ..]) => {
            check(call, [weight.shape().get(..2).unwrap_or_default(), &[]])?;
            let activation = *activation;
            let inputs = ConvolveInputs { x, weight, bias: bias.first(), activation };
            frame.update_recurrent(call.layer, &mut |spec| {
                Ok(keep(convolve(&inputs, spec, dtype)?))
            })?;
        }
        (RecurrentFunction::Scan { scale }, [q, k, v, g, beta @ ..]) => {
            check(call, [k.shape(), v.shape()])?;
            let inputs = ScanInputs { q, k, v, g, beta: beta.first() };
            frame.update_recurrent(call.layer, &mut |spec| {
                Ok(keep(scan(&inputs, *scale, spec, dtype)?))
            })?;
        }
        (RecurrentFunction::FusedScan { scale, rows, numbers }, tensors) => {
            let (config, scale, on_gpu) = (call.config, *scale, frame.on_gpu());
            let fused =
                FusedScan { config, scale, rows, numbers, tensors, out_dtype: dtype, on_gpu };
            frame.update_recurrent(call.layer, &mut |spec| Ok(keep(fused.run(spec)?)))?;
        }
        _ => fail!(Internal, "cannot run a {} with {} operands", call.kind(), operands.len()),
    }
    match made {
        Some(out) => Ok(out),
        None => fail!(Internal, "the cache cannot compute a {}", call.kind()),
    }
}

/// Checks that operands have the sizes that the program declares: the shape of a convolution's weight, or the shapes
/// of a recurrence's keys and values.
fn check(call: &RecurrentCall, shapes: [&[i32]; 2]) -> Result<()> {
    let fits = match (call.config, shapes) {
        (RecurrentLayer::Convolution { channels, width }, [weight, _]) => {
            weight == [channels, width]
        }
        (RecurrentLayer::Recurrence { k_heads, heads, k_dim, v_dim, .. }, [k, v]) => {
            matches!(k, &[_, n, _, dim] if [n, dim] == [k_heads, k_dim])
                && matches!(v, &[_, n, _, dim] if [n, dim] == [heads, v_dim])
        }
    };
    if !fits {
        let (kind, layer) = (call.kind(), call.layer);
        fail!(Shape, "expected {kind} of layer {layer} to be {}, got {shapes:?}", call.config);
    }
    Ok(())
}
