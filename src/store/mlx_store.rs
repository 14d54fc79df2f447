//! The storage of a cache on MLX arrays.

use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

use etkv_core::bookkeeping::{MaskRuns, Slots};
use etkv_core::snapshot::PlaneId;
use etkv_core::{Extent, KvFormat, Result, Store, StoreLayer, TARGET};
use mlx_rs::error::Exception;
use mlx_rs::ops::array_eq;
use mlx_rs::transforms::{async_eval, eval};
use mlx_rs::Array;
use tracing::debug;

use super::finite::Finite;
use super::{convert, float_dtype, mask, KvView, Piece, Pool, StoredRows};
use crate::error::{self, fail};
use crate::mlx;

/// The pools of all layers. A step on the store runs inside [`mlx::run`](crate::mlx::run). [`grow`](Store::grow) and
/// calls between steps enter MLX themselves.
pub struct MlxStore {
    id: u64,
    pools: Vec<[Pool; 2]>,
    sizes: Vec<StoreLayer>,
    /// The watched writes of the open step.
    finite: Finite,
    /// The watched writes of a step that ended unread.
    unread: Finite,
    /// Whether there are writes whose computation has not started.
    pending: Cell<bool>,
}

/// The maximum number of rows that are moved in all layers at once, such as a chain of a tree. On a GPU, starting the
/// work of each layer and waiting for it takes longer than moving so few rows.
const FEW_ROWS: usize = 64;

/// Copies of the rows that a step overwrites and an abort restores: the layer, the slots, and their keys and values.
pub struct SavedRows(Vec<(usize, Slots, [StoredRows; 2])>);

/// Frozen rows of all layers: the format and the pieces, for keys and for values. Must be dropped while MLX is held,
/// as in [`Store::exclusively`].
pub struct FrozenPools(Vec<[(KvFormat, Vec<Piece>); 2]>);

impl MlxStore {
    /// Returns a number that no other store of this process has or had.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns the formats and the buffers of a layer's keys and values, with a buffer
    /// `[1, n_kv_heads, slots, width]` for each plane of the format. Returns `None` if slots are frozen. The buffers
    /// then lack these slots, so a kernel that reads buffers by address cannot use them.
    pub fn planes(&self, layer: usize) -> Option<[(KvFormat, Vec<&Array>); 2]> {
        let pools = self.pools.get(layer)?;
        pools.iter().all(|pool| pool.base() == 0).then_some(())?;
        Some(pools.each_ref().map(|pool| (pool.format(), pool.buffers().iter().collect())))
    }

    fn buffers(&self) -> impl Iterator<Item = &Array> {
        self.pools.iter().flatten().flat_map(|pool| pool.buffers())
    }

    /// Passes `outputs` to `work`, together with the buffers if there are writes to compute.
    fn compute(
        &self,
        outputs: &[&Array],
        work: impl FnOnce(Vec<&Array>) -> std::result::Result<(), Exception>,
    ) -> error::Result<()> {
        let mut arrays = outputs.to_vec();
        let pending = self.pending.get();
        let flags = if pending { self.finite.flags()? } else { Vec::new() };
        if pending {
            arrays.extend(self.buffers().chain(&flags));
        }
        if !arrays.is_empty() {
            work(arrays)?;
        }
        self.pending.set(false);
        Ok(())
    }

    fn save(&self, displaced: &[(usize, Slots)]) -> error::Result<SavedRows> {
        let mut saved = Vec::new();
        for (layer, slots) in displaced {
            let [k, v] = &self.pools[*layer];
            saved.push((*layer, slots.clone(), [k.copy(slots)?, v.copy(slots)?]));
        }
        // Evaluates now, while the rows are unchanged. A pending copy would hold the buffer, and the next write would
        // have to copy all of it.
        eval(saved.iter().flat_map(|(.., rows)| rows).flat_map(StoredRows::arrays))?;
        Ok(SavedRows(saved))
    }

