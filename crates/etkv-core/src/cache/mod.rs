//! Caches: a bookkeeping and a backend's store, behind two faces.
//!
//! [`Cache`] is what a runner controls, in integers; [`SeqCache`] and
//! [`TreeCache`] add to it what caches of several sequences and of candidates can
//! do. [`AttendCache`] is what a program's `update_and_attend` drives, in the tensors of
//! its backend.
//! One object has both.

mod cells;
mod contiguous;
mod storage;

use std::ops::Range;

pub use cells::CellsCache;
pub use contiguous::ContiguousCache;

use crate::config::CacheConfig;
use crate::error::Result;
use crate::format::KvFormat;
use crate::memory::Memory;
use crate::report::CacheReport;
use crate::store::{Spec, Store};

/// The runner's face of a cache.
pub trait Cache: Send {
    /// The kind's name, as sessions ask for it.
    fn kind(&self) -> &str;

    /// What the cache was made from.
    fn config(&self) -> &CacheConfig;

    /// The most positions that it holds.
    fn capacity(&self) -> i32;

    /// The positions that it holds; one that several sequences share counts once.
    fn length(&self) -> i32;

    /// The position of the next token, where there is one sequence.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) where there are several.
    fn next_position(&self) -> Result<i32> {
        Ok(self.length())
    }

    /// Whether `n` more positions fit; negative `n` never do.
    fn can_extend(&self, n: i32) -> bool;

    /// Forgets every position, and gives the buffers back if `release`. The cache
    /// is as new then: conversions are undone as well. Buffers that were given back
    /// come again with the next step, whatever the growth.
    ///
    /// # Errors
    /// - [`Step`](crate::Status::Step) while a step is open.
    /// - [`Backend`](crate::Status::Backend) where there is no memory for buffers that are to
    ///   be there from the start.
    fn clear(&mut self, release: bool) -> Result<()>;

    /// Forgets the positions from `length` on, of the one sequence that there is.
    ///
    /// # Errors
    /// - [`Position`](crate::Status::Position) if `length` is negative or more than
    ///   the next position; or if it is not 0, and is less than what
    ///   [`rewindable_to`](Self::rewindable_to) says or the position before it was
    ///   removed, so that the sequence could not go on there.
    /// - [`InvalidArgument`](crate::Status::InvalidArgument) where there are
    ///   several sequences.
    /// - [`Step`](crate::Status::Step) while a step is open, or where the sequence
    ///   carries a tree and some of it would stay.
    fn rewind(&mut self, length: i32) -> Result<()>;

    /// The least length, apart from 0, that the one sequence that there is can be
    /// rewound to: window layers have dropped what a query further back would see,
    /// or the positions before were removed.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) where there are several
    /// sequences.
    fn rewindable_to(&self) -> Result<i32>;

    /// Bytes of the buffers.
    fn memory(&self) -> Memory;

    /// What the cache is and holds, for monitoring and debugging. Also where it is
    /// poisoned.
    fn report(&self) -> CacheReport {
        CacheReport::of(self)
    }

    /// The formats that keys and values are stored in now.
    fn formats(&self) -> [KvFormat; 2];

    /// Stores what is there, and what comes, in other formats, until the cache is
    /// cleared. One layer's keys or values at a time: it takes the memory of one
    /// of them besides.
    ///
    /// # Errors
    /// - [`InvalidArgument`](crate::Status::InvalidArgument) for a format that some
    ///   layer's rows do not fit; nothing has changed.
    /// - [`Step`](crate::Status::Step) while a step is open.
    /// - [`Backend`](crate::Status::Backend): some layers may be converted and others not,
    ///   all of them whole; call again to go on.
    fn convert(&mut self, k_format: KvFormat, v_format: KvFormat) -> Result<()>;

    /// The face for several sequences, where the cache has it.
    fn sequences(&mut self) -> Option<&mut dyn SeqCache> {
        None
    }

    /// The face for trees of candidates, where the cache has it.
    fn trees(&mut self) -> Option<&mut dyn TreeCache> {
        None
    }
}

