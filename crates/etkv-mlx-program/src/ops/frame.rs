//! The state of one run of a program: its values so far, and its step.

use std::borrow::Cow;

use mlx_rs::{Array, Dtype};
use smallvec::SmallVec;

use crate::dtype::dtype_of;
use crate::error::{fail, Result};
use crate::ir::{Int, IntValue, Out, Value};
use etkv::mlx::{self, slice_axis, Mlx};
use etkv::AttendSpec;
use etkv::{MlxCache, MlxStore, Step};
use etkv_core::RecurrentWork;
use etkv_delegate::Host;

/// The elements of an integer input. A step of few tokens needs no allocation.
pub type HostInts = SmallVec<[i64; 4]>;

/// The state of one run of a chain.
pub struct Frame<'c, 's> {
    tensors: Vec<Option<Array>>,
    ints: Vec<Option<i32>>,
    constants: &'c [Option<Array>],
    on_gpu: bool,
    /// Whether the run needs only the last row of the logits.
    last_row_only: bool,
    /// The elements of integer inputs, as the host passed them.
    host: SmallVec<[(Value, HostInts); 4]>,
    /// An exclusive upper limit of the elements of each value, if no element is negative; 0 if unknown. Empty until a
    /// limit is known.
    limits: Vec<i32>,
    /// This field follows the tensors, so that it is dropped after them. Dropping a step aborts it. If views were
    /// still alive, the abort would have to copy the buffers that they share.
    step: StepState<'s>,
}

/// The positions of a step.
type Positions = SmallVec<[i32; 8]>;

