//! The cells of one layer group: their owners, and the order in which they are allocated.

mod state;

use std::ops::Range;

use super::occupancy::Occupancy;
use super::runs::{Run, Runs};
use crate::bookkeeping::Window;

/// The number of cells that stay free between the last cell of a sequence and the first cell of a new sequence. Both
/// sequences can then grow as runs for a while.
pub const ROOM: i32 = 64;

/// The number of cells that stay free before a new run of a sequence. A sequence, such as a fork, begins a new run if
/// it cannot continue after its last cell. Otherwise the cells of sequences that decode together would alternate, and
/// each sequence would read the rows of all sequences. The free cells cost memory for each fork.
const ROOM_TO_GO_ON: i32 = 16;

/// The cells of the layers that share a policy.
#[derive(Debug, Clone)]
pub struct LayerGroup {
    pub window: Option<Window>,
    capacity: i32,
    /// The number of cells by which the group grows.
    chunk: i32,
    /// The number of allocated cells. It grows when more are needed.
    size: i32,
    pub occupancy: Occupancy,
    /// The number of owners of each cell. Cells after the end of the list have no owner.
    owners: Vec<u16>,
    /// The cells of each sequence and of each checkpoint.
    held: Vec<Runs>,
}

impl LayerGroup {
    /// Returns an empty layer group. Without a window it has `capacity` cells.
    pub fn new(window: Option<Window>, capacity: i32) -> Self {
        Self::with_chunks(window, window.map_or(capacity, |window| window.slots()), capacity)
    }

    /// Returns an empty layer group without a window that grows by `chunk` cells.
    pub fn growing(chunk: i32, capacity: i32) -> Self {
        Self::with_chunks(None, chunk, capacity)
    }

    fn with_chunks(window: Option<Window>, chunk: i32, capacity: i32) -> Self {
        Self {
            window,
            capacity,
            chunk,
            size: chunk,
            occupancy: Occupancy::default(),
            owners: Vec::new(),
            held: Vec::new(),
        }
    }

    /// Returns the cells of a sequence.
    pub fn held(&self, sequence: i32) -> &Runs {
        static NOTHING: Runs = Runs::EMPTY;
        self.held.get(sequence as usize).unwrap_or(&NOTHING)
    }

    fn held_mut(&mut self, sequence: i32) -> &mut Runs {
        let index = sequence as usize;
        if index >= self.held.len() {
            self.held.resize_with(index + 1, Runs::default);
        }
        &mut self.held[index]
    }

    /// Returns the number of cells that are taken.
    pub fn taken(&self) -> i32 {
        self.occupancy.taken()
    }

    /// Returns the number of allocated cells.
    pub fn size(&self) -> i32 {
        self.size
    }

