//! Products with weights of a few bits, and rows of such weights.

use mlx_rs::ops::matmul;
use mlx_rs::{Array, Dtype};

use super::calls::decode;
use super::instruction;
use super::many_rows;
use super::packed::packing;
use super::shape::Sizes;
use super::weights::Weights;
use crate::dtype::dtype_of;
use crate::error::{fail, Result};
use crate::fb;
use crate::ir::{Affine, Function, Instruction, Op, PackingMode, Value};
use crate::ops::frame::Frame;
use crate::ops::slots::Slots;
use etkv::mlx::{self, cast};

pub fn quantized_matmul(slots: &mut Slots, node: fb::QuantizedMatmulNode) -> Result<Instruction> {
    let packing = packing(node.mode(), node.group_size(), node.bits(), node.biases().is_some())?;
    if packing.mode != PackingMode::Affine {
        let function =
            Function::PackedMatmul { packing, transpose: node.transpose(), biases: false };
        let tensors = [node.x(), node.w(), node.scales()];
        return decode(slots, function, &tensors, Vec::new(), node.out());
    }
    let biases = slots.read_optional(node.biases())?;
    let packing = Affine { group_size: packing.group_size, bits: packing.bits };
    let op = Op::QuantizedMatmul {
        x: slots.read(node.x())?,
        w: slots.read(node.w())?,
        scales: slots.read(node.scales())?,
        biases,
        packing,
        transpose: node.transpose(),
    };
    Ok(instruction(op, slots.write(node.out())?))
}

pub fn dequantize(slots: &mut Slots, node: fb::DequantizeNode) -> Result<Instruction> {
    let packing = packing(node.mode(), node.group_size(), node.bits(), node.biases().is_some())?;
    let dtype = node.dtype().map(dtype_of).transpose()?;
    if packing.mode != PackingMode::Affine || node.global_scale().is_some() {
        let (biases, global_scale) = (node.biases(), node.global_scale());
        let function = Function::Dequantize {
            packing,
            biases: biases.is_some(),
            global_scale: global_scale.is_some(),
            dtype,
        };
        let required = [node.w(), node.scales()].map(Some);
        let tensors: Vec<_> =
            required.into_iter().chain([biases, global_scale]).flatten().collect();
        return decode(slots, function, &tensors, Vec::new(), node.out());
    }
    let biases = slots.read_optional(node.biases())?;
    let packing = Affine { group_size: packing.group_size, bits: packing.bits };
    let op = Op::Dequantize {
        w: slots.read(node.w())?,
        scales: slots.read(node.scales())?,
        biases,
        packing,
        dtype,
    };
    Ok(instruction(op, slots.write(node.out())?))
}

fn weights(
    frame: &Frame,
    [w, scales]: [Value; 2],
    biases: Option<Value>,
    packing: Affine,
) -> Result<Weights> {
    let Some(biases) = biases else {
        fail!(Program, "expected biases with affine quantization, got none");
    };
    let packed = [frame.tensor(w)?, frame.tensor(scales)?];
    Ok(Weights::new(packed, Some(frame.tensor(biases)?), packing.into()))
}

pub fn run_quantized_matmul(
    frame: &Frame,
    x: Value,
    weight: [Value; 2],
    biases: Option<Value>,
    packing: Affine,
    transpose: bool,
) -> Result<Array> {
    let weights = weights(frame, weight, biases, packing)?;
    let x = frame.tensor(x)?;
    // Multiplies `[..., features]` by the rows of a weight, as in a linear layer.
    let is_linear = transpose && x.size() > 0 && weights.are_one_matrix();
    let Some((&features, leading)) = x.shape().split_last().filter(|_| is_linear) else {
        return many_rows::product(x, &weights, transpose);
    };
    let linear = |x: &Array| match frame.on_gpu() {
        true => many_rows::product(x, &weights, true),
        false => linear_on_cpu(x, &weights),
    };
    if let [1, _] = leading {
        return linear(x);
    }
    let product = linear(&x.reshape(&[1, -1, features])?)?;
    let shape: Sizes = leading.iter().copied().chain([product.dim(2)]).collect();
    Ok(product.reshape(&shape)?)
}

