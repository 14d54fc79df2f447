//! A simple model of the positions that layers with one window keep of each sequence: a set of tokens.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use etkv_core::LayerPolicy;

use crate::model::{first_exact, is_seen, Model};
use crate::slots::Id;

/// Returns the maximum number of positions, apart from the sinks, that a query of a layer with a window or chunks
/// sees, and the number of sinks.
pub fn width(policy: LayerPolicy) -> (i32, i32) {
    match policy {
        LayerPolicy::Full => panic!("a layer of full history has no window"),
        LayerPolicy::Window { window, sinks } => (window, sinks),
        LayerPolicy::Chunk { chunk } => (chunk, 0),
    }
}

#[derive(Debug, Clone)]
pub struct WindowModel {
    policy: LayerPolicy,
    sinks: i32,
    max_step_tokens: i32,
    /// The maximum number of slots that one sequence needs.
    slots: i32,
    capacity: i32,
    held: BTreeMap<i32, BTreeSet<Id>>,
}

impl WindowModel {
    /// Returns the model of a layer with a window or chunks.
    pub fn new(policy: LayerPolicy, max_step_tokens: i32, capacity: i32) -> Self {
        let (window, sinks) = width(policy);
        let room = max_step_tokens.max(window / 4);
        let slots = (sinks + window - 1 + 2 * max_step_tokens + room).min(capacity);
        Self { policy, sinks, max_step_tokens, slots, capacity, held: BTreeMap::new() }
    }

    pub fn slots(&self) -> i32 {
        self.slots
    }

    pub fn add(&mut self, sequence: i32, ids: impl IntoIterator<Item = Id>) {
        self.held.entry(sequence).or_default().extend(ids);
    }

    /// Ends a step of this sequence. If another step of the maximum size might not fit, drops tokens. Keeps the
    /// tokens that the window or a rewind of one step needs.
    pub fn slide(&mut self, model: &Model, sequence: i32) {
        let Some(held) = self.held.get_mut(&sequence) else {
            return;
        };
        let room = self.slots - held.len() as i32;
        if self.slots < self.capacity && room < self.max_step_tokens {
            let at = model.next(sequence) - self.max_step_tokens;
            let first = (self.sinks..=at).find(|&position| is_seen(self.policy, at, position));
            let gone = self.sinks..first.unwrap_or(self.sinks);
            held.retain(|&id| !gone.contains(&model.position(id)));
        }
    }

    pub fn copy(&mut self, model: &Model, [source, target]: [i32; 2], range: &Range<i32>) {
        let held = self.held.get(&source).cloned().unwrap_or_default();
        self.add(target, held.into_iter().filter(|&id| range.contains(&model.position(id))));
    }

    /// Removes tokens that their sequences no longer have.
    pub fn settle(&mut self, model: &Model) {
        self.held.retain(|sequence, held| {
            let tokens = model.sequences().get(sequence).map_or(&[][..], |held| &held.tokens);
            let all: BTreeSet<Id> = tokens.iter().copied().collect();
            held.retain(|id| all.contains(id));
            !held.is_empty()
        });
    }

    pub fn holds(&self, sequence: i32, id: Id) -> bool {
        self.held.get(&sequence).is_some_and(|held| held.contains(&id))
    }

    /// Returns the least position at which the window of a query contains no dropped token of `range`.
    pub fn exact_from(&self, model: &Model, sequence: i32, range: &Range<i32>) -> i32 {
        let tokens = model.sequence(sequence).tokens;
        let gone = tokens.into_iter().filter(|&id| !self.holds(sequence, id));
        let positions = gone.map(|id| model.position(id)).filter(|at| range.contains(at));
        positions
            .filter(|&at| at >= self.sinks)
            .max()
            .map_or(0, |last| first_exact(self.policy, last))
    }
}
