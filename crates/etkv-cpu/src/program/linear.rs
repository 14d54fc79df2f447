//! Calls of products with packed weights, and of packed embeddings. They do not use the cache, so they are
//! not part of a forward.

use std::sync::{Arc, Mutex, Weak};

use etkv_core::{fail, Result};
use etkv_delegate::{Argument, Host};

use super::argument::{check_elements, floats, integers, packed};
use super::forward::output_at;
use super::payload::{self, EmbeddingCall, LinearCall};
use crate::linear::{embed_into, multiply_into, Embedding, Linear, Product, Workspace, Workspaces};
use crate::parallel::Parallel;

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
    /// [`Shape`](etkv_core::Status::Shape) and [`Dtype`](etkv_core::Status::Dtype) for arguments that do not
    /// match the call; the errors of the host.
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
            if products
                .iter()
                .any(|product: &Product| overlaps(product.out, out.start, n_tokens * rows))
            {
                fail!(Shape, "outputs: two of them overlap");
            }
            products.push(Product {
                weights: packed(weights, format)?,
                bias: bias.map(|bias| floats(bias, "bias")).transpose()?,
                // SAFETY: only this call borrows the host's memory, and no input or other output overlaps it.
                out: unsafe { out.floats()? },
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
    /// [`Shape`](etkv_core::Status::Shape) and [`Dtype`](etkv_core::Status::Dtype) for arguments that do not
    /// match the call; the errors of the host.
    pub fn run(
        &self,
        inputs: &[Argument],
        output_type: i8,
        host: &mut dyn Host,
        parallel: &dyn Parallel,
    ) -> Result<()> {
        let [ids, weights] = self.inputs.map(|input| &inputs[input]);
        let Embedding { width, format, .. } = self.embedding;
        let numbers = integers(ids, "ids")?;
        check_elements(ids, "ids", numbers.len() / 8)?;
        let mut shape = ids.shape().to_vec();
        shape.push(width as i32);
        let out = output_at(host, 0, &shape, output_type, &[(ids, "ids"), (weights, "weights")])?;
        // SAFETY: only this call borrows the host's memory, and no input of the call overlaps it.
        let out = unsafe { out.floats()? };
        embed_into(&self.embedding, numbers, packed(weights, format)?, out, parallel)
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
