//! Finds the heads of layers that the passes do not merge into one product: layers whose queries and keys are
//! normalized, do not rotate, or rotate only in part. The graph of such a layer has separate views, norms and
//! rotary embeddings between the product and attention.
//!
//! Other layers have one [`LinearHeads`](Op::LinearHeads), which the recipe reads directly.

use std::collections::{HashMap, HashSet};

use mlx_rs::Dtype;

use etkv_mlx_program::ir::{Graph, Int, Op, Out, Value};
use etkv_mlx_program::passes;

/// The axis of features in `[1, T, features]`, counted from either end.
pub const FEATURES: [i32; 2] = [-1, 2];
/// The axis of heads in `[1, heads, T, head_dim]`.
const HEADS: i32 = 1;
/// The axis of a head's elements in `[1, heads, T, head_dim]`, counted from either end.
const ELEMENTS: [i32; 2] = [-1, 3];
/// The permutation of axes from `[1, T, heads, head_dim]` to `[1, heads, T, head_dim]`.
const SWAPPED: [i32; 4] = [0, 2, 1, 3];

/// A norm of rows or of heads, and the dtype to which its result is converted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowNorm {
    pub weight: Option<Value>,
    pub eps: f32,
    pub out_dtype: Option<Dtype>,
}

/// The heads that a product computes for a layer: queries, keys and values.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerHeads {
    pub layer: usize,
    /// The number of query heads. `n_kv` is the number of KV heads.
    pub n_q: usize,
    pub n_kv: usize,
    pub head_dim: usize,
    /// The rotary periods of queries and keys, and the dtype of the result.
    pub rotation: Option<(Value, Dtype)>,
    /// The number of elements that rotate, from the start of each head.
    pub rotated: usize,
    /// The norms of query heads and of key heads, applied before the rotation.
    pub q_norm: Option<RowNorm>,
    pub k_norm: Option<RowNorm>,
}

/// A product whose features are a layer's heads.
#[derive(Debug)]
pub struct HeadsProduct {
    pub heads: LayerHeads,
    /// The queries that attention reads.
    pub queries: Value,
}

/// The products found by this module, keyed by their instruction, and the instructions between these products
/// and attention.
#[derive(Debug, Default)]
pub struct HeadsProducts {
    pub products: HashMap<usize, HeadsProduct>,
    pub between: HashSet<usize>,
}

impl HeadsProducts {
    /// Finds the heads of each attention. `positions` lists the values that contain the step's positions.
    pub fn of(graph: &Graph, positions: &[Value]) -> Self {
        let finder = Finder::new(graph, positions);
        let mut all = Self::default();
        for instruction in &graph.main.instructions {
            let &Op::UpdateAndAttend { q, k, v, layer, .. } = &instruction.op else {
                continue;
            };
            if let Some((product, heads, between)) = finder.heads([q, k, v], layer) {
                all.products.insert(product, HeadsProduct { heads, queries: q });
                all.between.extend(between);
            }
        }
        all
    }
}

/// A piece of a product, and the operations on it before attention.
#[derive(Default)]
struct PieceTrace {
    split: usize,
    /// The index of the piece in the outputs of the split.
    piece: usize,
    /// The elements of a head, if the piece is reshaped to heads after the split.
    head_dim: Option<i64>,
    norm: Option<RowNorm>,
    rotation: Option<(Value, Dtype)>,
    /// The number of elements that rotate, or `None` if all of them rotate.
    rotated: Option<i32>,
    /// The instructions between the product and attention.
    between: Vec<usize>,
}

/// Heads of which only the first `rotated` elements rotate. `x` is their value before the rotation.
struct RotatedPart {
    x: Value,
    rotation: (Value, Dtype),
    rotated: i32,
    between: [usize; 2],
}

struct Finder<'a> {
    graph: &'a Graph,
    positions: &'a [Value],
    /// The instruction that computes each value. `readers` has the instruction that reads it, if there is
    /// only one.
    makers: HashMap<Value, usize>,
    readers: HashMap<Value, usize>,
}

impl<'a> Finder<'a> {
    fn new(graph: &'a Graph, positions: &'a [Value]) -> Self {
        let instructions = graph.main.instructions.iter().enumerate();
        let makers = instructions
            .flat_map(|(at, instruction)| instruction.out.tensors().map(move |value| (value, at)));
        Self { graph, positions, makers: makers.collect(), readers: passes::only_readers(graph) }
    }

    /// Returns the instruction that computes a value, if the value has only one reader.
    fn maker(&self, value: Value) -> Option<(usize, &'a Op, Out)> {
        self.readers.get(&value)?;
        let &index = self.makers.get(&value)?;
        let instruction = &self.graph.main.instructions[index];
        Some((index, &instruction.op, instruction.out))
    }

