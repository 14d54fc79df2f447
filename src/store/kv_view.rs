//! Views of rows, for attention, and copies of rows.

use std::fmt;
use std::sync::Arc;

use mlx_rs::{Array, Dtype};

use super::codec::Codec;
use super::first::First;
use super::planes::{self, Parts, HEADS, SLOTS};
use crate::error::Result;
use crate::format::KvFormat;

/// A layer's keys, or its values, as a step reads them: some slots of a pool, in the stored format.
#[derive(Clone)]
pub struct KvView {
    pub(super) codec: Arc<dyn Codec>,
    pub(super) parts: Parts,
    /// Whether the rows are values that are stored as the first elements of the keys.
    pub(super) in_keys: bool,
}

impl KvView {
    /// Returns the values that are the first elements of these keys.
    pub(super) fn first(&self, elements: i32) -> Self {
        let codec = Arc::new(First { whole: Arc::clone(&self.codec), elements });
        Self { codec, parts: self.parts.clone(), in_keys: true }
    }

    /// Returns whether the rows are values that are stored as the first elements of the step's keys.
    pub(crate) fn is_in_keys(&self) -> bool {
        self.in_keys
    }

    /// Returns the whole keys in place of the values. The caller uses only the first elements of its result.
    pub(crate) fn as_values(&self) -> Self {
        Self { in_keys: true, ..self.clone() }
    }

    /// Returns the format of the rows.
    pub fn format(&self) -> KvFormat {
        self.codec.format()
    }

    /// Returns the number of slots.
    pub fn len(&self) -> i32 {
        self.parts.first().map_or(0, |part| part.dim(SLOTS as i32))
    }

    /// Returns whether there are no slots.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of KV heads.
    pub fn n_kv_heads(&self) -> i32 {
        self.parts.first().map_or(0, |part| part.dim(HEADS as i32))
    }

    /// Returns the number of elements of one row.
    pub fn head_dim(&self) -> i32 {
        self.codec.head_dim()
    }

    /// Returns the stored rows, if they are stored in `dtype`.
    pub fn as_dtype(&self, dtype: Dtype) -> Option<&Array> {
        self.codec.as_dtype(&self.parts, dtype)
    }

    /// Returns all rows, `[1, n_kv_heads, n, head_dim]` in `dtype`.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    pub fn dequantized(&self, dtype: Dtype) -> Result<Array> {
        self.codec.decode(&self.parts, dtype)
    }

    /// Returns the slots from `start` to `stop`.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    pub fn slice(&self, start: i32, stop: i32) -> Result<Self> {
        self.along(SLOTS, start, stop)
    }

    /// Returns the rows of the KV heads from `first` to before `last`.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    pub fn heads(&self, first: i32, last: i32) -> Result<Self> {
        self.along(HEADS, first, last)
    }

    fn along(&self, axis: usize, start: i32, stop: i32) -> Result<Self> {
        let parts = planes::along(&self.parts, axis, start, stop)?;
        Ok(Self { codec: Arc::clone(&self.codec), parts, in_keys: self.in_keys })
    }

    /// Returns the products of `q`, `[1, n_kv_heads, m, head_dim]` in float32 or a similar dtype, with every row:
    /// `[1, n_kv_heads, m, n]`.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    pub(crate) fn scores(&self, q: &Array) -> Result<Array> {
        self.codec.scores(q, &self.parts)
    }

    /// Returns the sums of the rows weighted by `p`, `[1, n_kv_heads, m, n]`. The result is
    /// `[1, n_kv_heads, m, head_dim]`.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    pub(crate) fn weighted(&self, p: &Array) -> Result<Array> {
        self.codec.weighted(p, &self.parts)
    }

    /// Returns whether multiplying `m` rows for each KV head, in `dtype`, by the stored rows is faster than unpacking
    /// them first.
    pub(crate) fn packed_is_better(&self, m: i32, dtype: Dtype) -> Result<bool> {
        Ok(self.as_dtype(dtype).is_some() || m <= self.codec.max_packed()?)
    }
}

impl fmt::Debug for KvView {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        let [heads, n, dim] = [self.n_kv_heads(), self.len(), self.head_dim()];
        write!(out, "KvView({}, [1, {heads}, {n}, {dim}])", self.format())
    }
}

/// Bitwise copies of some slots.
#[derive(Debug, Clone)]
pub struct StoredRows {
    pub(super) format: KvFormat,
    pub(super) parts: Parts,
}

impl StoredRows {
    /// Returns the copies, for evaluation.
    pub fn arrays(&self) -> &[Array] {
        &self.parts
    }

    /// Returns the number of slots.
    pub fn len(&self) -> usize {
        self.parts.first().map_or(0, |part| part.dim(SLOTS as i32) as usize)
    }
}
