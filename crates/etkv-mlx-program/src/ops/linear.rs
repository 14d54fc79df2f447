//! Matrix products of floats.

use mlx_rs::ops::{addmm as mlx_addmm, concatenate, matmul};
use mlx_rs::{Array, Dtype};

use super::norm::in_float32;
use super::views::run_split;
use super::{activation, instruction};
use crate::error::{fail, Result};
use crate::fb;
use crate::ir::{Instruction, Norm, Op, Unary, Value};
use crate::ops::frame::Frame;
use crate::ops::slots::Slots;
use etkv::kernels::{self, Gate, Product, RmsNorm};
use etkv::mlx::{self, slice_axis};

pub fn addmm(slots: &mut Slots, node: fb::AddmmNode) -> Result<Instruction> {
    let op = Op::Addmm {
        mat1: slots.read(node.mat1())?,
        mat2: slots.read(node.mat2())?,
        bias: slots.read_optional(node.bias())?,
        alpha: node.alpha(),
        beta: node.beta(),
    };
    if node.bias().is_none() && node.alpha() != 1.0 {
        fail!(Unsupported, "expected alpha 1 for Addmm without a bias, got {}", node.alpha());
    }
    Ok(instruction(op, slots.write(node.out())?))
}

pub fn run_addmm(
    frame: &Frame,
    [mat1, mat2]: [Value; 2],
    bias: Option<Value>,
    alpha: f32,
    beta: f32,
) -> Result<Array> {
    let (mat1, mat2) = (frame.tensor(mat1)?, frame.tensor(mat2)?);
    product(mat1, mat2, frame.optional(bias)?, alpha, beta)
}

/// Returns the product of `x` and `weight`. The weight is `[in, out]` if `transposed`, else `[out, in]`.
pub fn product_of<'f>(
    frame: &'f Frame,
    [x, weight]: [Value; 2],
    bias: Option<Value>,
    transposed: bool,
    norm: Option<Norm>,
) -> Result<Product<'f>> {
    let bias = frame.optional(bias)?;
    let norm = match norm {
        Some(Norm { weight, eps, in_float32 }) => {
            Some(RmsNorm { weight: frame.optional(weight)?, eps, in_float32 })
        }
        None => None,
    };
    let (x, weight) = (frame.tensor(x)?, frame.tensor(weight)?);
    Ok(Product { bias, norm, ..Product::plain(x, weight, transposed) })
}

/// Computes a product, then a gate and the sum with a residual, if there are any.
pub fn run_block(
    frame: &Frame,
    product: &Product,
    gate: Option<Unary>,
    residual: Option<Value>,
) -> Result<Array> {
    let residual = frame.optional(residual)?;
    let kernel_gate = gate.map(kernel_gate).transpose()?;
    let normalized = match by_kernel(&Product { gate: kernel_gate, residual, ..*product })? {
        KernelResult::Complete(out) => return Ok(out),
        KernelResult::Remaining(normalized) => normalized,
    };
    let x = normalized.as_ref().unwrap_or(product.x);
    let mut out = linear(&Product { x, norm: None, ..*product })?;
    if let Some(gate) = gate {
        let features = out.shape().last().copied().unwrap_or_default();
        let halves = run_split(&out, -1, &[features / 2], &(features..=features))?;
        let [activated, gated] = &halves[..] else {
            fail!(Shape, "expected an even number of features for a gate, got {features}");
        };
        out = activation::run(frame, gate, activated, Some(gated))?;
    }
    Ok(match residual {
        Some(residual) => out.add(residual)?,
        None => out,
    })
}

/// The part of a product that the kernel has computed.
pub enum KernelResult {
    /// The whole product.
    Complete(Array),
    /// Nothing except the normalized rows, if the product has a norm.
    Remaining(Option<Array>),
}

/// Computes a product with its norm, gate and residual by the [kernel](kernels::few_rows), if the kernel supports
/// them.
pub fn by_kernel(product: &Product) -> Result<KernelResult> {
    if let Some(out) = kernels::few_rows(product)? {
        return Ok(KernelResult::Complete(out));
    }
    let Some(norm) = product.norm else {
        return Ok(KernelResult::Remaining(None));
    };
    let x = product.x;
    let normalized = match norm.in_float32 {
        true => in_float32(x, norm.weight, None, norm.eps, x.dtype())?,
        false => mlx_rs::fast::rms_norm(x, norm.weight, norm.eps)?,
    };
    // The kernel may have refused only because the rows are too long for its norm.
    let rest = Product { x: &normalized, norm: None, ..*product };
    Ok(match kernels::few_rows(&rest)? {
        Some(out) => KernelResult::Complete(out),
        None => KernelResult::Remaining(Some(normalized)),
    })
}

fn kernel_gate(function: Unary) -> Result<Gate> {
    Ok(match function {
        Unary::Silu => Gate::Silu,
        Unary::Gelu => Gate::Gelu,
        Unary::GeluTanh => Gate::GeluTanh,
        other => fail!(Internal, "expected an activation of a gate, got {other:?}"),
    })
}

