//! Saving and loading of one growing sequence.

use super::ContiguousCache;
use crate::bookkeeping::ContiguousBookkeeping;
use crate::cache::storage::Contents;
use crate::cache::Cache;
use crate::error::Result;
use crate::snapshot::{damaged, Book, GiveRows, PlaneRows, SaveCache, Snapshot, TakeRows};
use crate::store::Store;

impl<S: Store> ContiguousCache<S> {
    fn contents(&self, snapshot: &Snapshot) -> Result<Contents<ContiguousBookkeeping>> {
        snapshot.check(self.kind(), self.config())?;
        let Book::Contiguous(state) = &snapshot.book else {
            return Err(damaged("it has cells, which a contiguous cache does not have"));
        };
        let book = self.book.with_state(state)?;
        let target = snapshot.target(self.config(), book.length())?;
        let held = (0..state.dropped.len()).map(|group| book.held(group)).collect();
        Ok(Contents { book, held, target })
    }
}

impl<S: Store> SaveCache for ContiguousCache<S> {
    fn snapshot(&mut self) -> Result<Snapshot> {
        self.refuse_in_step("save the cache")?;
        self.storage.check()?;
        let book = Book::Contiguous(self.book.state());
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
        self.refuse_in_step("load the cache")?;
        self.storage.check()?;
        let contents = self.contents(snapshot)?;
        self.storage = self.storage.restored(snapshot, &contents, give)?;
        self.book = contents.book;
        Ok(())
    }
}
