//! Caches: bookkeeping and a backend's store, with two faces.
//!
//! A runner controls a [`Cache`], with integers. [`SeqCache`] and [`TreeCache`] add the calls for several
//! sequences and for candidates. A program's `update_and_attend` drives an [`AttendCache`], with the tensors
//! of its backend. One object has both faces.

mod aside;
mod cells;
mod contiguous;
mod passed_limits;
mod reporting;
mod storage;

use std::ops::Range;

pub use cells::CellsCache;
pub use contiguous::ContiguousCache;

use crate::config::CacheConfig;
use crate::error::{fail, Result, Status};
use crate::format::KvFormat;
use crate::memory::Memory;
use crate::prefix::ShareCache;
use crate::reach::Reach;
use crate::report::CacheReport;
use crate::snapshot::SaveCache;
use crate::spec::Placement;
use crate::store::{RecurrentWork, Spec, Store};

/// The tokens before the end of a prompt where a chat's next request often parts from it already: templates
/// write the beginning of an answer in one way and the answer itself in another.
const TURN_MARGIN: i32 = 16;

/// Marks the end of a prompt and the place a little before it, with `mark`.
fn mark_end(end: i32, mark: &mut dyn FnMut(i32) -> Result<i32>) -> Result<()> {
    for position in [end - TURN_MARGIN, end] {
        unless_passed(mark(position.max(0)))?;
    }
    Ok(())
}

/// Ignores the refusal of a mark that lies where the text cannot go back any more.
fn unless_passed(marked: Result<i32>) -> Result<()> {
    match marked {
        Err(error) if error.status() == Status::Position => Ok(()),
        marked => marked.map(drop),
    }
}

/// The runner's face of a cache.
pub trait Cache: Send {
    /// Returns the name of the kind, which sessions use.
    fn kind(&self) -> &str;

    /// Returns the config that the cache was created with.
    fn config(&self) -> &CacheConfig;

    /// Returns the maximum number of positions that the cache holds.
    fn capacity(&self) -> i32;

    /// Returns the limits on which the programs of the cache depend and which its capacity exceeds, in
    /// ascending order. Rows written under other limits belong to another model: a rotary embedding with
    /// factors for long texts rotated them by other angles.
    fn passed_limits(&self) -> &[i32] {
        &[]
    }

    /// Notes that the capacity exceeds a limit, for [`passed_limits`](Self::passed_limits). A program does so
    /// when it is loaded.
    ///
    /// # Errors
    /// [`Kind`](crate::Status::Kind) if the limit is new and the cache holds rows.
    fn pass_limit(&mut self, _limit: i32) -> Result<()> {
        Ok(())
    }

    /// Returns the number of positions held. A position that several sequences share counts once.
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

    /// Removes every position, and frees the buffers if `release`. The cache is then like a new one:
    /// conversions are undone as well. Freed buffers are allocated again with the next step, whatever the
    /// growth.
    ///
    /// # Errors
    /// - [`Step`](crate::Status::Step) while a step is open.
    /// - [`Backend`](crate::Status::Backend) if memory is lacking for buffers that are allocated upfront;
    ///   nothing has changed. This cannot happen with `release`.
    fn clear(&mut self, release: bool) -> Result<()>;

    /// Removes the positions from `length` on of the only sequence.
    ///
    /// # Errors
    /// - [`Position`](crate::Status::Position) if `length` is negative or more than the next position; or if
    ///   it is not 0, and it is below [`rewindable_to`](Self::rewindable_to) or the position before it was
    ///   removed, so that the sequence could not go on there.
    /// - [`InvalidArgument`](crate::Status::InvalidArgument) if there are several sequences.
    /// - [`Step`](crate::Status::Step) while a step is open, or if the sequence carries a tree and
    ///   some of its positions would stay.
    fn rewind(&mut self, length: i32) -> Result<()>;

    /// Returns the least length other than 0 that the only sequence can be rewound to. Below it, window
    /// layers have dropped what a query would see, or positions were removed.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) if there are several sequences.
    fn rewindable_to(&self) -> Result<i32>;

