//! Rewrites products and embeddings of packed weights as operations on unpacked weights.
//!
//! The interpreter has separate operations for packed weights, which the passes do not fuse. This module
//! replaces them by the operations of unpacked weights in a copy of the program, and then runs the passes
//! that fuse operations of unpacked weights. The program that the interpreter runs does not change.

use std::collections::HashMap;

use etkv_mlx_program::ir::{Affine, Binary, Graph, Index, Op, Out, Value};
use etkv_mlx_program::passes;

/// The constants of a packed weight.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PackedConstants {
    pub codes: Value,
    pub scales: Value,
    pub biases: Value,
    pub packing: Affine,
}

/// The packed weights of a program, keyed by the value of their codes.
pub type PackedWeights = HashMap<Value, PackedConstants>;

/// Returns a copy of the program in which packed operations are replaced by unpacked ones that have the codes
/// as their weight. Returns `None` if the program has no packed weights, or if two of them share codes but
/// differ otherwise.
pub fn as_plain(graph: &Graph) -> Option<(Graph, PackedWeights)> {
    let mut plain = graph.clone();
    let mut found = PackedFinder { graph, rows: HashMap::new(), weights: PackedWeights::new() };
    for instruction in &mut plain.main.instructions {
        if let Some(op) = found.plain(&instruction.op, instruction.out)? {
            instruction.op = op;
        }
    }
    let weights = found.weights;
    if weights.is_empty() {
        return None;
    }
    add_biases(&mut plain, &weights);
    passes::join_layers(&mut plain);
    Some((plain, weights))
}

struct PackedFinder<'a> {
    graph: &'a Graph,
    /// For each value that consists of rows of a constant: the constant and the row indices.
    rows: HashMap<Value, (Value, Value)>,
    weights: PackedWeights,
}

impl PackedFinder<'_> {
    /// Returns the replacement of an operation, or `Some(None)` if it stays. Returns `None` if two packed
    /// weights share codes but differ otherwise.
    fn plain(&mut self, op: &Op, out: Out) -> Option<Option<Op>> {
        match *op {
            Op::Take { x, index: Index::Many(index), axis: 0 } if self.graph.is_constant(x) => {
                self.rows.extend(out.tensors().map(|value| (value, (x, index))));
                Some(None)
            }
            Op::Dequantize { w, scales, biases: Some(biases), packing, dtype } => {
                let rows = [w, scales, biases].map(|value| self.rows.get(&value).copied());
                let [Some((codes, index)), Some((scales, of_scales)), Some((biases, of_biases))] =
                    rows
                else {
                    return Some(None);
                };
                let expected = self.graph.constants[scales.0 as usize].dtype;
                if [of_scales, of_biases] != [index; 2]
                    || dtype.is_some_and(|dtype| dtype != expected)
                {
                    return Some(None);
                }
                self.add(PackedConstants { codes, scales, biases, packing })?;
                Some(Some(Op::Take { x: codes, index: Index::Many(index), axis: 0 }))
            }
            Op::QuantizedMatmul {
                x,
                w: codes,
                scales,
                biases: Some(biases),
                packing,
                transpose: true,
            } if [codes, scales, biases].iter().all(|&value| self.graph.is_constant(value)) => {
                self.add(PackedConstants { codes, scales, biases, packing })?;
                Some(Some(Op::Linear { x, weight: codes, bias: None, transposed: false }))
            }
            _ => Some(None),
        }
    }

    fn add(&mut self, packed: PackedConstants) -> Option<()> {
        let known = *self.weights.entry(packed.codes).or_insert(packed);
        (known == packed).then_some(())
    }
}

/// If a constant row is added to a packed product, makes it the bias of the product.
fn add_biases(graph: &mut Graph, weights: &PackedWeights) {
    let readers = passes::only_readers(graph);
    for index in 0..graph.main.instructions.len() {
        let instruction = &graph.main.instructions[index];
        let (&Op::Linear { x, weight, bias: None, transposed }, Out::Tensor(product)) =
            (&instruction.op, instruction.out)
        else {
            continue;
        };
        let Some(&sum) = readers.get(&product).filter(|_| weights.contains_key(&weight)) else {
            continue;
        };
        let Op::Binary { function: Binary::Add, a, b } = graph.main.instructions[sum].op else {
            continue;
        };
        let bias = if a == product { b } else { a };
        let is_row = graph.is_constant(bias) && graph.constants[bias.0 as usize].shape.len() == 1;
        if is_row {
            // Nothing reads the separate product any more, and `join_layers` removes it.
            let op = Op::Linear { x, weight, bias: Some(bias), transposed };
            graph.main.instructions[sum].op = op;
        }
    }
}

#[cfg(test)]
mod tests;
