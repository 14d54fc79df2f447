//! The keys that each token of a step sees.

use std::ops::Range;

/// The number of keys that attention reads at a time, as in the kernels.
pub(crate) const TILE: usize = 64;

/// The keys that each token of a step sees. The mask lists the tiles of 64 keys in which some token sees a
/// key, and the kernels read only these tiles.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyMask {
    n_tokens: usize,
    /// The first token that sees no key.
    blind: Option<usize>,
    /// The end of the visible keys, exclusive.
    end: usize,
    /// For each tile: its number, followed by 64 bits for each token. The lowest bit is set if the token sees
    /// the tile's first key.
    numbers: Vec<u64>,
    /// For each tile: the set of tokens that see one of its keys, as [bits](bit_of).
    members: Vec<u64>,
}

impl KeyMask {
    /// Returns a mask in which each token sees the keys of its runs. `runs` has one item for each token.
    pub fn of<R>(runs: impl ExactSizeIterator<Item = R> + Clone) -> Self
    where
        R: IntoIterator<Item = Range<usize>>,
    {
        Self::padded(runs.len(), runs)
    }

    /// Returns a mask for a plan of `n_tokens` tokens. The step may have fewer: tokens without an item of
    /// `runs` see no key.
    pub fn padded<R>(n_tokens: usize, runs: impl ExactSizeIterator<Item = R> + Clone) -> Self
    where
        R: IntoIterator<Item = Range<usize>>,
    {
        let n_tokens = n_tokens.max(runs.len());
        let each = || runs.clone().flatten().filter(|run| !run.is_empty());
        let sees_none = |runs: R| runs.into_iter().all(|run| run.is_empty());
        let blind = runs.clone().position(sees_none);
        let end = each().map(|run| run.end).max().unwrap_or(0);
        // The index of each tile in the list, or `usize::MAX` if it is not listed.
        let mut places = vec![usize::MAX; end.div_ceil(TILE)];
        for run in each() {
            places[run.start / TILE..run.end.div_ceil(TILE)].fill(0);
        }
        let mut numbers = Vec::new();
        let mut members = Vec::new();
        for (tile, place) in places.iter_mut().enumerate().filter(|(_, place)| **place == 0) {
            *place = members.len();
            members.push(0);
            numbers.push(tile as u64);
            numbers.resize(numbers.len() + n_tokens, 0);
        }
        for (token, runs) in runs.enumerate() {
            for run in runs.into_iter().filter(|run| !run.is_empty()) {
                let tiles = run.start / TILE..run.end.div_ceil(TILE);
                for (tile, &place) in tiles.clone().zip(&places[tiles]) {
                    let first = tile * TILE;
                    let (start, end) = (run.start.max(first), run.end.min(first + TILE));
                    let ones = u64::MAX >> (TILE - (end - start));
                    numbers[place * (1 + n_tokens) + 1 + token] |= ones << (start - first);
                    members[place] |= bit_of(token);
                }
            }
        }
        Self { n_tokens, blind, end, numbers, members }
    }

    /// Returns the number of tokens of the plan.
    pub fn n_tokens(&self) -> usize {
        self.n_tokens
    }

    /// Returns the first token that sees no key.
    pub(crate) fn blind(&self) -> Option<usize> {
        self.blind
    }

    /// Returns the end of the visible keys, exclusive.
    pub(crate) fn end(&self) -> usize {
        self.end
    }

    /// Writes the mask in the layout that the kernels read, and returns its size. A block of rows reads only
    /// the tiles in which one of its tokens sees a key. The layout begins with the ends of the blocks' lists.
    /// The lists of all blocks follow. An item of a list is the number of a tile and, in the upper 32 bits,
    /// the tile's index in the last part. The last part has the tiles.
    ///
    /// `to` must have room for [`max_numbers`] numbers.
    pub(crate) fn write(&self, rows: RowBlocks, to: &mut [u64]) -> MaskSize {
        let mut lists = rows.n_blocks;
        for block in rows.blocks() {
            for place in self.seen(rows.tokens(block)) {
                to[lists] = self.numbers[place * (1 + self.n_tokens)] | (place as u64) << 32;
                lists += 1;
            }
            to[block] = (lists - rows.n_blocks) as u64;
        }
        to[lists..][..self.numbers.len()].copy_from_slice(&self.numbers);
        MaskSize { lists, all: lists + self.numbers.len() }
    }

