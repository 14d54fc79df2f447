//! Caches and their faces. A cache combines bookkeeping and a backend's store.
//!
//! A runner controls a [`Cache`], with integers. [`SeqCache`] and [`TreeCache`] add calls for several sequences and
//! for candidates. A program's `update_and_attend` uses an [`AttendCache`], with tensors of the backend. A cache
//! object has all of these faces.

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

/// The number of tokens at the end of a prompt that the chat's next request may change: some templates format the
/// start of an answer in one way and the finished answer in another.
const TURN_MARGIN: i32 = 16;

/// Calls `mark` for the beginning and the end of a prompt, and for a position a little before the end. A later request
/// may change the first message of the prompt. It then diverges at the beginning of the prompt.
fn mark_prompt(begin: i32, end: i32, mark: &mut dyn FnMut(i32) -> Result<i32>) -> Result<()> {
    for position in [begin, end - TURN_MARGIN, end] {
        if position > 0 {
            unless_passed(mark(position))?;
        }
    }
    Ok(())
}

/// Ignores the refusal of a mark at a position to which the text can no longer be rewound.
fn unless_passed(marked: Result<i32>) -> Result<()> {
    match marked {
        Err(error) if error.status() == Status::Position => Ok(()),
        marked => marked.map(drop),
    }
}

/// The runner's face of a cache.
pub trait Cache: Send {
    /// Returns the name of the kind, as used to create sessions.
    fn kind(&self) -> &str;

    /// Returns the config that the cache was created with.
    fn config(&self) -> &CacheConfig;

    /// Returns the maximum number of positions of the cache.
    fn capacity(&self) -> i32;

    /// Returns the limits of the cache's programs that the capacity exceeds, in ascending order. For example, a program
    /// has a limit if its rotary embedding has other factors for long texts. A program without this limit rotates keys
    /// by other angles, so its rows count as rows of another model.
    fn passed_limits(&self) -> &[i32] {
        &[]
    }

    /// Adds a limit to [`passed_limits`](Self::passed_limits). A program calls this when it is loaded, if the
    /// capacity exceeds one of its limits.
    ///
    /// # Errors
    /// [`Kind`](crate::Status::Kind) if the limit is new and the cache has rows.
    fn pass_limit(&mut self, _limit: i32) -> Result<()> {
        Ok(())
    }

    /// Returns the number of positions in the cache. A position that several sequences share counts once.
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

    /// Removes every position, and frees the buffers if `release`. The cache is then like a new one: conversions are
    /// undone as well. Freed buffers are allocated again in the next step, even if the config allocates upfront.
    ///
    /// # Errors
    /// - [`Step`](crate::Status::Step) while a step is open.
    /// - [`Backend`](crate::Status::Backend) if there is too little memory for buffers that are allocated upfront;
    ///   nothing has changed. This cannot happen with `release`.
    fn clear(&mut self, release: bool) -> Result<()>;

    /// Removes the positions at or after `length` from the only sequence.
    ///
    /// # Errors
    /// - [`Position`](crate::Status::Position) if `length` is negative or greater than the next position. Also if
    ///   `length` is not 0 and the sequence could not continue there: `length` is below
    ///   [`rewindable_to`](Self::rewindable_to), or the position before it was removed.
    /// - [`InvalidArgument`](crate::Status::InvalidArgument) if there are several sequences.
    /// - [`Step`](crate::Status::Step) while a step is open, or if the sequence has a tree and some of its positions
    ///   would stay.
    fn rewind(&mut self, length: i32) -> Result<()>;

    /// Returns the least length, other than 0, to which the only sequence can be rewound without a checkpoint. For
    /// lower lengths, window layers have dropped positions that a query would see, or positions were removed.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) if there are several sequences.
    fn rewindable_to(&self) -> Result<i32>;

    /// Returns the greatest length, at most `position`, to which the only sequence can be rewound. Such lengths are
    /// all those at or above [`rewindable_to`](Self::rewindable_to), the checkpoints below it, and 0.
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

