//! Steps of recurrent layers on CUDA kernels.

use std::sync::Arc;

use etkv_core::bookkeeping::{AnchorSource, RecurrentPlan, RowSource};
use mlx_rs::{Array, Dtype};
use parking_lot::Mutex;

use super::convolve::{Activation, ConvolveInputs};
use super::groups::{parts, Group, Work};
use super::rows::{stored_tokens, take};
use super::sizes::Sizes;
use super::RecurrentRows;
use crate::error::Result;
use crate::kernels::can_run;
use crate::kernels::recurrent as kernels;
use crate::kernels::recurrent::{Operands, Stored, MAX_GROUP_ROWS, MAX_GROUP_TOKENS};
use crate::mlx::{array_of, on_device};

/// A plan as the kernels read it. The layers of a step share it.
struct PlanArrays {
    plan: Arc<RecurrentPlan>,
    /// For each width of a convolution, the columns before each token, and the number of slots that a buffer of these
    /// columns needs.
    before: Vec<(i32, Array, i32)>,
    /// The groups, set by the first scan; `Some(None)` if the kernel does not support them.
    groups: Option<Option<Groups>>,
}

/// The groups of a step, and the states that it computes.
#[derive(Clone)]
struct Groups {
    groups: Array,
    n_groups: i32,
    folds: Option<Array>,
    n_folds: i32,
    /// The number of slots that the rows need.
    n_rows: i32,
    n_anchors: i32,
}

/// The arrays of the last plan. Used only under the lock of MLX.
static LAST: Mutex<Option<PlanArrays>> = Mutex::new(None);

/// Calls `read` with the arrays of `plan`.
fn with_arrays<T>(
    plan: &Arc<RecurrentPlan>,
    read: impl FnOnce(&mut PlanArrays) -> Result<T>,
) -> Result<T> {
    let mut last = LAST.lock();
    let known = last.take().filter(|arrays| Arc::ptr_eq(&arrays.plan, plan));
    read(last.insert(known.unwrap_or_else(|| PlanArrays {
        plan: plan.clone(),
        before: Vec::new(),
        groups: None,
    })))
}

/// Computes a convolution, or returns `None` if the kernel does not support it. `stored` has the columns in slots,
/// `[1, 1, L, channels]`.
pub fn convolve(
    inputs: &ConvolveInputs,
    stored: Option<&Array>,
    plan: &Arc<RecurrentPlan>,
    out_dtype: Dtype,
) -> Result<Option<(Array, RecurrentRows)>> {
    let width = inputs.weight.dim(1);
    if width == 1 || !can_run()? {
        return Ok(None);
    }
    let n_slots = stored.map_or(0, |stored| stored.dim(2));
    let (before, needed) = with_arrays(plan, |arrays| arrays.before(width))?;
    if needed > n_slots {
        return Ok(None);
    }
    let call = kernels::Convolution {
        x: inputs.x,
        weight: inputs.weight,
        bias: inputs.bias,
        stored,
        before: &before,
        silu: inputs.activation == Activation::Silu,
        out_dtype,
    };
    let Some((out, columns)) = kernels::convolve(&call)? else {
        return Ok(None);
    };
    let columns = take(&columns, &stored_tokens(plan), 2)?;
    Ok(Some((out, RecurrentRows { rows: [Some(columns), None], anchors: None })))
}

/// Computes a scan, or returns `None` if the kernels do not support it.
pub fn scan(
    operands: &Operands,
    sizes: Sizes,
    stored: Stored,
    plan: &Arc<RecurrentPlan>,
    scale: f32,
    out_dtype: Dtype,
) -> Result<Option<(Array, RecurrentRows)>> {
    let Sizes { k_heads, k_dim, v_dim, .. } = sizes;
    if sizes.decays > 1 || !kernels::takes(k_dim, v_dim, sizes.heads())? {
        return Ok(None);
    }
    let Some(groups) = with_arrays(plan, PlanArrays::groups)? else {
        return Ok(None);
    };
    let slots = |rows: Option<&Array>| rows.map_or(0, |rows| rows.dim(2));
    let n_rows = slots(stored.keys).min(slots(stored.updates));
    if groups.n_rows > n_rows || groups.n_anchors > slots(stored.anchors) {
        return Ok(None);
    }
    let folds = match &groups.folds {
        Some(blocks) => {
            let Some(folds) = kernels::fold(&stored, k_dim, v_dim, blocks, groups.n_folds)? else {
                return Ok(None);
            };
            Some(folds)
        }
        None => None,
    };
    let call = kernels::Scan {
        n_tokens: plan.n_tokens() as i32,
        k_heads,
        heads: sizes.heads(),
        k_dim,
        v_dim,
        operands: *operands,
        stored,
        folds: folds.as_ref(),
        groups: &groups.groups,
        n_groups: groups.n_groups,
        scale,
        out_dtype,
    };
    let Some(scanned) = kernels::scan(&call)? else {
        return Ok(None);
    };
    let tokens = stored_tokens(plan);
    let rows = [Some(take(&scanned.keys, &tokens, 2)?), Some(take(&scanned.updates, &tokens, 2)?)];
    let kept = plan.folds.iter().zip(0..).filter(|(slot, _)| slot.is_some());
    let kept: Vec<i32> = kept.map(|(_, fold)| fold).collect();
    let anchors = match folds {
        Some(folds) if !kept.is_empty() => Some(take(&folds, &kept, 2)?),
        _ => None,
    };
    Ok(Some((scanned.out, RecurrentRows { rows, anchors })))
}

