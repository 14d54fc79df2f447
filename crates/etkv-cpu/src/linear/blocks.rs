//! Inputs of a product in blocks of rows, interleaved as the kernels read them.
//!
//! Rows are cut into even blocks of up to [`BLOCK`]. A block of `n` rows has, for each column or for each four of
//! 8 bits, those of all its rows side by side. All blocks together take as much as the rows themselves, so a block
//! begins where its first row would.

use std::ops::Range;

/// The most rows of a block: as many sums as fit the registers.
pub(crate) const BLOCK: usize = 12;

/// The adjacent columns of a row in a block of 8-bit integers.
pub(crate) const QUAD: usize = 4;

/// A block of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Block {
    /// The number of its first row in a step.
    pub first: usize,
    pub n: usize,
}

/// Returns the blocks of some rows, each of at most `most`. Even ones are faster than full ones and a rest.
pub(crate) fn blocks_of(rows: Range<usize>, most: usize) -> impl Iterator<Item = Block> {
    let (first, n) = (rows.start, rows.len());
    let n_blocks = n.div_ceil(most);
    (0..n_blocks).map(move |at| {
        let begin = at * n / n_blocks;
        Block { first: first + begin, n: (at + 1) * n / n_blocks - begin }
    })
}

/// The inputs of a product for all rows of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packed {
    /// `[rows, columns]`, blocks of float32 numbers, or of 8-bit integers.
    pub rows: *mut u8,
    /// `[rows, groups]`, blocks of the scales of integers.
    pub scales: *mut f32,
    /// The same of what the products of a group begin with.
    pub starts: *mut i32,
    pub columns: usize,
    /// The columns that share a scale; 0 for float32.
    pub group: usize,
}

impl Packed {
    /// Returns the groups of a row.
    pub fn n_groups(&self) -> usize {
        match self.group {
            0 => 0,
            group => self.columns / group,
        }
    }

    /// Returns the numbers of a block.
    pub fn floats(&self, block: Block) -> *mut f32 {
        self.rows.cast::<f32>().wrapping_add(block.first * self.columns)
    }

    /// Returns the integers of a block.
    pub fn integers(&self, block: Block) -> *mut i8 {
        self.rows.cast::<i8>().wrapping_add(block.first * self.columns)
    }

    /// Returns the scales and the starts of a block.
    pub fn of_groups(&self, block: Block) -> (*mut f32, *mut i32) {
        let at = block.first * self.n_groups();
        (self.scales.wrapping_add(at), self.starts.wrapping_add(at))
    }

    /// Writes columns of row `i` of a block, from column `column` on.
    ///
    /// # Safety
    /// The block has memory, row `i`, and the columns. Nothing else accesses these.
    pub unsafe fn put_floats(&self, block: Block, i: usize, column: usize, from: &[f32]) {
        let to = self.floats(block).wrapping_add(column * block.n + i);
        for (at, &x) in from.iter().enumerate() {
            // SAFETY: the caller's.
            unsafe { to.wrapping_add(at * block.n).write(x) };
        }
    }

    /// Writes whole groups of integers of row `i` of a block, from group `group` on.
    ///
    /// # Safety
    /// As [`put_floats`](Self::put_floats).
    pub unsafe fn put_integers(
        &self,
        block: Block,
        i: usize,
        group: usize,
        codes: &[i8],
        scales: &[f32],
        starts: &[i32],
    ) {
        let first = group * self.group / QUAD * block.n + i;
        let to = self.integers(block).cast::<[i8; QUAD]>().wrapping_add(first);
        let (quads, _) = codes.as_chunks::<QUAD>();
        let (to_scales, to_starts) = self.of_groups(block);
        // SAFETY: the caller's.
        unsafe {
            for (at, &quad) in quads.iter().enumerate() {
                to.wrapping_add(at * block.n).write(quad);
            }
            for (at, (&scale, &start)) in scales.iter().zip(starts).enumerate() {
                let at = (group + at) * block.n + i;
                to_scales.wrapping_add(at).write(scale);
                to_starts.wrapping_add(at).write(start);
            }
        }
    }
}