    /// Rewinds the only sequence to the greatest [reachable](Self::reachable) length up to `length`, and returns it.
    /// Use it for a text that shares its first `length` tokens with the sequence; the tokens from the result to
    /// `length` must run again. If there are such tokens and the model has recurrent layers, this also marks
    /// `length`, unless that position can no longer be marked. The next text that diverges there then runs fewer
    /// tokens.
    ///
    /// # Errors
    /// Errors of [`reachable`](Self::reachable) and [`rewind`](Self::rewind).
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

    /// Returns the lengths to which the only sequence can be rewound.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) if there are several sequences.
    fn reach(&self) -> Result<Reach> {
        Ok(Reach { rewindable_to: self.rewindable_to()?, checkpoints: self.checkpoints()? })
    }

    /// Creates a checkpoint of the only sequence at `position` and returns its position. If the sequence can still be
    /// rewound there, the checkpoint is created at once. Otherwise it is created when a step reaches the position. With
    /// recurrent layers the position is rounded down to a multiple of [`BLOCK`](crate::bookkeeping::BLOCK). If there is
    /// no room, the least useful checkpoint is dropped. Returns 0, which is always reachable, if the cache allows no
    /// checkpoints.
    ///
    /// A checkpoint is dropped together with the text before it.
    ///
    /// # Errors
    /// - [`InvalidArgument`](crate::Status::InvalidArgument) if there are several sequences.
    /// - [`Position`](crate::Status::Position) for a negative position, or a position that is no longer reachable.
    /// - [`Step`](crate::Status::Step) while a step is open.
    /// - [`Unsupported`](crate::Status::Unsupported) by default, and for a contiguous cache with window layers.
    fn mark(&mut self, _position: i32) -> Result<i32> {
        fail!(Unsupported, "a cache of kind `{}` cannot create checkpoints", self.kind())
    }

    /// Marks the beginning and the end of a turn's prompt, before the prompt runs. Later requests of the chat can then
    /// continue there, whatever the answer was. Does nothing for a model without recurrent layers, or for a position
    /// that can no longer be marked.
    ///
    /// # Errors
    /// Errors of [`mark`](Self::mark), except [`Position`](crate::Status::Position).
    fn mark_turn(&mut self, end: i32) -> Result<()> {
        if self.config().recurrent_layers.is_empty() {
            return Ok(());
        }
        mark_prompt(self.length(), end, &mut |position| self.mark(position))
    }

    /// Returns the bytes of the buffers.
    fn memory(&self) -> Memory;

    /// Returns a report of the cache, for monitoring and debugging, even if it is poisoned.
    fn report(&self) -> CacheReport {
        CacheReport::of(self)
    }

    /// Returns the cache's number in [`MemoryBudget::holders`](crate::MemoryBudget::holders), which never changes, or
    /// `None` if the budget does not count the cache's bytes.
    fn holder(&self) -> Option<u64> {
        None
    }

    /// Returns the current formats of keys and values.
    fn formats(&self) -> [KvFormat; 2];

    /// Converts stored and future rows to other formats, until the cache is cleared. Converts one buffer after the
    /// other: the keys or the values of one layer. This needs additional memory for one buffer. If the
    /// [`MemoryBudget`](crate::MemoryBudget) does not allow that, nothing changes.
    ///
    /// # Errors
    /// - [`InvalidArgument`](crate::Status::InvalidArgument) for a format that does not fit the rows of some
    ///   layer; nothing has changed.
    /// - [`Step`](crate::Status::Step) while a step is open.
    /// - [`Backend`](crate::Status::Backend): some layers may be converted and others not, but no layer is converted
    ///   in part; call again to continue.
    fn convert(&mut self, k_format: KvFormat, v_format: KvFormat) -> Result<()>;

    /// Returns the face that saves the contents to a file and loads them, or `None` if the cache does not support it.
    fn saving(&mut self) -> Option<&mut dyn SaveCache> {
        None
    }

