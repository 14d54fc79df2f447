//! Many sequences in one pool of cells, and trees of candidates after them.

mod saving;
mod saving_sequence;
mod sequences;
mod sharing;

use super::aside::SetAsideStep;
use super::passed_limits::PassedLimits;
use super::storage::Storage;
use super::{AttendCache, Cache, SeqCache, TreeCache};
use crate::bookkeeping::{AddedStep, CellsBookkeeping, Move};
use crate::config::CacheConfig;
use crate::error::{fail, Result};
use crate::format::KvFormat;
use crate::growth::Growth;
use crate::memory::Memory;
use crate::prefix::ShareCache;
use crate::report::{CacheReport, SequenceReport};
use crate::snapshot::SaveCache;
use crate::spec::Placement;
use crate::store::{RecurrentWork, Spec, Store};

/// A committed step whose values have not been read yet.
struct UnreadStep {
    added: AddedStep,
    /// Whether the next step has begun.
    followed: bool,
}

/// A cache whose sequences share cells. A single sequence is read as in a contiguous cache.
pub struct CellsCache<S: Store> {
    kind: &'static str,
    book: CellsBookkeeping,
    storage: Storage<S>,
    open: bool,
    /// The bookkeeping before the open step, if the step rewinds the only sequence.
    before: Option<Box<CellsBookkeeping>>,
    aside: SetAsideStep,
    unread: Option<UnreadStep>,
    passed: PassedLimits,
}

impl<S: Store> CellsCache<S> {
    /// The name of the kind without trees.
    pub const SEQ: &'static str = "seq";
    /// The name of the kind with trees.
    pub const TREE: &'static str = "tree";
    /// The name of the kind with one sequence, for models with recurrent layers.
    pub const CONTIGUOUS: &'static str = "contiguous";

    /// Returns an empty cache of kind [`SEQ`](Self::SEQ).
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for an invalid config.
    pub fn new(config: CacheConfig) -> Result<Self> {
        Self::of_kind(Self::SEQ, config)
    }

    /// Returns an empty cache of kind [`TREE`](Self::TREE).
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_trees(config: CacheConfig) -> Result<Self> {
        Self::of_kind(Self::TREE, config)
    }

