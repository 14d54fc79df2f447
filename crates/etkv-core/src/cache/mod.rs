//! Caches: a bookkeeping and a backend's store, behind two faces.
//!
//! A runner controls a [`Cache`], in integers. [`SeqCache`] and [`TreeCache`] add the calls of
//! caches of several sequences and of candidates. A program's `update_and_attend` drives an
//! [`AttendCache`], in the tensors of its backend. One object has both faces.

mod aside;
mod cells;
mod contiguous;
mod passed_limits;
mod storage;

use std::ops::Range;

pub use cells::CellsCache;
pub use contiguous::ContiguousCache;

use crate::config::CacheConfig;
use crate::error::Result;
use crate::format::KvFormat;
use crate::memory::Memory;
use crate::prefix::ShareCache;
use crate::report::CacheReport;
use crate::snapshot::SaveCache;
use crate::spec::Placement;
use crate::store::{Spec, Store};

/// The runner's face of a cache.
pub trait Cache: Send {
    /// Returns the kind's name, as sessions ask for it.
    fn kind(&self) -> &str;

    /// Returns the config that the cache was created with.
    fn config(&self) -> &CacheConfig;

    /// Returns the most positions that the cache holds.
    fn capacity(&self) -> i32;

    /// Returns the limits that the capacity passes, in ascending order, as far as the programs of the cache depend
    /// on them. The rows of a cache that passes other limits are rows of another model: a rotary embedding with
    /// factors for long texts turned them by other angles.
    fn passed_limits(&self) -> &[i32] {
        &[]
    }

    /// Notes that the capacity passes a limit, for [`passed_limits`](Self::passed_limits). A program does so when it
    /// is loaded.
    ///
    /// # Errors
    /// [`Kind`](crate::Status::Kind) if the limit is new and the cache holds rows.
    fn pass_limit(&mut self, _limit: i32) -> Result<()> {
        Ok(())
    }

    /// Returns the number of positions held. One that several sequences share counts once.
    fn length(&self) -> i32;

    /// Returns the position of the next token of the only sequence.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) if there are several sequences.
    fn next_position(&self) -> Result<i32> {
        Ok(self.length())
    }

    /// Returns whether `n` more positions fit; false for a negative `n`.
    fn can_extend(&self, n: i32) -> bool;

    /// Removes every position, and frees the buffers if `release`. The cache is then as new:
    /// conversions are undone as well. Freed buffers are allocated again with the next step,
    /// whatever the growth.
    ///
    /// # Errors
    /// - [`Step`](crate::Status::Step) while a step is open.
    /// - [`Backend`](crate::Status::Backend) if memory is lacking for buffers that are allocated upfront; nothing
    ///   has changed. With `release` it is never lacking.
    fn clear(&mut self, release: bool) -> Result<()>;

    /// Removes the positions from `length` on, of the only sequence.
    ///
    /// # Errors
    /// - [`Position`](crate::Status::Position) if `length` is negative or more than the next
    ///   position; or if it is not 0, and it is less than [`rewindable_to`](Self::rewindable_to) or
    ///   the position before it was removed, so that the sequence could not go on there.
    /// - [`InvalidArgument`](crate::Status::InvalidArgument) if there are several sequences.
    /// - [`Step`](crate::Status::Step) while a step is open, or if the sequence carries a tree and
    ///   some of its positions would stay.
    fn rewind(&mut self, length: i32) -> Result<()>;

    /// Returns the least length other than 0 that the only sequence can be rewound to. Window
    /// layers have dropped what a query further back would see, or earlier positions were removed.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) if there are several sequences.
    fn rewindable_to(&self) -> Result<i32>;

    /// Returns the bytes of the buffers.
    fn memory(&self) -> Memory;

    /// Returns a report of the cache, for monitoring and debugging, even if it is poisoned.
    fn report(&self) -> CacheReport {
        CacheReport::of(self)
    }

    /// Returns the number of the cache in [`MemoryBudget::holders`](crate::MemoryBudget::holders), which never
    /// changes. A cache whose bytes the budget does not count has none.
    fn holder(&self) -> Option<u64> {
        None
    }

    /// Returns the present formats of keys and values.
    fn formats(&self) -> [KvFormat; 2];

