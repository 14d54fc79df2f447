//! Builds the plan of a step: the chains of its tokens, and the anchors between them.

use std::collections::BTreeMap;
use std::ops::Range;

use super::Recurrent;
use crate::bookkeeping::cells::tree::Tree;
use crate::bookkeeping::recurrent::{AnchorSource, Chain, RecurrentPlan, RowSource, BLOCK};
use crate::error::{fail, Result};

/// The owner of a new anchor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Owner {
    Sequence(i32),
    /// The tree after this sequence. The anchor is the state after this node.
    Node(i32, usize),
}

/// The tokens that a step adds to a sequence, and the anchors between them.
#[derive(Debug, Default)]
struct Fresh {
    start: i32,
    tokens: Vec<usize>,
    /// The new anchors, by block.
    anchors: BTreeMap<i32, AnchorSource>,
}

/// The nodes of a frontier that are already part of the step. Tokens of other sequences may come between these nodes.
#[derive(Debug, Default)]
struct Frontier {
    /// The token of each node.
    tokens: Vec<usize>,
    /// The anchors of this step, by the node before them.
    anchors: BTreeMap<usize, AnchorSource>,
}

/// A plan under construction. New rows and anchors have no slots yet.
pub struct Builder<'a> {
    state: &'a Recurrent,
    pub plan: RecurrentPlan,
    /// Whether each fold is stored.
    pub kept: Vec<bool>,
    /// New anchors with their owners and blocks.
    pub owners: Vec<(Owner, i32, AnchorSource)>,
    fresh: BTreeMap<i32, Fresh>,
    frontiers: BTreeMap<i32, Frontier>,
    /// The folds of this step, by the last row before the anchor. Texts that share this row share the anchor.
    folds: BTreeMap<(RowKey, i32), AnchorSource>,
}

/// A row as a key of a map.
type RowKey = (bool, usize);

fn key(row: RowSource) -> RowKey {
    match row {
        RowSource::Slot(slot) => (false, slot as usize),
        RowSource::Token(token) => (true, token),
    }
}

impl<'a> Builder<'a> {
    pub fn new(state: &'a Recurrent) -> Self {
        Self {
            state,
            plan: RecurrentPlan::default(),
            kept: Vec::new(),
            owners: Vec::new(),
            fresh: BTreeMap::new(),
            frontiers: BTreeMap::new(),
            folds: BTreeMap::new(),
        }
    }

    /// Adds consecutive tokens that belong to all of the sequences `members`. Stores the rows at positions for which
    /// `keeps_row` returns true, and the anchors for which `keeps_anchor` returns true.
    pub fn add_text(
        &mut self,
        members: &[i32],
        tokens: Range<usize>,
        position: i32,
        keeps_row: impl Fn(i32) -> bool,
        keeps_anchor: impl Fn(i32) -> bool,
    ) -> Result<()> {
        let Some(&sequence) = members.first() else {
            return Ok(());
        };
        let end = position + tokens.len() as i32;
        let mut base = position / BLOCK * BLOCK;
        let mut anchor = self.anchor_of(sequence, base);
        if anchor.is_none() && base == position {
            anchor = self.shared_anchor(sequence, position)?;
            if anchor.is_none() {
                base -= BLOCK;
                anchor = self.anchor_of(sequence, base);
            }
        }
        let Some(anchor) = anchor else {
            return missing_state(base);
        };
        self.give(members, base, anchor);
        let first = (base - self.state.window.lead).max(0);
        let rows: Vec<RowSource> =
            (first..position).map(|at| self.row_of(sequence, at)).collect::<Result<_>>()?;
        let first_fold = self.plan.folds.len();
        let mut boundary = base + BLOCK;
        while boundary < end {
            let kept = keeps_anchor(boundary);
            let fold = self.fold(kept);
            if kept {
                self.give(members, boundary, fold);
            }
            let before = if boundary > position {
                RowSource::Token(tokens.start + (boundary - 1 - position) as usize)
            } else {
                self.row_of(sequence, boundary - 1)?
            };
            if kept {
                self.folds.insert((key(before), boundary), fold);
            }
            boundary += BLOCK;
        }
        for (token, at) in tokens.clone().zip(position..) {
            if keeps_row(at) {
                self.plan.stored.push(token);
            }
        }
        for &member in members {
            let fresh = self.fresh.entry(member).or_default();
            if fresh.tokens.is_empty() {
                fresh.start = position;
            }
            fresh.tokens.extend(tokens.clone());
        }
        let folds = first_fold..self.plan.folds.len();
        self.plan.chains.push(Chain { tokens, position, rows, anchor, base, folds });
        Ok(())
    }

    /// Adds tokens that are the next nodes of a tree's frontier. `position` is the position of the first token.
    pub fn add_nodes(
        &mut self,
        sequence: i32,
        tree: &Tree,
        tokens: Range<usize>,
        position: i32,
    ) -> Result<()> {
        let mut frontier = self.frontiers.remove(&sequence).unwrap_or_default();
        let first = tree.n_written() + frontier.tokens.len();
        let next = position - tree.depth(first);
        for (node, token) in (first..).zip(tokens) {
            self.plan.stored.push(token);
            frontier.tokens.push(token);
            let position = next + tree.depth(node);
            let parent = tree.parent(node);
            let goes_on = node > first && parent == Some(node - 1);
            if !goes_on {
                self.start_chain(sequence, tree, node, next, &mut frontier)?;
                continue;
            }
            if position % BLOCK == 0 {
                let fold = self.fold(true);
                frontier.anchors.insert(node - 1, fold);
                self.owners.push((Owner::Node(sequence, node - 1), position / BLOCK, fold));
            }
            let n_folds = self.plan.folds.len();
            if let Some(chain) = self.plan.chains.last_mut() {
                chain.tokens.end = token + 1;
                chain.folds.end = n_folds;
            }
        }
        self.frontiers.insert(sequence, frontier);
        Ok(())
    }

