//! The operations: decoding and running each.
//!
//! A new operation is a variant of [`Op`], one function that decodes it, one that runs it, and a
//! line in each of the two tables here.

mod activation;
mod attention;
mod elementwise;
mod indexing;
mod integers;
mod linear;
mod metal;
mod norm;
mod quantized;
mod rotary;
mod shape;
mod views;

use mlx_rs::Array;

pub use self::linear::ROWS_THAT_RECUR;
use super::fb::{self, OpNode};
use super::frame::Frame;
use super::ir::{Instruction, Int, Op, Out};
use super::slots::Slots;
use crate::error::{fail, Result};

/// The result of an instruction.
pub enum Made {
    /// A tensor.
    Tensor(Array),
    /// Several tensors.
    Tensors(views::Pieces),
    /// An integer.
    Int(i32),
}

/// The decoding table: node type, accessor of the schema's union, function.
macro_rules! decoding {
    ($($kind:ident: $accessor:ident => $decode:expr,)+) => {
        /// Returns whether this build has the operation.
        pub fn is_known(kind: OpNode) -> bool {
            matches!(
                kind,
                OpNode::NoopNode | OpNode::IdCopyNode | OpNode::SplitNode $(| OpNode::$kind)+
            )
        }

        fn decode_node(slots: &mut Slots, instruction: fb::Instruction) -> Result<Instruction> {
            match instruction.op_type() {
                $(OpNode::$kind => match instruction.$accessor() {
                    Some(node) => $decode(slots, node),
                    None => fail!(Program, "{} is empty", stringify!($kind)),
                },)+
                other => fail!(Unsupported, "{other:?}"),
            }
        }
    };
}

decoding! {
    AddIntNode: op_as_add_int_node => integers::add,
    AddNode: op_as_add_node => elementwise::add,
    AddmmNode: op_as_addmm_node => linear::addmm,
    AsTypeNode: op_as_as_type_node => elementwise::as_type,
    ConcatenateNode: op_as_concatenate_node => shape::concatenate,
    CosNode: op_as_cos_node => elementwise::cos,
    DequantizeNode: op_as_dequantize_node => quantized::dequantize,
    DivideNode: op_as_divide_node => elementwise::divide,
    ExpandDimsNode: op_as_expand_dims_node => shape::expand_dims,
    FloorDivideIntNode: op_as_floor_divide_int_node => integers::floor_divide,
    GeluNode: op_as_gelu_node => elementwise::gelu,
    LayerNormNode: op_as_layer_norm_node => norm::layer_norm,
    MetalKernelNode: op_as_metal_kernel_node => metal::metal_kernel,
    ModIntNode: op_as_mod_int_node => integers::modulo,
    MultiplyIntNode: op_as_multiply_int_node => integers::multiply,
    MultiplyNode: op_as_multiply_node => elementwise::multiply,
    NegNode: op_as_neg_node => elementwise::neg,
    PowerNode: op_as_power_node => elementwise::power,
    QuantizedMatmulNode: op_as_quantized_matmul_node => quantized::quantized_matmul,
    RMSNormNode: op_as_rmsnorm_node => norm::rms_norm,
    ReshapeNode: op_as_reshape_node => shape::reshape,
    SigmoidNode: op_as_sigmoid_node => elementwise::sigmoid,
    SiluNode: op_as_silu_node => elementwise::silu,
    SinNode: op_as_sin_node => elementwise::sin,
    SliceNode: op_as_slice_node => shape::slice,
    SubtractIntNode: op_as_subtract_int_node => integers::subtract,
    SubtractNode: op_as_subtract_node => elementwise::subtract,
    SymSizeNode: op_as_sym_size_node => shape::sym_size,
    TakeNode: op_as_take_node => indexing::take,
    TanhNode: op_as_tanh_node => elementwise::tanh,
    TransposeNode: op_as_transpose_node => shape::transpose,
    UpdateAndAttendNode: op_as_update_and_attend_node => attention::update_and_attend,
}

/// Decodes an instruction: usually to one operation, to none if it only renames, and to one for
/// each output of a split.
pub fn decode(slots: &mut Slots, instruction: fb::Instruction) -> Result<Vec<Instruction>> {
    if instruction.op_type() == OpNode::NoopNode {
        return Ok(Vec::new());
    }
    if let Some(node) = instruction.op_as_id_copy_node() {
        slots.copy(node.x(), node.out())?;
        return Ok(Vec::new());
    }
    if let Some(node) = instruction.op_as_split_node() {
        return shape::split(slots, node);
    }
    Ok(vec![decode_node(slots, instruction)?])
}

