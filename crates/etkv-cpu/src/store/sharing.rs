//! Rows that several stores share: the first slots of every buffer, in pages that each store maps.

use std::sync::Arc;

use etkv_core::error::fail;
use etkv_core::{KvFormat, Result};

use super::buffer::Buffer;
use super::CpuStore;
use crate::memory::{page, Memory, Piece};

/// The rows of the first slots of all layers.
pub struct FrozenLayers(Vec<[FrozenBuffer; 2]>);

/// The rows of the first slots of a buffer.
struct FrozenBuffer {
    format: KvFormat,
    slots: i32,
    /// For each plane, the first pieces of a mapping.
    planes: [Vec<Piece>; 3],
}

impl Buffer {
    /// Freezes the first `slots` slots. The buffer then maps the frozen rows, with room for `most` slots. The
    /// slots after the frozen ones are freed. They can be added again without a copy.
    fn freeze(&mut self, slots: i32, most: i32, anew: bool) -> Result<FrozenBuffer> {
        if slots < 0 || slots > self.slots {
            fail!(Internal, "{slots} slots of {} must be frozen", self.slots);
        }
        // Slots that were not written since the last freeze are already in shared pages.
        let shared = if anew { 0 } else { self.extent().shared.min(slots) };
        let mut frozen: [Vec<Piece>; 3] = Default::default();
        let mut mapped: [Option<Arc<Memory>>; 3] = Default::default();
        for at in 0..self.planes.len() {
            let Some(memory) = self.planes[at].as_ref().filter(|_| slots > 0) else { continue };
            let bytes = |slots: i32| (slots as usize).saturating_mul(self.slot_bytes(at));
            let kept = bytes(shared) / page() * page();
            let before = memory.pieces().unwrap_or_default();
            let mut pieces: Vec<Piece> =
                before.iter().filter_map(|piece| piece.up_to(kept)).collect();
            if kept < bytes(slots) {
                pieces.push(Piece::freeze(&memory.bytes()[kept..bytes(slots)], kept)?);
            }
            let memory = Memory::mapped(pieces.clone(), bytes(slots), bytes(most))?;
            mapped[at] = Some(Arc::new(memory));
            frozen[at] = pieces;
        }
        self.planes = mapped;
        (self.slots, self.shared) = (slots, slots);
        Ok(FrozenBuffer { format: self.format(), slots, planes: frozen })
    }

    /// Attaches a buffer without slots to frozen rows.
    fn attach(&mut self, frozen: &FrozenBuffer, most: i32) -> Result<()> {
        if self.slots > 0 || frozen.format != self.format() {
            let FrozenBuffer { format, slots, .. } = frozen;
            fail!(Internal, "{slots} slots of {format} do not fit after {} slots", self.slots);
        }
        let mut mapped: [Option<Arc<Memory>>; 3] = Default::default();
        if frozen.slots > 0 {
            for (at, pieces) in frozen.planes.iter().enumerate() {
                if self.has_plane(at) {
                    let bytes = |slots: i32| (slots as usize).saturating_mul(self.slot_bytes(at));
                    let memory = Memory::mapped(pieces.clone(), bytes(frozen.slots), bytes(most))?;
                    mapped[at] = Some(Arc::new(memory));
                }
            }
        }
        self.planes = mapped;
        (self.slots, self.shared) = (frozen.slots, frozen.slots);
        Ok(())
    }
}

impl CpuStore {
    pub(super) fn freeze_layers(
        &mut self,
        slots: &[i32],
        most: &[i32],
        anew: bool,
    ) -> Result<FrozenLayers> {
        let shared: Vec<i32> =
            self.layers.iter().flatten().map(|buffer| buffer.extent().shared).collect();
        let frozen = self.try_freeze(slots, most, anew);
        if frozen.is_err() {
            // Slots that this failed call froze are not shared with another store.
            for (buffer, shared) in self.layers.iter_mut().flatten().zip(shared) {
                buffer.shared = buffer.shared.min(shared);
            }
        }
        frozen
    }

    fn try_freeze(&mut self, slots: &[i32], most: &[i32], anew: bool) -> Result<FrozenLayers> {
        let sizes = slots.iter().zip(most);
        let layers = self.layers.iter_mut().zip(sizes).map(|(buffers, (&slots, &most))| {
            let [k, v] = buffers;
            Ok([k.freeze(slots, most, anew)?, v.freeze(slots, most, anew)?])
        });
        Ok(FrozenLayers(layers.collect::<Result<_>>()?))
    }

    pub(super) fn attach_layers(&mut self, frozen: &FrozenLayers, most: &[i32]) -> Result<()> {
        if frozen.0.len() != self.layers.len() {
            fail!(Internal, "{} frozen layers of {}", frozen.0.len(), self.layers.len());
        }
        for ((buffers, frozen), &most) in self.layers.iter_mut().zip(&frozen.0).zip(most) {
            for (buffer, frozen) in buffers.iter_mut().zip(frozen) {
                buffer.attach(frozen, most)?;
            }
        }
        Ok(())
    }
}
