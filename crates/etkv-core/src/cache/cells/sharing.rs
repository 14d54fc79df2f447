//! Sharing a sequence in cells as a prefix.

use super::saving::held_cells;
use super::CellsCache;
use crate::cache::{Cache, SeqCache, TreeCache};
use crate::error::{fail, Error, Result, Status};
use crate::prefix::{Prefix, ShareCache};
use crate::snapshot::SaveCache;
use crate::store::Store;

impl<S: Store> CellsCache<S> {
    /// Returns the length of sequence 0, if it has no gaps and the cache has no other sequence.
    fn only_text(&self) -> Result<i32> {
        let others = self.live_sequences();
        if others.iter().any(|&sequence| sequence != 0) {
            fail!(
                InvalidArgument,
                "the cache holds the sequences {others:?}, but only sequence 0 can be shared"
            );
        }
        let candidates = self.tree_len(0)?;
        if candidates > 0 {
            fail!(
                InvalidArgument,
                "sequence 0 carries {candidates} candidates; commit or drop them first"
            );
        }
        let (length, next) = (self.length(), self.seq_next(0)?);
        if length != next {
            fail!(
                InvalidArgument,
                "cannot share sequence 0: some of its positions were removed, and it holds \
                 {length} positions up to {next}"
            );
        }
        Ok(length)
    }
}

impl<S: Store> ShareCache for CellsCache<S> {
    fn freeze(&mut self) -> Result<Prefix> {
        let snapshot = self.snapshot()?;
        let length = self.only_text()?;
        if length == 0 {
            fail!(InvalidArgument, "the cache is empty: there is nothing to share");
        }
        let rewindable_to = self.seq_rewindable_to(0)?.max(1);
        let rows = self.storage.freeze(&held_cells(&self.book))?;
        Ok(Prefix::new(snapshot, (length, rewindable_to), rows))
    }

    fn attach(&mut self, prefix: &Prefix, length: i32) -> Result<()> {
        self.settle_between_steps("attach")?;
        if !self.live_sequences().is_empty() {
            fail!(
                InvalidArgument,
                "the cache holds the sequences {:?}; clear it before it is attached to a prefix",
                self.live_sequences()
            );
        }
        self.fits(prefix)?;
        prefix.check_length(length)?;
        let state = prefix.cells(&self.book.layouts());
        let as_argument =
            |error: Error| Error::new(Status::InvalidArgument, error.at("the prefix does not fit"));
        let mut book = self.book.with_state(&state).map_err(as_argument)?;
        let held = held_cells(&book);
        if length < prefix.length() {
            book.seq_rm(0, length..i32::MAX)?;
        }
        self.storage = self.storage.attached(prefix, &held)?;
        self.book = book;
        Ok(())
    }

    fn fits(&self, prefix: &Prefix) -> Result<()> {
        prefix.check::<S>(self.config())
    }

    fn backend(&self) -> &'static str {
        S::NAME
    }
}
