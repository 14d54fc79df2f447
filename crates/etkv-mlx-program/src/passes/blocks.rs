//! Fuses a product with the operations around it in a layer: the norm before it, the gate on its halves, and the
//! residual.
//!
//! On a GPU, the kernel of a product of 1 to 16 rows in half precision computes these operations too. A launch costs
//! the host more time than the work takes on the device. In such a step, a layer of a Llama has 8 launches instead of
//! 14, and 7 if the kernel also [rotates](super::rotated) heads.

use std::collections::HashMap;

use mlx_rs::Dtype;

use super::{dead, maker, makers, only_readers};
use crate::ir::{Binary, Graph, Instruction, Norm, Op, Out, Unary, Value};

/// Rewrites the products of the main chain.
pub fn join(graph: &mut Graph) {
    let (readers, makers) = (only_readers(graph), makers(graph));
    let mut instructions: Vec<Option<Instruction>> =
        std::mem::take(&mut graph.main.instructions).into_iter().map(Some).collect();
    for index in 0..instructions.len() {
        let Some(block) = instructions[index].as_ref().and_then(Block::of) else { continue };
        let finder = Finder { instructions: &instructions, readers: &readers, makers: &makers };
        let found = finder.around(index, block);
        if found.replaced.len() < 2 {
            continue;
        }
        // The block gets the index of the last replaced instruction: all its operands exist there.
        let last = found.replaced.iter().copied().max().unwrap_or(index);
        for place in found.replaced {
            instructions[place] = None;
        }
        let out = Out::Tensor(found.out);
        instructions[last] = Some(Instruction { op: found.block.into_op(), out });
    }
    graph.main.instructions = instructions.into_iter().flatten().collect();
}

/// Fuses norms in float32 with the products of the main chain that read them, if a norm has one reader, its
/// rows have the dtype of its result, and its weight is float32. `dtypes` has the dtypes that are certain.
pub fn join_norms(graph: &mut Graph, dtypes: &HashMap<Value, Dtype>) {
    let (readers, makers) = (only_readers(graph), makers(graph));
    for index in 0..graph.main.instructions.len() {
        let (normalized, parts) = match graph.main.instructions[index].op {
            Op::Linear { x, weight, bias, transposed } => {
                (x, (weight, bias, transposed, None, None))
            }
            Op::LinearBlock { x, weight, bias, transposed, norm: None, gate, residual } => {
                (x, (weight, bias, transposed, gate, residual))
            }
            _ => continue,
        };
        let is_alone = readers.contains_key(&normalized);
        let Some(&Op::NormInFloat32 { x, norm, scale: None, dtype }) =
            maker(graph, &makers, normalized).filter(|_| is_alone)
        else {
            continue;
        };
        let is = |value: Value, dtype: Dtype| dtypes.get(&value) == Some(&dtype);
        let is_wide = norm.weight.is_none_or(|weight| is(weight, Dtype::Float32));
        if dtype == Dtype::Float32 || !is(x, dtype) || !is_wide {
            continue;
        }
        let (weight, bias, transposed, gate, residual) = parts;
        let norm = Some(norm);
        graph.main.instructions[index].op =
            Op::LinearBlock { x, weight, bias, transposed, norm, gate, residual };
    }
    dead::eliminate(graph);
}

/// A product, with the operations fused into it.
struct Block {
    x: Value,
    weight: Value,
    bias: Option<Value>,
    norm: Option<Norm>,
    gate: Option<Unary>,
    residual: Option<Value>,
}

impl Block {
    fn of(instruction: &Instruction) -> Option<Self> {
        match instruction.op {
            Op::Linear { x, weight, bias, transposed: false } => {
                Some(Self { x, weight, bias, norm: None, gate: None, residual: None })
            }
            _ => None,
        }
    }

    fn into_op(self) -> Op {
        let Self { x, weight, bias, norm, gate, residual } = self;
        Op::LinearBlock { x, weight, bias, transposed: false, norm, gate, residual }
    }
}

