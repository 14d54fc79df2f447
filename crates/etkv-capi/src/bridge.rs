//! The private bridge to `cpp/interpreter.cpp`, through which ExecuTorch's backends run programs.
//!
//! Nothing throws across it, in either direction: every call returns an [`ffi::Outcome`].

mod program;

use std::ffi::c_void;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};

use cxx::kind::Trivial;
use cxx::{type_id, ExternType};
use etkv_core::{Error, Result, Status};
use etkv_cpu::Parallel;
use etkv_delegate::{Host, LoadOptions};

use self::program::Program;
use crate::{boundary, delegate};

#[cfg_attr(not(feature = "mlx"), allow(dead_code))] // Only MLX programs have constants.
#[cxx::bridge(namespace = "etkv::bridge")]
mod ffi {
    /// The result of a call: 0, or a status and a message.
    struct Outcome {
        status: i32,
        message: String,
    }

    extern "Rust" {
        type Delegate;

        /// Returns a delegate for a program, or for a call of a CPU program.
        fn new_delegate(on_cpu: bool) -> Box<Delegate>;

        /// Decodes a payload, copies its constants and binds the cache. An empty `cache_key`, `logits`,
        /// `passes` or `buffers` means that the option is absent.
        fn load(
            self: &mut Delegate,
            payload: &[u8],
            constants: Pin<&mut Constants>,
            cache_key: &str,
            logits: &str,
            passes: &str,
            buffers: &str,
        ) -> Outcome;

        /// Runs the program on its inputs. Writes the outputs to the memory that `host` returns. `output_types` has
        /// ExecuTorch's numbers of the outputs' dtypes.
        fn execute(
            self: &mut Delegate,
            inputs: &[Argument],
            output_types: &[i8],
            host: Pin<&mut Host>,
            threads: &Threads,
        ) -> Outcome;

        fn n_inputs(self: &Delegate) -> usize;
        fn n_outputs(self: &Delegate) -> usize;

        /// Keeps an error for `etkv_delegate_take_error` on this thread.
        fn report(status: i32, message: &str);
    }

    unsafe extern "C++" {
        include!("cpp/interpreter.hpp");

        /// The program's constants, by name.
        #[namespace = "etkv::interpreter"]
        type Constants;

        /// Finds a constant by its name of `size` bytes, and keeps the constant mapped until the next call.
        unsafe fn find(self: Pin<&mut Constants>, name: *const c_char, size: usize) -> bool;
        /// Returns the address of the constant that was found last.
        fn data(self: &Constants) -> *const u8;
        /// Returns the number of bytes of that constant.
        fn size(self: &Constants) -> usize;

        /// An argument of the program: a tensor, or an integer.
        #[namespace = "etkv::interpreter"]
        type Argument<'a> = super::Argument<'a>;

        /// The host that runs the program.
        #[namespace = "etkv::interpreter"]
        type Host;

        /// Resizes output `i`. Returns the address for its bytes, or NULL if the output cannot have the shape.
        unsafe fn place(
            self: Pin<&mut Host>,
            i: usize,
            shape: *const i32,
            rank: usize,
            n_bytes: usize,
        ) -> *mut u8;
        /// Sets output `i` to an integer. Returns false if there is no such output.
        fn set_integer(self: Pin<&mut Host>, i: usize, value: i64) -> bool;
        /// Returns the reason why the last output was refused.
        fn refusal(self: &Host) -> &CxxString;

        /// The threads of the host.
        #[namespace = "etkv::interpreter"]
        type Threads;
        /// Work that the threads share.
        #[namespace = "etkv::interpreter"]
        type Task = super::Task;

        /// Returns how many parts can run at the same time.
        fn count(self: &Threads) -> usize;
        /// Runs each of the `n_parts` parts of a task once.
        fn run(self: &Threads, n_parts: usize, task: &Task);
    }
}

/// [`etkv_delegate::Argument`] under its C++ name.
#[repr(transparent)]
pub struct Argument<'a>(etkv_delegate::Argument<'a>);

// SAFETY: the two have the same fields in the same order, and neither has a destructor;
// `cpp/interpreter.cpp` checks the layout.
unsafe impl ExternType for Argument<'_> {
    type Id = type_id!("etkv::interpreter::Argument");
    type Kind = Trivial;
}

/// One delegate of a loaded method; empty until it is loaded.
pub struct Delegate {
    on_cpu: bool,
    program: Option<Program>,
    /// Whether a call panicked: the state is then unknown.
    poisoned: bool,
}

fn new_delegate(on_cpu: bool) -> Box<Delegate> {
    Box::new(Delegate { on_cpu, program: None, poisoned: false })
}

impl Delegate {
    fn load(
        &mut self,
        payload: &[u8],
        constants: Pin<&mut ffi::Constants>,
        cache_key: &str,
        logits: &str,
        passes: &str,
        buffers: &str,
    ) -> ffi::Outcome {
        self.guarded(|delegate| {
            let texts = delegate::or_of_thread([cache_key, logits, passes, buffers]);
            let delegate::LoadTexts { cache_key, logits, passes, buffers } = &texts;
            let options = LoadOptions::parse(cache_key, logits, passes, buffers)?;
            let program = Program::load(delegate.on_cpu, payload, constants, &options)?;
            delegate.program = Some(program);
            Ok(())
        })
    }

