//! Recognizes decoders that can be captured, in the graphs that the GPU passes produce.

mod gates;
mod hidden;
mod norms;

use std::collections::{HashMap, HashSet};
use std::fmt;

use etkv_cuda::Gate;
use mlx_rs::Dtype;

use super::heads::{HeadsProducts, LayerHeads, RowNorm, FEATURES};
use super::packed::{self, PackedConstants, PackedWeights};
use etkv_mlx_program::ir::{Binary, Graph, Index, Norm, Op, Out, Unary, Value};
use etkv_mlx_program::passes;
use etkv_mlx_program::TextInputs;

/// The parts of a program, in the order in which they run. A [`Value`] is a constant of the program; a
/// `usize` is the number of a buffer between two parts.
#[derive(Debug, PartialEq)]
pub struct Recipe {
    pub parts: Vec<Part>,
    /// The number of buffers.
    pub n_buffers: usize,
    /// The buffer of the logits.
    pub logits: usize,
    /// The index of the logits in the outputs.
    pub logits_at: usize,
    /// The buffers that are concatenated to the program's other output, the hidden states. Empty if there is
    /// none.
    pub tapped: Vec<usize>,
    /// The host's inputs in addition to tokens.
    pub given: Vec<RowInput>,
    /// Whether the program computes logits for the last row only. Steps of several tokens are then not
    /// captured.
    pub last_row_only: bool,
    pub inputs: TextInputs,
}

#[derive(Debug, PartialEq)]
pub enum Part {
    /// The embeddings of tokens, multiplied by the number in the constant `scale`.
    Embed {
        table: Weight,
        scale: Option<Value>,
        out: usize,
    },
    Product(Product),
    Normalize(Normalize),
    /// The concatenation of normalized rows.
    Join {
        x: Vec<usize>,
        out: usize,
    },
    /// `x + share * (y - x)`.
    Blend {
        x: usize,
        y: usize,
        share: usize,
        out: usize,
    },
    Attend {
        layer: usize,
        q: usize,
        scale: f32,
        dtype: Option<Dtype>,
        out: usize,
    },
}

/// A matrix among the program's constants.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Weight {
    /// A float matrix, which is transposed before its use if `transposed`.
    Plain {
        value: Value,
        transposed: bool,
    },
    Packed(PackedConstants),
}

#[derive(Debug, PartialEq)]
pub struct Product {
    pub x: usize,
    pub weight: Weight,
    pub bias: Option<Value>,
    pub norm: Option<Norm>,
    pub gate: Option<Gate>,
    pub residual: Option<usize>,
    /// The layer's heads, if the features are heads.
    pub heads: Option<LayerHeads>,
    pub out: usize,
}

impl Product {
    /// Returns a product without operations around it.
    pub fn plain(x: usize, weight: Weight, out: usize) -> Self {
        Self { x, weight, bias: None, norm: None, gate: None, residual: None, heads: None, out }
    }
}

/// Normalizes `x` and adds the residual. `next` is a norm of the sum, and the buffer of its result.
#[derive(Debug, PartialEq)]
pub struct Normalize {
    pub x: usize,
    pub norm: RowNorm,
    pub residual: Option<usize>,
    pub out: usize,
    pub next: Option<(RowNorm, usize)>,
}

/// An input `[1, T, width]`, in a buffer that the host fills with one row for each token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RowInput {
    pub value: Value,
    pub width: usize,
    pub dtype: Dtype,
    pub buffer: usize,
}

impl Recipe {
    /// Returns the recipe of a program, or what is not supported. Also refuses a program if the interpreter
    /// would treat another output as the logits.
    pub fn with_known_logits(graph: &Graph) -> Result<Self, Unknown> {
        let recipe = Self::of(graph)?;
        match passes::logits_output(graph) {
            Ok((at, _)) if at == recipe.logits_at => Ok(recipe),
            _ => Err(Unknown::Logits),
        }
    }

    /// Returns the recipe of a program, or what is not supported.
    pub fn of(graph: &Graph) -> Result<Self, Unknown> {
        match packed::as_plain(graph) {
            Some((plain, weights)) => Self::read(&plain, &weights),
            None => Self::read(graph, &PackedWeights::new()),
        }
    }

