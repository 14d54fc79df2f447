//! Products with weights of a few bits, and rows of such weights.

use std::ops::Range;

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
use crate::ir::{Affine, Function, Instruction, Op, Packing, PackingMode, Value};
use crate::ops::frame::Frame;
use crate::ops::slots::Slots;
use etkv::mlx::{self, cast, slice_axis};

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

/// A packed matrix: `bits` bits per element, a scale and a bias for each group.
pub struct Packed<'a> {
    pub w: &'a Array,
    pub scales: &'a Array,
    pub biases: &'a Array,
    pub packing: Packing,
}

impl<'a> Packed<'a> {
    fn of(
        frame: &'a Frame,
        [w, scales]: [Value; 2],
        biases: Option<Value>,
        packing: Affine,
    ) -> Result<Self> {
        let Some(biases) = biases else {
            fail!(Program, "expected biases with affine quantization, got none");
        };
        let (w, scales, biases) = (frame.tensor(w)?, frame.tensor(scales)?, frame.tensor(biases)?);
        Ok(Self { w, scales, biases, packing: packing.into() })
    }

    fn weights(&self) -> Weights {
        Weights::new([self.w, self.scales], Some(self.biases), self.packing)
    }

    /// Returns the matrix in the dtype of its scales. It is unpacked in float32 and rounded once: unpacking in half
    /// precision has three times the error.
    fn unpack(&self) -> Result<Array> {
        let Packing { group_size, bits, .. } = self.packing;
        let wide = |array| cast(array, Dtype::Float32);
        let (scales, biases) = (wide(self.scales)?, wide(self.biases)?);
        let matrix = mlx_rs::ops::dequantize(self.w, scales, &biases, group_size, bits)?;
        cast(&matrix, self.scales.dtype())
    }
}

pub fn run_quantized_matmul(
    frame: &Frame,
    x: Value,
    [w, scales]: [Value; 2],
    biases: Option<Value>,
    packing: Affine,
    transpose: bool,
) -> Result<Array> {
    let packed = Packed::of(frame, [w, scales], biases, packing)?;
    let x = frame.tensor(x)?;
    // Multiplies `[..., features]` by the rows of a weight, as in a linear layer.
    let is_linear = transpose && x.size() > 0 && packed.w.ndim() == 2;
    let Some((&features, leading)) = x.shape().split_last().filter(|_| is_linear) else {
        return many_rows::product(x, &packed.weights(), transpose);
    };
    let linear = |x: &Array| match frame.on_gpu() {
        true => many_rows::product(x, &packed.weights(), true),
        false => linear_on_cpu(x, &packed),
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
pub fn linear_on_cpu(x: &Array, packed: &Packed) -> Result<Array> {
    let (rows, dtype) = (x.dim(1), x.dtype());
    let is_float = dtype == Dtype::Float32;
    let elements = i64::from(packed.w.dim(0)) * i64::from(x.dim(2));
    let unpack_from = match (is_float, elements < CACHED_ELEMENTS) {
        (true, true) => 4,
        (true, false) => 10,
        (false, true) => 8,
        (false, false) => 16,
    };
    if rows < unpack_from {
        let wide = Packed {
            scales: &cast(packed.scales, Dtype::Float32)?,
            biases: &cast(packed.biases, Dtype::Float32)?,
            ..*packed
        };
        let x = cast(x, Dtype::Float32)?;
        let outputs = packed.w.dim(0);
        let shared =
            mlx::shared(outputs, x.size() as i64, |range| packed_outputs(&x, &wide, range))?;
        let product = match shared {
            Some(product) => product,
            None => packed_product(&x, &wide, true)?,
        };
        return cast(&product, dtype);
    }
    let w = packed.unpack()?;
    // The weight is the left factor, in its stored layout. BLAS would traverse a right factor along its short side.
    let columns = x.reshape(&[rows, -1])?.transpose_axes(&[1, 0])?.contiguous()?;
    let product = matmul(w, columns)?.transpose_axes(&[1, 0])?.expand_dims(0)?;
    cast(&product, dtype)
}

fn packed_product(x: &Array, packed: &Packed, transpose: bool) -> Result<Array> {
    packed.weights().product(x, transpose)
}

/// Returns a range of the outputs of a packed product.
fn packed_outputs(x: &Array, packed: &Packed, range: Range<i32>) -> Result<Array> {
    let part = |array| slice_axis(array, 0, range.start, range.end, 1);
    let (w, scales, biases) = (part(packed.w)?, part(packed.scales)?, part(packed.biases)?);
    let part = Packed { w: &w, scales: &scales, biases: &biases, packing: packed.packing };
    packed_product(x, &part, true)
}

pub fn run_dequantize(
    frame: &Frame,
    weight: [Value; 2],
    biases: Option<Value>,
    packing: Affine,
    dtype: Option<Dtype>,
) -> Result<Array> {
    let values = Packed::of(frame, weight, biases, packing)?.unpack()?;
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
                let packed = Packed { w: &w, scales: &scales, biases: &biases, packing };
                let x = numbers(&[1, 3, 64])?;
                let whole = packed_product(&x, &packed, true)?;
                let parts: Vec<Array> = [0..16, 16..40, 40..48]
                    .map(|range| packed_outputs(&x, &packed, range))
                    .into_iter()
                    .collect::<Result<_>>()?;
                assert!(concatenate(&parts, -1)?.eq_values(&whole)?);
            }
            Ok(())
        })
        .unwrap();
    }
}