/// The step of a run.
pub enum StepState<'a> {
    /// The program has no cache.
    NoCache,
    /// The program has a cache. The first layer will open the step.
    Ready(&'a mut MlxCache),
    /// The step is open, with the positions of this value.
    Open(Step<'a>, Value, Positions),
}

impl<'c, 's> Frame<'c, 's> {
    /// Returns an empty frame for values below `n_values` and integers below `n_ints`.
    pub fn new(
        mlx: &Mlx,
        n_values: u32,
        n_ints: u32,
        constants: &'c [Option<Array>],
        step: StepState<'s>,
    ) -> Self {
        Self {
            tensors: (0..n_values).map(|_| None).collect(),
            ints: vec![None; n_ints as usize],
            constants,
            on_gpu: mlx.on_gpu(),
            last_row_only: false,
            host: SmallVec::new(),
            limits: Vec::new(),
            step,
        }
    }

    /// Returns whether the run is on a GPU.
    pub fn on_gpu(&self) -> bool {
        self.on_gpu
    }

    /// Sets whether only the last row of the logits is needed. By default all rows are.
    pub fn set_last_row_only(&mut self, last_row_only: bool) {
        self.last_row_only = last_row_only;
    }

    /// Returns whether only the last row of the logits is needed.
    pub fn last_row_only(&self) -> bool {
        self.last_row_only
    }

    /// Returns the tensor of a value.
    pub fn tensor(&self, value: Value) -> Result<&Array> {
        let index = value.0 as usize;
        let found = match self.constants.get(index) {
            Some(constant) => constant.as_ref(),
            None => self.tensors.get(index).and_then(Option::as_ref),
        };
        match found {
            Some(array) => Ok(array),
            None => fail!(Internal, "value {index} is read before it is computed"),
        }
    }

    /// Returns the tensor of a value, if there is one.
    pub fn optional(&self, value: Option<Value>) -> Result<Option<&Array>> {
        value.map(|value| self.tensor(value)).transpose()
    }

    /// Returns the tensors of values.
    pub fn tensors(&self, values: &[Value]) -> Result<SmallVec<[&Array; 8]>> {
        values.iter().map(|&value| self.tensor(value)).collect()
    }

    /// Returns the number of an integer argument, clamped to 32 bits: "to the end" becomes the maximum.
    pub fn int(&self, argument: Int) -> Result<i32> {
        match argument {
            Int::Literal(literal) => {
                Ok(literal.clamp(i64::from(i32::MIN), i64::from(i32::MAX)) as i32)
            }
            Int::Value(value) => self.int_value(value),
        }
    }

    /// Returns the number of an integer value.
    pub fn int_value(&self, value: IntValue) -> Result<i32> {
        match self.ints.get(value.0 as usize).copied().flatten() {
            Some(number) => Ok(number),
            None => fail!(Internal, "integer {} is read before it is computed", value.0),
        }
    }

    /// Drops a value after its last read.
    pub fn forget(&mut self, value: Value) {
        self.tensors[value.0 as usize] = None;
    }

    /// Binds a value.
    pub fn set(&mut self, value: Value, array: Array) {
        self.tensors[value.0 as usize] = Some(array);
    }

    /// Binds an integer value.
    pub fn set_int(&mut self, value: IntValue, number: i32) {
        self.ints[value.0 as usize] = Some(number);
    }

    /// Keeps the elements of an integer input for [`host_ints`](Self::host_ints).
    pub fn set_host_ints(&mut self, value: Value, numbers: HostInts) {
        self.host.push((value, numbers));
    }

    /// Returns the elements of an integer input, or `None` if `value` is not an integer input.
    pub fn host_ints(&self, value: Value) -> Option<&[i64]> {
        let found = self.host.iter().rfind(|(of, _)| *of == value);
        found.map(|(_, numbers)| &numbers[..])
    }

    /// Returns the elements of an integer value. Those of an input are already on the host. For other values this waits
    /// until they are computed.
    pub fn numbers(&self, value: Value) -> Result<Cow<'_, [i64]>> {
        if let Some(numbers) = self.host_ints(value) {
            return Ok(Cow::Borrowed(numbers));
        }
        let numbers = self.tensor(value)?.as_dtype(Dtype::Int64)?.contiguous()?;
        Ok(Cow::Owned(mlx::elements(&numbers)?))
    }

    /// Records that the elements of a value are at least 0 and below `limit`. A `limit` of `None` means that their
    /// range is unknown.
    pub fn set_limit(&mut self, value: Value, limit: Option<i32>) {
        if self.limits.is_empty() {
            if limit.is_none() {
                return;
            }
            self.limits.resize(self.tensors.len(), 0);
        }
        self.limits[value.0 as usize] = limit.unwrap_or(0);
    }

    /// Returns the exclusive upper limit of the elements of a value, if it is known; no element is then negative.
    pub fn limit(&self, value: Value) -> Option<i32> {
        self.limits.get(value.0 as usize).copied().filter(|&limit| limit > 0)
    }

    /// At the first layer, opens the step with the positions in `position`. Later layers must have the same
    /// positions.
    pub fn begin_step(&mut self, position: Value) -> Result<()> {
        if matches!(self.step, StepState::Open(_, opened, _) if opened == position) {
            return Ok(());
        }
        let positions = self.positions(position)?;
        if let StepState::Open(_, _, opened) = &self.step {
            if *opened != positions {
                fail!(Position, "layers of one step have different positions");
            }
            return Ok(());
        }
        let StepState::Ready(cache) = std::mem::replace(&mut self.step, StepState::NoCache) else {
            fail!(
                NoCache,
                "the program keeps its KV cache outside, and was loaded without one; pass \
                 `cache_key` when loading it"
            );
        };
        self.step = StepState::Open(Step::begin(cache, &positions)?, position, positions);
        Ok(())
    }

    /// Returns the positions in `position`, `[T]` or `[T, 1]`.
    fn positions(&self, position: Value) -> Result<Positions> {
        let shape = self.tensor(position)?.shape();
        if !matches!(shape, [_] | [_, 1]) {
            fail!(Shape, "expected positions of shape [T] or [T, 1], got {shape:?}");
        }
        self.numbers(position)?
            .iter()
            .map(|&number| match i32::try_from(number) {
                Ok(position) => Ok(position),
                Err(_) => fail!(Position, "expected a position within 32 bits, got {number}"),
            })
            .collect()
    }

    /// Writes a layer's rows to the cache, and returns what its queries attend to.
    pub fn update_and_fetch(&mut self, layer: usize, k: Value, v: Value) -> Result<AttendSpec> {
        let (k, v) = (self.tensor(k)?.clone(), self.tensor(v)?.clone());
        Ok(self.open_step()?.update_and_fetch(layer, &k, &v)?)
    }

    /// Calls `work` with the rows and states that a recurrent layer reads. Writes the rows and states that `work`
    /// returns.
    pub fn update_recurrent(
        &mut self,
        layer: usize,
        work: &mut RecurrentWork<MlxStore>,
    ) -> Result<()> {
        Ok(self.open_step()?.update_recurrent(layer, work)?)
    }

    fn open_step(&mut self) -> Result<&mut Step<'s>> {
        match &mut self.step {
            StepState::Open(step, ..) => Ok(step),
            _ => fail!(Step, "no step is open"),
        }
    }

    /// Ends the run. Returns the outputs of the chain, and the step if one is open.
    pub fn finish(mut self, outputs: &[Out]) -> Result<(Outputs, Option<Step<'s>>)> {
        let made = outputs
            .iter()
            .map(|out| match *out {
                Out::Tensor(value) => Ok(Output::Tensor(self.tensor(value)?.clone())),
                Out::Tensors(..) => {
                    fail!(Internal, "expected one tensor as an output of a chain, got several")
                }
                Out::Int(value) => Ok(Output::Int(self.int_value(value)?)),
            })
            .collect::<Result<Outputs>>()?;
        let step = match std::mem::replace(&mut self.step, StepState::NoCache) {
            StepState::Open(step, ..) => Some(step),
            _ => None,
        };
        Ok((made, step))
    }
}

