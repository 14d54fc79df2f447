//! Decodes and runs operations.
//!
//! A new operation needs a line in the decoding table, and a function that decodes it. If passes inspect the
//! operation, it is a variant of [`Op`] with an arm in [`run`]. Otherwise it is a [`Function`](crate::ir::Function)
//! with an arm in `calls`.

mod activation;
mod attention;
pub mod bounds;
mod by_expert;
mod calls;
mod compare;
mod compiled;
mod convolution;
mod create;
pub mod cuda_text;
mod elementwise;
mod experts;
pub mod frame;
mod fused_scan;
mod gather;
mod heads;
mod indexing;
mod integers;
pub mod limits;
mod linear;
mod many_rows;
mod metal;
mod norm;
mod order;
mod packed;
mod quantized;
mod rearrange;
mod recurrent;
mod reduction;
mod rotary;
mod shape;
pub mod slots;
mod views;
mod weights;

use mlx_rs::Array;

pub use self::linear::ROWS_THAT_RECUR;
pub use self::rearrange::note_reduced;
pub use self::shape::normalize_axis;
pub use self::views::Pieces;
use crate::error::{fail, Result};
use crate::fb::{self, OpNode};
use crate::ir::{Binary, Function, Instruction, Int, IntBinary, OneAxis, Op, Out, Unary};
use crate::ops::frame::Frame;
use crate::ops::slots::Slots;

/// The result of an instruction.
pub enum OpResult {
    /// A tensor.
    Tensor(Array),
    /// Several tensors.
    Tensors(views::Pieces),
    /// An integer.
    Int(i32),
}

/// Decodes a node with a function of the table. Functions for several types of nodes take the fields of the node.
macro_rules! decode_with {
    ($slots:ident, $node:ident, elementwise::unary($function:ident)) => {
        elementwise::unary($slots, Unary::$function, $node.x(), $node.out())
    };
    ($slots:ident, $node:ident, elementwise::binary($function:ident)) => {
        elementwise::binary($slots, Binary::$function, [$node.a(), $node.b()], $node.out())
    };
    ($slots:ident, $node:ident, integers::binary($function:ident)) => {
        integers::binary($slots, IntBinary::$function, [$node.a(), $node.b()], $node.out())
    };
    ($slots:ident, $node:ident, compare::pair($function:ident)) => {
        compare::pair($slots, Function::$function, [$node.a(), $node.b()], $node.out())
    };
    ($slots:ident, $node:ident, reduction::reduction($function:ident)) => {{
        let over = reduction::over($node.axes(), $node.keepdims());
        reduction::decode($slots, Function::$function(over), $node.x(), $node.out())
    }};
    ($slots:ident, $node:ident, reduction::spread($function:ident)) => {{
        let over = reduction::over($node.axes(), $node.keepdims());
        let function = Function::$function { over, ddof: $node.ddof() };
        reduction::decode($slots, function, $node.x(), $node.out())
    }};
    ($slots:ident, $node:ident, reduction::place($function:ident)) => {{
        let over = OneAxis { axis: $node.axis(), keep_dims: $node.keepdims() };
        reduction::decode($slots, Function::$function(over), $node.x(), $node.out())
    }};
    ($slots:ident, $node:ident, $module:ident::$decode:ident()) => {
        $module::$decode($slots, $node)
    };
}

/// The decoding table: node type, accessor of the schema's union, function.
macro_rules! decoding {
    ($($kind:ident: $accessor:ident => $module:ident::$decode:ident$(($function:ident))?,)+) => {
        /// Returns whether this build has the operation.
        pub fn is_known(kind: OpNode) -> bool {
            matches!(
                kind,
                OpNode::NoopNode
                    | OpNode::IdCopyNode
                    | OpNode::IfNode
                    | OpNode::ScanNode
                    | OpNode::SplitNode
                    $(| OpNode::$kind)+
            )
        }

        fn decode_node(slots: &mut Slots, instruction: fb::Instruction) -> Result<Instruction> {
            match instruction.op_type() {
                $(OpNode::$kind => match instruction.$accessor() {
                    Some(node) => decode_with!(slots, node, $module::$decode($($function)?)),
                    None => fail!(Program, "{} is empty", stringify!($kind)),
                },)+
                other => fail!(Unsupported, "{other:?}"),
            }
        }
    };
}

