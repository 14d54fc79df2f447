//! The prefixes in memory, how recently they were used, and their sizes.

use std::collections::HashMap;
use std::sync::Arc;

use etkv_core::{Piece, Prefix, Reach};

use super::PrefixCacheReport;
use crate::store::index::Group;
use crate::store::texts::{Entry, Texts};

/// A text whose rows are in a cache.
#[derive(Clone, Copy)]
pub struct CachedText<'a> {
    pub group: &'a Group,
    pub tokens: &'a [i64],
    /// The lengths to which the cache can be rewound.
    pub reach: &'a Reach,
    pub capacity: usize,
}

#[derive(Debug)]
struct CachedPrefix {
    prefix: Prefix,
    group: Group,
    tokens: Arc<[i64]>,
    /// The value of the counter of uses when the text was last used.
    used: u64,
    pins: usize,
}

/// The prefixes of a prefix cache.
///
/// Calls that remove prefixes return them. The caller must drop these prefixes without a lock, because a drop may
/// wait for a backend.
#[derive(Debug, Default)]
pub struct KeptPrefixes {
    groups: HashMap<Group, Texts<u64>>,
    held: HashMap<u64, CachedPrefix>,
    /// For each piece, its bytes and the number of prefixes that contain it.
    pieces: HashMap<usize, (u64, usize)>,
    bytes: u64,
    /// The counter of uses.
    now: u64,
    /// The number of the last prefix that was added.
    last: u64,
    asked: u64,
    found: [u64; 2],
}

impl KeptPrefixes {
    /// Returns the prefixes that share the most first tokens with a text. For each prefix, returns the number of
    /// shared tokens, the prefix's number, and a handle.
    pub fn matches(
        &self,
        group: &str,
        tokens: &[i64],
        capacity: usize,
        most: usize,
    ) -> Vec<(usize, u64, Prefix)> {
        let texts = self.groups.get(group).into_iter();
        let found = texts.flat_map(|texts| texts.matches(tokens, 1, capacity, most));
        let of = |(n, entry): (usize, &Entry<u64>)| {
            let held = self.held.get(&entry.what)?;
            Some((n, entry.what, held.prefix.clone()))
        };
        found.filter_map(of).collect()
    }

    /// Returns the maximum number of first tokens that a prefix shares with a text.
    pub fn common(&self, group: &str, tokens: &[i64], capacity: usize) -> usize {
        self.groups.get(group).map_or(0, |texts| texts.common(tokens, capacity))
    }

    /// Records a use of a prefix, if it still exists.
    pub fn touch(&mut self, number: u64) {
        self.now += 1;
        if let Some(held) = self.held.get_mut(&number) {
            held.used = self.now;
        }
    }

    /// Counts the tokens of a lookup: all tokens of the text, those found in memory, and those found in the store.
    pub fn count(&mut self, asked: usize, found: [usize; 2]) {
        self.asked = self.asked.saturating_add(asked as u64);
        for (all, n) in self.found.iter_mut().zip(found) {
            *all = all.saturating_add(n as u64);
        }
    }

    /// Returns a prefix that can replace a prefix of this text in every use.
    fn covering(&self, text: CachedText) -> Option<u64> {
        let texts = self.groups.get(text.group)?;
        let entry = texts.covering(text.tokens, text.reach, text.capacity)?;
        Some(entry.what)
    }

    /// Returns whether a prefix can replace a prefix of this text in every use. This counts as a use.
    pub fn has(&mut self, group: &Group, tokens: &[i64], reach: &Reach, capacity: usize) -> bool {
        let found = self.covering(CachedText { group, tokens, reach, capacity });
        found.inspect(|&number| self.touch(number)).is_some()
    }

    /// Adds a prefix. Removes the prefixes that the new one replaces, and then the least recently used ones until the
    /// others fit. Returns whether memory then has the text, and the removed prefixes.
    pub fn insert(
        &mut self,
        text: CachedText,
        prefix: Prefix,
        max_bytes: u64,
    ) -> (bool, Vec<Prefix>) {
        // Another thread may have added the text first.
        if self.covering(text).is_some() {
            return (true, vec![prefix]);
        }
        let sum =
            prefix.pieces().iter().fold(0, |sum: u64, piece| sum.saturating_add(piece.bytes()));
        if sum > max_bytes {
            return (false, vec![prefix]);
        }
        let CachedText { group, tokens, reach, capacity } = text;
        let mut gone = Vec::new();
        let texts = self.groups.entry(group.clone()).or_default();
        let covered: Vec<u64> =
            texts.covered(tokens, reach).iter().map(|entry| entry.what).collect();
        let same = texts.get(tokens).map(|entry| entry.what);
        // A prefix of the same text is replaced. Its number and its pins remain, because pins refer to the number.
        let pins = same.and_then(|number| self.held.get(&number)).map_or(0, |held| held.pins);
        let number = same.unwrap_or(self.last + 1);
        self.last = self.last.max(number);
        gone.extend(same.and_then(|number| self.remove(number)));
        self.now += 1;
        self.add(prefix.pieces());
        let tokens: Arc<[i64]> = tokens.into();
        let entry = Entry { what: number, reach: reach.clone(), capacity };
        self.groups.entry(group.clone()).or_default().insert(Arc::clone(&tokens), entry);
        self.held.insert(
            number,
            CachedPrefix { prefix, group: group.clone(), tokens, used: self.now, pins },
        );
        for number in covered {
            if self.held.get(&number).is_some_and(|held| held.pins == 0) {
                gone.extend(self.remove(number));
            }
        }
        gone.extend(self.make_room(max_bytes, Some(number)));
        (self.held.contains_key(&number), gone)
    }

