//! The operands of operations.

use super::{Index, Op, Scan};
use crate::ir::{Int, IntValue, Value};

impl Op {
    /// Calls `visit` with every tensor that the instruction reads, and with every tensor that nested chains write.
    pub fn for_each_read(&mut self, visit: &mut dyn FnMut(&mut Value)) {
        match self {
            Op::Unary { x, .. }
            | Op::AsType { x, .. }
            | Op::ExpandDims { x, .. }
            | Op::Reshape { x, .. }
            | Op::Transpose { x, .. }
            | Op::Slice { x, .. }
            | Op::Piece { x, .. }
            | Op::Split { x, .. }
            | Op::ReshapeTranspose { x, .. }
            | Op::TransposeReshape { x, .. }
            | Op::LastToken { x }
            | Op::WantedRows { x }
            | Op::RotaryPeriods { inverse: x }
            | Op::ItemInt { x }
            | Op::SymSize { x, .. }
            | Op::Take { x, index: Index::One(_), .. } => visit(x),
            Op::Binary { a, b, .. }
            | Op::Take { x: a, index: Index::Many(b), .. }
            | Op::TakeTransposed { x: a, index: b } => [a, b].into_iter().for_each(visit),
            Op::Activation { x, by: other, .. } | Op::RmsNorm { x, weight: other, .. } => {
                [x].into_iter().chain(other).for_each(visit);
            }
            Op::Addmm { mat1: a, mat2: b, bias, .. }
            | Op::Linear { x: a, weight: b, bias, .. }
            | Op::Dequantize { w: a, scales: b, biases: bias, .. } => {
                [a, b].into_iter().chain(bias).for_each(visit);
            }
            Op::Rotary { x, offsets, periods, .. } => {
                [x, offsets, periods].into_iter().for_each(visit);
            }
            Op::LayerNorm { x, weight, bias, .. } => {
                [x].into_iter().chain(weight).chain(bias).for_each(visit);
            }
            Op::NormInFloat32 { x, norm, scale, .. } => {
                [x].into_iter().chain(&mut norm.weight).chain(scale).for_each(visit);
            }
            Op::QuantizedMatmul { x, w, scales, biases, .. } => {
                [x, w, scales].into_iter().chain(biases).for_each(visit);
            }
            Op::UpdateAndAttend { q, k, v, position, sinks, .. } => {
                [q, k, v, position].into_iter().chain(sinks).for_each(visit);
            }
            Op::LinearBlock { x, weight, bias, norm, residual, .. } => {
                let norm = norm.iter_mut().filter_map(|norm| norm.weight.as_mut());
                let read = [x, weight].into_iter().chain(bias).chain(norm);
                read.chain(residual).for_each(visit);
            }
            Op::LinearHeads { x, weight, bias, norm, heads, .. } => {
                let norm = norm.iter_mut().filter_map(|norm| norm.weight.as_mut());
                let read = [x, weight].into_iter().chain(bias).chain(norm);
                read.chain([&mut heads.offsets, &mut heads.periods]).for_each(visit);
            }
            Op::Call { tensors, .. } => tensors.iter_mut().for_each(visit),
            Op::Elementwise { inputs, .. } => inputs.iter_mut().for_each(visit),
            Op::Concatenate { tensors, .. } | Op::MetalKernel { inputs: tensors, .. } => {
                tensors.iter_mut().for_each(visit);
            }
            Op::If { then, otherwise, .. } => {
                then.for_each_value(visit);
                otherwise.for_each_value(visit);
            }
            Op::Scan(scan) => {
                let Scan { originals, sliced, carried, inside, body, .. } = &mut **scan;
                for values in [originals, sliced, carried, inside] {
                    values.iter_mut().for_each(&mut *visit);
                }
                body.for_each_value(visit);
            }
            Op::UpdateRecurrent(call) => {
                call.tensors.iter_mut().for_each(&mut *visit);
                visit(&mut call.position);
            }
            Op::IntBinary { .. } => {}
        }
    }

    /// Calls `visit` with every integer argument.
    pub fn for_each_int(&mut self, visit: &mut dyn FnMut(&mut Int)) {
        match self {
            Op::Reshape { shape, .. }
            | Op::ReshapeTranspose { shape, .. }
            | Op::TransposeReshape { shape, .. } => shape.iter_mut().for_each(visit),
            Op::Slice { axis, start, stop, .. } => {
                [axis, start, stop].into_iter().for_each(visit);
            }
            Op::IntBinary { a, b, .. } => [a, b].into_iter().for_each(visit),
            Op::Take { index: Index::One(index), .. } => visit(index),
            Op::LinearHeads { heads, .. } => visit(&mut heads.tokens),
            Op::Call { ints, .. } => ints.iter_mut().for_each(visit),
            Op::If { cond, then, otherwise } => {
                visit(cond);
                let instructions = then.instructions.iter_mut().chain(&mut otherwise.instructions);
                instructions.for_each(|made| made.op.for_each_int(visit));
            }
            Op::Scan(scan) => {
                scan.body.instructions.iter_mut().for_each(|made| made.op.for_each_int(visit));
            }
            Op::MetalKernel { shapes, .. } => shapes.iter_mut().flatten().for_each(visit),
            _ => {}
        }
    }

    /// Returns the integer values that the instruction reads.
    pub fn int_reads(&self) -> Vec<IntValue> {
        let mut values = Vec::new();
        self.clone().for_each_int(&mut |int| {
            if let Int::Value(value) = int {
                values.push(*value);
            }
        });
        values
    }

    /// Returns the tensors that the instruction reads.
    pub fn reads(&self) -> Vec<Value> {
        let mut values = Vec::new();
        self.clone().for_each_read(&mut |value| values.push(*value));
        values
    }
}