    /// Returns the face that saves one sequence to a file and loads it, or `None` if the cache does not support it. A
    /// file of this face has only this sequence, as sequence 0. The face loads a file that has only sequence 0, from a
    /// cache of any kind, and adds the sequence to the contents. While it loads, it needs the memory of the sequence's
    /// rows twice. Its calls check the sequence number:
    ///
    /// - `snapshot` returns [`InvalidArgument`](crate::Status::InvalidArgument) for a sequence number out of range, and
    ///   for a sequence without positions or with candidates.
    /// - `restore` returns [`InvalidArgument`](crate::Status::InvalidArgument) for a sequence number out of range, and
    ///   for a sequence that already has positions or candidates; [`Capacity`](crate::Status::Capacity) if the sequence
    ///   does not fit next to the others; and [`File`](crate::Status::File) for values that are not finite, which other
    ///   sequences would read.
    fn saving_sequence(&mut self, _sequence: i32) -> Option<Box<dyn SaveCache + '_>> {
        None
    }

    /// Returns an empty cache of the same backend, kind and config, or `None` if the cache does not support it. The
    /// new cache allocates memory only as it is filled.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend) if there is too little memory.
    fn make_empty(&self) -> Result<Option<Box<dyn Cache>>> {
        Ok(None)
    }

    /// Returns the face that shares the contents with other caches, or `None` if the cache does not support it.
    fn sharing(&mut self) -> Option<&mut dyn ShareCache> {
        None
    }

    /// Returns the face for several sequences, or `None` if the cache does not support it.
    fn sequences(&self) -> Option<&dyn SeqCache> {
        None
    }

    /// Returns [`sequences`](Self::sequences) for calls that change something.
    fn sequences_mut(&mut self) -> Option<&mut dyn SeqCache> {
        None
    }

    /// Returns the face for trees of candidates, or `None` if the cache does not support it.
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
/// Ranges are ranges of positions. A range that ends at `i32::MAX` includes all positions at or after its start.
///
/// While a step is open and not [set aside](AttendCache::set_aside), every call that changes the cache returns
/// [`Step`](crate::Status::Step), and queries return the state before the step. Every call returns
/// [`InvalidArgument`](crate::Status::InvalidArgument) for a sequence number out of range and for a range that starts
/// below 0 or ends before it starts. After a step was [committed unread](AttendCache::commit_unread), a call that
/// changes the cache returns an error if the values of that step are not finite.
pub trait SeqCache: Cache {
    /// Declares the sequence of each token of the next step. Without a declaration the tokens belong to the proposed
    /// frontiers, in the order of their sequences, or to the only sequence if there are no frontiers. The declaration
    /// applies until a step commits or another declaration replaces it.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) if there are no tokens, or for a sequence number out of
    /// range; [`Step`](crate::Status::Step) while a step is open. An earlier declaration then remains.
    fn begin_step(&mut self, sequences: &[i32]) -> Result<()>;

    /// Declares the sequences of each token. If a token belongs to several, they share its cell.
    ///
    /// # Errors
    /// Errors of [`begin_step`](Self::begin_step), and [`InvalidArgument`](crate::Status::InvalidArgument) for a
    /// token without a sequence, or with the same sequence twice.
    fn begin_step_shared(&mut self, sequences: &[&[i32]]) -> Result<()>;

    /// Withdraws the declaration of [`begin_step`](Self::begin_step) or
    /// [`begin_step_shared`](Self::begin_step_shared), for a host that does not run the step. Does nothing if there
    /// is none.
    ///
    /// # Errors
    /// [`Step`](crate::Status::Step) while a step is open.
    fn cancel_step(&mut self) -> Result<()>;

    /// Returns whether the tokens of the next step belong to the only sequence: there is no declaration, and no
    /// [frontier](TreeCache::propose) is pending.
    fn awaits_text(&self) -> bool;