impl PlanArrays {
    /// Returns the columns before each token in the kernel's encoding, and the number of slots that they need.
    fn before(&mut self, width: i32) -> Result<(Array, i32)> {
        if let Some((_, before, needed)) = self.before.iter().find(|(of, ..)| *of == width) {
            return Ok((before.clone(), *needed));
        }
        let sources = columns_before(&self.plan, width as usize - 1);
        let needed = slots_needed(&sources);
        let array = array_of(&sources, &[self.plan.n_tokens() as i32, width - 1])?;
        let array = if sources.is_empty() { array } else { on_device(&array)? };
        self.before.push((width, array.clone(), needed));
        Ok((array, needed))
    }

    /// Returns the groups of the plan, if the kernel supports them.
    fn groups(&mut self) -> Result<Option<Groups>> {
        if let Some(groups) = &self.groups {
            return Ok(groups.clone());
        }
        let groups = match described(&self.plan)? {
            Some(Described { groups, n_groups, folds, n_folds, n_rows, n_anchors }) => {
                let of = |ints: &[i32]| on_device(&array_of(ints, &[ints.len() as i32])?);
                let folds = match n_folds {
                    0 => None,
                    _ => Some(of(&folds)?),
                };
                let groups = of(&groups)?;
                Some(Groups { groups, n_groups, folds, n_folds, n_rows, n_anchors })
            }
            None => None,
        };
        self.groups = Some(groups.clone());
        Ok(groups)
    }
}

/// Returns the number of slots that a buffer needs to contain all `slots`. Negative numbers are not slots.
fn slots_needed(slots: &[i32]) -> i32 {
    slots.iter().max().map_or(0, |&slot| slot.max(-1).saturating_add(1))
}

/// Returns for each token the `n` columns before it: a slot, -1 for zeros, or `-2 - token`.
fn columns_before(plan: &RecurrentPlan, n: usize) -> Vec<i32> {
    let mut sources = Vec::with_capacity(plan.n_tokens() * n);
    for chain in &plan.chains {
        let rows = &chain.rows[chain.rows.len().saturating_sub(n)..];
        let mut columns = vec![-1; n - rows.len()];
        for row in rows {
            columns.push(match *row {
                RowSource::Slot(slot) => slot,
                RowSource::Token(token) => -2 - token as i32,
            });
        }
        columns.extend(chain.tokens.clone().map(|token| -2 - token as i32));
        for at in 0..chain.tokens.len() {
            sources.extend_from_slice(&columns[at..at + n]);
        }
    }
    sources
}

/// The groups of a plan, encoded as `recurrent.cuh` requires.
#[derive(Debug, PartialEq)]
struct Described {
    groups: Vec<i32>,
    n_groups: i32,
    folds: Vec<i32>,
    n_folds: i32,
    /// The number of slots that the rows need.
    n_rows: i32,
    n_anchors: i32,
}

/// Encodes a plan. Returns `None` unless all rows before the tokens are in slots and all groups are small.
fn described(plan: &RecurrentPlan) -> Result<Option<Described>> {
    let mut all: Vec<Group> = Vec::new();
    let mut folds = Vec::new();
    let mut n_folds = 0;
    let (mut n_rows, mut n_anchors) = (0, 0);
    for work in parts(plan, MAX_GROUP_TOKENS)? {
        match work {
            Work::Groups(groups) => all.extend(groups),
            Work::Fold { anchor, rows, fold } => {
                let anchor = state_of(anchor);
                let Some(slots) = slots_of(&rows).filter(|_| anchor >= -1) else {
                    return Ok(None);
                };
                n_rows = n_rows.max(slots_needed(&slots));
                n_anchors = n_anchors.max(slots_needed(&[anchor]));
                if fold != n_folds || slots.len() != MAX_GROUP_ROWS {
                    return Ok(None);
                }
                folds.push(anchor);
                folds.extend(slots);
                n_folds += 1;
            }
            Work::Chain(_) => return Ok(None),
        }
    }
    let mut groups = vec![0; all.len()];
    for (at, group) in all.iter().enumerate() {
        let anchor = state_of(group.anchor);
        let Some(slots) = slots_of(&group.rows) else {
            return Ok(None);
        };
        n_rows = n_rows.max(slots_needed(&slots));
        n_anchors = n_anchors.max(slots_needed(&[anchor]));
        if group.tokens.len() > MAX_GROUP_TOKENS || slots.len() > MAX_GROUP_ROWS {
            return Ok(None);
        }
        groups[at] = groups.len() as i32;
        groups.extend([anchor, slots.len() as i32, group.tokens.len() as i32]);
        groups.extend(slots);
        for ((token, parent), seen) in group.tokens.iter().zip(&group.parents).zip(group.seen()) {
            let bits = seen.iter().zip(0..).map(|(&sees, other)| i32::from(sees) << other);
            let parent = parent.map_or(-1, |parent| parent as i32);
            groups.extend([*token as i32, parent, bits.sum()]);
        }
    }
    let n_groups = all.len() as i32;
    let n_folds = n_folds as i32;
    Ok(Some(Described { groups, n_groups, folds, n_folds, n_rows, n_anchors }))
}

