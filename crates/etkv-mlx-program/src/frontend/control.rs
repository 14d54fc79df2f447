//! Decodes instructions that contain chains: a choice between two chains, and a loop over the elements of an axis.

use std::collections::HashSet;

use crate::error::{fail, Result};
use crate::fb;
use crate::ir::{Chain, Instruction, Op, Out, Scan, Value};
use crate::ops::slots::{SlotValues, Slots};

/// Decodes the chain with this number.
type Inner<'a> = dyn FnMut(&mut Slots, usize) -> Result<Chain> + 'a;

/// Decodes a choice between two chains. A tensor slot is a result if both chains write it, or if it has a
/// value already and one chain overwrites it. An integer slot that a chain overwrites is undefined
/// afterwards.
pub fn decode_if(
    slots: &mut Slots,
    instruction: fb::Instruction,
    inner: &mut Inner<'_>,
) -> Result<Vec<Instruction>> {
    let Some(node) = instruction.op_as_if_node() else {
        fail!(Program, "IfNode is empty");
    };
    let cond = slots.int(node.cond())?;
    let before = slots.held().clone();
    let mut then = inside(slots, node.then_chain_idx() as usize, inner)?;
    let after_then = slots.exchange(before.clone());
    let mut otherwise = inside(slots, node.else_chain_idx() as usize, inner)?;
    let after_else = slots.held().clone();

    let mut kept = unchanged(&before, &[&after_then, &after_else]);
    let mut changed = Vec::new();
    for (slot, of_then) in &after_then.tensors {
        let Some(of_else) = after_else.tensors.get(slot) else { continue };
        if !kept.tensors.contains_key(slot) {
            then.outputs.push(Out::Tensor(*of_then));
            otherwise.outputs.push(Out::Tensor(*of_else));
            changed.push(*slot);
        }
    }
    let n = changed.len() as u32;
    let first = slots.new_values(n);
    kept.tensors.extend(changed.into_iter().zip((first.0..).map(Value)));
    slots.exchange(kept);
    if n == 0 {
        return Ok(Vec::new());
    }
    let op = Op::If { cond, then: Box::new(then), otherwise: Box::new(otherwise) };
    Ok(vec![Instruction { op, out: Out::Tensors(first, n) }])
}

/// Decodes a loop. The body's outputs and carried values exist afterwards. Other values that the body writes do not.
pub fn decode_scan(
    slots: &mut Slots,
    instruction: fb::Instruction,
    inner: &mut Inner<'_>,
) -> Result<Vec<Instruction>> {
    let Some(node) = instruction.op_as_scan_node() else {
        fail!(Program, "ScanNode is empty");
    };
    let (n_originals, n_sliced) = (node.originals().len(), node.sliced().len());
    if n_originals == 0 || n_sliced != n_originals {
        fail!(Program, "expected one slice for each tensor, got {n_sliced} for {n_originals}");
    }
    let read = |slots: &Slots, tids: flatbuffers::Vector<'_, fb::Tid>| {
        tids.iter().map(|tid| slots.read(tid)).collect::<Result<Vec<_>>>()
    };
    let originals = read(slots, node.originals())?;
    let carried = read(slots, node.carry())?;
    let before = slots.held().clone();
    let sliced = write(slots, node.sliced())?;
    let inside_of = write(slots, node.carry())?;
    let Ok(index) = usize::try_from(node.body_chain_idx()) else {
        fail!(Program, "chain {} is the body of a loop", node.body_chain_idx());
    };
    let mut body = inside(slots, index, inner)?;
    let after = slots.held().clone();
    for tid in node.outputs().iter().chain(node.carry().iter()) {
        body.outputs.push(Out::Tensor(slots.read(tid)?));
    }

    let mut kept = unchanged(&before, &[&after]);
    let known: Vec<u32> =
        [node.carry(), node.sliced()].iter().flatten().map(fb::Tid::idx).collect();
    refuse_hidden_state(&before, &kept, &body, &known)?;
    let n_stacked = node.outputs().len();
    let n = (n_stacked + carried.len()) as u32;
    let first = slots.new_values(n);
    // An output in the slot of a carried value hides the carried value.
    let results = node.outputs().iter().chain(node.carry().iter()).zip((first.0..).map(Value));
    for (tid, value) in results.collect::<Vec<_>>().into_iter().rev() {
        kept.tensors.insert(tid.idx(), value);
    }
    slots.exchange(kept);
    if n == 0 {
        return Ok(Vec::new());
    }
    let scan = Scan {
        axis: node.scan_axis(),
        originals,
        sliced,
        carried,
        inside: inside_of,
        n_stacked,
        body,
    };
    Ok(vec![Instruction { op: Op::Scan(Box::new(scan)), out: Out::Tensors(first, n) }])
}

/// Decodes a chain that is inside an instruction.
fn inside(slots: &mut Slots, index: usize, inner: &mut Inner<'_>) -> Result<Chain> {
    let chain = inner(slots, index)?;
    if chain.instructions.iter().any(|made| made.op.writes_cache()) {
        fail!(Unsupported, "chain {index} writes the cache, but does not run exactly once a step");
    }
    Ok(chain)
}

/// Assigns a new value to each slot.
fn write(slots: &mut Slots, tids: flatbuffers::Vector<'_, fb::Tid>) -> Result<Vec<Value>> {
    tids.iter()
        .map(|tid| match slots.write(tid)? {
            Out::Tensor(value) => Ok(value),
            _ => fail!(Internal, "a slot of a tensor became an integer"),
        })
        .collect()
}

/// Returns the slots that have the same value in all of these states.
fn unchanged(before: &SlotValues, after: &[&SlotValues]) -> SlotValues {
    let mut same = before.clone();
    same.tensors
        .retain(|slot, value| after.iter().all(|after| after.tensors.get(slot) == Some(value)));
    same.ints.retain(|slot, value| after.iter().all(|after| after.ints.get(slot) == Some(value)));
    same
}

/// Refuses a body that overwrites a slot that it also reads, unless the slot is declared as carried: without
/// the declaration, the next run of the body would read another value than the first run. `known` are the
/// declared slots.
fn refuse_hidden_state(
    before: &SlotValues,
    unchanged: &SlotValues,
    body: &Chain,
    known: &[u32],
) -> Result<()> {
    let tensors: HashSet<Value> = body.uses().collect();
    for (slot, value) in &before.tensors {
        let is_changed = !unchanged.tensors.contains_key(slot) && !known.contains(slot);
        if is_changed && tensors.contains(value) {
            fail!(Program, "a loop changes tensor {slot}, which it reads, and does not carry it");
        }
    }
    let ints: HashSet<_> = body.instructions.iter().flat_map(|made| made.op.int_reads()).collect();
    for (slot, value) in &before.ints {
        if !unchanged.ints.contains_key(slot) && ints.contains(value) {
            fail!(Unsupported, "a loop changes value {slot}, which it reads");
        }
    }
    Ok(())
}
