//! What changes a cache between steps: marks, cuts, forks, saved and loaded caches, and shared prefixes.

use std::collections::BTreeMap;

use etkv_core::bookkeeping::BLOCK;
use etkv_core::{Cache, CellsCache, Result, SaveCache, Snapshot, Status};

use super::text::{Text, Tree};
use super::{any_kind, Run};
use crate::backend::Backend;
use crate::campaign::saving::written;
use crate::recurrence::Kernels;

impl<B: Backend, K: Kernels<B>> Run<B, K> {
    pub(super) fn mark_or_ask(&mut self) {
        let sequence = self.sequence();
        let text = self.text(sequence);
        let first = if self.long { text.tokens.len().saturating_sub(100) } else { 0 };
        let at = (first + self.rng.below(text.tokens.len() + 150 - first)) as i32;
        self.reachable(sequence, at);
        let boundary = at / BLOCK * BLOCK;
        // Whether there is an anchor at the very end of a text depends on the steps that reached the end.
        if boundary == text.next() || self.cache.config().checkpoints == 0 {
            return;
        }
        let marked = match self.single() {
            true => self.cache.mark(at),
            false => self.cache.sequences_mut().unwrap().seq_mark(sequence, at),
        };
        let mut text = text;
        if boundary > text.next() {
            assert_eq!(marked.unwrap(), boundary);
            text.marks.insert(boundary);
            self.texts.insert(sequence, text);
            return;
        }
        match marked {
            Ok(at) => {
                assert_eq!(at, boundary);
                assert!(text.reaches(boundary), "{boundary} of {text:?}");
                if boundary > 0 {
                    text.checkpoints.insert(boundary);
                }
                self.texts.insert(sequence, text);
                // If a checkpoint is dropped to make room, it is an older one.
                assert_eq!(self.reachable(sequence, boundary), boundary);
            }
            Err(error) => {
                assert_eq!(error.status(), Status::Position);
                assert!(!self.must_reach(&text, boundary), "{error}: {boundary} of {text:?}");
            }
        }
    }

    pub(super) fn cut_or_fork(&mut self) {
        let (source, target) = (self.sequence(), self.sequence());
        let mut text = self.text(source);
        let mut at = self.position(&text);
        if self.rng.chance(0.3) {
            // Rounds a position down to the position of an anchor.
            at = at / BLOCK * BLOCK;
        }
        if self.rng.chance(0.3) {
            at = self.reachable(source, at);
        }
        let must_reach = at == self.reachable(source, at);
        if self.single() && self.rng.chance(0.3) {
            let reachable = self.reachable(0, at);
            let reached = self.cache.rewind_to_reachable(at).unwrap();
            assert_eq!(reached, reachable);
            // A rewind to 0 also withdraws the marks.
            if reached < text.next() || reached == 0 {
                text.cut(reached);
            }
            let boundary = at / BLOCK * BLOCK;
            if boundary > reached && reached < at && self.cache.config().checkpoints > 0 {
                text.marks.insert(boundary);
            }
            self.texts.insert(0, text);
            return;
        }
        if self.single() {
            match self.cache.rewind(at) {
                Ok(()) => text.cut(at),
                Err(error) => {
                    assert_eq!(error.status(), Status::Position);
                    assert!(!must_reach, "{error}: {at} of {text:?}");
                }
            }
            self.texts.insert(0, text);
            return;
        }
        let all = self.cache.sequences_mut().unwrap();
        match self.rng.below(5) {
            0 | 1 => {
                let carries = !text.tree.parents.is_empty();
                match all.seq_rm(source, at..i32::MAX) {
                    Ok(()) => text.cut(at),
                    Err(error) => {
                        assert!(carries || !must_reach, "{error}: {at} {text:?}")
                    }
                }
                self.texts.insert(source, text);
            }
            2 if at > 0 => {
                // The middle of a text cannot be removed, and the refusal changes nothing.
                if at < text.next() {
                    assert!(all.seq_rm(source, 0..at).is_err());
                }
            }
            3 if !self.long => {
                all.seq_rm(source, 0..i32::MAX).unwrap();
                self.texts.remove(&source);
            }
            _ => {
                let end = if self.rng.chance(0.5) { i32::MAX } else { at };
                let copied = all.seq_cp(source, target, 0..end);
                let held = self.text(target);
                let at = end.min(text.next());
                if source == target || at == 0 {
                    return;
                }
                let fits = held.tokens.is_empty() && held.tree.parents.is_empty();
                match copied {
                    Ok(()) => {
                        assert!(fits);
                        let low = text.low;
                        text.cut(at);
                        text.low = if at >= low { low } else { at };
                        text.tree = Tree::default();
                        text.marks = held.marks;
                        self.texts.insert(target, text);
                    }
                    Err(error) => {
                        assert!(!fits || !must_reach, "{error}: {at} {text:?}")
                    }
                }
            }
        }
    }

