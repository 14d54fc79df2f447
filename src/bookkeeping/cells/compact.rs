//! Closing holes, so that sequences are runs of cells again.

use super::lane::{Lane, ROOM};
use super::occupancy::Occupancy;
use super::CellsBookkeeping;
use crate::bookkeeping::{Move, Slots};
use crate::error::Result;

impl CellsBookkeeping {
    /// Makes every sequence one run of cells, as far as what sequences share lets
    /// them; moves only what has to. Does nothing where they are. Rows move as
    /// returned.
    ///
    /// # Errors
    /// [`Step`](crate::Status::Step) while a step is open.
    pub fn compact(&mut self) -> Result<Vec<Move>> {
        self.refuse_in_step("compact the cache")?;
        let mut moves = Vec::new();
        for index in 0..self.lanes.len() {
            let trees: Vec<(i32, Vec<i32>)> = self
                .trees
                .iter()
                .map(|(&sequence, tree)| (sequence, tree.cells[index].clone()))
                .collect();
            let lane = &mut self.lanes[index];
            let ordered = lane.window.is_some();
            let Some(layout) = Layout::of(lane, &trees, ordered) else {
                continue;
            };
            lane.remap(|cell| layout.target(cell));
            for tree in self.trees.values_mut() {
                tree.cells[index].iter_mut().for_each(|cell| *cell = layout.target(*cell));
            }
            moves.extend(layout.into_move(index));
        }
        Ok(moves)
    }
}

impl Lane {
    /// Puts the one sequence that there is into the first cells, by position.
    pub fn pack(&mut self, lane: usize) -> Option<Move> {
        let mut layout = Layout { targets: Vec::new() };
        let mut next = 0;
        for sequence in self.owners().collect::<Vec<_>>() {
            for cell in cells_of(self, sequence) {
                layout.place(cell, next);
                next += 1;
            }
        }
        self.remap(|cell| layout.target(cell));
        layout.into_move(lane)
    }
}

/// Where each cell goes.
struct Layout {
    /// By cell; -1 where it has no place yet.
    targets: Vec<i32>,
}

impl Layout {
    /// Where all cells of a lane go; none where every sequence is one run as it is.
    /// An `ordered` lane keeps positions in order.
    fn of(lane: &Lane, trees: &[(i32, Vec<i32>)], ordered: bool) -> Option<Self> {
        let mut blocks: Vec<Block> = Vec::new();
        let mut sequences: Vec<i32> = lane.owners().collect();
        sequences.extend(trees.iter().map(|(sequence, _)| *sequence));
        sequences.sort_unstable();
        sequences.dedup();
        for sequence in sequences {
            let tree = trees.iter().find(|(owner, _)| *owner == sequence);
            let nodes = tree.map_or(&[][..], |(_, nodes)| nodes);
            blocks.extend(Block::of(cells_of(lane, sequence), nodes));
        }
        let n_runs = blocks.iter().filter(|block| block.is_run(ordered)).count();
        if n_runs == blocks.len() {
            return None;
        }
        blocks.sort_by_key(|block| block.start);
        // With room between the sequences where there is enough of it, and without
        // any where there is not.
        let layout = Self::arranged(&blocks, lane, ordered, ROOM)
            .or_else(|| Self::arranged(&blocks, lane, ordered, 0))
            .unwrap_or_else(|| Self::packed(&blocks, ordered));
        // Sequences that share cells cannot all be runs: rows move for a gain only.
        let becomes_run = |block: &&Block| block.moved(&layout).is_run(ordered);
        (blocks.iter().filter(becomes_run).count() > n_runs).then_some(layout)
    }

