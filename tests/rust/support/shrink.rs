//! Runs of generated operations. A failing run is shortened and printed, ready to paste into a test.
//!
//! `ETKV_SEED=<n>` runs only one seed, `ETKV_RUNS=<n>` runs `n` seeds.

use std::cell::Cell;
use std::fmt::Debug;
use std::panic::{catch_unwind, set_hook, take_hook, AssertUnwindSafe};
use std::sync::Once;

use crate::{seeds, Rng};

/// The start of a run and its operations. Operations are generated independently of the state, and are valid in every
/// state, so any part of a run is also a run.
#[derive(Debug, Clone)]
pub struct Case<C, O> {
    pub config: C,
    pub ops: Vec<O>,
}

/// Runs generated cases. On a failure, shortens the case and panics with it.
pub fn check<C: Debug + Clone, O: Debug + Clone>(
    default_runs: u64,
    generate: impl Fn(&mut Rng) -> Case<C, O>,
    run: impl Fn(&C, &[O]),
) {
    for seed in seeds(default_runs) {
        let Case { config, ops } = generate(&mut Rng::new(seed));
        let fails = |ops: &[O]| {
            let result = catch_unwind(AssertUnwindSafe(|| run(&config, ops)));
            result.err().map(|panic| message(panic.as_ref()))
        };
        let Some(first) = quietly(|| fails(&ops)) else {
            continue;
        };
        let shortest = quietly(|| shrink(&ops, |ops| fails(ops).is_some()));
        let why = quietly(|| fails(&shortest)).unwrap_or(first);
        panic!(
            "ETKV_SEED={seed} fails after {} operations; shortened: {why}\n\n{}",
            ops.len(),
            pasteable(&config, &shortest)
        );
    }
}

/// Removes operations while the rest still fails: first large chunks, then smaller ones, then one at a time,
/// until none can be removed.
pub fn shrink<O: Clone>(ops: &[O], fails: impl Fn(&[O]) -> bool) -> Vec<O> {
    let mut ops = ops.to_vec();
    let mut chunk = ops.len().div_ceil(2).max(1);
    loop {
        let mut removed = false;
        // Starts at the end, so operations after the failure are removed first.
        let mut end = ops.len();
        while end > 0 {
            let start = end.saturating_sub(chunk);
            let rest = [&ops[..start], &ops[end..]].concat();
            if fails(&rest) {
                ops = rest;
                removed = true;
            }
            end = start;
        }
        if chunk == 1 && !removed {
            return ops;
        }
        if !removed || chunk > ops.len() {
            chunk = (chunk / 2).max(1);
        }
    }
}

/// Returns the source of a call of `replay`.
fn pasteable<C: Debug, O: Debug>(config: &C, ops: &[O]) -> String {
    // Every list in the config is a vector.
    let source = |value: &dyn Debug| format!("{value:?}").replace('[', "vec![");
    let ops: Vec<String> = ops.iter().map(|op| format!("        {},\n", source(op))).collect();
    format!("replay(\n    {},\n    &[\n{}    ],\n);\n", source(config), ops.concat())
}

fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("a panic").to_owned()
}

thread_local! {
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Suppresses the messages of panics during shrinking.
fn quietly<T>(work: impl FnOnce() -> T) -> T {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = take_hook();
        set_hook(Box::new(move |panic| {
            if !QUIET.get() {
                usual(panic);
            }
        }));
    });
    QUIET.set(true);
    let result = work();
    QUIET.set(false);
    result
}