/// A block, the instructions that it replaces, and its result.
struct BlockMatch {
    block: Block,
    replaced: Vec<usize>,
    out: Value,
}

struct Finder<'a> {
    /// The remaining instructions.
    instructions: &'a [Option<Instruction>],
    readers: &'a HashMap<Value, usize>,
    makers: &'a HashMap<Value, usize>,
}

impl Finder<'_> {
    fn op(&self, index: usize) -> Option<(&Op, Out)> {
        self.instructions[index].as_ref().map(|made| (&made.op, made.out))
    }

    /// Returns the only instruction that reads a value.
    fn reader(&self, value: Value) -> Option<(usize, &Op, Out)> {
        let &index = self.readers.get(&value)?;
        self.op(index).map(|(op, out)| (index, op, out))
    }

    /// Returns the product at `index` with all operations around it that can be fused.
    fn around(&self, index: usize, block: Block) -> BlockMatch {
        let Some((_, Out::Tensor(out))) = self.op(index) else {
            return BlockMatch { out: block.x, block, replaced: Vec::new() };
        };
        let mut found = BlockMatch { block, replaced: vec![index], out };
        self.norm(&mut found);
        self.gate(&mut found);
        self.residual(&mut found);
        found
    }

    fn norm(&self, found: &mut BlockMatch) {
        let x = found.block.x;
        let alone = self.readers.contains_key(&x);
        let Some(&made) = self.makers.get(&x).filter(|_| alone) else { return };
        if let Some((&Op::RmsNorm { x, weight, eps }, _)) = self.op(made) {
            found.block.x = x;
            found.block.norm = Some(Norm { weight, eps, in_float32: false });
            found.replaced.push(made);
        }
    }

    /// Matches a gate: a split in halves. The activation of one half is multiplied by the other half.
    fn gate(&self, found: &mut BlockMatch) {
        let Some((split, Op::Split { axis: -1, at, sizes, .. }, out)) = self.reader(found.out)
        else {
            return;
        };
        let in_halves =
            sizes.start() == sizes.end() && sizes.end() % 2 == 0 && at[..] == [sizes.end() / 2];
        let pieces: Vec<Value> = out.tensors().collect();
        let &[first, second] = &pieces[..] else { return };
        let Some((activation, &Op::Activation { function, x, by }, Out::Tensor(out))) =
            self.reader(first)
        else {
            return;
        };
        let alone = self.readers.contains_key(&second);
        if in_halves && alone && x == first && by == Some(second) {
            found.block.gate = Some(function);
            found.replaced.extend([split, activation]);
            found.out = out;
        }
    }

    fn residual(&self, found: &mut BlockMatch) {
        let product = found.out;
        let Some((index, &Op::Binary { function: Binary::Add, a, b }, Out::Tensor(out))) =
            self.reader(product)
        else {
            return;
        };
        let other = if a == product { b } else { a };
        found.block.residual = Some(other);
        found.replaced.push(index);
        found.out = out;
    }
}

#[cfg(test)]
mod tests {
    use mlx_rs::Dtype;

    use super::super::fixture::{self, tensor};
    use super::*;

    /// Values 0 and 1 are weights of 6 and 8 rows, 2 is the weight of a norm, and 3 and 4 are inputs.
    const NORM: Norm = Norm { weight: Some(Value(2)), eps: 1e-5, in_float32: false };

    fn norm(x: u32, out: u32) -> (Op, Out) {
        tensor(fixture::rms_norm(x, Some(2), NORM.eps), out)
    }

    fn linear(x: u32, weight: u32, out: u32) -> (Op, Out) {
        tensor(fixture::linear(x, weight, None), out)
    }

    fn add(a: u32, b: u32, out: u32) -> (Op, Out) {
        tensor(fixture::add(a, b), out)
    }

    /// A gate on product 11.
    fn gate(first: i32) -> [(Op, Out); 2] {
        let by = Some(Value(13));
        [
            (fixture::split(11, -1, &[first], 8), Out::Tensors(Value(12), 2)),
            tensor(Op::Activation { function: Unary::Silu, x: Value(12), by }, 14),
        ]
    }