    /// Saves the cache and loads it into a new cache, or saves one sequence and loads it into another cache.
    pub(super) fn save_and_load(&mut self) {
        if !B::SAVES {
            return;
        }
        if self.single() || self.rng.chance(0.5) {
            let (snapshot, rows) = written(self.cache.saving().unwrap());
            let config = self.cache.config().clone();
            let mut cache = match self.cache.kind() {
                "contiguous" => CellsCache::contiguous(config),
                "seq" => CellsCache::new(config),
                _ => CellsCache::with_trees(config),
            }
            .unwrap();
            load(&mut cache, &snapshot, &rows).unwrap();
            let [loaded, saved] = [cache.memory(), self.cache.memory()];
            assert!(saved.shared > 0 || loaded.used == saved.used, "{loaded:?}, not {saved:?}");
            self.cache = cache;
            // Marks of future positions are not saved.
            self.texts.values_mut().for_each(|text| text.marks.clear());
            return;
        }
        let (source, target) = (self.sequence(), self.sequence());
        let (mut text, held) = (self.text(source), self.text(target));
        if text.tokens.is_empty() || !text.tree.parents.is_empty() {
            return;
        }
        if !held.tokens.is_empty() || !held.tree.parents.is_empty() {
            return;
        }
        let alone = self.texts.iter().all(|(&one, text)| {
            one == source || (text.tokens.is_empty() && text.tree.parents.is_empty())
        });
        let whole = alone && self.rng.chance(0.5);
        let (snapshot, rows) = if whole {
            // A file of a whole cache with one sequence.
            written(self.cache.saving().unwrap())
        } else {
            written(&mut *self.cache.saving_sequence(source).unwrap())
        };
        let mut one = self.cache.saving_sequence(target).unwrap();
        match load(&mut *one, &snapshot, &rows) {
            Ok(()) => {
                text.marks = held.marks;
                drop(one);
                text.origin = self.token();
                self.texts.insert(target, text);
            }
            Err(error) => assert_eq!(error.status(), Status::Capacity, "{error}"),
        }
    }

    /// Freezes the cache, and continues in a cache that is attached to the prefix.
    pub(super) fn freeze_and_attach(&mut self) {
        let texts: Vec<(&i32, &Text)> = self
            .texts
            .iter()
            .filter(|(_, text)| text.next() > 0 || !text.tree.parents.is_empty())
            .collect();
        let [(0, text)] = texts[..] else {
            return;
        };
        if !text.tree.parents.is_empty() {
            return;
        }
        let mut text = text.clone();
        let prefix = self.cache.sharing().unwrap().freeze().unwrap();
        if self.rng.chance(0.3) {
            return;
        }
        let config = self.cache.config().clone();
        let mut at = self.position(&text);
        if self.rng.chance(0.3) {
            at = self.reachable(0, at);
        }
        let must_reach = at > 0 && at == self.reachable(0, at);
        let mut cache = any_kind::<B>(&mut self.rng, config);
        match cache.sharing().unwrap().attach(&prefix, at) {
            Ok(()) => {
                assert!(at > 0);
                text.cut(at);
                text.marks.clear();
                self.cache = cache;
                self.texts = BTreeMap::from([(0, text)]);
            }
            Err(error) => {
                assert_eq!(error.status(), Status::InvalidArgument, "{error}");
                assert!(!must_reach, "{error}: {at} of {text:?}");
            }
        }
    }
}

fn load(cache: &mut dyn SaveCache, snapshot: &Snapshot, rows: &[u8]) -> Result<()> {
    let text = serde_json::to_string(snapshot).unwrap();
    let read: Snapshot = serde_json::from_str(&text).unwrap();
    assert_eq!(&read, snapshot);
    let mut at = 0;
    cache.restore(&read, &mut |_, bytes| {
        bytes.copy_from_slice(&rows[at..at + bytes.len()]);
        at += bytes.len();
        Ok(())
    })
}
