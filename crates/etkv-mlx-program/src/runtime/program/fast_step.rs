//! Steps that a program's executor runs instead of the interpreter.

use etkv_delegate::{Argument, Host};
use mlx_rs::Dtype;
use smallvec::SmallVec;

use super::inputs::{check_shape, integers};
use super::LoadedProgram;
use crate::dtype::{dtype_of, item_size};
use crate::error::{fail, Result};
use crate::ir::{InputSpec, Value};
use crate::ops::frame::HostInts;
use crate::runtime::step_executor::{RequestedOutputs, StepOutputs, StepTokens};
use etkv::mlx::Mlx;
use etkv::MlxCache;

impl LoadedProgram {
    /// Offers a step to the executor. If the executor runs the step, it passes the `wanted` logits to the host, and
    /// this returns true. Otherwise nothing has changed, and the interpreter must run the step.
    pub(super) fn run_fast(
        &self,
        mlx: &mut Mlx,
        cache: &mut MlxCache,
        inputs: &[Argument],
        wanted: RequestedOutputs,
        output_types: &[i8],
        host: &mut dyn Host,
    ) -> Result<bool> {
        let Some(executor) = &self.executor else {
            return Ok(false);
        };
        let signature = executor.signature();
        let n_outputs = if signature.gives_hidden { 2 } else { 1 };
        let is_own = |&of: &i8| dtype_of(of).ok() == Some(signature.dtype);
        if output_types.len() != n_outputs || !output_types.iter().all(is_own) {
            return Ok(false);
        }
        let given = |value| given(&self.inputs, inputs, value);
        let text = &signature.text;
        let (Some(ids), Some(positions)) = (given(text.tokens()), given(text.positions())) else {
            return Ok(false);
        };
        let narrow = |&position: &i64| i32::try_from(position).ok();
        let Some(positions) = positions.iter().map(narrow).collect::<Option<Vec<i32>>>() else {
            return Ok(false);
        };
        let mut rows: SmallVec<[&[u8]; 2]> = SmallVec::new();
        for own in &signature.rows {
            match given_rows(&self.inputs, inputs, own.value, ids.len()) {
                Some(bytes) => rows.push(bytes),
                None => return Ok(false),
            }
        }
        let mut take = |mlx: &mut Mlx, made: StepOutputs| match made {
            StepOutputs::Logits(logits, hidden) => {
                let mut made = [Some(logits), hidden];
                made.swap(0, signature.logits_at);
                mlx.outside(|| {
                    for (index, (bytes, shape)) in made.iter().flatten().enumerate() {
                        host.place(index, shape, bytes.len())?.copy_from_slice(bytes);
                    }
                    Ok(())
                })
            }
            StepOutputs::ArgmaxIds(_) => fail!(Internal, "expected logits of a step, got ids"),
        };
        let tokens = StepTokens { ids: &ids, positions: &positions, rows: &rows };
        executor.try_step(mlx, &self.constants, cache, tokens, wanted, &mut take)
    }

    /// Offers a step to the executor, and commits it if `take` accepts the argmax ids, which are negative for logits
    /// that are not finite. Returns `None` if the executor did not run the step.
    pub(crate) fn choose_fast<T>(
        &self,
        mlx: &mut Mlx,
        cache: &mut MlxCache,
        (ids, positions): (&[i64], &[i32]),
        take: impl Fn(&mut Mlx, &[i32]) -> Result<T>,
    ) -> Result<Option<T>> {
        let Some(executor) = &self.executor else {
            return Ok(None);
        };
        let tokens = StepTokens { ids, positions, rows: &[] };
        let mut taken = None;
        let mut take = |mlx: &mut Mlx, made: StepOutputs| match made {
            StepOutputs::ArgmaxIds(ids) => {
                taken = Some(take(mlx, ids)?);
                Ok(())
            }
            StepOutputs::Logits(..) => fail!(Internal, "expected ids of a step, got logits"),
        };
        executor.try_step(
            mlx,
            &self.constants,
            cache,
            tokens,
            RequestedOutputs::ArgmaxIds,
            &mut take,
        )?;
        Ok(taken)
    }

    /// Offers a step at these positions to the executor, to capture it. Tokens and other input rows are zeros.
    pub(crate) fn run_fast_once(
        &self,
        mlx: &mut Mlx,
        cache: &mut MlxCache,
        positions: &[i32],
        wanted: RequestedOutputs,
    ) -> Result<()> {
        let Some(executor) = &self.executor else {
            return Ok(());
        };
        let signature = executor.signature();
        let n = positions.len();
        if n > signature.text.max_tokens(cache) as usize {
            return Ok(());
        }
        let ids = vec![0; n];
        let rows: Vec<Vec<u8>> = signature
            .rows
            .iter()
            .map(|own| vec![0; n * own.width * item_size(own.dtype)])
            .collect();
        let rows: Vec<&[u8]> = rows.iter().map(Vec::as_slice).collect();
        let tokens = StepTokens { ids: &ids, positions, rows: &rows };
        executor.try_step(mlx, &self.constants, cache, tokens, wanted, &mut |_, _| Ok(()))?;
        Ok(())
    }
}

/// Returns the elements of an integer input, if it matches its declaration.
fn given(specs: &[InputSpec], inputs: &[Argument], wanted: Value) -> Option<HostInts> {
    let (dtype, _, bytes) = declared(specs, inputs, wanted)?;
    integers(dtype, bytes)
}

/// Returns the bytes of an input of rows, if the input matches its declaration and has a row for each token.
fn given_rows<'a>(
    specs: &[InputSpec],
    inputs: &[Argument<'a>],
    wanted: Value,
    tokens: usize,
) -> Option<&'a [u8]> {
    let (_, shape, bytes) = declared(specs, inputs, wanted)?;
    (shape.get(1) == Some(&(tokens as i32))).then_some(bytes)
}

/// Returns the dtype, the shape and the bytes of an input, if it matches its declaration.
fn declared<'a, 'b>(
    specs: &[InputSpec],
    inputs: &'b [Argument<'a>],
    wanted: Value,
) -> Option<(Dtype, &'b [i32], &'a [u8])> {
    let is_wanted =
        |spec: &InputSpec| matches!(spec, InputSpec::Tensor { value, .. } if *value == wanted);
    let index = specs.iter().position(is_wanted)?;
    let (InputSpec::Tensor { shape, scalar_type, .. }, input) = (&specs[index], inputs.get(index)?)
    else {
        return None;
    };
    let dtype = dtype_of(*scalar_type).ok()?;
    let n: usize = input.shape().iter().map(|&size| size as usize).product();
    let fits = specs.len() == inputs.len()
        && input.is_tensor()
        && input.scalar_type() == *scalar_type
        && check_shape(input.shape(), shape).is_ok()
        && n * item_size(dtype) == input.bytes().len();
    fits.then(|| (dtype, input.shape(), input.bytes()))
}
