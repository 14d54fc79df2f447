//! Steps of a host on a program, captured where they can be.

use etkv_host::{Argument, Host};
use mlx_rs::Dtype;
use smallvec::SmallVec;

use super::{recipe, Given, Made, Wanted};
use crate::dtype::{dtype_of, item_size};
use crate::error::{fail, Result};
use crate::execute::{check_shape, integers, Loaded};
use crate::frame::HostInts;
use crate::ir::{InputSpec, Value};
use crate::warm_up::most_tokens;
use etkv::mlx::Mlx;
use etkv::MlxCache;

impl Loaded {
    /// Runs a step as one launch, and gives the host the `wanted` logits. Returns whether it did. Otherwise it has changed nothing, and the
    /// interpreter runs the step, or says what is wrong with it.
    pub fn run_captured(
        &self,
        mlx: &mut Mlx,
        cache: &mut MlxCache,
        inputs: &[Argument],
        wanted: Wanted,
        output_types: &[i8],
        host: &mut dyn Host,
    ) -> Result<bool> {
        let Some(captured) = &self.captured else {
            return Ok(false);
        };
        let n_outputs = if captured.recipe.tapped.is_empty() { 1 } else { 2 };
        let is_own = |&of: &i8| dtype_of(of).ok() == Some(captured.planner.dtype);
        if output_types.len() != n_outputs || !output_types.iter().all(is_own) {
            return Ok(false);
        }
        let text = &captured.recipe.inputs;
        let given = |value| given(&self.inputs, inputs, value);
        let (Some(ids), Some(positions)) = (given(text.tokens()), given(text.positions())) else {
            return Ok(false);
        };
        let narrow = |&position: &i64| i32::try_from(position).ok();
        let Some(positions) = positions.iter().map(narrow).collect::<Option<Vec<i32>>>() else {
            return Ok(false);
        };
        let mut rows: SmallVec<[&[u8]; 2]> = SmallVec::new();
        for own in &captured.recipe.given {
            match given_rows(&self.inputs, inputs, own.value, ids.len()) {
                Some(bytes) => rows.push(bytes),
                None => return Ok(false),
            }
        }
        let take = |mlx: &mut Mlx, made: Made| match made {
            Made::Logits(logits, hidden) => {
                let mut made = [Some(logits), hidden];
                made.swap(0, captured.recipe.logits_at);
                let outputs: SmallVec<[Argument; 2]> = output_types
                    .iter()
                    .zip(made.iter().flatten())
                    .map(|(&of, (bytes, shape))| Argument::tensor(of, shape, bytes))
                    .collect();
                Ok(mlx.outside(|| host.take(&outputs))?)
            }
            Made::Chosen(_) => fail!(Internal, "a step chose ids in place of logits"),
        };
        let given = Given { ids: &ids, positions: &positions, rows: &rows };
        let ran = captured.run(mlx, &self.constants, cache, given, wanted, take)?;
        Ok(ran.is_some())
    }

    /// Runs a step as one launch, and commits it if `take` takes the place of the greatest logit of each
    /// token, less than 0 where logits are not finite. Returns `None` as
    /// [`run_captured`](Self::run_captured) returns false.
    pub fn choose_captured<T>(
        &self,
        mlx: &mut Mlx,
        cache: &mut MlxCache,
        (ids, positions): (&[i64], &[i32]),
        take: impl FnOnce(&mut Mlx, &[i32]) -> Result<T>,
    ) -> Result<Option<T>> {
        let Some(captured) = &self.captured else {
            return Ok(None);
        };
        let given = Given { ids, positions, rows: &[] };
        let take = |mlx: &mut Mlx, made: Made| match made {
            Made::Chosen(ids) => take(mlx, ids),
            Made::Logits(..) => fail!(Internal, "a step made logits in place of ids"),
        };
        captured.run(mlx, &self.constants, cache, given, Wanted::Chosen, take)
    }

    /// Runs a step at these positions as one launch, for its own sake: with tokens, and rows besides, of zeros. Does
    /// nothing if it cannot be.
    pub fn run_captured_once(
        &self,
        mlx: &mut Mlx,
        cache: &mut MlxCache,
        positions: &[i32],
        wanted: Wanted,
    ) -> Result<()> {
        let Some(captured) = &self.captured else {
            return Ok(());
        };
        let n = positions.len();
        if n > most_tokens(&captured.recipe.inputs, cache) as usize {
            return Ok(());
        }
        let ids = vec![0; n];
        let zeros = |own: &recipe::Given| vec![0; n * own.width * item_size(own.dtype)];
        let rows: Vec<Vec<u8>> = captured.recipe.given.iter().map(zeros).collect();
        let rows: Vec<&[u8]> = rows.iter().map(Vec::as_slice).collect();
        let given = Given { ids: &ids, positions, rows: &rows };
        captured.run(mlx, &self.constants, cache, given, wanted, |_, _| Ok(()))?;
        Ok(())
    }
}

/// Returns the elements of an input of integers, if it is as it is declared.
fn given(specs: &[InputSpec], inputs: &[Argument], wanted: Value) -> Option<HostInts> {
    let (dtype, _, bytes) = declared(specs, inputs, wanted)?;
    integers(dtype, bytes)
}

/// Returns the bytes of an input of rows, if it is as it is declared and has a row for each token.
fn given_rows<'a>(
    specs: &[InputSpec],
    inputs: &[Argument<'a>],
    wanted: Value,
    tokens: usize,
) -> Option<&'a [u8]> {
    let (_, shape, bytes) = declared(specs, inputs, wanted)?;
    (shape.get(1) == Some(&(tokens as i32))).then_some(bytes)
}

/// Returns the dtype, the shape and the bytes of an input, if it is as it is declared.
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
