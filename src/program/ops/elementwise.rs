//! Functions of each element.

use mlx_rs::ops::sigmoid as mlx_sigmoid;
use mlx_rs::Array;

use super::instruction;
use crate::error::Result;
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
    subtract: SubtractNode => Subtract,
}

pub fn as_type(slots: &mut Slots, node: fb::AsTypeNode) -> Result<Instruction> {
    let op = Op::AsType { x: slots.read(node.x())?, dtype: dtype_of(node.scalar_type())? };
    Ok(instruction(op, slots.write(node.out())?))
}

pub fn run_unary(function: Unary, x: &Array) -> Result<Array> {
    Ok(match function {
        Unary::Cos => x.cos()?,
        Unary::Neg => x.negative()?,
        Unary::Sigmoid => mlx_sigmoid(x)?,
        Unary::Silu => x.multiply(mlx_sigmoid(x)?)?,
        Unary::Sin => x.sin()?,
    })
}

pub fn run_binary(function: Binary, a: &Array, b: &Array) -> Result<Array> {
    Ok(match function {
        Binary::Add => a.add(b)?,
        Binary::Divide => a.divide(b)?,
        Binary::Multiply => a.multiply(b)?,
        Binary::Subtract => a.subtract(b)?,
    })
}