    /// Makes `target` share the cells of `source` at `positions`. No rows are copied.
    ///
    /// # Errors
    /// [`Position`](crate::Status::Position) if `target` has other cells for some of the positions, or if window layers
    /// have dropped positions that its next query would see. [`Step`](crate::Status::Step) if `target` has a tree, or
    /// while a step is open. [`InvalidArgument`](crate::Status::InvalidArgument) if a sequence number or the range is
    /// out of range.
    fn seq_cp(&mut self, source: i32, target: i32, positions: Range<i32>) -> Result<()>;

    /// Removes positions from a sequence. A cell without an owner is free. A sequence that has lost all positions
    /// begins at 0 again, even if its first position was not 0.
    ///
    /// # Errors
    /// [`Position`](crate::Status::Position) if the sequence would continue below
    /// [`seq_rewindable_to`](Self::seq_rewindable_to). [`Step`](crate::Status::Step) if it has a tree and some of its
    /// positions would stay, or while a step is open. [`InvalidArgument`](crate::Status::InvalidArgument) if the
    /// sequence number or the range is out of range.
    fn seq_rm(&mut self, sequence: i32, positions: Range<i32>) -> Result<()>;

    /// Removes every sequence but one.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a sequence number out of range;
    /// [`Step`](crate::Status::Step) while a step is open.
    fn seq_keep(&mut self, sequence: i32) -> Result<()>;

    /// Returns the number of positions of a sequence.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a sequence number out of range.
    fn seq_len(&self, sequence: i32) -> Result<i32>;

    /// Returns the position of a sequence's next token: its last position plus 1. If its first positions were
    /// removed, this is more than the number of its positions.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a sequence number out of range.
    fn seq_next(&self, sequence: i32) -> Result<i32>;

    /// Returns the positions of a sequence, as ranges in order.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a sequence number out of range.
    fn seq_positions(&self, sequence: i32) -> Result<Vec<Range<i32>>>;

    /// Returns [`Cache::rewindable_to`] for one of several sequences.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a sequence number out of range.
    fn seq_rewindable_to(&self, sequence: i32) -> Result<i32>;

    /// Returns [`Cache::reachable`] for one of several sequences.
    ///
    /// # Errors
    /// Errors of [`Cache::reachable`], and [`InvalidArgument`](crate::Status::InvalidArgument) for a sequence number
    /// out of range.
    fn seq_reachable(&self, sequence: i32, position: i32) -> Result<i32>;

    /// Returns [`Cache::checkpoints`] for one of several sequences.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a sequence number out of range.
    fn seq_checkpoints(&self, sequence: i32) -> Result<Vec<i32>>;

    /// Creates a checkpoint in one of several sequences; see [`Cache::mark`].
    ///
    /// # Errors
    /// Errors of [`Cache::mark`], and [`InvalidArgument`](crate::Status::InvalidArgument) for a sequence number out of
    /// range.
    fn seq_mark(&mut self, sequence: i32, position: i32) -> Result<i32>;

    /// Marks the beginning and the end of a turn's prompt in one of several sequences; see [`Cache::mark_turn`].
    ///
    /// # Errors
    /// Errors of [`Cache::mark_turn`], and [`InvalidArgument`](crate::Status::InvalidArgument) for a sequence number
    /// out of range.
    fn seq_mark_turn(&mut self, sequence: i32, end: i32) -> Result<()> {
        if self.config().recurrent_layers.is_empty() {
            return Ok(());
        }
        let begin = self.seq_next(sequence)?;
        mark_prompt(begin, end, &mut |position| self.seq_mark(sequence, position))
    }

    /// Returns the sequences that have positions or trees, in order.
    fn live_sequences(&self) -> Vec<i32>;

    /// Makes each sequence one run of cells again, unless shared cells prevent it. Attention then reads the sequence
    /// without a mask. Moves as few rows as possible.
    ///
    /// # Errors
    /// [`Step`](crate::Status::Step) while a step is open. [`Backend`](crate::Status::Backend) if the
    /// [`MemoryBudget`](crate::MemoryBudget) refuses the slots to which rows would move; nothing has then changed.
    /// [`Backend`](crate::Status::Backend) also if the rows could not be moved; the cache is then poisoned until it
    /// is cleared.
    fn compact(&mut self) -> Result<()>;
}