    /// Returns a constant of the embedding table that has the dtype of the embeddings.
    pub fn table(&self) -> Option<Value> {
        match self.parts.first()? {
            &Part::Embed { table: Weight::Plain { value, .. }, .. }
            | &Part::Embed {
                table: Weight::Packed(PackedConstants { scales: value, .. }), ..
            } => Some(value),
            _ => None,
        }
    }

    fn read(graph: &Graph, packed: &PackedWeights) -> Result<Self, Unknown> {
        let (given, text) = hidden::inputs(graph);
        let Ok(inputs) = TextInputs::find(&text) else {
            return Err(Unknown::Inputs);
        };
        let positions = positions(graph, inputs.positions());
        let mut reader = Reader {
            graph,
            packed,
            inputs,
            buffers: given.iter().map(|given| (given.value, given.buffer)).collect(),
            joined: HashMap::new(),
            found: HeadsProducts::of(graph, &positions),
            positions,
            readers: passes::only_readers(graph),
            taken: HashSet::new(),
            parts: Vec::new(),
            n_buffers: given.len(),
            n_given: given.len(),
            last_row_only: false,
        };
        for (index, instruction) in graph.main.instructions.iter().enumerate() {
            reader.read(index).ok_or_else(|| Unknown::Instruction(index, instruction.op.kind()))?;
        }
        let (logits, logits_at, tapped) = reader.outputs().ok_or(Unknown::Outputs)?;
        let has_attention = reader.parts.iter().any(|part| matches!(part, Part::Attend { .. }));
        if !graph.buffers.is_empty() || !has_attention {
            return Err(Unknown::Cache);
        }
        Ok(Self {
            parts: reader.parts,
            n_buffers: reader.n_buffers,
            logits,
            logits_at,
            tapped,
            given,
            last_row_only: reader.last_row_only,
            inputs,
        })
    }
}

/// Why a program has no recipe.
#[derive(Debug, Clone, PartialEq)]
pub enum Unknown {
    /// The inputs are not token ids and positions, optionally with hidden states.
    Inputs,
    /// The index of an instruction in the graph after the passes, and its kind.
    Instruction(usize, String),
    /// The outputs are not logits, optionally with hidden states.
    Outputs,
    /// More than one output may be the logits.
    Logits,
    /// The program stores keys and values itself, or has no attention.
    Cache,
}

impl fmt::Display for Unknown {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Inputs => out.write_str(
                "its inputs are not token ids and positions, alone or with hidden states",
            ),
            Self::Instruction(index, kind) => {
                write!(out, "instruction {index}, {kind}, is not part of a supported decoder")
            }
            Self::Outputs => {
                out.write_str("its outputs are not logits, alone or with hidden states")
            }
            Self::Logits => out.write_str("more than one of its outputs may be the logits"),
            Self::Cache => out.write_str("it has no attention over a cache of the host"),
        }
    }
}

/// Returns the values that contain the positions: the input, and its conversions to int32.
fn positions(graph: &Graph, input: Value) -> Vec<Value> {
    let mut all = vec![input];
    for instruction in &graph.main.instructions {
        if let (&Op::AsType { x, dtype: Dtype::Int32 }, Out::Tensor(out)) =
            (&instruction.op, instruction.out)
        {
            if all.contains(&x) {
                all.push(out);
            }
        }
    }
    all
}

struct Reader<'a> {
    graph: &'a Graph,
    packed: &'a PackedWeights,
    inputs: TextInputs,
    /// The buffer of each value that has one.
    buffers: HashMap<Value, usize>,
    /// The buffers of each output that concatenates the rows of several buffers.
    joined: HashMap<Value, Vec<usize>>,
    /// The values that contain the positions.
    positions: Vec<Value>,
    /// Products whose heads are computed by separate instructions.
    found: HeadsProducts,
    /// The only instruction that reads each value, for values with one reader.
    readers: HashMap<Value, usize>,
    /// Instructions that an earlier part includes.
    taken: HashSet<usize>,
    parts: Vec<Part>,
    n_buffers: usize,
    /// The number of buffers that the host fills. These buffers come first.
    n_given: usize,
    last_row_only: bool,
}

