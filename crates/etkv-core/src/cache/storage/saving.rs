//! Saving and loading of the rows of a cache.

use crate::bookkeeping::Slots;
use crate::config::CacheConfig;
use crate::error::{fail, Error, Result, Status};
use crate::format::KvFormat;
use crate::growth::Growth;
use crate::snapshot::{GiveRows, PlaneId, PlaneRows, Snapshot, TakeRows};
use crate::store::Store;

use super::Storage;

/// The bytes of a plane that are passed at a time, unless one slot has more.
const CHUNK: usize = 4 << 20;

/// The contents that a cache with this bookkeeping has after loading a snapshot.
pub struct Contents<B> {
    /// The positions, and their slots.
    pub book: B,
    /// For each layer group, the slots that hold rows.
    pub held: Vec<Slots>,
    /// The formats after loading, and whether the cache has not reached `quantized_kv_start` yet.
    pub target: ([KvFormat; 2], bool),
}

impl<S: Store> Storage<S> {
    /// Returns whether the cache has not reached `quantized_kv_start` yet.
    pub fn awaits(&self) -> bool {
        self.awaits
    }

    /// Returns the planes of these formats, where layer groups hold rows in `held` slots.
    pub fn planes(&self, formats: [KvFormat; 2], held: &[Slots]) -> Vec<PlaneRows> {
        let mut all = Vec::new();
        for (id, layer) in self.layers.layers.iter().enumerate() {
            let n_slots = held[self.layers.groups[id]].len();
            let formats = layer.formats(formats);
            for buffer in if layer.has_second() { 0..2 } else { 0..1 } {
                let planes = formats[buffer].planes(layer.dims[buffer] as usize);
                all.extend(planes.into_iter().enumerate().map(|(plane, format)| PlaneRows {
                    id: PlaneId { layer: id, values: buffer == 1, plane },
                    format,
                    n_kv_heads: layer.heads[buffer] as usize,
                    n_slots,
                }));
            }
        }
        // Planes of wide elements come first, so that all are aligned.
        all.sort_by_key(|rows| std::cmp::Reverse(rows.format.element.bytes()));
        all
    }

    /// Passes the rows of the planes at the `held` slots.
    pub fn read_rows(&self, held: &[Slots], take: &mut TakeRows) -> Result<()> {
        let mut buffer = Vec::new();
        for rows in self.planes(self.formats, held) {
            for slots in chunks(&held[self.layers.groups[rows.id.layer]], rows.slot_bytes()) {
                let bytes = room(&mut buffer, slots.len() * rows.slot_bytes())?;
                self.store.copy_out(rows.id, &slots, bytes)?;
                take(&rows, bytes)?;
            }
        }
        Ok(())
    }

    /// Returns a store like this one with the rows from `give`, in the held slots. They have the formats of
    /// the snapshot and are converted to those of the target.
    pub fn restored<B>(
        &self,
        snapshot: &Snapshot,
        contents: &Contents<B>,
        give: &mut GiveRows,
    ) -> Result<Self> {
        self.filled(self.config.clone(), snapshot, contents, give)
    }

    /// Returns a store with only these rows, which [`take_rows`](Self::take_rows) adds to this one.
    pub fn apart<B>(
        &self,
        snapshot: &Snapshot,
        contents: &Contents<B>,
        give: &mut GiveRows,
    ) -> Result<Self> {
        let config = CacheConfig { growth: Growth::Exact, ..self.config.clone() };
        self.filled(config, snapshot, contents, give)
    }

    fn filled<B>(
        &self,
        config: CacheConfig,
        snapshot: &Snapshot,
        contents: &Contents<B>,
        give: &mut GiveRows,
    ) -> Result<Self> {
        let Contents { held, target: (target, awaits), .. } = contents;
        let (target, awaits) = (*target, *awaits);
        let mut made = Self::without_slots(config, self.shared, snapshot.formats)?;
        // Both stores belong to the same holder of the budget, and this one stays.
        made.share = self.share.sibling();
        let needed = |made: &Self, group: usize| made.allocated(group, held[group].end());
        made.reserve(needed)?;
        for (layer, &group) in self.layers.groups.iter().enumerate() {
            made.store.grow(layer, needed(&made, group))?;
        }
        let mut buffer = Vec::new();
        for rows in made.planes(snapshot.formats, held) {
            for slots in chunks(&held[made.layers.groups[rows.id.layer]], rows.slot_bytes()) {
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

    /// Refuses a file with values that are not finite as stored.
    pub fn refuse_not_finite(&self, held: &[Slots]) -> Result<()> {
        self.read_rows(held, &mut |rows, bytes| {
            let layer = self.config.layers.get(rows.id.layer);
            let format = self.formats[usize::from(rows.id.values)];
            let checked = layer.is_some_and(|layer| rows.id.values || layer.values_in_keys);
            if checked && !format.is_finite(&rows.format, bytes) {
                fail!(
                    File,
                    "a value of layer {} is not finite as {format}; other sequences would read it",
                    rows.id.layer
                );
            }
            Ok(())
        })
    }

    /// Refuses rows of a file that would make the cache hold `length` positions, if that is more than may be
    /// stored in float before `quantized_kv_start`.
    pub fn check_joining_floats(&self, length: i32) -> Result<()> {
        let most = self.config.max_floats();
        if length > most {
            fail!(
                Capacity,
                "the cache would hold {length} positions in {}, the most is {most}: quantized_kv_start - 1, \
                 and max_step_tokens {}",
                self.config.float_format,
                self.config.max_step_tokens
            );
        }
        Ok(())
    }

    /// Copies the rows of a store of the same layers and formats at `held` slots to `free` slots of this one.
    pub fn take_rows(&mut self, from: &Self, held: &[Slots], free: &[Slots]) -> Result<()> {
        self.check()?;
        let needed = |storage: &Self, group: usize| storage.allocated(group, free[group].end());
        let own = self.reserve_own(|group| free[group].least());
        let reserved = own.and_then(|()| self.reserve(needed));
        let grown = reserved.and_then(|()| {
            (0..self.layers.groups.len())
                .try_for_each(|layer| self.grow(layer, needed(self, self.layers.groups[layer])))
        });
        let copied = grown.and_then(|()| {
            self.copy_rows(from, held, free).inspect_err(|_| {
                // No value may stay that a mask cannot hide.
                self.blank(|group| free[group].clone());
            })
        });
        self.unsettled = true;
        self.settle();
        copied
    }

    fn copy_rows(&mut self, from: &Self, held: &[Slots], free: &[Slots]) -> Result<()> {
        let mut buffer = Vec::new();
        for rows in from.planes(self.formats, held) {
            let group = self.layers.groups[rows.id.layer];
            let [there, here] =
                [&held[group], &free[group]].map(|slots| chunks(slots, rows.slot_bytes()));
            for (there, here) in there.zip(here) {
                let bytes = room(&mut buffer, there.len() * rows.slot_bytes())?;
                from.store.copy_out(rows.id, &there, bytes)?;
                self.store.copy_in(rows.id, &here, bytes)?;
            }
        }
        Ok(())
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

/// Returns the first `n` bytes of a buffer, which grows if needed.
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
