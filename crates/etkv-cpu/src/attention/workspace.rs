//! Scratch memory for attention, which is reused between calls.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use etkv_core::Result;

use super::kernels::TILE;
use super::plan::Plan;
use crate::memory::Memory;

/// Memory for calls of [`attend`](super::attend). It grows to the size of the largest call, so only the first
/// step of a shape allocates. Each calling thread needs a separate workspace.
#[derive(Debug, Default)]
pub struct Workspace {
    memory: Option<Memory>,
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

    /// Returns memory for the parts of a call, and scratch memory for each of `threads` threads.
    ///
    /// # Errors
    /// [`Backend`](etkv_core::Status::Backend) if memory is lacking.
    pub(super) fn prepare(&mut self, plan: &Plan, threads: usize) -> Result<(Parts, Blocks<'_>)> {
        let rows = if plan.n_parts > 1 { plan.n_parts * plan.all_rows() } else { 0 };
        let v_padded = plan.sizes.v_padded();
        // The first pass over the pieces, without a block, only computes the size.
        let mut pieces = Pieces::default();
        Parts::new(&mut pieces, rows, v_padded);
        let shared = pieces.used;
        let mut pieces = Pieces::default();
        Scratch::new(&mut pieces, plan);
        let each = pieces.used;
        let size = shared + threads * each;
        let start = Memory::at_least(&mut self.memory, size)?.as_ptr();
        let parts = Parts::new(&mut Pieces { start, used: 0 }, rows, v_padded);
        let start = start.wrapping_add(shared);
        Ok((parts, Blocks { start, each, threads, plan: *plan, lifetime: PhantomData }))
    }
}

/// A block of memory for each thread.
#[derive(Debug)]
pub(super) struct Blocks<'a> {
    start: *mut u8,
    each: usize,
    threads: usize,
    plan: Plan,
    lifetime: PhantomData<&'a mut Workspace>,
}

// SAFETY: `scratch` documents the conditions for the memory that it returns.
unsafe impl Sync for Blocks<'_> {}

impl Blocks<'_> {
    /// Returns the scratch memory of thread `thread`. Its contents are arbitrary.
    ///
    /// # Safety
    /// `thread` must be below the number of threads. Earlier scratch memory of the same thread must not be
    /// used any more. The scratch memory must not be used after the blocks are dropped.
    pub unsafe fn scratch(&self, thread: usize) -> Scratch {
        debug_assert!(thread < self.threads);
        let start = self.start.wrapping_add(thread * self.each);
        let mut scratch = Scratch::new(&mut Pieces { start, used: 0 }, &self.plan);
        (0..).zip(scratch.in_order.iter_mut()).for_each(|(i, number)| *number = i);
        scratch
    }
}

/// Divides a block of memory into consecutive pieces.
struct Pieces {
    start: *mut u8,
    used: usize,
}

impl Default for Pieces {
    fn default() -> Self {
        Self { start: std::ptr::null_mut(), used: 0 }
    }
}

impl Pieces {
    /// Returns a piece for `len` values, aligned to a cache line.
    fn take<T: Number>(&mut self, len: usize) -> Piece<T> {
        let start = self.start.wrapping_add(self.used).cast();
        self.used += (len * size_of::<T>()).next_multiple_of(64);
        Piece { start, len }
    }
}

/// Types for which every bit pattern is valid.
trait Number: Copy {}
impl Number for f32 {}
impl Number for u32 {}
impl Number for u64 {}

/// A piece of a block. Only one thread may use it, and not after the block is dropped.
#[derive(Debug)]
pub(super) struct Piece<T> {
    start: *mut T,
    len: usize,
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
            peaks: pieces.take(rows).start,
            sums: pieces.take(rows).start,
            values: pieces.take(rows * v_padded).start,
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
            queries: pieces.take(all * k_padded),
            part: Parts::new(pieces, all, v_padded),
            scores: pieces.take(rows * TILE),
            keep: pieces.take(rows),
            result: pieces.take(v_padded),
            unpacked: pieces.take(TILE * k_padded.max(v_padded)),
            columns: pieces.take(TILE * k_padded),
            rows: pieces.take(rows),
            in_order: pieces.take(k_padded.max(TILE)),
            seen: pieces.take(rows),
            seen_by_token: pieces.take(plan.tokens),
        }
    }
}
