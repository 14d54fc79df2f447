//! The frozen contents of a cache, from which any number of caches continue without a copy.

use std::any::Any;
use std::sync::{Arc, Weak};

use crate::budget::Share;
use crate::config::CacheConfig;
use crate::error::{fail, Error, Result, Status};
use crate::format::KvFormat;
use crate::reach::Reach;
use crate::snapshot::{Book, CellsState, ContiguousState, SavedFormats, SavedLayer, Snapshot};
use crate::store::Store;

/// A read-only sequence that begins at position 0. Caches with the same layers, formats and backend
/// [attach](ShareCache::attach) to it: they read its rows in place, and write later rows into buffers of their own.
/// The rows are freed when the prefix and every cache that reads them have been dropped, in any order.
///
/// A clone is a handle of the same prefix. Any thread may own a clone.
#[derive(Clone)]
pub struct Prefix {
    /// The integers of the cache that was frozen.
    snapshot: Arc<Snapshot>,
    length: i32,
    rewindable_to: i32,
    bytes: u64,
    backend: &'static str,
    /// The [`FrozenRows`] of a store.
    rows: Arc<dyn Any + Send + Sync>,
    /// The memory of this prefix's rows, and of the rows of prefixes that it continues.
    pieces: Arc<[Piece]>,
}

/// Memory with rows of a prefix. Prefixes that continue the same prefix share its pieces. This handle does not keep
/// the memory alive.
#[derive(Clone)]
pub struct Piece {
    rows: Weak<dyn Any + Send + Sync>,
    bytes: u64,
}

impl Piece {
    /// Returns the number of bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns a number that is unique among existing pieces.
    pub fn id(&self) -> usize {
        self.rows.as_ptr().cast::<()>().addr()
    }

    /// Returns whether the piece has been freed, because no prefix or cache uses it any more.
    pub fn is_freed(&self) -> bool {
        self.rows.strong_count() == 0
    }
}

/// The rows of a prefix, and their share of the memory budget.
pub(crate) struct FrozenRows<S: Store> {
    /// `None` only while `self` is dropped.
    frozen: Option<S::Frozen>,
    bytes: u64,
    /// Releases the bytes in the memory budget on drop.
    _share: Share,
    /// The rows of the first slots, if they belong to another prefix.
    parent: Option<Arc<Self>>,
}

impl<S: Store> FrozenRows<S> {
    /// `share` must already have reserved the `bytes`.
    pub fn new(frozen: S::Frozen, (bytes, share): (u64, Share), parent: Option<Arc<Self>>) -> Self {
        Self { frozen: Some(frozen), bytes, _share: share, parent }
    }

    pub fn frozen(&self) -> Result<&S::Frozen> {
        match &self.frozen {
            Some(frozen) => Ok(frozen),
            None => fail!(Internal, "the rows of a prefix are gone"),
        }
    }

    /// Returns the pieces of these rows and of their parents.
    fn pieces(self: &Arc<Self>) -> Arc<[Piece]> {
        let chain = std::iter::successors(Some(self), |rows| rows.parent.as_ref());
        let piece = |rows: &Arc<Self>| {
            let held: Arc<dyn Any + Send + Sync> = Arc::<Self>::clone(rows);
            Piece { rows: Arc::downgrade(&held), bytes: rows.bytes }
        };
        chain.map(piece).collect()
    }

    /// Returns the length of the chain of prefixes.
    pub fn depth(&self) -> usize {
        1 + self.parent.as_ref().map_or(0, |parent| parent.depth())
    }
}

impl<S: Store> Drop for FrozenRows<S> {
    fn drop(&mut self) {
        let mut frozen = self.frozen.take();
        S::exclusively(&mut || drop(frozen.take()));
    }
}