    fn execute(
        &mut self,
        inputs: &[Argument],
        output_types: &[i8],
        mut host: Pin<&mut ffi::Host>,
        threads: &ffi::Threads,
    ) -> ffi::Outcome {
        self.guarded(|delegate| {
            let Some(program) = &mut delegate.program else {
                return Err(Error::new(Status::Internal, "the program was not loaded"));
            };
            let host = &mut host.as_mut();
            program.execute(unwrapped(inputs), output_types, host, &SharedThreads(threads))
        })
    }

    fn n_inputs(&self) -> usize {
        self.program.as_ref().map_or(0, Program::n_inputs)
    }

    fn n_outputs(&self) -> usize {
        self.program.as_ref().map_or(0, Program::n_outputs)
    }

    /// Runs `work` and catches its panics: a panic that leaves an `extern "Rust"` function ends the
    /// process.
    fn guarded(&mut self, work: impl FnOnce(&mut Self) -> Result<()>) -> ffi::Outcome {
        if self.poisoned {
            return outcome(Err(Error::new(
                Status::Internal,
                "an earlier call of the program failed because of a defect; load the program again",
            )));
        }
        let result = catch_unwind(AssertUnwindSafe(|| work(self))).unwrap_or_else(|panic| {
            self.poisoned = true;
            Err(boundary::panic_error(&*panic))
        });
        outcome(result)
    }
}

fn unwrapped<'a, 'b>(arguments: &'b [Argument<'a>]) -> &'b [etkv_delegate::Argument<'a>] {
    // SAFETY: `Argument` is a transparent wrapper of the other type.
    unsafe { std::slice::from_raw_parts(arguments.as_ptr().cast(), arguments.len()) }
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

pub(crate) use ffi::Constants;

impl Host for Pin<&mut ffi::Host> {
    fn place(&mut self, index: usize, shape: &[i32], n_bytes: usize) -> Result<&mut [u8]> {
        // SAFETY: the pointer and the length are those of `shape`.
        let memory = unsafe { self.as_mut().place(index, shape.as_ptr(), shape.len(), n_bytes) };
        if memory.is_null() {
            return Err(self.refused());
        }
        // SAFETY: the host guarantees `n_bytes` bytes there for the whole call.
        Ok(unsafe { std::slice::from_raw_parts_mut(memory, n_bytes) })
    }

    fn set_integer(&mut self, index: usize, value: i64) -> Result<()> {
        match self.as_mut().set_integer(index, value) {
            true => Ok(()),
            false => Err(self.refused()),
        }
    }
}

impl ffi::Host {
    fn refused(&self) -> Error {
        Error::new(Status::Shape, self.refusal().to_string_lossy().into_owned())
    }
}

impl ffi::Constants {
    /// Returns the bytes of a constant, until the next call.
    pub fn bytes(mut self: Pin<&mut Self>, name: &str) -> Option<&[u8]> {
        // SAFETY: the name has that length.
        if !unsafe { self.as_mut().find(name.as_ptr().cast(), name.len()) } {
            return None;
        }
        let constant = self.into_ref().get_ref();
        if constant.data().is_null() {
            return Some(&[]);
        }
        // SAFETY: the constant has that many bytes, which stay until the next call.
        Some(unsafe { std::slice::from_raw_parts(constant.data(), constant.size()) })
    }
}

/// The host's threads, for Rust code.
struct SharedThreads<'a>(&'a ffi::Threads);

// SAFETY: the C++ object may be used by any thread.
unsafe impl Send for SharedThreads<'_> {}
// SAFETY: as above.
unsafe impl Sync for SharedThreads<'_> {}

/// Work that the host's threads share: `run(context, i)` does part `i` of it.
///
/// It has the layout of `etkv::interpreter::Task` in `cpp/interpreter.hpp`.
#[repr(C)]
pub struct Task {
    run: unsafe extern "C" fn(*const c_void, usize),
    context: *const c_void,
}

// SAFETY: the two have the same fields in the same order, and neither has a destructor;
// `cpp/interpreter.cpp` checks the layout.
unsafe impl ExternType for Task {
    type Id = type_id!("etkv::interpreter::Task");
    type Kind = Trivial;
}

/// The closure that the parts of a task call.
struct Parts<'a> {
    call: &'a (dyn Fn(usize) + Sync),
    /// Whether a part panicked: a panic must not leave [`run_part`].
    panicked: AtomicBool,
}

/// # Safety
/// `context` points to [`Parts`], which stay for the call.
unsafe extern "C" fn run_part(context: *const c_void, i: usize) {
    // SAFETY: the caller keeps the contract above.
    let parts = unsafe { &*context.cast::<Parts>() };
    if catch_unwind(AssertUnwindSafe(|| (parts.call)(i))).is_err() {
        parts.panicked.store(true, Ordering::Relaxed);
    }
}

impl Parallel for SharedThreads<'_> {
    fn threads(&self) -> usize {
        self.0.count()
    }

    fn run(&self, count: usize, call: &(dyn Fn(usize) + Sync)) {
        let parts = Parts { call, panicked: AtomicBool::new(false) };
        self.0.run(count, &Task { run: run_part, context: std::ptr::from_ref(&parts).cast() });
        if parts.panicked.into_inner() {
            #[allow(clippy::panic)] // Continues the panic of a part.
            {
                panic!("a part of the work failed because of a defect");
            }
        }
    }
}
