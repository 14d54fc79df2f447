//! Integer arithmetic on sizes, in 32 bits; overflow is an error.

use mlx_rs::{Array, Dtype};

use super::instruction;
use crate::error::{fail, Result};
use crate::fb;
use crate::ir::{Instruction, IntBinary, Op};
use crate::ops::slots::Slots;
use etkv::mlx;

pub fn binary(
    slots: &mut Slots,
    function: IntBinary,
    [a, b]: [fb::IntOrVid; 2],
    out: &fb::Vid,
) -> Result<Instruction> {
    let op = Op::IntBinary { function, a: slots.int(a)?, b: slots.int(b)? };
    Ok(instruction(op, slots.write_int(out)?))
}

pub fn item(slots: &mut Slots, node: fb::ItemIntNode) -> Result<Instruction> {
    let op = Op::ItemInt { x: slots.read(node.x())? };
    Ok(instruction(op, slots.write_int(node.out())?))
}

/// Returns the element of a tensor with one element. Waits until it is computed.
pub fn run_item(x: &Array) -> Result<i32> {
    if x.size() != 1 {
        fail!(Program, "expected a tensor of one element, got shape {:?}", x.shape());
    }
    let number = mlx::elements::<i64>(&x.as_dtype(Dtype::Int64)?.contiguous()?)?[0];
    match i32::try_from(number) {
        Ok(number) => Ok(number),
        Err(_) => fail!(Program, "expected an element within 32 bits, got {number}"),
    }
}

pub fn run(function: IntBinary, a: i32, b: i32) -> Result<i32> {
    let (wide_a, wide_b) = (i64::from(a), i64::from(b));
    let result = match function {
        IntBinary::Add => wide_a + wide_b,
        IntBinary::Multiply => wide_a * wide_b,
        IntBinary::Subtract => wide_a - wide_b,
        IntBinary::FloorDivide | IntBinary::Modulo if b == 0 => {
            fail!(Program, "cannot divide {a} by 0")
        }
        IntBinary::FloorDivide => {
            let towards_zero = wide_a / wide_b;
            let inexact = wide_a % wide_b != 0;
            towards_zero - i64::from(inexact && (a < 0) != (b < 0))
        }
        IntBinary::Modulo => ((wide_a % wide_b) + wide_b) % wide_b,
    };
    match i32::try_from(result) {
        Ok(result) => Ok(result),
        Err(_) => fail!(
            Program,
            "expected a result within 32 bits, got {result} for {function:?} of {a} and {b}"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn division_rounds_as_pythons() {
        for (a, b, quotient, remainder) in
            [(7, 2, 3, 1), (-7, 2, -4, 1), (7, -2, -4, -1), (-7, -2, 3, -1), (6, 3, 2, 0)]
        {
            assert_eq!(run(IntBinary::FloorDivide, a, b).unwrap(), quotient, "{a} // {b}");
            assert_eq!(run(IntBinary::Modulo, a, b).unwrap(), remainder, "{a} % {b}");
        }
    }

    #[test]
    fn what_has_no_result_is_refused() {
        assert!(run(IntBinary::FloorDivide, 1, 0).is_err());
        assert!(run(IntBinary::Modulo, 1, 0).is_err());
        assert!(run(IntBinary::FloorDivide, i32::MIN, -1).is_err());
        assert!(run(IntBinary::Add, i32::MAX, 1).is_err());
        assert!(run(IntBinary::Multiply, 1 << 20, 1 << 20).is_err());
        assert_eq!(run(IntBinary::Subtract, 3, 5).unwrap(), -2);
    }
}
