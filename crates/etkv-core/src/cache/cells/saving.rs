//! Saving and loading of sequences and trees.

use super::CellsCache;
use crate::bookkeeping::{CellsBookkeeping, Slots};
use crate::cache::storage::Contents;
use crate::cache::Cache;
use crate::error::{fail, Result};
use crate::snapshot::{damaged, Book, GiveRows, PlaneRows, SaveCache, Snapshot, TakeRows};
use crate::store::Store;

impl<S: Store> CellsCache<S> {
    fn contents(&self, snapshot: &Snapshot) -> Result<Contents<CellsBookkeeping>> {
        snapshot.check(self.kind(), self.config())?;
        let Book::Cells(state) = &snapshot.book else {
            return Err(damaged("it has no cells"));
        };
        if self.kind != Self::TREE && !state.trees.is_empty() {
            return Err(damaged("it has trees, and a cache of this kind has none"));
        }
        let book = self.book.with_state(state)?;
        if let Some(other) = book.sequences().into_iter().find(|&one| self.is_single() && one != 0)
        {
            return Err(damaged(format_args!(
                "it has sequence {other}, and a cache of this kind has sequence 0 only"
            )));
        }
        let target = snapshot.target(self.config(), book.length() - book.candidates())?;
        let held = held_cells(&book);
        Ok(Contents { book, held, target })
    }

    pub(super) fn settle_between_steps(&mut self, what: &str) -> Result<()> {
        self.settle()?;
        if self.open {
            fail!(Step, "cannot {what} the cache in the middle of a step");
        }
        self.storage.check()
    }
}

/// Returns the cells of each layer group that have rows.
pub(super) fn held_cells(book: &CellsBookkeeping) -> Vec<Slots> {
    (0..book.n_groups()).map(|group| book.held_cells(group)).collect()
}

impl<S: Store> SaveCache for CellsCache<S> {
    fn snapshot(&mut self) -> Result<Snapshot> {
        self.settle_between_steps("save")?;
        let book = Book::Cells(self.book.state());
        let formats = (self.formats(), self.storage.awaits());
        Ok(Snapshot::new(self.kind(), self.config(), formats, book))
    }

    fn planes(&self, snapshot: &Snapshot) -> Result<Vec<PlaneRows>> {
        let held = self.contents(snapshot)?.held;
        Ok(self.storage.planes(snapshot.formats, &held))
    }

    fn read_rows(&self, snapshot: &Snapshot, take: &mut TakeRows) -> Result<()> {
        self.storage.read_rows(&self.contents(snapshot)?.held, take)
    }

    fn restore(&mut self, snapshot: &Snapshot, give: &mut GiveRows) -> Result<()> {
        self.settle_between_steps("load")?;
        let mut contents = self.contents(snapshot)?;
        contents.book.pack_recurrent();
        contents.held = held_cells(&contents.book);
        let restored = self.storage.restored(snapshot, &contents, give)?;
        restored.refuse_not_finite(&contents.held)?;
        self.storage = restored;
        self.book = contents.book;
        Ok(())
    }
}
