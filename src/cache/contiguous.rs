//! One growing sequence: plain decoding.

use mlx_rs::transforms::eval;
use mlx_rs::Array;

use super::{AttendCache, Cache, Memory};
use crate::attend::{AttendSpec, Mask};
use crate::bookkeeping::{ContiguousBookkeeping, ContiguousPlan};
use crate::config::{CacheConfig, LayerConfig};
use crate::error::{fail, Error, Result, Status};
use crate::mlx;
use crate::pool::{pool_for, Pool};

/// One growing sequence. Reads are views of a prefix, writes happen in place,
/// and no mask is ever built: a prompt is causal, a token sees everything.
pub struct ContiguousCache {
    config: CacheConfig,
    book: ContiguousBookkeeping,
    layers: Vec<Layer>,
    step: Option<OpenStep>,
    /// Set when an aborted step could not be undone: what the buffers hold is
    /// unknown, and only `clear` is left.
    lost: Option<Error>,
}

struct Layer {
    config: LayerConfig,
    k: Box<dyn Pool>,
    v: Box<dyn Pool>,
}

struct OpenStep {
    plan: ContiguousPlan,
    /// Which layers the step has had.
    done: Vec<bool>,
    /// Rows that the step writes over although positions still lie there, keys
    /// and values of each layer; empty for a step that appends.
    displaced: Vec<(Array, Array)>,
}

impl ContiguousCache {
    /// The name of this kind.
    pub const KIND: &'static str = "contiguous";

    /// An empty cache. Allocates nothing yet.
    ///
    /// # Errors
    /// [`InvalidArgument`](Status::InvalidArgument) for a config that cannot be.
    pub fn new(config: CacheConfig) -> Result<Self> {
        config.validate()?;
        let layers = config
            .layers
            .iter()
            .map(|&layer| Layer {
                config: layer,
                k: pool_for(config.k_format, layer.n_kv_heads, layer.k_head_dim),
                v: pool_for(config.v_format, layer.n_kv_heads, layer.v_head_dim),
            })
            .collect();
        let book = ContiguousBookkeeping::new(config.capacity);
        Ok(Self { config, book, layers, step: None, lost: None })
    }

    fn refuse_in_step(&self, what: &str) -> Result<()> {
        if self.step.is_some() {
            fail!(Step, "cannot {what} in the middle of a step");
        }
        Ok(())
    }

    /// Copies of the rows in the slots that `plan` displaces.
    fn save_displaced(&self, plan: &ContiguousPlan) -> Result<Vec<(Array, Array)>> {
        let slots = plan.displaced();
        if slots.is_empty() {
            return Ok(Vec::new());
        }
        let copy = |pool: &dyn Pool| -> Result<Array> {
            Ok(pool.read(slots.start, slots.end)?.contiguous()?)
        };
        let saved = self
            .layers
            .iter()
            .map(|layer| Ok((copy(&*layer.k)?, copy(&*layer.v)?)))
            .collect::<Result<Vec<_>>>()?;
        // Now, while the rows are there: a copy that is still to be made would
        // hold the buffer, and turn the writes into copies of all of it.
        eval(saved.iter().flat_map(|(k, v)| [k, v]))?;
        Ok(saved)
    }

    /// Puts back what the step displaced, and makes sure that the buffers hold
    /// values and no unfinished work.
    fn undo(&mut self, step: &OpenStep) -> Result<()> {
        let start = step.plan.displaced().start;
        for (layer, (k, v)) in self.layers.iter_mut().zip(&step.displaced) {
            layer.k.write(start, k)?;
            layer.v.write(start, v)?;
        }
        Ok(eval(self.buffers())?)
    }
}

