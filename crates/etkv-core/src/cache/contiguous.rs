//! One growing sequence: the single-stream path.

mod saving;
mod sharing;

use super::aside::SetAsideStep;
use super::passed_limits::PassedLimits;
use super::storage::Storage;
use super::{AttendCache, Cache};
use crate::bookkeeping::{ContiguousBookkeeping, ContiguousPlan, LayerGroupPlan, Slots};
use crate::config::CacheConfig;
use crate::error::{fail, Result};
use crate::format::KvFormat;
use crate::growth::Growth;
use crate::memory::Memory;
use crate::prefix::ShareCache;
use crate::report::{CacheReport, SequenceReport};
use crate::snapshot::SaveCache;
use crate::spec::Placement;
use crate::store::{Spec, Store};

/// One sequence. It needs no mask if all layers have full history.
pub struct ContiguousCache<S: Store> {
    book: ContiguousBookkeeping,
    storage: Storage<S>,
    step: Option<ContiguousPlan>,
    aside: SetAsideStep,
    /// The open step's plan for each layer group, computed once for all layers of the group.
    plans: Vec<LayerGroupPlan>,
    passed: PassedLimits,
}

impl<S: Store> ContiguousCache<S> {
    /// The name of this kind.
    pub const KIND: &'static str = "contiguous";

    /// Returns an empty cache. It allocates as positions are added, unless the config requests it upfront.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for an invalid config, and for recurrent layers: use
    /// [`CellsCache::contiguous`](crate::CellsCache::contiguous) for them.
    pub fn new(config: CacheConfig) -> Result<Self> {
        config.validate()?;
        if !config.recurrent_layers.is_empty() {
            fail!(
                InvalidArgument,
                "a model with recurrent layers needs cells even for one sequence: use CellsCache::contiguous"
            );
        }
        let capacity = config.capacity;
        let storage = Storage::new(config, false)?;
        storage.describe(Self::KIND);
        let groups = std::iter::once(None).chain(storage.windows().map(Some));
        let book = ContiguousBookkeeping::new(capacity, groups);
        let (aside, passed) = (SetAsideStep::default(), PassedLimits::default());
        Ok(Self { book, storage, step: None, aside, plans: Vec::new(), passed })
    }

    fn try_begin(&mut self, positions: &[i32]) -> Result<()> {
        if self.step.is_some() {
            fail!(Step, "a step is open on this cache");
        }
        self.storage.check()?;
        let plan = self.book.plan(positions)?;
        if let Some(&first) = positions.first() {
            self.storage.check_floats(positions.len(), first, first)?;
        }
        if let Err(error) = self.open(&plan) {
            self.plans.clear();
            return Err(error);
        }
        self.step = Some(plan);
        Ok(())
    }

    fn open(&mut self, plan: &ContiguousPlan) -> Result<()> {
        for group in self.book.groups(plan) {
            self.plans.push(group?);
        }
        self.storage.reserve_for(&self.plans)?;
        if plan.displaced().is_empty() {
            self.storage.begin_appending()
        } else {
            self.storage.begin(|group| Slots::Run(self.book.displaced(group, plan)))
        }
    }

    /// Rolls back a step that was set aside.
    fn drop_aside(&mut self) {
        if self.aside.waits() {
            self.abort();
        }
    }

    fn refuse_in_step(&mut self, what: &str) -> Result<()> {
        self.drop_aside();
        if self.step.is_some() {
            fail!(Step, "cannot {what} in the middle of a step");
        }
        Ok(())
    }
}

