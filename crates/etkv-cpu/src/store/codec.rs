//! Codecs of the storage formats, which convert between a row and the bytes of its planes.

use etkv_core::KvFormat;

use super::affine::Affine;
use super::block_float::{BlockFloat, Layout};
use super::float::Float;
use super::row::{Element, Row};
use super::row_codec::{RowCodec, Widths};

/// The codec of any format.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Codec {
    Float(Float),
    Affine(Affine),
    BlockFloat(BlockFloat),
    Row(Row),
}

impl Codec {
    /// Returns the codec of a format.
    pub fn of(format: KvFormat) -> Self {
        match format {
            KvFormat::F32 => Self::Float(Float::F32),
            KvFormat::F16 => Self::Float(Float::F16),
            KvFormat::Bf16 => Self::Float(Float::Bf16),
            KvFormat::Affine { bits, group } => Self::Affine(Affine::new(bits, group)),
            KvFormat::Mxfp8 => Self::BlockFloat(BlockFloat::new(Layout::Mxfp8)),
            KvFormat::Mxfp4 => Self::BlockFloat(BlockFloat::new(Layout::Mxfp4)),
            KvFormat::Nvfp4 => Self::BlockFloat(BlockFloat::new(Layout::Nvfp4)),
            KvFormat::RowInt4 => Self::Row(Row::new(Element::Int4)),
            KvFormat::RowFp4 => Self::Row(Row::new(Element::Fp4)),
        }
    }

    fn of_rows(&self) -> &dyn RowCodec {
        match self {
            Self::Float(codec) => codec,
            Self::Affine(codec) => codec,
            Self::BlockFloat(codec) => codec,
            Self::Row(codec) => codec,
        }
    }

    pub fn widths(&self, head_dim: usize) -> Widths {
        self.of_rows().widths(head_dim)
    }

    pub fn encode(&self, row: &[f32], planes: [&mut [u8]; 3]) {
        self.of_rows().encode(row, planes);
    }

    pub fn decode(&self, planes: [&[u8]; 3], row: &mut [f32]) {
        self.of_rows().decode(planes, row);
    }

    pub fn infinite_from(&self) -> u32 {
        self.of_rows().infinite_from()
    }
}
