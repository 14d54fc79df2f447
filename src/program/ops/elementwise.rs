//! Functions of each element.

use std::f32::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

use mlx_rs::ops::{erf, sigmoid as mlx_sigmoid, tanh as mlx_tanh};
use mlx_rs::{Array, Dtype};

use super::instruction;
use crate::error::{fail, Result};
use crate::mlx::cast;
use crate::program::dtype::dtype_of;
use crate::program::fb;
use crate::program::ir::{Binary, Instruction, Op, Unary};
use crate::program::slots::Slots;

macro_rules! unary {
    ($($decode:ident: $node:ident => $function:ident,)+) => {$(
        pub fn $decode(slots: &mut Slots, node: fb::$node) -> Result<Instruction> {
            let x = slots.read(node.x())?;
            let op = Op::Unary { function: Unary::$function, x };
            Ok(instruction(op, slots.write(node.out())?))
        }
    )+};
}

unary! {
    cos: CosNode => Cos,
    neg: NegNode => Neg,
    sigmoid: SigmoidNode => Sigmoid,
    silu: SiluNode => Silu,
    sin: SinNode => Sin,
    tanh: TanhNode => Tanh,
}

macro_rules! binary {
    ($($decode:ident: $node:ident => $function:ident,)+) => {$(
        pub fn $decode(slots: &mut Slots, node: fb::$node) -> Result<Instruction> {
            let (a, b) = (slots.read(node.a())?, slots.read(node.b())?);
            let op = Op::Binary { function: Binary::$function, a, b };
            Ok(instruction(op, slots.write(node.out())?))
        }
    )+};
}

binary! {
    add: AddNode => Add,
    divide: DivideNode => Divide,
    multiply: MultiplyNode => Multiply,
    power: PowerNode => Power,
    subtract: SubtractNode => Subtract,
}

pub fn gelu(slots: &mut Slots, node: fb::GeluNode) -> Result<Instruction> {
    let function = match node.approximate() {
        "none" => Unary::Gelu,
        "tanh" => Unary::GeluTanh,
        other => fail!(Unsupported, "unknown Gelu `{other}`; available: none, tanh"),
    };
    let op = Op::Unary { function, x: slots.read(node.x())? };
    Ok(instruction(op, slots.write(node.out())?))
}

pub fn as_type(slots: &mut Slots, node: fb::AsTypeNode) -> Result<Instruction> {
    let op = Op::AsType { x: slots.read(node.x())?, dtype: dtype_of(node.scalar_type())? };
    Ok(instruction(op, slots.write(node.out())?))
}

pub fn run_unary(function: Unary, x: &Array) -> Result<Array> {
    Ok(match function {
        Unary::Cos => x.cos()?,
        Unary::Gelu => run_gelu(x, |x| erf(x.multiply(Array::from_f32(FRAC_1_SQRT_2))?))?,
        Unary::GeluTanh => run_gelu(x, |x| {
            let cubic = x.square()?.multiply(x)?.multiply(Array::from_f32(0.044_715))?;
            mlx_tanh(x.add(cubic)?.multiply(Array::from_f32(FRAC_2_SQRT_PI * FRAC_1_SQRT_2))?)
        })?,
        Unary::Neg => x.negative()?,
        Unary::Sigmoid => mlx_sigmoid(x)?,
        Unary::Silu => x.multiply(mlx_sigmoid(x)?)?,
        Unary::Sin => x.sin()?,
        Unary::Tanh => mlx_tanh(x)?,
    })
}

/// Returns `x (1 + bell(x)) / 2`. Half precision is rounded once, at the end.
fn run_gelu(x: &Array, bell: impl Fn(&Array) -> mlx_rs::error::Result<Array>) -> Result<Array> {
    let wide = cast(x, Dtype::Float32)?;
    let half = wide.multiply(Array::from_f32(0.5))?;
    let gelu = half.multiply(bell(&wide)?.add(Array::from_f32(1.0))?)?;
    cast(&gelu, x.dtype())
}

pub fn run_binary(function: Binary, a: &Array, b: &Array) -> Result<Array> {
    Ok(match function {
        Binary::Add => a.add(b)?,
        Binary::Divide => a.divide(b)?,
        Binary::Multiply => a.multiply(b)?,
        Binary::Power => a.power(b)?,
        Binary::Subtract => a.subtract(b)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const X: [f32; 7] = [-6.0, -1.5, -0.3, 0.0, 0.2, 1.0, 5.0];

    fn assert_close(made: &Array, expected: impl Fn(f64) -> f64, tolerance: f64) {
        let made = made.as_dtype(Dtype::Float32).unwrap();
        for (&got, x) in made.as_slice::<f32>().iter().zip(X.map(f64::from)) {
            let want = expected(x);
            assert!((f64::from(got) - want).abs() <= tolerance, "{got}, not {want}, for {x}");
        }
    }

    /// Sums the integral of the normal distribution.
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
        crate::mlx::run(|| {
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
        crate::mlx::run(|| {
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
        crate::mlx::run(|| {
            let cube =
                run_binary(Binary::Power, &Array::from_slice(&X, &[7]), &Array::from_f32(3.0))?;
            assert_close(&cube, |x| x.powi(3), 1e-4);
            Ok(())
        })
        .unwrap();
    }
}
