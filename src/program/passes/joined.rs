//! Joins products that read the same tensor: queries, keys and values; a gate and its other half.
//!
//! One product of all rows of their weights takes one launch, and its result is cut into theirs. The
//! joined weight replaces its parts, so weights are there once. On the CPU products are limited by
//! memory, and cutting costs more than calls.

use std::collections::{HashMap, HashSet};

use mlx_rs::Dtype;

use crate::program::ir::{Affine, Binary, Graph, Instruction, Op, Out, Value};

/// Joins the products of the main chain where their weights are used nowhere else.
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
        // The first's instruction at load makes the joined biases.
        unneeded.extend(others.iter().filter_map(|other| other.biases_at_load));
        let mut made = vec![graph.main.instructions[first.index].clone()];
        if let Some(add) = first.add {
            made.push(graph.main.instructions[add].clone());
        }
        // The first product makes the joined result under a name of its own.
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
    let old = std::mem::take(&mut graph.main.instructions);
    for (index, instruction) in old.into_iter().enumerate() {
        match replaced.remove(&index) {
            Some(made) => graph.main.instructions.extend(made),
            None => graph.main.instructions.push(instruction),
        }
    }
    graph.rename(&renamed);
    drop_from_load(graph, &unneeded);
}

/// Lets the init chain no longer make these constants.
fn drop_from_load(graph: &mut Graph, unneeded: &HashSet<Value>) {
    let (targets, outputs): (Vec<Value>, Vec<Out>) = std::mem::take(&mut graph.init_targets)
        .into_iter()
        .zip(std::mem::take(&mut graph.init.outputs))
        .filter(|(target, _)| !unneeded.contains(target))
        .unzip();
    (graph.init_targets, graph.init.outputs) = (targets, outputs);
    let needed: HashSet<Value> = graph.init.uses().collect();
    let is_needed =
        |made: &Instruction| made.out.tensors().next().is_none_or(|out| needed.contains(&out));
    graph.init.instructions.retain(is_needed);
}

fn split(x: Value, products: &[Product]) -> Op {
    let mut total = 0;
    let mut at: Vec<i32> = Vec::new();
    for product in products {
        total += product.rows;
        at.push(total);
    }
    at.pop();
    Op::Split { x, axis: -1, at, sizes: total..=total }
}

/// A product with a constant, and the sum with a constant that alone reads it, if there is one.
struct Product {
    index: usize,
    add: Option<usize>,
    /// The result of both.
    out: Value,
    rows: i32,
    /// Its constants, whose rows are joined.
    constants: Vec<Value>,
    /// Its biases, if the init chain makes them of its scales.
    biases_at_load: Option<Value>,
}

/// What products have in common that are joined.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    x: Value,
    packing: Option<Affine>,
    adds: bool,
    /// What the init chain multiplies scales with, to make biases.
    factor: Option<Value>,
    /// The shapes of rows and the dtypes of the constants.
    constants: Vec<(Vec<i32>, Dtype)>,
}

struct Finder<'a> {
    graph: &'a Graph,
    /// The constants that one instruction reads, once.
    movable: HashSet<Value>,
    /// The instructions that read each value, once for each read; outputs count as the end.
    readers: HashMap<Value, Vec<usize>>,
    /// The biases that the init chain makes, each with the scales and the number that it multiplies.
    /// Nothing else reads either.
    at_load: HashMap<Value, (Value, Value)>,
}

impl<'a> Finder<'a> {
    fn new(graph: &'a Graph) -> Self {
        let mut readers = HashMap::<Value, Vec<usize>>::new();
        for (index, instruction) in graph.main.instructions.iter().enumerate() {
            for value in instruction.op.reads() {
                readers.entry(value).or_default().push(index);
            }
        }
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

    /// Returns the product that an instruction makes, if it can be joined.
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
                    // Without biases it is refused when it runs; scales of other biases stay.
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
        // A matrix by its rows, and at most one bias of numbers: else it is another kind of product.
        if described.first()?.0.len() != 1 || constants.contains(&x) {
            return None;
        }
        let add = add.map(|(index, ..)| index);
        let key = Key { x, packing, adds: add.is_some(), factor, constants: described };
        Some((key, Product { index, add, out, rows, constants, biases_at_load }))
    }

    /// Returns the sum with a bias, `[rows]`, that alone reads a value: its place, the bias and its
    /// result.
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

/// Returns the constants that the init chain makes as the product of a constant and a number: zero
/// points, which are the same for all groups, as biases. With each, its two operands. Nothing else
/// in the init chain reads the first of these.
fn biases_at_load(graph: &Graph) -> HashMap<Value, (Value, Value)> {
    let mut n_uses = HashMap::<Value, usize>::new();
    for value in graph.init.uses() {
        *n_uses.entry(value).or_default() += 1;
    }
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