    fn arranged(blocks: &[Block<'_>], lane: &Lane, ordered: bool, room: i32) -> Option<Self> {
        let mut layout = Self { targets: Vec::new() };
        let mut end = 0;
        let mut last = -1;
        for block in blocks {
            let rest: Vec<i32> = block.rest(&layout);
            if rest.is_empty() && block.nodes.is_empty() {
                continue;
            }
            let shares = rest.len() < block.cells.len();
            let whole = !shares && block.is_run(ordered);
            let follows =
                shares && layout.target(block.cells[block.cells.len() - rest.len() - 1]) == last;
            let least = if follows || end == 0 { end } else { end + room };
            let start = if follows { least } else { least.max(block.first_of(&rest)) };
            let start = if whole && block.start >= end { block.start } else { start };
            if start + (rest.len() + block.nodes.len()) as i32 > lane.size() {
                return None;
            }
            last = start + rest.len() as i32 - 1;
            layout.assign(&rest, start, ordered);
            layout.assign(block.nodes, last + 1, true);
            end = last + 1 + block.nodes.len() as i32;
        }
        Some(layout)
    }

    fn packed(blocks: &[Block], ordered: bool) -> Self {
        let mut layout = Self { targets: Vec::new() };
        let mut end = 0;
        for block in blocks {
            let rest = block.rest(&layout);
            layout.assign(&rest, end, ordered);
            end += rest.len() as i32;
            layout.assign(block.nodes, end, true);
            end += block.nodes.len() as i32;
        }
        layout
    }

    /// Gives `cells` the places from `start` on. Where order does not matter, those
    /// that lie there already stay.
    fn assign(&mut self, cells: &[i32], start: i32, ordered: bool) {
        let places = start..start + cells.len() as i32;
        if ordered {
            cells.iter().zip(places).for_each(|(&cell, place)| self.place(cell, place));
            return;
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

    fn place(&mut self, cell: i32, target: i32) {
        let index = cell as usize;
        if self.targets.len() <= index {
            self.targets.resize(index + 1, -1);
        }
        self.targets[index] = target;
    }

    fn is_placed(&self, cell: i32) -> bool {
        self.targets.get(cell as usize).is_some_and(|&target| target >= 0)
    }

    fn target(&self, cell: i32) -> i32 {
        match self.targets.get(cell as usize) {
            Some(&target) if target >= 0 => target,
            _ => cell,
        }
    }

    fn into_move(self, lane: usize) -> Option<Move> {
        let moved = |(cell, target): &(i32, i32)| *target >= 0 && cell != target;
        let (from, to): (Vec<i32>, Vec<i32>) = (0..).zip(self.targets).filter(moved).unzip();
        (!from.is_empty()).then(|| Move { lane, from: Slots::of(&from), to: Slots::of(&to) })
    }
}

/// The cells of one sequence, by position, and those of the tree behind it.
struct Block<'a> {
    cells: Vec<i32>,
    nodes: &'a [i32],
    /// From the first to the last of `cells`; of `nodes` where there are none.
    start: i32,
    end: i32,
}

impl<'a> Block<'a> {
    fn of(cells: Vec<i32>, nodes: &'a [i32]) -> Option<Self> {
        let extent = if cells.is_empty() { nodes } else { &cells };
        let (start, end) = (extent.iter().copied().min()?, extent.iter().copied().max()? + 1);
        Some(Self { cells, nodes, start, end })
    }

    /// The first of `rest`, or of the nodes where that is empty.
    fn first_of(&self, rest: &[i32]) -> i32 {
        let cells = if rest.is_empty() { self.nodes } else { rest };
        cells.iter().copied().min().unwrap_or(self.start)
    }

    /// The same after a move.
    fn moved(&self, layout: &Layout) -> Self {
        let cells: Vec<i32> = self.cells.iter().map(|&cell| layout.target(cell)).collect();
        let (start, end) = cells
            .iter()
            .fold((i32::MAX, 0), |(start, end), &cell| (start.min(cell), end.max(cell + 1)));
        Self { cells, nodes: self.nodes, start, end }
    }

    fn is_run(&self, ordered: bool) -> bool {
        self.cells.is_empty()
            || self.end - self.start == self.cells.len() as i32
                && (!ordered || self.cells.windows(2).all(|pair| pair[1] == pair[0] + 1))
    }

    /// Those of its cells that have no place yet.
    fn rest(&self, layout: &Layout) -> Vec<i32> {
        self.cells.iter().copied().filter(|&cell| !layout.is_placed(cell)).collect()
    }
}

fn cells_of(lane: &Lane, sequence: i32) -> Vec<i32> {
    lane.held(sequence).iter().flat_map(|run| run.cells()).collect()
}
