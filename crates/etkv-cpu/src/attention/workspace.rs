//! Scratch memory for attention, which is reused between calls.

use std::ops::{Deref, DerefMut};

use super::kernels::TILE;
use super::plan::Plan;
use crate::memory::pieces::{Layout, Pieces};
use crate::memory::Memory;

/// Memory for calls of [`attend`](super::attend). It grows to the size of the largest call, so only the first
/// step of a shape allocates. Each calling thread needs a separate workspace.
#[derive(Debug, Default)]
pub struct Workspace {
    pub(super) memory: Option<Memory>,
}

impl Workspace {
    /// Returns a workspace without memory.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns its number of bytes.
    pub fn size(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.bytes().len())
    }
}

impl Layout for Plan {
    type Shared = Parts;
    type Scratch = Scratch;

    fn shared(&self, pieces: &mut Pieces) -> Parts {
        let rows = if self.n_parts > 1 { self.n_parts * self.all_rows() } else { 0 };
        Parts::new(pieces, rows, self.sizes.v_padded())
    }

    fn scratch(&self, pieces: &mut Pieces) -> Scratch {
        Scratch::new(pieces, self)
    }
}

/// Types for which every bit pattern is valid.
pub(super) trait Number: Copy {}
impl Number for f32 {}
impl Number for u32 {}
impl Number for u64 {}

/// A piece of a block. Only one thread may use it, and not after the block is dropped.
#[derive(Debug)]
pub(super) struct Piece<T> {
    start: *mut T,
    len: usize,
}

impl<T: Number> Piece<T> {
    fn of(pieces: &mut Pieces, len: usize) -> Self {
        Self { start: pieces.take(&[len]), len }
    }
}

impl<T> Deref for Piece<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the block has the piece, was zeroed when it was allocated, and every bit pattern is valid.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }
}

impl<T> DerefMut for Piece<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: the same as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }
}

/// Partial results. Each row has a peak, a sum and the weighted values.
#[derive(Debug, Clone, Copy)]
pub(super) struct Parts {
    pub peaks: *mut f32,
    pub sums: *mut f32,
    pub values: *mut f32,
}

// SAFETY: tasks use different rows, and rows are merged after all tasks have ended.
unsafe impl Sync for Parts {}

impl Parts {
    fn new(pieces: &mut Pieces, rows: usize, v_padded: usize) -> Self {
        Self {
            peaks: pieces.take(&[rows]),
            sums: pieces.take(&[rows]),
            values: pieces.take(&[rows, v_padded]),
        }
    }
}

/// The scratch memory of one thread.
#[derive(Debug)]
pub(super) struct Scratch {
    /// The queries of the task in float32.
    pub queries: Piece<f32>,
    /// The partial results of the task, if the plan has only one part.
    pub part: Parts,
    /// A row of [`TILE`] scores for each query row.
    pub scores: Piece<f32>,
    /// The factor of each query row for its sums of earlier tiles.
    pub keep: Piece<f32>,
    /// The result of one row.
    pub result: Piece<f32>,
    /// The unpacked rows of a tile.
    pub unpacked: Piece<f32>,
    /// The keys of a tile, transposed.
    pub columns: Piece<f32>,
    /// The query rows that see a slot of the tile.
    pub rows: Piece<u32>,
    /// The numbers 0, 1, 2 and so on.
    pub in_order: Piece<u32>,
    /// For each of `rows`, a bit for each slot of the tile that it sees.
    pub seen: Piece<u64>,
    /// For each token, a bit for each of the [`TILE`] slots that it sees.
    pub seen_by_token: Piece<u64>,
}

impl Scratch {
    fn new(pieces: &mut Pieces, plan: &Plan) -> Self {
        let (rows, k_padded) = (plan.rows(), plan.sizes.k_padded());
        let (all, v_padded) = (rows * plan.heads, plan.sizes.v_padded());
        Self {
            queries: Piece::of(pieces, all * k_padded),
            part: Parts::new(pieces, all, v_padded),
            scores: Piece::of(pieces, rows * TILE),
            keep: Piece::of(pieces, rows),
            result: Piece::of(pieces, v_padded),
            unpacked: Piece::of(pieces, TILE * k_padded.max(v_padded)),
            columns: Piece::of(pieces, TILE * k_padded),
            rows: Piece::of(pieces, rows),
            in_order: Piece::of(pieces, k_padded.max(TILE)),
            seen: Piece::of(pieces, rows),
            seen_by_token: Piece::of(pieces, plan.tokens),
        }
    }

    /// Writes the numbers of `in_order`.
    pub fn numbered(mut self) -> Self {
        (0..).zip(self.in_order.iter_mut()).for_each(|(i, number)| *number = i);
        self
    }
}
