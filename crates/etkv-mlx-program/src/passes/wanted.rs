//! In runs that need only the last row of logits, computes only that row of the logits' product, the widest one of a
//! program.
//!
//! Unlike [`last_token`](super::last_token), the choice is made in each run, because a program that verifies
//! candidates also reads prompts. Only the last product is narrowed, because its operands take little time in
//! comparison.

use super::rows::is_row_constant;
use super::{insert, logits_output, makers, only_readers};
use crate::ir::{Function, Graph, Instruction, Op, Out, Value};

/// Inserts a selection of the needed rows before the product of the logits. Changes nothing if the logits are not a
/// product of rows, or if anything except the output reads them.
pub fn leave_out_unwanted_rows(graph: &mut Graph) {
    let Some((index, x)) = product_of_logits(graph) else {
        return;
    };
    let rows = graph.new_value();
    graph.main.instructions[index].op.for_each_read(&mut |value| {
        if *value == x {
            *value = rows;
        }
    });
    insert(graph, vec![(index, Instruction { op: Op::WantedRows { x }, out: Out::Tensor(rows) })]);
}

/// Returns the product that computes the logits, and its rows.
fn product_of_logits(graph: &Graph) -> Option<(usize, Value)> {
    let (_, mut value) = logits_output(graph).ok()?;
    let (makers, readers) = (makers(graph), only_readers(graph));
    // The only use must be the output.
    if graph.main.uses().filter(|&used| used == value).count() != 1 {
        return None;
    }
    loop {
        let &index = makers.get(&value)?;
        let x = match graph.main.instructions[index].op {
            Op::Linear { x, bias, .. } | Op::LinearBlock { x, bias, residual: None, .. } => {
                let plain = bias.is_none_or(|bias| is_row_constant(graph, bias));
                return plain.then_some((index, x));
            }
            Op::QuantizedMatmul { x, w, .. } => {
                return graph.is_constant(w).then_some((index, x));
            }
            Op::Call { function: Function::PackedMatmul { .. }, ref tensors, .. } => {
                let (&x, weights) = tensors.split_first()?;
                let constant = weights.iter().all(|&weight| graph.is_constant(weight));
                return constant.then_some((index, x));
            }
            Op::Unary { x, .. } | Op::AsType { x, .. } | Op::Activation { x, by: None, .. } => x,
            // For example, the scale of capped logits.
            Op::Binary { a, b, .. } if is_row_constant(graph, b) => a,
            Op::Binary { a, b, .. } if is_row_constant(graph, a) => b,
            _ => return None,
        };
        if !readers.contains_key(&x) {
            return None;
        }
        value = x;
    }
}

#[cfg(test)]
mod tests;