    /// Returns an empty cache of kind [`CONTIGUOUS`](Self::CONTIGUOUS), with one sequence. Models with recurrent
    /// layers need cells even for one sequence, because a checkpoint owns rows as a sequence does.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn contiguous(config: CacheConfig) -> Result<Self> {
        Self::of_kind(Self::CONTIGUOUS, config)
    }

    fn of_kind(kind: &'static str, config: CacheConfig) -> Result<Self> {
        config.validate()?;
        let (capacity, window) = (config.capacity, config.recurrent_window());
        let checkpoints = config.checkpoints;
        let storage = Storage::new(config, kind != Self::CONTIGUOUS)?;
        storage.describe(kind);
        let book = CellsBookkeeping::new(capacity, storage.windows());
        let book = book.with_recurrent(window, checkpoints);
        let (aside, passed) = (SetAsideStep::default(), PassedLimits::default());
        Ok(Self { kind, book, storage, open: false, before: None, aside, unread: None, passed })
    }

    /// Returns whether the cache has only one sequence, which steps may rewind.
    fn is_single(&self) -> bool {
        self.kind == Self::CONTIGUOUS
    }

    /// Rewinds the only sequence to the first position of a step, if the sequence is longer. An abort undoes this.
    fn rewind_for(&mut self, positions: &[i32]) -> Result<()> {
        let (Some(&first), next) = (positions.first(), self.book.seq_next(0)?) else {
            return Ok(());
        };
        if !self.is_single() || first >= next {
            return Ok(());
        }
        let before = Box::new(self.book.clone());
        self.book.rewind(first)?;
        // The host may have set the marks for the new text, which begins with this step.
        self.book.keep_marks(&before);
        self.before = Some(before);
        Ok(())
    }

    /// Drops checkpoints, the least useful first, until the budget has room for a step. Returns whether it has room.
    fn reserve_without_checkpoints(&mut self, positions: &[i32]) -> bool {
        while self.book.drop_checkpoint() {
            if self.book.plan(positions).is_err() {
                return false;
            }
            if self.storage.reserve_for(self.book.plans()).is_ok() {
                return true;
            }
            self.book.abort();
        }
        false
    }

    /// Returns the bookkeeping without an open step, for queries.
    fn settled(&self) -> &CellsBookkeeping {
        self.before.as_deref().unwrap_or(&self.book)
    }

    /// Undoes [`rewind_for`](Self::rewind_for).
    fn restore_book(&mut self) {
        if let Some(before) = self.before.take() {
            self.book = *before;
        }
    }

    fn try_begin(&mut self, positions: &[i32]) -> Result<()> {
        if self.open {
            fail!(Step, "a step is open on this cache");
        }
        self.storage.check()?;
        self.rewind_for(positions)?;
        let begun = self.open_step(positions);
        if begun.is_err() {
            self.book.abort();
            self.restore_book();
        }
        begun
    }

    fn open_step(&mut self, positions: &[i32]) -> Result<()> {
        self.storage.check_floats(positions.len(), self.book.length(), self.counted())?;
        self.book.plan(positions)?;
        if let Err(error) = self.storage.reserve_for(self.book.plans()) {
            self.book.abort();
            // Drops checkpoints if that makes room for the step.
            let spared = self.book.clone();
            if !self.reserve_without_checkpoints(positions) {
                self.book = spared;
                return Err(error);
            }
        }
        match &self.before {
            None => self.storage.begin_appending()?,
            Some(before) => {
                let plans = self.book.plans();
                self.storage.begin(|group| before.held_among(group, &plans[group].write))?;
            }
        }
        self.open = true;
        Ok(())
    }

    /// Returns the bookkeeping for a change. First rolls back a step that was set aside, and reads the values of the
    /// previous step.
    fn changing(&mut self) -> Result<&mut CellsBookkeeping> {
        self.settle()?;
        Ok(&mut self.book)
    }

    /// Returns the bookkeeping for a declaration. First rolls back a step that was set aside.
    fn declaring(&mut self) -> &mut CellsBookkeeping {
        self.drop_aside();
        &mut self.book
    }

    /// Rolls back a step that was set aside. Then reads the values of the step that was committed unread, because a
    /// change must not depend on values that may be undone.
    fn settle(&mut self) -> Result<()> {
        self.drop_aside();
        // If a step is open, its commit reads the values. The current call is then refused later.
        if self.open {
            return Ok(());
        }
        self.check_before()
    }

    /// Reads the values of the step that was committed unread, on behalf of another call.
    fn check_before(&mut self) -> Result<()> {
        self.check_unread().map_err(|error| error.at("the previous step is undone"))
    }

    /// Rolls back a step that was set aside, and withdraws its declaration.
    fn drop_aside(&mut self) {
        if self.aside.waits() {
            self.abort();
            // No step is open now, so this cannot be refused.
            let _ = self.book.cancel_step();
        }
    }

    /// The number of positions that count for `quantized_kv_start`. Candidates do not count.
    fn counted(&self) -> i32 {
        self.book.length() - self.book.candidates()
    }

    fn quantize(&mut self) {
        self.storage.quantize_at(self.counted());
    }

    /// Moves rows to the slots that the bookkeeping assigns to their positions.
    fn apply(&mut self, moves: Result<Vec<Move>>) -> Result<()> {
        let moves = moves?;
        self.storage.apply(&moves)
    }
}