/// The runner's face of a cache whose sequences may have trees of candidates.
pub trait TreeCache: SeqCache {
    /// Appends a frontier of candidates to the tree after a sequence. They are queries of the sequence's next step,
    /// and each sees the sequence, its ancestors and itself. A parent is the number of an earlier node of the tree,
    /// counted over all its frontiers, or -1 for the sequence itself. A node's position is the sequence's next
    /// position plus the node's depth.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) if there are no nodes, or a parent is not an earlier node;
    /// [`Step`](crate::Status::Step) if the last frontier has not run; [`Capacity`](crate::Status::Capacity) if the
    /// frontier does not fit.
    fn propose(&mut self, sequence: i32, parents: &[i32]) -> Result<()>;

    /// Adds a chain of candidates to the sequence, and removes the rest of its tree. The chain begins with a child of
    /// the sequence. An empty chain removes the whole tree.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) if there is no tree, or if the nodes are not a chain of
    /// nodes that have run. [`Backend`](crate::Status::Backend) if the rows could not be moved: the cache is poisoned
    /// until it is cleared.
    fn commit_tree(&mut self, sequence: i32, accepted: &[i32]) -> Result<()>;

    /// Returns the number of nodes of the tree after a sequence, or 0 if it has none.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a sequence number out of range.
    fn tree_len(&self, sequence: i32) -> Result<usize>;
}

/// The program's face of a cache. Use it through a [`Step`](crate::Step), which ends every step that it opens.
pub trait AttendCache: Cache {
    /// The store of the backend whose tensors the cache accepts.
    type Store: Store;

    /// Opens a step for tokens at these positions, one for each query token.
    ///
    /// # Errors
    /// Errors of the cache for positions that it refuses; [`Step`](crate::Status::Step) while another step is open.
    fn begin(&mut self, positions: &[i32]) -> Result<()>;

    /// Writes a layer's new rows, and returns the rows that its queries attend to.
    ///
    /// `k` is `[1, n_kv_heads, T, k_head_dim]`, `v` is `[1, n_kv_heads, T, v_head_dim]`.
    ///
    /// A layer may be called again within a step with the same rows, because several layers of a model may share keys
    /// and values. Such a call writes nothing and returns the same result.
    ///
    /// # Errors
    /// - [`Step`](crate::Status::Step) if no step is open.
    /// - [`Shape`](crate::Status::Shape) for rows of a wrong shape, or a layer out of range.
    /// - [`Backend`](crate::Status::Backend).
    fn update_and_fetch(
        &mut self,
        layer: usize,
        k: &<Self::Store as Store>::Tensor,
        v: &<Self::Store as Store>::Tensor,
    ) -> Result<Spec<Self::Store>>;

    /// In each layer with [`values_in_keys`](crate::LayerConfig::values_in_keys), the next step compares the values
    /// with the keys, and is refused if the values are not in the keys. This function is called when a program is
    /// loaded.
    fn expect_program(&mut self) {}

    /// Passes the stored rows and anchors that a recurrent layer reads in the step to `work`, and writes the rows and
    /// anchors that `work` returns. `work` also computes the layer's outputs.
    ///
    /// # Errors
    /// - [`Step`](crate::Status::Step) if no step is open.
    /// - [`Shape`](crate::Status::Shape) for rows of a wrong shape, or a layer out of range.
    /// - [`Backend`](crate::Status::Backend), and the errors of `work`.
    /// - [`Unsupported`](crate::Status::Unsupported) by default.
    fn update_recurrent(
        &mut self,
        _layer: usize,
        _work: &mut RecurrentWork<Self::Store>,
    ) -> Result<()> {
        fail!(Unsupported, "a cache of kind `{}` has no recurrent layers", self.kind())
    }

