//! The first elements of stored rows, for layers whose values are in their keys.

use std::sync::Arc;

use mlx_rs::{Array, Dtype};

use super::codec::Codec;
use super::planes::{Layout, Parts};
use crate::error::{fail, Result};
use crate::format::KvFormat;
use crate::mlx::slice_axis;

/// The first elements of the rows of another codec. Decoding reads whole rows.
pub(super) struct First {
    /// The codec of the whole rows.
    pub whole: Arc<dyn Codec>,
    /// The number of first elements, at most the elements of a whole row.
    pub elements: i32,
}

impl First {
    fn cut(&self, rows: &Array) -> Result<Array> {
        slice_axis(rows, 3, 0, self.elements, 1)
    }
}

impl Codec for First {
    fn format(&self) -> KvFormat {
        self.whole.format()
    }

    fn head_dim(&self) -> i32 {
        self.elements
    }

    fn layout(&self) -> Layout {
        self.whole.layout()
    }

    fn encode(&self, _rows: &Array) -> Result<Parts> {
        fail!(Internal, "cannot write only the first elements of rows")
    }

    fn decode(&self, parts: &[Array], dtype: Dtype) -> Result<Array> {
        self.cut(&self.whole.decode(parts, dtype)?)
    }

    /// Returns `None`, because the planes have whole rows.
    fn as_dtype<'a>(&self, _parts: &'a [Array], _dtype: Dtype) -> Option<&'a Array> {
        None
    }

    fn weighted(&self, p: &Array, parts: &[Array]) -> Result<Array> {
        self.cut(&self.whole.weighted(p, parts)?)
    }

    fn max_packed(&self) -> Result<i32> {
        self.whole.max_packed()
    }
}