    /// Starts a chain at the last node of `frontier`.
    fn start_chain(
        &mut self,
        sequence: i32,
        tree: &Tree,
        node: usize,
        next: i32,
        frontier: &mut Frontier,
    ) -> Result<()> {
        let n_written = tree.n_written();
        let position = next + tree.depth(node);
        // The node's ancestors, by depth.
        let mut path: Vec<usize> = tree.chain_up(node).skip(1).collect();
        path.reverse();
        let anchor_at = |builder: &Self, at: i32| {
            if at <= next {
                return builder.anchor_of(sequence, at);
            }
            let before = path.get((at - 1 - next) as usize)?;
            let written = tree.anchors.get(before).map(|&slot| AnchorSource::Slot(slot));
            written.or_else(|| frontier.anchors.get(before).copied())
        };
        let mut base = position / BLOCK * BLOCK;
        let mut anchor = anchor_at(self, base);
        if anchor.is_none() && base == position && position == next {
            anchor = self.shared_anchor(sequence, position)?;
            if let Some(shared) = anchor {
                self.give(&[sequence], position, shared);
            }
        }
        if anchor.is_none() && base == position {
            base -= BLOCK;
            anchor = anchor_at(self, base);
        }
        let Some(anchor) = anchor else {
            return missing_state(base);
        };
        let first = (base - self.state.window.lead).max(0);
        let row = |at: i32| {
            if at < next {
                return self.row_of(sequence, at);
            }
            let ancestor = path[(at - next) as usize];
            Ok(match tree.rows.get(ancestor) {
                Some(&slot) => RowSource::Slot(slot),
                None => RowSource::Token(frontier.tokens[ancestor - n_written]),
            })
        };
        let rows: Vec<RowSource> = (first..position).map(row).collect::<Result<_>>()?;
        let first_fold = self.plan.folds.len();
        if base < position && position % BLOCK == 0 {
            let fold = self.fold(true);
            match path.last() {
                Some(&parent) => {
                    frontier.anchors.insert(parent, fold);
                    self.owners.push((Owner::Node(sequence, parent), position / BLOCK, fold));
                }
                None => self.give(&[sequence], position, fold),
            }
        }
        let folds = first_fold..self.plan.folds.len();
        let token = frontier.tokens[node - n_written];
        let tokens = token..token + 1;
        self.plan.chains.push(Chain { tokens, position, rows, anchor, base, folds });
        Ok(())
    }

    fn fold(&mut self, kept: bool) -> AnchorSource {
        self.plan.folds.push(None);
        self.kept.push(kept);
        AnchorSource::Fold(self.kept.len() - 1)
    }

    /// Adds an anchor to those of the sequences that do not have it yet.
    fn give(&mut self, members: &[i32], position: i32, anchor: AnchorSource) {
        for &member in members {
            if self.anchor_of(member, position).is_some() {
                continue;
            }
            self.fresh.entry(member).or_default().anchors.insert(position / BLOCK, anchor);
            self.owners.push((Owner::Sequence(member), position / BLOCK, anchor));
        }
    }

    /// Returns the state of a sequence after `position` positions, or `None` if the sequence does not have that
    /// state.
    fn anchor_of(&self, sequence: i32, position: i32) -> Option<AnchorSource> {
        let block = position / BLOCK;
        if block == 0 {
            return Some(AnchorSource::Zero);
        }
        let fresh = self.fresh.get(&sequence).and_then(|fresh| fresh.anchors.get(&block));
        let held = || self.state.anchors.cell_of(sequence, block).map(AnchorSource::Slot);
        fresh.copied().or_else(held)
    }

    /// Returns the state after `position` positions of another sequence with the same text, or `None` if no such
    /// sequence has that state.
    fn shared_anchor(&self, sequence: i32, position: i32) -> Result<Option<AnchorSource>> {
        let before = self.row_of(sequence, position - 1)?;
        if let Some(&fold) = self.folds.get(&(key(before), position)) {
            return Ok(Some(fold));
        }
        let RowSource::Slot(cell) = before else {
            return Ok(None);
        };
        let anchors = &self.state.anchors;
        let same = |&other: &i32| self.state.rows.cell_of(other, position - 1) == Some(cell);
        let shared = anchors
            .owners()
            .filter(same)
            .find_map(|other| anchors.cell_of(other, position / BLOCK));
        Ok(shared.map(AnchorSource::Slot))
    }

    fn row_of(&self, sequence: i32, position: i32) -> Result<RowSource> {
        if let Some(fresh) = self.fresh.get(&sequence).filter(|fresh| !fresh.tokens.is_empty()) {
            if let Some(&token) =
                usize::try_from(position - fresh.start).ok().and_then(|at| fresh.tokens.get(at))
            {
                return Ok(RowSource::Token(token));
            }
        }
        match self.state.rows.cell_of(sequence, position) {
            Some(cell) => Ok(RowSource::Slot(cell)),
            None => fail!(
                Internal,
                "sequence {sequence} lacks the row of position {position} in its recurrent layers"
            ),
        }
    }
}

fn missing_state<T>(position: i32) -> Result<T> {
    fail!(Internal, "the state of the recurrent layers after {position} positions is missing")
}