/// The outputs of a chain.
pub type Outputs = SmallVec<[Output; 4]>;

/// An output of a chain.
pub enum Output {
    /// A tensor.
    Tensor(Array),
    /// An integer.
    Int(i32),
}

impl Output {
    /// Converts a tensor to the dtype with this ExecuTorch number, row-major.
    pub fn of_type(self, scalar_type: i8) -> Result<Self> {
        Ok(match self {
            Self::Tensor(array) => {
                Self::Tensor(mlx::cast(&array, dtype_of(scalar_type)?)?.contiguous()?)
            }
            int => int,
        })
    }

    /// Keeps only the last of the rows `[1, T, vocabulary]` of logits.
    ///
    /// # Errors
    /// [`Unsupported`](etkv::Status::Unsupported) for a tensor of another shape.
    pub fn keep_last_row(&mut self) -> Result<()> {
        if let Self::Tensor(array) = self {
            let &[1, rows, _] = array.shape() else {
                let shape = array.shape();
                fail!(Unsupported, "cannot return only the last row of logits of shape {shape:?}, expected [1, T, vocabulary]; load with logits=all");
            };
            *array = slice_axis(array, 1, rows - 1, rows, 1)?;
        }
        Ok(())
    }

    /// Returns the tensor, if the output is one.
    pub fn tensor(&self) -> Option<&Array> {
        match self {
            Self::Tensor(array) => Some(array),
            Self::Int(_) => None,
        }
    }

    /// Waits for the computation of the output, which was already started.
    pub fn wait(&self) -> Result<()> {
        self.tensor().map_or(Ok(()), mlx::wait)
    }

    /// Passes the computed output to the host.
    ///
    /// # Errors
    /// Those of the host, and [`Backend`](etkv::Status::Backend).
    pub fn give(&self, mlx: &mut Mlx, index: usize, host: &mut dyn Host) -> Result<()> {
        match self {
            Self::Tensor(array) => {
                // The lock of MLX is released during this call, because the host may log a refusal and wait
                // for other threads.
                let (shape, n_bytes) = (array.shape(), array.nbytes());
                let memory = mlx.outside(|| host.place(index, shape, n_bytes))?;
                mlx.copy_to(array, memory)
            }
            Self::Int(number) => Ok(host.set_integer(index, i64::from(*number))?),
        }
    }
}
