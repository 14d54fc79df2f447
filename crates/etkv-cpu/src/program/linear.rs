//! Calls of products with packed weights, and of packed embeddings. They do not use the cache, so they are
//! not part of a forward.

use std::sync::{Arc, Mutex, Weak};

use etkv_core::{fail, Result};
use etkv_delegate::{Argument, Host};

use super::argument::{check_elements, floats, packed, LONG};
use super::forward::output_at;
use super::payload::{self, EmbeddingCall, LinearCall};
use crate::linear::{
    embed_into, multiply_into, Embedding, Linear, Product, Scales, WeightFormat, Workspace,
    Workspaces,
};
use crate::parallel::Parallel;
use crate::tensor::Dtype;

/// A loaded call of products.
pub struct Linears {
    linear: Linear,
    inputs: Vec<Option<usize>>,
    workspaces: Arc<Workspaces<Workspace>>,
}

impl Linears {
    /// Returns the call of a checked payload.
    pub fn new(call: LinearCall) -> Self {
        static SHARED: Mutex<Weak<Workspaces<Workspace>>> = Mutex::new(Weak::new());
        let linear = call.linear();
        Self { linear, inputs: call.inputs, workspaces: Workspaces::shared(&SHARED) }
    }

    /// Returns the number of inputs.
    pub fn n_inputs(&self) -> usize {
        payload::n_inputs(&self.inputs)
    }

    /// Returns the number of outputs.
    pub fn n_outputs(&self) -> usize {
        self.linear.rows.len()
    }

    /// Runs the call.
    ///
    /// # Errors
    /// [`Shape`](etkv_core::Status::Shape) and [`Dtype`](etkv_core::Status::Dtype) for other arguments; the
    /// errors of the host.
    pub fn run(
        &self,
        inputs: &[Argument],
        output_types: &[i8],
        host: &mut dyn Host,
        parallel: &dyn Parallel,
    ) -> Result<()> {
        let input = |at: usize| self.inputs[at].and_then(|input| inputs.get(input));
        let Some(x) = input(0) else {
            fail!(Internal, "a call of products lacks its input");
        };
        let Linear { columns, format, ref rows } = self.linear;
        let Some((&width, outer)) = x.shape().split_last() else {
            fail!(Shape, "input: expected [.., {columns}], got shape {:?}", x.shape());
        };
        if width as usize != columns {
            fail!(Shape, "input: expected rows of {columns}, got {width}");
        }
        let elements = floats(x, "input")?;
        let n_tokens = elements.len() / columns;
        let mut products = Vec::with_capacity(rows.len());
        for (at, (&rows, &output_type)) in rows.iter().zip(output_types).enumerate() {
            let (Some(weights), bias) = (input(2 * at + 1), input(2 * at + 2)) else {
                fail!(Internal, "a call of products lacks its weights");
            };
            let mut shape = outer.to_vec();
            shape.push(rows as i32);
            let mut read = vec![(x, "input"), (weights, "weights")];
            read.extend(bias.map(|bias| (bias, "bias")));
            let out = output_at(host, at, &shape, output_type, &read)?;
            if out.dtype != Dtype::F32 {
                fail!(Dtype, "output: expected float32, got ExecuTorch's type {output_type}");
            }
            if products
                .iter()
                .any(|product: &Product| overlaps(product.out, out.start, n_tokens * rows))
            {
                fail!(Shape, "outputs: two of them overlap");
            }
            products.push(Product {
                weights: packed(weights, format)?,
                bias: bias.map(|bias| floats(bias, "bias")).transpose()?,
                // SAFETY: the host's memory has room for the shape and is aligned, and only this call borrows
                // it. No input of the call overlaps it.
                out: unsafe { std::slice::from_raw_parts_mut(out.start.cast(), n_tokens * rows) },
            });
        }
        self.workspaces.with(|workspace| {
            multiply_into(&self.linear, elements, &mut products, workspace, parallel)
        })
    }
}

/// Returns whether `n` numbers at `start` overlap those of an earlier output.
fn overlaps(earlier: &[f32], start: *const u8, n: usize) -> bool {
    let (earlier, start) = (earlier.as_ptr_range(), start.cast::<f32>());
    start < earlier.end && earlier.start < start.wrapping_add(n)
}

