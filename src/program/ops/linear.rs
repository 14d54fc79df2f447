//! Matrix products, float and quantized.

use mlx_rs::ops::{addmm as mlx_addmm, matmul};
use mlx_rs::{Array, Dtype};

use super::instruction;
use crate::error::{fail, Result};
use crate::mlx::{call, cast, or_empty};
use crate::program::decode::Decoder;
use crate::program::dtype::dtype_of;
use crate::program::fb;
use crate::program::interpreter::Frame;
use crate::program::ir::{Affine, Instruction, Op, Value};

pub fn addmm(decoder: &mut Decoder, node: fb::AddmmNode) -> Result<Instruction> {
    let op = Op::Addmm {
        mat1: decoder.read(node.mat1())?,
        mat2: decoder.read(node.mat2())?,
        bias: decoder.read_optional(node.bias())?,
        alpha: node.alpha(),
        beta: node.beta(),
    };
    Ok(instruction(op, decoder.write(node.out())?))
}

pub fn quantized_matmul(
    decoder: &mut Decoder,
    node: fb::QuantizedMatmulNode,
) -> Result<Instruction> {
    let biases = decoder.read_optional(node.biases())?;
    let packing = affine(node.mode(), node.group_size(), node.bits(), biases)?;
    let op = Op::QuantizedMatmul {
        x: decoder.read(node.x())?,
        w: decoder.read(node.w())?,
        scales: decoder.read(node.scales())?,
        biases,
        packing,
        transpose: node.transpose(),
    };
    Ok(instruction(op, decoder.write(node.out())?))
}

pub fn dequantize(decoder: &mut Decoder, node: fb::DequantizeNode) -> Result<Instruction> {
    let biases = decoder.read_optional(node.biases())?;
    let packing = affine(node.mode(), node.group_size(), node.bits(), biases)?;
    if node.global_scale().is_some() {
        fail!(Unsupported, "affine quantization with a scale for the whole tensor");
    }
    let op = Op::Dequantize {
        w: decoder.read(node.w())?,
        scales: decoder.read(node.scales())?,
        biases,
        packing,
        dtype: node.dtype().map(dtype_of).transpose()?,
    };
    Ok(instruction(op, decoder.write(node.out())?))
}

fn affine(mode: &str, group_size: i32, bits: i32, biases: Option<Value>) -> Result<Affine> {
    if mode != "affine" {
        fail!(Unsupported, "quantization of kind `{mode}`; this build has `affine`");
    }
    if biases.is_none() {
        fail!(Program, "affine quantization without biases");
    }
    Ok(Affine { group_size, bits })
}

pub fn run_addmm(
    frame: &Frame,
    [mat1, mat2]: [Value; 2],
    bias: Option<Value>,
    alpha: f32,
    beta: f32,
) -> Result<Array> {
    let (mat1, mat2) = (frame.tensor(mat1)?, frame.tensor(mat2)?);
    let bias = bias.map(|bias| frame.tensor(bias)).transpose()?;
    product(mat1, mat2, bias, alpha, beta)
}

/// `weight` is `[in, out]` if `transposed`, else `[out, in]`.
pub fn run_linear(
    frame: &Frame,
    x: Value,
    weight: Value,
    bias: Option<Value>,
    transposed: bool,
) -> Result<Array> {
    let (x, weight) = (frame.tensor(x)?, frame.tensor(weight)?);
    let bias = bias.map(|bias| frame.tensor(bias)).transpose()?;
    if transposed {
        product(x, weight, bias, 1.0, 1.0)
    } else {
        product(x, &weight.transpose_axes(&[1, 0])?, bias, 1.0, 1.0)
    }
}

fn product(
    mat1: &Array,
    mat2: &Array,
    bias: Option<&Array>,
    alpha: f32,
    beta: f32,
) -> Result<Array> {
    Ok(match bias {
        // The weight of a bias that is not there does not count, nor does alpha:
        // the exporter leaves both at 1.
        None => matmul(mat1, mat2)?,
        Some(bias) => mlx_addmm(bias, mat1, mat2, alpha, beta)?,
    })
}

pub fn run_quantized_matmul(
    frame: &Frame,
    x: Value,
    w: Value,
    [scales, biases]: [Option<Value>; 2],
    packing: Affine,
    transpose: bool,
) -> Result<Array> {
    let (x, w) = (frame.tensor(x)?, frame.tensor(w)?);
    let optional = |value: Option<Value>| value.map(|value| frame.tensor(value)).transpose();
    let (scales, biases) = (optional(scales)?, optional(biases)?);
    let dtype = x.dtype();
    // A pass may keep the scales in a wider dtype than the activations have.
    let wide = scales.map_or(dtype, Array::dtype);
    let x = cast(x, wide)?;
    // SAFETY: the handles outlive the call.
    let product = call(|made, stream| unsafe {
        mlx_sys::mlx_quantized_matmul(
            made,
            x.as_ptr(),
            w.as_ptr(),
            or_empty(scales),
            or_empty(biases),
            transpose,
            some(packing.group_size),
            some(packing.bits),
            c"affine".as_ptr(),
            stream,
        )
    })?;
    cast(&product, dtype)
}

pub fn run_dequantize(
    frame: &Frame,
    w: Value,
    scales: Value,
    biases: Option<Value>,
    packing: Affine,
    dtype: Option<Dtype>,
) -> Result<Array> {
    let (w, scales) = (frame.tensor(w)?, frame.tensor(scales)?);
    let biases = biases.map(|value| frame.tensor(value)).transpose()?;
    let values = mlx_rs::ops::dequantize(w, scales, biases, packing.group_size, packing.bits)?;
    match dtype {
        Some(dtype) => cast(&values, dtype),
        None => Ok(values),
    }
}

fn some(value: i32) -> mlx_sys::mlx_optional_int {
    mlx_sys::mlx_optional_int { value, has_value: true }
}