    /// Undoes the writes of the open step. Unevaluated writes are dropped, because an evaluation that failed would
    /// fail again. Evaluated writes stay in unused slots, except that `blank` slots are zeroed: a mask cannot hide a
    /// value that is not finite.
    fn undo(&mut self, saved: &SavedRows, blank: &[(usize, Slots)]) -> error::Result<()> {
        for pool in self.pools.iter_mut().flatten() {
            pool.roll_back()?;
        }
        for (layer, slots) in blank {
            let in_keys = self.sizes[*layer].second_in_first > 0;
            self.pools[*layer][usize::from(!in_keys)].blank(slots)?;
        }
        for (layer, slots, rows) in &saved.0 {
            for (pool, rows) in self.pools[*layer].iter_mut().zip(rows) {
                pool.restore(slots, rows)?;
            }
        }
        eval(self.buffers())?;
        self.pending.set(false);
        Ok(())
    }

    /// For each pool in order, returns a new pool if its format changes, or `None`. The other pools
    /// keep their rows, and grow to the requested slots.
    fn cleared(
        &mut self,
        formats: [KvFormat; 2],
        slots: &[i32],
    ) -> error::Result<Vec<Option<Pool>>> {
        let mut all = Vec::new();
        let layers = self.pools.iter_mut().zip(&self.sizes);
        for ((pools, sizes), &slots) in layers.zip(slots) {
            for (pool, format) in pools.iter_mut().zip(sizes.formats(formats)) {
                let mut fresh = match pool.format() == format {
                    true => None,
                    false => Some(Pool::new(format, pool.n_kv_heads, pool.head_dim())?),
                };
                let target = fresh.as_mut().unwrap_or(pool);
                if target.slots() < slots {
                    mlx::run(|| target.grow(slots))?;
                }
                all.push(fresh);
            }
        }
        Ok(all)
    }

    fn move_rows(
        &mut self,
        layers: &[usize],
        from: &Slots,
        to: &Slots,
        slots: i32,
    ) -> error::Result<()> {
        let pools = layers.iter().flat_map(|&layer| &self.pools[layer]);
        let rows = pools.map(|pool| pool.copy(from)).collect::<error::Result<Vec<_>>>()?;
        eval(rows.iter().flat_map(StoredRows::arrays))?;
        // Until MLX is synchronized, it holds the buffers that it has read, and a write would copy them.
        mlx::synchronize()?;
        let mut rows = rows.iter();
        for &layer in layers {
            for (pool, rows) in self.pools[layer].iter_mut().zip(&mut rows) {
                pool.grow(slots)?;
                pool.put(to, rows)?;
            }
        }
        let pools = layers.iter().flat_map(|&layer| &self.pools[layer]);
        Ok(eval(pools.flat_map(|pool| pool.buffers()))?)
    }
}

/// Returns whether a pool copies its frozen rows to its own buffers immediately. Captured steps on CUDA read whole
/// buffers by address. They save more time than the copy on the device takes.
fn copies_frozen() -> error::Result<bool> {
    Ok(cfg!(target_os = "linux") && mlx::on_gpu()?)
}

impl Store for MlxStore {
    const NAME: &'static str = "MLX";
    const ENDS_UNREAD: bool = true;

    type Tensor = Array;
    type View = KvView;
    type Mask = Array;
    type Saved = SavedRows;
    type Frozen = FrozenPools;

    fn new(layers: &[StoreLayer], formats: [KvFormat; 2]) -> Result<Self> {
        let pools = layers.iter().map(|layer| {
            let formats = layer.formats(formats);
            Ok([
                Pool::new(formats[0], layer.heads[0], layer.dims[0])?,
                Pool::new(formats[1], layer.heads[1], layer.dims[1])?,
            ])
        });
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        Ok(Self {
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            pools: pools.collect::<error::Result<_>>()?,
            sizes: layers.to_vec(),
            finite: Finite::default(),
            unread: Finite::default(),
            pending: Cell::new(false),
        })
    }

    fn shape(tensor: &Array) -> &[i32] {
        tensor.shape()
    }

