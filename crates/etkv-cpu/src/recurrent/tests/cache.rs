//! A simple cache of one text: rows and anchors in slots, and the plans of steps.

use std::collections::BTreeMap;
use std::sync::Arc;

use etkv_core::bookkeeping::{AnchorSource, Chain, RecurrentPlan, RowSource, Slots, BLOCK};
use etkv_core::{KvFormat, RecurrentRows, RecurrentSpec};

use crate::attention::synthetic::Random;
use crate::memory::Memory;
use crate::store::view::{Plane, View};
use crate::tensor::Tensor;

/// Slots with rows of `heads` heads of `dim` numbers.
#[derive(Clone)]
struct Buffer {
    heads: usize,
    dim: usize,
    slots: Vec<Vec<f32>>,
}

impl Buffer {
    fn new(heads: usize, dim: usize) -> Self {
        Self { heads, dim, slots: Vec::new() }
    }

    /// Returns a view whose memory ends with the last row, so that reads past it are detected.
    fn view(&self) -> View {
        let (offset, bytes) = (64, 4 * self.dim);
        let mut memory = Memory::zeroed(offset + self.slots.len() * self.heads * bytes).unwrap();
        let rows = memory.bytes_mut()[offset..].chunks_exact_mut(4);
        rows.zip(self.slots.iter().flatten())
            .for_each(|(to, x)| to.copy_from_slice(&x.to_le_bytes()));
        let plane = Plane {
            memory: Arc::new(memory),
            offset,
            slot_stride: self.heads * bytes,
            head_stride: bytes,
        };
        View {
            format: KvFormat::F32,
            n_kv_heads: self.heads,
            head_dim: self.dim,
            stored_dim: self.dim,
            n_slots: self.slots.len(),
            planes: [Some(plane), None, None],
        }
    }

    fn set(&mut self, slot: i32, row: Vec<f32>) {
        let slot = slot as usize;
        if self.slots.len() <= slot {
            // Unused slots are NaN, so that reads of them are detected.
            self.slots.resize(slot + 1, vec![f32::NAN; self.heads * self.dim]);
        }
        self.slots[slot] = row;
    }
}

/// Returns the `n` rows `[heads, dim]` of a tensor `[1, heads, n, dim]`.
pub fn by_token(tensor: &Tensor) -> Vec<Vec<f32>> {
    let [_, heads, n, dim] = tensor.shape().map(|size| size as usize);
    let values = tensor.to_f32();
    let row = |at: usize, head: usize| &values[(head * n + at) * dim..][..dim];
    (0..n).map(|at| (0..heads).flat_map(|head| row(at, head).to_vec()).collect()).collect()
}

/// Returns the parents of `n` tokens that continue the text.
pub fn in_a_row(n: usize) -> Vec<Option<usize>> {
    (0..n).map(|token| token.checked_sub(1)).collect()
}

/// Returns the parents of `n` tokens. One token in `one_in` branches off from an earlier token of the step,
/// and one in `one_in` from the end of the text.
pub fn tree(n: usize, one_in: usize, random: &mut Random) -> Vec<Option<usize>> {
    let parent = |token: usize| match random.below(one_in) {
        0 => (token > 0).then(|| random.integer(0, token - 1)),
        1 => None,
        _ => token.checked_sub(1),
    };
    (0..n).map(parent).collect()
}

/// Returns the tokens from the end of the text to a token.
pub fn path_to(token: usize, parents: &[Option<usize>]) -> Vec<usize> {
    let mut path = vec![token];
    while let Some(parent) = parents[path[0]] {
        path.insert(0, parent);
    }
    path
}

#[derive(Clone)]
pub struct Cache {
    rows: [Option<Buffer>; 2],
    anchors: Option<Buffer>,
    /// The slot of each position.
    pub slots: Vec<i32>,
    /// The slot of each anchor, keyed by position.
    pub anchor_slots: BTreeMap<usize, i32>,
    /// The number of columns before a token that a convolution reads.
    reach: usize,
    next: [i32; 2],
}

impl Cache {
    pub fn of_scan(k_heads: usize, k_dim: usize, heads: usize, row: usize, state: usize) -> Self {
        let rows = [Some(Buffer::new(k_heads, k_dim)), Some(Buffer::new(heads, row))];
        Self { rows, anchors: Some(Buffer::new(heads, state)), ..Self::of_convolution(1, 3) }
    }

    pub fn of_convolution(channels: usize, reach: usize) -> Self {
        Self {
            rows: [Some(Buffer::new(1, channels)), None],
            anchors: None,
            slots: Vec::new(),
            anchor_slots: BTreeMap::new(),
            reach,
            next: [0; 2],
        }
    }

    /// Removes all rows and anchors after position `n`.
    pub fn rewind(&mut self, n: usize) {
        self.slots.truncate(n);
        // The state after `n` tokens is still valid.
        self.anchor_slots.retain(|&at, _| at <= n);
    }

