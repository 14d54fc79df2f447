//! Joins products that read the same tensor, such as queries, keys and values, or the two halves of a gate.
//!
//! One product with all rows of the weights takes one kernel launch. Its result is split. The joined weight replaces
//! its parts, so weights are in memory once. The pass does not run for a CPU: there memory bandwidth limits products,
//! and a split costs more than the calls that it saves.

use std::collections::{HashMap, HashSet};

use mlx_rs::Dtype;

use super::{readers, replace};
use crate::ir::{Affine, Binary, Graph, Instruction, Op, Out, Value};

/// Joins products of the main chain whose weights have no other use.
pub fn join(graph: &mut Graph) {
    let mut groups: Vec<(Key, Vec<Product>)> = Vec::new();
    {
        let finder = Finder::new(graph);
        let mut places = HashMap::<Key, usize>::new();
        for index in 0..graph.main.instructions.len() {
            let Some((key, product)) = finder.product(index) else { continue };
            let place = *places.entry(key.clone()).or_insert_with(|| {
                groups.push((key, Vec::new()));
                groups.len() - 1
            });
            groups[place].1.push(product);
        }
    }
    groups.retain(|(_, products)| products.len() > 1);

    let mut unneeded = HashSet::new();
    let mut renamed = HashMap::new();
    let mut replaced = HashMap::<usize, Vec<Instruction>>::new();
    for (_, products) in groups {
        let [first, others @ ..] = &products[..] else { continue };
        for (place, &kept) in first.constants.iter().enumerate() {
            let parts = others
                .iter()
                .map(|other| graph.constants[other.constants[place].0 as usize].clone());
            let parts: Vec<_> = parts.collect();
            graph.constants[kept.0 as usize].joined = parts;
        }
        // The init chain computes the joined biases with the instruction for the biases of the first product.
        unneeded.extend(others.iter().filter_map(|other| other.biases_at_load));
        let mut made = vec![graph.main.instructions[first.index].clone()];
        if let Some(add) = first.add {
            made.push(graph.main.instructions[add].clone());
        }
        // The first product becomes the joined product, with a new value as its result.
        let joined = graph.new_value();
        let n = products.len() as u32;
        let pieces = Out::Tensors(graph.new_values(n), n);
        if let Some(last) = made.last_mut() {
            last.out = Out::Tensor(joined);
        }
        made.push(Instruction { op: split(joined, &products), out: pieces });
        for (product, piece) in products.iter().zip(pieces.tensors()) {
            renamed.insert(product.out, piece);
            replaced.insert(product.index, Vec::new());
            replaced.extend(product.add.map(|add| (add, Vec::new())));
        }
        replaced.insert(first.index, made);
    }
    replace(graph, replaced);
    graph.rename(&renamed);
    drop_from_load(graph, &unneeded);
}

/// Removes these constants from the results of the init chain.
fn drop_from_load(graph: &mut Graph, unneeded: &HashSet<Value>) {
    let (targets, outputs): (Vec<Value>, Vec<Out>) = std::mem::take(&mut graph.init_targets)
        .into_iter()
        .zip(std::mem::take(&mut graph.init.outputs))
        .filter(|(target, _)| !unneeded.contains(target))
        .unzip();
    (graph.init_targets, graph.init.outputs) = (targets, outputs);
    let needed: HashSet<Value> = graph.init.uses().collect();
    let is_needed = |made: &Instruction| {
        matches!(made.out, Out::Int(_)) || made.out.tensors().any(|out| needed.contains(&out))
    };
    graph.init.instructions.retain(is_needed);
}

fn split(x: Value, products: &[Product]) -> Op {
    let (at, total) = cuts(products.iter().map(|product| product.rows));
    Op::Split { x, axis: -1, at, sizes: total..=total }
}

/// Returns the boundaries of pieces of these sizes along an axis, and the size of the axis.
pub fn cuts(sizes: impl Iterator<Item = i32>) -> (Vec<i32>, i32) {
    let mut total = 0;
    let mut at: Vec<i32> = sizes
        .map(|size| {
            total += size;
            total
        })
        .collect();
    at.pop();
    (at, total)
}