/// Runs an operation.
pub fn run(op: &Op, frame: &mut Frame) -> Result<Made> {
    Ok(Made::Tensor(match op {
        Op::Unary { function, x } => elementwise::run_unary(*function, frame.tensor(*x)?)?,
        Op::Binary { function, a, b } => {
            elementwise::run_binary(*function, frame.tensor(*a)?, frame.tensor(*b)?)?
        }
        Op::AsType { x, dtype } => crate::mlx::cast(frame.tensor(*x)?, *dtype)?,
        Op::ExpandDims { x, axis } => frame.tensor(*x)?.expand_dims(*axis)?,
        Op::Reshape { x, shape } => shape::run_reshape(frame, *x, shape)?,
        Op::Transpose { x, perm } => frame.tensor(*x)?.transpose_axes(perm)?,
        Op::Slice { x, axis, start, stop, step } => {
            shape::run_slice(frame, *x, *axis, [*start, *stop], *step)?
        }
        Op::Piece { x, axis, start, stop, sizes } => {
            shape::run_piece(frame.tensor(*x)?, *axis, [*start, *stop], sizes)?
        }
        Op::Split { x, axis, at, sizes } => {
            return views::run_split(frame.tensor(*x)?, *axis, at, sizes).map(Made::Tensors)
        }
        Op::ReshapeTranspose { x, shape, perm } => {
            views::run_reshape_transpose(frame, *x, shape, perm)?
        }
        Op::TransposeReshape { x, perm, shape } => {
            views::run_transpose_reshape(frame, *x, perm, shape)?
        }
        Op::Activation { function, x, by } => {
            let by = by.map(|by| frame.tensor(by)).transpose()?;
            activation::run(frame, *function, frame.tensor(*x)?, by)?
        }
        Op::Concatenate { tensors, axis } => shape::run_concatenate(frame, tensors, *axis)?,
        Op::Take { x, index, axis } => indexing::run_take(frame, *x, *index, *axis)?,
        Op::TakeTransposed { x, index } => indexing::run_take_transposed(frame, *x, *index)?,
        Op::RmsNorm { x, weight, eps } => norm::run_rms_norm(frame, *x, *weight, *eps)?,
        Op::LayerNorm { x, weight, bias, eps } => {
            norm::run_layer_norm(frame, *x, *weight, *bias, *eps)?
        }
        Op::Addmm { mat1, mat2, bias, alpha, beta } => {
            linear::run_addmm(frame, [*mat1, *mat2], *bias, *alpha, *beta)?
        }
        Op::Linear { x, weight, bias, transposed } => {
            linear::run_linear(frame, *x, *weight, *bias, *transposed)?
        }
        Op::LinearBlock { x, weight, bias, transposed, norm, gate, plus } => {
            let block = linear::Block { norm: *norm, gate: *gate, plus: *plus };
            linear::run_block(frame, *x, *weight, *bias, *transposed, block)?
        }
        Op::QuantizedMatmul { x, w, scales, biases, packing, transpose } => {
            quantized::run_quantized_matmul(
                frame,
                *x,
                [*w, *scales],
                *biases,
                *packing,
                *transpose,
            )?
        }
        Op::Dequantize { w, scales, biases, packing, dtype } => {
            quantized::run_dequantize(frame, *w, *scales, *biases, *packing, *dtype)?
        }
        Op::UpdateAndAttend { q, k, v, position, layer, scale, out_dtype, last_query } => {
            let call = attention::Call {
                layer: *layer,
                scale: *scale,
                out_dtype: *out_dtype,
                last_query: *last_query,
            };
            attention::run_update_and_attend(frame, [*q, *k, *v], *position, call)?
        }
        Op::Rotary { x, offsets, periods, dtype } => {
            rotary::run(frame, *x, [*offsets, *periods], *dtype)?
        }
        Op::RotaryPeriods { inverse } => frame.tensor(*inverse)?.reshape(&[-1])?.reciprocal()?,
        Op::LastToken { x } => shape::run_last_token(frame.tensor(*x)?)?,
        Op::MetalKernel { kernel, inputs, shapes } => {
            return metal::run(frame, kernel, inputs, shapes)
        }
        Op::SymSize { x, dim } => {
            return shape::run_sym_size(frame.tensor(*x)?, *dim).map(Made::Int)
        }
        Op::IntBinary { function, a, b } => {
            return integers::run(*function, frame.int(*a)?, frame.int(*b)?).map(Made::Int)
        }
    }))
}

fn ints(
    slots: &Slots,
    list: flatbuffers::Vector<'_, flatbuffers::ForwardsUOffset<fb::IntOrVid<'_>>>,
) -> Result<Vec<Int>> {
    list.iter().map(|argument| slots.int(argument)).collect()
}

fn instruction(op: Op, out: Out) -> Instruction {
    Instruction { op, out }
}
