//! A simple model of a cache of sequences: every token that was ever written has a position, a sequence is a list of
//! tokens, and a tree is a list of nodes. There are no cells, runs or layer groups.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use etkv_core::{LayerPolicy, Status};

pub use crate::slots::Id;

/// The sequences in use.
pub const SEQUENCES: Range<i32> = 0..256;

/// Returns whether a query at position `at`, in a layer of `policy`, sees a token at `position` of its sequence.
pub fn is_seen(policy: LayerPolicy, at: i32, position: i32) -> bool {
    position <= at
        && match policy {
            LayerPolicy::Full => true,
            LayerPolicy::Window { window, sinks } => position > at - window || position < sinks,
            LayerPolicy::Chunk { chunk } => position / chunk == at / chunk,
        }
}

/// Returns the least position at which a query sees no dropped position. `last` is the last dropped position.
pub fn first_exact(policy: LayerPolicy, last: i32) -> i32 {
    (last + 1..).find(|&at| !is_seen(policy, at, last)).unwrap_or(i32::MAX)
}

/// A candidate after a sequence.
#[derive(Debug, Clone)]
pub struct Node {
    /// The number of an earlier node, or -1.
    pub parent: i32,
    /// The token, or `None` until a step has written it.
    pub token: Option<Id>,
}

#[derive(Debug, Clone, Default)]
pub struct Sequence {
    /// The tokens by position.
    pub tokens: Vec<Id>,
    pub tree: Vec<Node>,
}

impl Sequence {
    pub fn pending(&self) -> usize {
        self.tree.iter().filter(|node| node.token.is_none()).count()
    }

    pub fn written(&self) -> usize {
        self.tree.len() - self.pending()
    }

    /// Returns the tokens of the sequence and of its tree.
    pub fn all(&self) -> Vec<Id> {
        let nodes = self.tree.iter().filter_map(|node| node.token);
        self.tokens.iter().copied().chain(nodes).collect()
    }

    /// Returns a node and its ancestors, from the node up.
    pub fn chain_up(&self, node: usize) -> Vec<usize> {
        let mut chain = vec![node];
        let mut parent = self.tree[node].parent;
        while parent >= 0 {
            chain.push(parent as usize);
            parent = self.tree[parent as usize].parent;
        }
        chain
    }
}

/// The owners of a token.
pub type Members = Vec<i32>;

#[derive(Debug, Clone)]
pub struct Model {
    pub capacity: i32,
    /// The maximum number of tokens of one sequence in a step, if windows limit it.
    pub max_step_tokens: Option<i32>,
    /// The position of every token that was ever written, even by aborted steps.
    positions: Vec<i32>,
    /// The sequences that have tokens or trees.
    sequences: BTreeMap<i32, Sequence>,
    pub declared: Option<Vec<Members>>,
}

impl Model {
    pub fn new(capacity: i32, max_step_tokens: Option<i32>) -> Self {
        Self {
            capacity,
            max_step_tokens,
            positions: Vec::new(),
            sequences: BTreeMap::new(),
            declared: None,
        }
    }

    /// Returns the sequence, or an empty one.
    pub fn sequence(&self, sequence: i32) -> Sequence {
        self.sequences.get(&sequence).cloned().unwrap_or_default()
    }

    pub fn sequences(&self) -> &BTreeMap<i32, Sequence> {
        &self.sequences
    }

    pub fn position(&self, id: Id) -> i32 {
        self.positions[id]
    }

    pub fn positions_of(&self, sequence: i32) -> Vec<i32> {
        let tokens = self.sequences.get(&sequence).map_or(&[][..], |held| &held.tokens);
        tokens.iter().map(|&id| self.positions[id]).collect()
    }

    /// Returns the position of a sequence's next token.
    pub fn next(&self, sequence: i32) -> i32 {
        let last = self.sequences.get(&sequence).and_then(|held| held.tokens.last());
        last.map_or(0, |&id| self.positions[id] + 1)
    }

    /// Returns the distinct tokens of all sequences and trees.
    pub fn live(&self) -> BTreeSet<Id> {
        self.sequences.values().flat_map(Sequence::all).collect()
    }

    /// Returns the number of distinct tokens of sequences, without candidates.
    pub fn committed(&self) -> usize {
        let tokens: BTreeSet<Id> =
            self.sequences.values().flat_map(|held| held.tokens.iter().copied()).collect();
        tokens.len()
    }

    pub fn free(&self) -> i32 {
        self.capacity - self.live().len() as i32
    }

    /// Returns numbers for the tokens of a step, which is not committed yet.
    pub fn write(&mut self, positions: &[i32]) -> Vec<Id> {
        let first = self.positions.len();
        self.positions.extend_from_slice(positions);
        (first..self.positions.len()).collect()
    }