impl<S: Store> Cache for CellsCache<S> {
    fn kind(&self) -> &'static str {
        self.kind
    }

    fn config(&self) -> &CacheConfig {
        self.storage.config()
    }

    fn capacity(&self) -> i32 {
        self.book.capacity()
    }

    fn passed_limits(&self) -> &[i32] {
        self.passed.limits()
    }

    fn pass_limit(&mut self, limit: i32) -> Result<()> {
        self.passed.add(limit, self.book.length())
    }

    fn length(&self) -> i32 {
        self.settled().length()
    }

    fn reachable(&self, position: i32) -> Result<i32> {
        let book = self.settled();
        book.reachable(book.only_sequence("call seq_reachable for one of them")?, position)
    }

    fn checkpoints(&self) -> Result<Vec<i32>> {
        let sequence = self.book.only_sequence("call seq_checkpoints for one of them")?;
        self.book.checkpoints_of(sequence)
    }

    fn mark(&mut self, position: i32) -> Result<i32> {
        let sequence = self.book.only_sequence("call seq_mark for one of them")?;
        self.seq_mark(sequence, position)
    }

    fn next_position(&self) -> Result<i32> {
        let book = self.settled();
        book.seq_next(book.only_sequence("call seq_next for one of them")?)
    }

    fn can_extend(&self, n: i32) -> bool {
        self.storage.check().is_ok() && self.settled().can_extend(n)
    }

    fn clear(&mut self, release: bool) -> Result<()> {
        self.drop_aside();
        if self.open {
            fail!(Step, "cannot clear the cache in the middle of a step");
        }
        // The positions are removed in either case. Buffers may keep their contents except values that are not
        // finite, because a mask cannot hide such values.
        let _ = self.check_unread();
        self.storage.clear(release)?;
        self.book.clear();
        Ok(())
    }

    fn rewind(&mut self, length: i32) -> Result<()> {
        self.changing()?.rewind(length)
    }

    fn rewindable_to(&self) -> Result<i32> {
        let book = self.settled();
        book.rewindable_to(book.only_sequence("call seq_rewindable_to for one of them")?)
    }

    fn memory(&self) -> Memory {
        let at_capacity = match self.is_single() {
            true => self.config().at_capacity(),
            false => self.config().at_capacity_shared(),
        };
        self.storage.memory(|group| self.book.used(group), at_capacity)
    }

    fn report(&self) -> CacheReport {
        let book = self.settled();
        let of = |sequence| {
            Ok(SequenceReport {
                sequence,
                length: book.seq_len(sequence)?,
                next: book.seq_next(sequence)?,
                rewindable_to: book.rewindable_to(sequence)?,
                checkpoints: book.checkpoints_of(sequence)?,
                tree: book.tree_len(sequence)?,
            })
        };
        let sequences = book.sequences().into_iter().map(of);
        // This cannot fail for sequences that exist.
        let sequences = sequences.collect::<Result<_>>().unwrap_or_default();
        self.storage.report(CacheReport { sequences, ..CacheReport::of(self) })
    }

    fn holder(&self) -> Option<u64> {
        Some(self.storage.holder())
    }

    fn formats(&self) -> [KvFormat; 2] {
        self.storage.formats()
    }

    fn convert(&mut self, k_format: KvFormat, v_format: KvFormat) -> Result<()> {
        self.settle()?;
        if self.open {
            fail!(Step, "cannot convert the cache in the middle of a step");
        }
        self.storage.check()?;
        self.storage.convert([k_format, v_format])
    }

    fn saving(&mut self) -> Option<&mut dyn SaveCache> {
        Some(self)
    }

    fn saving_sequence(&mut self, sequence: i32) -> Option<Box<dyn SaveCache + '_>> {
        if self.is_single() {
            return None;
        }
        Some(Box::new(saving_sequence::OneSequence { cache: self, sequence }))
    }

    fn make_empty(&self) -> Result<Option<Box<dyn Cache>>> {
        let config = CacheConfig { growth: Growth::Exact, ..self.config().clone() };
        Ok(Some(Box::new(Self {
            passed: self.passed.clone(),
            ..Self::of_kind(self.kind, config)?
        })))
    }

    fn sharing(&mut self) -> Option<&mut dyn ShareCache> {
        Some(self)
    }

    fn sequences(&self) -> Option<&dyn SeqCache> {
        (!self.is_single()).then_some(self as &dyn SeqCache)
    }

    fn sequences_mut(&mut self) -> Option<&mut dyn SeqCache> {
        (!self.is_single()).then_some(self as &mut dyn SeqCache)
    }

    fn trees(&self) -> Option<&dyn TreeCache> {
        (self.kind == Self::TREE).then_some(self as &dyn TreeCache)
    }

    fn trees_mut(&mut self) -> Option<&mut dyn TreeCache> {
        (self.kind == Self::TREE).then_some(self as &mut dyn TreeCache)
    }
}

impl<S: Store> AttendCache for CellsCache<S> {
    type Store = S;

