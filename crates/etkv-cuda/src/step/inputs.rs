//! The inputs of a step, and their checks against a plan.

use crate::step::error::{fail, Result};
use crate::step::mask::KeyMask;

/// The inputs of a step for one layer group. T is the number of tokens: that of the plan, or fewer if all
/// groups have masks. The step writes keys and values to `slots`, and reads slots `0..n_keys`.
#[derive(Debug, Clone, Copy)]
pub struct StepInputs<'a> {
    /// `[T]`.
    pub ids: &'a [i32],
    /// `[T]`: the positions of the tokens in the sequence.
    pub positions: &'a [i32],
    /// `[T]`: the slots of the tokens, all different. Without a mask, attention assumes that the step's
    /// tokens are in slots `n_keys - T..n_keys`, in order.
    pub slots: &'a [i32],
    /// The number of slots that are read, including those of the step's tokens: T to the capacity of the
    /// pools.
    pub n_keys: usize,
    /// The keys that each token of the plan sees, if the group is [masked](crate::Plan::masked).
    pub mask: Option<&'a KeyMask>,
}

/// Returns an error if the inputs do not fit a plan of `tokens` tokens. `groups` has the capacity of each
/// group's pools, and whether the group is masked.
pub(crate) fn check_steps(
    steps: &[StepInputs],
    tokens: usize,
    groups: impl ExactSizeIterator<Item = (usize, bool)>,
) -> Result<()> {
    if steps.len() != groups.len() {
        fail!(Step, "a step of {} groups, expected {}", steps.len(), groups.len());
    }
    for (number, (step, (capacity, masked))) in steps.iter().zip(groups).enumerate() {
        check_step(step, tokens, capacity, masked).map_err(|error| match error {
            crate::Error::Step(text) if steps.len() > 1 => {
                crate::Error::Step(format!("group {number}: {text}"))
            }
            error => error,
        })?;
        let first = &steps[0];
        if (step.ids, step.positions) != (first.ids, first.positions) {
            fail!(Step, "group {number} and group 0 differ in their tokens");
        }
    }
    Ok(())
}

/// Returns an error unless `given` has `n` rows for each buffer that the host fills. `rows` lists the bytes
/// of a row of each buffer.
pub(crate) fn check_given(
    steps: &[StepInputs],
    given: &[&[u8]],
    rows: impl ExactSizeIterator<Item = usize>,
) -> Result<()> {
    if given.len() != rows.len() {
        fail!(Step, "rows of {} buffers, expected {}", given.len(), rows.len());
    }
    let n = steps.first().map_or(0, |step| step.ids.len());
    for (number, (bytes, row)) in given.iter().zip(rows).enumerate() {
        if bytes.len() != n * row {
            fail!(Step, "{} bytes of input {number}, expected {n} rows of {row}", bytes.len());
        }
    }
    Ok(())
}

/// Returns an error if the inputs do not fit a plan of `tokens` tokens over pools of `capacity` slots.
fn check_step(step: &StepInputs, tokens: usize, capacity: usize, masked: bool) -> Result<()> {
    let n = step.ids.len();
    if n != tokens && !(masked && (1..tokens).contains(&n)) {
        fail!(Step, "{n} ids, expected {tokens}{}", if masked { " or fewer" } else { "" });
    }
    for (name, given) in [("positions", step.positions), ("slots", step.slots)] {
        if given.len() != n {
            fail!(Step, "{} {name}, expected {n}", given.len());
        }
    }
    if !(n..=capacity).contains(&step.n_keys) {
        fail!(Step, "{} keys, expected {n} to {capacity}", step.n_keys);
    }
    for (t, &slot) in step.slots.iter().enumerate() {
        if !usize::try_from(slot).is_ok_and(|slot| slot < capacity) {
            fail!(Step, "slot {slot}, expected 0 to {}", capacity - 1);
        }
        if step.slots[..t].contains(&slot) {
            fail!(Step, "slot {slot} twice");
        }
    }
    match step.mask {
        None if masked => fail!(Step, "no mask, expected one"),
        Some(_) if !masked => fail!(Step, "a mask, expected none"),
        Some(mask) if mask.n_tokens() != tokens => {
            fail!(Step, "a mask of {} tokens, expected {tokens}", mask.n_tokens());
        }
        Some(mask) if mask.end() > step.n_keys => {
            fail!(Step, "a mask with key {}, expected keys below {}", mask.end() - 1, step.n_keys);
        }
        Some(mask) => match mask.blind().filter(|&token| token < n) {
            Some(token) => fail!(Step, "token {token} sees no key"),
            None => Ok(()),
        },
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