    /// Removes prefixes that are not pinned, the least recently used first, until the others fit. The newest is
    /// removed last.
    pub fn make_room(&mut self, max_bytes: u64, newest: Option<u64>) -> Vec<Prefix> {
        let mut gone = Vec::new();
        while self.bytes > max_bytes {
            let unpinned = self.held.iter().filter(|(_, held)| held.pins == 0);
            // Removing a prefix frees nothing if all its rows are also part of others, so longer prefixes are removed
            // first.
            let last = |(&number, held): &(&u64, &CachedPrefix)| {
                (Some(number) == newest, self.alone(&held.prefix) == 0, held.used)
            };
            let Some((&number, _)) = unpinned.min_by_key(last) else { break };
            gone.extend(self.remove(number));
        }
        gone
    }

    /// Removes all prefixes that are not pinned.
    pub fn clear(&mut self) -> Vec<Prefix> {
        let of = |(&number, held): (&u64, &CachedPrefix)| (held.pins == 0).then_some(number);
        let unpinned: Vec<u64> = self.held.iter().filter_map(of).collect();
        unpinned.into_iter().filter_map(|number| self.remove(number)).collect()
    }

    /// Removes prefixes that are neither in use nor pinned, the least recently used first, until at least `bytes`
    /// bytes are freed. Removes at least one of them, if there is any.
    pub fn take_idle(&mut self, bytes: u64) -> Vec<Prefix> {
        let of = |(&number, held): (&u64, &CachedPrefix)| {
            (held.pins == 0 && held.prefix.is_idle()).then_some((held.used, number))
        };
        let mut idle: Vec<(u64, u64)> = self.held.iter().filter_map(of).collect();
        idle.sort_unstable();
        let (mut taken, mut sum) = (Vec::new(), 0u64);
        for (_, number) in idle {
            if sum >= bytes {
                break;
            }
            let alone = self.held.get(&number).map_or(0, |held| self.alone(&held.prefix));
            sum = sum.saturating_add(alone);
            taken.extend(self.remove(number));
        }
        taken
    }

    /// Pins a prefix that can replace a prefix of all `tokens`. Returns its number, or `None` if there is none.
    pub fn pin(&mut self, group: &Group, tokens: &[i64], capacity: usize) -> Option<u64> {
        let rewindable_to = i32::try_from(tokens.len()).unwrap_or(i32::MAX);
        let reach = &Reach { rewindable_to, checkpoints: Vec::new() };
        let number = self.covering(CachedText { group, tokens, reach, capacity })?;
        self.held.get_mut(&number)?.pins += 1;
        Some(number)
    }

    pub fn unpin(&mut self, number: u64) {
        if let Some(held) = self.held.get_mut(&number) {
            held.pins = held.pins.saturating_sub(1);
        }
    }

    pub fn report(&self) -> PrefixCacheReport {
        PrefixCacheReport {
            prefixes: self.held.len(),
            bytes: self.bytes,
            pinned: self.held.values().filter(|held| held.pins > 0).count(),
            tokens_asked: self.asked,
            tokens_in_memory: self.found[0],
            tokens_in_store: self.found[1],
            ..PrefixCacheReport::default()
        }
    }

    fn remove(&mut self, number: u64) -> Option<Prefix> {
        let CachedPrefix { prefix, group, tokens, .. } = self.held.remove(&number)?;
        if let Some(texts) = self.groups.get_mut(&group) {
            texts.remove(&tokens);
            if texts.is_empty() {
                self.groups.remove(&group);
            }
        }
        for piece in prefix.pieces() {
            if let Some((bytes, prefixes)) = self.pieces.get_mut(&piece.id()) {
                *prefixes -= 1;
                if *prefixes == 0 {
                    self.bytes -= *bytes;
                    self.pieces.remove(&piece.id());
                }
            }
        }
        Some(prefix)
    }

    fn add(&mut self, pieces: &[Piece]) {
        for piece in pieces {
            let (_, prefixes) = self.pieces.entry(piece.id()).or_insert_with(|| {
                self.bytes = self.bytes.saturating_add(piece.bytes());
                (piece.bytes(), 0)
            });
            *prefixes += 1;
        }
    }

    /// Returns the bytes of a prefix's rows that no other prefix here shares.
    fn alone(&self, prefix: &Prefix) -> u64 {
        let is_alone = |piece: &&Piece| {
            self.pieces.get(&piece.id()).is_some_and(|(_, prefixes)| *prefixes == 1)
        };
        prefix.pieces().iter().filter(is_alone).fold(0, |sum, piece| sum + piece.bytes())
    }
}
