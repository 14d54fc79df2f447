//! Narrows a program so that it computes only the last token's row of logits.
//!
//! The host reads one row of a prompt's logits. So the last and widest product needs only one row. The same is true
//! for everything before it that is computed row by row, back to the last layer's attention. A program that was
//! exported to return the last row has a slice before that product. The operands of such a slice can always be
//! narrowed.
//!
//! Attention may be the op with the cache, or MLX's function on a cache in the graph. Only queries are narrowed,
//! because all keys and values are written.

use std::collections::{HashMap, HashSet};

use super::rows::Rows;
use super::{insert, readers};
use crate::error::{fail, Result};
use crate::ir::{Function, Graph, Index, InputSpec, Instruction, Int, Op, Out, Value};

/// Removes rows that nothing reads. With `last_only`, the [logits](logits_output) `[1, T, ...]` become `[1, 1, ...]`.
/// Other outputs keep all rows.
///
/// # Errors
/// [`Unsupported`](etkv::Status::Unsupported) with `last_only` if no output may be logits, or the logits are
/// not computed row by row.
pub fn narrow(graph: &mut Graph, last_only: bool) -> Result<()> {
    let rows = Rows::find(graph);
    let mut logits = None;
    if last_only {
        let (_, output) = logits_output(graph)?;
        // A value with one row is already the last row.
        logits = (!rows.is_single(output)).then_some(output);
    }
    let narrow = narrowed(graph, logits, &rows);
    if logits.is_some_and(|logits| !narrow.contains(&logits)) {
        fail!(
            Unsupported,
            "cannot return logits of the last token only: they are not computed \
         row by row; load with logits=all"
        );
    }
    rewrite(graph, &narrow, &rows);
    Ok(())
}

/// Returns the index and the value of the logits: the first output that may be logits, or an output that products
/// compute from that one. In some programs hidden states come before their logits.
///
/// # Errors
/// [`Unsupported`](etkv::Status::Unsupported) if no output may be logits.
pub fn logits_output(graph: &Graph) -> Result<(usize, Value)> {
    let outputs = possible_logits(graph);
    let Some(&(mut found)) = outputs.first() else {
        fail!(
            Unsupported,
            "cannot return only the last row of logits: the program's outputs are numbers, \
         and none has rows; load with logits=all"
        );
    };
    loop {
        let products = products_of(graph, found.1);
        match outputs.iter().find(|(_, value)| products.contains(value)) {
            Some(&next) => found = next,
            None => return Ok(found),
        }
    }
}

/// Returns the outputs that may be logits. Other outputs are integers and elements of inputs. Some exporters return
/// such outputs from each call, for example the lengths of caches in the graph.
fn possible_logits(graph: &Graph) -> Vec<(usize, Value)> {
    let inputs: HashSet<Value> = graph
        .inputs
        .iter()
        .filter_map(|input| match input {
            InputSpec::Tensor { value, shape, .. } => (shape.len() == 1).then_some(*value),
            InputSpec::Int(_) => None,
        })
        .collect();
    let elements: HashSet<Value> = graph
        .main
        .instructions
        .iter()
        .filter_map(|instruction| match (&instruction.op, instruction.out) {
            (Op::Take { x, index: Index::One(_), .. }, Out::Tensor(value)) => {
                inputs.contains(x).then_some(value)
            }
            _ => None,
        })
        .collect();
    // The new values of buffers come after the outputs.
    let n = graph.main.outputs.len().saturating_sub(graph.buffers.len());
    let outputs = graph.main.outputs[..n].iter().enumerate();
    outputs
        .filter_map(|(index, out)| match out {
            Out::Tensor(value) => (!elements.contains(value)).then_some((index, *value)),
            Out::Tensors(..) | Out::Int(_) => None,
        })
        .collect()
}

