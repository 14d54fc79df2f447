//! Functions of each element.

use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

use mlx_rs::ops::{erf as mlx_erf, select, sigmoid as mlx_sigmoid, tanh as mlx_tanh};
use mlx_rs::{Array, Dtype};

use super::instruction;
use crate::dtype::{dtype_of, is_float};
use crate::error::{fail, Result};
use crate::fb;
use crate::ir::{Binary, Instruction, Op, Unary};
use crate::ops::slots::Slots;
use etkv::mlx::{call, cast};

pub fn unary(
    slots: &mut Slots,
    function: Unary,
    x: &fb::Tid,
    out: &fb::Tid,
) -> Result<Instruction> {
    let op = Op::Unary { function, x: slots.read(x)? };
    Ok(instruction(op, slots.write(out)?))
}

pub fn binary(
    slots: &mut Slots,
    function: Binary,
    [a, b]: [&fb::Tid; 2],
    out: &fb::Tid,
) -> Result<Instruction> {
    let op = Op::Binary { function, a: slots.read(a)?, b: slots.read(b)? };
    Ok(instruction(op, slots.write(out)?))
}

pub fn gelu(slots: &mut Slots, node: fb::GeluNode) -> Result<Instruction> {
    let function = match node.approximate() {
        "none" => Unary::Gelu,
        "tanh" => Unary::GeluTanh,
        other => fail!(Unsupported, "unknown Gelu `{other}`; available: none, tanh"),
    };
    unary(slots, function, node.x(), node.out())
}

pub fn as_type(slots: &mut Slots, node: fb::AsTypeNode) -> Result<Instruction> {
    let op = Op::AsType { x: slots.read(node.x())?, dtype: dtype_of(node.scalar_type())? };
    Ok(instruction(op, slots.write(node.out())?))
}

pub fn run_unary(function: Unary, x: &Array) -> Result<Array> {
    let mlx = |work: unsafe extern "C" fn(*mut _, _, _) -> i32| {
        // SAFETY: the array is live.
        call(|made, stream| unsafe { work(made, x.as_ptr(), stream) })
    };
    Ok(match function {
        Unary::Abs => mlx(mlx_sys::mlx_abs)?,
        Unary::Arccos => mlx(mlx_sys::mlx_arccos)?,
        Unary::Arccosh => mlx(mlx_sys::mlx_arccosh)?,
        Unary::Arcsin => mlx(mlx_sys::mlx_arcsin)?,
        Unary::Arcsinh => mlx(mlx_sys::mlx_arcsinh)?,
        Unary::Arctan => mlx(mlx_sys::mlx_arctan)?,
        Unary::Arctanh => mlx(mlx_sys::mlx_arctanh)?,
        Unary::BitwiseInvert => mlx(mlx_sys::mlx_bitwise_invert)?,
        Unary::Ceil => mlx(mlx_sys::mlx_ceil)?,
        Unary::Cos => mlx(mlx_sys::mlx_cos)?,
        Unary::Cosh => mlx(mlx_sys::mlx_cosh)?,
        Unary::Erf => mlx(mlx_sys::mlx_erf)?,
        Unary::Exp => mlx(mlx_sys::mlx_exp)?,
        Unary::Expm1 => mlx(mlx_sys::mlx_expm1)?,
        Unary::Floor => mlx(mlx_sys::mlx_floor)?,
        Unary::Gelu => run_gelu(x, |x| mlx_erf(x.multiply(Array::from_f32(FRAC_1_SQRT_2))?))?,
        Unary::GeluTanh => run_gelu(x, |x| {
            let cubic = x.square()?.multiply(x)?.multiply(Array::from_f32(0.044_715))?;
            mlx_tanh(x.add(cubic)?.multiply(Array::from_f32(FRAC_2_SQRT_PI * FRAC_1_SQRT_2))?)
        })?,
        Unary::Log => mlx(mlx_sys::mlx_log)?,
        Unary::Log10 => mlx(mlx_sys::mlx_log10)?,
        Unary::Log1p => mlx(mlx_sys::mlx_log1p)?,
        Unary::Log2 => mlx(mlx_sys::mlx_log2)?,
        Unary::Neg => mlx(mlx_sys::mlx_negative)?,
        Unary::Reciprocal => mlx(mlx_sys::mlx_reciprocal)?,
        Unary::Rsqrt => mlx(mlx_sys::mlx_rsqrt)?,
        Unary::Sigmoid => mlx_sigmoid(x)?,
        Unary::Sign => mlx(mlx_sys::mlx_sign)?,
        Unary::Silu => x.multiply(mlx_sigmoid(x)?)?,
        Unary::Sin => mlx(mlx_sys::mlx_sin)?,
        Unary::Sinh => mlx(mlx_sys::mlx_sinh)?,
        Unary::Sqrt => mlx(mlx_sys::mlx_sqrt)?,
        Unary::Square => mlx(mlx_sys::mlx_square)?,
        Unary::Tan => mlx(mlx_sys::mlx_tan)?,
        Unary::Tanh => mlx_tanh(x)?,
        Unary::Trunc => truncated(x)?,
    })
}

