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

use etkv_core::bookkeeping::{CellsBookkeeping, Move, Slots};
use etkv_core::{Result, Status};

/// Runs a step of the next `n` tokens of each of these sequences, one sequence after the other. Returns the cells of
/// the tokens in each layer group, and the moves at the end of the step.
fn step(book: &mut CellsBookkeeping, sequences: &[i32], n: i32) -> (Vec<Slots>, Vec<Move>) {
    let each = |&sequence: &i32| vec![sequence; n as usize];
    book.begin_step(&sequences.iter().flat_map(each).collect::<Vec<_>>()).unwrap();
    let next = |&sequence: &i32| (book.seq_next(sequence).unwrap()..).take(n as usize);
    let positions: Vec<i32> = sequences.iter().flat_map(next).collect();
    let writes = book.plan(&positions).unwrap().iter().map(|plan| plan.write.clone()).collect();
    (writes, book.commit().unwrap())
}

/// Returns the result, or `None` if the call was refused with one of the expected statuses, `refusals`. Fails the test
/// otherwise.
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