    fn begin(&mut self, positions: &[i32]) -> Result<()> {
        self.drop_aside();
        // The first step after an unread step may begin before the values are read. The commit of the new step reads
        // them.
        let follows = match &mut self.unread {
            Some(unread) if !self.open => !std::mem::replace(&mut unread.followed, true),
            _ => false,
        };
        let settled = if follows { Ok(()) } else { self.settle() };
        let begun = settled.and_then(|()| self.try_begin(positions));
        self.storage.begun(positions, self.book.plans(), begun)
    }

    fn update_and_fetch(&mut self, layer: usize, k: &S::Tensor, v: &S::Tensor) -> Result<Spec<S>> {
        let group = self.storage.group(layer)?;
        let Some(plan) = self.book.plans().get(group) else {
            fail!(Step, "no step is open on this cache");
        };
        self.storage.update_and_fetch(layer, k, v, plan)
    }

    fn update_recurrent(&mut self, layer: usize, work: &mut RecurrentWork<S>) -> Result<()> {
        let Some(plan) = self.book.recurrent_plan() else {
            if self.config().recurrent_layers.is_empty() {
                fail!(Shape, "the model has no recurrent layers, got {layer}");
            }
            fail!(Step, "no step is open on this cache");
        };
        let buffers = self.book.recurrent_buffers();
        self.storage.update_recurrent(layer, plan, buffers, work)
    }

    fn expect_program(&mut self) {
        self.storage.expect_program();
    }

    fn place(&mut self, layer: usize) -> Result<Option<Placement>> {
        let group = self.storage.group(layer)?;
        let Some(plan) = self.book.plans().get(group) else {
            fail!(Step, "no step is open on this cache");
        };
        self.storage.place(layer, plan)
    }

    fn store(&self) -> Option<&S> {
        Some(self.storage.store())
    }

    fn eval(&self, outputs: &[&S::Tensor]) -> Result<()> {
        self.storage.eval(outputs)
    }

    fn schedule(&self, outputs: &[&S::Tensor]) -> Result<()> {
        self.storage.schedule(outputs)
    }

    fn commit(&mut self) -> Result<()> {
        if !self.open {
            fail!(Step, "no step is open on this cache");
        }
        self.check_before()?;
        let _span = self.storage.enter_step();
        self.storage.check_done()?;
        let moves = self.book.commit()?;
        self.open = false;
        self.before = None;
        self.aside.end();
        self.storage.commit(&moves)?;
        self.quantize();
        Ok(())
    }

    fn abort(&mut self) {
        let aside = self.aside.end();
        if self.open {
            self.open = false;
            let plans = self.book.plans();
            self.storage.abort(aside, |group| plans.get(group).map(|plan| plan.write.clone()));
            self.book.abort();
            self.restore_book();
        }
    }

    fn can_commit_unread(&self) -> bool {
        let n_tokens = self.book.plans().first().map_or(0, |plan| plan.write.len() as i32);
        S::ENDS_UNREAD
            && self.open
            && self.before.is_none()
            && self.book.only_adds()
            && !self.storage.is_time_to_quantize(self.counted() + n_tokens)
    }

    fn commit_unread(&mut self) -> Result<()> {
        if !self.can_commit_unread() {
            return self.commit();
        }
        self.check_before()?;
        let _span = self.storage.enter_step();
        self.storage.check_written()?;
        let added = self.book.commit_added()?;
        self.open = false;
        self.aside.end();
        self.storage.commit_unread();
        self.unread = Some(UnreadStep { added, followed: false });
        Ok(())
    }

    fn check_unread(&mut self) -> Result<()> {
        let Some(UnreadStep { added, .. }) = self.unread.take() else {
            return Ok(());
        };
        let checked = self.storage.check_unread();
        if checked.is_err() {
            // The open step has read values of the step that is undone now.
            self.drop_aside();
            self.abort();
            // No step is open now, so this cannot be refused.
            let _ = self.book.undo(&added);
            self.storage.blank(|_| added.cells().clone());
        }
        checked
    }

    fn can_set_aside(&self) -> bool {
        true
    }

    fn set_aside(&mut self) -> Option<u64> {
        self.open.then(|| self.aside.set())
    }

    fn resume(&mut self, step: u64) -> bool {
        self.aside.resume(step)
    }
}