    /// Plans a step of tokens with these parents, where `None` is the end of the text. Stored rows and
    /// anchors get slots in a random order.
    pub fn plan(&mut self, parents: &[Option<usize>], random: &mut Random) -> Planned {
        let (start, block) = (self.slots.len(), BLOCK as usize);
        let mut paths: Vec<Vec<usize>> = Vec::new();
        for (token, parent) in parents.iter().enumerate() {
            let mut path = parent.map_or(Vec::new(), |parent| paths[parent].clone());
            path.push(token);
            paths.push(path);
        }
        let mut plan = RecurrentPlan::default();
        let mut folds = Vec::new();
        // The folds of the step, keyed by the token that needs the fold.
        let mut made = BTreeMap::new();
        let mut token = 0;
        while token < parents.len() {
            let mut end = token + 1;
            while end < parents.len() && parents[end] == Some(end - 1) {
                end += 1;
            }
            let path = &paths[token];
            let position = start + path.len() - 1;
            // The last anchor on the path, which is one of this step or one of the text.
            let of_step = path[..path.len() - 1].iter().rev().find_map(|t| made.get(t).copied());
            let parent = parents[token];
            let sibling =
                made.iter().find(|(&t, &(base, _))| parents[t] == parent && base == position);
            let sibling = sibling.map(|(_, &made)| made).filter(|_| random.integer(0, 1) == 0);
            let (base, anchor) = match sibling.or(of_step) {
                // A convolution has no anchors.
                _ if self.anchors.is_none() => (position / block * block, AnchorSource::Zero),
                Some((base, fold)) => {
                    if base == position {
                        made.insert(token, (base, fold));
                    }
                    (base, AnchorSource::Fold(fold))
                }
                None => match self.anchor_slots.range(..=position.min(start)).next_back() {
                    Some((&base, &slot)) => (base, AnchorSource::Slot(slot)),
                    None => (0, AnchorSource::Zero),
                },
            };
            let first =
                base.min(position.saturating_sub(random.integer(self.reach, self.reach + 3)));
            let rows = (first..position).map(|at| match at.checked_sub(start) {
                Some(at) => RowSource::Token(path[at]),
                None => RowSource::Slot(self.slots[at]),
            });
            let first_fold = folds.len();
            let last = position + end - token - 1;
            for boundary in (base + block..=last).step_by(block) {
                made.insert(token + boundary - position, (boundary, folds.len()));
                folds.push((boundary, None));
            }
            plan.chains.push(Chain {
                tokens: token..end,
                position: position as i32,
                rows: rows.collect(),
                anchor,
                base: base as i32,
                folds: first_fold..folds.len(),
            });
            token = end;
        }
        Planned { plan, folds, made, paths }
    }

    fn slot(&mut self, which: usize, random: &mut Random) -> i32 {
        self.next[which] += random.integer(1, 2) as i32;
        self.next[which]
    }

    /// Adds to the plan that the step stores the rows of a path and the anchors on it.
    pub fn store(&mut self, planned: &mut Planned, path: &[usize], random: &mut Random) {
        let plan = &mut planned.plan;
        plan.stored = path.to_vec();
        let slots: Vec<i32> = path.iter().map(|_| self.slot(0, random)).collect();
        plan.rows = Slots::of(&slots);
        for token in path {
            if let Some(&(_, fold)) = planned.made.get(token) {
                self.next[1] += random.integer(1, 2) as i32;
                planned.folds[fold].1 = Some(self.next[1]);
            }
        }
        plan.folds = planned.folds.iter().map(|&(_, slot)| slot).collect();
        let anchors: Vec<i32> = plan.folds.iter().copied().flatten().collect();
        plan.anchors = Slots::of(&anchors);
    }

    pub fn spec(&self, planned: &Planned) -> RecurrentSpec<View> {
        let [a, b] = &self.rows;
        RecurrentSpec {
            rows: [a.as_ref().map(Buffer::view), b.as_ref().map(Buffer::view)],
            anchors: self.anchors.as_ref().map(Buffer::view),
            plan: Arc::new(planned.plan.clone()),
        }
    }

    /// Stores the rows and anchors that a step returned.
    pub fn commit(&mut self, planned: &Planned, rows: &RecurrentRows<Tensor>) {
        let slots = |slots: &Slots| match slots {
            Slots::Run(run) => run.clone().collect(),
            Slots::List(list) => list.clone(),
        };
        let row_slots = slots(&planned.plan.rows);
        for (buffer, rows) in self.rows.iter_mut().zip(&rows.rows) {
            let (Some(buffer), Some(rows)) = (buffer, rows) else { continue };
            row_slots.iter().zip(by_token(rows)).for_each(|(&slot, row)| buffer.set(slot, row));
        }
        self.slots.extend(row_slots);
        if let (Some(buffer), Some(anchors)) = (&mut self.anchors, &rows.anchors) {
            let kept = planned.folds.iter().filter_map(|&(at, slot)| Some((at, slot?)));
            for ((at, slot), anchor) in kept.zip(by_token(anchors)) {
                buffer.set(slot, anchor);
                self.anchor_slots.insert(at, slot);
            }
        }
    }

    /// Returns the bits of the rows of all positions, and of the anchors.
    pub fn bits(&self) -> (Vec<Vec<u32>>, BTreeMap<usize, Vec<u32>>) {
        let bits = |row: &Vec<f32>| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let of = |buffer: &Option<Buffer>, slot: i32| {
            buffer.as_ref().map_or(Vec::new(), |buffer| bits(&buffer.slots[slot as usize]))
        };
        let [a, b] = &self.rows;
        let rows = self.slots.iter().map(|&slot| [of(a, slot), of(b, slot)].concat());
        let anchors = self.anchor_slots.iter().map(|(&at, &slot)| (at, of(&self.anchors, slot)));
        (rows.collect(), anchors.collect())
    }
}

/// A step: its plan, the folds, and the path to each token within the step.
pub struct Planned {
    pub plan: RecurrentPlan,
    pub folds: Vec<(usize, Option<i32>)>,
    /// The position and the index of the fold that a token needs, keyed by the token.
    made: BTreeMap<usize, (usize, usize)>,
    pub paths: Vec<Vec<usize>>,
}