impl<S: Store> Cache for ContiguousCache<S> {
    fn kind(&self) -> &'static str {
        Self::KIND
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
        self.book.length()
    }

    fn can_extend(&self, n: i32) -> bool {
        self.storage.check().is_ok() && self.book.can_extend(n)
    }

    fn clear(&mut self, release: bool) -> Result<()> {
        self.refuse_in_step("clear the cache")?;
        self.storage.clear(release)?;
        self.book.clear();
        Ok(())
    }

    fn rewind(&mut self, length: i32) -> Result<()> {
        self.refuse_in_step("rewind the cache")?;
        self.book.rewind(length)
    }

    fn rewindable_to(&self) -> Result<i32> {
        Ok(self.book.rewindable_to())
    }

    fn mark(&mut self, position: i32) -> Result<i32> {
        self.refuse_in_step("mark a position")?;
        if position < 0 {
            fail!(Position, "position {position} is negative");
        }
        if self.storage.windows().any(|window| window.slides()) {
            fail!(
                Unsupported,
                "a contiguous cache with window layers cannot create checkpoints; use kind seq or tree"
            );
        }
        // Without windows, no position is ever dropped.
        Ok(position)
    }

    fn memory(&self) -> Memory {
        self.storage.memory(|group| self.book.used(group), self.config().at_capacity())
    }

    fn report(&self) -> CacheReport {
        let length = self.length();
        let sequence = SequenceReport {
            sequence: 0,
            length,
            next: length,
            rewindable_to: self.book.rewindable_to(),
            checkpoints: Vec::new(),
            tree: 0,
        };
        let sequences = if length > 0 { vec![sequence] } else { Vec::new() };
        self.storage.report(CacheReport { sequences, ..CacheReport::of(self) })
    }

    fn holder(&self) -> Option<u64> {
        Some(self.storage.holder())
    }

    fn formats(&self) -> [KvFormat; 2] {
        self.storage.formats()
    }

    fn convert(&mut self, k_format: KvFormat, v_format: KvFormat) -> Result<()> {
        self.refuse_in_step("convert the cache")?;
        self.storage.check()?;
        self.storage.convert([k_format, v_format])
    }

    fn saving(&mut self) -> Option<&mut dyn SaveCache> {
        Some(self)
    }

    fn make_empty(&self) -> Result<Option<Box<dyn Cache>>> {
        let config = CacheConfig { growth: Growth::Exact, ..self.config().clone() };
        Ok(Some(Box::new(Self { passed: self.passed.clone(), ..Self::new(config)? })))
    }

    fn sharing(&mut self) -> Option<&mut dyn ShareCache> {
        Some(self)
    }
}

impl<S: Store> AttendCache for ContiguousCache<S> {
    type Store = S;

    fn begin(&mut self, positions: &[i32]) -> Result<()> {
        self.drop_aside();
        let begun = self.try_begin(positions);
        self.storage.begun(positions, &self.plans, begun)
    }

    fn update_and_fetch(&mut self, layer: usize, k: &S::Tensor, v: &S::Tensor) -> Result<Spec<S>> {
        let group = self.storage.group(layer)?;
        let Some(plan) = self.plans.get(group) else {
            fail!(Step, "no step is open on this cache");
        };
        self.storage.update_and_fetch(layer, k, v, plan)
    }

    fn expect_program(&mut self) {
        self.storage.expect_program();
    }

    fn place(&mut self, layer: usize) -> Result<Option<Placement>> {
        let group = self.storage.group(layer)?;
        let Some(plan) = self.plans.get(group) else {
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
        let Some(plan) = self.step else {
            fail!(Step, "no step is open on this cache");
        };
        let _span = self.storage.enter_step();
        self.storage.check_done()?;
        let moves = self.book.commit(&plan)?;
        self.step = None;
        self.aside.end();
        self.plans.clear();
        self.storage.commit(&moves)?;
        self.storage.quantize_at(self.book.length());
        Ok(())
    }

    fn abort(&mut self) {
        let aside = self.aside.end();
        if self.step.take().is_some() {
            self.plans.clear();
            self.storage.abort(aside, |_| None);
        }
    }

    fn can_set_aside(&self) -> bool {
        true
    }

    fn set_aside(&mut self) -> Option<u64> {
        self.step.is_some().then(|| self.aside.set())
    }

    fn resume(&mut self, step: u64) -> bool {
        self.aside.resume(step)
    }
}
