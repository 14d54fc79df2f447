//! Caches that read frozen rows give the same results as caches that ran every step themselves, bit for bit.
//!
//! A failure prints its seed; `ETKV_SEED=<seed>` runs only that seed, `ETKV_RUNS=<n>` runs `n` seeds.

use etkv_core::{Prefix, Status};

use super::saving::driver::{operate, AnyCache, Shape};
use crate::backend::Backend;
use crate::{for_seeds, Rng};

/// An action on a cache.
#[derive(Clone, Copy)]
enum Action {
    Operation(u64),
    Rewind(i32),
}

/// A cache that shares rows, one that does not, and the actions on both.
struct Pair<B: Backend> {
    caches: [AnyCache<B>; 2],
    done: Vec<Action>,
}

impl<B: Backend> Pair<B> {
    fn new(shape: &Shape) -> Self {
        Self { caches: [shape.make::<B>(), shape.make::<B>()], done: Vec::new() }
    }

    fn operate(&mut self, seed: u64) {
        operate::<B>(&mut Rng::new(seed), &mut self.caches);
        self.done.push(Action::Operation(seed));
    }

    /// Returns the frozen contents, if they can be shared.
    fn freeze(&mut self) -> Option<Prefix> {
        match self.caches[0].sharing().unwrap().freeze() {
            Ok(prefix) => Some(prefix),
            Err(error) => {
                assert_eq!(error.status(), Status::InvalidArgument, "{error}");
                None
            }
        }
    }

    /// Returns two caches: one is attached to the first `length` positions of a prefix, and the other ran the same
    /// steps itself.
    fn attached(shape: &Shape, (prefix, done): &(Prefix, Vec<Action>), length: i32) -> Self {
        let mut pair = Self::new(shape);
        pair.caches[0].sharing().unwrap().attach(prefix, length).unwrap();
        for &done in done {
            match done {
                Action::Operation(seed) => operate::<B>(&mut Rng::new(seed), &mut pair.caches[1..]),
                Action::Rewind(length) => pair.caches[1].rewind(length).unwrap(),
            }
        }
        pair.done = done.clone();
        if length < prefix.length() {
            pair.caches[1].rewind(length).unwrap();
            pair.done.push(Action::Rewind(length));
        }
        pair
    }
}

pub fn caches_that_share_rows_answer_as_those_that_do_not<B: Backend>() {
    for_seeds(60 / B::COST, |seed| {
        B::run(|| {
            let mut rng = Rng::new(seed);
            let shape = Shape::new(&mut rng);
            let mut pairs = vec![Pair::<B>::new(&shape)];
            let mut prefixes: Vec<(Prefix, Vec<Action>)> = Vec::new();
            for _ in 0..40 {
                let at = rng.below(pairs.len());
                match rng.below(12) {
                    0 | 1 => {
                        if let Some(prefix) = pairs[at].freeze() {
                            prefixes.push((prefix, pairs[at].done.clone()));
                        }
                    }
                    2 | 3 if !prefixes.is_empty() && pairs.len() < 4 => {
                        let from = &prefixes[rng.below(prefixes.len())];
                        let least = from.0.rewindable_to();
                        let most = from.0.length();
                        let length = match rng.below(2) {
                            0 => most,
                            _ => least + rng.below((most - least + 1) as usize) as i32,
                        };
                        pairs.push(Pair::attached(&shape, from, length));
                    }
                    4 if !prefixes.is_empty() && rng.chance(0.5) => {
                        prefixes.swap_remove(rng.below(prefixes.len()));
                    }
                    5 if pairs.len() > 1 && rng.chance(0.3) => {
                        pairs.swap_remove(at);
                    }
                    _ => pairs[at].operate(rng.next_u64()),
                }
            }
        });
    });
}