    fn extents(&self, layer: usize) -> [Extent; 2] {
        let [k, v] = &self.pools[layer];
        [k, v].map(|pool| Extent {
            format: pool.format(),
            slots: pool.slots(),
            shared: pool.shared,
        })
    }

    fn grow(&mut self, layer: usize, slots: i32) -> Result<()> {
        let pools = &mut self.pools[layer];
        if pools.iter().all(|pool| pool.slots() >= slots) {
            return Ok(());
        }
        Ok(mlx::run(|| pools.iter_mut().try_for_each(|pool| pool.grow(slots)))?)
    }

    fn begin(&mut self, displaced: &[(usize, Slots)]) -> Result<SavedRows> {
        // Computes the writes of earlier steps that were committed without evaluation. An abort of the open step must
        // not undo these.
        self.eval(&[])?;
        if displaced.is_empty() {
            return Ok(SavedRows(Vec::new()));
        }
        Ok(self.save(displaced)?)
    }

    fn write(
        &mut self,
        layer: usize,
        slots: &Slots,
        k: &Array,
        v: Option<&Array>,
        watch: bool,
    ) -> Result<()> {
        self.pending.set(true);
        let [keys, values] = &mut self.pools[layer];
        keys.write(slots, k)?;
        // A layer without a second buffer has its values in the keys.
        let (pool, watched) = match v {
            Some(v) => {
                values.write(slots, v)?;
                (values, v)
            }
            None => (keys, k),
        };
        if watch {
            let stored = float_dtype(pool.format()).unwrap_or(watched.dtype());
            self.finite.watch(watched, stored)?;
        }
        Ok(())
    }

    fn begins_with(k: &Array, v: &Array) -> Result<bool> {
        let first = mlx::slice_axis(k, 3, 0, v.dim(3), 1)?;
        let equal = array_eq(&first, v, true).map_err(error::Error::from)?;
        eval([&equal]).map_err(error::Error::from)?;
        Ok(equal.try_item_exact().is_ok_and(|equal: bool| equal))
    }

    fn read(&self, layer: usize, slots: Range<i32>) -> Result<[KvView; 2]> {
        let [k, v] = &self.pools[layer];
        let keys = k.read(slots.start, slots.end)?;
        let values = match self.sizes[layer].second_in_first {
            0 => v.read(slots.start, slots.end)?,
            elements => keys.first(elements),
        };
        Ok([keys, values])
    }

    fn mask(runs: &Arc<MaskRuns>) -> Result<Array> {
        Ok(mask::array(runs)?)
    }

    fn eval(&self, outputs: &[&Array]) -> Result<()> {
        Ok(self.compute(outputs, |arrays| eval(arrays))?)
    }

    fn schedule(&self, outputs: &[&Array]) -> Result<()> {
        Ok(self.compute(outputs, |arrays| async_eval(arrays))?)
    }

    fn non_finite(&self) -> Option<usize> {
        self.finite.non_finite()
    }

    fn end(&mut self) {
        self.finite.clear();
    }

    fn end_unread(&mut self) {
        self.unread = std::mem::take(&mut self.finite);
    }

    fn unread_non_finite(&mut self) -> Option<usize> {
        let unread = std::mem::take(&mut self.unread);
        let Ok(mut mlx) = mlx::enter() else {
            let _held = mlx::hold();
            drop(unread);
            return Some(0);
        };
        // If this fails, reading the flags fails too.
        let _ = mlx.outside(|| unread.wait());
        let found = mlx.run(|| unread.non_finite());
        // The flags must be dropped before other threads may use MLX.
        drop(unread);
        found
    }

    fn abort(&mut self, saved: SavedRows, blank: &[(usize, Slots)]) -> Result<()> {
        Ok(mlx::run(|| {
            self.end();
            self.undo(&saved, blank)
        })?)
    }