decoding! {
    ARangeNode: op_as_arange_node => create::arange,
    AbsNode: op_as_abs_node => elementwise::unary(Abs),
    AddIntNode: op_as_add_int_node => integers::binary(Add),
    AddNode: op_as_add_node => elementwise::binary(Add),
    AddmmNode: op_as_addmm_node => linear::addmm,
    AllNode: op_as_all_node => reduction::reduction(All),
    AnyNode: op_as_any_node => reduction::reduction(Any),
    ArccosNode: op_as_arccos_node => elementwise::unary(Arccos),
    ArccoshNode: op_as_arccosh_node => elementwise::unary(Arccosh),
    ArcsinNode: op_as_arcsin_node => elementwise::unary(Arcsin),
    ArcsinhNode: op_as_arcsinh_node => elementwise::unary(Arcsinh),
    ArctanNode: op_as_arctan_node => elementwise::unary(Arctan),
    ArctanhNode: op_as_arctanh_node => elementwise::unary(Arctanh),
    ArgPartitionNode: op_as_arg_partition_node => order::argpartition,
    ArgmaxNode: op_as_argmax_node => reduction::place(Argmax),
    ArgminNode: op_as_argmin_node => reduction::place(Argmin),
    ArgsortNode: op_as_argsort_node => order::argsort,
    AsStridedNode: op_as_as_strided_node => rearrange::as_strided,
    AsTypeNode: op_as_as_type_node => elementwise::as_type,
    Atan2Node: op_as_atan_2_node => elementwise::binary(Atan2),
    BitwiseAndNode: op_as_bitwise_and_node => compare::pair(BitwiseAnd),
    BitwiseInvertNode: op_as_bitwise_invert_node => elementwise::unary(BitwiseInvert),
    BitwiseOrNode: op_as_bitwise_or_node => compare::pair(BitwiseOr),
    BitwiseXorNode: op_as_bitwise_xor_node => compare::pair(BitwiseXor),
    BroadcastToNode: op_as_broadcast_to_node => rearrange::broadcast_to,
    CeilNode: op_as_ceil_node => elementwise::unary(Ceil),
    ClipNode: op_as_clip_node => compare::clip,
    ConcatenateNode: op_as_concatenate_node => shape::concatenate,
    ContiguousNode: op_as_contiguous_node => rearrange::contiguous,
    Conv1DNode: op_as_conv_1_dnode => convolution::conv1d,
    Conv2DNode: op_as_conv_2_dnode => convolution::conv2d,
    Conv3DNode: op_as_conv_3_dnode => convolution::conv3d,
    ConvTranspose1DNode: op_as_conv_transpose_1_dnode => convolution::conv_transpose1d,
    ConvTranspose2DNode: op_as_conv_transpose_2_dnode => convolution::conv_transpose2d,
    ConvTranspose3DNode: op_as_conv_transpose_3_dnode => convolution::conv_transpose3d,
    CosNode: op_as_cos_node => elementwise::unary(Cos),
    CoshNode: op_as_cosh_node => elementwise::unary(Cosh),
    CumsumNode: op_as_cumsum_node => reduction::cumsum,
    DequantizeNode: op_as_dequantize_node => quantized::dequantize,
    DivideNode: op_as_divide_node => elementwise::binary(Divide),
    EqualNode: op_as_equal_node => compare::pair(Equal),
    ErfNode: op_as_erf_node => elementwise::unary(Erf),
    ExpNode: op_as_exp_node => elementwise::unary(Exp),
    ExpandDimsNode: op_as_expand_dims_node => shape::expand_dims,
    Expm1Node: op_as_expm_1_node => elementwise::unary(Expm1),
    FlipNode: op_as_flip_node => rearrange::flip,
    FloorDivideIntNode: op_as_floor_divide_int_node => integers::binary(FloorDivide),
    FloorDivideNode: op_as_floor_divide_node => elementwise::binary(FloorDivide),
    FloorNode: op_as_floor_node => elementwise::unary(Floor),
    FullLikeNode: op_as_full_like_node => create::full_like,
    FullNode: op_as_full_node => create::full,
    GatherMmNode: op_as_gather_mm_node => experts::gather_mm,
    GatherNode: op_as_gather_node => gather::gather,
    GatherQmmNode: op_as_gather_qmm_node => experts::gather_qmm,
    GeluNode: op_as_gelu_node => elementwise::gelu,
    GreaterEqualNode: op_as_greater_equal_node => compare::pair(GreaterEqual),
    GreaterNode: op_as_greater_node => compare::pair(Greater),
    IndexCopyNode: op_as_index_copy_node => gather::index_copy,
    ItemIntNode: op_as_item_int_node => integers::item,
    LayerNormNode: op_as_layer_norm_node => norm::layer_norm,
    LessEqualNode: op_as_less_equal_node => compare::pair(LessEqual),
    LessNode: op_as_less_node => compare::pair(Less),
    Log10Node: op_as_log_10_node => elementwise::unary(Log10),
    Log1pNode: op_as_log_1p_node => elementwise::unary(Log1p),
    Log2Node: op_as_log_2_node => elementwise::unary(Log2),
    LogAddExpNode: op_as_log_add_exp_node => elementwise::binary(LogAddExp),
    LogNode: op_as_log_node => elementwise::unary(Log),
    LogSumExpNode: op_as_log_sum_exp_node => reduction::reduction(LogSumExp),
    LogicalAndNode: op_as_logical_and_node => compare::pair(LogicalAnd),
    LogicalNotNode: op_as_logical_not_node => compare::logical_not,
    LogicalOrNode: op_as_logical_or_node => compare::pair(LogicalOr),
    MaxNode: op_as_max_node => reduction::reduction(Max),
    MaximumNode: op_as_maximum_node => elementwise::binary(Maximum),
    MeanNode: op_as_mean_node => reduction::reduction(Mean),
    MedianNode: op_as_median_node => reduction::reduction(Median),
    MinNode: op_as_min_node => reduction::reduction(Min),
    MinimumNode: op_as_minimum_node => elementwise::binary(Minimum),
    MetalKernelNode: op_as_metal_kernel_node => metal::metal_kernel,
    ModIntNode: op_as_mod_int_node => integers::binary(Modulo),
    MultiplyIntNode: op_as_multiply_int_node => integers::binary(Multiply),
    MultiplyNode: op_as_multiply_node => elementwise::binary(Multiply),
    NegNode: op_as_neg_node => elementwise::unary(Neg),
    NotEqualNode: op_as_not_equal_node => compare::pair(NotEqual),
    PadNode: op_as_pad_node => rearrange::pad,
    PartitionNode: op_as_partition_node => order::partition,
    PowerNode: op_as_power_node => elementwise::binary(Power),
    ProdNode: op_as_prod_node => reduction::reduction(Prod),
    QuantizedMatmulNode: op_as_quantized_matmul_node => quantized::quantized_matmul,
    RMSNormNode: op_as_rmsnorm_node => norm::rms_norm,
    RandomBitsNode: op_as_random_bits_node => create::random_bits,
    ReciprocalNode: op_as_reciprocal_node => elementwise::unary(Reciprocal),
    RemainderNode: op_as_remainder_node => elementwise::binary(Remainder),
    RepeatNode: op_as_repeat_node => rearrange::repeat,
    ReshapeNode: op_as_reshape_node => shape::reshape,
    RollNode: op_as_roll_node => rearrange::roll,
    RopeNode: op_as_rope_node => rotary::rope,
    RoundNode: op_as_round_node => compare::round,
    RsqrtNode: op_as_rsqrt_node => elementwise::unary(Rsqrt),
    ScatterAddNode: op_as_scatter_add_node => gather::scatter_add,
    SdpaNode: op_as_sdpa_node => attention::sdpa,
    SigmoidNode: op_as_sigmoid_node => elementwise::unary(Sigmoid),
    SignNode: op_as_sign_node => elementwise::unary(Sign),
    SiluNode: op_as_silu_node => elementwise::unary(Silu),
    SinNode: op_as_sin_node => elementwise::unary(Sin),
    SinhNode: op_as_sinh_node => elementwise::unary(Sinh),
    SliceNode: op_as_slice_node => shape::slice,
    SliceUpdateNode: op_as_slice_update_node => gather::slice_update,
    SoftmaxNode: op_as_softmax_node => reduction::softmax,
    SortNode: op_as_sort_node => order::sort,
    SqrtNode: op_as_sqrt_node => elementwise::unary(Sqrt),
    SquareNode: op_as_square_node => elementwise::unary(Square),
    SqueezeNode: op_as_squeeze_node => rearrange::squeeze,
    StackNode: op_as_stack_node => rearrange::stack,
    StdNode: op_as_std_node => reduction::spread(Std),
    SubtractIntNode: op_as_subtract_int_node => integers::binary(Subtract),
    SubtractNode: op_as_subtract_node => elementwise::binary(Subtract),
    SumNode: op_as_sum_node => reduction::reduction(Sum),
    SymSizeNode: op_as_sym_size_node => shape::sym_size,
    TakeAlongAxisNode: op_as_take_along_axis_node => gather::take_along_axis,
    TakeNode: op_as_take_node => indexing::take,
    TanNode: op_as_tan_node => elementwise::unary(Tan),
    TanhNode: op_as_tanh_node => elementwise::unary(Tanh),
    TileNode: op_as_tile_node => rearrange::tile,
    TransposeNode: op_as_transpose_node => shape::transpose,
    TriNode: op_as_tri_node => create::tri,
    TrilNode: op_as_tril_node => rearrange::tril,
    TriuNode: op_as_triu_node => rearrange::triu,
    TruncNode: op_as_trunc_node => elementwise::unary(Trunc),
    UpdateAndAttendNode: op_as_update_and_attend_node => attention::update_and_attend,
    UpdateAndAttendSinksNode: op_as_update_and_attend_sinks_node => attention::update_and_attend_sinks,
    UpdateAndConvolveNode: op_as_update_and_convolve_node => recurrent::update_and_convolve,
    UpdateAndScanNode: op_as_update_and_scan_node => recurrent::update_and_scan,
    VarNode: op_as_var_node => reduction::spread(Var),
    WhereNode: op_as_where_node => compare::choose,
}

