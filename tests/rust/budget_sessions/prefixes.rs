//! Prefixes that the sessions under one budget freeze, keep, attach to and drop.
//!
//! A token determines the rows of its position. So if two texts begin with the same tokens, they begin with the same
//! rows.

use std::path::Path;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use etkv_core::snapshot::Book;
use etkv_core::{Prefix, Result, Status};
use etkv_file::{PrefixCache, PrefixCacheOptions, PrefixStore};
use etkv_tests::backend::Backend;
use etkv_tests::campaign::saving::driver::AnyCache;
use etkv_tests::Rng;

use crate::calls::{loads, Answer, State};

pub const MODEL: &str = "a model";

pub type Text = Vec<i64>;

/// Actions of a session that involve other sessions.
#[derive(Debug, Clone)]
pub enum SharedAction {
    /// Freezes the cache, whose text this is.
    Freeze(Text),
    /// Empties the cache, and attaches it to `n` tokens of a text.
    Attach { text: Text, n: usize, frees: bool },
}

/// Returns the slots of the positions of a cache.
pub fn book<B: Backend>(cache: &mut AnyCache<B>) -> Book {
    cache.saving().unwrap().snapshot().unwrap().book
}

/// The objects that the sessions of one seed share.
pub struct SharedObjects {
    pub prefixes: PrefixCache,
    frozen: Mutex<Vec<(Prefix, Text)>>,
    pins: Mutex<Vec<etkv_file::Pin>>,
    texts: Mutex<Vec<Text>>,
    last_token: AtomicI64,
    clock: AtomicU64,
}

impl SharedObjects {
    pub fn new<B: Backend>(rng: &mut Rng, folder: &Path, limit: u64) -> Self {
        let has_store = B::SAVES && rng.chance(0.3);
        let store =
            has_store.then(|| Arc::new(PrefixStore::open(&folder.join("texts"), 1 << 30).unwrap()));
        let max_bytes = rng.chance(0.5).then(|| rng.below(limit as usize) as u64);
        Self {
            prefixes: PrefixCache::new(PrefixCacheOptions { max_bytes, store }),
            frozen: Mutex::default(),
            pins: Mutex::default(),
            texts: Mutex::default(),
            last_token: AtomicI64::new(0),
            clock: AtomicU64::new(0),
        }
    }

    /// Returns a number greater than all numbers that were returned earlier, on any thread.
    pub fn tick(&self) -> u64 {
        self.clock.fetch_add(1, Ordering::SeqCst)
    }

    /// Returns the text of a cache. After the tokens of `known`, its tokens are unique.
    pub fn text_of<B: Backend>(&self, known: &Text, cache: &AnyCache<B>) -> Text {
        let length = cache.next_position().unwrap_or(0) as usize;
        let mut text = known.clone();
        text.truncate(length);
        text.resize_with(length, || self.last_token.fetch_add(1, Ordering::Relaxed));
        text
    }

    /// Freezes a cache, or keeps its contents. Returns whether it was frozen.
    pub fn freeze<B: Backend>(
        &self,
        rng: &mut Rng,
        cache: &mut AnyCache<B>,
        text: &Text,
    ) -> Result<Vec<u32>> {
        let is_kept = if rng.chance(0.7) {
            self.prefixes.keep(&mut **cache, MODEL, text)?
        } else {
            let prefix = cache.sharing().unwrap().freeze()?;
            self.frozen.lock().unwrap().push((prefix, text.clone()));
            true
        };
        self.texts.lock().unwrap().push(text.clone());
        Ok(vec![u32::from(is_kept)])
    }

    /// Attaches a cache to a frozen or kept text. Returns the text, and the number of its tokens that the cache then
    /// has.
    pub fn attach<B: Backend>(
        &self,
        rng: &mut Rng,
        cache: &mut AnyCache<B>,
    ) -> Option<(Text, Result<usize>)> {
        if rng.chance(0.3) {
            let (prefix, mut text) = pick(rng, &self.frozen)?;
            let least = prefix.rewindable_to();
            let n = least + rng.below((prefix.length() - least + 1) as usize) as i32;
            text.truncate(n as usize);
            let attached = cache.sharing().unwrap().attach(&prefix, n);
            return Some((text, attached.map(|()| n as usize)));
        }
        let mut text = pick(rng, &self.texts)?;
        text.truncate(1 + rng.below(text.len()).max(rng.below(text.len())));
        if rng.chance(0.3) {
            // Continues with another token.
            text.push(-1);
        }
        let attached = self.prefixes.attach(&mut **cache, MODEL, &text);
        Some((text, attached))
    }

    /// Frees an object or keeps one. Any thread may do this at any time.
    pub fn change<B: Backend>(&self, rng: &mut Rng, cache: &mut AnyCache<B>) {
        match rng.below(8) {
            0..=2 => drop(take(rng, &self.frozen)),
            3 => drop(take(rng, &self.pins)),
            4 => drop(self.prefixes.reclaim(rng.below(1 << 18) as u64)),
            5 if rng.chance(0.3) => self.prefixes.clear(),
            _ => {
                let Some(text) = pick(rng, &self.texts) else { return };
                match self.prefixes.pin(&mut **cache, MODEL, &text) {
                    Ok(pin) => self.pins.lock().unwrap().push(pin),
                    Err(error) => assert_eq!(error.status(), Status::InvalidArgument, "{error}"),
                }
            }
        }
    }
}

/// Returns a clone of a random element, which the caller can attach or drop without the lock.
fn pick<T: Clone>(rng: &mut Rng, all: &Mutex<Vec<T>>) -> Option<T> {
    let all = all.lock().unwrap();
    (!all.is_empty()).then(|| all[rng.below(all.len())].clone())
}

/// Removes a random element.
fn take<T>(rng: &mut Rng, all: &Mutex<Vec<T>>) -> Option<T> {
    let mut all = all.lock().unwrap();
    (!all.is_empty()).then(|| {
        let at = rng.below(all.len());
        all.swap_remove(at)
    })
}

/// Returns the known part of a cache's text after one of its calls that was not a [`SharedAction`].
pub fn known_after<B: Backend>(
    mut text: Text,
    (seed, answer): (u64, &Answer),
    [before, after]: [State; 2],
    cache: &AnyCache<B>,
) -> Text {
    let stays = cache.sequences().is_none()
        && !(loads(seed) && matches!(answer, Answer::Done(_)))
        // An explicit conversion rounds the rows.
        && (before.1 == after.1 || before.0 != after.0);
    text.truncate(if stays { after.0 as usize } else { 0 });
    text
}