    fn relocate(&mut self, layers: &[usize], from: &Slots, to: &Slots, slots: i32) -> Result<()> {
        let at_once = if from.len() <= FEW_ROWS { layers.len().max(1) } else { 1 };
        for layers in layers.chunks(at_once) {
            mlx::run(|| self.move_rows(layers, from, to, slots))?;
        }
        Ok(())
    }

    fn convert(&mut self, layer: usize, formats: [KvFormat; 2]) -> Result<()> {
        let pools = self.pools[layer].iter_mut().zip(formats);
        Ok(mlx::run(|| {
            for (pool, format) in pools {
                let slots = pool.slots();
                convert(pool, format, slots)?;
            }
            Ok(())
        })?)
    }

    fn clear(&mut self, formats: [KvFormat; 2], slots: &[i32]) -> Result<()> {
        let _held = mlx::hold();
        let fresh = self.cleared(formats, slots)?;
        // Nothing below can fail.
        self.end();
        for (pool, fresh) in self.pools.iter_mut().flatten().zip(fresh) {
            if let Some(fresh) = fresh {
                *pool = fresh;
            }
        }
        Ok(())
    }

    fn release(&mut self) {
        let _held = mlx::hold();
        self.pools.iter_mut().flatten().for_each(|pool| pool.release());
        self.pending.set(false);
    }

    fn copy_out(&self, id: PlaneId, slots: &Slots, bytes: &mut [u8]) -> Result<()> {
        let pool = &self.pools[id.layer][usize::from(id.values)];
        Ok(mlx::run(|| pool.copy_out(id.plane, slots, bytes))?)
    }

    fn copy_in(&mut self, id: PlaneId, slots: &Slots, bytes: &[u8]) -> Result<()> {
        let pool = &mut self.pools[id.layer][usize::from(id.values)];
        Ok(mlx::run(|| pool.copy_in(id.plane, slots, bytes))?)
    }

    fn freeze(&mut self, slots: &[i32], _most: &[i32], anew: bool) -> Result<FrozenPools> {
        Ok(mlx::run(|| {
            for (pools, &end) in self.pools.iter_mut().zip(slots) {
                pools.iter_mut().try_for_each(|pool| pool.freeze(end, anew))?;
            }
            // No error is possible below. If an error occurred earlier, the frozen rows still belong to this
            // store alone.
            let share = |(pools, &end): (&mut [Pool; 2], &i32)| {
                pools.each_mut().map(|pool| (pool.format(), pool.share(end)))
            };
            let frozen = FrozenPools(self.pools.iter_mut().zip(slots).map(share).collect());
            if copies_frozen()? {
                // If there is no memory for a copy, the pool continues to read the frozen rows.
                let copied = self.pools.iter_mut().flatten().try_for_each(|pool| pool.own());
                if let Err(error) = copied {
                    debug!(target: TARGET, %error, "the rows are frozen, and the cache continues to read them in place");
                }
            }
            Ok(frozen)
        })?)
    }

    fn attach(&mut self, frozen: &FrozenPools, _most: &[i32]) -> Result<()> {
        let _held = mlx::hold();
        if frozen.0.len() != self.pools.len() {
            fail!(
                Internal,
                "expected frozen rows of {1} layers, got {0}",
                frozen.0.len(),
                self.pools.len()
            );
        }
        for (pool, (format, pieces)) in
            self.pools.iter_mut().flatten().zip(frozen.0.iter().flatten())
        {
            if pool.format() != *format {
                fail!(Internal, "expected frozen rows of {}, got {format}", pool.format());
            }
            pool.attach(pieces)?;
        }
        if copies_frozen()? {
            mlx::run(|| self.pools.iter_mut().flatten().try_for_each(|pool| pool.own()))?;
        }
        Ok(())
    }

    fn exclusively(work: &mut dyn FnMut()) {
        let _held = mlx::hold();
        work();
    }

    fn give_way(wait: &mut dyn FnMut()) {
        mlx::give_way(wait);
    }
}

impl Drop for MlxStore {
    fn drop(&mut self) {
        let _held = mlx::hold();
        self.pools.clear();
        self.end();
        self.unread.clear();
    }
}