/// The face of a cache that can share its contents with other caches.
pub trait ShareCache {
    /// Freezes the contents of the cache as a prefix. The cache itself then continues from this prefix. Rows that the
    /// cache already reads from an earlier prefix stay in place. The other rows move to shared memory, one layer after
    /// the other. First rolls back a step that was set aside, and reads the values of a step that was committed unread.
    ///
    /// # Errors
    /// - [`InvalidArgument`](crate::Status::InvalidArgument) if the cache is empty, has a sequence other than 0, or has
    ///   candidates. Also if the sequence does not begin at position 0 or has gaps.
    /// - [`Step`](crate::Status::Step) while a step is open.
    /// - [`Unsupported`](crate::Status::Unsupported) for a backend that cannot share memory.
    /// - [`Backend`](crate::Status::Backend) if the cache is poisoned or there is too little memory. The contents are
    ///   unchanged.
    fn freeze(&mut self) -> Result<Prefix>;

    /// Makes the first `length` positions of a prefix the contents of an empty cache. No rows are copied. Contiguous,
    /// seq and tree caches accept each other's prefixes.
    ///
    /// # Errors
    /// - [`InvalidArgument`](crate::Status::InvalidArgument) if the cache is not empty. Also if the prefix differs in
    ///   layers, formats, windows or backend, or is longer than the capacity. Also if `length` is neither a
    ///   checkpoint nor between [`Prefix::rewindable_to`] and [`Prefix::length`].
    /// - [`Step`](crate::Status::Step) while a step is open.
    /// - [`Backend`](crate::Status::Backend) if the cache is poisoned or there is too little memory.
    ///
    /// After an error nothing has changed.
    fn attach(&mut self, prefix: &Prefix, length: i32) -> Result<()>;

    /// Refuses a prefix to which the cache could not [attach](Self::attach) at any length, even if it were empty.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument), with the difference in the message.
    fn fits(&self, prefix: &Prefix) -> Result<()>;

    /// Returns the name of the backend. Only caches of the same backend share memory.
    fn backend(&self) -> &'static str;
}

impl Prefix {
    pub(crate) fn new<S: Store>(
        snapshot: Snapshot,
        (length, rewindable_to): (i32, i32),
        rows: Arc<FrozenRows<S>>,
    ) -> Self {
        let (bytes, pieces) = (rows.bytes, rows.pieces());
        let snapshot = Arc::new(snapshot);
        Self { snapshot, length, rewindable_to, bytes, backend: S::NAME, rows, pieces }
    }

    /// Returns the number of positions.
    pub fn length(&self) -> i32 {
        self.length
    }

    /// Returns the least length at which a cache can attach. It is more than 1 if window layers have dropped
    /// positions that an earlier query would see.
    pub fn rewindable_to(&self) -> i32 {
        self.rewindable_to
    }

    /// Returns the bytes of this prefix's rows, without the rows of a prefix that it continues.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the formats of keys and values.
    pub fn formats(&self) -> [KvFormat; 2] {
        self.snapshot.formats
    }

    /// Returns the integers of the cache that was frozen.
    pub fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    /// Returns the memory of the rows: first this prefix's own [`bytes`](Self::bytes), then the pieces of the
    /// prefixes that it continues.
    pub fn pieces(&self) -> &[Piece] {
        &self.pieces
    }

    /// Returns whether no cache and no other handle uses the prefix's rows.
    pub fn is_idle(&self) -> bool {
        Arc::strong_count(&self.rows) == 1
    }

    /// Returns the rows, if they belong to a store of type `S`.
    pub(crate) fn rows<S: Store>(&self) -> Result<Arc<FrozenRows<S>>> {
        match Arc::clone(&self.rows).downcast() {
            Ok(rows) => Ok(rows),
            Err(_) => fail!(
                InvalidArgument,
                "the prefix is in storage of the backend {}, but this cache in storage of {}",
                self.backend,
                S::NAME
            ),
        }
    }

