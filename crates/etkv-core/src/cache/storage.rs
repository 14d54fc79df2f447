//! The bytes of a cache: a backend's store, and the plans of layer groups applied to it. All kinds of caches use it.

mod conversion;
mod memory;
mod recurrent;
mod rows;
mod saving;
mod sharing;

pub use saving::Contents;

use std::sync::Arc;

use tracing::span::EnteredSpan;
use tracing::{debug, debug_span, enabled, error, trace, warn, Level, Span};

use crate::bookkeeping::{LayerGroupPlan, MaskPlan, Move, Slots, Window};
use crate::budget::Share;
use crate::config::CacheConfig;
use crate::error::{fail, Error, Result, Status};
use crate::format::KvFormat;
use crate::growth::Growth;
use crate::prefix::FrozenRows;
use crate::report::CacheReport;
use crate::spec::{AttendSpec, Mask, Placement};
use crate::store::{Spec, Store};
use crate::store_layer::{SlotsOf, StoreLayers};
use crate::watch::{self, TARGET};

/// The progress of the open step in one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Progress {
    Waiting,
    /// Some of the layer's rows may have been written.
    Begun,
    Done,
}

/// The store of all layers, and the state of the open step except its bookkeeping.
pub struct Storage<S: Store> {
    config: CacheConfig,
    /// The layers of the store. In this file, a "layer" is a layer of the store.
    layers: StoreLayers,
    store: S,
    /// The store's share of the process's memory budget.
    share: Share,
    /// The frozen rows that buffers of this cache read. Other caches may read them too. The rows stay in memory as
    /// long as a buffer reads them.
    prefix: Option<Arc<FrozenRows<S>>>,
    /// The number of frozen slots of each layer group. They are the first slots. Empty without a prefix.
    frozen: Vec<i32>,
    /// Whether buffers may have grown since the share was last settled.
    unsettled: bool,
    /// The progress of the open step in each layer; empty if no step is open.
    done: Vec<Progress>,
    /// The masks of the open step, created when a layer first needs them.
    masks: Vec<Option<S::Mask>>,
    /// Copies of the rows that the open step overwrites, which an abort restores.
    saved: Option<S::Saved>,
    /// Whether several sequences share the slots. A query then also reads rows that its mask hides.
    shared: bool,
    formats: [KvFormat; 2],
    /// Whether rows still wait for their conversion at `quantized_kv_start`.
    awaits: bool,
    /// The layers with values in keys for which the current program's values have not been compared with its keys
    /// yet.
    unchecked: Vec<usize>,
    step: Span,
    /// The error after which the contents of the buffers are unknown; `None` once the cache is cleared.
    poisoned: Option<Error>,
}

impl<S: Store> Storage<S> {
    /// Returns a store for a valid config. It allocates as positions are added, or at once if the config requests it.
    /// `shared`: several sequences will use it.
    pub fn new(config: CacheConfig, shared: bool) -> Result<Self> {
        let formats = config.formats_at(0);
        let mut storage = Self::without_slots(config, shared, formats)?;
        storage.grow_upfront()?;
        Ok(storage)
    }

    /// Returns a store for a valid config that has allocated no slots and stores rows in `formats`.
    fn without_slots(config: CacheConfig, shared: bool, formats: [KvFormat; 2]) -> Result<Self> {
        let layers = StoreLayers::of(&config);
        let store = S::new(&layers.layers, formats)?;
        let masks = vec![None; layers.kinds.len()];
        let awaits = config.quantized_kv_start.is_some();
        Ok(Self {
            config,
            layers,
            store,
            share: Share::default(),
            prefix: None,
            frozen: Vec::new(),
            unsettled: false,
            done: Vec::new(),
            masks,
            saved: None,
            shared,
            formats,
            awaits,
            unchecked: Vec::new(),
            step: Span::none(),
            poisoned: None,
        })
    }

