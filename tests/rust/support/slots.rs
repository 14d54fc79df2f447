//! Executes plans as a cache does, but on the ids of tokens instead of their rows.

use etkv_core::bookkeeping::{LayerGroupPlan, MaskPlan, Slots};

/// The unique number of a token.
pub type Id = usize;

/// The slots of one layer group.
#[derive(Clone)]
pub struct LayerGroupSlots {
    slots: Vec<Option<Id>>,
}

impl LayerGroupSlots {
    pub fn new(n: i32) -> Self {
        Self { slots: vec![None; n as usize] }
    }

    /// Writes the rows of a step.
    pub fn write(&mut self, plan: &LayerGroupPlan, ids: &[Id]) {
        let targets = distinct(&plan.write);
        assert_eq!(targets.len(), ids.len(), "a slot for each token");
        if let MaskPlan::Explicit(mask) = &plan.mask {
            assert_eq!((mask.n_tokens(), mask.n_slots()), (ids.len(), plan.read.len()));
        }
        for (&slot, &id) in targets.iter().zip(ids) {
            self.slots[slot] = Some(id);
        }
    }

    /// Moves rows. All rows are read before any row is written.
    pub fn relocate(&mut self, from: &Slots, to: &Slots) {
        let (from, to) = (distinct(from), distinct(to));
        assert_eq!(from.len(), to.len(), "a target for each source");
        assert!(from.iter().zip(&to).all(|(from, to)| from != to), "a row moves to its own slot");
        let gathered: Vec<Option<Id>> = from.iter().map(|&slot| self.slots[slot]).collect();
        // Afterwards, each token is in one slot only.
        from.iter().for_each(|&slot| self.slots[slot] = None);
        for (&slot, id) in to.iter().zip(gathered) {
            assert!(id.is_some(), "a row moves to slot {slot} that was never written");
            self.slots[slot] = id;
        }
    }

    /// Returns the token in each slot that was written and not moved away.
    pub fn ids(&self) -> &[Option<Id>] {
        &self.slots
    }

    /// Returns the slot of a token.
    pub fn slot_of(&self, id: Id) -> Option<usize> {
        self.slots.iter().position(|&at| at == Some(id))
    }

    /// Returns rows to restore later.
    pub fn saved(&self, slots: std::ops::Range<i32>) -> Vec<Option<Id>> {
        self.slots[slots.start as usize..slots.end as usize].to_vec()
    }

    /// Restores saved rows.
    pub fn restore(&mut self, start: i32, saved: &[Option<Id>]) {
        self.slots[start as usize..][..saved.len()].copy_from_slice(saved);
    }

    /// Returns the tokens that query `query` of `n_queries` sees by a plan, sorted.
    pub fn shown(&self, plan: &LayerGroupPlan, query: usize, n_queries: usize) -> Vec<Id> {
        let read = &self.slots[plan.read.start as usize..plan.read.end as usize];
        let is_shown = |offset: usize| match &plan.mask {
            MaskPlan::None => true,
            // The mask is aligned at the lower right: the last query sees all slots.
            MaskPlan::Causal => offset + (n_queries - 1 - query) < read.len(),
            MaskPlan::Explicit(mask) => mask.sees(query, offset),
        };
        let mut shown: Vec<Id> = read
            .iter()
            .enumerate()
            .filter(|(offset, _)| is_shown(*offset))
            .map(|(offset, id)| {
                let slot = plan.read.start as usize + offset;
                id.unwrap_or_else(|| panic!("slot {slot} is shown and was never written"))
            })
            .collect();
        shown.sort_unstable();
        shown
    }
}

/// Returns the slots as indices, and checks that they are distinct.
fn distinct(slots: &Slots) -> Vec<usize> {
    let list: Vec<usize> = slots.iter().map(|slot| slot as usize).collect();
    assert_eq!(list.len(), slots.len());
    let mut sorted = list.clone();
    sorted.sort_unstable();
    sorted.dedup();
    assert_eq!(sorted.len(), list.len(), "a slot occurs twice: {list:?}");
    list
}