    /// Returns the greatest length, at most `position`, that the only sequence can be rewound to. From
    /// [`rewindable_to`](Self::rewindable_to) on that is every length; below it, the checkpoints and 0.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) if there are several sequences,
    /// [`Position`](crate::Status::Position) for a negative position.
    fn reachable(&self, position: i32) -> Result<i32> {
        if position < 0 {
            fail!(Position, "position {position} is negative");
        }
        let position = position.min(self.next_position()?);
        Ok(if position >= self.rewindable_to()? { position } else { 0 })
    }

    /// Rewinds the only sequence to the greatest length, at most `length`, that it [can be rewound
    /// to](Self::reachable), and returns that: a text whose first `length` tokens the cache holds goes on
    /// there. Tokens from there to `length` run again. Where that is any, and the model has recurrent layers,
    /// it also marks `length`, where the texts part, so that the next one that parts there runs fewer, unless
    /// that can no longer be marked.
    ///
    /// # Errors
    /// Those of [`reachable`](Self::reachable) and [`rewind`](Self::rewind).
    fn rewind_to_reachable(&mut self, length: i32) -> Result<i32> {
        let reached = self.reachable(length)?;
        self.rewind(reached)?;
        if reached < length && !self.config().recurrent_layers.is_empty() {
            unless_passed(self.mark(length))?;
        }
        Ok(reached)
    }

    /// Returns the positions of the checkpoints of the only sequence, ascending.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) if there are several sequences.
    fn checkpoints(&self) -> Result<Vec<i32>> {
        Ok(Vec::new())
    }

    /// Returns the lengths that the only sequence can be rewound to.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) if there are several sequences.
    fn reach(&self) -> Result<Reach> {
        Ok(Reach { rewindable_to: self.rewindable_to()?, checkpoints: self.checkpoints()? })
    }

    /// Makes a checkpoint of the only sequence at `position`, at once if the sequence can be rewound there,
    /// else when a step reaches it. With recurrent layers it lies at the next multiple of
    /// [`BLOCK`](crate::bookkeeping::BLOCK) below. The least useful checkpoint makes room for it. Returns its
    /// position; 0, which can always be reached, if the cache makes none.
    ///
    /// A checkpoint is dropped with the text before it.
    ///
    /// # Errors
    /// - [`InvalidArgument`](crate::Status::InvalidArgument) if there are several sequences.
    /// - [`Position`](crate::Status::Position) for a negative position, or one that is no longer reachable.
    /// - [`Step`](crate::Status::Step) while a step is open.
    /// - [`Unsupported`](crate::Status::Unsupported) by default, and for a contiguous cache with window layers.
    fn mark(&mut self, _position: i32) -> Result<i32> {
        fail!(Unsupported, "a cache of kind `{}` makes no checkpoints", self.kind())
    }

    /// Marks where the prompt of a turn will end, before the prompt runs: the next request of the chat can then
    /// go on there, whatever the answer was. Does nothing for a model without recurrent layers, and for what
    /// can no longer be marked.
    ///
    /// # Errors
    /// Those of [`mark`](Self::mark) but [`Position`](crate::Status::Position).
    fn mark_turn(&mut self, end: i32) -> Result<()> {
        if self.config().recurrent_layers.is_empty() {
            return Ok(());
        }
        mark_end(end, &mut |position| self.mark(position))
    }

    /// Returns the bytes of the buffers.
    fn memory(&self) -> Memory;

    /// Returns a report of the cache, for monitoring and debugging, even if it is poisoned.
    fn report(&self) -> CacheReport {
        CacheReport::of(self)
    }

    /// Returns the cache's number in [`MemoryBudget::holders`](crate::MemoryBudget::holders), which never
    /// changes; `None` if the budget does not count the cache's bytes.
    fn holder(&self) -> Option<u64> {
        None
    }

    /// Returns the current formats of keys and values.
    fn formats(&self) -> [KvFormat; 2];

