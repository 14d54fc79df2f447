//! Recurrences together with some of the operations that compute their operands.

use std::collections::HashMap;

use etkv::kernels::recurrent::{HeadNorm, Numbers, Operands, Rows};
use etkv::kernels::Function;
use etkv::mlx::slice_axis;
use etkv::recurrent::{fused_scan, scan, RecurrentRows, RecurrentSpec, ScanInputs};
use etkv_core::RecurrentLayer;
use mlx_rs::{Array, Dtype};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::cuda_text::{self, InputType};
use super::norm::in_float32;
use super::views::reshape_transpose;
use super::{compiled, Result};
use crate::error::fail;
use crate::ir::{Expression, Node, ScanNumbers, ScanRows};

/// A fused recurrence, with its operands.
pub struct FusedScan<'a> {
    /// The sizes that the program declares.
    pub config: RecurrentLayer,
    /// The factor of the outputs.
    pub scale: f32,
    pub rows: &'a [ScanRows; 3],
    pub numbers: &'a [ScanNumbers],
    /// The tensors of `rows`, then those of `numbers`.
    pub tensors: &'a [Array],
    pub out_dtype: Option<Dtype>,
    pub on_gpu: bool,
}

impl FusedScan<'_> {
    /// Computes the recurrence and its operands with one kernel if possible. Otherwise computes the operands
    /// one by one before the recurrence.
    pub fn run(&self, spec: &RecurrentSpec) -> Result<(Array, RecurrentRows)> {
        let RecurrentLayer::Recurrence { k_heads, heads, k_dim, v_dim, .. } = self.config else {
            fail!(Internal, "cannot scan with the sizes of a convolution");
        };
        let inputs = self.inputs()?;
        if let (Some(out_dtype), true) = (self.out_dtype, self.on_gpu) {
            if let Some(made) = self.fused(&inputs, heads, spec, out_dtype)? {
                return Ok(made);
            }
        }
        let sizes = [(k_heads, k_dim), (k_heads, k_dim), (heads, v_dim)];
        let operands = self.rows.iter().zip(self.tensors).zip(sizes);
        let operands = operands.map(|((rows, x), sizes)| heads_of(*rows, x, sizes));
        let numbers = self.numbers.iter().zip(&inputs).map(|(numbers, of)| match numbers {
            ScanNumbers::Tensor => Ok(of[0].clone()),
            ScanNumbers::Function { expression, .. } => {
                let operations =
                    expression.nodes.iter().filter(|node| !matches!(node, Node::Input(_)));
                let made = match operations.count() {
                    // A single operation is one of MLX's, and needs no kernel of its own.
                    0..=1 => compiled::separately(expression, of),
                    _ => compiled::run(self.on_gpu, expression, of),
                };
                Ok(made?.transpose_axes(&[0, 2, 1])?)
            }
        });
        let operands = operands.chain(numbers).collect::<Result<SmallVec<[Array; 5]>>>()?;
        let [q, k, v, g, beta @ ..] = &operands[..] else {
            fail!(Internal, "a scan with {} operands", operands.len());
        };
        let fits = matches!(*k.shape(), [_, n, _, dim] if [n, dim] == [k_heads, k_dim])
            && matches!(*v.shape(), [_, n, _, dim] if [n, dim] == [heads, v_dim]);
        if !fits {
            fail!(
                Shape,
                "expected keys and values of {}, got {:?} and {:?}",
                self.config,
                k.shape(),
                v.shape()
            );
        }
        let inputs = ScanInputs { q, k, v, g, beta: beta.first() };
        scan(&inputs, self.scale, spec, self.out_dtype)
    }

    /// Returns the tensors of each of `numbers`.
    fn inputs(&self) -> Result<SmallVec<[SmallVec<[&Array; 4]>; 2]>> {
        let mut tensors = self.tensors.iter().skip(self.rows.len());
        let inputs = self.numbers.iter().map(|numbers| {
            let n = match numbers {
                ScanNumbers::Tensor => 1,
                ScanNumbers::Function { n_inputs, .. } => *n_inputs,
            };
            let of: SmallVec<[&Array; 4]> = tensors.by_ref().take(n).collect();
            if of.len() != n {
                fail!(Internal, "expected {n} tensors of a scan's operand, got {}", of.len());
            }
            Ok(of)
        });
        inputs.collect()
    }

    fn fused(
        &self,
        inputs: &[SmallVec<[&Array; 4]>],
        heads: i32,
        spec: &RecurrentSpec,
        out_dtype: Dtype,
    ) -> Result<Option<(Array, RecurrentRows)>> {
        let [Some(q), Some(k), Some(v)] = [0, 1, 2].map(|at| self.tensors.get(at)) else {
            fail!(Internal, "a scan with {} tensors", self.tensors.len());
        };
        let rows = |at: usize, x| match self.rows[at] {
            ScanRows::Tensor => Rows::Heads(x),
            ScanRows::Columns { start, norm } => Rows::Columns { x, start, norm },
        };
        let n_tokens = spec.plan.n_tokens() as i32;
        let mut functions: SmallVec<[Option<Function>; 2]> = SmallVec::new();
        for ((numbers, of), prefix) in self.numbers.iter().zip(inputs).zip(["g", "b"]) {
            let function = match numbers {
                ScanNumbers::Tensor => None,
                ScanNumbers::Function { expression, .. } => {
                    let shape = cuda_text::shape(expression, of);
                    let fits = shape.is_some_and(|shape| shape[..] == [1, n_tokens, heads]);
                    let function = match fits {
                        true => function_of(expression, of, prefix),
                        false => None,
                    };
                    if function.is_none() {
                        return Ok(None);
                    }
                    function
                }
            };
            functions.push(function);
        }
        let mut numbers = functions.iter().zip(inputs).map(|(function, of)| match function {
            Some(function) => Numbers::Function(function, of),
            None => Numbers::Heads(of[0]),
        });
        let Some(decays) = numbers.next() else {
            fail!(Internal, "a scan without decays");
        };
        let rows = [rows(0, q), rows(1, k), rows(2, v)];
        let operands = Operands { rows, decays, strengths: numbers.next() };
        fused_scan(self.config, &operands, self.scale, spec, out_dtype)
    }
}