    /// Converts stored and future rows to other formats, until the cache is cleared. It converts
    /// one layer's keys or values at a time and needs the memory of one of them besides, which the
    /// [`MemoryBudget`](crate::MemoryBudget) has to have before it begins: where it does not, nothing changes.
    ///
    /// # Errors
    /// - [`InvalidArgument`](crate::Status::InvalidArgument) for a format that some layer's rows do
    ///   not fit; nothing has changed.
    /// - [`Step`](crate::Status::Step) while a step is open.
    /// - [`Backend`](crate::Status::Backend): some layers may be converted and others not, each of them
    ///   whole; call again to go on.
    fn convert(&mut self, k_format: KvFormat, v_format: KvFormat) -> Result<()>;

    /// Returns the face by which the contents are written to a file and read back, if the cache has
    /// it.
    fn saving(&mut self) -> Option<&mut dyn SaveCache> {
        None
    }

    /// Returns the face by which one sequence is written to a file and read back, if the cache has several and
    /// the face. What it writes is a cache that holds this sequence alone, as sequence 0. It reads such a cache
    /// of any kind, adds its sequence to what the cache holds, and needs the memory of its rows twice meanwhile.
    /// A sequence number is checked by its calls:
    ///
    /// - `snapshot` returns [`InvalidArgument`](crate::Status::InvalidArgument) for a number out of range, for a
    ///   sequence without positions, and for one that carries candidates.
    /// - `restore` returns [`InvalidArgument`](crate::Status::InvalidArgument) for a number out of range and for a
    ///   sequence that holds positions or carries candidates,
    ///   [`Capacity`](crate::Status::Capacity) if the sequence does not fit beside the others, and
    ///   [`File`](crate::Status::File) for values that are not finite, which other sequences would read.
    fn saving_sequence(&mut self, _sequence: i32) -> Option<Box<dyn SaveCache + '_>> {
        None
    }

    /// Returns an empty cache of the same backend, kind and config, if the cache can make one. It allocates what
    /// it holds and no more.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend) if memory is lacking.
    fn make_empty(&self) -> Result<Option<Box<dyn Cache>>> {
        Ok(None)
    }

    /// Returns the face by which the contents are shared with other caches, if the cache has it.
    fn sharing(&mut self) -> Option<&mut dyn ShareCache> {
        None
    }

    /// Returns the face for several sequences, if the cache has it.
    fn sequences(&self) -> Option<&dyn SeqCache> {
        None
    }

    /// Returns [`sequences`](Self::sequences) for calls that change something.
    fn sequences_mut(&mut self) -> Option<&mut dyn SeqCache> {
        None
    }

    /// Returns the face for trees of candidates, if the cache has it.
    fn trees(&self) -> Option<&dyn TreeCache> {
        None
    }

    /// Returns [`trees`](Self::trees) for calls that change something.
    fn trees_mut(&mut self) -> Option<&mut dyn TreeCache> {
        None
    }
}

/// The runner's face of a cache that many sequences share. Sequences are numbered from 0 to
/// [`MAX_SEQUENCES`](crate::bookkeeping::MAX_SEQUENCES) - 1. They need no creation: a sequence
/// without positions is empty.
///
/// Ranges are of positions; `i32::MAX` as the end means all that follow.
///
/// While a step is open and not [set aside](AttendCache::set_aside), every call that changes something
/// is refused with [`Step`](crate::Status::Step), and queries answer as before the step. Every call answers
/// [`InvalidArgument`](crate::Status::InvalidArgument) to a number out of range and to a range that
/// ends before it starts or starts below 0. Behind a step that was
/// [committed unread](AttendCache::commit_unread), a call that changes something returns its error if the
/// values of that step are not finite.
pub trait SeqCache: Cache {
    /// Declares the sequence of each token of the next step. Without a declaration the tokens are
    /// those of the proposed frontiers, by the number of their sequence; without frontiers, those
    /// of the only sequence. The declaration holds until a step is committed or another declaration
    /// replaces it.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for no tokens or a number out of range;
    /// [`Step`](crate::Status::Step) while a step is open. An earlier declaration then holds.
    fn begin_step(&mut self, sequences: &[i32]) -> Result<()>;

    /// Declares the sequences of each token, which may be several; they share the token's cell.
    ///
    /// # Errors
    /// As [`begin_step`](Self::begin_step), and
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a token of no
    /// sequence, or twice of the same.
    fn begin_step_shared(&mut self, sequences: &[&[i32]]) -> Result<()>;