    /// Converts stored and future rows to other formats, until the cache is cleared. Converts one layer's
    /// keys or values at a time, which takes the memory of one of them in addition. The
    /// [`MemoryBudget`](crate::MemoryBudget) must allow that before it begins; otherwise nothing changes.
    ///
    /// # Errors
    /// - [`InvalidArgument`](crate::Status::InvalidArgument) for a format that does not fit the rows of some
    ///   layer; nothing has changed.
    /// - [`Step`](crate::Status::Step) while a step is open.
    /// - [`Backend`](crate::Status::Backend): some layers may be converted and others not, each completely or
    ///   not at all; call again to go on.
    fn convert(&mut self, k_format: KvFormat, v_format: KvFormat) -> Result<()>;

    /// Returns the face that writes the contents to a file and reads them back, if the cache has it.
    fn saving(&mut self) -> Option<&mut dyn SaveCache> {
        None
    }

    /// Returns the face that writes one sequence to a file and reads it back, if the cache has several
    /// sequences and the face. It writes a cache that holds this sequence only, as sequence 0. It reads such
    /// a cache of any kind and adds its sequence to the contents; meanwhile it needs the memory of the rows
    /// twice. Its calls check the sequence number:
    ///
    /// - `snapshot` returns [`InvalidArgument`](crate::Status::InvalidArgument) for a number out of range, for a
    ///   sequence without positions, and for one that carries candidates.
    /// - `restore` returns [`InvalidArgument`](crate::Status::InvalidArgument) for a number out of range and
    ///   for a sequence that holds positions or carries candidates, [`Capacity`](crate::Status::Capacity) if
    ///   the sequence does not fit next to the others, and [`File`](crate::Status::File) for values that are
    ///   not finite, which other sequences would read.
    fn saving_sequence(&mut self, _sequence: i32) -> Option<Box<dyn SaveCache + '_>> {
        None
    }

    /// Returns an empty cache of the same backend, kind and config, if the cache can make one. The new cache
    /// allocates only what it holds.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend) if memory is lacking.
    fn make_empty(&self) -> Result<Option<Box<dyn Cache>>> {
        Ok(None)
    }

    /// Returns the face that shares the contents with other caches, if the cache has it.
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
/// Ranges are of positions. `i32::MAX` as the end means all positions from the start on.
///
/// While a step is open and not [set aside](AttendCache::set_aside), every call that changes something is
/// refused with [`Step`](crate::Status::Step), and queries answer as before the step. Every call returns
/// [`InvalidArgument`](crate::Status::InvalidArgument) for a number out of range and for a range that starts
/// below 0 or ends before it starts. After a step that was [committed unread](AttendCache::commit_unread), a
/// call that changes something returns that step's error if its values are not finite.
pub trait SeqCache: Cache {
    /// Declares the sequence of each token of the next step. Without a declaration the step takes the
    /// proposed frontiers, ordered by sequence number, or the only sequence if there are no frontiers. The
    /// declaration holds until a step is committed or another declaration replaces it.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for no tokens or a number out of range;
    /// [`Step`](crate::Status::Step) while a step is open. An earlier declaration then holds.
    fn begin_step(&mut self, sequences: &[i32]) -> Result<()>;

    /// Declares the sequences of each token, which may be several; they share the token's cell.
    ///
    /// # Errors
    /// As [`begin_step`](Self::begin_step), and [`InvalidArgument`](crate::Status::InvalidArgument) for a
    /// token without a sequence, or with the same one twice.
    fn begin_step_shared(&mut self, sequences: &[&[i32]]) -> Result<()>;

    /// Withdraws the declaration of [`begin_step`](Self::begin_step) or
    /// [`begin_step_shared`](Self::begin_step_shared), for a host that does not run the step. Does nothing
    /// without one.
    ///
    /// # Errors
    /// [`Step`](crate::Status::Step) while a step is open.
    fn cancel_step(&mut self) -> Result<()>;

    /// Returns whether the tokens of the next step belong to the only sequence: nothing is declared, and no
    /// [frontier](TreeCache::propose) is pending.
    fn awaits_text(&self) -> bool;

