//! Texts in the order of their tokens. The texts that share the most first tokens with a text are its neighbours.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use etkv_core::Reach;

/// The entry of a text, and the caches that can use it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry<T> {
    /// The name of a file, or the number of a prefix.
    pub what: T,
    /// The lengths to which the cache of the file or prefix can be rewound.
    pub reach: Reach,
    /// The capacity of the cache that read the text.
    pub capacity: usize,
}

/// The distinct texts of one group.
#[derive(Debug)]
pub struct Texts<T>(BTreeMap<Arc<[i64]>, Entry<T>>);

impl<T> Default for Texts<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T> Texts<T> {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a text, or replaces the entry of the same text.
    pub fn insert(&mut self, tokens: Arc<[i64]>, entry: Entry<T>) {
        self.0.insert(tokens, entry);
    }

    pub fn get(&self, tokens: &[i64]) -> Option<&Entry<T>> {
        self.0.get(tokens)
    }

    pub fn remove(&mut self, tokens: &[i64]) {
        self.0.remove(tokens);
    }

    /// Returns at most `most` texts of at most `capacity` tokens that share at least `least` first tokens with
    /// `tokens`. Each text comes with the number of tokens for which it can be used: the greatest length, within the
    /// shared tokens, to which its cache can be rewound. The text with the greatest number comes first.
    pub fn matches<'a>(
        &'a self,
        tokens: &'a [i64],
        least: usize,
        capacity: usize,
        most: usize,
    ) -> impl Iterator<Item = (usize, &'a Entry<T>)> {
        let up_to: (Bound<&[i64]>, _) = (Bound::Unbounded, Bound::Included(tokens));
        let later: (_, Bound<&[i64]>) = (Bound::Excluded(tokens), Bound::Unbounded);
        let before = self.0.range::<[i64], _>(up_to).rev();
        let after = self.0.range::<[i64], _>(later);
        let least = least.max(1);
        let mut best: Vec<(usize, &Entry<T>)> = Vec::new();
        for (n, text, entry) in merged(counted(before, tokens), counted(after, tokens)) {
            // The following texts do not share more first tokens.
            let full = best.len() == most && best.last().is_none_or(|(served, _)| *served >= n);
            if n < least || full {
                break;
            }
            let served = below(&entry.reach, n, text.len());
            if served >= least && text.len() <= capacity {
                let at = best.partition_point(|(other, _)| *other >= served);
                best.insert(at, (served, entry));
                best.truncate(most);
            }
        }
        best.into_iter()
    }

    /// Returns the maximum number of first tokens that any of these texts shares with `tokens`, even if its cache
    /// cannot be rewound there. Only texts of at most `capacity` tokens count.
    pub fn common(&self, tokens: &[i64], capacity: usize) -> usize {
        let up_to: (Bound<&[i64]>, _) = (Bound::Unbounded, Bound::Included(tokens));
        let later: (_, Bound<&[i64]>) = (Bound::Excluded(tokens), Bound::Unbounded);
        let fits = |(text, _): &(&Arc<[i64]>, &Entry<T>)| text.len() <= capacity;
        let before = self.0.range::<[i64], _>(up_to).rev().find(fits);
        let after = self.0.range::<[i64], _>(later).find(fits);
        let neighbours = before.into_iter().chain(after);
        neighbours.map(|(text, _)| shared(text, tokens)).max().unwrap_or(0)
    }

    /// Returns an entry that can replace this text in every use. The entry's own text has at most `capacity` tokens, so
    /// that a cache of this capacity can use it.
    pub fn covering(&self, tokens: &[i64], reach: &Reach, capacity: usize) -> Option<&Entry<T>> {
        let from: (Bound<&[i64]>, _) = (Bound::Included(tokens), Bound::Unbounded);
        self.0
            .range::<[i64], _>(from)
            .take_while(|(text, _)| text.starts_with(tokens))
            .find(|(text, entry)| covers(&entry.reach, reach, tokens) && text.len() <= capacity)
            .map(|(_, entry)| entry)
    }

    /// Returns the entries that this text can replace in every use.
    pub fn covered(&self, tokens: &[i64], reach: &Reach) -> Vec<&Entry<T>> {
        let mut covered = Vec::new();
        let mut bound = Bound::Excluded(tokens);
        // The prefixes of a text come before it. In reverse order, the longest prefix is first.
        while let Some((text, entry)) =
            self.0.range::<[i64], _>((Bound::Unbounded, bound)).next_back()
        {
            let n = shared(text, tokens);
            bound = if n < text.len() {
                // `text` is not a prefix of `tokens`: only their first `n` tokens are equal. The prefixes of `tokens`
                // that come before `text` have at most `n` tokens.
                Bound::Included(&tokens[..n])
            } else {
                if covers(reach, &entry.reach, text) && tokens.len() <= entry.capacity {
                    covered.push(entry);
                }
                Bound::Excluded(&tokens[..n])
            };
        }
        covered
    }
}

type CountedEntry<'a, T> = (usize, &'a Arc<[i64]>, &'a Entry<T>);

fn counted<'a, T: 'a>(
    texts: impl Iterator<Item = (&'a Arc<[i64]>, &'a Entry<T>)>,
    tokens: &'a [i64],
) -> impl Iterator<Item = CountedEntry<'a, T>> {
    texts.map(|(text, entry)| (shared(text, tokens), text, entry))
}

/// Merges two descending sequences of numbers.
fn merged<'a, T: 'a>(
    a: impl Iterator<Item = CountedEntry<'a, T>>,
    b: impl Iterator<Item = CountedEntry<'a, T>>,
) -> impl Iterator<Item = CountedEntry<'a, T>> {
    let (mut a, mut b) = (a.peekable(), b.peekable());
    std::iter::from_fn(move || {
        let order = match (a.peek(), b.peek()) {
            (Some((n, ..)), Some((m, ..))) => n.cmp(m),
            (Some(_), None) => Ordering::Greater,
            (None, _) => Ordering::Less,
        };
        if order == Ordering::Less {
            b.next()
        } else {
            a.next()
        }
    })
}

/// Returns the maximum length for which a text of `len` tokens can be used, if it shares its first `n` tokens with the
/// text that is looked up.
fn below(reach: &Reach, n: usize, len: usize) -> usize {
    let [n, len] = [n, len].map(|n| i32::try_from(n).unwrap_or(i32::MAX));
    usize::try_from(reach.below(n, len)).unwrap_or_default()
}

/// Returns whether a longer text can be used wherever a shorter text can.
fn covers(longer: &Reach, shorter: &Reach, text: &[i64]) -> bool {
    longer.covers(shorter, i32::try_from(text.len()).unwrap_or(i32::MAX))
}

/// Returns the number of first tokens that two texts share.
fn shared(a: &[i64], b: &[i64]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