/// Returns the vectors of `x` as `[1, heads, T, dim]`.
fn heads_of(rows: ScanRows, x: &Array, (heads, dim): (i32, i32)) -> Result<Array> {
    let ScanRows::Columns { start, norm } = rows else {
        return Ok(x.clone());
    };
    let (last, stop) = (x.ndim().saturating_sub(1), start.saturating_add(heads * dim));
    let columns = slice_axis(x, last, start, stop, 1)?;
    let perm = [0, 2, 1, 3];
    match norm {
        Some(HeadNorm { eps, factor }) => {
            let heads = columns.reshape(&[1, -1, heads, dim])?;
            let factor = Array::from_f32(factor);
            let normalized = in_float32(&heads, None, Some(&factor), eps, Dtype::Float32)?;
            Ok(normalized.transpose_axes(&perm)?)
        }
        None => {
            let tokens = columns.size() as i32 / (heads * dim).max(1);
            reshape_transpose(&columns, &[1, tokens, heads, dim], &perm)
        }
    }
}

/// The maximum number of expressions, and the maximum number of input types for each of them.
const MAX_FUNCTIONS: usize = 256;
const MAX_TYPES: usize = 8;

/// The functions of an expression, by the types and the names of its inputs; `None` if it has no text.
type Functions = Vec<(SmallVec<[InputType; 4]>, &'static str, Option<Function>)>;

/// The functions of all expressions. Used only under the lock of MLX.
static FUNCTIONS: Mutex<Option<HashMap<Expression, Functions>>> = Mutex::new(None);

/// Returns the text of an expression of `[1, T, heads]`, if it has one.
fn function_of(
    expression: &Expression,
    inputs: &[&Array],
    prefix: &'static str,
) -> Option<Function> {
    let types: SmallVec<[InputType; 4]> =
        inputs.iter().map(|input| (input.dtype(), input.ndim())).collect();
    let mut all = FUNCTIONS.lock();
    let all = all.get_or_insert_default();
    if !all.contains_key(expression) && all.len() < MAX_FUNCTIONS {
        all.insert(expression.clone(), Functions::new());
    }
    let functions = all.get_mut(expression)?;
    let known = functions.iter().find(|(of, named, _)| (of, *named) == (&types, prefix));
    if let Some((.., function)) = known {
        return function.clone();
    }
    if functions.len() >= MAX_TYPES {
        return None;
    }
    let text = cuda_text::function(expression, &types, prefix, &["0", "token", "head"]);
    let function = text.map(|text| Function::new(&text));
    functions.push((types, prefix, function.clone()));
    function
}
