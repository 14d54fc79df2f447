//! One step of the recurrent layers: its plan, and its commit or abort.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use super::builder::{Builder, Owner};
use super::Recurrent;
use crate::bookkeeping::cells::segments::Segments;
use crate::bookkeeping::cells::tree::Tree;
use crate::bookkeeping::recurrent::{AnchorSource, Chain, RecurrentPlan, RowSource};
use crate::bookkeeping::{LayerGroupPlan, MaskPlan, Slots};
use crate::error::{fail, Result};

/// A planned step. Its rows and anchors are in cells that were free before.
#[derive(Debug, Clone)]
pub struct OpenStep {
    plan: Arc<RecurrentPlan>,
    rows: Vec<i32>,
    anchors: Vec<i32>,
    owners: Vec<(Owner, i32, AnchorSource)>,
}

impl Recurrent {
    /// Plans a step for tokens at these positions. The members of a segment must have the same text. `pins` returns
    /// the positions of a sequence that need a checkpoint, among the positions that the step writes.
    ///
    /// # Errors
    /// [`Capacity`](crate::Status::Capacity) if too few cells are free. The bookkeeping is then unchanged.
    pub fn plan(
        &mut self,
        segments: &Segments,
        positions: &[i32],
        trees: &BTreeMap<i32, Tree>,
        pins: impl Fn(i32, Range<i32>) -> Vec<i32>,
    ) -> Result<()> {
        let mut members: Vec<i32> =
            segments.iter().flat_map(|(members, _)| members.to_vec()).collect();
        let n_named = members.len();
        members.sort_unstable();
        members.dedup();
        // If a sequence is in several segments, it may read the row of any earlier token of the step. All rows are
        // then stored.
        let once = members.len() == n_named;
        let mut builder = Builder::new(self);
        let mut first = 0;
        for (members, n_tokens) in segments.iter() {
            let tokens = first..first + n_tokens;
            first = tokens.end;
            let (Some(&sequence), Some(&position)) = (members.first(), positions.get(tokens.start))
            else {
                continue;
            };
            if let Some(tree) = trees.get(&sequence) {
                builder.add_nodes(sequence, tree, tokens, position)?;
                continue;
            }
            let end = position + n_tokens as i32;
            let window = self.window;
            let pins: Vec<i32> =
                members.iter().flat_map(|&member| pins(member, position..end)).collect();
            let pinned = |at: i32| pins.iter().any(|&pin| at < pin && at >= pin - window.lead);
            builder.add_text(
                members,
                tokens,
                position,
                |at| !once || at >= window.first_row(end) || pinned(at),
                |at| !once || at >= window.oldest_anchor(end) || pins.contains(&at),
            )?;
        }
        let Builder { mut plan, kept, owners, .. } = builder;
        let (n_rows, n_anchors) = (plan.stored.len(), kept.iter().filter(|&&kept| kept).count());
        if n_rows > self.rows.free_cells() as usize {
            fail!(
                Capacity,
                "a step needs {n_rows} rows in the recurrent layers, but {} are free; pass fewer tokens",
                self.rows.free_cells()
            );
        }
        let (mut rows, mut anchors) = (Vec::new(), Vec::new());
        self.rows.allocate_first(n_rows as i32, &mut rows);
        self.anchors.allocate_first(n_anchors as i32, &mut anchors);
        let mut slots = anchors.iter();
        for (fold, _) in plan.folds.iter_mut().zip(&kept).filter(|(_, &kept)| kept) {
            *fold = slots.next().copied();
        }
        plan.rows = Slots::of(&rows);
        plan.anchors = Slots::of(&anchors);
        self.step = Some(OpenStep { plan: Arc::new(plan), rows, anchors, owners });
        Ok(())
    }

    /// Returns the plan of the open step.
    pub fn open_plan(&self) -> Option<&Arc<RecurrentPlan>> {
        self.step.as_ref().map(|step| &step.plan)
    }

    /// Returns the number of rows and of anchors that the open step adds.
    pub fn n_planned(&self) -> [i32; 2] {
        self.step
            .as_ref()
            .map_or([0, 0], |step| [step.rows.len() as i32, step.anchors.len() as i32])
    }

    /// Returns the plans of the open step for the buffers of rows and of anchors. `end` is 1 more than the largest
    /// position that the step writes.
    pub fn buffer_plans(&self, end: i32) -> [LayerGroupPlan; 2] {
        let Some(OpenStep { plan, .. }) = &self.step else {
            let none =
                || LayerGroupPlan { write: Slots::default(), read: 0..0, mask: MaskPlan::None };
            return [none(), none()];
        };
        let slots = |chain: &Chain| {
            let slot = |row: &RowSource| match row {
                RowSource::Slot(slot) => slot + 1,
                RowSource::Token(_) => 0,
            };
            chain.rows.iter().map(slot).max().unwrap_or(0)
        };
        let rows = plan.chains.iter().map(slots).max().unwrap_or(0);
        let anchors = plan.chains.iter().map(|chain| match chain.anchor {
            AnchorSource::Slot(slot) => slot + 1,
            _ => 0,
        });
        let anchors = anchors.max().unwrap_or(0);
        let rows = rows.max(self.window.row_slots(end, self.capacity));
        let anchors = anchors.max(self.window.anchor_slots(end));
        let of = |write: &Slots, read: i32| LayerGroupPlan {
            write: write.clone(),
            read: 0..read.max(write.end()),
            mask: MaskPlan::None,
        };
        [of(&plan.rows, rows), of(&plan.anchors, anchors)]
    }

    /// Adds the rows and anchors of the open step to their sequences and trees. Does not drop older rows and anchors
    /// yet.
    pub fn commit(
        &mut self,
        segments: &Segments,
        positions: &[i32],
        trees: &mut BTreeMap<i32, Tree>,
    ) {
        let Some(OpenStep { plan, rows, owners, .. }) = self.step.take() else {
            return;
        };
        let mut stored = plan.stored.iter().zip(&rows).peekable();
        let mut end = 0;
        for (members, n_tokens) in segments.iter() {
            end += n_tokens;
            while let Some((&token, &cell)) = stored.next_if(|(&token, _)| token < end) {
                match members.first().and_then(|sequence| trees.get_mut(sequence)) {
                    Some(tree) => {
                        self.rows.own_as_node(cell);
                        tree.rows.push(cell);
                    }
                    None => members
                        .iter()
                        .for_each(|&member| self.rows.append(member, positions[token], cell)),
                }
            }
        }
        for (owner, block, anchor) in owners {
            let slot = match anchor {
                AnchorSource::Slot(slot) => Some(slot),
                AnchorSource::Fold(fold) => plan.folds[fold],
                AnchorSource::Zero => None,
            };
            let Some(slot) = slot else {
                continue;
            };
            match owner {
                Owner::Sequence(sequence) => self.anchors.append(sequence, block, slot),
                Owner::Node(sequence, node) => {
                    self.anchors.own_as_node(slot);
                    if let Some(tree) = trees.get_mut(&sequence) {
                        tree.anchors.insert(node, slot);
                    }
                }
            }
        }
    }

    /// Rolls the open step back. Does nothing if no step is open.
    pub fn abort(&mut self) {
        if let Some(OpenStep { rows, anchors, .. }) = self.step.take() {
            rows.iter().for_each(|&cell| self.rows.free(cell));
            anchors.iter().for_each(|&slot| self.anchors.free(slot));
        }
    }
}
