//! Many sequences in one pool of cells, and trees of candidates behind them.

use std::ops::Range;

use tracing::debug_span;

use super::aside::Aside;
use super::storage::Storage;
use super::{AttendCache, Cache, SeqCache, TreeCache};
use crate::bookkeeping::{CellsBookkeeping, Move};
use crate::config::CacheConfig;
use crate::error::{fail, Result};
use crate::format::KvFormat;
use crate::memory::Memory;
use crate::report::{CacheReport, SequenceReport};
use crate::store::{Spec, Store};
use crate::watch::TARGET;

/// Sequences that share cells. A single sequence is read like a contiguous cache.
pub struct CellsCache<S: Store> {
    kind: &'static str,
    book: CellsBookkeeping,
    storage: Storage<S>,
    open: bool,
    aside: Aside,
}

impl<S: Store> CellsCache<S> {
    /// The kind's name if sequences carry no trees.
    pub const SEQ: &'static str = "seq";
    /// The kind's name if sequences carry trees.
    pub const TREE: &'static str = "tree";

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

    fn of_kind(kind: &'static str, config: CacheConfig) -> Result<Self> {
        config.validate()?;
        let capacity = config.capacity;
        let storage = Storage::new(config, true)?;
        let book = CellsBookkeeping::new(capacity, storage.windows());
        Ok(Self { kind, book, storage, open: false, aside: Aside::default() })
    }

    fn try_begin(&mut self, positions: &[i32]) -> Result<()> {
        if self.open {
            fail!(Step, "a step is open on this cache");
        }
        self.storage.check()?;
        self.storage.check_floats(positions.len(), self.book.length(), self.counted())?;
        self.book.plan(positions)?;
        if let Err(error) = self.storage.begin_appending() {
            self.book.abort();
            return Err(error);
        }
        self.open = true;
        Ok(())
    }

    /// The bookkeeping, to change it. Rolls back a step that was set aside.
    fn changing(&mut self) -> &mut CellsBookkeeping {
        self.drop_aside();
        &mut self.book
    }

    /// Rolls back a step that was set aside, and withdraws what was declared for it.
    fn drop_aside(&mut self) {
        if self.aside.waits() {
            self.abort();
            // No step is open now, so it cannot be refused.
            let _ = self.book.cancel_step();
        }
    }

    /// The positions that count for `quantized_kv_start`: candidates do not.
    fn counted(&self) -> i32 {
        self.book.length() - self.book.candidates()
    }

    fn quantize(&mut self) {
        self.storage.quantize_at(self.counted());
    }

    /// Moves rows to the slots that the bookkeeping gives their positions.
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

    fn length(&self) -> i32 {
        self.book.length()
    }

    fn next_position(&self) -> Result<i32> {
        self.book.seq_next(self.book.only_sequence()?)
    }

    fn can_extend(&self, n: i32) -> bool {
        self.storage.check().is_ok() && self.book.can_extend(n)
    }

    fn clear(&mut self, release: bool) -> Result<()> {
        self.drop_aside();
        if self.open {
            fail!(Step, "cannot clear the cache in the middle of a step");
        }
        self.storage.clear(release)?;
        self.book.clear();
        Ok(())
    }

    fn rewind(&mut self, length: i32) -> Result<()> {
        self.changing().rewind(length)
    }

    fn rewindable_to(&self) -> Result<i32> {
        self.book.rewindable_to(self.book.only_sequence()?)
    }

    fn memory(&self) -> Memory {
        self.storage.memory(|group| self.book.used(group), self.config().at_capacity_shared())
    }

    fn report(&self) -> CacheReport {
        let of = |sequence| {
            Ok(SequenceReport {
                sequence,
                length: self.book.seq_len(sequence)?,
                next: self.book.seq_next(sequence)?,
                rewindable_to: self.book.rewindable_to(sequence)?,
                tree: self.book.tree_len(sequence)?,
            })
        };
        let sequences = self.book.sequences().into_iter().map(of);
        // Sequences that are there have all of it.
        let sequences = sequences.collect::<Result<_>>().unwrap_or_default();
        self.storage.report(CacheReport { sequences, ..CacheReport::of(self) })
    }

