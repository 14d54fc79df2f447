//! The Metal kernels that ExecuTorch ships, with their template arguments.

use std::fmt;

use mlx_rs::Dtype;

/// A format of GGUF weights: super-blocks of 256 elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Gguf {
    Q4K,
    Q5K,
    Q6K,
}

/// A kernel. Dtypes and sizes are checked when a program is decoded, inputs when it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MetalKernel {
    /// `(values [..., dim], boundaries [15]) -> codes [..., dim / 2]`: codes of 4 bits, two per byte, the first in
    /// the high half. A code is the number of boundaries that a value exceeds.
    TqCompress {
        /// The dtype of the values.
        dtype: Dtype,
    },
    /// `(codes [..., dim / 2], norms [..., 1], centroids [16]) -> [..., dim]`: the centroid of each
    /// code, times the norm.
    TqDequant {
        /// The dtype of norms and result.
        dtype: Dtype,
        /// The number of elements of a vector.
        dim: i32,
    },
    /// `x [..., dim] -> norms [..., 1]`: Euclidean norms, summed in float32.
    TqNorm {
        /// The dtype of vectors and norms.
        dtype: Dtype,
        /// The number of elements of a vector.
        dim: i32,
    },
    /// `(x [..., features], weight [outputs, bytes], bias [outputs]?) -> [..., outputs]`: a linear
    /// layer of GGUF blocks.
    GgufLinear {
        /// The format of the weight.
        format: Gguf,
        /// The dtype of `x`.
        dtype: Dtype,
        /// The dtype of the result.
        out: Dtype,
        /// The number of rows of the weight.
        outputs: i32,
        /// The number of elements of a row.
        features: i32,
    },
    /// `(weight [rows, bytes], indices [...]) -> [..., features]`: rows of GGUF blocks.
    GgufEmbedding {
        /// The format of the weight.
        format: Gguf,
        /// The dtype of the result.
        out: Dtype,
        /// The number of elements of a row.
        features: i32,
        /// The number of rows of the weight, if the kernel specifies them.
        rows: Option<i32>,
    },
    /// `(q, k [B, T, k_heads, k_dim], v [B, T, v_heads, v_dim], decay, beta [B, T, v_heads],
    /// state [B, v_heads, v_dim, k_dim], T) -> ([B, T, v_heads, v_dim], state)`: the gated delta
    /// rule.
    GatedDelta {
        /// The dtype of queries and results.
        dtype: Dtype,
        /// The number of elements of a key.
        k_dim: i32,
        /// The number of elements of a value.
        v_dim: i32,
        /// The number of heads of queries and keys.
        k_heads: i32,
        /// The number of heads of values, a multiple of `k_heads`.
        v_heads: i32,
    },
}

impl MetalKernel {
    /// Returns the dtype of all results.
    pub fn dtype(&self) -> Dtype {
        match *self {
            Self::TqCompress { .. } => Dtype::Uint8,
            Self::TqDequant { dtype, .. }
            | Self::TqNorm { dtype, .. }
            | Self::GatedDelta { dtype, .. } => dtype,
            Self::GgufLinear { out, .. } | Self::GgufEmbedding { out, .. } => out,
        }
    }
}

impl fmt::Display for Gguf {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        out.write_str(match self {
            Self::Q4K => "q4k",
            Self::Q5K => "q5k",
            Self::Q6K => "q6k",
        })
    }
}

/// The kernel's name, without the suffix for the kind of matrix product.
impl fmt::Display for MetalKernel {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::TqCompress { .. } => out.write_str("tq4_compress"),
            Self::TqDequant { .. } => out.write_str("tq_dequant"),
            Self::TqNorm { .. } => out.write_str("tq_norm"),
            Self::GgufLinear { format, .. } => write!(out, "gguf_{format}_linear"),
            Self::GgufEmbedding { format, .. } => write!(out, "gguf_{format}_embedding"),
            Self::GatedDelta { .. } => out.write_str("gated_delta_step"),
        }
    }
}
