//! A loaded call of a program.

use std::sync::Arc;

use etkv_core::{fail, Result};
use etkv_delegate::{Argument, Host, LoadOptions, LogitsRows};
use tracing::{trace, warn};

use super::experts::ExpertsCall;
use super::forward::{Forward, Run};
use super::linear::{Embeddings, Linears};
use super::payload::{self, AttendSinks, Convolve, LayerCall, Logits, Payload, Scan};
use super::{attend, by_capacity, recurrent, rows, TARGET};
use crate::parallel::Parallel;

/// A call of a loaded program.
pub struct Call(Op);

enum Op {
    /// A call of a layer. There is no forward if the program was loaded without a cache.
    Layer(Box<LayerOp>, Option<Arc<Forward>>),
    SelectRows(LogitsRows),
    /// The index of the chosen input.
    SelectByCapacity(usize),
    Experts(Box<ExpertsCall>),
    Linear(Box<Linears>),
    Embedding(Embeddings),
}

/// An op on a layer of the cache.
enum LayerOp {
    Attend(AttendSinks),
    Convolve(Convolve),
    Scan(Scan),
}

impl LayerOp {
    fn call(&self) -> &LayerCall {
        match self {
            Self::Attend(attend) => &attend.call,
            Self::Convolve(convolve) => &convolve.call,
            Self::Scan(scan) => &scan.call,
        }
    }

    fn n_inputs(&self) -> usize {
        match self {
            Self::Attend(attend) => payload::n_inputs(&attend.inputs),
            Self::Convolve(convolve) => payload::n_inputs(&convolve.inputs),
            Self::Scan(scan) => payload::n_inputs(&scan.inputs),
        }
    }

    fn run(&self, forward: &Arc<Forward>, run: Run) -> Result<()> {
        let (done, kind) = match self {
            Self::Attend(attend) => (attend::attend(forward, attend, run), "layer"),
            Self::Convolve(convolve) => {
                (recurrent::convolve(forward, convolve, run), "recurrent layer")
            }
            Self::Scan(scan) => (recurrent::scan(forward, scan, run), "recurrent layer"),
        };
        done.map_err(|error| error.at(format_args!("{kind} {}", self.call().layer)))
    }
}

impl Call {
    /// Reads the payload of a call and binds it to its cache.
    ///
    /// # Errors
    /// - [`Program`](etkv_core::Status::Program) for a payload that is damaged or of another version.
    /// - [`NoCache`](etkv_core::Status::NoCache) for an unknown key, [`Kind`](etkv_core::Status::Kind) for a
    ///   cache of another backend, and [`Shape`](etkv_core::Status::Shape) if the cache differs in the number
    ///   of layers. Also [`Kind`](etkv_core::Status::Kind) if the program chooses a tensor by the capacity,
    ///   and the cache has rows that were computed with the other tensor.
    /// - [`Unsupported`](etkv_core::Status::Unsupported) if the options request only the last row of logits
    ///   and the program computes all rows, or if they request the rows of candidates.
    pub fn load(payload: &[u8], options: &LoadOptions) -> Result<Self> {
        Self::load_now(payload, options).inspect_err(|error| {
            warn!(target: TARGET, status = ?error.status(), %error, "a program is refused");
        })
    }