    /// Withdraws the declaration of [`begin_step`](Self::begin_step) or
    /// [`begin_step_shared`](Self::begin_step_shared), for a host whose step does not come. Does
    /// nothing without one.
    ///
    /// # Errors
    /// [`Step`](crate::Status::Step) while a step is open.
    fn cancel_step(&mut self) -> Result<()>;

    /// Returns whether the next step is text of the only sequence: none are declared for it, and no
    /// [frontier](TreeCache::propose) waits for it.
    fn awaits_text(&self) -> bool;

    /// Makes `target` share `source`'s positions, in the same cells. No bytes move.
    ///
    /// # Errors
    /// [`Position`](crate::Status::Position) if `target` has other cells for some of them, or if
    /// window layers have dropped what its next query would see. [`Step`](crate::Status::Step) if
    /// `target` carries a tree, or while a step is open.
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for numbers or a range out of range.
    fn seq_cp(&mut self, source: i32, target: i32, positions: Range<i32>) -> Result<()>;

    /// Removes positions from a sequence. A cell without an owner is free. A sequence without
    /// positions begins at 0 again, also if its first position was another.
    ///
    /// # Errors
    /// [`Position`](crate::Status::Position) if the sequence would go on below
    /// [`seq_rewindable_to`](Self::seq_rewindable_to). [`Step`](crate::Status::Step) if it carries
    /// a tree and some of its positions would stay, or while a step is open.
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a number or range out of range.
    fn seq_rm(&mut self, sequence: i32, positions: Range<i32>) -> Result<()>;

    /// Removes every sequence but one.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a number out of range;
    /// [`Step`](crate::Status::Step) while a step is open.
    fn seq_keep(&mut self, sequence: i32) -> Result<()>;

    /// Returns the number of positions that a sequence holds.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a number out of range.
    fn seq_len(&self, sequence: i32) -> Result<i32>;

    /// Returns the position of a sequence's next token: one past its last. After a removal at the
    /// front it is more than the number of positions.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a number out of range.
    fn seq_next(&self, sequence: i32) -> Result<i32>;

    /// Returns the positions that a sequence holds, as ranges in order.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a number out of range.
    fn seq_positions(&self, sequence: i32) -> Result<Vec<Range<i32>>>;

    /// Returns what [`Cache::rewindable_to`] returns, for one of several sequences.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a number out of range.
    fn seq_rewindable_to(&self, sequence: i32) -> Result<i32>;

    /// Returns the sequences that hold positions or carry trees, in order.
    fn live_sequences(&self) -> Vec<i32>;

    /// Makes each sequence one run of cells, as far as shared cells allow, so that it is read
    /// without a mask again. Moves as few rows as possible.
    ///
    /// # Errors
    /// [`Step`](crate::Status::Step) while a step is open. [`Backend`](crate::Status::Backend) if the
    /// [`MemoryBudget`](crate::MemoryBudget) refuses the slots that rows would move to: nothing has changed; or
    /// if the rows could not be moved: the cache is poisoned until it is cleared.
    fn compact(&mut self) -> Result<()>;
}

/// The runner's face of a cache whose sequences carry trees of candidates.
pub trait TreeCache: SeqCache {
    /// Appends a frontier of candidates to the tree behind a sequence: queries of its next step.
    /// Each sees the sequence, its ancestors and itself. A parent is the number of an earlier node
    /// of the tree, over all its frontiers, or -1 for the sequence itself. A node's position is the
    /// sequence's next position plus its depth.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for no nodes or a parent that is no
    /// earlier node; [`Step`](crate::Status::Step) if the last frontier has not run;
    /// [`Capacity`](crate::Status::Capacity) if the frontier does not fit.
    fn propose(&mut self, sequence: i32, parents: &[i32]) -> Result<()>;

    /// Adds a chain of candidates, from a child of the sequence down, to the sequence, and removes
    /// the rest of its tree. No nodes remove the whole tree.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) if there is no tree, or if the nodes are
    /// no chain of nodes that ran. [`Backend`](crate::Status::Backend) if the rows could not be moved: the
    /// cache is poisoned until it is cleared.
    fn commit_tree(&mut self, sequence: i32, accepted: &[i32]) -> Result<()>;

    /// Returns the number of nodes of the tree behind a sequence, or 0 without a tree.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a number out of range.
    fn tree_len(&self, sequence: i32) -> Result<usize>;
}

/// The program's face of a cache. Drive it through a [`Step`](crate::Step), which always ends what
/// it opens.
pub trait AttendCache: Cache {
    /// The storage of the backend whose tensors the cache takes.
    type Store: Store;

