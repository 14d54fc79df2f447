//! Functions that free handles, keep strings for the process, and convert panics to errors.

use std::any::Any;
use std::collections::HashSet;
use std::ffi::{c_char, CStr, CString};
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::LazyLock;

use etkv_core::{Error, Status};
use parking_lot::Mutex;
use tracing::error;

use super::fork;
use super::handle::{self, Object};

/// The target of this crate's events.
pub(crate) const TARGET: &str = "etkv::api";

/// Logs a panic, and returns it as an error.
pub(crate) fn panic_error(panic: &(dyn Any + Send)) -> Error {
    let words = panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| String::from("no message"));
    error!(target: TARGET, panic = words, "a defect was caught");
    Error::new(Status::Internal, format!("a defect in etkv: {words}"))
}

/// Runs the body of a function that frees. Such a function has no status, so a panic is only
/// logged.
pub(crate) fn free<T: Object>(handle: *mut T) {
    // After a fork the objects belong to the parent process.
    if fork::happened() {
        return;
    }
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| handle::reclaim(handle))) {
        panic_error(&*panic);
    }
}

/// Returns a string that lives as long as the process. Use it only for names: there are few.
pub(crate) fn lasting(name: &str) -> *const c_char {
    static KEPT: LazyLock<Mutex<HashSet<&'static CStr>>> = LazyLock::new(Mutex::default);
    let name = CString::new(name.replace('\0', " ")).unwrap_or_default();
    let mut kept = KEPT.lock();
    match kept.get(name.as_c_str()) {
        Some(known) => known.as_ptr(),
        None => {
            let new: &'static CStr = Box::leak(name.into_boxed_c_str());
            kept.insert(new);
            new.as_ptr()
        }
    }
}