impl Cache for ContiguousCache {
    fn kind(&self) -> &'static str {
        Self::KIND
    }

    fn config(&self) -> &CacheConfig {
        &self.config
    }

    fn capacity(&self) -> i32 {
        self.book.capacity()
    }

    fn length(&self) -> i32 {
        self.book.length()
    }

    fn can_extend(&self, n: i32) -> bool {
        self.lost.is_none() && self.book.can_extend(n)
    }

    fn clear(&mut self, release: bool) -> Result<()> {
        self.refuse_in_step("clear the cache")?;
        self.book.clear();
        // Buffers with unfinished work in them are of no use to anybody.
        let lost = self.lost.take().is_some();
        if release || lost {
            for layer in &mut self.layers {
                layer.k.release();
                layer.v.release();
            }
        }
        Ok(())
    }

    fn rewind(&mut self, length: i32) -> Result<()> {
        self.refuse_in_step("rewind the cache")?;
        self.book.rewind(length)
    }

    fn memory(&self) -> Memory {
        let length = self.book.length().max(0) as u64;
        let mut memory =
            Memory { at_capacity: self.config.bytes(self.capacity()), ..Memory::default() };
        for pool in self.layers.iter().flat_map(|layer| [&layer.k, &layer.v]) {
            memory.allocated += pool.slots() as u64 * pool.slot_bytes();
            memory.used += length * pool.slot_bytes();
        }
        memory
    }
}

impl AttendCache for ContiguousCache {
    fn begin(&mut self, positions: &[i32]) -> Result<()> {
        if self.step.is_some() {
            fail!(Step, "a step is open on this cache");
        }
        if let Some(error) = &self.lost {
            fail!(Mlx, "the cache was lost when a step failed ({error}); clear it to go on");
        }
        let plan = self.book.plan(positions)?;
        let displaced = self.save_displaced(&plan)?;
        self.step = Some(OpenStep { plan, done: vec![false; self.layers.len()], displaced });
        Ok(())
    }

    fn update_and_fetch(&mut self, layer: usize, k: &Array, v: &Array) -> Result<AttendSpec> {
        let Some(step) = &mut self.step else {
            fail!(Step, "no step is open on this cache");
        };
        let n_layers = self.layers.len();
        let Some(target) = self.layers.get_mut(layer) else {
            fail!(Shape, "layer {layer} is asked for, the cache has {n_layers}");
        };
        if step.done[layer] {
            fail!(Step, "layer {layer} is written twice in one step");
        }
        let (heads, n) = (target.config.n_kv_heads, step.plan.n_tokens());
        check_rows("keys", layer, k, [1, heads, n, target.config.k_head_dim])?;
        check_rows("values", layer, v, [1, heads, n, target.config.v_head_dim])?;

        let ContiguousPlan { start, end, .. } = step.plan;
        let slots = self.config.slots_for(end);
        target.k.grow(slots)?;
        target.v.grow(slots)?;
        target.k.write(start, k)?;
        target.v.write(start, v)?;
        step.done[layer] = true;
        Ok(AttendSpec {
            k: target.k.read(0, end)?,
            v: target.v.read(0, end)?,
            mask: if n == 1 { Mask::None } else { Mask::Causal },
        })
    }

    fn buffers(&self) -> Vec<&Array> {
        self.layers
            .iter()
            .flat_map(|layer| [layer.k.buffers(), layer.v.buffers()])
            .flatten()
            .collect()
    }

    fn commit(&mut self) -> Result<()> {
        let Some(step) = &self.step else {
            fail!(Step, "no step is open on this cache");
        };
        if let Some(layer) = step.done.iter().position(|done| !done) {
            fail!(Step, "the step ends without layer {layer}");
        }
        self.book.commit(&step.plan);
        self.step = None;
        Ok(())
    }

    fn abort(&mut self) {
        if let Some(step) = self.step.take() {
            if let Err(error) = mlx::run(|| self.undo(&step)) {
                self.lost = Some(error);
            }
        }
    }
}

impl Drop for ContiguousCache {
    fn drop(&mut self) {
        let _alone = mlx::alone();
        self.layers.clear();
        self.step = None;
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
    fn a_lost_cache_refuses_steps_until_it_is_cleared() {
        for release in [false, true] {
            let mut cache = ContiguousCache::new(CacheConfig::uniform(1, 1, 4, 8)).unwrap();
            cache.lost = Some(Error::new(Status::Mlx, "out of memory"));
            assert!(!cache.can_extend(1));
            let error = cache.begin(&[0]).unwrap_err();
            assert!(error.message().contains("out of memory"), "{error}");
            cache.clear(release).unwrap();
            assert!(cache.can_extend(1));
            cache.begin(&[0]).unwrap();
            cache.abort();
        }
    }
}
