//! The chains of a step, in the order of computation.

use std::collections::HashMap;

use etkv_core::bookkeeping::{AnchorSource, Chain, RecurrentPlan, RowSource, BLOCK};

use crate::error::{fail, Result};

/// Tokens that start from one state and see the same rows before them. They form a chain or a tree.
#[derive(Debug)]
pub struct Group {
    /// The state from which the tokens start.
    pub anchor: AnchorSource,
    /// The rows that all tokens see.
    pub rows: Vec<RowSource>,
    /// The tokens, ascending.
    pub tokens: Vec<usize>,
    /// The parent of each token, as an index in `tokens`.
    pub parents: Vec<Option<usize>>,
}

impl Group {
    /// Returns whether each token is the parent of the next one.
    pub fn is_chain(&self) -> bool {
        self.parents.iter().enumerate().all(|(at, &parent)| parent == at.checked_sub(1))
    }

    /// Returns, for each token, whether it sees each other token: a token sees its ancestors and itself.
    pub fn seen(&self) -> Vec<Vec<bool>> {
        let mut seen: Vec<Vec<bool>> = Vec::new();
        for (at, &parent) in self.parents.iter().enumerate() {
            let mut of =
                parent.map_or_else(|| vec![false; self.tokens.len()], |at| seen[at].clone());
            of[at] = true;
            seen.push(of);
        }
        seen
    }
}

/// A part of a step. It can be computed once the earlier parts have been computed.
#[derive(Debug)]
pub enum Work {
    /// Groups within a block, computed together.
    Groups(Vec<Group>),
    /// The chain with this index, which spans several blocks.
    Chain(usize),
    /// The state after a whole block of rows.
    Fold {
        /// The state before the block.
        anchor: AnchorSource,
        /// The rows of the block.
        rows: Vec<RowSource>,
        /// The index of the state in the plan's folds.
        fold: usize,
    },
}

/// Returns the parts of a step. A chain of more than `most` tokens is a separate part.
///
/// # Errors
/// [`Internal`](crate::Status::Internal) for an inconsistent plan.
pub fn parts(plan: &RecurrentPlan, most: usize) -> Result<Vec<Work>> {
    let (mut parts, mut pending) = (Vec::new(), Pending::default());
    let mut made = 0;
    for (index, chain) in plan.chains.iter().enumerate() {
        check(chain, made)?;
        let block = (chain.position - chain.base) as usize;
        let mut rows = chain.rows[chain.rows.len() - block..].to_vec();
        let mut anchor = chain.anchor;
        let mut folds = chain.folds.clone();
        made = folds.end.max(made);
        if block == BLOCK as usize {
            let Some(fold) = folds.next() else {
                fail!(Internal, "{chain:?} has no fold");
            };
            pending.flush(&mut parts);
            parts.push(Work::Fold { anchor, rows, fold });
            (anchor, rows) = (AnchorSource::Fold(fold), Vec::new());
        }
        if folds.is_empty() && chain.tokens.len() <= most {
            pending.add(chain, anchor, rows, &mut parts);
        } else {
            pending.flush(&mut parts);
            parts.push(Work::Chain(index));
        }
    }
    pending.flush(&mut parts);
    if made != plan.folds.len() {
        fail!(
            Internal,
            "expected the chains to compute the {} planned anchors, but they compute {made}",
            plan.folds.len()
        );
    }
    Ok(parts)
}

/// Checks the anchor and the folds of a chain. `made` is the number of folds that are computed before it.
fn check(chain: &Chain, made: usize) -> Result<()> {
    let block = chain.position.checked_sub(chain.base).filter(|n| (0..=BLOCK).contains(n));
    let is_boundary = chain.base >= 0 && chain.base % BLOCK == 0;
    let has_rows = block.is_some_and(|n| chain.rows.len() >= n as usize);
    let last = i64::from(chain.position) + chain.tokens.len() as i64 - 1;
    let folds = last / i64::from(BLOCK) - i64::from(chain.base) / i64::from(BLOCK);
    let has_anchor = match chain.anchor {
        AnchorSource::Zero => chain.base == 0,
        AnchorSource::Slot(_) => true,
        AnchorSource::Fold(fold) => fold < made,
    };
    let has_folds = chain.folds.len() as i64 == folds && (folds == 0 || chain.folds.start == made);
    if !is_boundary || !has_rows || !has_anchor || !has_folds {
        fail!(
            Internal,
            "tokens {:?} at position {} start from {:?} at {} with {} rows and folds {:?}",
            chain.tokens,
            chain.position,
            chain.anchor,
            chain.base,
            chain.rows.len(),
            chain.folds
        );
    }
    Ok(())
}

/// Groups whose states and rows are known, but whose results are not computed yet.
#[derive(Default)]
struct Pending {
    groups: Vec<Group>,
    /// The group of each token, and the token's index in that group.
    of: HashMap<usize, (usize, usize)>,
}

impl Pending {
    fn flush(&mut self, parts: &mut Vec<Work>) {
        if !self.groups.is_empty() {
            parts.push(Work::Groups(std::mem::take(&mut self.groups)));
            self.of.clear();
        }
    }

    fn add(
        &mut self,
        chain: &Chain,
        anchor: AnchorSource,
        mut rows: Vec<RowSource>,
        parts: &mut Vec<Work>,
    ) {
        let (group, parent) = match self.group(anchor, &rows) {
            Some(found) => found,
            None => {
                let needed = |row: &RowSource| match row {
                    RowSource::Token(token) => self.of.contains_key(token),
                    RowSource::Slot(_) => false,
                };
                if rows.iter().any(needed) {
                    self.flush(parts);
                }
                let rows = std::mem::take(&mut rows);
                self.groups.push(Group { anchor, rows, tokens: vec![], parents: vec![] });
                (self.groups.len() - 1, None)
            }
        };
        let mut parent = parent;
        for token in chain.tokens.clone() {
            let Group { tokens, parents, .. } = &mut self.groups[group];
            self.of.insert(token, (group, tokens.len()));
            parents.push(parent);
            parent = Some(tokens.len());
            tokens.push(token);
        }
    }

    /// Returns the group of a chain that starts from `anchor` and sees `rows`. Also returns the token of this group
    /// that the chain follows.
    fn group(&self, anchor: AnchorSource, rows: &[RowSource]) -> Option<(usize, Option<usize>)> {
        let of = |row: &RowSource| match row {
            RowSource::Token(token) => self.of.get(token).copied(),
            RowSource::Slot(_) => None,
        };
        let parent = rows.last().and_then(of);
        let inside = rows.iter().rev().take_while(|row| of(row).is_some()).count();
        let before = &rows[..rows.len() - inside];
        let fits = |group: &Group| group.anchor == anchor && group.rows == before;
        match parent {
            Some((group, at)) if fits(self.groups.get(group)?) => Some((group, Some(at))),
            Some(_) => None,
            None => Some((self.groups.iter().position(fits)?, None)),
        }
    }
}
