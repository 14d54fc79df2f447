//! The heads of a layer whose queries and keys are normalized, or do not rotate or only in part: between
//! their product and attention, the passes leave views, norms and embeddings of each.
//!
//! A product that includes all of this is a [`LinearHeads`](Op::LinearHeads), which the recipe reads
//! directly.

use std::collections::{HashMap, HashSet};

use mlx_rs::Dtype;

use etkv_mlx_program::ir::{Graph, Int, Op, Out, Value};
use etkv_mlx_program::passes;

/// The axis of features in `[1, T, features]`, and that of heads in `[1, heads, T, head_dim]`.
const FEATURES: [i32; 2] = [-1, 2];
const HEADS: i32 = 1;
/// The axis of a head's elements.
const ELEMENTS: [i32; 2] = [-1, 3];
/// From tokens before heads to heads before tokens.
const SWAPPED: [i32; 4] = [0, 2, 1, 3];

/// A norm of rows or of heads, and the dtype that the result is converted to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowNorm {
    pub weight: Option<Value>,
    pub eps: f32,
    pub made: Option<Dtype>,
}

/// The heads that a product computes for a layer: queries, keys and values.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerHeads {
    pub layer: usize,
    /// The number of query heads, and of KV heads.
    pub n_q: usize,
    pub n_kv: usize,
    pub head_dim: usize,
    /// The periods by which queries and keys rotate, and the dtype of the result.
    pub rotation: Option<(Value, Dtype)>,
    /// The number of first elements of a head that rotate.
    pub rotated: usize,
    /// The norm of each head of queries, and of keys, before it rotates.
    pub q_norm: Option<RowNorm>,
    pub k_norm: Option<RowNorm>,
}

/// A product whose features are a layer's heads.
#[derive(Debug)]
pub struct HeadsProduct {
    pub heads: LayerHeads,
    /// The queries, as attention reads them.
    pub queries: Value,
}

/// The products of a program whose heads are found here, by their instruction, and the instructions between
/// them and attention.
#[derive(Debug, Default)]
pub struct HeadsProducts {
    pub products: HashMap<usize, HeadsProduct>,
    pub between: HashSet<usize>,
}

impl HeadsProducts {
    /// Searches the heads of each attention. `positions` are the values that are the step's positions.
    pub fn of(graph: &Graph, positions: &[Value]) -> Self {
        let finder = Finder::new(graph, positions);
        let mut all = Self::default();
        for made in &graph.main.instructions {
            let &Op::UpdateAndAttend { q, k, v, layer, .. } = &made.op else {
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
struct PieceTrace {
    split: usize,
    /// The number of the piece.
    piece: usize,
    /// The elements of a head, if the piece is viewed as heads after the split.
    head_dim: Option<i64>,
    norm: Option<RowNorm>,
    rotation: Option<(Value, Dtype)>,
    /// The number of elements that rotate, if not all do.
    rotated: Option<i32>,
    /// The instructions between the product and attention.
    between: Vec<usize>,
}

/// Heads that rotate in part: the value before, its periods and dtype, the elements that rotate, and the
/// instructions.
struct RotatedPart {
    x: Value,
    rotation: (Value, Dtype),
    rotated: i32,
    between: [usize; 2],
}

struct Finder<'a> {
    graph: &'a Graph,
    positions: &'a [Value],
    /// The instruction that makes each value, and the only one that reads it.
    makers: HashMap<Value, usize>,
    readers: HashMap<Value, usize>,
}

impl<'a> Finder<'a> {
    fn new(graph: &'a Graph, positions: &'a [Value]) -> Self {
        let made = graph.main.instructions.iter().enumerate();
        let makers = made.flat_map(|(at, made)| made.out.tensors().map(move |value| (value, at)));
        Self { graph, positions, makers: makers.collect(), readers: passes::only_readers(graph) }
    }

    /// Returns the instruction that makes a value with only one reader.
    fn maker(&self, value: Value) -> Option<(usize, &'a Op, Out)> {
        self.readers.get(&value)?;
        let &index = self.makers.get(&value)?;
        let made = &self.graph.main.instructions[index];
        Some((index, &made.op, made.out))
    }

    /// Returns the product of a layer's queries, keys and values, its heads, and the instructions between.
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
        let made = &self.graph.main.instructions[q.split];
        let (&Op::Split { x, axis, ref at, .. }, Out::Tensors(_, 3)) = (&made.op, made.out) else {
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
        // The check with the weight ensures that the product has this many features.
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

    /// Returns the heads whose first part was rotated and joined with the rest again.
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

    /// Returns whether a value with only one reader is normalized.
    fn is_norm(&self, value: Value) -> bool {
        self.maker(value).is_some_and(|(_, op, _)| matches!(op, Op::RmsNorm { .. }))
    }

    /// Traces a value that attention reads back to a piece of a split.
    fn trace(&self, mut value: Value) -> Option<PieceTrace> {
        let (mut head_dim, mut norm, mut made, mut rotation) = (None, None, None, None);
        let (mut rotated, mut is_swapped, mut between) = (None, false, Vec::new());
        loop {
            let (index, op, out) = self.maker(value)?;
            value = match *op {
                Op::Rotary { x, offsets, periods, dtype }
                    if between.is_empty() && self.positions.contains(&offsets) =>
                {
                    rotation = Some((periods, dtype));
                    x
                }
                Op::Concatenate { ref tensors, axis } if between.is_empty() => {
                    let found = self.rotated_part(tensors, axis)?;
                    rotation = Some(found.rotation);
                    rotated = Some(found.rotated);
                    between.extend(found.between);
                    found.x
                }
                // A norm is one for each head, whether heads or tokens come first.
                Op::Transpose { x, ref perm } if perm[..] == SWAPPED && !is_swapped => {
                    is_swapped = true;
                    x
                }
                Op::AsType { x, dtype } if norm.is_none() && made.is_none() && self.is_norm(x) => {
                    made = Some(dtype);
                    x
                }
                Op::RmsNorm { x, weight, eps } if norm.is_none() && head_dim.is_none() => {
                    norm = Some(RowNorm { weight, eps, made });
                    x
                }
                Op::Reshape { x, ref shape } if is_swapped && head_dim.is_none() => {
                    head_dim = Some(head_dim_of(shape)?);
                    x
                }
                Op::ReshapeTranspose { x, ref shape, ref perm }
                    if !is_swapped && head_dim.is_none() && perm[..] == SWAPPED =>
                {
                    head_dim = Some(head_dim_of(shape)?);
                    x
                }
                Op::Split { .. } if is_swapped <= head_dim.is_some() => {
                    let piece = out.tensors().position(|piece| piece == value)?;
                    let split = index;
                    return Some(PieceTrace {
                        split,
                        piece,
                        head_dim,
                        norm,
                        rotation,
                        rotated,
                        between,
                    });
                }
                _ => return None,
            };
            between.push(index);
        }
    }
}

/// Returns the elements of a head in a view `[1, T, heads, head_dim]` whose number of heads is open.
fn head_dim_of(shape: &[Int]) -> Option<i64> {
    match *shape {
        [Int::Literal(1), _, Int::Literal(-1), Int::Literal(head_dim)] if head_dim > 0 => {
            Some(head_dim)
        }
        _ => None,
    }
}
