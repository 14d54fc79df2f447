//! The loaded programs that have a cache, or keep buffers, for hosts that hold the cache or know the name.

use std::sync::{Arc, Weak};

use etkv_core::SharedCache;
use parking_lot::Mutex;

use super::{Loaded, Program};
use crate::error::{fail, Result};
use etkv::MlxStore;

static BOUND: Mutex<Vec<Weak<Loaded>>> = Mutex::new(Vec::new());

/// Remembers a program that has a cache or keeps buffers, for as long as it is loaded.
pub fn add(program: &Program) {
    let mut bound = BOUND.lock();
    bound.retain(|other| other.strong_count() > 0);
    if program.0.cache.is_some() || program.0.buffers.len() > 0 {
        bound.push(Arc::downgrade(&program.0));
    }
}

impl Program {
    /// Lets the buffers of all programs that were loaded with this name of buffers be zeros.
    ///
    /// # Errors
    /// [`InvalidArgument`](etkv::Status::InvalidArgument) if no loaded program keeps buffers under it.
    pub fn reset_buffers(name: &str) -> Result<()> {
        let named = |program: &Arc<Loaded>| program.buffers.is_named(name);
        let alive: Vec<Arc<Loaded>> = BOUND.lock().iter().filter_map(Weak::upgrade).collect();
        let found: Vec<Self> = alive.into_iter().filter(named).map(Self).collect();
        if found.is_empty() {
            fail!(InvalidArgument, "no loaded program keeps buffers named `{name}`");
        }
        found.iter().try_for_each(Self::reset)
    }

    /// Returns the program that was last loaded with this cache.
    ///
    /// # Errors
    /// [`Kind`](etkv::Status::Kind) for a cache of another backend, and
    /// [`InvalidArgument`](etkv::Status::InvalidArgument) if no loaded program has it.
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