/// A product with a constant weight. Includes the addition of a constant, if that is the only reader of the product.
struct Product {
    index: usize,
    add: Option<usize>,
    /// The final result.
    out: Value,
    rows: i32,
    /// The constants whose rows are joined.
    constants: Vec<Value>,
    /// The biases, if the init chain computes them from the scales.
    biases_at_load: Option<Value>,
}

/// The properties that joined products must share.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    x: Value,
    packing: Option<Affine>,
    adds: bool,
    /// The factor by which the init chain multiplies scales to get biases.
    factor: Option<Value>,
    /// The shapes of rows and the dtypes of the constants.
    constants: Vec<(Vec<i32>, Dtype)>,
}

struct Finder<'a> {
    graph: &'a Graph,
    /// The constants that only one instruction reads, once.
    movable: HashSet<Value>,
    /// The instructions that read each value, once for each read. An output counts as a read after the last
    /// instruction.
    readers: HashMap<Value, Vec<usize>>,
    /// The biases that the init chain computes, with their scales and factor. The init chain reads the scales nowhere
    /// else.
    at_load: HashMap<Value, (Value, Value)>,
}

impl<'a> Finder<'a> {
    fn new(graph: &'a Graph) -> Self {
        let mut readers = readers(graph);
        for value in graph.main.tensor_outputs() {
            readers.entry(value).or_default().push(graph.main.instructions.len());
        }
        let at_load = biases_at_load(graph);
        let scales: HashSet<Value> = at_load.values().map(|(scales, _)| *scales).collect();
        let elsewhere: HashSet<Value> =
            graph.init.uses().chain(graph.init_targets.iter().copied()).collect();
        let movable = (0..graph.constants.len() as u32)
            .map(Value)
            .filter(|value| readers.get(value).is_some_and(|readers| readers.len() == 1))
            .filter(|value| scales.contains(value) || !elsewhere.contains(value))
            .collect();
        Self { graph, movable, readers, at_load }
    }

    /// Returns the product of an instruction, if it can be joined.
    fn product(&self, index: usize) -> Option<(Key, Product)> {
        let instruction = &self.graph.main.instructions[index];
        let Out::Tensor(mut out) = instruction.out else { return None };
        let (mut biases_at_load, mut factor) = (None, None);
        let (x, packing, mut constants) = match &instruction.op {
            Op::Linear { x, weight, bias, transposed: false } => {
                (*x, None, [*weight].into_iter().chain(*bias).collect::<Vec<_>>())
            }
            Op::QuantizedMatmul { x, w, scales, biases, packing, transpose: true } => {
                let mut constants = vec![*w, *scales];
                match biases.and_then(|biases| self.at_load.get(&biases)) {
                    Some((multiplied, number)) if multiplied == scales => {
                        let alone = self.readers.get(&(*biases)?)?.len() == 1;
                        (biases_at_load, factor) = (*biases, alone.then_some(*number));
                        factor?;
                    }
                    // A product without biases is not joined: it is refused when it runs. A product whose
                    // biases are computed from other scales is not joined either.
                    Some(_) | None => constants.push((*biases)?),
                }
                (*x, Some(*packing), constants)
            }
            _ => return None,
        };
        let rows = *self.shape(*constants.first()?)?.first()?;
        let add = self.added(out, rows);
        if let Some((_, bias, sum)) = add {
            constants.push(bias);
            out = sum;
        }
        let described = constants
            .iter()
            .map(|constant| {
                let (&found, row) = self.shape(*constant)?.split_first()?;
                let fits = found == rows && self.movable.contains(constant);
                let dtype = self.graph.constants[constant.0 as usize].dtype;
                fits.then(|| (row.to_vec(), dtype))
            })
            .collect::<Option<Vec<_>>>()?;
        // The weight must be a matrix. With another rank this is another kind of product.
        if described.first()?.0.len() != 1 || constants.contains(&x) {
            return None;
        }
        let add = add.map(|(index, ..)| index);
        let key = Key { x, packing, adds: add.is_some(), factor, constants: described };
        Some((key, Product { index, add, out, rows, constants, biases_at_load }))
    }

