//! Refuses calls in a process that was forked from a process with live handles. The new process has one thread only,
//! and locks that another thread held stay locked.

use std::ptr::without_provenance_mut;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Once;

use etkv_core::Status;

static FORKED: AtomicBool = AtomicBool::new(false);

/// The status of calls after a fork.
pub(crate) const STATUS: Status = Status::Step;

/// The message of the error of calls after a fork.
pub(crate) const MESSAGE: &std::ffi::CStr =
    c"cannot use etkv in a process that was forked from a process that used it: call exec after fork, or use etkv in the new process alone";

/// The number of live handles.
pub(crate) static HANDLES: AtomicUsize = AtomicUsize::new(0);

/// Records later forks.
pub(crate) fn watch() {
    static WATCHING: Once = Once::new();
    extern "C" fn note() {
        if HANDLES.load(Ordering::Relaxed) > 0 {
            FORKED.store(true, Ordering::Relaxed);
        }
    }
    // SAFETY: `note` only stores a number. If registration fails for lack of memory, forks are not detected.
    WATCHING.call_once(|| unsafe {
        libc::pthread_atfork(None, None, Some(note));
    });
}

/// Returns whether this process was forked while etkv was in use.
pub(crate) fn happened() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// Returns the error of calls after a fork. It is not in the table of handles, which may stay locked forever.
pub(crate) fn error<T>() -> *mut T {
    without_provenance_mut(usize::MAX)
}
