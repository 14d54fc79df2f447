//! Runs chains.

mod inner;

use std::collections::HashSet;

use mlx_rs::Array;

use crate::dtype;
use crate::error::{fail, Result, Status};
use crate::ir::{Chain, Instruction, Op, Out, Value};
use crate::ops::frame::Frame;
use crate::ops::limits::check_made;
use crate::ops::{self, OpResult};

/// A chain, and the last instruction that uses each value.
///
/// Values are dropped after their last use, so that MLX can reuse their buffers.
pub struct Schedule {
    chain: Chain,
    dead_after: Vec<Vec<Value>>,
    /// The nested chains, each with the index of its instruction.
    inside: Vec<(usize, Vec<Schedule>)>,
}

impl Schedule {
    /// Computes the last uses in a chain. Values below `n_kept` are constants and inputs, which stay.
    pub fn new(chain: Chain, n_kept: u32) -> Self {
        Self::keeping(chain, |value| value.0 < n_kept)
    }

    /// Computes the last uses in a nested chain. Values from outside the chain stay.
    fn inner(chain: &Chain) -> Self {
        let made = chain.instructions.iter().flat_map(|instruction| instruction.out.tensors());
        let made: HashSet<Value> = made.collect();
        Self::keeping(chain.clone(), |value| !made.contains(&value))
    }

    fn keeping(chain: Chain, stays: impl Fn(Value) -> bool) -> Self {
        let mut dead_after = vec![Vec::new(); chain.instructions.len()];
        let mut seen = HashSet::new();
        seen.extend(chain.tensor_outputs());
        let mut inside = Vec::new();
        for (index, instruction) in chain.instructions.iter().enumerate().rev() {
            let mut values = instruction.op.reads();
            values.extend(instruction.out.tensors());
            for value in values {
                if !stays(value) && seen.insert(value) {
                    dead_after[index].push(value);
                }
            }
            match &instruction.op {
                Op::If { then, otherwise, .. } => {
                    inside.push((index, vec![Self::inner(then), Self::inner(otherwise)]));
                }
                Op::Scan(scan) => inside.push((index, vec![Self::inner(&scan.body)])),
                _ => {}
            }
        }
        inside.reverse();
        Self { chain, dead_after, inside }
    }

    /// Returns the chain.
    pub fn chain(&self) -> &Chain {
        &self.chain
    }

    /// Runs the chain in `frame`.
    pub fn run(&self, frame: &mut Frame) -> Result<()> {
        for (index, instruction) in self.chain.instructions.iter().enumerate() {
            let made = self.run_one(index, frame).map_err(|error| {
                let place = place(index, &instruction.op, frame, error.status());
                error.at(place)
            })?;
            self.check(&made, index, frame)?;
            // For a choice, the chain that ran has already set the limits.
            if !matches!(instruction.op, Op::If { .. }) {
                let limit = ops::bounds::limit(&instruction.op, frame);
                instruction.out.tensors().for_each(|value| frame.set_limit(value, limit));
            }
            match (made, instruction.out) {
                (OpResult::Tensor(array), Out::Tensor(value)) => frame.set(value, array),
                (OpResult::Tensors(arrays), Out::Tensors(_, n)) if arrays.len() == n as usize => {
                    instruction.out.tensors().zip(arrays).for_each(|(v, a)| frame.set(v, a));
                }
                (OpResult::Int(number), Out::Int(value)) => frame.set_int(value, number),
                _ => fail!(
                    Internal,
                    "instruction {index} returns another kind of value than declared"
                ),
            }
            for &value in &self.dead_after[index] {
                frame.forget(value);
            }
        }
        Ok(())
    }

    /// Checks the sizes of the results of an instruction.
    fn check(&self, made: &OpResult, index: usize, frame: &Frame) -> Result<()> {
        let op = &self.chain.instructions[index].op;
        let arrays = match made {
            OpResult::Tensor(array) => std::slice::from_ref(array),
            OpResult::Tensors(arrays) => &arrays[..],
            OpResult::Int(_) => &[],
        };
        arrays
            .iter()
            .try_for_each(|array| check_made(array, op, frame))
            .map_err(|error| error.at(format_args!("instruction {index}, {}", op.name())))
    }

    fn run_one(&self, index: usize, frame: &mut Frame) -> Result<OpResult> {
        let Instruction { op, out } = &self.chain.instructions[index];
        if !matches!(op, Op::If { .. } | Op::Scan(_)) {
            return ops::run(op, frame);
        }
        let found = self.inside.binary_search_by_key(&index, |(at, _)| *at);
        let chains = found.map_or(&[][..], |found| &self.inside[found].1);
        match (op, chains) {
            (Op::If { cond, .. }, chains) => inner::run_if(frame, *cond, chains, *out),
            (Op::Scan(scan), [body]) => inner::run_scan(frame, scan, body),
            _ => fail!(Internal, "instruction {index} has {} nested chains", chains.len()),
        }
    }
}

/// Returns the context of an error: the instruction, and the shapes of its operands if these may be the reason.
fn place(index: usize, op: &Op, frame: &Frame, status: Status) -> String {
    let mut text = format!("instruction {index}, {}", op.name());
    let is_of_shapes = matches!(
        status,
        Status::Backend | Status::Program | Status::Internal | Status::Unsupported
    );
    if !is_of_shapes || matches!(op, Op::If { .. } | Op::Scan(_)) {
        return text;
    }
    for (number, value) in op.reads().into_iter().enumerate() {
        let shape = frame.tensor(value).map_or_else(|_| String::from("nothing"), shape_of);
        text.push_str(if number == 0 { " of " } else { ", " });
        text.push_str(&shape);
    }
    text
}

fn shape_of(array: &Array) -> String {
    format!("{}{:?}", dtype::name(array.dtype()), array.shape())
}
