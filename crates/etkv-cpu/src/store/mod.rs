//! The storage of a cache in plain memory.
//!
//! Each layer has a buffer for its keys and one for its values. A buffer has a block of memory for each plane
//! of its format. A codec converts a row to its planes.

mod affine;
mod bits;
mod block_float;
mod buffer;
mod bytes;
mod codec;
mod float;
mod row;
mod row_codec;
mod sharing;
pub mod view;

use std::ops::Range;
use std::sync::Arc;

use etkv_core::bookkeeping::{MaskRuns, Slots};
use etkv_core::error::fail;
use etkv_core::snapshot::PlaneId;
use etkv_core::{Extent, KvFormat, Result, Store, StoreLayer};

use crate::store::view::View;
use crate::tensor::Tensor;
use buffer::{Buffer, Rows};
pub(crate) use codec::Codec;
pub use sharing::FrozenLayers;

/// The storage of a cache in plain memory. It computes eagerly.
#[derive(Default)]
pub struct CpuStore {
    /// The keys and values of each layer.
    layers: Vec<[Buffer; 2]>,
    /// The sizes of each layer.
    sizes: Vec<StoreLayer>,
    /// For each watched write of the open step, whether all stored values are finite.
    finite: Vec<bool>,
    /// Room for one row of any layer.
    row: Vec<f32>,
}

/// Copies of the rows that a step overwrites, which an abort restores: layer, slots, keys and values.
pub struct SavedRows(Vec<(usize, Slots, [Rows; 2])>);

impl CpuStore {
    /// Creates empty buffers to replace those of another format, and returns them in order. Grows the other
    /// buffers to the requested slots; they keep their rows.
    fn cleared(&mut self, formats: [KvFormat; 2], slots: &[i32]) -> Result<Vec<Option<Buffer>>> {
        let mut all = Vec::new();
        let layers = self.layers.iter_mut().zip(&self.sizes);
        for ((buffers, sizes), &slots) in layers.zip(slots) {
            for (buffer, format) in buffers.iter_mut().zip(sizes.formats(formats)) {
                let mut fresh = match buffer.extent().format == format {
                    true => None,
                    false => Some(Buffer::new(format, buffer.n_kv_heads(), buffer.head_dim())?),
                };
                fresh.as_mut().unwrap_or(buffer).grow(slots)?;
                all.push(fresh);
            }
        }
        Ok(all)
    }
}

impl Store for CpuStore {
    const NAME: &'static str = "CPU";

    type Tensor = Tensor;
    type View = View;
    type Mask = Arc<MaskRuns>;
    type Saved = SavedRows;
    type Frozen = FrozenLayers;

    fn new(layers: &[StoreLayer], formats: [KvFormat; 2]) -> Result<Self> {
        let size = |size: i32| match usize::try_from(size) {
            Ok(size) => Ok(size),
            Err(_) => fail!(InvalidArgument, "expected sizes of at least 0, got {size}"),
        };
        let mut store = Self::default();
        let mut longest = 0;
        for layer in layers {
            let [k_heads, v_heads] = [size(layer.heads[0])?, size(layer.heads[1])?];
            let dims = [size(layer.dims[0])?, size(layer.dims[1])?];
            longest = dims.into_iter().fold(longest, usize::max);
            let [k, v] = layer.formats(formats);
            let buffers = [Buffer::new(k, k_heads, dims[0])?, Buffer::new(v, v_heads, dims[1])?];
            store.layers.push(buffers);
        }
        store.sizes = layers.to_vec();
        if store.row.try_reserve_exact(longest).is_err() {
            fail!(Backend, "out of memory: rows of {longest} elements; free memory");
        }
        store.row.resize(longest, 0.0);
        Ok(store)
    }

    fn shape(tensor: &Tensor) -> &[i32] {
        tensor.shape()
    }

    fn extents(&self, layer: usize) -> [Extent; 2] {
        let [k, v] = &self.layers[layer];
        [k.extent(), v.extent()]
    }

    fn grow(&mut self, layer: usize, slots: i32) -> Result<()> {
        self.layers[layer].iter_mut().try_for_each(|buffer| buffer.grow(slots))
    }