    /// Returns the indices of the tiles in which one of these tokens sees a key.
    fn seen(&self, tokens: Range<usize>) -> impl Iterator<Item = usize> + '_ {
        let wanted = tokens.fold(0, |bits, token| bits | bit_of(token));
        let members = self.members.iter().enumerate();
        members.filter(move |(_, &members)| members & wanted != 0).map(|(place, _)| place)
    }

    /// Returns the number of tiles that all blocks of `rows` rows read. Each token has `group` query rows for
    /// each KV head. A tile counts once for each block that reads it.
    pub fn tiles_of_blocks(&self, group: usize, rows: usize) -> usize {
        let rows = RowBlocks::of(self.n_tokens, group, rows);
        rows.blocks().map(|block| self.seen(rows.tokens(block)).count()).sum()
    }

    /// Returns whether a token sees a key.
    pub fn sees(&self, token: usize, key: usize) -> bool {
        let of_tile = |tile: &&[u64]| tile[0] == (key / TILE) as u64;
        let found = self.numbers.chunks_exact(1 + self.n_tokens).find(of_tile);
        found.is_some_and(|tile| tile[1 + token] >> (key % TILE) & 1 == 1)
    }
}

/// Returns the bit of a token in the set of tokens that see a tile. Tokens from 63 on share the last bit.
/// Plans have at most 64 tokens; with more, blocks would list tiles that they do not need.
fn bit_of(token: usize) -> u64 {
    1 << token.min(63)
}

/// The size of a mask in the kernels' layout, in words of 64 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MaskSize {
    /// The part before the tiles.
    pub(crate) lists: usize,
    pub(crate) all: usize,
}

/// The blocks of query rows of a layer. Each token has `group` adjacent rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowBlocks {
    n_tokens: usize,
    group: usize,
    rows: usize,
    pub(crate) n_blocks: usize,
}

impl RowBlocks {
    /// Returns blocks of `rows` rows.
    pub(crate) fn of(n_tokens: usize, group: usize, rows: usize) -> Self {
        Self { n_tokens, group, rows, n_blocks: (n_tokens * group).div_ceil(rows) }
    }

    fn blocks(self) -> Range<usize> {
        0..self.n_blocks
    }

    /// Returns the tokens whose rows are in a block.
    fn tokens(self, block: usize) -> Range<usize> {
        let first = block * self.rows;
        first / self.group..((first + self.rows).div_ceil(self.group)).min(self.n_tokens)
    }
}

/// Returns the maximum count of numbers in a mask over `n_keys` keys.
pub(crate) fn max_numbers(rows: RowBlocks, n_keys: usize) -> usize {
    let tiles = n_keys.div_ceil(TILE);
    rows.n_blocks * (1 + tiles) + tiles * (1 + rows.n_tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[allow(clippy::single_range_in_vec_init)]
    fn a_mask_lists_the_tiles_of_its_runs() {
        let runs = [vec![0..3, 200..201], vec![63..65, 5..5], vec![], vec![192..256, 1..2]];
        let mask = KeyMask::of(runs.iter().cloned());
        assert_eq!((mask.n_tokens(), mask.end(), mask.members.len()), (4, 256, 3));
        assert_eq!(mask.blind(), Some(2));
        assert_eq!(mask.numbers.iter().step_by(5).collect::<Vec<_>>(), [&0, &1, &3]);
        for (token, runs) in runs.iter().enumerate() {
            for key in 0..300 {
                let expected = runs.iter().any(|run| run.contains(&key));
                assert_eq!(mask.sees(token, key), expected, "token {token}, key {key}");
            }
        }
        // Blocks of two tokens. The first reads tiles 0, 1 and 3, the second reads 0 and 3.
        let rows = RowBlocks::of(4, 4, 8);
        let mut to = vec![u64::MAX; max_numbers(rows, 256)];
        let written = mask.write(rows, &mut to);
        assert_eq!(written, MaskSize { lists: 7, all: 7 + 3 * 5 });
        let place = |tile: u64, place: u64| tile | place << 32;
        let lists = [place(0, 0), place(1, 1), place(3, 2), place(0, 0), place(3, 2)];
        assert_eq!((&to[..2], &to[2..7]), (&[3, 5][..], &lists[..]));
        assert_eq!(to[7..][..15], mask.numbers);
        assert_eq!((mask.tiles_of_blocks(4, 8), mask.tiles_of_blocks(4, 16)), (5, 3));
        // A token may have rows in two blocks.
        assert_eq!(RowBlocks::of(4, 3, 4).tokens(1), 1..3);
        let none = KeyMask::of([vec![], vec![]].into_iter());
        assert_eq!((none.n_tokens(), none.end(), none.members.len()), (2, 0, 0));
    }
}