/// Returns `x (1 + bell(x)) / 2`. Half precision is computed in float32 and rounded once, at the end.
fn run_gelu(x: &Array, bell: impl Fn(&Array) -> mlx_rs::error::Result<Array>) -> Result<Array> {
    let wide = cast(x, Dtype::Float32)?;
    let half = wide.multiply(Array::from_f32(0.5))?;
    let gelu = half.multiply(bell(&wide)?.add(Array::from_f32(1.0))?)?;
    cast(&gelu, x.dtype())
}

/// Returns `x` rounded towards zero.
fn truncated(x: &Array) -> Result<Array> {
    if !is_float(x.dtype()) {
        return Ok(x.clone());
    }
    let zero = Array::from_f32(0.0).as_dtype(x.dtype())?;
    let (floor, ceil) = (run_unary(Unary::Floor, x)?, run_unary(Unary::Ceil, x)?);
    Ok(select(x.lt(zero)?, ceil, floor)?)
}

pub fn run_binary(function: Binary, a: &Array, b: &Array) -> Result<Array> {
    let mlx = |work: unsafe extern "C" fn(*mut _, _, _, _) -> i32| {
        // SAFETY: the arrays are live.
        call(|made, stream| unsafe { work(made, a.as_ptr(), b.as_ptr(), stream) })
    };
    Ok(match function {
        Binary::Add => a.add(b)?,
        Binary::Atan2 => mlx(mlx_sys::mlx_arctan2)?,
        Binary::Divide => a.divide(b)?,
        Binary::FloorDivide => floor_divided(a, b)?,
        Binary::LogAddExp => mlx(mlx_sys::mlx_logaddexp)?,
        Binary::Maximum => mlx(mlx_sys::mlx_maximum)?,
        Binary::Minimum => mlx(mlx_sys::mlx_minimum)?,
        Binary::Multiply => a.multiply(b)?,
        Binary::Power => a.power(b)?,
        Binary::Remainder => rest(a, b)?,
        Binary::Subtract => a.subtract(b)?,
    })
}

/// Returns quotients rounded down. MLX rounds quotients of integers towards zero.
fn floor_divided(a: &Array, b: &Array) -> Result<Array> {
    if is_float(a.dtype()) || is_float(b.dtype()) {
        return Ok(a.floor_divide(b)?);
    }
    let divisor = divisor(b)?;
    let quotient = a.floor_divide(&divisor)?;
    let rest = a.subtract(quotient.multiply(&divisor)?)?;
    let zero = Array::from_int(0);
    let other_signs = rest.lt(&zero)?.ne(divisor.lt(&zero)?)?;
    let is_inexact = rest.ne(&zero)?.logical_and(other_signs)?;
    let rounded = quotient.subtract(is_inexact.as_dtype(quotient.dtype())?)?;
    match is_signed(b.dtype()) {
        true => Ok(select(b.eq(Array::from_int(-1))?, a.negative()?, rounded)?),
        false => Ok(rounded),
    }
}

/// Returns the remainder of a division that rounds down. It has the sign of the divisor.
fn rest(a: &Array, b: &Array) -> Result<Array> {
    if is_float(a.dtype()) || is_float(b.dtype()) {
        return Ok(a.remainder(b)?);
    }
    Ok(a.remainder(divisor(b)?)?)
}

