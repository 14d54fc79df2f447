//! Saving and loading of the rows of a cache.

use crate::bookkeeping::Slots;
use crate::config::CacheConfig;
use crate::error::{fail, Error, Result, Status};
use crate::format::KvFormat;
use crate::growth::Growth;
use crate::snapshot::{GiveRows, PlaneId, PlaneRows, Snapshot, TakeRows};
use crate::store::Store;

use super::Storage;

/// Planes are read and written in parts of about this number of bytes. A part of a single slot may have more.
const CHUNK: usize = 4 << 20;

/// The contents of a cache after it loads a snapshot.
pub struct Contents<B> {
    /// The bookkeeping.
    pub book: B,
    /// The slots of each layer group that have rows.
    pub held: Vec<Slots>,
    /// The formats after loading. The flag is true if rows still wait for their conversion at `quantized_kv_start`.
    pub target: ([KvFormat; 2], bool),
}

impl<S: Store> Storage<S> {
    /// Returns whether rows still wait for their conversion at `quantized_kv_start`.
    pub fn awaits(&self) -> bool {
        self.awaits
    }

    /// Returns the planes of rows in these formats, in the slots `held` of each layer group.
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
        // Planes of wide elements come first. All planes are then aligned.
        all.sort_by_key(|rows| std::cmp::Reverse(rows.format.element.bytes()));
        all
    }

    /// Passes the rows of the planes in the slots `held`.
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

    /// Returns a store with the same config and the rows from `give`, in the slots of `contents`. The rows have the
    /// formats of the snapshot and are converted to those of `contents`.
    pub fn restored<B>(
        &self,
        snapshot: &Snapshot,
        contents: &Contents<B>,
        give: &mut GiveRows,
    ) -> Result<Self> {
        self.filled(self.config.clone(), snapshot, contents, give)
    }

    /// Returns a store with only these rows. [`take_rows`](Self::take_rows) then adds them to this store.
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
        // In the budget both stores count as one holder. It stays registered until both are dropped.
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
        made.unchecked.clone_from(&self.unchecked);
        Ok(made)
    }

    /// Refuses a file with stored values that are not finite.
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

    /// Refuses to load a sequence if the cache would then have `length` positions, more than it may store in float
    /// before `quantized_kv_start`.
    pub fn check_joining_floats(&self, length: i32) -> Result<()> {
        let most = self.config.max_floats();
        if length > most {
            fail!(
                Capacity,
                "the cache would hold {length} positions in {}, the maximum is {most}: quantized_kv_start - 1, \
                 and max_step_tokens {}",
                self.config.float_format,
                self.config.max_step_tokens
            );
        }
        Ok(())
    }

    /// Copies the rows of a store with the same layers and formats from the slots `held` to the slots `free` of this
    /// store.
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
                // Values that are not finite must not remain, because a mask cannot hide them.
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

/// Splits slots into parts of at least one slot and about [`CHUNK`] bytes.
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