/// A loaded call of an embedding.
pub struct Embeddings {
    embedding: Embedding,
    inputs: [usize; 2],
}

impl Embeddings {
    /// Returns the call of a checked payload.
    pub fn new(call: &EmbeddingCall) -> Self {
        Self { embedding: call.embedding(), inputs: call.inputs }
    }

    /// Returns the number of inputs.
    pub fn n_inputs(&self) -> usize {
        payload::n_inputs(&self.inputs.map(Some))
    }

    /// Runs the call.
    ///
    /// # Errors
    /// [`InvalidArgument`](etkv_core::Status::InvalidArgument) for an id without a row;
    /// [`Shape`](etkv_core::Status::Shape) and [`Dtype`](etkv_core::Status::Dtype) for other arguments; the
    /// errors of the host.
    pub fn run(
        &self,
        inputs: &[Argument],
        output_type: i8,
        host: &mut dyn Host,
        parallel: &dyn Parallel,
    ) -> Result<()> {
        let [ids, weights] = self.inputs.map(|input| &inputs[input]);
        let Embedding { width, format, .. } = self.embedding;
        if !ids.is_tensor() || ids.scalar_type() != LONG {
            fail!(Dtype, "ids: expected int64, got ExecuTorch's type {}", ids.scalar_type());
        }
        check_elements(ids, "ids", ids.bytes().len() / 8)?;
        let mut shape = ids.shape().to_vec();
        shape.push(width as i32);
        let out = output_at(host, 0, &shape, output_type, &[(ids, "ids"), (weights, "weights")])?;
        if out.dtype != Dtype::F32 {
            fail!(Dtype, "output: expected float32, got ExecuTorch's type {output_type}");
        }
        let n = ids.bytes().len() / 8 * width;
        // SAFETY: the host's memory has room for the shape and is aligned, and only this call borrows it. No
        // input of the call overlaps it.
        let out = unsafe { std::slice::from_raw_parts_mut(out.start.cast(), n) };
        embed_into(&self.embedding, ids.bytes(), packed(weights, format)?, out, parallel)
    }
}

impl LinearCall {
    /// Returns the matrices of the call.
    pub fn linear(&self) -> Linear {
        let format = self.weights.format(self.group_size);
        Linear { columns: self.columns, format, rows: self.rows.clone() }
    }
}

impl EmbeddingCall {
    /// Returns the embedding of the call.
    pub fn embedding(&self) -> Embedding {
        let format = self.weights.format(self.group_size);
        Embedding { rows: self.rows, width: self.width, format }
    }
}

impl payload::Weights {
    /// Returns the format of weights in groups of `group`.
    pub fn format(self, group: usize) -> WeightFormat {
        match self {
            Self::Float32 => WeightFormat::F32,
            Self::Bfloat16 => WeightFormat::Bf16,
            Self::Int8 => WeightFormat::Int8 { group, scales: Scales::Bf16 },
            Self::Int8Float16 => WeightFormat::Int8 { group, scales: Scales::F16 },
            Self::Int8Float32 => WeightFormat::Int8 { group, scales: Scales::F32 },
            Self::Int8Bfloat16Biased => WeightFormat::Int8 { group, scales: Scales::Bf16Biased },
            Self::Int8Float16Biased => WeightFormat::Int8 { group, scales: Scales::F16Biased },
            Self::Int8Float32Biased => WeightFormat::Int8 { group, scales: Scales::F32Biased },
            Self::Int8Nested => WeightFormat::Int8 { group, scales: Scales::Nested },
            Self::Int4 => WeightFormat::Int4 { group, scales: Scales::Bf16 },
            Self::Int4Float16 => WeightFormat::Int4 { group, scales: Scales::F16 },
            Self::Int4Float32 => WeightFormat::Int4 { group, scales: Scales::F32 },
            Self::Int4Bfloat16Biased => WeightFormat::Int4 { group, scales: Scales::Bf16Biased },
            Self::Int4Float16Biased => WeightFormat::Int4 { group, scales: Scales::F16Biased },
            Self::Int4Float32Biased => WeightFormat::Int4 { group, scales: Scales::F32Biased },
            Self::Int4Nested => WeightFormat::Int4 { group, scales: Scales::Nested },
            Self::Fp4 => WeightFormat::Fp4 { group },
        }
    }
}
