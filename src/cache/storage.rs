//! The bytes of a cache: each layer's pools, driven by the plans of its lane.
//! What every kind of cache does with arrays is here, once.

use mlx_rs::ops::zeros_dtype;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use crate::attend::{AttendSpec, Mask};
use crate::bookkeeping::{LanePlan, MaskPlan, Move, Slots, Window};
use crate::config::{CacheConfig, Growth, LayerConfig, LayerPolicy};
use crate::error::{fail, Error, Result, Status};
use crate::format::KvFormat;
use crate::memory::{Bytes, LayerMemory, Memory};
use crate::mlx::{self, cast};
use crate::pool::{convert, float_dtype, pool_for, Pool, StoredRows};

/// Keys and values of one layer.
struct Layer {
    config: LayerConfig,
    lane: usize,
    k: Box<dyn Pool>,
    v: Box<dyn Pool>,
}

/// The pool that takes the place of another; none where that one stays.
type Fresh = Option<Box<dyn Pool>>;

/// Rows that a step writes over although somebody still needs them.
type Displaced = Vec<(Slots, StoredRows, StoredRows)>;

/// The pools of all layers, and the state of the open step that is arrays.
pub struct Storage {
    config: CacheConfig,
    /// The policy of each lane. The first is full history, with layers or without.
    policies: Vec<LayerPolicy>,
    layers: Vec<Layer>,
    /// Which layers the open step has had; empty outside one.
    done: Vec<bool>,
    /// The masks of the open step, made when a layer first needs them.
    masks: Vec<Option<Array>>,
    displaced: Displaced,
    /// Whether sequences share the slots, so that queries come to read rows which
    /// a mask hides from them.
    shared: bool,
    /// For each layer of the open step, where they are shared: a number that is 0
    /// if all of its new values are finite.
    finite: Vec<Array>,
    /// The formats that the pools have.
    formats: [KvFormat; 2],
    /// Whether `quantize_after` is still to come.
    awaits: bool,
    /// Why the buffers hold what nobody knows, until they are cleared.
    lost: Option<Error>,
}

impl Storage {
    /// Pools for a config that is valid. They allocate as positions come, or now
    /// where the config says so. `shared` if several sequences will live in them.
    pub fn new(config: CacheConfig, shared: bool) -> Result<Self> {
        let mut policies = vec![LayerPolicy::Full];
        for layer in &config.layers {
            if !policies.contains(&layer.policy) {
                policies.push(layer.policy);
            }
        }
        let formats = config.formats_at(0);
        let new_layer = |&layer: &LayerConfig| {
            Ok(Layer {
                config: layer,
                lane: policies.iter().position(|&policy| policy == layer.policy).unwrap_or(0),
                k: pool_for(formats[0], layer.n_kv_heads, layer.k_head_dim)?,
                v: pool_for(formats[1], layer.n_kv_heads, layer.v_head_dim)?,
            })
        };
        let layers = config.layers.iter().map(new_layer).collect::<Result<_>>()?;
        let masks = vec![None; policies.len()];
        let awaits = config.quantize_after.is_some();
        let mut storage = Self {
            config,
            policies,
            layers,
            done: Vec::new(),
            masks,
            displaced: Vec::new(),
            shared,
            finite: Vec::new(),
            formats,
            awaits,
            lost: None,
        };
        storage.grow_upfront()?;
        Ok(storage)
    }

    /// Allocates all of it, where the config says so.
    fn grow_upfront(&mut self) -> Result<()> {
        if self.config.growth != Growth::Upfront {
            return Ok(());
        }
        mlx::run(|| {
            for index in 0..self.layers.len() {
                let slots = self.allocated(self.layers[index].lane, 0);
                self.layers[index].k.grow(slots)?;
                self.layers[index].v.grow(slots)?;
            }
            Ok(())
        })
    }

    pub fn config(&self) -> &CacheConfig {
        &self.config
    }