    /// Returns the addition of a bias, `[rows]`, if it is the only reader of a value: its index, the bias and the
    /// sum.
    fn added(&self, value: Value, rows: i32) -> Option<(usize, Value, Value)> {
        let [reader] = self.readers.get(&value)?[..] else { return None };
        let sum = self.graph.main.instructions.get(reader)?;
        let (Op::Binary { function: Binary::Add, a, b }, Out::Tensor(out)) = (&sum.op, sum.out)
        else {
            return None;
        };
        let bias = if *a == value { *b } else { *a };
        let fits = self.movable.contains(&bias) && self.shape(bias)? == [rows];
        fits.then_some((reader, bias, out))
    }

    fn shape(&self, constant: Value) -> Option<&[i32]> {
        Some(&self.graph.constants.get(constant.0 as usize)?.shape)
    }
}

/// Returns the constants that the init chain computes as a constant times a number, with both operands. They are
/// biases: if all groups have the same zero point, a bias is the scale times a number. The init chain reads the first
/// operand nowhere else.
fn biases_at_load(graph: &Graph) -> HashMap<Value, (Value, Value)> {
    let n_uses = graph.init.n_uses();
    let written: HashSet<Value> = graph.init_targets.iter().copied().collect();
    let is_once = |value: Value| n_uses.get(&value) == Some(&1);
    let targets: HashMap<Value, Value> =
        graph.init.tensor_outputs().zip(graph.init_targets.iter().copied()).collect();
    let made = graph.init.instructions.iter().filter_map(|made| {
        let (Op::Binary { function: Binary::Multiply, a, b }, Out::Tensor(out)) =
            (&made.op, made.out)
        else {
            return None;
        };
        let is_number = graph.constants.get(b.0 as usize)?.shape.iter().all(|&size| size == 1);
        let stays = graph.is_constant(*a) && !written.contains(a) && !written.contains(b);
        let biases = *targets.get(&out)?;
        (is_number && stays && is_once(*a) && is_once(out)).then_some((biases, (*a, *b)))
    });
    made.collect()
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{self, add, assert_stays, constant, kinds, linear};
    use super::super::fixture::{multiply, numbered, tensor, tensors};
    use super::*;
    use crate::ir::Constant;

    /// The input is the value after the constants. The results of `ops` are the next values and the outputs.
    fn graph(constants: Vec<Constant>, ops: Vec<Op>) -> Graph {
        let mut graph = fixture::graph(numbered(constants.len() as u32 + 1, ops));
        graph.main.outputs = graph.main.instructions.iter().map(|made| made.out).collect();
        Graph { constants, ..graph }
    }

    fn joined_names(graph: &Graph, constant: usize) -> Vec<&str> {
        graph.constants[constant].joined.iter().map(|part| &part.name[..]).collect()
    }

    #[test]
    fn products_of_one_tensor_are_one() {
        let weights = [("q", 8), ("k", 4), ("v", 4)].map(|(name, rows)| constant(name, &[rows, 6]));
        // 3 is the input.
        let ops = (0..3).map(|weight| linear(3, weight, None)).collect();
        let mut graph = graph(weights.to_vec(), ops);
        join(&mut graph);
        assert_eq!(joined_names(&graph, 0), ["k", "v"]);
        let [product, split] = &graph.main.instructions[..] else { panic!("{:?}", graph.main) };
        assert_eq!(product.op, linear(3, 0, None));
        let [x] = split.op.reads()[..] else { panic!("{split:?}") };
        assert_eq!(product.out, Out::Tensor(x));
        assert_eq!(split.op, fixture::split(x.0, -1, &[8, 12], 16));
        let pieces: Vec<Out> = split.out.tensors().map(Out::Tensor).collect();
        assert_eq!(graph.main.outputs, pieces);
    }

    #[test]
    fn products_that_differ_stay() {
        let w = |name| constant(name, &[4, 6]);
        let stays = |constants: Vec<Constant>, ops: Vec<Op>, change: fn(&mut Graph)| {
            let mut graph = graph(constants, ops);
            change(&mut graph);
            let before = graph.main.clone();
            join(&mut graph);
            assert_eq!(graph.main.instructions, before.instructions);
            assert!(graph.constants.iter().all(|constant| constant.joined.is_empty()));
        };
        let pair = || vec![linear(2, 0, None), linear(2, 1, None)];
        let same = |_: &mut Graph| {};
        // Products of different tensors, weights of different row sizes or dtypes.
        stays(vec![w("a"), w("b")], vec![linear(2, 0, None), linear(3, 1, None)], same);
        stays(vec![w("a"), constant("b", &[4, 5])], pair(), same);
        stays(vec![w("a"), w("b")], pair(), |graph| graph.constants[1].dtype = Dtype::Bfloat16);
        // One with a bias.
        let bias = constant("bias", &[4]);
        stays(vec![w("a"), w("b"), bias], vec![linear(3, 0, None), linear(3, 1, Some(2))], same);
        // A weight with another reader, at load or later, or a weight that the init chain replaces.
        stays(vec![w("a"), w("b")], vec![linear(2, 0, None), linear(2, 0, None)], same);
        stays(vec![w("a"), w("b")], pair(), |graph| graph.main.outputs.push(Out::Tensor(Value(0))));
        stays(vec![w("a"), w("b")], pair(), |graph| graph.init.outputs.push(Out::Tensor(Value(1))));
        stays(vec![w("a"), w("b")], pair(), |graph| graph.init_targets.push(Value(1)));
    }

    /// Packed weights whose biases are computed at load, and the sums after their products.
    fn quantized() -> Graph {
        let shapes: [(&str, &[i32]); 9] = [
            ("w0", &[4, 8]),
            ("s0", &[4, 2]),
            ("b0", &[]),
            ("a0", &[4]),
            ("w1", &[4, 8]),
            ("s1", &[4, 2]),
            ("b1", &[]),
            ("a1", &[4]),
            ("zero", &[]),
        ];
        let constants = shapes.map(|(name, shape)| constant(name, shape)).to_vec();
        let product = |w: u32| Op::QuantizedMatmul {
            x: Value(9),
            w: Value(w),
            scales: Value(w + 1),
            biases: Some(Value(w + 2)),
            packing: Affine { group_size: 32, bits: 4 },
            transpose: true,
        };
        let ops = vec![product(0), add(10, 3), product(4), add(7, 12)];
        let mut graph = graph(constants, ops);
        graph.main.outputs = tensors(&[11, 13]);
        for (scales, biases, out) in [(1, 2, 20), (5, 6, 21)] {
            let (op, out) = tensor(multiply(scales, 8), out);
            graph.init.instructions.push(Instruction { op, out });
            graph.init.outputs.push(out);
            graph.init_targets.push(Value(biases));
        }
        graph.n_values = 22;
        graph
    }

    #[test]
    fn packed_weights_are_joined_with_all_that_belongs_to_them() {
        let mut graph = quantized();
        join(&mut graph);
        assert_eq!(kinds(&graph), ["QuantizedMatmul", "Add", "Split"]);
        for (place, name) in [(0, "w1"), (1, "s1"), (3, "a1")] {
            assert_eq!(joined_names(&graph, place), [name]);
        }
        // The joined biases are computed from the joined scales.
        assert!(graph.constants[2].joined.is_empty());
        assert_eq!(graph.init.instructions.len(), 1);
        assert_eq!(graph.init_targets, [Value(2)]);
        assert_eq!(graph.init.outputs, [Out::Tensor(Value(20))]);
    }

    #[test]
    fn biases_of_other_numbers_stay() {
        let mut graph = quantized();
        graph.constants.push(constant("other", &[]));
        // The added constant renumbers values.
        if let Op::Binary { b, .. } = &mut graph.init.instructions[1].op {
            *b = Value(3);
        }
        assert_stays(graph, join);
    }
}