    /// Returns the owners of the tokens of the next step of `n` tokens.
    pub fn owners(&self, n: usize) -> Result<Vec<Members>, Status> {
        if let Some(declared) = &self.declared {
            return Ok(declared.clone());
        }
        let waiting: Vec<Members> = self
            .sequences
            .iter()
            .flat_map(|(&sequence, held)| vec![vec![sequence]; held.pending()])
            .collect();
        if !waiting.is_empty() {
            return Ok(waiting);
        }
        match self.sequences.len() {
            0 => Ok(vec![vec![0]; n]),
            1 => Ok(vec![self.sequences.keys().copied().collect(); n]),
            _ => Err(Status::InvalidArgument),
        }
    }

    /// Returns the node of the tree of `sequence` that token `token` of a step writes.
    fn node(&self, owners: &[Members], token: usize, sequence: i32) -> usize {
        let before = owners[..token].iter().filter(|members| members.contains(&sequence)).count();
        self.sequences[&sequence].written() + before
    }

    fn has_tree(&self, sequence: i32) -> bool {
        self.sequences.get(&sequence).is_some_and(|held| !held.tree.is_empty())
    }

    /// Returns the position that token `token` must have for `sequence`, or `None` if its tree refuses the token.
    pub fn expected(&self, owners: &[Members], token: usize, sequence: i32) -> Option<i32> {
        if !self.has_tree(sequence) {
            let before = owners[..token].iter().filter(|members| members.contains(&sequence));
            return Some(self.next(sequence) + before.count() as i32);
        }
        let node = self.node(owners, token, sequence);
        let held = &self.sequences[&sequence];
        let fits = owners[token].len() == 1 && node < held.tree.len();
        fits.then(|| self.next(sequence) + held.chain_up(node).len() as i32 - 1)
    }

    /// Returns every reason to refuse a step.
    pub fn step_refusals(&self, owners: &[Members], positions: &[i32]) -> Vec<Status> {
        let mut refusals = Vec::new();
        if positions.is_empty() || positions.len() != owners.len() {
            refusals.push(Status::InvalidArgument);
        }
        for (token, &position) in positions.iter().enumerate().take(owners.len()) {
            for &sequence in &owners[token] {
                match self.expected(owners, token, sequence) {
                    None => refusals.push(Status::Step),
                    Some(expected) if expected != position => refusals.push(Status::Position),
                    Some(_) => {}
                }
            }
        }
        let all: BTreeSet<i32> = owners.iter().flatten().copied().collect();
        for sequence in all {
            let n = owners.iter().filter(|members| members.contains(&sequence)).count();
            if self.has_tree(sequence) && n < self.sequences[&sequence].pending() {
                refusals.push(Status::InvalidArgument);
            }
            if self.max_step_tokens.is_some_and(|most| n > most as usize) {
                refusals.push(Status::Capacity);
            }
        }
        if positions.len() as i32 > self.free() {
            refusals.push(Status::Capacity);
        }
        refusals
    }

    /// Returns the tokens that query `query` of a step sees, sorted.
    pub fn visible(
        &self,
        policy: LayerPolicy,
        owners: &[Members],
        ids: &[Id],
        query: usize,
    ) -> Vec<Id> {
        let mut tokens: Vec<Id> = Vec::new();
        for &sequence in &owners[query] {
            if let Some(held) = self.sequences.get(&sequence) {
                tokens.extend(&held.tokens);
            }
            let of_step = (0..=query).filter(|&token| owners[token].contains(&sequence));
            let of_step: Vec<Id> = of_step.map(|token| ids[token]).collect();
            if !self.has_tree(sequence) {
                tokens.extend(of_step);
                continue;
            }
            let held = &self.sequences[&sequence];
            for node in held.chain_up(self.node(owners, query, sequence)) {
                let fresh = || of_step[node - held.written()];
                tokens.push(held.tree[node].token.unwrap_or_else(fresh));
            }
        }
        let at = self.positions[ids[query]];
        tokens.retain(|&id| is_seen(policy, at, self.positions[id]));
        tokens.sort_unstable();
        tokens.dedup();
        tokens
    }

    pub fn commit(&mut self, owners: &[Members], ids: &[Id]) {
        for (members, &id) in owners.iter().zip(ids) {
            for &sequence in members {
                let held = self.sequences.entry(sequence).or_default();
                match held.tree.iter_mut().find(|node| node.token.is_none()) {
                    Some(node) => node.token = Some(id),
                    None => held.tokens.push(id),
                }
            }
        }
        self.declared = None;
        self.settle();
    }

    /// Returns the tokens of a sequence in a range of positions.
    fn in_range(&self, sequence: i32, positions: &Range<i32>) -> Vec<Id> {
        let tokens = self.sequences.get(&sequence).map_or(&[][..], |held| &held.tokens);
        let inside = |id: &Id| positions.contains(&self.positions[*id]);
        tokens.iter().copied().filter(inside).collect()
    }

