//! Comparisons, logic and bits, and selections between elements.

use mlx_rs::{Array, Dtype};

use super::calls::{decode, none, Arguments};
use crate::error::Result;
use crate::fb;
use crate::ir::{Function, Instruction};
use crate::ops::slots::Slots;
use etkv::mlx::call;

pub fn pair(
    slots: &mut Slots,
    function: Function,
    tensors: [&fb::Tid; 2],
    out: &fb::Tid,
) -> Result<Instruction> {
    decode(slots, function, &tensors, Vec::new(), out)
}

pub fn logical_not(slots: &mut Slots, node: fb::LogicalNotNode) -> Result<Instruction> {
    decode(slots, Function::LogicalNot, &[node.x()], Vec::new(), node.out())
}

pub fn round(slots: &mut Slots, node: fb::RoundNode) -> Result<Instruction> {
    let function = Function::Round { decimals: node.decimals() };
    decode(slots, function, &[node.x()], Vec::new(), node.out())
}

pub fn clip(slots: &mut Slots, node: fb::ClipNode) -> Result<Instruction> {
    let bounds = [node.a_min(), node.a_max()];
    let function = Function::Clip { a_min: bounds[0].is_some(), a_max: bounds[1].is_some() };
    let tensors: Vec<_> = std::iter::once(node.x()).chain(bounds.into_iter().flatten()).collect();
    decode(slots, function, &tensors, Vec::new(), node.out())
}

pub fn choose(slots: &mut Slots, node: fb::WhereNode) -> Result<Instruction> {
    let tensors = [node.condition(), node.x(), node.y()];
    decode(slots, Function::Where, &tensors, Vec::new(), node.out())
}

pub fn run_pair(function: &Function, arguments: &Arguments) -> Result<Array> {
    let (a, b) = (arguments.tensor(0)?, arguments.tensor(1)?);
    // On the CPU, MLX (0.32.2) returns the opposite result for bools.
    let is_bool = a.dtype() == Dtype::Bool && b.dtype() == Dtype::Bool;
    let (a, b) = (a.as_ptr(), b.as_ptr());
    let work = match function {
        Function::BitwiseXor if is_bool => mlx_sys::mlx_not_equal,
        Function::BitwiseAnd => mlx_sys::mlx_bitwise_and,
        Function::BitwiseOr => mlx_sys::mlx_bitwise_or,
        Function::BitwiseXor => mlx_sys::mlx_bitwise_xor,
        Function::Greater => mlx_sys::mlx_greater,
        Function::GreaterEqual => mlx_sys::mlx_greater_equal,
        Function::Less => mlx_sys::mlx_less,
        Function::LessEqual => mlx_sys::mlx_less_equal,
        Function::LogicalAnd => mlx_sys::mlx_logical_and,
        Function::LogicalOr => mlx_sys::mlx_logical_or,
        Function::NotEqual => mlx_sys::mlx_not_equal,
        _ => mlx_sys::mlx_equal,
    };
    // SAFETY: the arrays are live.
    call(|made, stream| unsafe { work(made, a, b, stream) })
}

pub fn run_not(arguments: &Arguments) -> Result<Array> {
    Ok(arguments.tensor(0)?.logical_not()?)
}

pub fn run_round(arguments: &Arguments, decimals: i32) -> Result<Array> {
    let x = arguments.tensor(0)?;
    // SAFETY: the array is live.
    call(|made, stream| unsafe { mlx_sys::mlx_round(made, x.as_ptr(), decimals, stream) })
}

pub fn run_clip(arguments: &Arguments, a_min: bool, a_max: bool) -> Result<Array> {
    let x = arguments.tensor(0)?;
    if !a_min && !a_max {
        return Ok(x.clone());
    }
    let bound = |given: bool, index| match given {
        true => Ok::<_, crate::error::Error>(arguments.tensor(index)?.as_ptr()),
        false => Ok(none()),
    };
    let (least, most) = (bound(a_min, 1)?, bound(a_max, 1 + usize::from(a_min))?);
    // SAFETY: the arrays are live, and one of the bounds exists.
    call(|made, stream| unsafe { mlx_sys::mlx_clip(made, x.as_ptr(), least, most, stream) })
}

pub fn run_where(arguments: &Arguments) -> Result<Array> {
    let [condition, x, y] = [0, 1, 2].map(|index| arguments.tensor(index));
    let (condition, x, y) = (condition?.as_ptr(), x?.as_ptr(), y?.as_ptr());
    // SAFETY: the arrays are live.
    call(|made, stream| unsafe { mlx_sys::mlx_where(made, condition, x, y, stream) })
}