    /// Makes `target` share `source`'s positions, in the same cells. No bytes move.
    ///
    /// # Errors
    /// [`Position`](crate::Status::Position) if `target` has other cells for some of the positions, or if
    /// window layers have dropped what its next query would see. [`Step`](crate::Status::Step) if `target`
    /// carries a tree, or while a step is open. [`InvalidArgument`](crate::Status::InvalidArgument) for
    /// numbers or a range out of range.
    fn seq_cp(&mut self, source: i32, target: i32, positions: Range<i32>) -> Result<()>;

    /// Removes positions from a sequence. A cell without an owner is free. A sequence without positions
    /// begins at 0 again, even if its first position was not 0.
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

    /// Returns the position of a sequence's next token: its last position plus 1. After a removal at the
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

    /// Returns what [`Cache::reachable`] returns, for one of several sequences.
    ///
    /// # Errors
    /// As [`Cache::reachable`], and [`InvalidArgument`](crate::Status::InvalidArgument) for a number out of
    /// range.
    fn seq_reachable(&self, sequence: i32, position: i32) -> Result<i32>;

    /// Returns what [`Cache::checkpoints`] returns, for one of several sequences.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a number out of range.
    fn seq_checkpoints(&self, sequence: i32) -> Result<Vec<i32>>;

    /// Makes a checkpoint of one of several sequences; see [`Cache::mark`].
    ///
    /// # Errors
    /// As [`Cache::mark`], and [`InvalidArgument`](crate::Status::InvalidArgument) for a number out of range.
    fn seq_mark(&mut self, sequence: i32, position: i32) -> Result<i32>;

    /// Marks where the prompt of a turn of one of several sequences will end; see [`Cache::mark_turn`].
    ///
    /// # Errors
    /// As [`Cache::mark_turn`], and [`InvalidArgument`](crate::Status::InvalidArgument) for a number out of
    /// range.
    fn seq_mark_turn(&mut self, sequence: i32, end: i32) -> Result<()> {
        if self.config().recurrent_layers.is_empty() {
            return Ok(());
        }
        mark_end(end, &mut |position| self.seq_mark(sequence, position))
    }

    /// Returns the sequences that hold positions or carry trees, in order.
    fn live_sequences(&self) -> Vec<i32>;

    /// Makes each sequence one run of cells, unless shared cells prevent it, so that it is read without a
    /// mask again. Moves as few rows as possible.
    ///
    /// # Errors
    /// [`Step`](crate::Status::Step) while a step is open. [`Backend`](crate::Status::Backend) if the
    /// [`MemoryBudget`](crate::MemoryBudget) refuses the slots that rows would move to (nothing has changed),
    /// or if the rows could not be moved (the cache is poisoned until it is cleared).
    fn compact(&mut self) -> Result<()>;
}

/// The runner's face of a cache whose sequences carry trees of candidates.
pub trait TreeCache: SeqCache {
    /// Appends a frontier of candidates to the tree after a sequence: queries of its next step. Each sees the
    /// sequence, its ancestors and itself. A parent is the number of an earlier node of the tree, over all
    /// its frontiers, or -1 for the sequence itself. A node's position is the sequence's next position plus
    /// its depth.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for no nodes or a parent that is not an earlier
    /// node; [`Step`](crate::Status::Step) if the last frontier has not run;
    /// [`Capacity`](crate::Status::Capacity) if the frontier does not fit.
    fn propose(&mut self, sequence: i32, parents: &[i32]) -> Result<()>;

    /// Adds a chain of candidates to the sequence, beginning with a child of the sequence, and removes the
    /// rest of its tree. An empty chain removes the whole tree.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) if there is no tree, or if the nodes are not a
    /// chain of nodes that ran. [`Backend`](crate::Status::Backend) if the rows could not be moved: the cache
    /// is poisoned until it is cleared.
    fn commit_tree(&mut self, sequence: i32, accepted: &[i32]) -> Result<()>;

    /// Returns the number of nodes of the tree after a sequence, or 0 without a tree.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a number out of range.
    fn tree_len(&self, sequence: i32) -> Result<usize>;
}