    /// The windows of the lanes, behind that of full history.
    pub fn windows(&self) -> impl Iterator<Item = Window> + '_ {
        self.policies.iter().filter_map(|&policy| self.config.window(policy))
    }

    pub fn formats(&self) -> [KvFormat; 2] {
        self.formats
    }

    /// Refuses everything after the buffers were lost.
    pub fn check(&self) -> Result<()> {
        match &self.lost {
            Some(error) => {
                fail!(Mlx, "the cache was lost when rows were moved ({error}); clear it to go on")
            }
            None => Ok(()),
        }
    }

    /// Refuses a step of `n_tokens` behind `length` positions, where so many more in
    /// float would pass `quantize_after` that the estimate would not hold. A
    /// conversion that failed before is tried again first; `counted` of the
    /// positions count for it.
    ///
    /// # Errors
    /// - [`Capacity`](Status::Capacity): the step is too long.
    /// - [`Mlx`](Status::Mlx): the conversion failed again.
    pub fn check_floats(&mut self, n_tokens: usize, length: i32, counted: i32) -> Result<()> {
        let most = self.config.most_floats();
        let after = i64::from(length).saturating_add(n_tokens as i64);
        if !self.awaits || after <= i64::from(most) {
            return Ok(());
        }
        if self.is_time_to_quantize(counted) {
            let [k, v] = [self.config.k_format, self.config.v_format];
            return self.convert([k, v]).map_err(|error| {
                error.at(format_args!(
                    "cannot convert the {length} positions in {} to {k} keys and {v} values \
                     (quantize_after); free memory and repeat the step",
                    self.config.float_format
                ))
            });
        }
        fail!(
            Capacity,
            "a step of {n_tokens} tokens would keep {after} positions in {}, the most is {most}: \
             quantize_after less 1, and max_step {}; take smaller steps",
            self.config.float_format,
            self.config.max_step
        );
    }

    /// Whether `quantize_after` has come with `length` positions.
    fn is_time_to_quantize(&self, length: i32) -> bool {
        self.awaits && self.config.quantize_after.is_some_and(|tokens| length >= tokens)
    }

    /// Opens a step. The rows in `displaced`, slots of each lane, come back should
    /// it be aborted.
    pub fn begin(&mut self, displaced: impl Fn(usize) -> Slots) -> Result<()> {
        self.finish_writes()?;
        let mut saved = Vec::new();
        for layer in &self.layers {
            let slots = displaced(layer.lane);
            if !slots.is_empty() {
                saved.push((slots.clone(), layer.k.copy(&slots)?, layer.v.copy(&slots)?));
            }
        }
        // Now, while the rows are there: a copy that is still to be made would
        // hold the buffer, and turn the writes into copies of all of it.
        eval(saved.iter().flat_map(|(_, k, v)| [k.arrays(), v.arrays()]).flatten())?;
        self.displaced = saved;
        self.done = vec![false; self.layers.len()];
        Ok(())
    }

    /// Opens a step that writes to slots which nobody needs.
    pub fn begin_appending(&mut self) -> Result<()> {
        self.finish_writes()?;
        self.done.clear();
        self.done.resize(self.layers.len(), false);
        Ok(())
    }

    /// Carries out what earlier steps wrote, where whoever committed them has not:
    /// all that is not carried out is the open step's, should it be aborted.
    fn finish_writes(&self) -> Result<()> {
        let buffers = self.buffers();
        if !buffers.iter().all(|buffer| mlx::is_available(buffer)) {
            eval(buffers)?;
        }
        Ok(())
    }

    /// The lane of a layer.
    pub fn lane(&self, layer: usize) -> Result<usize> {
        match self.layers.get(layer) {
            Some(layer) => Ok(layer.lane),
            None => {
                fail!(Shape, "layer {layer} is asked for, the cache has {}", self.layers.len())
            }
        }
    }

    /// Writes a layer's new rows as its lane's plan says, and reads what the plan
    /// says. The rows of a layer that the step has had are there already: such a
    /// call reads.
    pub fn update_and_fetch(
        &mut self,
        layer: usize,
        k: &Array,
        v: &Array,
        plan: &LanePlan,
    ) -> Result<AttendSpec> {
        let lane = self.lane(layer)?;
        let Some(&had) = self.done.get(layer) else {
            fail!(Step, "no step is open on this cache");
        };
        let slots = self.allocated(lane, plan.needed());
        let target = &mut self.layers[layer];
        let (heads, n) = (target.config.n_kv_heads, plan.write.len() as i32);
        check_rows("keys", layer, k, [1, heads, n, target.config.k_head_dim])?;
        check_rows("values", layer, v, [1, heads, n, target.config.v_head_dim])?;
        if !had {
            target.k.grow(slots)?;
            target.v.grow(slots)?;
            target.k.write(&plan.write, k)?;
            target.v.write(&plan.write, v)?;
        }
        if self.shared && !had {
            // What a mask hides has weight 0, and 0 times infinity is no number.
            let stored = cast(v, float_dtype(self.formats[1]).unwrap_or(v.dtype()))?;
            let zero = Array::from_f32(0.0).as_dtype(stored.dtype())?;
            self.finite.push(stored.multiply(zero)?.sum(None)?);
        }
        let (start, stop) = (plan.read.start, plan.read.end);
        let (k, v) = (target.k.read(start, stop)?, target.v.read(start, stop)?);
        self.done[layer] = true;
        Ok(AttendSpec { k, v, mask: self.mask(lane, plan, n) })
    }

    fn mask(&mut self, lane: usize, plan: &LanePlan, n_tokens: i32) -> Mask {
        match &plan.mask {
            MaskPlan::None => Mask::None,
            MaskPlan::Causal => Mask::Causal,
            MaskPlan::Explicit(bytes) => {
                let width = plan.read.end - plan.read.start;
                let made = self.masks[lane].get_or_insert_with(|| {
                    let shape = [n_tokens, width];
                    debug_assert_eq!(bytes.len() as i64, i64::from(n_tokens) * i64::from(width));
                    // SAFETY: there are as many bytes as the shape says, each of them 0
                    // or 1, which is how MLX keeps booleans; they are copied.
                    unsafe { Array::from_raw_data(bytes.as_ptr().cast(), &shape, Dtype::Bool) }
                });
                Mask::Explicit(made.clone())
            }
        }
    }

    /// Slots that a lane has allocated where `needed` are.
    fn allocated(&self, lane: usize, needed: i32) -> i32 {
        let (growth, capacity) = (self.config.growth, self.config.capacity);
        let everything = self.shared && growth == Growth::Upfront;
        match self.config.window(self.policies[lane]) {
            Some(window) if needed <= window.slots() && !everything => {
                window.allocated(growth, needed)
            }
            // Several sequences, or trees, need more than one does.
            _ => growth.slots(needed, capacity),
        }
    }

    pub fn buffers(&self) -> Vec<&Array> {
        self.layers
            .iter()
            .flat_map(|layer| [layer.k.buffers(), layer.v.buffers()])
            .flatten()
            .chain(&self.finite)
            .collect()
    }

    /// Refuses to end a step that some layer has not had, or that brought values
    /// which other sequences could not be kept apart from.
    pub fn check_done(&self) -> Result<()> {
        if let Some(layer) = self.done.iter().position(|done| !done) {
            fail!(Step, "the step ends without layer {layer}");
        }
        let odd = self.finite.iter().position(|sum| !is_zero(sum));
        if let Some(layer) = odd {
            fail!(
                InvalidArgument,
                "a value of this step is infinite or no number as {} (attention layer {layer} of \
                 those that ran); other sequences would come to read it",
                self.formats[1]
            );
        }
        Ok(())
    }

    /// Ends the step that was committed.
    ///
    /// # Errors
    /// [`Mlx`](Status::Mlx): the moves failed, and the cache is lost.
    pub fn commit(&mut self, moves: &[Move]) -> Result<()> {
        self.end();
        self.apply(moves)
    }

    /// Converts what is stored if `quantize_after` has come with `length` positions.
    pub fn quantize_at(&mut self, length: i32) {
        if self.is_time_to_quantize(length) {
            // Without the memory for it the floats stay; what is stored is right
            // either way. The next step tries again, and the one that has no room
            // left for floats says why (`check_floats`).
            let _ = self.convert([self.config.k_format, self.config.v_format]);
        }
    }

    /// Ends the step as if it had not been. `written` are the slots of each lane
    /// that it wrote.
    ///
    /// What was never evaluated is taken back without being evaluated: if that
    /// failed once, it would fail again. What was evaluated is of no use to
    /// anybody, and nothing of it may stay that a mask cannot hide.
    pub fn abort(&mut self, written: impl Fn(usize) -> Option<Slots>) {
        let displaced = std::mem::take(&mut self.displaced);
        let done = std::mem::take(&mut self.done);
        self.end();
        let undone = mlx::run(|| {
            for (layer, done) in self.layers.iter_mut().zip(done) {
                layer.k.take_back()?;
                layer.v.take_back()?;
                if let Some(slots) = written(layer.lane).filter(|_| done && self.shared) {
                    let (heads, dim) = (layer.v.n_kv_heads(), layer.v.head_dim());
                    let shape = [1, heads, slots.len() as i32, dim];
                    layer.v.write(&slots, &zeros_dtype(&shape, Dtype::Float32)?)?;
                }
            }
            for (layer, (slots, k, v)) in self.layers.iter_mut().zip(&displaced) {
                layer.k.put(slots, k)?;
                layer.v.put(slots, v)?;
            }
            Ok(eval(self.buffers())?)
        });
        if let Err(error) = undone {
            self.lost = Some(error);
        }
    }

    fn end(&mut self) {
        self.done.clear();
        self.finite.clear();
        self.displaced.clear();
        self.masks.iter_mut().for_each(|mask| *mask = None);
    }

    /// Moves rows, one buffer at a time. Where that fails on the way, the buffers
    /// are lost.
    pub fn apply(&mut self, moves: &[Move]) -> Result<()> {
        if moves.is_empty() {
            return Ok(());
        }
        let moved = mlx::run(|| self.try_apply(moves));
        if let Err(error) = &moved {
            self.lost = Some(error.clone());
        }
        moved
    }

    fn try_apply(&mut self, moves: &[Move]) -> Result<()> {
        for Move { lane, from, to } in moves {
            let slots = self.allocated(*lane, to.end());
            for layer in self.layers.iter_mut().filter(|layer| layer.lane == *lane) {
                for pool in [&mut layer.k, &mut layer.v] {
                    let rows = pool.copy(from)?;
                    eval(rows.arrays())?;
                    // Sequences may go apart, to slots that nobody had.
                    pool.grow(slots)?;
                    pool.put(to, &rows)?;
                    eval(pool.buffers())?;
                }
            }
        }
        Ok(())
    }

    /// Stores all rows in other formats.
    pub fn convert(&mut self, [k_format, v_format]: [KvFormat; 2]) -> Result<()> {
        for (id, layer) in self.layers.iter().enumerate() {
            let at =
                |what: &'static str| move |error: Error| error.at(format!("layer {id}: {what}"));
            k_format.check(layer.config.k_head_dim).map_err(at("keys"))?;
            v_format.check(layer.config.v_head_dim).map_err(at("values"))?;
        }
        mlx::run(|| {
            for layer in &mut self.layers {
                for (pool, format) in [(&mut layer.k, k_format), (&mut layer.v, v_format)] {
                    let slots = pool.slots();
                    convert(pool, format, slots)?;
                }
            }
            Ok(())
        })?;
        self.formats = [k_format, v_format];
        // What was asked for by hand is not undone later.
        self.awaits = false;
        Ok(())
    }

    /// Makes the pools new, or leaves them their buffers. Those that are given back
    /// are allocated again with the next step, whatever the growth.
    ///
    /// # Errors
    /// [`Mlx`](Status::Mlx) where the buffers of a config that allocates upfront
    /// cannot be had. The pools keep their rows, and a poisoned cache stays
    /// poisoned.
    pub fn clear(&mut self, release: bool) -> Result<()> {
        let _alone = mlx::alone();
        if self.lost.is_some() {
            // Buffers with unfinished work in them are of no use, and hold memory
            // that the new ones may need.
            self.release();
        }
        let formats = self.config.formats_at(0);
        let fresh = if release {
            self.empty_pools(formats)?
        } else {
            mlx::run(|| self.cleared_pools(formats))?
        };
        // From here on nothing fails.
        for (layer, pools) in self.layers.iter_mut().zip(fresh) {
            for (pool, fresh) in [&mut layer.k, &mut layer.v].into_iter().zip(pools) {
                if let Some(fresh) = fresh {
                    *pool = fresh;
                } else if release {
                    pool.release();
                }
            }
        }
        self.formats = formats;
        self.awaits = self.config.quantize_after.is_some();
        self.lost = None;
        Ok(())
    }

    fn release(&mut self) {
        for layer in &mut self.layers {
            layer.k.release();
            layer.v.release();
        }
    }

    /// A pool without slots for each that has another format than `formats`.
    fn empty_pools(&self, formats: [KvFormat; 2]) -> Result<Vec<[Fresh; 2]>> {
        let empty = |pool: &dyn Pool, format: KvFormat| match pool.format() == format {
            true => Ok(None),
            false => pool_for(format, pool.n_kv_heads(), pool.head_dim()).map(Some),
        };
        let of = |layer: &Layer| Ok([empty(&*layer.k, formats[0])?, empty(&*layer.v, formats[1])?]);
        self.layers.iter().map(of).collect()
    }

    /// [`empty_pools`](Self::empty_pools) with the slots that the config asks for;
    /// pools that stay have them as well then, and their rows as before.
    fn cleared_pools(&mut self, formats: [KvFormat; 2]) -> Result<Vec<[Fresh; 2]>> {
        let mut fresh = self.empty_pools(formats)?;
        if self.config.growth == Growth::Upfront {
            for (index, fresh) in fresh.iter_mut().enumerate() {
                let slots = self.allocated(self.layers[index].lane, 0);
                let layer = &mut self.layers[index];
                for (pool, fresh) in [&mut layer.k, &mut layer.v].into_iter().zip(fresh) {
                    fresh.as_mut().unwrap_or(pool).grow(slots)?;
                }
            }
        }
        Ok(fresh)
    }

    /// Bytes held, of which each lane uses `used` slots.
    pub fn memory(&self, used: impl Fn(usize) -> i32, at_capacity: u64) -> Memory {
        let layers = self
            .layers
            .iter()
            .map(|layer| {
                let used = used(layer.lane).max(0) as u64;
                let bytes = |pool: &dyn Pool| Bytes {
                    allocated: pool.slots() as u64 * pool.slot_bytes(),
                    used: used * pool.slot_bytes(),
                };
                LayerMemory { k: bytes(&*layer.k), v: bytes(&*layer.v) }
            })
            .collect();
        Memory::of(layers, at_capacity)
    }

    #[cfg(test)]
    pub fn lose(&mut self, error: Error) {
        self.lost = Some(error);
    }
}