/// Replaces divisors of 0 and -1 by 1: a processor traps when an integer is divided by zero, or the smallest integer
/// by -1.
fn divisor(b: &Array) -> Result<Array> {
    let one = Array::from_int(1).as_dtype(b.dtype())?;
    let mut stops = b.eq(Array::from_int(0))?;
    if is_signed(b.dtype()) {
        stops = stops.logical_or(b.eq(Array::from_int(-1))?)?;
    }
    Ok(select(stops, one, b)?)
}

fn is_signed(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::Int8 | Dtype::Int16 | Dtype::Int32 | Dtype::Int64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use etkv::mlx::elements;

    const X: [f32; 7] = [-6.0, -1.5, -0.3, 0.0, 0.2, 1.0, 5.0];

    fn assert_close(made: &Array, expected: impl Fn(f64) -> f64, tolerance: f64) {
        let made = made.as_dtype(Dtype::Float32).unwrap();
        for (&got, x) in made.as_slice::<f32>().iter().zip(X.map(f64::from)) {
            let want = expected(x);
            assert!((f64::from(got) - want).abs() <= tolerance, "{got}, not {want}, for {x}");
        }
    }

    /// Integrates the normal distribution numerically.
    fn gelu(x: f64) -> f64 {
        let n = 20_000;
        let width = (x + 12.0) / f64::from(n);
        let density = |t: f64| (-t * t / 2.0).exp() / std::f64::consts::TAU.sqrt();
        let area: f64 = (0..n).map(|i| density(-12.0 + (f64::from(i) + 0.5) * width) * width).sum();
        x * area
    }

    fn gelu_tanh(x: f64) -> f64 {
        let bell = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
        x * (1.0 + bell.tanh()) / 2.0
    }

    #[test]
    fn functions_of_one_tensor() {
        etkv::mlx::run(|| {
            let x = Array::from_slice(&X, &[7]);
            assert_close(&run_unary(Unary::Gelu, &x)?, gelu, 1e-6);
            assert_close(&run_unary(Unary::GeluTanh, &x)?, gelu_tanh, 1e-6);
            assert_close(&run_unary(Unary::Tanh, &x)?, f64::tanh, 1e-6);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn gelu_in_half_precision_is_rounded_once() {
        etkv::mlx::run(|| {
            let x = Array::from_slice(&X, &[7]).as_dtype(Dtype::Bfloat16)?;
            let exact = run_unary(Unary::GeluTanh, &x.as_dtype(Dtype::Float32)?)?;
            let made = run_unary(Unary::GeluTanh, &x)?;
            assert_eq!(made.dtype(), Dtype::Bfloat16);
            assert!(made.eq_values(exact.as_dtype(Dtype::Bfloat16)?)?);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn powers_of_what_is_below_zero() {
        etkv::mlx::run(|| {
            let cube =
                run_binary(Binary::Power, &Array::from_slice(&X, &[7]), &Array::from_f32(3.0))?;
            assert_close(&cube, |x| x.powi(3), 1e-4);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn integers_are_divided_as_pythons_are() {
        etkv::mlx::run(|| {
            // Division in hardware would trap for the last two.
            let a = Array::from_slice(&[7, -7, 7, -7, 6, i32::MIN, 5], &[7]);
            let b = Array::from_slice(&[2, 2, -2, -2, -1, -1, 0], &[7]);
            let quotients = run_binary(Binary::FloorDivide, &a, &b)?;
            assert_eq!(elements::<i32>(&quotients)?, [3, -4, -4, 3, -6, i32::MIN, 5]);
            let rests = run_binary(Binary::Remainder, &a, &b)?;
            assert_eq!(elements::<i32>(&rests)?, [1, 1, -1, -1, 0, 0, 0]);
            let a = Array::from_slice(&[7u32, 200], &[2]);
            let b = Array::from_slice(&[2u32, u32::MAX], &[2]);
            let quotients = run_binary(Binary::FloorDivide, &a, &b)?;
            assert_eq!(elements::<u32>(&quotients)?, [3, 0]);
            Ok(())
        })
        .unwrap();
    }
}
