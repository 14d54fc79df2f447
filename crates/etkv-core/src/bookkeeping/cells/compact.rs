//! Moves rows into free cells, so that sequences are runs of cells again.

use super::group::LayerGroup;
use super::layout::Layout;
use super::CellsBookkeeping;
use crate::bookkeeping::Move;
use crate::error::Result;

impl CellsBookkeeping {
    /// Makes every sequence one run of cells, unless shared cells prevent it. Does nothing if all are runs already.
    /// Returns the moves of rows. Prefers layouts that move few rows and leave room after each sequence. Room counts
    /// as much as 64 rows that do not move.
    ///
    /// # Errors
    /// [`Step`](crate::Status::Step) while a step is open.
    pub fn compact(&mut self) -> Result<Vec<Move>> {
        self.refuse_in_step("compact the cache")?;
        let mut moves = Vec::new();
        for index in 0..self.groups.len() {
            let trees: Vec<(i32, Vec<i32>)> = self
                .trees
                .iter()
                .map(|(&sequence, tree)| (sequence, tree.cells[index].clone()))
                .collect();
            let group = &mut self.groups[index];
            let ordered = group.window.is_some();
            let Some(layout) = Layout::of(group, &trees, ordered) else {
                continue;
            };
            group.remap(|cell| layout.target(cell));
            for tree in self.trees.values_mut() {
                tree.cells[index].iter_mut().for_each(|cell| *cell = layout.target(*cell));
            }
            moves.extend(layout.into_move(index));
        }
        Ok(moves)
    }
}

impl LayerGroup {
    /// Moves the only sequence to the first cells, by position.
    pub fn pack(&mut self, group: usize) -> Option<Move> {
        let mut layout = Layout::default();
        let mut next = 0;
        for sequence in self.owners().collect::<Vec<_>>() {
            for cell in self.held(sequence).cells() {
                layout.place(cell, next);
                next += 1;
            }
        }
        self.remap(|cell| layout.target(cell));
        layout.into_move(group)
    }
}