    /// Returns the sequences and checkpoints that own cells.
    pub fn owners(&self) -> impl Iterator<Item = i32> + '_ {
        let owns = |(_, held): &(usize, &Runs)| held.count() > 0;
        self.held.iter().enumerate().filter(owns).map(|(sequence, _)| sequence as i32)
    }

    /// Returns the number of owners of a cell.
    pub fn n_owners(&self, cell: i32) -> u16 {
        self.owners.get(cell as usize).copied().unwrap_or(0)
    }

    /// Takes `n` cells, which must be available, and appends them to `cells`. The cells start at `after` if enough
    /// cells are free there. Otherwise they are a run of free cells, preferably away from the ends of sequences. If
    /// there is no such run, they are the first free cells. If `after` is `None`, a new sequence begins. `cells`
    /// already has the cells that the step took earlier.
    pub fn allocate(&mut self, n: i32, after: Option<i32>, cells: &mut Vec<i32>) {
        self.make_room(n);
        let mut left = n;
        if let Some(cell) = after {
            let end = self.occupancy.next_taken(cell, self.size.min(cell.saturating_add(left)));
            left -= (end - cell).max(0);
            self.take(cell..end, cells);
        }
        if left > 0 {
            let room = if after.is_some() { ROOM_TO_GO_ON } else { ROOM };
            if let Some(cell) = self.run_for(left, room, cells) {
                self.take(cell..cell + left, cells);
                left = 0;
            }
        }
        while left > 0 {
            let start = self.occupancy.next_free(0);
            let end = self.occupancy.next_taken(start, start + left);
            left -= end - start;
            self.take(start..end, cells);
        }
    }

    /// Takes the first `n` free cells, which must be available.
    pub fn allocate_first(&mut self, n: i32, cells: &mut Vec<i32>) {
        self.make_room(n);
        for _ in 0..n {
            let cell = self.occupancy.next_free(0);
            self.take(cell..cell + 1, cells);
        }
    }

    fn make_room(&mut self, n: i32) {
        while self.size - self.taken() < n && self.size < self.capacity {
            self.size = self.size.saturating_add(self.chunk).min(self.capacity);
        }
    }

    /// Returns the cell in which a sequence has a position.
    pub fn cell_of(&self, sequence: i32, position: i32) -> Option<i32> {
        self.held(sequence).clipped(position..position + 1).next().map(|run| run.cell)
    }

    /// Returns the number of cells that can still be taken, including cells that are not allocated yet.
    pub fn free_cells(&self) -> i32 {
        self.capacity - self.taken()
    }

    /// Returns the start of the first free run of `n` cells. Prefers a run with free cells before it.
    fn run_for(&self, n: i32, room: i32, just_taken: &[i32]) -> Option<i32> {
        let mut found = None;
        let mut start = self.occupancy.next_free(0);
        while start < self.size {
            let end = self.occupancy.next_taken(start, self.size);
            if end - start >= n {
                let is_tail = |cell| self.is_tail(cell) || just_taken.contains(&cell);
                if start == 0 || !is_tail(start - 1) {
                    return Some(start);
                }
                if end - start >= n + 2 * room {
                    return Some(start + room);
                }
                found = found.or(Some(start));
            }
            start = self.occupancy.next_free(end);
        }
        found
    }

    /// Returns whether a sequence would continue in the next cell.
    fn is_tail(&self, cell: i32) -> bool {
        self.held.iter().any(|held| held.cell_after() == Some(cell + 1))
    }

    fn take(&mut self, range: Range<i32>, cells: &mut Vec<i32>) {
        for cell in range {
            self.occupancy.take(cell);
            cells.push(cell);
        }
    }

    /// Frees a taken cell without an owner.
    pub fn free(&mut self, cell: i32) {
        self.occupancy.free(cell);
    }

    /// Takes a free cell.
    pub fn hold(&mut self, cell: i32) {
        self.occupancy.take(cell);
    }

    /// Makes a tree the only owner of a taken cell.
    pub fn own_as_node(&mut self, cell: i32) {
        self.own(&Run { position: 0, cell, len: 1 });
    }

    /// Frees the cell of a tree.
    pub fn release(&mut self, cell: i32) {
        self.owners[cell as usize] = 0;
        self.occupancy.free(cell);
    }

    /// Adds a taken cell to `sequence`, as its next position.
    pub fn append(&mut self, sequence: i32, position: i32, cell: i32) {
        self.own(&Run { position, cell, len: 1 });
        self.held_mut(sequence).push(Run { position, cell, len: 1 });
    }

    fn own(&mut self, run: &Run) {
        let cells = run.cells();
        if self.owners.len() < cells.end as usize {
            self.owners.resize(cells.end as usize, 0);
        }
        for owners in &mut self.owners[cells.start as usize..cells.end as usize] {
            *owners += 1;
        }
    }

    /// Makes `target` another owner of the cells of `source` at `positions`.
    pub fn share(&mut self, source: i32, target: i32, positions: Range<i32>) {
        let runs: Vec<Run> = self.held(source).clipped(positions).collect();
        let known = self.held(target).clone();
        // The positions that `target` does not share with `source` yet.
        let mut fresh = Vec::new();
        for run in runs {
            let mut position = run.position;
            for other in known.clipped(run.positions()) {
                fresh.extend(run.clipped(&(position..other.position)));
                position = other.position + other.len;
            }
            fresh.extend(run.clipped(&(position..run.position + run.len)));
        }
        fresh.iter().for_each(|run| self.own(run));
        self.held_mut(target).insert_all(fresh);
    }

    /// Removes `positions` from a sequence. Cells that have no owner afterwards become free.
    pub fn remove(&mut self, sequence: i32, positions: &Range<i32>) {
        let (owners, occupancy) = (&mut self.owners, &mut self.occupancy);
        let Some(held) = self.held.get_mut(sequence as usize) else {
            return;
        };
        held.remove(positions, |run| {
            for cell in run.cells() {
                owners[cell as usize] -= 1;
                if owners[cell as usize] == 0 {
                    occupancy.free(cell);
                }
            }
        });
    }

    /// If the window of a sequence is full, drops the positions that the sequence no longer needs. `next` is its next
    /// position. Returns whether the window was full.
    pub fn trim(&mut self, sequence: i32, next: i32) -> bool {
        let Some(window) = self.window else {
            return false;
        };
        if !window.is_full(self.held(sequence).count()) {
            return false;
        }
        let first = window.first_needed(next).max(window.sinks());
        self.remove(sequence, &(window.sinks()..first));
        true
    }

    /// Moves every cell to `moved(cell)`.
    pub fn remap(&mut self, moved: impl Fn(i32) -> i32) {
        let owners = std::mem::take(&mut self.owners);
        self.occupancy.clear();
        for (cell, &count) in owners.iter().enumerate().filter(|(_, &count)| count > 0) {
            let cell = moved(cell as i32);
            self.occupancy.take(cell);
            if self.owners.len() <= cell as usize {
                self.owners.resize(cell as usize + 1, 0);
            }
            self.owners[cell as usize] = count;
        }
        for held in &mut self.held {
            *held = held.mapped(&moved);
        }
    }

    /// Reduces the number of allocated cells to the minimum. The taken cells must come first.
    pub fn shrink(&mut self) {
        self.size = self.chunk;
        self.make_room(0);
    }

    /// Returns an empty group with the same parameters.
    pub fn emptied(&self) -> Self {
        Self::with_chunks(self.window, self.chunk, self.capacity)
    }

    /// Removes every sequence.
    pub fn clear(&mut self) {
        *self = self.emptied();
    }
}
