//! The errors of this crate.

use std::ffi::CStr;

use cudarc::driver::sys::CUresult;

/// The result of a call of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of this crate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no device that can run the kernels, or no compiler.
    #[error("no CUDA device can be used: {0}")]
    Unavailable(String),
    /// A call of the driver failed.
    #[error("{call} failed: {reason}")]
    Driver {
        /// The driver's function.
        call: &'static str,
        /// The driver's description of the error.
        reason: String,
    },
    /// A kernel cannot be compiled.
    #[error("a kernel cannot be compiled: {0}")]
    Compiler(String),
    /// A plan is invalid.
    #[error("the plan is invalid: {0}")]
    Plan(String),
    /// A step does not fit its plan.
    #[error("the step does not fit its plan: {0}")]
    Step(String),
}

/// Returns from the function with an error of this kind and text.
macro_rules! fail {
    ($kind:ident, $($text:tt)*) => {
        return Err($crate::step::error::Error::$kind(format!($($text)*)))
    };
}
pub(crate) use fail;

/// Returns an error if the driver's function `call` returned one.
pub(crate) fn check(call: &'static str, result: CUresult) -> Result<()> {
    match result {
        CUresult::CUDA_SUCCESS => Ok(()),
        _ => Err(Error::Driver { call, reason: reason(result) }),
    }
}

fn reason(result: CUresult) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the driver is loaded, since it returned a result. It writes a pointer to a static text, or
    // null.
    let known = unsafe { cudarc::driver::sys::cuGetErrorString(result, &mut text) };
    if known != CUresult::CUDA_SUCCESS || text.is_null() {
        return format!("{result:?}");
    }
    // SAFETY: the text is static and ends with a zero.
    let text = unsafe { CStr::from_ptr(text) };
    format!("{result:?}, {}", text.to_string_lossy())
}
