//! The cells of one sequence, as runs.

use std::ops::Range;

/// Consecutive positions in consecutive cells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The first position.
    pub position: i32,
    /// The cell of the first position.
    pub cell: i32,
    /// The number of positions.
    pub len: i32,
}

impl Run {
    /// Returns the positions.
    pub fn positions(&self) -> Range<i32> {
        self.position..self.position + self.len
    }

    /// Returns the cells.
    pub fn cells(&self) -> Range<i32> {
        self.cell..self.cell + self.len
    }

    /// Returns the part of the run in `positions`.
    pub fn clipped(&self, positions: &Range<i32>) -> Option<Self> {
        let start = self.position.max(positions.start);
        let end = (self.position + self.len).min(positions.end);
        (start < end).then(|| Self {
            position: start,
            cell: self.cell + (start - self.position),
            len: end - start,
        })
    }

    /// Returns whether `next` continues the run.
    fn continues_with(&self, next: &Self) -> bool {
        self.position + self.len == next.position && self.cell + self.len == next.cell
    }
}

/// The cells of one sequence in one layer group, by position, each position once.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Runs {
    runs: Vec<Run>,
    count: i32,
    /// The range from the first to the last cell; empty if there are no cells.
    extent: Range<i32>,
}

impl Runs {
    /// No runs.
    pub const EMPTY: Self = Self { runs: Vec::new(), count: 0, extent: 0..0 };