impl Reader<'_> {
    fn buffer(&self, value: Value) -> Option<usize> {
        self.buffers.get(&value).copied()
    }

    /// Assigns a new buffer to a value.
    fn new_buffer(&mut self, value: Value) -> usize {
        let buffer = self.n_buffers;
        self.n_buffers += 1;
        self.buffers.insert(value, buffer);
        buffer
    }

    /// Assigns the buffer of another value to a value.
    fn same(&mut self, value: Value, as_other: Value) -> Option<()> {
        self.buffers.insert(value, self.buffer(as_other)?);
        Some(())
    }

    fn constant(&self, value: Value) -> Option<Value> {
        ((value.0 as usize) < self.graph.constants.len()).then_some(value)
    }

    fn weight(&self, value: Value, transposed: bool) -> Option<Weight> {
        match self.packed.get(&value) {
            Some(packed) => (!transposed).then_some(Weight::Packed(*packed)),
            None => self.constant(value).map(|value| Weight::Plain { value, transposed }),
        }
    }

    fn optional(&self, value: Option<Value>) -> Option<Option<Value>> {
        match value {
            Some(value) => self.constant(value).map(Some),
            None => Some(None),
        }
    }

    fn norm(&self, norm: Option<Norm>) -> Option<Option<Norm>> {
        match norm {
            Some(norm) => self.optional(norm.weight).map(|_| Some(norm)),
            None => Some(None),
        }
    }

    /// Reads an instruction. Returns `None` if it is not supported.
    fn read(&mut self, index: usize) -> Option<()> {
        let instruction = &self.graph.main.instructions[index];
        if self.found.between.contains(&index) || self.taken.contains(&index) {
            return Some(());
        }
        match (&instruction.op, instruction.out) {
            // The integer is the number of tokens. Only the shapes of views use it.
            (Op::SymSize { .. }, Out::Int(_)) => Some(()),
            (&Op::AsType { x, dtype: Dtype::Int32 }, Out::Tensor(out))
                if self.positions.contains(&x) && self.positions.contains(&out) =>
            {
                Some(())
            }
            (&Op::Take { x, index: Index::Many(ids), axis: 0 }, Out::Tensor(out))
                if ids == self.inputs.tokens() =>
            {
                let table = self.weight(x, false)?;
                let out = self.new_buffer(out);
                self.parts.push(Part::Embed { table, scale: None, out });
                Some(())
            }
            (op @ Op::RmsNorm { .. }, Out::Tensor(out)) => self.read_norm(op, out),
            (op @ Op::Binary { function: Binary::Subtract, .. }, Out::Tensor(out)) => {
                self.read_blend(op, out)
            }
            (op @ Op::Binary { .. }, Out::Tensor(out)) => self.read_scale(op, out),
            (op @ Op::Concatenate { .. }, Out::Tensor(out)) => self.read_join(op, out),
            (&Op::LastToken { x }, Out::Tensor(out)) => {
                self.last_row_only = true;
                self.same(out, x)
            }
            (Op::TransposeReshape { x, perm, shape }, Out::Tensor(out))
                if perm[..] == [0, 2, 1, 3] && shape.len() == 3 =>
            {
                let is_attention = self.parts.iter().any(
                    |part| matches!(part, Part::Attend { out, .. } if Some(*out) == self.buffer(*x)),
                );
                is_attention.then_some(())?;
                self.same(out, *x)
            }
            (op, Out::Tensor(out)) => self.read_product(op, out, index),
            (op @ Op::Split { .. }, out @ Out::Tensors(_, 2)) => self.read_gate(op, out),
            (op, Out::Tensors(..)) => self.read_layer(op, instruction.out, index),
            _ => None,
        }
    }

    /// Returns a product that has no buffer yet.
    fn product(
        &self,
        x: Value,
        (weight, transposed): (Value, bool),
        bias: Option<Value>,
        norm: Option<Norm>,
    ) -> Option<Product> {
        let plain = Product::plain(self.buffer(x)?, self.weight(weight, transposed)?, 0);
        Some(Product { bias: self.optional(bias)?, norm: self.norm(norm)?, ..plain })
    }

    fn read_product(&mut self, op: &Op, out: Value, index: usize) -> Option<()> {
        let product = match *op {
            Op::UpdateAndAttend { .. } => return self.read_attention(op, out),
            Op::Linear { x, weight, bias, transposed } => {
                self.product(x, (weight, transposed), bias, None)?
            }
            Op::LinearBlock { x, weight, bias, transposed, norm, gate, residual } => Product {
                gate: match gate {
                    None => None,
                    Some(function) => Some(gate_of(function)?),
                },
                residual: match residual {
                    None => None,
                    Some(residual) => Some(self.buffer(residual)?),
                },
                ..self.product(x, (weight, transposed), bias, norm)?
            },
            _ => return None,
        };
        let (heads, out) = match self.found.products.remove(&index) {
            Some(found) => {
                for norm in [found.heads.q_norm, found.heads.k_norm] {
                    self.optional(norm.and_then(|norm| norm.weight))?;
                }
                self.optional(found.heads.rotation.map(|(periods, _)| periods))?;
                (Some(found.heads), found.queries)
            }
            None => (None, out),
        };
        let out = self.new_buffer(out);
        self.parts.push(Part::Product(Product { heads, out, ..product }));
        Some(())
    }

    /// Reads a product of heads. The attention that reads its outputs determines the layer.
    fn read_layer(&mut self, op: &Op, out: Out, index: usize) -> Option<()> {
        let &Op::LinearHeads { x, weight, bias, transposed, norm, ref heads } = op else {
            return None;
        };
        let pieces: Vec<Value> = out.tensors().collect();
        let &[queries, keys, values] = &pieces[..] else {
            return None;
        };
        let mut readers = self.graph.main.instructions[index..].iter().filter(|instruction| {
            instruction.op.reads().iter().any(|value| pieces.contains(value))
        });
        let (Some(reader), None) = (readers.next(), readers.next()) else {
            return None;
        };
        let &Op::UpdateAndAttend { q, k, v, layer, .. } = &reader.op else {
            return None;
        };
        let &[n_q, n_rotated] = &heads.at[..] else {
            return None;
        };
        let sizes = [n_q, n_rotated - n_q, heads.n - n_rotated, heads.head_dim];
        let [n_q, n_kv, n_values, head_dim] = sizes.map(|size| usize::try_from(size).unwrap_or(0));
        let fits = [q, k, v] == [queries, keys, values]
            && n_rotated == heads.rotated
            && n_kv == n_values
            && self.positions.contains(&heads.offsets)
            && self.constant(heads.periods).is_some();
        fits.then_some(())?;
        let rotation = Some((heads.periods, heads.dtype));
        let (q_norm, k_norm) = (None, None);
        let rotated = head_dim;
        let heads = LayerHeads { layer, n_q, n_kv, head_dim, rotation, rotated, q_norm, k_norm };
        let product = self.product(x, (weight, transposed), bias, norm)?;
        let out = self.new_buffer(queries);
        self.parts.push(Part::Product(Product { heads: Some(heads), out, ..product }));
        Some(())
    }

    fn read_attention(&mut self, op: &Op, out: Value) -> Option<()> {
        // The kernels support neither a softcap nor sinks.
        let &Op::UpdateAndAttend {
            q,
            position,
            layer,
            scale,
            softcap: None,
            sinks: None,
            last_query,
            out_dtype: dtype,
            ..
        } = op
        else {
            return None;
        };
        self.positions.contains(&position).then_some(())?;
        // Queries, keys and values must come from the same product.
        let queries = self.buffer(q)?;
        let is_own = |part: &Part| {
            matches!(part, Part::Product(Product { heads: Some(heads), out, .. })
                if heads.layer == layer && *out == queries)
        };
        self.parts.iter().any(is_own).then_some(())?;
        self.last_row_only |= last_query;
        let out = self.new_buffer(out);
        self.parts.push(Part::Attend { layer, q: queries, scale, dtype, out });
        Some(())
    }
}

fn gate_of(function: Unary) -> Option<Gate> {
    match function {
        Unary::Silu => Some(Gate::Silu),
        Unary::Gelu => Some(Gate::Gelu),
        Unary::GeluTanh => Some(Gate::GeluTanh),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
