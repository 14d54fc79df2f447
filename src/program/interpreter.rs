//! Runs a chain of instructions.

use super::frame::Frame;
use super::ir::{Chain, Out, Value};
use super::ops::{self, Made};
use crate::error::{fail, Result};

/// A chain, and the instruction after which each value is not needed.
///
/// Values are dropped there, so that MLX can reuse their buffers.
pub struct Schedule {
    chain: Chain,
    dead_after: Vec<Vec<Value>>,
}

impl Schedule {
    /// Computes the last uses in a chain. Values below `n_kept` are constants and inputs, which
    /// stay.
    pub fn new(chain: Chain, n_kept: u32) -> Self {
        let mut dead_after = vec![Vec::new(); chain.instructions.len()];
        let mut seen = std::collections::HashSet::new();
        seen.extend(chain.tensor_outputs());
        for (index, instruction) in chain.instructions.iter().enumerate().rev() {
            let mut values = instruction.op.reads();
            values.extend(instruction.out.tensors());
            for value in values {
                if value.0 >= n_kept && seen.insert(value) {
                    dead_after[index].push(value);
                }
            }
        }
        Self { chain, dead_after }
    }

    /// Returns the chain.
    pub fn chain(&self) -> &Chain {
        &self.chain
    }

    /// Runs the chain in `frame`.
    pub fn run(&self, frame: &mut Frame) -> Result<()> {
        for (index, instruction) in self.chain.instructions.iter().enumerate() {
            let made = ops::run(&instruction.op, frame).map_err(|error| {
                error.at(format_args!("instruction {index}, {}", instruction.op.name()))
            })?;
            match (made, instruction.out) {
                (Made::Tensor(array), Out::Tensor(value)) => frame.set(value, array),
                (Made::Tensors(arrays), Out::Tensors(_, n)) if arrays.len() == n as usize => {
                    instruction.out.tensors().zip(arrays).for_each(|(v, a)| frame.set(v, a));
                }
                (Made::Int(number), Out::Int(value)) => frame.set_int(value, number),
                _ => fail!(Internal, "instruction {index} makes another kind of value"),
            }
            for &value in &self.dead_after[index] {
                frame.forget(value);
            }
        }
        Ok(())
    }
}