    fn block(x: u32, weight: u32) -> Block {
        let (x, weight) = (Value(x), Value(weight));
        Block { x, weight, bias: None, norm: None, gate: None, residual: None }
    }

    fn joined(ops: Vec<(Op, Out)>) -> Vec<(Op, Out)> {
        let mut graph = fixture::graph(ops);
        join(&mut graph);
        graph.main.instructions.into_iter().map(|made| (made.op, made.out)).collect()
    }

    #[test]
    fn norms_in_float32_are_fused_too() {
        let (bf16, f32) = (Dtype::Bfloat16, Dtype::Float32);
        let norm = Norm { in_float32: true, ..NORM };
        let normalized =
            |scale, dtype| tensor(Op::NormInFloat32 { x: Value(3), norm, scale, dtype }, 10);
        let joined = |ops, weight| {
            let mut graph = fixture::graph(ops);
            join_norms(&mut graph, &HashMap::from([(Value(3), bf16), (Value(2), weight)]));
            fixture::ops(&graph)
        };
        let made = joined(vec![normalized(None, bf16), linear(10, 0, 11)], f32);
        assert_eq!(made, [Block { norm: Some(norm), ..block(3, 0) }.into_op()]);
        // A factor, another dtype, a weight that would be rounded twice, and a second reader.
        for (ops, weight) in [
            (vec![normalized(Some(Value(4)), bf16), linear(10, 0, 11)], f32),
            (vec![normalized(None, f32), linear(10, 0, 11)], f32),
            (vec![normalized(None, bf16), linear(10, 0, 11)], bf16),
            (vec![normalized(None, bf16), linear(10, 0, 11), add(10, 11, 12)], f32),
        ] {
            let n = ops.len();
            let made = joined(ops, weight);
            let stays = matches!(made[..], [Op::NormInFloat32 { .. }, Op::Linear { .. }, ..]);
            assert!(stays && made.len() == n, "{made:?}");
        }
    }

    #[test]
    fn a_layer_is_two_blocks() {
        let [split, activation] = gate(4);
        let made = joined(vec![
            norm(3, 10),
            linear(10, 1, 11),
            split,
            activation,
            linear(14, 0, 15),
            add(3, 15, 16),
        ]);
        let gated = Block { norm: Some(NORM), gate: Some(Unary::Silu), ..block(3, 1) };
        let summed = Block { residual: Some(Value(3)), ..block(14, 0) };
        assert_eq!(made, [tensor(gated.into_op(), 14), tensor(summed.into_op(), 16)]);
    }

    #[test]
    fn a_block_stands_where_the_last_of_it_stood() {
        // The residual is computed after the product.
        let made = joined(vec![linear(3, 0, 10), norm(4, 11), add(10, 11, 12)]);
        let summed = Block { residual: Some(Value(11)), ..block(3, 0) };
        assert_eq!(made, [norm(4, 11), tensor(summed.into_op(), 12)]);
    }

    #[test]
    fn what_others_read_stays() {
        let stays = |ops: Vec<(Op, Out)>| assert_eq!(joined(ops.clone()), ops);
        // Normalized rows and a product with two readers; a product that is added to itself.
        stays(vec![norm(3, 10), linear(10, 0, 11), norm(10, 12)]);
        stays(vec![linear(3, 0, 10), add(3, 10, 11), norm(10, 12)]);
        stays(vec![linear(3, 0, 10), add(10, 10, 11)]);
        // Halves of different sizes, or in the other order.
        let [split, activation] = gate(3);
        stays(vec![linear(3, 1, 11), split, activation]);
        let [split, _] = gate(4);
        let by = Some(Value(12));
        let other = Op::Activation { function: Unary::Silu, x: Value(13), by };
        stays(vec![linear(3, 1, 11), split, tensor(other, 14)]);
        // A product alone.
        stays(vec![linear(3, 0, 10), norm(10, 11)]);
    }
}