/// Encodes the source of a state: its slot, -1 for zeros, or `-2 - fold`.
fn state_of(anchor: AnchorSource) -> i32 {
    match anchor {
        AnchorSource::Zero => -1,
        AnchorSource::Slot(slot) => slot,
        AnchorSource::Fold(fold) => -2 - fold as i32,
    }
}

/// Returns the slots of rows, or `None` if a row is not in a slot.
fn slots_of(rows: &[RowSource]) -> Option<Vec<i32>> {
    let slot = |row: &RowSource| match *row {
        RowSource::Slot(slot) => (slot >= 0).then_some(slot),
        RowSource::Token(_) => None,
    };
    rows.iter().map(slot).collect()
}

#[cfg(test)]
mod tests {
    use etkv_core::bookkeeping::Chain;

    use super::*;

    fn chain(tokens: std::ops::Range<usize>, position: i32, rows: Vec<RowSource>) -> Chain {
        let base = position / 64 * 64;
        let anchor = if base == 0 { AnchorSource::Zero } else { AnchorSource::Slot(1) };
        Chain { tokens, position, rows, anchor, base, folds: 0..0 }
    }

    fn slots(range: std::ops::Range<i32>) -> Vec<RowSource> {
        range.map(RowSource::Slot).collect()
    }

    #[test]
    fn columns_before_tokens_are_slots_zeros_and_tokens() {
        let chains = vec![
            chain(0..2, 1, slots(7..8)),
            chain(2..3, 2, vec![RowSource::Token(0), RowSource::Token(1)]),
        ];
        let plan = RecurrentPlan { chains, ..RecurrentPlan::default() };
        let columns = columns_before(&plan, 2);
        assert_eq!(columns, [-1, 7, 7, -2, -2, -3]);
        assert_eq!(slots_needed(&columns), 8);
        assert_eq!(slots_needed(&[-1, -5]), 0);
    }

    #[test]
    fn trees_are_groups_whose_tokens_name_their_ancestors() {
        let before = slots(10..12);
        let mut branch = before.clone();
        branch.push(RowSource::Token(0));
        let chains = vec![chain(0..2, 66, before), chain(2..3, 67, branch), chain(3..4, 0, vec![])];
        let plan = RecurrentPlan { chains, ..RecurrentPlan::default() };
        let found = described(&plan).unwrap().unwrap();
        let first = [1, 2, 3, 10, 11, 0, -1, 0b1, 1, 0, 0b11, 2, 0, 0b101];
        let second = [-1, 0, 1, 3, -1, 0b1];
        let expected = [&[2, 2 + first.len() as i32][..], &first, &second].concat();
        assert_eq!((found.groups, found.n_groups), (expected, 2));
        assert_eq!((found.folds, found.n_folds), (vec![], 0));
        assert_eq!((found.n_rows, found.n_anchors), (12, 2));
    }

    #[test]
    fn a_boundary_is_a_fold_of_the_rows_before_it() {
        let mut at_boundary = chain(0..1, 128, slots(0..64));
        (at_boundary.base, at_boundary.folds) = (64, 0..1);
        let plan = RecurrentPlan {
            chains: vec![at_boundary],
            folds: vec![Some(3)],
            ..RecurrentPlan::default()
        };
        let found = described(&plan).unwrap().unwrap();
        assert_eq!(found.groups, [1, -2, 0, 1, 0, -1, 0b1]);
        let rows: Vec<i32> = (0..64).collect();
        assert_eq!((found.folds, found.n_folds), ([&[1], &rows[..]].concat(), 1));
        assert_eq!((found.n_rows, found.n_anchors), (64, 2));
    }

    #[test]
    fn long_chains_and_rows_of_the_step_are_left_to_mlx() {
        let long = RecurrentPlan {
            chains: vec![chain(0..MAX_GROUP_TOKENS + 1, 0, vec![])],
            ..RecurrentPlan::default()
        };
        assert!(described(&long).unwrap().is_none());
    }
}
