//! The loaded programs that have a cache, for hosts that hold the cache.

use std::sync::{Arc, Weak};

use etkv_core::SharedCache;
use parking_lot::Mutex;

use super::execute::{Loaded, Program};
use crate::error::{fail, Result};
use crate::store::MlxStore;

static BOUND: Mutex<Vec<Weak<Loaded>>> = Mutex::new(Vec::new());

/// Remembers a program that has a cache, for as long as it is loaded.
pub fn add(program: &Program) {
    let mut bound = BOUND.lock();
    bound.retain(|other| other.strong_count() > 0);
    if program.0.cache.is_some() {
        bound.push(Arc::downgrade(&program.0));
    }
}

impl Program {
    /// Returns the program that was last loaded with this cache.
    ///
    /// # Errors
    /// [`Kind`](crate::Status::Kind) for a cache of another backend, and
    /// [`InvalidArgument`](crate::Status::InvalidArgument) if no loaded program has it.
    pub fn bound_to(cache: &SharedCache) -> Result<Self> {
        let cache = cache.program::<MlxStore>()?;
        let has = |program: &Arc<Loaded>| program.cache.as_ref().is_some_and(|own| own.is(&cache));
        // What is not the program is dropped after the list is free: that waits for MLX.
        let alive: Vec<Arc<Loaded>> = BOUND.lock().iter().filter_map(Weak::upgrade).collect();
        match alive.into_iter().rev().find(has) {
            Some(program) => Ok(Self(program)),
            None => fail!(
                InvalidArgument,
                "no loaded program has this cache; load one with the session's key first"
            ),
        }
    }
}