/// The runner's face of a cache that many sequences share. Sequences have numbers
/// from 0 to [`MAX_SEQUENCES`](crate::bookkeeping::MAX_SEQUENCES) - 1, and need not
/// be made: one that holds nothing is empty.
///
/// Ranges are of positions; `i32::MAX` as the end means all that follow.
///
/// While a step is open, every call that changes something is refused with
/// [`Step`](crate::Status::Step), and those that ask answer as before the step.
/// [`InvalidArgument`](crate::Status::InvalidArgument) is every call's answer to a
/// number that no sequence has, or a range that ends before it starts or starts
/// below 0.
pub trait SeqCache: Cache {
    /// Says which sequence each token of the next step belongs to. Without it, the
    /// tokens are those of the frontiers that were proposed, by the number of their
    /// sequence; and without those, of the only sequence there is. What is said
    /// holds until a step is committed, or something else is said.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for no tokens, or a
    /// number that no sequence has; [`Step`](crate::Status::Step) while a step is
    /// open. What was said before holds then.
    fn begin_step(&mut self, sequences: &[i32]) -> Result<()>;

    /// The same for tokens that belong to several sequences each, which share
    /// their cells.
    ///
    /// # Errors
    /// As [`begin_step`](Self::begin_step), and
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a token of no
    /// sequence, or twice of the same.
    fn begin_step_shared(&mut self, sequences: &[&[i32]]) -> Result<()>;

    /// Withdraws what [`begin_step`](Self::begin_step) or
    /// [`begin_step_shared`](Self::begin_step_shared) declared, for a host whose step
    /// does not come. Does nothing where nothing is declared.
    ///
    /// # Errors
    /// [`Step`](crate::Status::Step) while a step is open.
    fn cancel_step(&mut self) -> Result<()>;

    /// Lets `target` have `source`'s positions as well, in the same cells: no bytes
    /// move.
    ///
    /// # Errors
    /// [`Position`](crate::Status::Position) where `target` has other cells for
    /// some of them, or where window layers have dropped what its next query
    /// would see. [`Step`](crate::Status::Step) where `target` carries a tree, or
    /// while a step is open. [`InvalidArgument`](crate::Status::InvalidArgument) for
    /// numbers or a range that cannot be.
    fn seq_cp(&mut self, source: i32, target: i32, positions: Range<i32>) -> Result<()>;

    /// Takes positions from a sequence. A cell that no sequence has is free. A
    /// sequence of which nothing is left begins at 0 again, also where its first
    /// position was another.
    ///
    /// # Errors
    /// [`Position`](crate::Status::Position) where the sequence would go on below
    /// what [`seq_rewindable_to`](Self::seq_rewindable_to) says.
    /// [`Step`](crate::Status::Step) where it carries a tree, and something stays,
    /// or while a step is open. [`InvalidArgument`](crate::Status::InvalidArgument)
    /// for a number or range that cannot be.
    fn seq_rm(&mut self, sequence: i32, positions: Range<i32>) -> Result<()>;

    /// Removes every sequence but one.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a number that no
    /// sequence has; [`Step`](crate::Status::Step) while a step is open.
    fn seq_keep(&mut self, sequence: i32) -> Result<()>;

    /// Positions that a sequence holds.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a number that no
    /// sequence has.
    fn seq_len(&self, sequence: i32) -> Result<i32>;

    /// The position of a sequence's next token: one past its last. After a removal
    /// at the front that is more than it holds.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a number that no
    /// sequence has.
    fn seq_next(&self, sequence: i32) -> Result<i32>;

    /// The positions that a sequence holds, as ranges in order.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a number that no
    /// sequence has.
    fn seq_positions(&self, sequence: i32) -> Result<Vec<Range<i32>>>;

    /// As [`Cache::rewindable_to`], for one of several sequences.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a number that no
    /// sequence has.
    fn seq_rewindable_to(&self, sequence: i32) -> Result<i32>;

    /// The sequences that hold positions or carry trees, in order.
    fn live_sequences(&self) -> Vec<i32>;

