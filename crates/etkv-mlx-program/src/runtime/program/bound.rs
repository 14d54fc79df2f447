//! Finds loaded programs by their cache, or by the name of their buffers.

use std::sync::{Arc, Weak};

use etkv_core::SharedCache;
use parking_lot::Mutex;

use super::{LoadedProgram, Program};
use crate::error::{fail, Result};
use etkv::MlxStore;

/// The programs that keep buffers under a name.
static NAMED: Mutex<Vec<Weak<LoadedProgram>>> = Mutex::new(Vec::new());

/// Registers a program under the name of its buffers, for as long as it is loaded.
pub fn add_named(program: &Program) {
    let mut named = NAMED.lock();
    named.retain(|other| other.strong_count() > 0);
    if program.0.buffers.len() > 0 {
        named.push(Arc::downgrade(&program.0));
    }
}

impl Program {
    /// Sets the buffers with this name to zero, in all loaded programs.
    ///
    /// # Errors
    /// [`InvalidArgument`](etkv::Status::InvalidArgument) if no loaded program keeps buffers under this name.
    pub fn reset_buffers(name: &str) -> Result<()> {
        let named = |program: &Arc<LoadedProgram>| program.buffers.is_named(name);
        let alive: Vec<Arc<LoadedProgram>> =
            NAMED.lock().iter().filter_map(Weak::upgrade).collect();
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
    /// [`InvalidArgument`](etkv::Status::InvalidArgument) if no loaded program uses it.
    pub fn bound_to(cache: &SharedCache) -> Result<Self> {
        cache.check_store::<MlxStore>()?;
        match cache.bound_programs().into_iter().next() {
            Some(program) => Ok(Self(program)),
            None => fail!(
                InvalidArgument,
                "no loaded program has this cache; load one with the session's key first"
            ),
        }
    }
}