    /// Opens a step for tokens at these positions, one for each query token.
    ///
    /// # Errors
    /// Those of the cache for positions that it refuses, and [`Step`](crate::Status::Step) while
    /// another step is open.
    fn begin(&mut self, positions: &[i32]) -> Result<()>;

    /// Writes a layer's new rows and returns what its queries attend to.
    ///
    /// `k` is `[1, n_kv_heads, T, k_head_dim]`, `v` is
    /// `[1, n_kv_heads, T, v_head_dim]`.
    ///
    /// A layer may come again within a step, with the rows that it brought before: in models whose
    /// layers share keys and values, several layers attend to those of one. Such a call writes
    /// nothing and returns the same.
    ///
    /// # Errors
    /// - [`Step`](crate::Status::Step) outside a step.
    /// - [`Shape`](crate::Status::Shape) for rows that do not fit, or a layer out of range.
    /// - [`Backend`](crate::Status::Backend).
    fn update_and_fetch(
        &mut self,
        layer: usize,
        k: &<Self::Store as Store>::Tensor,
        v: &<Self::Store as Store>::Tensor,
    ) -> Result<Spec<Self::Store>>;

    /// Takes a layer's new rows as written and returns where they go: the caller writes them into the
    /// [store](Self::store) itself, before it commits. The slots are allocated. Returns `None`, and
    /// changes nothing, if this cache has to see the rows.
    ///
    /// Where sequences share cells, the caller commits no values that are not finite: other sequences would
    /// read them, with a weight of 0, as NaN.
    ///
    /// # Errors
    /// As [`update_and_fetch`](Self::update_and_fetch).
    fn place(&mut self, _layer: usize) -> Result<Option<Placement>> {
        Ok(None)
    }

    /// Returns the storage, if rows can be [placed](Self::place) in it.
    fn store(&self) -> Option<&Self::Store> {
        None
    }

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
    /// - [`Step`](crate::Status::Step) if no step is open or a layer is missing; the step stays
    ///   open.
    /// - [`Backend`](crate::Status::Backend) if window layers could not move their rows: the cache is
    ///   poisoned until it is cleared.
    fn commit(&mut self) -> Result<()>;

    /// Returns whether [`commit_unread`](Self::commit_unread) leaves the values of the open step to be
    /// read later. Otherwise it is [`commit`](Self::commit), and waits for them.
    fn can_commit_unread(&self) -> bool {
        false
    }

    /// Commits the open step before it is known whether its values are finite, as sequences that share
    /// cells ask of it. The device may still compute them. [`check_unread`](Self::check_unread) reads
    /// them, and undoes the step if they are not.
    ///
    /// Until then queries count the step. One step may begin, and be set aside: the one behind it, which
    /// the same caller begins before it gives the cache to others. Every other call that changes the
    /// cache reads the values first, as does the commit of that step. If they are not finite, the
    /// call undoes the step, changes nothing else and returns the error of `check_unread`; only
    /// [`clear`](Cache::clear) goes on, and a call that declares a step does not ask.
    ///
    /// # Errors
    /// As [`commit`](Self::commit).
    fn commit_unread(&mut self) -> Result<()> {
        self.commit()
    }

    /// Reads the values of the step that was committed unread, and waits for them. If they are not
    /// finite, undoes the step: its positions are removed, as if it had been rolled back. A step that is
    /// open or set aside is rolled back before, with what was declared for one set aside. Does nothing
    /// without such a step.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) if the values are not finite, with the
    /// message of [`commit`](Self::commit).
    fn check_unread(&mut self) -> Result<()> {
        Ok(())
    }

    /// Rolls the step back. Does nothing without one.
    fn abort(&mut self);

    /// Returns whether steps can be set aside.
    fn can_set_aside(&self) -> bool {
        false
    }

    /// Sets the open step aside: a program that runs ahead of its host waits for it without the
    /// cache. Whatever else is then called that changes the cache rolls the step back first, and
    /// withdraws what was declared for it. Returns
    /// the step's number, for [`resume`](Self::resume); `None` if no step is open, or in a cache
    /// that keeps each step open until it ends.
    fn set_aside(&mut self) -> Option<u64> {
        None
    }

    /// Takes a step that was set aside up again, to commit or abort it. Returns `false` if it was
    /// rolled back meanwhile.
    fn resume(&mut self, _step: u64) -> bool {
        false
    }
}