    fn load_now(payload: &[u8], options: &LoadOptions) -> Result<Self> {
        let payload = Payload::read(payload)?;
        if options.logits == LogitsRows::Proposed {
            fail!(
                Unsupported,
                "option `logits` is `proposed`, and programs for the CPU give all rows or the last; \
                 load with logits=all"
            );
        }
        let op = match payload {
            Payload::SelectRows => return Ok(Self(Op::SelectRows(options.logits))),
            Payload::SelectByCapacity(choice) => {
                let key = options.cache_key.as_deref();
                return Ok(Self(Op::SelectByCapacity(by_capacity::choose(&choice, key)?)));
            }
            Payload::RoutedExperts(call) => {
                return Ok(Self(Op::Experts(Box::new(ExpertsCall::new(&call)))));
            }
            Payload::Linear(call) => return Ok(Self(Op::Linear(Box::new(Linears::new(call))))),
            Payload::Embedding(call) => return Ok(Self(Op::Embedding(Embeddings::new(&call)))),
            Payload::UpdateAndAttend(attend) => LayerOp::Attend(attend.into()),
            Payload::UpdateAndAttendSinks(attend) => LayerOp::Attend(attend),
            Payload::UpdateAndConvolve(convolve) => LayerOp::Convolve(convolve),
            Payload::UpdateAndScan(scan) => LayerOp::Scan(scan),
        };
        let call = op.call();
        if options.logits == LogitsRows::Last && call.logits == Logits::All {
            fail!(
                Unsupported,
                "option `logits` is `last`, and the program computes all rows; export it again"
            );
        }
        let key = options.cache_key.as_deref();
        let forward = key.map(|key| Forward::of_call(call, key)).transpose()?;
        trace!(target: TARGET, call = call.call, layer = call.layer, key, "a call is loaded");
        Ok(Self(Op::Layer(Box::new(op), forward)))
    }

    /// Checks a payload.
    ///
    /// # Errors
    /// [`Program`](etkv_core::Status::Program) for a payload that is damaged or of another version.
    pub fn check(payload: &[u8]) -> Result<()> {
        Payload::read(payload).map(|_| ())
    }

    /// Returns the number of inputs.
    pub fn n_inputs(&self) -> usize {
        match &self.0 {
            Op::Layer(op, _) => op.n_inputs(),
            Op::SelectRows(_) => 1,
            Op::SelectByCapacity(_) => by_capacity::N_INPUTS,
            Op::Experts(call) => call.n_inputs(),
            Op::Linear(call) => call.n_inputs(),
            Op::Embedding(call) => call.n_inputs(),
        }
    }

    /// Returns the number of outputs.
    pub fn n_outputs(&self) -> usize {
        match &self.0 {
            Op::Linear(call) => call.n_outputs(),
            _ => 1,
        }
    }

    /// Runs the call, and writes its outputs to the memory that `host` returns. `output_types` are
    /// ExecuTorch's numbers for the outputs' dtypes.
    ///
    /// # Errors
    /// [`NoCache`](etkv_core::Status::NoCache) if the program was loaded without a cache, and the errors of
    /// the cache and of the host. An error rolls the step back.
    pub fn execute(
        &mut self,
        inputs: &[Argument],
        output_types: &[i8],
        host: &mut dyn Host,
        parallel: &dyn Parallel,
    ) -> Result<()> {
        let (n_inputs, n_outputs) = (self.n_inputs(), self.n_outputs());
        if (inputs.len(), output_types.len()) != (n_inputs, n_outputs) {
            fail!(
                InvalidArgument,
                "expected {n_inputs} inputs and {n_outputs} outputs, got {} and {}",
                inputs.len(),
                output_types.len()
            );
        }
        let done = match &self.0 {
            Op::SelectRows(selected) => rows::select(*selected, &inputs[0], host),
            Op::SelectByCapacity(chosen) => {
                let chosen = &inputs[*chosen];
                rows::copy(host, chosen.shape(), chosen.bytes())
            }
            Op::Experts(call) => call
                .run(inputs, output_types[0], host, parallel)
                .map_err(|error| error.at("a layer of experts")),
            Op::Linear(call) => call
                .run(inputs, output_types, host, parallel)
                .map_err(|error| error.at("a linear layer")),
            Op::Embedding(call) => call
                .run(inputs, output_types[0], host, parallel)
                .map_err(|error| error.at("an embedding")),
            Op::Layer(op, Some(forward)) => {
                op.run(forward, Run { inputs, output_type: output_types[0], host, parallel })
            }
            Op::Layer(..) => fail!(
                NoCache,
                "the program keeps its KV cache outside, and was loaded without one; pass \
                 `cache_key` when loading it"
            ),
        };
        done.inspect_err(|error| {
            warn!(target: TARGET, status = ?error.status(), %error, "a forward fails");
        })
    }
}
