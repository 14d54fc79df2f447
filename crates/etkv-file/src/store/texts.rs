//! Texts in the order of their tokens, so that those which begin most like another are its neighbours.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

/// What is kept of a text, and which caches it serves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry<T> {
    /// What is kept: a file's name, or a number.
    pub what: T,
    /// The least length other than 0 that its cache can be rewound to.
    pub rewindable_to: usize,
    /// The capacity of the cache that read the text.
    pub capacity: usize,
}

/// Texts of one group, each once.
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

    /// Adds a text, in the place of the same one.
    pub fn insert(&mut self, tokens: Arc<[i64]>, entry: Entry<T>) {
        self.0.insert(tokens, entry);
    }

    pub fn get(&self, tokens: &[i64]) -> Option<&Entry<T>> {
        self.0.get(tokens)
    }

    pub fn remove(&mut self, tokens: &[i64]) {
        self.0.remove(tokens);
    }

    /// Returns the texts that have `least` tokens or more in common with another and `capacity` at most in
    /// all, with the tokens that both begin with, those with the most first. Left out are those whose
    /// caches cannot be rewound so far.
    pub fn matches<'a>(
        &'a self,
        tokens: &'a [i64],
        least: usize,
        capacity: usize,
    ) -> impl Iterator<Item = (usize, &'a Entry<T>)> {
        let up_to: (Bound<&[i64]>, _) = (Bound::Unbounded, Bound::Included(tokens));
        let behind: (_, Bound<&[i64]>) = (Bound::Excluded(tokens), Bound::Unbounded);
        let before = self.0.range::<[i64], _>(up_to).rev();
        let after = self.0.range::<[i64], _>(behind);
        merged(counted(before, tokens), counted(after, tokens))
            .take_while(move |(n, ..)| *n >= least.max(1))
            .filter(move |(n, text, entry)| {
                let stays = *n == text.len() || *n >= entry.rewindable_to;
                text.len() <= capacity && stays
            })
            .map(|(n, _, entry)| (n, entry))
    }

    /// Returns what makes this text unneeded: all that it would serve, the other serves, also caches of
    /// `capacity`.
    pub fn covering(
        &self,
        tokens: &[i64],
        rewindable_to: usize,
        capacity: usize,
    ) -> Option<&Entry<T>> {
        let from: (Bound<&[i64]>, _) = (Bound::Included(tokens), Bound::Unbounded);
        self.0
            .range::<[i64], _>(from)
            .take_while(|(text, _)| text.starts_with(tokens))
            .find(|(text, entry)| entry.rewindable_to <= rewindable_to && text.len() <= capacity)
            .map(|(_, entry)| entry)
    }

    /// Returns what this text makes unneeded: all that they serve, it serves too.
    pub fn covered(&self, tokens: &[i64], rewindable_to: usize) -> Vec<&Entry<T>> {
        let mut covered = Vec::new();
        let mut bound = Bound::Excluded(tokens);
        // Beginnings of a text come before it, the longest first.
        while let Some((text, entry)) =
            self.0.range::<[i64], _>((Bound::Unbounded, bound)).next_back()
        {
            let n = shared(text, tokens);
            bound = if n < text.len() {
                // One that differs: beginnings that are longer than what it shares would come behind it.
                Bound::Included(&tokens[..n])
            } else {
                if entry.rewindable_to >= rewindable_to && tokens.len() <= entry.capacity {
                    covered.push(entry);
                }
                Bound::Excluded(&tokens[..n])
            };
        }
        covered
    }
}

type Counted<'a, T> = (usize, &'a Arc<[i64]>, &'a Entry<T>);

fn counted<'a, T: 'a>(
    texts: impl Iterator<Item = (&'a Arc<[i64]>, &'a Entry<T>)>,
    tokens: &'a [i64],
) -> impl Iterator<Item = Counted<'a, T>> {
    texts.map(|(text, entry)| (shared(text, tokens), text, entry))
}

/// Merges two sequences with falling numbers into one.
fn merged<'a, T: 'a>(
    a: impl Iterator<Item = Counted<'a, T>>,
    b: impl Iterator<Item = Counted<'a, T>>,
) -> impl Iterator<Item = Counted<'a, T>> {
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

/// Returns how many tokens two texts begin with alike.
fn shared(a: &[i64], b: &[i64]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}