/// Returns a product with its bias.
pub fn linear(linear: &Product) -> Result<Array> {
    if let Some(out) = kernels::few_rows(linear)? {
        return Ok(out);
    }
    let Product { x, weight, transposed, bias, .. } = *linear;
    let axis = usize::from(transposed);
    let outputs = weight.shape().get(axis).copied().unwrap_or_default();
    let cuts = weight.ndim() == 2 && bias.is_none_or(|bias| bias.shape() == [outputs]);
    // Float32 products are not divided among threads here, because the BLAS that computes them uses several
    // threads itself.
    if x.dtype() != Dtype::Float32 && cuts {
        let shared = mlx::shared(outputs, x.size() as i64, |range| {
            let part = |array, axis| slice_axis(array, axis, range.start, range.end, 1);
            let bias = bias.map(|bias| part(bias, 0)).transpose()?;
            whole(x, &part(weight, axis)?, transposed, bias.as_ref())
        })?;
        if let Some(out) = shared {
            return Ok(out);
        }
    }
    whole(x, weight, transposed, bias)
}

/// Returns a product with its bias, computed by MLX.
fn whole(x: &Array, weight: &Array, transposed: bool, bias: Option<&Array>) -> Result<Array> {
    let rotated;
    let weight = match transposed {
        true => weight,
        false => {
            rotated = weight.transpose_axes(&[1, 0])?;
            &rotated
        }
    };
    match rows_to_add(x)? {
        0 => product(x, weight, bias, 1.0, 1.0),
        more => with_rows(x, more, |x| product(x, weight, bias, 1.0, 1.0)),
    }
}

/// If there are more rows than the [kernel](kernels::few_rows) supports, they are padded to half of this
/// number or to a multiple of it. cuBLAS needs 3 ms for each weight and each new number of rows to choose an
/// algorithm, so products should have only a few different numbers of rows.
pub const ROWS_THAT_RECUR: i32 = 64;

/// Returns the number of rows to add to `x`, `[1, T, in]`: 0 on a CPU.
fn rows_to_add(x: &Array) -> Result<i32> {
    let is_one = x.ndim() == 3 && x.dim(0) == 1;
    if cfg!(target_os = "macos") || !is_one || !mlx::is_stream_on_gpu()? {
        return Ok(0);
    }
    Ok(lacking(x.dim(1)))
}

/// Returns the number of rows to add to `rows` rows, at most `rows`.
fn lacking(rows: i32) -> i32 {
    match rows {
        ..=kernels::MAX_ROWS => 0,
        rows if rows <= ROWS_THAT_RECUR / 2 => ROWS_THAT_RECUR / 2 - rows,
        rows => (ROWS_THAT_RECUR - rows % ROWS_THAT_RECUR) % ROWS_THAT_RECUR,
    }
}

/// Calls `work` with `x`, `[1, T, in]`, followed by a copy of its first `more` rows, at most `T`. Returns the part of
/// the result for the rows of `x`.
fn with_rows(x: &Array, more: i32, work: impl FnOnce(&Array) -> Result<Array>) -> Result<Array> {
    let n = x.dim(1);
    let out = work(&concatenate(&[x, &slice_axis(x, 1, 0, more, 1)?], 1)?)?;
    slice_axis(&out, 1, 0, n, 1)
}

fn product(
    mat1: &Array,
    mat2: &Array,
    bias: Option<&Array>,
    alpha: f32,
    beta: f32,
) -> Result<Array> {
    Ok(match bias {
        None => matmul(mat1, mat2)?,
        Some(bias) => mlx_addmm(bias, mat1, mat2, alpha, beta)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_filled_up_to_few_numbers() {
        for (rows, filled) in [(1, 1), (16, 16), (17, 32), (32, 32), (33, 64), (64, 64), (65, 128)]
        {
            assert_eq!(rows + lacking(rows), filled);
        }
        assert!((1..5000).all(|rows| lacking(rows) <= rows));
    }

    #[test]
    fn more_rows_change_no_product() {
        mlx::run(|| {
            let numbers = |shape: &[i32]| mlx_rs::random::normal::<f32>(shape, None, None, None);
            let (x, weight, bias) = (numbers(&[1, 70, 24])?, numbers(&[24, 10])?, numbers(&[10])?);
            let plain = product(&x, &weight, Some(&bias), 1.0, 1.0)?;
            let longer = with_rows(&x, 58, |x| {
                assert_eq!(x.shape(), [1, 128, 24]);
                product(x, &weight, Some(&bias), 1.0, 1.0)
            })?;
            assert_eq!(longer.shape(), [1, 70, 10]);
            assert!(plain.all_close(&longer, 1e-5, 1e-5, None)?);
            Ok(())
        })
        .unwrap();
    }
}
