//! The rows of a cache, in a file and back.

use crate::bookkeeping::Slots;
use crate::config::CacheConfig;
use crate::error::{Error, Result, Status};
use crate::format::KvFormat;
use crate::snapshot::{GiveRows, PlaneId, PlaneRows, Snapshot, TakeRows};
use crate::store::Store;

use super::Storage;

/// The bytes of a plane that pass at a time, unless one slot has more.
const CHUNK: usize = 4 << 20;

/// What a snapshot comes to in a cache with this bookkeeping.
pub struct Contents<B> {
    /// The positions, and their slots.
    pub book: B,
    /// For each layer group, the slots that hold rows.
    pub held: Vec<Slots>,
    /// The formats after loading, and whether the cache has yet to reach `quantized_kv_start`.
    pub target: ([KvFormat; 2], bool),
}

impl<S: Store> Storage<S> {
    /// Returns whether the cache has yet to reach `quantized_kv_start`.
    pub fn awaits(&self) -> bool {
        self.awaits
    }

    /// Returns the planes of these formats, where layer groups hold rows in `held` slots.
    pub fn planes(&self, formats: [KvFormat; 2], held: &[Slots]) -> Vec<PlaneRows> {
        let mut all = Vec::new();
        for (id, layer) in self.config.layers.iter().enumerate() {
            let n_slots = held[self.groups[id]].len();
            for (values, dim) in [(false, layer.k_head_dim), (true, layer.v_head_dim)] {
                let planes = formats[usize::from(values)].planes(dim as usize);
                all.extend(planes.into_iter().enumerate().map(|(plane, format)| PlaneRows {
                    id: PlaneId { layer: id, values, plane },
                    format,
                    n_kv_heads: layer.n_kv_heads as usize,
                    n_slots,
                }));
            }
        }
        // Wide elements lie first, so that all are aligned.
        all.sort_by_key(|rows| std::cmp::Reverse(rows.format.element.bytes()));
        all
    }

    /// Passes the rows of the planes at the `held` slots.
    pub fn read_rows(&self, held: &[Slots], take: &mut TakeRows) -> Result<()> {
        let mut buffer = Vec::new();
        for rows in self.planes(self.formats, held) {
            for slots in chunks(&held[self.groups[rows.id.layer]], rows.slot_bytes()) {
                let bytes = room(&mut buffer, slots.len() * rows.slot_bytes())?;
                self.store.copy_out(rows.id, &slots, bytes)?;
                take(&rows, bytes)?;
            }
        }
        Ok(())
    }

    /// Returns a store like this one with the rows that `give` gives, at the held slots. They come
    /// in the formats of the snapshot and are converted to the target's.
    pub fn restored<B>(
        &self,
        snapshot: &Snapshot,
        contents: &Contents<B>,
        give: &mut GiveRows,
    ) -> Result<Self> {
        let Contents { held, target: (target, awaits), .. } = contents;
        let (target, awaits) = (*target, *awaits);
        let config: CacheConfig = self.config.clone();
        let mut made = Self::without_slots(config, self.shared, snapshot.formats)?;
        // Both count for the same cache, and this one stays.
        made.share = self.share.sibling();
        let needed = |made: &Self, group: usize| made.allocated(group, held[group].end());
        made.reserve(needed)?;
        for (layer, &group) in self.groups.iter().enumerate() {
            made.store.grow(layer, needed(&made, group))?;
        }
        let mut buffer = Vec::new();
        for rows in made.planes(snapshot.formats, held) {
            for slots in chunks(&held[made.groups[rows.id.layer]], rows.slot_bytes()) {
                let bytes = room(&mut buffer, slots.len() * rows.slot_bytes())?;
                give(&rows, bytes)?;
                made.store.copy_in(rows.id, &slots, bytes)?;
            }
        }
        if target != snapshot.formats {
            made.convert_layers(target)?;
        }
        made.settle();
        (made.formats, made.awaits) = (target, awaits);
        Ok(made)
    }
}

/// Returns slots in pieces of at least one slot and about [`CHUNK`] bytes.
fn chunks(slots: &Slots, slot_bytes: usize) -> impl Iterator<Item = Slots> + '_ {
    let n = (CHUNK / slot_bytes.max(1)).max(1);
    (0..slots.len()).step_by(n).map(move |at| {
        let end = at.saturating_add(n).min(slots.len());
        match slots {
            Slots::Run(run) => Slots::Run(run.start + at as i32..run.start + end as i32),
            Slots::List(list) => Slots::of(&list[at..end]),
        }
    })
}

/// Returns the first `n` bytes of a buffer, which grows.
fn room(buffer: &mut Vec<u8>, n: usize) -> Result<&mut [u8]> {
    if n > buffer.len() {
        if buffer.try_reserve_exact(n - buffer.len()).is_err() {
            return Err(Error::new(
                Status::Backend,
                format_args!("out of memory: {n} bytes of rows; free memory"),
            ));
        }
        buffer.resize(n, 0);
    }
    Ok(&mut buffer[..n])
}