    /// Returns the slots for a layer's new rows. The slots are allocated, and the rows count as written: the caller
    /// writes the rows into the [store](Self::store) itself before it commits. Returns `None`, and changes nothing,
    /// if the cache must see the rows, for example in a layer whose values are in its keys.
    ///
    /// If sequences share cells, the caller must commit only finite values. Other sequences read the same rows with a
    /// weight of 0, and 0 times infinity is NaN.
    ///
    /// # Errors
    /// Errors of [`update_and_fetch`](Self::update_and_fetch).
    fn place(&mut self, _layer: usize) -> Result<Option<Placement>> {
        Ok(None)
    }

    /// Returns the store, if rows can be [placed](Self::place) in it.
    fn store(&self) -> Option<&Self::Store> {
        None
    }

    /// Computes `outputs` together with the writes of the open step.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn eval(&self, outputs: &[&<Self::Store as Store>::Tensor]) -> Result<()>;

    /// Starts the work of [`eval`](Self::eval), and may return before it is finished: the caller waits for the
    /// outputs.
    ///
    /// # Errors
    /// Errors of [`eval`](Self::eval).
    fn schedule(&self, outputs: &[&<Self::Store as Store>::Tensor]) -> Result<()> {
        self.eval(outputs)
    }

    /// Commits the open step: makes its positions visible.
    ///
    /// # Errors
    /// - [`Step`](crate::Status::Step) if no step is open, or if a layer was not called; the step then stays open.
    /// - [`Backend`](crate::Status::Backend) if window layers could not move their rows; the cache is then poisoned
    ///   until it is cleared.
    fn commit(&mut self) -> Result<()>;

    /// Returns whether [`commit_unread`](Self::commit_unread) would commit the open step without waiting for its
    /// values. If not, `commit_unread` waits for them, like [`commit`](Self::commit).
    fn can_commit_unread(&self) -> bool {
        false
    }

    /// Commits the open step before it is known whether its values are finite. Caches with shared cells check whether
    /// they are. The device may still be computing the values. [`check_unread`](Self::check_unread) reads the values,
    /// and undoes the step if they are not finite.
    ///
    /// Until the values are read, queries include the positions of the step. The caller that committed the step may
    /// begin one further step, if it sets that step aside before it releases the cache. The commit of the further step,
    /// and every other call that changes the cache, reads the values first. If they are not finite, the call undoes the
    /// unread step, changes nothing else and returns the error of `check_unread`. There are two exceptions:
    /// [`clear`](Cache::clear) clears the cache whatever the values are, and a call that declares a step does not read
    /// the values.
    ///
    /// # Errors
    /// Errors of [`commit`](Self::commit).
    fn commit_unread(&mut self) -> Result<()> {
        self.commit()
    }

    /// Waits for the values of the step that was committed unread, and checks them. If they are not finite, undoes
    /// the step: its positions are removed, as if it had been rolled back. A later step that is open or set aside is
    /// rolled back first. If it was set aside, its declaration is withdrawn. Does nothing if there is no unread step.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) if the values are not finite, with the
    /// message of [`commit`](Self::commit).
    fn check_unread(&mut self) -> Result<()> {
        Ok(())
    }

    /// Rolls the step back. Does nothing if no step is open.
    fn abort(&mut self);

    /// Returns whether steps can be set aside.
    fn can_set_aside(&self) -> bool {
        false
    }

    /// Sets the open step aside. A program that runs ahead of its host can then wait without a lock on the cache. Any
    /// other call that changes the cache first rolls the step back and withdraws its declaration. Returns the step's
    /// number for [`resume`](Self::resume), or `None` if no step is open or the cache cannot set steps aside.
    fn set_aside(&mut self) -> Option<u64> {
        None
    }

    /// Resumes a step that was set aside, to commit or abort it. Returns `false` if the step has been rolled back.
    fn resume(&mut self, _step: u64) -> bool {
        false
    }
}
