//! Inputs of a product in blocks of interleaved rows, the layout that the kernels read.
//!
//! Rows are divided into blocks of about equal size, with at most [`BLOCK`] rows. A block is `[columns, n]`
//! numbers or `[columns / 4, n, 4]` integers of 8 bits, where `n` is the number of its rows. Blocks have no
//! padding, so a block begins at the offset that its first row would have without interleaving.

use std::ops::Range;

use crate::memory::pieces::Pieces;

/// The maximum number of rows of a block. Registers limit the number of sums.
pub(crate) const BLOCK: usize = 12;

/// The number of adjacent columns of a row in a block of 8-bit integers.
pub(crate) const QUAD: usize = 4;

/// Runs an expression with the number of a block's rows as a constant. The constant is one of the numbers in
/// the list, or `$last` if the list lacks the number.
macro_rules! with_rows {
    ($n:expr, [$($count:literal)+] or $last:literal, |$N:ident| $body:expr) => {
        match $n {
            $($count => {
                const $N: usize = $count;
                $body
            })+
            _ => {
                const $N: usize = $last;
                $body
            }
        }
    };
}
pub(crate) use with_rows;

/// A block of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Block {
    /// The index of its first row in the step.
    pub first: usize,
    pub n: usize,
}

/// Returns the blocks of some rows, each of at most `most` rows. They have about equal sizes, which is faster
/// than full blocks and a small remainder.
pub(crate) fn blocks_of(rows: Range<usize>, most: usize) -> impl Iterator<Item = Block> {
    let (first, n) = (rows.start, rows.len());
    let n_blocks = n.div_ceil(most);
    (0..n_blocks).map(move |at| {
        let begin = at * n / n_blocks;
        Block { first: first + begin, n: (at + 1) * n / n_blocks - begin }
    })
}

/// The packed inputs of a product for all rows of a step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packed {
    /// Blocks of float32 numbers or 8-bit integers, `[rows, columns]` in total.
    pub rows: *mut u8,
    /// Blocks of the scales of integers, `[rows, groups]` in total.
    pub scales: *mut f32,
    /// Blocks of the starts of a group's sums, `[rows, groups]` in total.
    pub starts: *mut i32,
    pub columns: usize,
    /// The number of columns that share a scale, or 0 for float32.
    pub group: usize,
}

impl Packed {
    /// Takes memory for the inputs of a product, `[rows, columns]`, as floats or as groups of integers.
    pub fn of(pieces: &mut Pieces, rows: usize, columns: usize, group: Option<usize>) -> Self {
        let groups = group.map_or(0, |group| columns / group);
        Self {
            rows: pieces.take(&[rows, if group.is_some() { 1 } else { 4 }, columns]),
            scales: pieces.take(&[rows, groups]),
            starts: pieces.take(&[rows, groups]),
            columns,
            group: group.unwrap_or(0),
        }
    }

    /// Returns the number of groups of a row.
    pub fn n_groups(&self) -> usize {
        match self.group {
            0 => 0,
            group => self.columns / group,
        }
    }

    /// Returns the address of a block's numbers.
    pub fn floats(&self, block: Block) -> *mut f32 {
        self.rows.cast::<f32>().wrapping_add(block.first * self.columns)
    }

    /// Returns the address of a block's integers.
    pub fn integers(&self, block: Block) -> *mut i8 {
        self.rows.cast::<i8>().wrapping_add(block.first * self.columns)
    }

    /// Returns the addresses of a block's scales and starts.
    pub fn of_groups(&self, block: Block) -> (*mut f32, *mut i32) {
        let at = block.first * self.n_groups();
        (self.scales.wrapping_add(at), self.starts.wrapping_add(at))
    }

    /// Writes columns of row `i` of a block, from column `column` on.
    ///
    /// # Safety
    /// The block must have memory, row `i` and the columns. Nothing else may access these columns.
    pub unsafe fn put_floats(&self, block: Block, i: usize, column: usize, from: &[f32]) {
        let to = self.floats(block).wrapping_add(column * block.n + i);
        for (at, &x) in from.iter().enumerate() {
            // SAFETY: the caller upholds the contract.
            unsafe { to.wrapping_add(at * block.n).write(x) };
        }
    }

    /// Writes complete groups of integers of row `i` of a block, from group `group` on.
    ///
    /// # Safety
    /// The same as for [`put_floats`](Self::put_floats).
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
        // SAFETY: the caller upholds the contract.
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
