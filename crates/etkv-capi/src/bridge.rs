//! The private bridge to `cpp/interpreter.cpp`, through which the ExecuTorch
//! backend runs programs.
//!
//! Nothing throws across it, in either direction: every call tells how it went
//! in an [`ffi::Outcome`].

use std::panic::{catch_unwind, AssertUnwindSafe};

use etkv::program::{ConstantSource, Input, LoadOptions, OutputSink, Program};
use etkv_core::{Error, Result, Status};

use crate::{boundary, delegate};

#[cxx::bridge(namespace = "etkv::bridge")]
mod ffi {
    /// How a call went: 0, or a status and a sentence.
    struct Outcome {
        status: i32,
        message: String,
    }

    /// An argument of the program: a tensor, or an integer.
    struct Argument<'a> {
        is_tensor: bool,
        /// ExecuTorch's number of the dtype.
        scalar_type: i8,
        shape: &'a [i32],
        data: *const u8,
        n_bytes: usize,
        integer: i64,
    }

    extern "Rust" {
        type Delegate;

        fn new_delegate() -> Box<Delegate>;

        /// Decodes a payload, copies its constants and binds the cache. Empty
        /// `cache_key` and `logits` stand for none.
        fn load(
            self: &mut Delegate,
            payload: &[u8],
            constants: Pin<&mut Constants>,
            cache_key: &str,
            logits: &str,
        ) -> Outcome;

        /// Runs the program on its inputs and hands the outputs over.
        fn execute(self: &mut Delegate, inputs: &[Argument], outputs: Pin<&mut Outputs>)
            -> Outcome;

        fn n_inputs(self: &Delegate) -> usize;
        fn n_outputs(self: &Delegate) -> usize;

        /// Keeps an error for `etkv_delegate_take_error` on this thread.
        fn report(status: i32, message: &str);
    }

    unsafe extern "C++" {
        include!("cpp/bridge_types.hpp");

        /// The program's constants, by name.
        type Constants;

        /// Finds a constant and keeps it mapped until the next call.
        fn find(self: Pin<&mut Constants>, name: &str) -> bool;
        /// The bytes of what was found last.
        fn bytes(self: &Constants) -> &[u8];

        /// Where the outputs go.
        type Outputs;

        /// ExecuTorch's number of the dtype that output `index` is to have.
        fn scalar_type(self: &Outputs, index: usize) -> i8;
        /// Resizes output `index` and copies `bytes` to it; "" if it could.
        fn write(self: Pin<&mut Outputs>, index: usize, shape: &[i32], bytes: &[u8]) -> String;
        /// Sets the integer output `index`.
        fn write_integer(self: Pin<&mut Outputs>, index: usize, value: i64);
    }
}

/// One delegate of a loaded method; empty until it is loaded.
#[derive(Default)]
pub struct Delegate {
    program: Option<Program>,
    /// Set after a panic: the state behind it is unknown.
    poisoned: bool,
}

fn new_delegate() -> Box<Delegate> {
    Box::default()
}

impl Delegate {
    fn load(
        &mut self,
        payload: &[u8],
        mut constants: std::pin::Pin<&mut ffi::Constants>,
        cache_key: &str,
        logits: &str,
    ) -> ffi::Outcome {
        self.guarded(|delegate| {
            let texts = delegate::or_of_thread(cache_key, logits);
            let options = LoadOptions::parse(&texts.cache_key, &texts.logits)?;
            delegate.program = Some(Program::load(payload, &mut constants.as_mut(), &options)?);
            Ok(())
        })
    }

    fn execute(
        &mut self,
        inputs: &[ffi::Argument],
        mut outputs: std::pin::Pin<&mut ffi::Outputs>,
    ) -> ffi::Outcome {
        self.guarded(|delegate| {
            let Some(program) = &mut delegate.program else {
                return Err(Error::new(Status::Internal, "the program was not loaded"));
            };
            let inputs = inputs.iter().map(input).collect::<Result<Vec<_>>>()?;
            Ok(program.execute(&inputs, &mut outputs.as_mut())?)
        })
    }

    fn n_inputs(&self) -> usize {
        self.program.as_ref().map_or(0, Program::n_inputs)
    }

    fn n_outputs(&self) -> usize {
        self.program.as_ref().map_or(0, Program::n_outputs)
    }

    /// A panic in an `extern "Rust"` function ends the process, so none leaves.
    fn guarded(&mut self, work: impl FnOnce(&mut Self) -> Result<()>) -> ffi::Outcome {
        if self.poisoned {
            return outcome(Err(Error::new(
                Status::Internal,
                "an earlier call of the program failed by a defect; load the program again",
            )));
        }
        let result = catch_unwind(AssertUnwindSafe(|| work(self))).unwrap_or_else(|panic| {
            self.poisoned = true;
            Err(boundary::panic_error(&*panic))
        });
        outcome(result)
    }
}

fn input<'a>(argument: &'a ffi::Argument<'a>) -> Result<Input<'a>> {
    if !argument.is_tensor {
        return Ok(Input::Integer(argument.integer));
    }
    if argument.data.is_null() && argument.n_bytes > 0 {
        return Err(Error::new(Status::InvalidArgument, "an input tensor has no data"));
    }
    let bytes = if argument.n_bytes == 0 {
        &[]
    } else {
        // SAFETY: the backend passes a tensor's own memory and its size, and
        // keeps the tensor for the call.
        unsafe { std::slice::from_raw_parts(argument.data, argument.n_bytes) }
    };
    Ok(Input::Tensor { scalar_type: argument.scalar_type, shape: argument.shape, bytes })
}

fn outcome(result: Result<()>) -> ffi::Outcome {
    match result {
        Ok(()) => ffi::Outcome { status: 0, message: String::new() },
        Err(error) => {
            ffi::Outcome { status: error.status() as i32, message: error.message().to_owned() }
        }
    }
}

fn report(status: i32, message: &str) {
    delegate::report(status, message);
}

impl ConstantSource for std::pin::Pin<&mut ffi::Constants> {
    fn find(&mut self, name: &str) -> Option<&[u8]> {
        if self.as_mut().find(name) {
            Some(self.bytes())
        } else {
            None
        }
    }
}

impl OutputSink for std::pin::Pin<&mut ffi::Outputs> {
    fn scalar_type(&self, index: usize) -> i8 {
        ffi::Outputs::scalar_type(self, index)
    }

    fn write(&mut self, index: usize, shape: &[i32], bytes: &[u8]) -> etkv::Result<()> {
        let refusal = self.as_mut().write(index, shape, bytes);
        if refusal.is_empty() {
            Ok(())
        } else {
            Err(etkv::Error::new(Status::Shape, refusal))
        }
    }

    fn write_integer(&mut self, index: usize, value: i64) {
        self.as_mut().write_integer(index, value);
    }
}
