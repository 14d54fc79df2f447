//! Computes new cells for the positions of a layer group, so that sequences are runs and few rows move.

use super::block::Block;
use super::group::{LayerGroup, ROOM};
use super::occupancy::Occupancy;
use crate::bookkeeping::{Move, Slots};

/// The new cell of each cell.
#[derive(Default)]
pub struct Layout {
    /// The new cell of each cell, or -1 if the cell has none yet.
    targets: Vec<i32>,
    n_moved: i32,
}

impl Layout {
    /// Returns a layout of all cells of a layer group in which more sequences are runs, or `None` if there is no such
    /// layout. In an `ordered` layer group, positions stay in order.
    pub fn of(group: &LayerGroup, trees: &[(i32, Vec<i32>)], ordered: bool) -> Option<Self> {
        let mut blocks = Block::all(group, trees, ordered);
        let n_runs = blocks.iter().filter(|block| block.is_run).count();
        if n_runs == blocks.len() {
            return None;
        }
        blocks.sort_by_key(|block| block.start);
        // Without room after it, a sequence is a run only until its next token. A free cell of room counts as much as
        // a row that does not move.
        let candidates = [(ROOM, 0), (0, ROOM)].into_iter().flat_map(|(room, price)| {
            let layouts = [Self::around(&blocks, group, room), Self::in_turn(&blocks, group, room)];
            layouts.into_iter().flatten().map(move |layout| (layout, price))
        });
        let n_runs_in = |layout: &Self| {
            blocks.iter().filter(|block| block.is_run_after(|cell| layout.target(cell))).count()
        };
        // Sequences that share cells cannot all be runs. Rows move only if more sequences become runs.
        candidates
            .map(|(layout, price)| (n_runs_in(&layout), layout.n_moved + price, layout))
            .filter(|&(n, ..)| n > n_runs)
            .min_by_key(|&(n, cost, _)| (std::cmp::Reverse(n), cost))
            .map(|(.., layout)| layout)
    }

    /// Leaves blocks that are runs or share cells where they are. Moves the others into free runs, the largest block
    /// first. Returns `None` if there is no free run for a block.
    fn around(blocks: &[Block], group: &LayerGroup, room: i32) -> Option<Self> {
        let mut layout = Self::default();
        let mut taken = Occupancy::default();
        let moves = |block: &&Block| !block.shares && !block.is_run;
        for block in blocks.iter().filter(|block| !moves(block)) {
            for cell in block.cells.iter().chain(block.nodes) {
                if !taken.is_taken(*cell) {
                    taken.take(*cell);
                }
            }
        }
        let mut moving: Vec<&Block> = blocks.iter().filter(moves).collect();
        moving.sort_by_key(|block| -block.len());
        let end = group.size() - tail(group);
        for block in moving {
            let mut best: Option<(i32, i32)> = None;
            let mut from = taken.next_free(0);
            while from < end {
                let to = taken.next_taken(from, group.size());
                let least = if from == 0 { 0 } else { from + room };
                let most = if to == group.size() { end } else { to - room };
                if let Some((start, stays)) = block.window(&block.cells, least, most - block.len())
                {
                    if best.is_none_or(|(_, most)| stays > most) {
                        best = Some((start, stays));
                    }
                }
                from = taken.next_free(to);
            }
            let (start, _) = best?;
            layout.put(block, &block.cells, start);
            (start..start + block.len()).for_each(|cell| taken.take(cell));
        }
        Some(layout)
    }

    /// Places all blocks one after the other, each after the cells that it shares with earlier blocks. Returns `None`
    /// if there is not enough room. With a `room` of 0, there always is.
    fn in_turn(blocks: &[Block], group: &LayerGroup, room: i32) -> Option<Self> {
        let mut layout = Self::default();
        let mut left = group.taken();
        let (mut end, mut last) = (0, -1);
        for block in blocks {
            let rest = layout.rest(block);
            let len = (rest.len() + block.nodes.len()) as i32;
            if len == 0 {
                continue;
            }
            let shares = rest.len() < block.cells.len();
            let follows =
                shares && layout.target(block.cells[block.cells.len() - rest.len() - 1]) == last;
            let least = if follows || end == 0 { end } else { end + room };
            // Leaves space for the blocks after this one.
            let most = group.size() - left;
            let start = if follows {
                least
            } else if !shares && block.is_run && (end..=most).contains(&block.start) {
                block.start
            } else {
                let roomy = (most - tail(group)).max(least);
                block.window(&rest, least, most.min(roomy))?.0
            };
            if start > most {
                return None;
            }
            layout.put(block, &rest, start);
            left -= len;
            end = start + len;
            last = end - block.nodes.len() as i32 - 1;
        }
        Some(layout)
    }

    /// Moves `cells` of a block to `start` and the following cells, and the block's nodes after them. If the order of
    /// cells does not matter, cells that are already in this range stay there.
    fn put(&mut self, block: &Block, cells: &[i32], start: i32) {
        let places = start..start + cells.len() as i32;
        block.nodes.iter().zip(places.end..).for_each(|(&node, place)| self.place(node, place));
        if block.ordered {
            return cells.iter().zip(places).for_each(|(&cell, place)| self.place(cell, place));
        }
        let mut kept = Occupancy::default();
        for &cell in cells.iter().filter(|cell| places.contains(cell)) {
            self.place(cell, cell);
            kept.take(cell);
        }
        let mut place = start;
        for &cell in cells.iter().filter(|cell| !places.contains(cell)) {
            place = kept.next_free(place);
            self.place(cell, place);
            place += 1;
        }
    }

    /// Sets the new cell of a cell that has none yet.
    pub fn place(&mut self, cell: i32, target: i32) {
        let index = cell as usize;
        if self.targets.len() <= index {
            self.targets.resize(index + 1, -1);
        }
        self.targets[index] = target;
        self.n_moved += i32::from(cell != target);
    }

    /// Returns the new cell of a cell, or the cell itself if it has none.
    pub fn target(&self, cell: i32) -> i32 {
        match self.targets.get(cell as usize) {
            Some(&target) if target >= 0 => target,
            _ => cell,
        }
    }

    /// Returns the cells of a block that have no new cell yet.
    fn rest(&self, block: &Block) -> Vec<i32> {
        let is_placed =
            |cell: i32| self.targets.get(cell as usize).is_some_and(|&target| target >= 0);
        block.cells.iter().copied().filter(|&cell| !is_placed(cell)).collect()
    }

    /// Returns the layout as a move of rows, or `None` if no row moves.
    pub fn into_move(self, group: usize) -> Option<Move> {
        let moved = |(cell, target): &(i32, i32)| *target >= 0 && cell != target;
        let (from, to): (Vec<i32>, Vec<i32>) = (0..).zip(self.targets).filter(moved).unzip();
        (!from.is_empty()).then(|| Move { group, from: Slots::of(&from), to: Slots::of(&to) })
    }
}

/// Returns the number of cells that stay free at the end of a layer group, for the last sequence.
fn tail(group: &LayerGroup) -> i32 {
    ROOM.min((group.size() - group.taken()) / 2)
}
