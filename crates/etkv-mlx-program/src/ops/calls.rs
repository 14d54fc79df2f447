//! The functions that no pass transforms: their common parts, and the table of their implementations.

use mlx_rs::Array;
use smallvec::SmallVec;

use super::{
    attention, compare, convolution, create, experts, gather, instruction, order, packed,
    rearrange, reduction, rotary,
};
use crate::error::{fail, Result};
use crate::fb;
use crate::ir::{Function, Instruction, Int, Op, Value};
use crate::ops::frame::Frame;
use crate::ops::slots::Slots;

/// The arguments of a call.
pub struct Arguments<'a, 's> {
    pub frame: &'a Frame<'a, 's>,
    pub values: &'a [Value],
    pub tensors: SmallVec<[&'a Array; 4]>,
    pub ints: SmallVec<[i32; 8]>,
}

impl<'a> Arguments<'a, '_> {
    /// Returns a tensor of the call.
    pub fn tensor(&self, index: usize) -> Result<&'a Array> {
        match self.tensors.get(index) {
            Some(array) => Ok(array),
            None => {
                fail!(Internal, "a call has {} tensors, expected {}", self.tensors.len(), index + 1)
            }
        }
    }

    /// Returns an integer of the call.
    pub fn int(&self, index: usize) -> Result<i32> {
        match self.ints.get(index) {
            Some(&number) => Ok(number),
            None => {
                fail!(Internal, "a call has {} integers, expected {}", self.ints.len(), index + 1)
            }
        }
    }
}

/// Decodes a call with tensors and one tensor as its result.
pub fn decode(
    slots: &mut Slots,
    function: Function,
    tensors: &[&fb::Tid],
    ints: Vec<Int>,
    out: &fb::Tid,
) -> Result<Instruction> {
    let tensors = tensors.iter().map(|tid| slots.read(tid)).collect::<Result<_>>()?;
    Ok(instruction(Op::Call { function, tensors, ints }, slots.write(out)?))
}

/// Runs a call.
pub fn run(frame: &Frame, function: &Function, values: &[Value], ints: &[Int]) -> Result<Array> {
    let arguments = Arguments {
        frame,
        values,
        tensors: values.iter().map(|&value| frame.tensor(value)).collect::<Result<_>>()?,
        ints: ints.iter().map(|&int| frame.int(int)).collect::<Result<_>>()?,
    };
    let call = &arguments;
    match function {
        Function::BitwiseAnd
        | Function::BitwiseOr
        | Function::BitwiseXor
        | Function::Equal
        | Function::Greater
        | Function::GreaterEqual
        | Function::Less
        | Function::LessEqual
        | Function::LogicalAnd
        | Function::LogicalOr
        | Function::NotEqual => compare::run_pair(function, call),
        Function::LogicalNot => compare::run_not(call),
        Function::Clip { a_min, a_max } => compare::run_clip(call, *a_min, *a_max),
        Function::Round { decimals } => compare::run_round(call, *decimals),
        Function::Where => compare::run_where(call),

        Function::All(over)
        | Function::Any(over)
        | Function::LogSumExp(over)
        | Function::Max(over)
        | Function::Mean(over)
        | Function::Median(over)
        | Function::Min(over)
        | Function::Prod(over)
        | Function::Sum(over) => reduction::run(function, over, call),
        Function::Std { over, ddof } | Function::Var { over, ddof } => {
            reduction::run_spread(function, over, *ddof, call)
        }
        Function::Argmax(over) | Function::Argmin(over) => {
            reduction::run_place(function, *over, call)
        }
        Function::Cumsum { axis, reverse, inclusive } => {
            reduction::run_cumsum(call, *axis, *reverse, *inclusive)
        }
        Function::Softmax { axis, precise } => reduction::run_softmax(call, *axis, *precise),

        Function::Argsort { axis } | Function::Sort { axis } => {
            order::run_sort(function, call, *axis)
        }
        Function::ArgPartition { axis } | Function::Partition { axis } => {
            order::run_partition(function, call, *axis)
        }

        Function::ARange { dtype } => create::run_arange(call, *dtype),
        Function::Full { v, dtype } => create::run_full(call, *v, *dtype),
        Function::FullLike { v, dtype } => create::run_full_like(call, *v, *dtype),
        Function::RandomBits { width, seed } => create::run_random_bits(call, *width, *seed),
        Function::Tri { k, dtype } => create::run_tri(call, *k, *dtype),

        Function::AsStrided { offset, reduced } => {
            rearrange::run_as_strided(call, *offset, reduced.as_deref())
        }
        Function::BroadcastTo => rearrange::run_broadcast_to(call),
        Function::Contiguous => Ok(call.tensor(0)?.contiguous()?),
        Function::Flip { axes } => rearrange::run_flip(call, axes),
        Function::Pad { mode, value } => rearrange::run_pad(call, *mode, *value),
        Function::Repeat { axis } => rearrange::run_repeat(call, *axis),
        Function::Roll { axes } => rearrange::run_roll(call, axes),
        Function::Squeeze { dims } => rearrange::run_squeeze(call, dims),
        Function::Stack { axis } => rearrange::run_stack(call, *axis),
        Function::Tile => rearrange::run_tile(call),
        Function::Tril { k } | Function::Triu { k } => rearrange::run_triangle(function, call, *k),

        Function::Gather { axes, slice_sizes } => gather::run_gather(call, axes, slice_sizes),
        Function::IndexCopy { axis } => gather::run_index_copy(call, *axis),
        Function::ScatterAdd { axis } => gather::run_scatter_add(call, *axis),
        Function::SliceUpdate { step } => gather::run_slice_update(call, *step),
        Function::TakeAlongAxis { axis } => gather::run_take_along_axis(call, *axis),

        Function::Conv(convolution) => convolution::run(call, convolution),
        Function::Dequantize { packing, biases, global_scale, dtype } => {
            packed::run_dequantize(call, *packing, [*biases, *global_scale], *dtype)
        }
        Function::PackedMatmul { packing, transpose, biases } => {
            packed::run_matmul(call, *packing, *transpose, *biases)
        }
        Function::GatherMm { lhs, rhs, sorted } => {
            experts::run_gather_mm(call, [*lhs, *rhs], *sorted)
        }
        Function::GatherQmm { packing, transpose, biases, lhs, rhs, sorted } => {
            let given = [*biases, *lhs, *rhs];
            experts::run_gather_qmm(call, *packing, *transpose, given, *sorted)
        }

        Function::Rope { dims, traditional, base, scale, offsets, freqs } => {
            let rotation =
                rotary::Rotation { dims: *dims, traditional: *traditional, scale: *scale };
            rotary::run_rope(call, rotation, *base, [*offsets, *freqs])
        }
        Function::Sdpa { scale, causal, mask, last_query } => {
            attention::run_sdpa(call, *scale, [*causal, *mask], *last_query)
        }
    }
}

/// Returns an axis of a tensor with this number of axes. A negative one counts from the end.
pub use super::shape::normalize_axis;
pub use crate::ops::limits::check_size;

/// An empty handle, which MLX treats as an absent array.
pub fn none() -> mlx_sys::mlx_array {
    mlx_sys::mlx_array { ctx: std::ptr::null_mut() }
}
