//! Saving and loading of one of several sequences.

use super::CellsCache;
use crate::bookkeeping::Slots;
use crate::cache::storage::Contents;
use crate::cache::{Cache, TreeCache};
use crate::error::{fail, Result};
use crate::format::KvFormat;
use crate::snapshot::{Book, CellsState, GiveRows, PlaneRows, SaveCache, Snapshot, TakeRows};
use crate::store::Store;

/// One sequence of a cache. A file of it has only this sequence: as sequence 0, in the first cells, in the order of
/// positions.
pub struct OneSequence<'a, S: Store> {
    pub cache: &'a mut CellsCache<S>,
    pub sequence: i32,
}

impl<S: Store> OneSequence<'_, S> {
    fn check_held(&self) -> Result<()> {
        let (cache, sequence) = (&self.cache, self.sequence);
        let candidates = cache.tree_len(sequence)?;
        if candidates > 0 {
            fail!(
                InvalidArgument,
                "sequence {sequence} carries {candidates} candidates; commit or drop them first"
            );
        }
        if cache.book.seq_len(sequence)? == 0 {
            fail!(
                InvalidArgument,
                "sequence {sequence} holds no positions; the cache has {:?}",
                cache.book.sequences()
            );
        }
        Ok(())
    }

    fn check_free(&self) -> Result<()> {
        let (cache, sequence) = (&self.cache, self.sequence);
        let (held, candidates) = (cache.book.seq_len(sequence)?, cache.tree_len(sequence)?);
        if held > 0 || candidates > 0 {
            fail!(
                InvalidArgument,
                "sequence {sequence} holds {held} positions and {candidates} candidates; \
                 remove it first, or load into another sequence"
            );
        }
        Ok(())
    }

    /// Returns the cells of a snapshot that has only one sequence.
    fn only_state(&self, snapshot: &Snapshot) -> Result<CellsState> {
        let cache = &self.cache;
        snapshot.check_layers(cache.config())?;
        let state = match &snapshot.book {
            Book::Cells(state) => state.clone(),
            Book::Contiguous(state) => {
                cache.book.check_contiguous(state)?;
                state.in_cells(&cache.book.layouts())
            }
        };
        if !state.trees.is_empty() {
            fail!(
                File,
                "cannot add a sequence from a file with {} trees of candidates; load the file into a separate cache",
                state.trees.len()
            );
        }
        match state.groups.first().map_or(0, |group| group.sequences.len()) {
            1 => Ok(state),
            n => fail!(
                File,
                "expected a file with 1 sequence, got {n}; load the file into a separate cache"
            ),
        }
    }

    /// Returns the formats of the cache after the sequence is added.
    fn formats_with(&self, snapshot: &Snapshot) -> [KvFormat; 2] {
        let cache = &self.cache;
        let quantized = [cache.config().k_format, cache.config().v_format];
        // An empty cache takes over the saved cache's formats after `quantized_kv_start`.
        let is_empty = cache.book.length() == 0;
        if is_empty && cache.storage.awaits() && !snapshot.awaits && snapshot.formats == quantized {
            return quantized;
        }
        cache.formats()
    }

    /// Returns the slots of the rows in the file: the first slots of each layer group.
    fn slots_in_file(&self, state: &CellsState) -> Result<Vec<Slots>> {
        // Checks the state by itself, without the sequences of this cache.
        let alone = self.cache.book.with_state(state)?;
        let n = |group| alone.held_cells(group).len() as i32;
        Ok((0..alone.n_groups()).map(|group| Slots::Run(0..n(group))).collect())
    }
}

impl<S: Store> SaveCache for OneSequence<'_, S> {
    fn snapshot(&mut self) -> Result<Snapshot> {
        self.cache.settle_between_steps("save")?;
        self.check_held()?;
        let cache = &self.cache;
        let book = Book::Cells(cache.book.sequence_state(self.sequence));
        let formats = (cache.formats(), cache.storage.awaits());
        Ok(Snapshot::new(cache.kind(), cache.config(), formats, book))
    }

    fn planes(&self, snapshot: &Snapshot) -> Result<Vec<PlaneRows>> {
        let state = self.only_state(snapshot)?;
        let held = self.slots_in_file(&state)?;
        snapshot.check_joining(self.cache.config(), self.formats_with(snapshot))?;
        Ok(self.cache.storage.planes(snapshot.formats, &held))
    }

    fn read_rows(&self, _: &Snapshot, take: &mut TakeRows) -> Result<()> {
        self.check_held()?;
        let book = &self.cache.book;
        let held: Vec<Slots> =
            (0..book.n_groups()).map(|group| book.sequence_cells(group, self.sequence)).collect();
        self.cache.storage.read_rows(&held, take)
    }

    fn restore(&mut self, snapshot: &Snapshot, give: &mut GiveRows) -> Result<()> {
        self.cache.settle_between_steps("load")?;
        self.check_free()?;
        let state = self.only_state(snapshot)?;
        let held = self.slots_in_file(&state)?;
        let formats = self.formats_with(snapshot);
        let cache = &mut *self.cache;
        snapshot.check_joining(cache.config(), formats)?;
        let (book, cells) = cache.book.with_sequence(self.sequence, &state)?;
        let converts = formats != cache.formats();
        let awaits = cache.storage.awaits() && !converts;
        if awaits {
            cache.storage.check_joining_floats(book.length())?;
        }
        let contents = Contents { book: (), held, target: (formats, awaits) };
        let apart = cache.storage.apart(snapshot, &contents, give)?;
        apart.refuse_not_finite(&contents.held)?;
        if converts {
            cache.storage.convert(formats)?;
        }
        cache.storage.take_rows(&apart, &contents.held, &cells)?;
        cache.book = book;
        cache.quantize();
        Ok(())
    }
}