/// Returns the values that products compute from a value, directly or through other products.
fn products_of(graph: &Graph, value: Value) -> HashSet<Value> {
    let (mut dependent, mut products) = (HashSet::from([value]), HashSet::new());
    for Instruction { op, out } in &graph.main.instructions {
        let reads = op.reads();
        if !reads.iter().any(|read| dependent.contains(read)) {
            continue;
        }
        dependent.extend(out.tensors());
        let is_product = matches!(
            op,
            Op::Addmm { .. }
                | Op::QuantizedMatmul { .. }
                | Op::Linear { .. }
                | Op::LinearBlock { .. }
                | Op::LinearHeads { .. }
                | Op::Call {
                    function: Function::PackedMatmul { .. }
                        | Function::GatherMm { .. }
                        | Function::GatherQmm { .. },
                    ..
                }
        );
        if is_product || reads.iter().any(|read| products.contains(read)) {
            products.extend(out.tensors());
        }
    }
    products
}

/// Returns the values that can be narrowed to the last row. Walks backwards from `logits` and from slices: a
/// value can be narrowed if all its readers are narrowed.
fn narrowed(graph: &Graph, logits: Option<Value>, rows: &Rows) -> HashSet<Value> {
    let readers = readers(graph);
    let mut n_outputs = HashMap::<Value, usize>::new();
    for value in graph.main.tensor_outputs() {
        *n_outputs.entry(value).or_default() += 1;
    }
    let mut narrow = HashSet::new();
    // In reverse order, a value is visited after all its readers.
    for instruction in graph.main.instructions.iter().rev() {
        let Out::Tensor(value) = instruction.out else { continue };
        let is_logits = logits == Some(value);
        if n_outputs.get(&value).copied().unwrap_or(0) > usize::from(is_logits) {
            continue;
        }
        let readers = readers.get(&value).map_or(&[][..], |readers| &readers[..]);
        let last_row_will_do = readers.iter().all(|&reader| {
            let reader = &graph.main.instructions[reader];
            let narrowed = matches!(reader.out, Out::Tensor(out) if narrow.contains(&out))
                && rows.read_by(&reader.op, graph).is_some_and(|read| read.contains(&value));
            narrowed || rows.is_last_row(&reader.op)
        });
        if !last_row_will_do || (readers.is_empty() && !is_logits) {
            continue;
        }
        if rows.narrowable.contains(&value) || rows.read_by(&instruction.op, graph).is_some() {
            narrow.insert(value);
        }
    }
    narrow
}

/// Narrows the values: attention computes its last query only, and `LastToken` cuts operands with all rows.
fn rewrite(graph: &mut Graph, narrow: &HashSet<Value>, rows: &Rows) {
    let mut inserted: Vec<(usize, Instruction)> = Vec::new();
    let mut last_rows = HashMap::<Value, Value>::new();
    for index in 0..graph.main.instructions.len() {
        let instruction = graph.main.instructions[index].clone();
        if !matches!(instruction.out, Out::Tensor(value) if narrow.contains(&value)) {
            continue;
        }
        let mut op = instruction.op;
        if let Op::UpdateAndAttend { last_query, .. } = &mut op {
            *last_query = true;
            graph.main.instructions[index].op = op;
            continue;
        }
        if let Op::Call { function: Function::Sdpa { last_query, .. }, ints, .. } = &mut op {
            *last_query = true;
            ints.extend(rows.count.map(Int::Value));
            graph.main.instructions[index].op = op;
            continue;
        }
        let read = rows.read_by(&op, graph).unwrap_or_default();
        for wide in read.into_iter().filter(|value| !narrow.contains(value)) {
            let row = *last_rows.entry(wide).or_insert_with(|| {
                let row = graph.new_value();
                let op = Op::LastToken { x: wide };
                inserted.push((index, Instruction { op, out: Out::Tensor(row) }));
                row
            });
            op.for_each_read(&mut |value| {
                if *value == wide {
                    *value = row;
                }
            });
        }
        if let Op::Reshape { shape, .. } = &mut op {
            for dim in shape {
                if matches!(dim, Int::Value(count) if rows.counts.contains(count)) {
                    *dim = Int::Literal(1);
                }
            }
        }
        graph.main.instructions[index].op = op;
    }
    insert(graph, inserted);
}

#[cfg(test)]
pub(super) mod tests;
