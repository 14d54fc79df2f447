//! Functions of tensors that no pass transforms.

use mlx_rs::Dtype;

/// A function of tensors and integers. The arguments of an [`Op::Call`](super::Op::Call) are in the order that is
/// documented here. Names and attributes are those of ExecuTorch's schema, which documents them.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub enum Function {
    // Bitwise, of each element.
    BitwiseAnd,
    BitwiseOr,
    BitwiseXor,
    /// The arguments are `x`, then the bounds that exist.
    Clip {
        a_min: bool,
        a_max: bool,
    },
    Equal,
    Greater,
    GreaterEqual,
    Less,
    LessEqual,
    LogicalAnd,
    LogicalNot,
    LogicalOr,
    NotEqual,
    Round {
        decimals: i32,
    },
    Where,

    // Over axes.
    All(Reduction),
    Any(Reduction),
    Argmax(OneAxis),
    Argmin(OneAxis),
    Cumsum {
        axis: i32,
        reverse: bool,
        inclusive: bool,
    },
    LogSumExp(Reduction),
    Max(Reduction),
    Mean(Reduction),
    Median(Reduction),
    Min(Reduction),
    Prod(Reduction),
    Softmax {
        axis: i32,
        precise: bool,
    },
    Std {
        over: Reduction,
        ddof: i32,
    },
    Sum(Reduction),
    Var {
        over: Reduction,
        ddof: i32,
    },

    // Order.
    /// The integer is `kth`.
    ArgPartition {
        axis: i32,
    },
    Argsort {
        axis: i32,
    },
    /// The integer is `kth`.
    Partition {
        axis: i32,
    },
    Sort {
        axis: i32,
    },

    // New tensors.
    /// The integers are `start`, `stop` and `step`.
    ARange {
        dtype: Dtype,
    },
    /// The integers are the shape.
    Full {
        v: Fill,
        dtype: Dtype,
    },
    /// The argument is a tensor with the shape of the result. If no dtype is set, the result has the tensor's dtype.
    FullLike {
        v: Fill,
        dtype: Option<Dtype>,
    },
    /// The integers are the shape, then the seed if there is one.
    RandomBits {
        width: i32,
        seed: bool,
    },
    /// The integers are `n` and `m`.
    Tri {
        k: i32,
        dtype: Dtype,
    },

    // The same elements in another layout.
    /// The integers are the shape, then the strides.
    AsStrided {
        offset: u64,
        /// The axes that the only reader of the result reduces; `None` if the result has other readers.
        reduced: Option<Vec<i32>>,
    },
    /// The integers are the shape.
    BroadcastTo,
    Contiguous,
    Flip {
        axes: Vec<i32>,
    },
    /// The integers are the numbers of elements to add before and after each axis.
    Pad {
        mode: PadMode,
        value: f32,
    },
    /// The integer is the number of repetitions.
    Repeat {
        axis: i32,
    },
    /// The integers are the shifts.
    Roll {
        axes: Vec<i32>,
    },
    Squeeze {
        dims: Vec<i32>,
    },
    Stack {
        axis: i32,
    },
    /// The integers are the repetitions of each axis.
    Tile,
    Tril {
        k: i32,
    },
    Triu {
        k: i32,
    },

    // By index.
    /// The arguments are `x`, then the indices along each axis.
    Gather {
        axes: Vec<i32>,
        slice_sizes: Vec<i32>,
    },
    /// The arguments are the destination, the update and the indices.
    IndexCopy {
        axis: i32,
    },
    /// The arguments are `x`, the indices and the updates.
    ScatterAdd {
        axis: i32,
    },
    /// The arguments are the destination and the update. The integers are axis, start and stop.
    SliceUpdate {
        step: i32,
    },
    TakeAlongAxis {
        axis: i32,
    },

    // Products.
    Conv(Convolution),
    /// The arguments are packed rows, scales, biases if there are any, and the global scale if there is one.
    Dequantize {
        packing: Packing,
        biases: bool,
        global_scale: bool,
        dtype: Option<Dtype>,
    },
    /// The arguments are `a` and `b`, then the indices that exist. The integer, if there is one, is 1 if the indices
    /// of `b` are sorted.
    GatherMm {
        lhs: bool,
        rhs: bool,
        sorted: bool,
    },
    /// The arguments are `x`, packed rows and scales, then biases and indices that exist. The integer is the same as
    /// for `GatherMm`.
    GatherQmm {
        packing: Packing,
        transpose: bool,
        biases: bool,
        lhs: bool,
        rhs: bool,
        sorted: bool,
    },
    /// The arguments are `x`, packed rows, scales, and biases if there are any.
    PackedMatmul {
        packing: Packing,
        transpose: bool,
        biases: bool,
    },

    // Attention.
    /// The arguments are `x`, the offsets if they are a tensor, and frequencies if there are any. The integer
    /// is the offset if there is one.
    Rope {
        dims: i32,
        traditional: bool,
        base: f32,
        scale: f32,
        offsets: bool,
        freqs: bool,
    },
    /// The arguments are queries, keys, values, and a mask if there is one.
    Sdpa {
        scale: f32,
        causal: bool,
        mask: bool,
        /// Set by a pass. Only the last query is computed. The integer is the number of queries.
        last_query: bool,
    },
}

/// The axes that a function reduces; an empty list means all.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub struct Reduction {
    pub axes: Vec<i32>,
    pub keep_dims: bool,
}

/// The axis that a function reduces.
#[derive(Debug, Clone, Copy, PartialEq)]
#[allow(missing_docs)]
pub struct OneAxis {
    pub axis: i32,
    pub keep_dims: bool,
}

/// The number that fills a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fill {
    /// A constant of the exported program.
    Literal(f64),
    /// The number is the last of the call's integers.
    Last,
}

/// How the elements around a padded tensor are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PadMode {
    /// A number.
    Constant,
    /// The outermost elements are repeated.
    Edge,
}

/// A convolution of one, two or three dimensions. The number of strides is the number of dimensions.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)]
pub struct Convolution {
    pub stride: Vec<i32>,
    pub padding: Vec<i32>,
    pub dilation: Vec<i32>,
    /// For a transposed convolution.
    pub output_padding: Option<Vec<i32>>,
    pub groups: i32,
}

/// The packing of the rows of a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Packing {
    pub mode: PackingMode,
    pub group_size: i32,
    pub bits: i32,
}

/// MLX's packing modes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum PackingMode {
    Affine,
    Mxfp4,
    Mxfp8,
    Nvfp4,
}

impl Function {
    /// Returns the name of the function, as in ExecuTorch's schema.
    pub fn name(&self) -> String {
        let text = match self {
            Self::Conv(Convolution { stride, output_padding, .. }) => {
                let kind = if output_padding.is_some() { "ConvTranspose" } else { "Conv" };
                return format!("{kind}{}D", stride.len());
            }
            Self::PackedMatmul { .. } => return String::from("QuantizedMatmul"),
            other => format!("{other:?}"),
        };
        text.split([' ', '{', '(']).next().unwrap_or_default().to_owned()
    }

    /// Returns whether two calls with the same arguments have the same result.
    pub fn is_repeatable(&self) -> bool {
        !matches!(self, Self::RandomBits { seed: false, .. })
    }
}