    /// Allocates all slots, if the config requests it.
    fn grow_upfront(&mut self) -> Result<()> {
        if self.config.growth != Growth::Upfront {
            return Ok(());
        }
        self.reserve(|storage, group| storage.allocated(group, 0))?;
        for layer in 0..self.layers.groups.len() {
            self.grow(layer, self.allocated(self.layers.groups[layer], 0))?;
        }
        self.settle();
        Ok(())
    }

    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// Returns the windows of the layer groups other than the first, which has full history.
    pub fn windows(&self) -> impl Iterator<Item = Window> + '_ {
        let policies = self.layers.kinds.iter().filter_map(|kind| match kind {
            SlotsOf::Attention(policy) => Some(*policy),
            SlotsOf::Rows | SlotsOf::Anchors => None,
        });
        policies.filter_map(|policy| self.config.window(policy))
    }

    pub fn formats(&self) -> [KvFormat; 2] {
        self.formats
    }

    /// Returns an error if the cache is poisoned.
    pub fn check(&self) -> Result<()> {
        match &self.poisoned {
            Some(error) => {
                fail!(Backend, "the cache is poisoned: {error}; clear it to continue")
            }
            None => Ok(()),
        }
    }

    /// Refuses a step of `n_tokens` after `length` positions if the cache would then store more positions in float
    /// than the memory estimate allows before `quantized_kv_start`. If a conversion failed earlier, first repeats it.
    /// `counted` positions count for `quantized_kv_start`.
    ///
    /// # Errors
    /// - [`Capacity`](Status::Capacity): the step is too long.
    /// - [`Backend`](Status::Backend): the conversion failed again.
    pub fn check_floats(&mut self, n_tokens: usize, length: i32, counted: i32) -> Result<()> {
        let most = self.config.max_floats();
        let after = i64::from(length).saturating_add(n_tokens as i64);
        if !self.awaits || after <= i64::from(most) {
            return Ok(());
        }
        if self.is_time_to_quantize(counted) {
            let [k, v] = [self.config.k_format, self.config.v_format];
            return self.convert([k, v]).map_err(|error| {
                error.at(format_args!(
                    "cannot convert the {length} positions in {} to {k} keys and {v} values \
                     (quantized_kv_start); free memory and repeat the step",
                    self.config.float_format
                ))
            });
        }
        fail!(
            Capacity,
            "a step of {n_tokens} tokens would store {after} positions in {}, the maximum is {most}: \
             quantized_kv_start - 1, and max_step_tokens {}; run steps of fewer tokens",
            self.config.float_format,
            self.config.max_step_tokens
        );
    }

    /// Returns whether `length` positions reach `quantized_kv_start` and are not converted yet.
    pub fn is_time_to_quantize(&self, length: i32) -> bool {
        self.awaits && self.config.quantized_kv_start.is_some_and(|tokens| length >= tokens)
    }

    /// Opens a step. An abort restores the rows in the slots `displaced` of each layer group.
    pub fn begin(&mut self, displaced: impl Fn(usize) -> Slots) -> Result<()> {
        let of_layer = |(layer, &group): (usize, &usize)| (layer, displaced(group));
        let mut displaced: Vec<(usize, Slots)> =
            self.layers.groups.iter().enumerate().map(of_layer).collect();
        displaced.retain(|(_, slots)| !slots.is_empty());
        self.open(&displaced)
    }

    /// Opens a step that overwrites no rows.
    pub fn begin_appending(&mut self) -> Result<()> {
        self.open(&[])
    }

    fn open(&mut self, displaced: &[(usize, Slots)]) -> Result<()> {
        self.saved = Some(self.store.begin(displaced).inspect_err(|_| self.settle())?);
        self.done.clear();
        self.done.resize(self.layers.groups.len(), Progress::Waiting);
        Ok(())
    }

    /// Logs that a step begins, or why it is refused. The span of the step lasts until the step ends. `plans` are the
    /// plans of the layer groups.
    pub fn begun(
        &mut self,
        positions: &[i32],
        plans: &[LayerGroupPlan],
        begun: Result<()>,
    ) -> Result<()> {
        let (tokens, first) = (positions.len(), positions.first());
        if let Err(error) = begun {
            let status = error.status();
            warn!(target: TARGET, tokens, first, ?status, %error, "a step is refused");
            return Err(error);
        }
        // The first layer group may be without layers.
        let used = || {
            (0..).zip(plans).filter(|(n, _)| self.layers.groups.contains(n)).map(|(_, plan)| plan)
        };
        self.step = debug_span!(
            target: TARGET,
            "step",
            tokens,
            first,
            mask = %watch::masks(used()),
            read = used().map(|plan| plan.read.len()).max(),
        );
        Ok(())
    }

    /// Enters the span of the open step.
    pub fn enter_step(&self) -> EnteredSpan {
        self.step.clone().entered()
    }

    /// Returns the layer group of a layer.
    pub fn group(&self, layer: usize) -> Result<usize> {
        let n_layers = self.config.layers.len();
        match self.layers.groups.get(layer).filter(|_| layer < n_layers) {
            Some(&group) => Ok(group),
            None => {
                fail!(
                    Shape,
                    "expected a layer from 0 to {}, got {layer}",
                    n_layers.saturating_sub(1)
                )
            }
        }
    }

    /// Writes a layer's new rows and reads rows by the plan of its layer group. If the step already has the layer's
    /// rows, the call only reads. Values that are in the keys are not written; only their shape is checked.
    pub fn update_and_fetch(
        &mut self,
        layer: usize,
        k: &S::Tensor,
        v: &S::Tensor,
        plan: &LayerGroupPlan,
    ) -> Result<Spec<S>> {
        let _span = self.enter_step();
        self.write_and_read(layer, k, v, plan).inspect_err(|error| {
            let status = error.status();
            warn!(target: TARGET, layer, ?status, %error, "the rows of a layer are refused");
        })
    }

    fn write_and_read(
        &mut self,
        layer: usize,
        k: &S::Tensor,
        v: &S::Tensor,
        plan: &LayerGroupPlan,
    ) -> Result<Spec<S>> {
        let group = self.group(layer)?;
        let Some(&progress) = self.done.get(layer) else {
            fail!(Step, "no step is open on this cache");
        };
        let slots = self.allocated(group, plan.needed());
        let target = &self.config.layers[layer];
        let (heads, n) = (target.n_kv_heads, plan.write.len() as i32);
        check_rows("keys", layer, S::shape(k), [1, heads, n, target.k_head_dim])?;
        check_rows("values", layer, S::shape(v), [1, heads, n, target.v_head_dim])?;
        let (in_keys, dim) = (target.values_in_keys, target.v_head_dim);
        if progress != Progress::Done {
            self.grow(layer, slots)?;
            self.done[layer] = Progress::Begun;
            self.check_values_in_keys(layer, k, v, dim)?;
            let v = (!in_keys).then_some(v);
            // The values must be watched: a hidden row has weight 0, and 0 times infinity is NaN.
            self.store.write(layer, &plan.write, k, v, self.shared)?;
        }
        let [k, v] = self.store.read(layer, plan.read.clone())?;
        self.done[layer] = Progress::Done;
        trace!(
            target: TARGET,
            layer,
            written = plan.write.len(),
            read = ?plan.read,
            mask = watch::mask(plan),
            "a layer"
        );
        Ok(AttendSpec { k, v, mask: self.mask(group, plan, n)? })
    }

    /// Marks each layer with values in keys: the next values are then compared with the keys. If the values were not
    /// in the keys, the cache would change the program's results.
    pub fn expect_program(&mut self) {
        let layers = self.config.layers.iter().enumerate();
        self.unchecked.clear();
        self.unchecked.extend(layers.filter(|(_, of)| of.values_in_keys).map(|(layer, _)| layer));
    }

    fn check_values_in_keys(
        &mut self,
        layer: usize,
        k: &S::Tensor,
        v: &S::Tensor,
        dim: i32,
    ) -> Result<()> {
        let Some(index) = self.unchecked.iter().position(|&unchecked| unchecked == layer) else {
            return Ok(());
        };
        if S::shape(k)[2] == 0 {
            // There are no rows to compare.
            return Ok(());
        }
        if !S::begins_with(k, v)? {
            fail!(
                Shape,
                "values of layer {layer} are not the first {dim} elements of its keys, but the cache's config sets \
                 `values_in_keys`; make the config from the program's metadata, or without `values_in_keys`"
            );
        }
        self.unchecked.swap_remove(index);
        Ok(())
    }

    /// Counts a layer's new rows as written, and returns their slots, which are allocated. Returns `None` for a layer
    /// without a buffer for values.
    pub fn place(&mut self, layer: usize, plan: &LayerGroupPlan) -> Result<Option<Placement>> {
        let _span = self.enter_step();
        let group = self.group(layer)?;
        if self.done.get(layer).is_none() {
            fail!(Step, "no step is open on this cache");
        }
        if self.config.layers[layer].values_in_keys {
            return Ok(None);
        }
        self.grow(layer, self.allocated(group, plan.needed()))?;
        self.done[layer] = Progress::Done;
        let LayerGroupPlan { write, read, mask } = plan.clone();
        Ok(Some(Placement { write, read, mask }))
    }

    pub fn store(&self) -> &S {
        &self.store
    }

    fn grow(&mut self, layer: usize, slots: i32) -> Result<()> {
        if !enabled!(target: TARGET, Level::DEBUG) {
            return self.store.grow(layer, slots);
        }
        let held = self.store.extents(layer).map(|extent| extent.slots);
        if held.iter().all(|&held| held >= slots) {
            return self.store.grow(layer, slots);
        }
        let _span =
            debug_span!(target: TARGET, "grow", layer, from = held[0], to = slots).entered();
        self.store.grow(layer, slots)
    }

    fn mask(
        &mut self,
        group: usize,
        plan: &LayerGroupPlan,
        n_tokens: i32,
    ) -> Result<Mask<S::Mask>> {
        Ok(match &plan.mask {
            MaskPlan::None => Mask::None,
            MaskPlan::Causal => Mask::Causal,
            MaskPlan::Explicit(runs) => {
                let made = match &mut self.masks[group] {
                    Some(made) => made,
                    none => {
                        debug_assert_eq!(
                            [runs.n_tokens(), runs.n_slots()],
                            [n_tokens as usize, plan.read.len()]
                        );
                        none.insert(S::mask(runs)?)
                    }
                };
                Mask::Explicit(made.clone())
            }
        })
    }

    /// Returns the number of slots that a layer group allocates if it needs `needed` slots.
    fn allocated(&self, group: usize, needed: i32) -> i32 {
        let kind = self.layers.kinds[group];
        if let (SlotsOf::Attention(policy), Some(&frozen)) = (kind, self.frozen.get(group)) {
            let window = self.config.window(policy).filter(|window| needed <= window.slots());
            let everything = self.shared && self.config.growth == Growth::Upfront;
            if window.is_none() || everything {
                // Only the slots after a prefix grow.
                let capacity = self.config.capacity;
                let frozen = frozen.min(capacity);
                return frozen + self.config.growth.slots(needed - frozen, capacity - frozen);
            }
        }
        self.config.allocated(kind, needed, self.shared)
    }

    /// Computes `outputs` together with the writes of the open step.
    pub fn eval(&self, outputs: &[&S::Tensor]) -> Result<()> {
        self.compute(|store| store.eval(outputs))
    }

    /// Starts to compute `outputs`.
    pub fn schedule(&self, outputs: &[&S::Tensor]) -> Result<()> {
        self.compute(|store| store.schedule(outputs))
    }

    fn compute(&self, work: impl FnOnce(&S) -> Result<()>) -> Result<()> {
        let _span = self.enter_step();
        work(&self.store).inspect_err(|error| {
            warn!(target: TARGET, %error, "a step cannot be computed");
        })
    }

    /// Refuses to end a step if a layer was not called, or if values of the step would spoil other sequences.
    pub fn check_done(&self) -> Result<()> {
        let found =
            self.find_missing().and_then(|()| self.refuse_non_finite(self.store.non_finite()));
        log_end_error(found)
    }

    fn find_missing(&self) -> Result<()> {
        if let Some(layer) = self.done.iter().position(|&progress| progress != Progress::Done) {
            match self.layers.recurrent.iter().rposition(|&rows| rows <= layer) {
                Some(layer) => {
                    fail!(
                        Step,
                        "cannot end the step without recurrent layer {layer}; call every layer first"
                    )
                }
                None => {
                    fail!(Step, "cannot end the step without layer {layer}; call every layer first")
                }
            }
        }
        Ok(())
    }

    fn refuse_non_finite(&self, found: Option<usize>) -> Result<()> {
        if let Some(layer) = found {
            fail!(
                InvalidArgument,
                "a value of this step is not finite as {} (attention layer {layer} of \
                 those that ran); other sequences would read it",
                self.formats_of_values()
            );
        }
        Ok(())
    }

    /// Returns the formats of values for a message.
    fn formats_of_values(&self) -> String {
        let [k, v] = self.formats;
        let mut in_keys = self.config.layers.iter().map(|layer| layer.values_in_keys);
        match (in_keys.clone().any(|in_keys| in_keys) && k != v, in_keys.any(|in_keys| !in_keys)) {
            (true, true) => format!("{v}, or as {k} in keys"),
            _ => v.to_string(),
        }
    }

    /// Ends a committed step.
    ///
    /// # Errors
    /// [`Backend`](Status::Backend): the moves failed, and the cache is poisoned.
    pub fn commit(&mut self, moves: &[Move]) -> Result<()> {
        self.store.end();
        self.end();
        self.apply(moves)
    }

    /// Refuses to end a step if a layer was not called, as [`check_done`](Self::check_done) does. Starts the
    /// computation of pending writes.
    pub fn check_written(&self) -> Result<()> {
        log_end_error(self.find_missing())?;
        self.schedule(&[])
    }

    /// Commits a step that moves no rows, before its values are read.
    pub fn commit_unread(&mut self) {
        self.store.end_unread();
        self.end();
    }

    /// Waits for the values of the step that was committed unread, and returns an error if they would spoil other
    /// sequences.
    pub fn check_unread(&mut self) -> Result<()> {
        let found = self.store.unread_non_finite();
        self.refuse_non_finite(found).inspect_err(|error| {
            warn!(target: TARGET, status = ?error.status(), %error, "a committed step is undone");
        })
    }

    /// Rolls the step back. `written` are the slots that it wrote in each layer group. With `aside`, the step was set
    /// aside. Such steps are often rolled back, so their rollback logs no warning.
    ///
    /// Writes that are not evaluated are dropped, because an evaluation that failed would fail again. Evaluated
    /// writes stay in unused slots. Buffers that sequences share are an exception: there the written slots are
    /// zeroed, because a mask cannot hide values that are not finite.
    pub fn abort(&mut self, aside: bool, written: impl Fn(usize) -> Option<Slots>) {
        S::exclusively(&mut || self.roll_back(aside, &written));
    }

    fn roll_back(&mut self, aside: bool, written: &dyn Fn(usize) -> Option<Slots>) {
        let _span = self.enter_step();
        let layers = self.done.iter().filter(|&&progress| progress != Progress::Waiting).count();
        if aside {
            debug!(target: TARGET, layers, "a step that was set aside is rolled back");
        } else {
            warn!(target: TARGET, layers, "a step is rolled back");
        }
        let done = std::mem::take(&mut self.done);
        let saved = self.saved.take();
        self.end();
        let mut blank: Vec<(usize, Slots)> = Vec::new();
        if self.shared {
            let layers = self.layers.groups.iter().enumerate().zip(done);
            let layers = layers.filter(|(_, progress)| *progress != Progress::Waiting);
            blank.extend(layers.filter_map(|((layer, &group), _)| Some((layer, written(group)?))));
        }
        let undone = saved.map_or(Ok(()), |saved| self.store.abort(saved, &blank));
        if let Err(error) = undone {
            self.poison(error);
        }
    }

    fn poison(&mut self, error: Error) {
        error!(target: TARGET, %error, "the cache is poisoned");
        self.poisoned = Some(error);
    }

    fn end(&mut self) {
        self.step = Span::none();
        self.done.clear();
        self.saved = None;
        self.masks.iter_mut().for_each(|mask| *mask = None);
        self.settle();
    }

    /// Adds the figures of the storage to a report.
    pub fn report(&self, report: CacheReport) -> CacheReport {
        let extents = (0..self.layers.groups.len()).map(|layer| self.store.extents(layer));
        CacheReport {
            step_open: !self.done.is_empty(),
            poisoned: self.poisoned.as_ref().map(Error::to_string),
            ..report.with_extents(extents)
        }
    }
}

/// Logs why a step cannot end.
fn log_end_error(checked: Result<()>) -> Result<()> {
    checked.inspect_err(|error| {
        warn!(target: TARGET, status = ?error.status(), %error, "a step cannot end");
    })
}

fn check_rows(what: &str, layer: usize, found: &[i32], expected: [i32; 4]) -> Result<()> {
    if found != expected {
        return Err(Error::new(
            Status::Shape,
            format!("expected {what} of shape {expected:?} for layer {layer}, got {found:?}"),
        ));
    }
    Ok(())
}