    /// Makes each sequence one run of cells as far as what they share lets it, so
    /// that it is read without a mask again. Moves only what has to.
    ///
    /// # Errors
    /// [`Step`](crate::Status::Step) while a step is open.
    /// [`Backend`](crate::Status::Backend) where the rows could not be moved: the cache is
    /// poisoned until it is cleared.
    fn compact(&mut self) -> Result<()>;
}

/// The runner's face of a cache whose sequences carry trees of candidates.
pub trait TreeCache: SeqCache {
    /// Appends a frontier of candidates to the tree behind a sequence: queries of
    /// its next step. Each sees the sequence, its ancestors and itself. A parent is
    /// the number of an earlier node of the tree, over all its frontiers, or -1 for
    /// the sequence itself. A node's position is the sequence's next and its depth.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for no nodes or a parent
    /// that is no node before; [`Step`](crate::Status::Step) where the last frontier
    /// has not been run; [`Capacity`](crate::Status::Capacity).
    fn propose(&mut self, sequence: i32, parents: &[i32]) -> Result<()>;

    /// Makes a chain of candidates, from a child of the sequence down, part of it,
    /// and forgets the rest of its tree; no nodes forget all of it.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) where there is no tree,
    /// or the nodes are no chain of nodes that were run.
    /// [`Backend`](crate::Status::Backend) where the rows could not be moved: the cache is
    /// poisoned until it is cleared.
    fn commit_tree(&mut self, sequence: i32, accepted: &[i32]) -> Result<()>;

    /// Nodes of the tree behind a sequence; 0 where there is none.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a number that no
    /// sequence has.
    fn tree_len(&self, sequence: i32) -> Result<usize>;
}

/// The program's face of a cache. Drive it through a [`Step`](crate::Step),
/// which cannot forget to end.
pub trait AttendCache: Cache {
    /// The storage of the backend whose tensors it takes.
    type Store: Store;

    /// Opens a step of these positions, one a query token.
    ///
    /// # Errors
    /// The cache's own for positions that it cannot take, and
    /// [`Step`](crate::Status::Step) while another step is open.
    fn begin(&mut self, positions: &[i32]) -> Result<()>;

    /// Writes a layer's new rows and tells what its queries attend to.
    ///
    /// `k` is `[1, n_kv_heads, T, k_head_dim]`, `v` is
    /// `[1, n_kv_heads, T, v_head_dim]`.
    ///
    /// A layer may come again within a step, with the rows that it brought before:
    /// models whose layers share keys and values attend once more to those of one
    /// layer. Such a call writes nothing, and tells the same.
    ///
    /// # Errors
    /// - [`Step`](crate::Status::Step) outside a step.
    /// - [`Shape`](crate::Status::Shape) for rows or layers that do not fit.
    /// - [`Backend`](crate::Status::Backend).
    fn update_and_fetch(
        &mut self,
        layer: usize,
        k: &<Self::Store as Store>::Tensor,
        v: &<Self::Store as Store>::Tensor,
    ) -> Result<Spec<Self::Store>>;

    /// Computes `outputs` together with what the open step wrote.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn eval(&self, outputs: &[&<Self::Store as Store>::Tensor]) -> Result<()>;

    /// Starts what [`eval`](Self::eval) does, and may return before it is done: the
    /// caller waits for the outputs.
    ///
    /// # Errors
    /// As [`eval`](Self::eval).
    fn schedule(&self, outputs: &[&<Self::Store as Store>::Tensor]) -> Result<()> {
        self.eval(outputs)
    }

    /// Makes the step's positions visible.
    ///
    /// # Errors
    /// - [`Step`](crate::Status::Step) if no step is open or a layer is missing;
    ///   the step stays open.
    /// - [`Backend`](crate::Status::Backend) where window layers could not move their rows:
    ///   the cache is poisoned until it is cleared.
    fn commit(&mut self) -> Result<()>;

    /// Ends the step as if it had not been. Does nothing outside one.
    fn abort(&mut self);
}