    /// Refuses a prefix that does not fit a cache with this config.
    pub(crate) fn check<S: Store>(&self, config: &CacheConfig) -> Result<()> {
        self.rows::<S>()?;
        let found = &self.snapshot;
        let layers = config.layers.iter().map(SavedLayer::from);
        if found.layers.len() != config.layers.len() {
            let [found, here] = [found.layers.len(), config.layers.len()];
            fail!(InvalidArgument, "the prefix has {found} layers, but this cache has {here}");
        }
        for (id, (found, layer)) in found.layers.iter().zip(layers).enumerate() {
            if *found != layer {
                fail!(InvalidArgument, "layer {id} of the prefix is {found}, here it is {layer}");
            }
        }
        found.check_recurrent(config).map_err(|error| {
            Error::new(Status::InvalidArgument, error.at("the prefix does not fit"))
        })?;
        let formats = SavedFormats::from(config);
        if found.storage != formats {
            fail!(
                InvalidArgument,
                "expected a prefix of a cache that stores {formats}, got one that stores {}",
                found.storage
            );
        }
        if !config.layers.iter().all(|layer| found.has_window(config, layer.policy)) {
            fail!(
                InvalidArgument,
                "the windows of the prefix are for capacity {} and max_step_tokens {}, \
                 but those of this cache for {} and {}; create the cache with the same values",
                found.capacity,
                found.max_step_tokens,
                config.capacity,
                config.max_step_tokens
            );
        }
        if self.length > config.capacity {
            fail!(
                InvalidArgument,
                "the prefix has {} positions, but the capacity of this cache is {}",
                self.length,
                config.capacity
            );
        }
        Ok(())
    }

    /// Returns the lengths at which a cache can attach.
    pub fn reach(&self) -> Reach {
        Reach { rewindable_to: self.rewindable_to, checkpoints: self.snapshot.checkpoints() }
    }

    /// Refuses a length at which no cache can attach.
    pub(crate) fn check_length(&self, length: i32) -> Result<()> {
        let reach = self.reach();
        if length < 1 || length > self.length || reach.below(length, self.length) != length {
            let kept = match &reach.checkpoints[..] {
                [] => String::new(),
                kept => format!(", apart from {kept:?}"),
            };
            fail!(
                InvalidArgument,
                "cannot attach to the first {length} positions of this prefix: it has {} \
                 positions, and the minimum is {}{kept}",
                self.length,
                self.rewindable_to
            );
        }
        Ok(())
    }

    /// Returns the integers of a contiguous cache whose layer groups have these sinks.
    pub(crate) fn contiguous(&self, sinks: &[i32]) -> Result<ContiguousState> {
        let state = match &self.snapshot.book {
            Book::Contiguous(state) => return Ok(state.clone()),
            Book::Cells(state) => state,
        };
        let groups = state.groups.iter().zip(sinks).map(|(group, &sinks)| {
            // Sinks come first, then the window, in the order of positions and of slots.
            let mut slot = 0;
            let mut dropped = 0;
            let of_text = group.sequences.iter().filter(|held| held.sequence == 0);
            for &[position, cell, len] in of_text.flat_map(|held| &held.runs) {
                let gap = position - cell;
                let begins = gap > 0 && dropped == 0 && slot == sinks;
                if cell != slot || (gap != dropped && !begins) {
                    fail!(
                        InvalidArgument,
                        "position {position} of the prefix is in cell {cell}, and a contiguous cache has \
                         positions in the order of its slots; compact the cache before it is frozen"
                    );
                }
                (slot, dropped) = (cell + len, gap);
            }
            Ok(dropped)
        });
        Ok(ContiguousState { length: self.length, dropped: groups.collect::<Result<_>>()? })
    }

    /// Returns the integers of a cache of cells whose layer groups have these sinks and numbers of cells.
    pub(crate) fn cells(&self, groups: &[(i32, i32)]) -> CellsState {
        let state = match &self.snapshot.book {
            Book::Cells(state) => return state.clone(),
            Book::Contiguous(state) => state,
        };
        state.in_cells(groups)
    }
}

impl std::fmt::Debug for Prefix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { length, rewindable_to, bytes, backend, .. } = self;
        f.debug_struct("Prefix")
            .field("length", length)
            .field("rewindable_to", rewindable_to)
            .field("bytes", bytes)
            .field("backend", backend)
            .finish_non_exhaustive()
    }
}