impl Drop for Storage {
    fn drop(&mut self) {
        let _alone = mlx::alone();
        self.layers.clear();
        self.end();
    }
}

/// Whether a scalar in a float dtype is 0.
fn is_zero(scalar: &Array) -> bool {
    match scalar.dtype() {
        Dtype::Float16 => scalar.try_item_exact().is_ok_and(|x: half::f16| x == half::f16::ZERO),
        Dtype::Bfloat16 => scalar.try_item_exact().is_ok_and(|x: half::bf16| x == half::bf16::ZERO),
        _ => scalar.try_item_exact().is_ok_and(|x: f32| x == 0.0),
    }
}

fn check_rows(what: &str, layer: usize, rows: &Array, expected: [i32; 4]) -> Result<()> {
    if rows.shape() != expected {
        return Err(Error::new(
            Status::Shape,
            format!(
                "the {what} of layer {layer} have shape {:?}, the cache takes {expected:?} here",
                rows.shape()
            ),
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clear_that_fails_leaves_a_poisoned_cache_poisoned() {
        let mut storage = Storage::new(CacheConfig::uniform(1, 8, 128, 1 << 30), false).unwrap();
        storage.config.growth = Growth::Upfront;
        storage.lose(Error::new(Status::Mlx, "rows did not move"));
        let error = storage.clear(false).unwrap_err();
        assert!(error.message().contains("out of memory"), "{error}");
        assert!(storage.check().unwrap_err().message().contains("rows did not move"));
        storage.clear(true).unwrap();
        storage.check().unwrap();
    }
}