    /// Returns the runs, by position.
    pub fn iter(&self) -> std::slice::Iter<'_, Run> {
        self.runs.iter()
    }

    /// Returns the cells, by position.
    pub fn cells(&self) -> impl Iterator<Item = i32> + '_ {
        self.runs.iter().flat_map(Run::cells)
    }

    /// Returns the number of runs.
    pub fn n_runs(&self) -> usize {
        self.runs.len()
    }

    /// Returns the number of positions.
    pub fn count(&self) -> i32 {
        self.count
    }

    /// Returns the range from the first to the last cell.
    pub fn extent(&self) -> Range<i32> {
        self.extent.clone()
    }

    /// Returns whether the cells are one run, in any order.
    pub fn is_contiguous(&self) -> bool {
        self.count == self.extent.end - self.extent.start
    }

    /// Returns the first position.
    pub fn first(&self) -> Option<i32> {
        self.runs.first().map(|run| run.position)
    }

    /// Returns the last position plus 1, or 0 if there are no positions.
    pub fn next(&self) -> i32 {
        self.runs.last().map_or(0, |run| run.position + run.len)
    }

    /// Returns the preferred cell for the next position. If the cells are one run in any order, this is the cell
    /// after the run. Otherwise it is the cell after the cell of the last position.
    pub fn cell_after(&self) -> Option<i32> {
        let last = self.runs.last()?;
        Some(if self.is_contiguous() { self.extent.end } else { last.cell + last.len })
    }

    /// Returns the parts of the runs in `positions`.
    pub fn clipped(&self, positions: Range<i32>) -> impl Iterator<Item = Run> + '_ {
        let first = self.runs.partition_point(|run| run.position + run.len <= positions.start);
        self.runs[first..]
            .iter()
            .take_while({
                let end = positions.end;
                move |run| run.position < end
            })
            .filter_map(move |run| run.clipped(&positions))
    }

    /// Returns the last position in `range` that is missing from `other`.
    pub fn last_missing_in(&self, other: &Self, range: &Range<i32>) -> Option<i32> {
        let mut others = other.runs.iter().rev().peekable();
        for run in self.runs.iter().rev().filter_map(|run| run.clipped(range)) {
            let mut end = run.position + run.len;
            while end > run.position {
                while others.next_if(|other| other.position >= end).is_some() {}
                match others.peek() {
                    Some(other) if other.position + other.len >= end => end = other.position,
                    _ => return Some(end - 1),
                }
            }
        }
        None
    }

    /// Appends a run. Its positions must be greater than all others.
    pub fn push(&mut self, run: Run) {
        self.widen(&run);
        match self.runs.last_mut() {
            Some(last) if last.continues_with(&run) => last.len += run.len,
            _ => self.runs.push(run),
        }
    }

    /// Adds positions in any order. None of them may already be in `self`.
    pub fn insert_all(&mut self, other: impl IntoIterator<Item = Run>) {
        let mut all = std::mem::take(&mut self.runs);
        all.extend(other);
        all.sort_unstable_by_key(|run| run.position);
        *self = Self::default();
        all.into_iter().for_each(|run| self.push(run));
    }

    /// Removes the positions in `range`, and passes each removed part of a run to `gone`.
    pub fn remove(&mut self, range: &Range<i32>, mut gone: impl FnMut(Run)) {
        let before = std::mem::take(self);
        for run in before.runs {
            let Some(piece) = run.clipped(range) else {
                self.push(run);
                continue;
            };
            gone(piece);
            for kept in [i32::MIN..range.start, range.end..i32::MAX] {
                if let Some(rest) = run.clipped(&kept) {
                    self.push(rest);
                }
            }
        }
    }

    /// Returns the same positions, with each cell replaced by `cell(cell)`.
    pub fn mapped(&self, cell: impl Fn(i32) -> i32) -> Self {
        let mut moved = Self::default();
        for run in &self.runs {
            for (position, old) in run.positions().zip(run.cells()) {
                moved.push(Run { position, cell: cell(old), len: 1 });
            }
        }
        moved
    }

    fn widen(&mut self, run: &Run) {
        self.extent = match self.count {
            0 => run.cells(),
            _ => self.extent.start.min(run.cell)..self.extent.end.max(run.cell + run.len),
        };
        self.count += run.len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(position: i32, cell: i32, len: i32) -> Run {
        Run { position, cell, len }
    }

    #[test]
    fn appending_extends_the_last_run() {
        let mut runs = Runs::default();
        runs.push(run(0, 5, 3));
        runs.push(run(3, 8, 1));
        assert_eq!((runs.n_runs(), runs.count(), runs.extent()), (1, 4, 5..9));
        runs.push(run(4, 20, 1));
        assert_eq!((runs.n_runs(), runs.next(), runs.cell_after()), (2, 5, Some(21)));
        assert!(!runs.is_contiguous());
        // The last position is not in the last cell, but the cells are one run.
        runs.push(run(5, 9, 11));
        assert!(runs.is_contiguous());
        assert_eq!(runs.cell_after(), Some(21));
    }

    #[test]
    fn removing_from_the_middle_splits() {
        let mut runs = Runs::default();
        runs.push(run(0, 10, 10));
        let mut gone = Vec::new();
        runs.remove(&(3..6), |piece| gone.push(piece));
        assert_eq!(gone, [run(3, 13, 3)]);
        assert_eq!(runs.iter().copied().collect::<Vec<_>>(), [run(0, 10, 3), run(6, 16, 4)]);
        assert_eq!((runs.count(), runs.next(), runs.extent()), (7, 10, 10..20));
        runs.remove(&(0..i32::MAX), |_| {});
        assert_eq!((runs.count(), runs.next(), runs.extent()), (0, 0, 0..0));
    }

    #[test]
    fn clipping_finds_the_parts_of_a_range() {
        let mut runs = Runs::default();
        for (position, cell) in [(0, 0), (4, 10), (8, 20)] {
            runs.push(run(position, cell, 4));
        }
        let found: Vec<Run> = runs.clipped(2..9).collect();
        assert_eq!(found, [run(2, 2, 2), run(4, 10, 4), run(8, 20, 1)]);
        assert_eq!(runs.clipped(4..4).count(), 0);
    }

    #[test]
    fn the_last_missing_position_is_found_over_any_runs() {
        let of = |list: &[(i32, i32)]| {
            let mut runs = Runs::default();
            list.iter().for_each(|&(position, len)| runs.push(run(position, 10 * position, len)));
            runs
        };
        let all = of(&[(0, 4), (6, 10), (20, 5)]);
        let missing = |other: &[(i32, i32)], range| all.last_missing_in(&of(other), &range);
        assert_eq!(missing(&[(0, 4), (6, 10), (20, 5)], 0..i32::MAX), None);
        assert_eq!(missing(&[(0, 30)], 0..i32::MAX), None);
        assert_eq!(missing(&[], 0..i32::MAX), Some(24));
        assert_eq!(missing(&[], 0..20), Some(15));
        assert_eq!(missing(&[(0, 2), (9, 1), (10, 6), (20, 5)], 0..i32::MAX), Some(8));
        assert_eq!(missing(&[(0, 2), (9, 1), (10, 6), (20, 5)], 0..6), Some(3));
        assert_eq!(missing(&[(0, 2), (9, 1), (10, 6), (20, 5)], 9..30), None);
        assert_eq!(missing(&[(0, 23)], 0..i32::MAX), Some(24));
    }
}