    /// Returns the product that computes a layer's queries, keys and values, its heads, and the instructions
    /// between the product and attention.
    fn heads(&self, values: [Value; 3], layer: usize) -> Option<(usize, LayerHeads, Vec<usize>)> {
        let [q, k, v] = values.map(|value| self.trace(value));
        let (q, k, v) = (q?, k?, v?);
        let fits = [q.split, k.split] == [v.split; 2]
            && [q.piece, k.piece, v.piece] == [0, 1, 2]
            && (q.rotation, q.rotated) == (k.rotation, k.rotated)
            && [q.head_dim, k.head_dim] == [v.head_dim; 2]
            && v.norm.is_none()
            && v.rotation.is_none();
        fits.then_some(())?;
        let instruction = &self.graph.main.instructions[q.split];
        let (&Op::Split { x, axis, ref at, .. }, Out::Tensors(_, 3)) =
            (&instruction.op, instruction.out)
        else {
            return None;
        };
        let mut between: Vec<usize> = [q.between, k.between, v.between].concat();
        between.push(q.split);
        let (product, head_dim, of_head) = match q.head_dim {
            Some(head_dim) if FEATURES.contains(&axis) => (x, head_dim, head_dim),
            None if axis == HEADS => {
                let (view, op, _) = self.maker(x)?;
                let &Op::ReshapeTranspose { x, ref shape, ref perm } = op else {
                    return None;
                };
                between.push(view);
                (x, (perm[..] == SWAPPED).then_some(head_dim_of(shape)?)?, 1)
            }
            _ => return None,
        };
        let (product, op, _) = self.maker(product)?;
        matches!(op, Op::Linear { .. } | Op::LinearBlock { gate: None, residual: None, .. })
            .then_some(())?;
        let &[to_keys, to_values] = &at[..] else {
            return None;
        };
        let (to_keys, to_values) = (i64::from(to_keys), i64::from(to_values));
        let is_whole = to_keys % of_head == 0 && to_values % of_head == 0;
        let count = |n: i64| usize::try_from(n / of_head).ok().filter(|&n| n > 0 && is_whole);
        // The check of the weight's shape ensures that the product has this many features.
        let heads = LayerHeads {
            layer,
            n_q: count(to_keys)?,
            n_kv: count(to_values - to_keys)?,
            head_dim: usize::try_from(head_dim).ok()?,
            rotation: q.rotation,
            rotated: usize::try_from(q.rotated.map_or(head_dim, i64::from)).ok()?,
            q_norm: q.norm,
            k_norm: k.norm,
        };
        Some((product, heads, between))
    }

    /// Returns the heads whose rotated first part and unrotated rest are concatenated.
    fn rotated_part(&self, parts: &[Value], axis: i32) -> Option<RotatedPart> {
        let &[first, rest] = parts else {
            return None;
        };
        let (rotary, &Op::Rotary { x: part, offsets, periods, dtype }, _) = self.maker(first)?
        else {
            return None;
        };
        let (split, op, out) = self.maker(part)?;
        let &Op::Split { x, axis: cut, ref at, .. } = op else {
            return None;
        };
        self.maker(rest)?;
        let &[rotated] = &at[..] else {
            return None;
        };
        let fits = ELEMENTS.contains(&axis)
            && ELEMENTS.contains(&cut)
            && out.tensors().eq([part, rest])
            && self.positions.contains(&offsets);
        let (rotation, between) = ((periods, dtype), [rotary, split]);
        fits.then_some(RotatedPart { x, rotation, rotated, between })
    }

    /// Returns whether a value is the result of a norm and has only one reader.
    fn is_norm(&self, value: Value) -> bool {
        self.maker(value).is_some_and(|(_, op, _)| matches!(op, Op::RmsNorm { .. }))
    }

    /// Traces a value that attention reads back to the output of a split.
    fn trace(&self, mut value: Value) -> Option<PieceTrace> {
        let (mut found, mut out_dtype, mut is_swapped) = (PieceTrace::default(), None, false);
        loop {
            let (index, op, out) = self.maker(value)?;
            value = match *op {
                Op::Rotary { x, offsets, periods, dtype }
                    if found.between.is_empty() && self.positions.contains(&offsets) =>
                {
                    found.rotation = Some((periods, dtype));
                    x
                }
                Op::Concatenate { ref tensors, axis } if found.between.is_empty() => {
                    let part = self.rotated_part(tensors, axis)?;
                    found.rotation = Some(part.rotation);
                    found.rotated = Some(part.rotated);
                    found.between.extend(part.between);
                    part.x
                }
                // The norm is over the elements of a head, so the order of heads and tokens does not matter.
                Op::Transpose { x, ref perm } if perm[..] == SWAPPED && !is_swapped => {
                    is_swapped = true;
                    x
                }
                Op::AsType { x, dtype }
                    if found.norm.is_none() && out_dtype.is_none() && self.is_norm(x) =>
                {
                    out_dtype = Some(dtype);
                    x
                }
                Op::RmsNorm { x, weight, eps }
                    if found.norm.is_none() && found.head_dim.is_none() =>
                {
                    found.norm = Some(RowNorm { weight, eps, out_dtype });
                    x
                }
                Op::Reshape { x, ref shape } if is_swapped && found.head_dim.is_none() => {
                    found.head_dim = Some(head_dim_of(shape)?);
                    x
                }
                Op::ReshapeTranspose { x, ref shape, ref perm }
                    if !is_swapped && found.head_dim.is_none() && perm[..] == SWAPPED =>
                {
                    found.head_dim = Some(head_dim_of(shape)?);
                    x
                }
                Op::Split { .. } if is_swapped <= found.head_dim.is_some() => {
                    found.piece = out.tensors().position(|piece| piece == value)?;
                    found.split = index;
                    return Some(found);
                }
                _ => return None,
            };
            found.between.push(index);
        }
    }
}

/// Returns `head_dim` of a shape `[1, T, -1, head_dim]`.
fn head_dim_of(shape: &[Int]) -> Option<i64> {
    match *shape {
        [Int::Literal(1), _, Int::Literal(-1), Int::Literal(head_dim)] if head_dim > 0 => {
            Some(head_dim)
        }
        _ => None,
    }
}