    /// Returns every reason to refuse a copy. If windows have dropped tokens, also returns the least next position
    /// that `target` may then have.
    pub fn copy_refusals(
        &self,
        [source, target]: [i32; 2],
        positions: &Range<i32>,
        least: i32,
    ) -> Vec<Status> {
        let mut refusals = Vec::new();
        if self.has_tree(target) {
            refusals.push(Status::Step);
        }
        let copied = self.in_range(source, positions);
        if source == target || copied.is_empty() {
            return refusals;
        }
        let known = self.sequence(target).tokens;
        for id in &copied {
            let at = |other: &&Id| self.positions[**other] == self.positions[*id];
            if known.iter().find(at).is_some_and(|other| other != id) {
                refusals.push(Status::Position);
            }
        }
        let end = copied.last().map_or(0, |&id| self.positions[id] + 1);
        if end.max(self.next(target)) < least {
            refusals.push(Status::Position);
        }
        refusals
    }

    pub fn copy(&mut self, [source, target]: [i32; 2], positions: &Range<i32>) {
        let copied = self.in_range(source, positions);
        if source == target || copied.is_empty() {
            return;
        }
        let held = self.sequences.entry(target).or_default();
        held.tokens.extend(copied);
        held.tokens.sort_unstable_by_key(|&id| self.positions[id]);
        held.tokens.dedup();
        self.settle();
    }

    /// Returns every reason to refuse a removal.
    pub fn remove_refusals(&self, sequence: i32, gone: &Range<i32>, least: i32) -> Vec<Status> {
        let mut refusals = Vec::new();
        let stays = self.positions_of(sequence).into_iter().filter(|at| !gone.contains(at)).max();
        if let Some(last) = stays {
            if self.has_tree(sequence) {
                refusals.push(Status::Step);
            }
            if last + 1 < self.next(sequence) && last + 1 < least {
                refusals.push(Status::Position);
            }
        }
        refusals
    }

    pub fn remove(&mut self, sequence: i32, gone: &Range<i32>) {
        let Some(held) = self.sequences.get_mut(&sequence) else {
            return;
        };
        let held_something = !held.tokens.is_empty();
        held.tokens.retain(|&id| !gone.contains(&self.positions[id]));
        // The tree of an empty sequence begins at 0.
        if held.tokens.is_empty() && (held_something || gone.contains(&0)) {
            held.tree.clear();
        }
        self.settle();
    }

    pub fn propose_refusals(&self, sequence: i32, parents: &[i32]) -> Vec<Status> {
        let mut refusals = Vec::new();
        let held = self.sequence(sequence);
        let is_bad = |(offset, &parent): (usize, &i32)| {
            parent < -1 || parent >= (held.tree.len() + offset) as i32
        };
        if parents.is_empty() || parents.iter().enumerate().any(is_bad) {
            refusals.push(Status::InvalidArgument);
        }
        if held.pending() > 0 {
            refusals.push(Status::Step);
        }
        let waiting: usize = self.sequences.values().map(Sequence::pending).sum();
        if (waiting + parents.len()) as i32 > self.free() {
            refusals.push(Status::Capacity);
        }
        refusals
    }

    pub fn propose(&mut self, sequence: i32, parents: &[i32]) {
        let held = self.sequences.entry(sequence).or_default();
        held.tree.extend(parents.iter().map(|&parent| Node { parent, token: None }));
    }

    /// Returns every reason to refuse accepting these nodes.
    pub fn accept_refusals(&self, sequence: i32, accepted: &[i32]) -> Vec<Status> {
        let held = self.sequence(sequence);
        let mut before = -1;
        for &node in accepted {
            let known = usize::try_from(node).ok().and_then(|node| held.tree.get(node));
            match known {
                Some(known) if known.token.is_some() && known.parent == before => before = node,
                _ => return vec![Status::InvalidArgument],
            }
        }
        if held.tree.is_empty() {
            return vec![Status::InvalidArgument];
        }
        Vec::new()
    }

    pub fn accept(&mut self, sequence: i32, accepted: &[i32]) {
        if let Some(held) = self.sequences.get_mut(&sequence) {
            let tree = std::mem::take(&mut held.tree);
            held.tokens.extend(accepted.iter().filter_map(|&node| tree[node as usize].token));
        }
        self.settle();
    }

    pub fn keep(&mut self, sequence: i32) {
        self.sequences.retain(|&number, _| number == sequence);
    }

    pub fn clear(&mut self) {
        self.sequences.clear();
        self.declared = None;
    }

    fn settle(&mut self) {
        self.sequences.retain(|_, held| !held.tokens.is_empty() || !held.tree.is_empty());
    }
}