/// Decodes an instruction. The result is usually one operation. An instruction that only renames has none, and a
/// split has one for each output.
pub fn decode(slots: &mut Slots, instruction: fb::Instruction) -> Result<Vec<Instruction>> {
    if instruction.op_type() == OpNode::NoopNode {
        return Ok(Vec::new());
    }
    if let Some(node) = instruction.op_as_id_copy_node() {
        slots.copy(node.x(), node.out())?;
        return Ok(Vec::new());
    }
    // A concatenation of one tensor, which exporters write for heads that rotate completely.
    if let Some(node) =
        instruction.op_as_concatenate_node().filter(|node| node.tensors().len() == 1)
    {
        slots.copy(node.tensors().get(0), node.out())?;
        return Ok(Vec::new());
    }
    if let Some(node) = instruction.op_as_split_node() {
        return shape::split(slots, node);
    }
    Ok(vec![decode_node(slots, instruction)?])
}

/// Runs an operation.
pub fn run(op: &Op, frame: &mut Frame) -> Result<OpResult> {
    Ok(OpResult::Tensor(match op {
        Op::Unary { function, x } => elementwise::run_unary(*function, frame.tensor(*x)?)?,
        Op::Binary { function, a, b } => {
            elementwise::run_binary(*function, frame.tensor(*a)?, frame.tensor(*b)?)?
        }
        Op::AsType { x, dtype } => etkv::mlx::cast(frame.tensor(*x)?, *dtype)?,
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
            return views::run_split(frame.tensor(*x)?, *axis, at, sizes).map(OpResult::Tensors)
        }
        Op::ReshapeTranspose { x, shape, perm } => {
            views::run_reshape_transpose(frame, *x, shape, perm)?
        }
        Op::TransposeReshape { x, perm, shape } => {
            views::run_transpose_reshape(frame, *x, perm, shape)?
        }
        Op::Activation { function, x, by } => {
            activation::run(frame, *function, frame.tensor(*x)?, frame.optional(*by)?)?
        }
        Op::Elementwise { expression, inputs } => {
            compiled::run(frame.on_gpu(), expression, &frame.tensors(inputs)?)?
        }
        Op::NormInFloat32 { x, norm, scale, dtype } => {
            norm::run_in_float32(frame, *x, *norm, *scale, *dtype)?
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
            linear::linear(&linear::product_of(frame, [*x, *weight], *bias, *transposed, None)?)?
        }
        Op::LinearBlock { x, weight, bias, transposed, norm, gate, residual } => {
            let product = linear::product_of(frame, [*x, *weight], *bias, *transposed, *norm)?;
            linear::run_block(frame, &product, *gate, *residual)?
        }
        Op::LinearHeads { x, weight, bias, transposed, norm, heads } => {
            let product = linear::product_of(frame, [*x, *weight], *bias, *transposed, *norm)?;
            return heads::run(frame, product, heads).map(OpResult::Tensors);
        }
        Op::QuantizedMatmul { x, w, scales, biases, packing, transpose } => {
            let weight = [*w, *scales];
            quantized::run_quantized_matmul(frame, *x, weight, *biases, *packing, *transpose)?
        }
        Op::Dequantize { w, scales, biases, packing, dtype } => {
            quantized::run_dequantize(frame, [*w, *scales], *biases, *packing, *dtype)?
        }
        Op::UpdateAndAttend {
            q,
            k,
            v,
            position,
            layer,
            scale,
            softcap,
            sinks,
            out_dtype,
            last_query,
        } => {
            let call = attention::Call {
                layer: *layer,
                scale: *scale,
                softcap: *softcap,
                sinks: *sinks,
                out_dtype: *out_dtype,
                last_query: *last_query,
            };
            attention::run_update_and_attend(frame, [*q, *k, *v], *position, call)?
        }
        Op::UpdateRecurrent(call) => recurrent::run(frame, call)?,
        Op::Rotary { x, offsets, periods, dtype } => {
            rotary::run(frame, *x, [*offsets, *periods], *dtype)?
        }
        Op::RotaryPeriods { inverse } => frame.tensor(*inverse)?.reshape(&[-1])?.reciprocal()?,
        Op::LastToken { x } => shape::run_last_token(frame.tensor(*x)?)?,
        Op::WantedRows { x } => {
            let x = frame.tensor(*x)?;
            // A tensor without a separate axis for features cannot be logits. The reader of the logits returns the
            // error.
            match frame.last_row_only() && x.ndim() > 2 {
                true => shape::run_last_token(x)?,
                false => x.clone(),
            }
        }
        Op::Call { function, tensors, ints } => calls::run(frame, function, tensors, ints)?,
        Op::If { .. } | Op::Scan(_) => fail!(Internal, "the schedule runs nested chains"),
        Op::ItemInt { x } => return integers::run_item(frame.tensor(*x)?).map(OpResult::Int),
        Op::MetalKernel { kernel, inputs, shapes } => {
            return metal::run(frame, kernel, inputs, shapes)
        }
        Op::SymSize { x, dim } => {
            return shape::run_sym_size(frame.tensor(*x)?, *dim).map(OpResult::Int)
        }
        Op::IntBinary { function, a, b } => {
            return integers::run(*function, frame.int(*a)?, frame.int(*b)?).map(OpResult::Int)
        }
    }))
}

fn ints(
    slots: &Slots,
    list: flatbuffers::Vector<'_, flatbuffers::ForwardsUOffset<fb::IntOrVid<'_>>>,
) -> Result<Vec<Int>> {
    list.iter().map(|argument| slots.int(argument)).collect()
}

/// Returns the layer of the node `name`. Scalars are optional in the schema, because flatbuffers has no required
/// scalars.
fn layer_id(name: &str, layer: Option<i32>) -> Result<usize> {
    let Some(layer) = layer else {
        fail!(Program, "expected a layer_id of {name}, got none");
    };
    match usize::try_from(layer) {
        Ok(layer) => Ok(layer),
        Err(_) => fail!(Program, "expected a layer_id of {name} of at least 0, got {layer}"),
    }
}

fn instruction(op: Op, out: Out) -> Instruction {
    Instruction { op, out }
}