/// The maximum elements of a weight that, in float32, fit the caches of an x86-64 processor: 32 MB.
const CACHED_ELEMENTS: i64 = 8 << 20;

/// Multiplies `[1, rows, in]`. MLX's packed product on the CPU unpacks the weight for each row, and is an order of
/// magnitude slower in half precision than in float32. For a few rows the packed product is used, in float32. For
/// more rows, unpacking the weight once and multiplying is faster.
///
/// The limit was measured on x86-64 with MLX 0.32.2 and two threads of OpenBLAS, for 4 and 8 bits (`cargo bench -p
/// etkv-benches --bench weights`). Both ways take the same time at 3 to 4 rows in float32 and at 6 to 8 in half
/// precision. If the unpacked weight does not fit the caches, they take the same time at two to three times these
/// numbers of rows.
pub fn linear_on_cpu(x: &Array, weights: &Weights) -> Result<Array> {
    let (rows, dtype) = (x.dim(1), x.dtype());
    let is_float = dtype == Dtype::Float32;
    let elements = i64::from(weights.outputs()) * i64::from(x.dim(2));
    let unpack_from = match (is_float, elements < CACHED_ELEMENTS) {
        (true, true) => 4,
        (true, false) => 10,
        (false, true) => 8,
        (false, false) => 16,
    };
    if rows < unpack_from {
        let (wide, x) = (weights.in_float32()?, cast(x, Dtype::Float32)?);
        let shared = mlx::shared(wide.outputs(), x.size() as i64, |range| {
            wide.of_outputs(range)?.product(&x, true)
        })?;
        let product = match shared {
            Some(product) => product,
            None => wide.product(&x, true)?,
        };
        return cast(&product, dtype);
    }
    let w = weights.unpacked(weights.dtype())?;
    // The weight is the left factor, in its stored layout. BLAS would traverse a right factor along its short side.
    let columns = x.reshape(&[rows, -1])?.transpose_axes(&[1, 0])?.contiguous()?;
    let product = matmul(w, columns)?.transpose_axes(&[1, 0])?.expand_dims(0)?;
    cast(&product, dtype)
}

pub fn run_dequantize(
    frame: &Frame,
    weight: [Value; 2],
    biases: Option<Value>,
    packing: Affine,
    dtype: Option<Dtype>,
) -> Result<Array> {
    let weights = weights(frame, weight, biases, packing)?;
    let values = weights.unpacked(weights.dtype())?;
    match dtype {
        Some(dtype) => cast(&values, dtype),
        None => Ok(values),
    }
}

#[cfg(test)]
mod tests {
    use mlx_rs::ops::{concatenate, quantize};
    use mlx_rs::random::normal;

    use super::*;

    #[test]
    fn parts_of_a_packed_product_are_the_whole() {
        mlx::run(|| {
            let numbers = |shape: &[i32]| normal::<f32>(shape, None, None, None);
            for bits in [4, 8] {
                let packing = Affine { group_size: 32, bits }.into();
                let (w, scales, biases) = quantize(numbers(&[48, 64])?, 32, bits)?;
                let weights = Weights::new([&w, &scales], Some(&biases), packing);
                let x = numbers(&[1, 3, 64])?;
                let whole = weights.product(&x, true)?;
                let parts: Vec<Array> = [0..16, 16..40, 40..48]
                    .map(|range| weights.of_outputs(range)?.product(&x, true))
                    .into_iter()
                    .collect::<Result<_>>()?;
                assert!(concatenate(&parts, -1)?.eq_values(&whole)?);
            }
            Ok(())
        })
        .unwrap();
    }
}
