//! The bookkeeping against a slow and obvious model of it, over generated
//! operations, compared after each.
//!
//! A failure prints its seed and the shortest list of operations that fails, as a
//! test to be; `ETKV_SEED=<seed>` runs that seed alone, `ETKV_RUNS=<n>` runs more.

mod cells;
mod contiguous;
mod layout;
mod regressions;
mod steps;

use etkv_core::{Result, Status};

/// What was accepted; nothing where the model has reasons to refuse and one of
/// them was given.
#[track_caller]
fn agreed<T>(result: Result<T>, refusals: &[Status]) -> Option<T> {
    match result {
        Ok(value) => {
            assert!(refusals.is_empty(), "accepted, though {refusals:?}");
            Some(value)
        }
        Err(error) => {
            let status = error.status();
            assert!(!refusals.is_empty(), "refused as {status:?}, though legal: {error}");
            assert!(refusals.contains(&status), "{status:?} is none of {refusals:?}: {error}");
            None
        }
    }
}
