//! A check of refusals, for the tests of the library and those of calls.

use etkv_core::{Result, Status};

/// Checks that a call was refused with this status, and that its message contains `told`.
#[track_caller]
pub fn refused<T>(result: Result<T>, status: Status, told: &str) {
    let error = result.err().unwrap();
    assert_eq!(error.status(), status, "{error}");
    assert!(error.message().contains(told), "{error}, expected: {told}");
}
