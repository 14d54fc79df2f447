//! A set of taken cells, with one bit for each cell.

/// The cells of a layer group, taken or free. Cells beyond the last taken one are free.
#[derive(Debug, Clone, Default)]
pub struct Occupancy {
    words: Vec<u64>,
    taken: i32,
    /// All cells of the words before this word are taken.
    first_free_word: usize,
}

impl Occupancy {
    /// Returns the number of taken cells.
    pub fn taken(&self) -> i32 {
        self.taken
    }

    /// Returns whether `cell` is taken.
    pub fn is_taken(&self, cell: i32) -> bool {
        let (word, bit) = word_and_bit(cell);
        self.words.get(word).is_some_and(|bits| bits & bit != 0)
    }

    /// Takes a free cell.
    pub fn take(&mut self, cell: i32) {
        let (word, bit) = word_and_bit(cell);
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        debug_assert_eq!(self.words[word] & bit, 0, "cannot take cell {cell} twice");
        self.words[word] |= bit;
        self.taken += 1;
        while self.words.get(self.first_free_word) == Some(&u64::MAX) {
            self.first_free_word += 1;
        }
    }

    /// Frees a taken cell.
    pub fn free(&mut self, cell: i32) {
        let (word, bit) = word_and_bit(cell);
        debug_assert!(self.is_taken(cell), "cannot free cell {cell} twice");
        self.words[word] &= !bit;
        self.taken -= 1;
        self.first_free_word = self.first_free_word.min(word);
    }

    /// Frees every cell.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Returns the first free cell at or after `cell`.
    pub fn next_free(&self, cell: i32) -> i32 {
        let cell = cell.max((self.first_free_word * 64) as i32);
        self.scan(cell, |bits| !bits).unwrap_or_else(|| cell.max((self.words.len() * 64) as i32))
    }

    /// Returns the first taken cell at or after `cell`, or `limit` if no such cell is below `limit`.
    pub fn next_taken(&self, cell: i32, limit: i32) -> i32 {
        self.scan(cell, |bits| bits).map_or(limit, |taken| taken.min(limit))
    }

    fn scan(&self, from: i32, wanted: impl Fn(u64) -> u64) -> Option<i32> {
        let (first, bit) = word_and_bit(from);
        // The bits at or above `from`.
        let mut mask = !(bit - 1);
        for (index, &bits) in self.words.iter().enumerate().skip(first) {
            let found = wanted(bits) & mask;
            if found != 0 {
                return Some((index * 64) as i32 + found.trailing_zeros() as i32);
            }
            mask = u64::MAX;
        }
        None
    }
}

fn word_and_bit(cell: i32) -> (usize, u64) {
    let cell = cell.max(0) as usize;
    (cell / 64, 1 << (cell % 64))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_free_and_taken_cells() {
        let mut cells = Occupancy::default();
        assert_eq!(
            (cells.next_free(0), cells.next_free(1000), cells.next_taken(0, 7)),
            (0, 1000, 7)
        );
        (0..130).for_each(|cell| cells.take(cell));
        assert_eq!(
            (cells.taken(), cells.next_free(0), cells.next_taken(130, 500)),
            (130, 130, 500)
        );
        cells.free(64);
        assert_eq!(
            (cells.next_free(3), cells.next_free(65), cells.next_taken(64, 500)),
            (64, 130, 65)
        );
        cells.take(64);
        cells.free(127);
        cells.free(0);
        assert_eq!((cells.next_free(0), cells.next_free(1)), (0, 127));
        cells.clear();
        assert_eq!((cells.taken(), cells.next_free(5)), (0, 5));
    }
}
