//! Codecs of the storage formats, which convert between a row and the bytes of its planes.

use std::ops::Deref;

use etkv_core::KvFormat;

use super::affine::Affine;
use super::block_float::BlockFloat;
use super::row::Row;
use super::row_codec::RowCodec;
use crate::tensor::Dtype;

/// The codec of any format.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Codec {
    /// Rows of this dtype are stored without conversion.
    Float(Dtype),
    Affine(Affine),
    BlockFloat(BlockFloat),
    Row(Row),
}

impl Codec {
    /// Returns the codec of a format.
    pub fn of(format: KvFormat) -> Self {
        match format {
            KvFormat::F32 => Self::Float(Dtype::F32),
            KvFormat::F16 => Self::Float(Dtype::F16),
            KvFormat::Bf16 => Self::Float(Dtype::Bf16),
            KvFormat::Affine { bits, group } => Self::Affine(Affine::new(bits, group)),
            KvFormat::Mxfp8 => Self::BlockFloat(BlockFloat::Mxfp8),
            KvFormat::Mxfp4 => Self::BlockFloat(BlockFloat::Mxfp4),
            KvFormat::Nvfp4 => Self::BlockFloat(BlockFloat::Nvfp4),
            KvFormat::RowInt4 => Self::Row(Row::Int4),
            KvFormat::RowFp4 => Self::Row(Row::Fp4),
        }
    }
}

impl Deref for Codec {
    type Target = dyn RowCodec;

    fn deref(&self) -> &Self::Target {
        match self {
            Self::Float(codec) => codec,
            Self::Affine(codec) => codec,
            Self::BlockFloat(codec) => codec,
            Self::Row(codec) => codec,
        }
    }
}