/// The program's face of a cache. Drive it through a [`Step`](crate::Step), which ends every step that it
/// opens.
pub trait AttendCache: Cache {
    /// The store of the backend whose tensors the cache takes.
    type Store: Store;

    /// Opens a step for tokens at these positions, one for each query token.
    ///
    /// # Errors
    /// Those of the cache for positions that it refuses; [`Step`](crate::Status::Step) while another step is
    /// open.
    fn begin(&mut self, positions: &[i32]) -> Result<()>;

    /// Writes a layer's new rows and returns what its queries attend to.
    ///
    /// `k` is `[1, n_kv_heads, T, k_head_dim]`, `v` is
    /// `[1, n_kv_heads, T, v_head_dim]`.
    ///
    /// A layer may be called again within a step, with the rows of its first call: in models whose layers
    /// share keys and values, several layers attend to the same ones. Such a call writes nothing and returns
    /// the same.
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

    /// Passes what a recurrent layer reads in the step to `work`, and writes the rows and anchors that it
    /// returns. `work` computes the layer's outputs as well.
    ///
    /// # Errors
    /// - [`Step`](crate::Status::Step) outside a step.
    /// - [`Shape`](crate::Status::Shape) for rows that do not fit, or a layer out of range.
    /// - [`Backend`](crate::Status::Backend), and the errors of `work`.
    /// - [`Unsupported`](crate::Status::Unsupported) by default.
    fn update_recurrent(
        &mut self,
        _layer: usize,
        _work: &mut RecurrentWork<Self::Store>,
    ) -> Result<()> {
        fail!(Unsupported, "a cache of kind `{}` has no recurrent layers", self.kind())
    }

    /// Counts a layer's new rows as written and returns their slots, which are allocated: the caller writes
    /// the rows into the [store](Self::store) itself before it commits. Returns `None`, and changes nothing,
    /// if this cache must see the rows, as for a layer whose values are in its keys.
    ///
    /// Where sequences share cells, the caller commits only finite values: other sequences would read them
    /// with a weight of 0, which gives NaN.
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

    /// Computes `outputs` together with the writes of the open step.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn eval(&self, outputs: &[&<Self::Store as Store>::Tensor]) -> Result<()>;

    /// Starts what [`eval`](Self::eval) does, and may return before it is finished: the caller waits for the
    /// outputs.
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

    /// Returns whether [`commit_unread`](Self::commit_unread) defers reading the values of the open step.
    /// Otherwise it is the same as [`commit`](Self::commit), which waits for them.
    fn can_commit_unread(&self) -> bool {
        false
    }

    /// Commits the open step before it is known whether its values are finite, which caches with shared cells
    /// check. The device may still compute them. [`check_unread`](Self::check_unread) reads them, and undoes
    /// the step if they are not.
    ///
    /// Until then queries count the step. One further step may begin and be set aside: the next one, which
    /// the same caller begins before it gives the cache to others. Every other call that changes the cache
    /// reads the values first, and so does the commit of that further step. If they are not finite, the call
    /// undoes the unread step, changes nothing else and returns the error of `check_unread`. Two calls
    /// differ: [`clear`](Cache::clear) goes on, and a call that declares a step does not check.
    ///
    /// # Errors
    /// As [`commit`](Self::commit).
    fn commit_unread(&mut self) -> Result<()> {
        self.commit()
    }

    /// Waits for the values of the step that was committed unread, and checks them. If they are not finite,
    /// undoes the step: its positions are removed, as if it had been rolled back. A later step that is open
    /// or set aside is rolled back first; one that was set aside loses its declaration. Does nothing without
    /// an unread step.
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

    /// Sets the open step aside: a program that runs ahead of its host waits without holding the cache. Any
    /// other call that changes the cache first rolls the step back and withdraws its declaration. Returns the
    /// step's number for [`resume`](Self::resume), or `None` if no step is open or the cache cannot set steps
    /// aside.
    fn set_aside(&mut self) -> Option<u64> {
        None
    }

    /// Resumes a step that was set aside, to commit or abort it. Returns `false` if it was rolled back
    /// meanwhile.
    fn resume(&mut self, _step: u64) -> bool {
        false
    }
}