    fn formats(&self) -> [KvFormat; 2] {
        self.storage.formats()
    }

    fn convert(&mut self, k_format: KvFormat, v_format: KvFormat) -> Result<()> {
        self.drop_aside();
        if self.open {
            fail!(Step, "cannot convert the cache in the middle of a step");
        }
        self.storage.check()?;
        self.storage.convert([k_format, v_format])
    }

    fn sequences(&self) -> Option<&dyn SeqCache> {
        Some(self)
    }

    fn sequences_mut(&mut self) -> Option<&mut dyn SeqCache> {
        Some(self)
    }

    fn trees(&self) -> Option<&dyn TreeCache> {
        (self.kind == Self::TREE).then_some(self as &dyn TreeCache)
    }

    fn trees_mut(&mut self) -> Option<&mut dyn TreeCache> {
        (self.kind == Self::TREE).then_some(self as &mut dyn TreeCache)
    }
}

impl<S: Store> SeqCache for CellsCache<S> {
    fn begin_step(&mut self, sequences: &[i32]) -> Result<()> {
        self.changing().begin_step(sequences)
    }

    fn begin_step_shared(&mut self, sequences: &[&[i32]]) -> Result<()> {
        self.changing().begin_step_shared(sequences)
    }

    fn cancel_step(&mut self) -> Result<()> {
        self.changing().cancel_step()
    }

    fn seq_cp(&mut self, source: i32, target: i32, positions: Range<i32>) -> Result<()> {
        self.changing().seq_cp(source, target, positions)
    }

    fn seq_rm(&mut self, sequence: i32, positions: Range<i32>) -> Result<()> {
        self.changing().seq_rm(sequence, positions)
    }

    fn seq_keep(&mut self, sequence: i32) -> Result<()> {
        self.changing().seq_keep(sequence)
    }

    fn seq_len(&self, sequence: i32) -> Result<i32> {
        self.book.seq_len(sequence)
    }

    fn seq_next(&self, sequence: i32) -> Result<i32> {
        self.book.seq_next(sequence)
    }

    fn seq_positions(&self, sequence: i32) -> Result<Vec<Range<i32>>> {
        self.book.seq_positions(sequence)
    }

    fn seq_rewindable_to(&self, sequence: i32) -> Result<i32> {
        self.book.rewindable_to(sequence)
    }

    fn live_sequences(&self) -> Vec<i32> {
        self.book.sequences()
    }

    fn compact(&mut self) -> Result<()> {
        self.storage.check()?;
        let _span = debug_span!(target: TARGET, "compact").entered();
        let moves = self.changing().compact();
        self.apply(moves)
    }
}

impl<S: Store> TreeCache for CellsCache<S> {
    fn propose(&mut self, sequence: i32, parents: &[i32]) -> Result<()> {
        self.storage.check()?;
        self.changing().propose(sequence, parents)
    }

    fn commit_tree(&mut self, sequence: i32, accepted: &[i32]) -> Result<()> {
        self.storage.check()?;
        let moves = self.changing().commit_tree(sequence, accepted);
        self.apply(moves)?;
        self.quantize();
        Ok(())
    }

    fn tree_len(&self, sequence: i32) -> Result<usize> {
        self.book.tree_len(sequence)
    }
}

impl<S: Store> AttendCache for CellsCache<S> {
    type Store = S;

    fn begin(&mut self, positions: &[i32]) -> Result<()> {
        self.drop_aside();
        let begun = self.try_begin(positions);
        self.storage.begun(positions, self.book.plans(), begun)
    }

    fn update_and_fetch(&mut self, layer: usize, k: &S::Tensor, v: &S::Tensor) -> Result<Spec<S>> {
        let group = self.storage.group(layer)?;
        let Some(plan) = self.book.plans().get(group) else {
            fail!(Step, "no step is open on this cache");
        };
        self.storage.update_and_fetch(layer, k, v, plan)
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
        let _span = self.storage.enter_step();
        self.storage.check_done()?;
        let moves = self.book.commit()?;
        self.open = false;
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
        }
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
