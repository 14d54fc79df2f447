//! Which keys each token of a step sees.

use std::ops::Range;

use crate::step::attend::TILE;

/// The keys that each token of a step sees: a list of the tiles of 64 keys in which a token sees some. The
/// kernels read no others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyMask {
    n_tokens: usize,
    /// The first token that sees no key.
    blind: Option<usize>,
    /// One past the last key that is seen.
    end: usize,
    /// Of each tile its number, and a bit for each of its keys and each token, the first key the lowest.
    numbers: Vec<u64>,
}

impl KeyMask {
    /// Returns the mask of T tokens, the first of which sees the keys of the first runs, and so on.
    pub fn of<R>(runs: impl ExactSizeIterator<Item = R> + Clone) -> Self
    where
        R: IntoIterator<Item = Range<usize>>,
    {
        Self::padded(runs.len(), runs)
    }

    /// Returns the mask of a plan's tokens, of which a step has as many as there are runs, or fewer than the
    /// plan. The others see no key.
    pub fn padded<R>(n_tokens: usize, runs: impl ExactSizeIterator<Item = R> + Clone) -> Self
    where
        R: IntoIterator<Item = Range<usize>>,
    {
        let n_tokens = n_tokens.max(runs.len());
        let each = || runs.clone().flatten().filter(|run| !run.is_empty());
        let sees_none = |runs: R| runs.into_iter().all(|run| run.is_empty());
        let blind = runs.clone().position(sees_none);
        let end = each().map(|run| run.end).max().unwrap_or(0);
        // Where each tile is in the list, once all are known.
        let mut places = vec![usize::MAX; end.div_ceil(TILE)];
        for run in each() {
            places[run.start / TILE..run.end.div_ceil(TILE)].fill(0);
        }
        let mut numbers = Vec::new();
        for (tile, place) in places.iter_mut().enumerate().filter(|(_, place)| **place == 0) {
            *place = numbers.len();
            numbers.push(tile as u64);
            numbers.resize(numbers.len() + n_tokens, 0);
        }
        for (token, runs) in runs.enumerate() {
            for run in runs.into_iter().filter(|run| !run.is_empty()) {
                for tile in run.start / TILE..run.end.div_ceil(TILE) {
                    let first = tile * TILE;
                    let (start, end) = (run.start.max(first), run.end.min(first + TILE));
                    let ones = u64::MAX >> (TILE - (end - start));
                    numbers[places[tile] + 1 + token] |= ones << (start - first);
                }
            }
        }
        Self { n_tokens, blind, end, numbers }
    }

    pub(crate) fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Returns the first token that sees no key.
    pub(crate) fn blind(&self) -> Option<usize> {
        self.blind
    }

    /// Returns one past the last key that is seen.
    pub(crate) fn end(&self) -> usize {
        self.end
    }

    pub(crate) fn n_tiles(&self) -> usize {
        self.numbers.len() / (1 + self.n_tokens)
    }

    /// Returns the list as the kernels read it.
    pub(crate) fn numbers(&self) -> &[u64] {
        &self.numbers
    }

    /// Returns whether a token sees a key.
    pub fn sees(&self, token: usize, key: usize) -> bool {
        let of_tile = |tile: &&[u64]| tile[0] == (key / TILE) as u64;
        let found = self.numbers.chunks_exact(1 + self.n_tokens).find(of_tile);
        found.is_some_and(|tile| tile[1 + token] >> (key % TILE) & 1 == 1)
    }
}

/// Returns the most numbers of a mask of so many tokens over so many keys.
pub(crate) fn most_numbers(n_tokens: usize, n_keys: usize) -> usize {
    n_keys.div_ceil(TILE) * (1 + n_tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::single_range_in_vec_init)]
    fn a_mask_lists_the_tiles_of_its_runs() {
        let runs = [vec![0..3, 200..201], vec![63..65, 5..5], vec![], vec![192..256, 1..2]];
        let mask = KeyMask::of(runs.iter().cloned());
        assert_eq!((mask.n_tokens(), mask.end(), mask.n_tiles()), (4, 256, 3));
        assert_eq!(mask.blind(), Some(2));
        assert_eq!(mask.numbers().iter().step_by(5).collect::<Vec<_>>(), [&0, &1, &3]);
        for (token, runs) in runs.iter().enumerate() {
            for key in 0..300 {
                let expected = runs.iter().any(|run| run.contains(&key));
                assert_eq!(mask.sees(token, key), expected, "token {token}, key {key}");
            }
        }
        assert!(mask.numbers().len() <= most_numbers(4, 256));
        let none = KeyMask::of([vec![], vec![]].into_iter());
        assert_eq!((none.n_tokens(), none.end(), none.n_tiles()), (2, 0, 0));
    }
}