    fn begin(&mut self, displaced: &[(usize, Slots)]) -> Result<SavedRows> {
        let copies = displaced.iter().map(|(layer, slots)| {
            let [k, v] = &self.layers[*layer];
            Ok((*layer, slots.clone(), [k.copy(slots)?, v.copy(slots)?]))
        });
        Ok(SavedRows(copies.collect::<Result<_>>()?))
    }

    fn write(
        &mut self,
        layer: usize,
        slots: &Slots,
        k: &Tensor,
        v: Option<&Tensor>,
        watch: bool,
    ) -> Result<()> {
        let [keys, values] = &mut self.layers[layer];
        // Without `v`, the values are in the keys.
        let mut finite = keys.write(slots, k, watch && v.is_none(), &mut self.row)?;
        if let Some(v) = v {
            finite = values.write(slots, v, watch, &mut self.row)?;
        }
        if watch {
            self.finite.push(finite);
        }
        Ok(())
    }

    fn begins_with(k: &Tensor, v: &Tensor) -> Result<bool> {
        Ok(k.begins_with(v))
    }

    fn read(&self, layer: usize, slots: Range<i32>) -> Result<[View; 2]> {
        let [k, v] = &self.layers[layer];
        let keys = k.read(slots.clone())?;
        let values = match self.sizes[layer].second_in_first {
            0 => v.read(slots)?,
            elements => keys.first(elements as usize),
        };
        Ok([keys, values])
    }

    fn mask(runs: &Arc<MaskRuns>) -> Result<Arc<MaskRuns>> {
        Ok(Arc::clone(runs))
    }

    fn eval(&self, _: &[&Tensor]) -> Result<()> {
        Ok(())
    }

    fn non_finite(&self) -> Option<usize> {
        self.finite.iter().position(|finite| !finite)
    }

    fn end(&mut self) {
        self.finite.clear();
    }

    /// Rows that the step wrote to empty slots may stay, since no step reads these slots before they are
    /// written again. The slots in `blank` are an exception: they are set to zero.
    fn abort(&mut self, saved: SavedRows, blank: &[(usize, Slots)]) -> Result<()> {
        self.end();
        for (layer, slots) in blank {
            self.layers[*layer].iter_mut().try_for_each(|buffer| buffer.blank(slots))?;
        }
        for (layer, slots, rows) in &saved.0 {
            for (buffer, rows) in self.layers[*layer].iter_mut().zip(rows) {
                buffer.put(slots, rows)?;
            }
        }
        Ok(())
    }

    fn relocate(&mut self, layers: &[usize], from: &Slots, to: &Slots, slots: i32) -> Result<()> {
        for &layer in layers {
            for buffer in &mut self.layers[layer] {
                buffer.grow(slots)?;
                buffer.relocate(from, to)?;
            }
        }
        Ok(())
    }

    fn convert(&mut self, layer: usize, formats: [KvFormat; 2]) -> Result<()> {
        for (buffer, format) in self.layers[layer].iter_mut().zip(formats) {
            if buffer.extent().format != format {
                *buffer = buffer.converted(format, &mut self.row)?;
            }
        }
        Ok(())
    }

    fn clear(&mut self, formats: [KvFormat; 2], slots: &[i32]) -> Result<()> {
        let fresh = self.cleared(formats, slots)?;
        // Nothing can fail from here on.
        self.end();
        for (buffer, fresh) in self.layers.iter_mut().flatten().zip(fresh) {
            if let Some(fresh) = fresh {
                *buffer = fresh;
            }
        }
        Ok(())
    }

    fn release(&mut self) {
        self.layers.iter_mut().flatten().for_each(Buffer::release);
    }

    fn copy_out(&self, id: PlaneId, slots: &Slots, bytes: &mut [u8]) -> Result<()> {
        self.layers[id.layer][usize::from(id.values)].copy_out(id.plane, slots, bytes)
    }

    fn copy_in(&mut self, id: PlaneId, slots: &Slots, bytes: &[u8]) -> Result<()> {
        self.layers[id.layer][usize::from(id.values)].copy_in(id.plane, slots, bytes)
    }

    fn freeze(&mut self, slots: &[i32], most: &[i32], anew: bool) -> Result<FrozenLayers> {
        self.freeze_layers(slots, most, anew)
    }

    fn attach(&mut self, frozen: &FrozenLayers, most: &[i32]) -> Result<()> {
        self.attach_layers(frozen, most)
    }
}

#[cfg(test)]
mod tests;
