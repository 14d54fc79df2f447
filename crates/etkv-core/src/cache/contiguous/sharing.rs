//! Sharing one growing sequence as a prefix.

use super::ContiguousCache;
use crate::cache::Cache;
use crate::error::{fail, Error, Result, Status};
use crate::prefix::{Prefix, ShareCache};
use crate::snapshot::SaveCache;
use crate::store::Store;

impl<S: Store> ShareCache for ContiguousCache<S> {
    fn freeze(&mut self) -> Result<Prefix> {
        let snapshot = self.snapshot()?;
        let length = self.length();
        if length == 0 {
            fail!(InvalidArgument, "the cache is empty: there is nothing to share");
        }
        let held: Vec<_> = (0..self.book.n_groups()).map(|group| self.book.held(group)).collect();
        let rows = self.storage.freeze(&held)?;
        Ok(Prefix::new(snapshot, (length, self.book.rewindable_to().max(1)), rows))
    }

    fn attach(&mut self, prefix: &Prefix, length: i32) -> Result<()> {
        self.refuse_in_step("attach the cache")?;
        self.storage.check()?;
        if self.length() > 0 {
            fail!(
                InvalidArgument,
                "the cache holds {} positions; clear it before it is attached to a prefix",
                self.length()
            );
        }
        self.fits(prefix)?;
        prefix.check_length(length)?;
        let sinks: Vec<i32> =
            std::iter::once(0).chain(self.storage.windows().map(|window| window.sinks())).collect();
        let state = prefix.contiguous(&sinks)?;
        let as_argument =
            |error: Error| Error::new(Status::InvalidArgument, error.at("the prefix does not fit"));
        let mut book = self.book.with_state(&state).map_err(as_argument)?;
        // The cache can read all rows of the prefix, even those after `length`.
        let held: Vec<_> = (0..state.dropped.len()).map(|group| book.held(group)).collect();
        book.rewind(length)?;
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
