//! The bookkeeping, compared with a slow and simple model after each of many generated operations.
//!
//! A failure prints its seed and the shortest failing list of operations, ready to paste into a test.
//! `ETKV_SEED=<seed>` runs only that seed, `ETKV_RUNS=<n>` runs `n` seeds.

mod cells;
mod contiguous;
mod files;
mod layout;
mod regressions;
mod steps;
mod undo;

use etkv_core::{Result, Status};

/// Returns the result. Returns `None` if the call was refused for one of the reasons of the model.
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
            assert!(refusals.contains(&status), "{status:?} is not one of {refusals:?}: {error}");
            None
        }
    }
}
