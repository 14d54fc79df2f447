//! Operations on the sequences and trees of a pool of cells, by the bookkeeping.

use std::ops::Range;

use tracing::debug_span;

use super::CellsCache;
use crate::cache::{SeqCache, TreeCache};
use crate::error::Result;
use crate::store::Store;
use crate::watch::TARGET;

impl<S: Store> SeqCache for CellsCache<S> {
    fn begin_step(&mut self, sequences: &[i32]) -> Result<()> {
        self.declaring().begin_step(sequences)
    }

    fn begin_step_shared(&mut self, sequences: &[&[i32]]) -> Result<()> {
        self.declaring().begin_step_shared(sequences)
    }

    fn cancel_step(&mut self) -> Result<()> {
        self.declaring().cancel_step()
    }

    fn awaits_text(&self) -> bool {
        self.book.awaits_text()
    }

    fn seq_cp(&mut self, source: i32, target: i32, positions: Range<i32>) -> Result<()> {
        self.changing()?.seq_cp(source, target, positions)
    }

    fn seq_rm(&mut self, sequence: i32, positions: Range<i32>) -> Result<()> {
        self.changing()?.seq_rm(sequence, positions)
    }

    fn seq_keep(&mut self, sequence: i32) -> Result<()> {
        self.changing()?.seq_keep(sequence)
    }

    fn seq_len(&self, sequence: i32) -> Result<i32> {
        self.book.seq_len(sequence)
    }

    fn seq_next(&self, sequence: i32) -> Result<i32> {
        self.book.seq_next(sequence)
    }

    fn seq_positions(&self, sequence: i32) -> Result<Vec<Range<i32>>> {
        self.book.seq_positions(sequence)
    }

    fn seq_rewindable_to(&self, sequence: i32) -> Result<i32> {
        self.book.rewindable_to(sequence)
    }

    fn seq_reachable(&self, sequence: i32, position: i32) -> Result<i32> {
        self.book.reachable(sequence, position)
    }

    fn seq_checkpoints(&self, sequence: i32) -> Result<Vec<i32>> {
        self.book.checkpoints_of(sequence)
    }

    fn seq_mark(&mut self, sequence: i32, position: i32) -> Result<i32> {
        self.changing()?.mark(sequence, position)
    }

    fn live_sequences(&self) -> Vec<i32> {
        self.book.sequences()
    }

    fn compact(&mut self) -> Result<()> {
        self.storage.check()?;
        let _span = debug_span!(target: TARGET, "compact").entered();
        let before = self.changing()?.clone();
        let moves = self.book.compact()?;
        if let Err(error) = self.storage.reserve_moves(&moves) {
            self.book = before;
            return Err(error);
        }
        self.storage.apply(&moves)
    }
}

impl<S: Store> TreeCache for CellsCache<S> {
    fn propose(&mut self, sequence: i32, parents: &[i32]) -> Result<()> {
        self.storage.check()?;
        self.changing()?.propose(sequence, parents)
    }

    fn commit_tree(&mut self, sequence: i32, accepted: &[i32]) -> Result<()> {
        self.storage.check()?;
        let moves = self.changing()?.commit_tree(sequence, accepted);
        self.apply(moves)?;
        self.quantize();
        Ok(())
    }

    fn tree_len(&self, sequence: i32) -> Result<usize> {
        self.book.tree_len(sequence)
    }
}
