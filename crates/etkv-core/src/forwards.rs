//! Forwards of hosts that call a cache layer by layer.

use crate::cache::AttendCache;
use crate::error::{Error, Result, Status};
use crate::shared::ProgramCache;
use crate::store::{RecurrentWork, Spec, Store};

/// The forwards of a host over a cache, one after the other. The first call opens a step, and the step commits once
/// every call has been made. The step is rolled back if a call fails or if the unfinished forward is dropped.
pub struct Forwards<S: Store> {
    program: ProgramCache<S>,
    /// The positions of the open step; empty if no step is open.
    positions: Vec<i32>,
    /// Whether each call has been made in the open step.
    made: Vec<bool>,
}

impl<S: Store> Forwards<S> {
    /// Returns forwards of `n_calls` calls each. As long as they exist, the caller must not write rows to the cache
    /// in another way.
    pub fn new(program: ProgramCache<S>, n_calls: usize) -> Self {
        Self { program, positions: Vec::new(), made: vec![false; n_calls] }
    }

    /// Returns the positions of the open step; empty if no step is open.
    pub fn positions(&self) -> &[i32] {
        &self.positions
    }

    /// Returns whether this call has been made in the open step.
    pub fn has_made(&self, call: usize) -> bool {
        self.made.get(call).copied().unwrap_or(false)
    }

    /// Returns the number of calls that have been made in the open step.
    pub fn n_made(&self) -> usize {
        self.made.iter().filter(|&&made| made).count()
    }

    /// Runs a call: writes a layer's new rows, calls `work` with the rows that the layer's queries attend to, and
    /// returns the result of `work`. If `work` fails, the forward is rolled back, even in its last call: a forward
    /// commits only if the host has all of its results.
    ///
    /// # Errors
    /// - [`Step`](crate::Status::Step) for a call that has already been made, and
    ///   [`Position`](crate::Status::Position) if the positions differ from those of the first call.
    /// - Errors of [`AttendCache::begin`], [`update_and_fetch`](AttendCache::update_and_fetch),
    ///   [`commit`](AttendCache::commit) and `work`.
    pub fn call<T, E: From<Error>>(
        &mut self,
        (call, layer): (usize, usize),
        positions: &[i32],
        k: &S::Tensor,
        v: &S::Tensor,
        work: impl FnOnce(&Spec<S>) -> Result<T, E>,
    ) -> Result<T, E> {
        self.make(call, positions, |cache| {
            let spec = cache.update_and_fetch(layer, k, v)?;
            // The view is dropped here. If it existed during the commit, moves of rows would copy the buffers.
            work(&spec)
        })
    }

    /// Runs a call of a recurrent layer: passes the rows and anchors that the layer reads to `work`, and writes the
    /// rows and anchors that `work` returns. If `work` fails, the forward is rolled back, even in its last call.
    ///
    /// # Errors
    /// Errors of [`call`](Self::call) and of [`update_recurrent`](AttendCache::update_recurrent).
    pub fn call_recurrent(
        &mut self,
        (call, layer): (usize, usize),
        positions: &[i32],
        work: &mut RecurrentWork<S>,
    ) -> Result<()> {
        self.make(call, positions, |cache| cache.update_recurrent(layer, work))
    }

    fn make<T, E: From<Error>>(
        &mut self,
        call: usize,
        positions: &[i32],
        work: impl FnOnce(&mut dyn AttendCache<Store = S>) -> Result<T, E>,
    ) -> Result<T, E> {
        let made = self.make_now(call, positions, work);
        if made.is_err() {
            self.abort();
        }
        made
    }

    fn make_now<T, E: From<Error>>(
        &mut self,
        call: usize,
        positions: &[i32],
        work: impl FnOnce(&mut dyn AttendCache<Store = S>) -> Result<T, E>,
    ) -> Result<T, E> {
        let mut cache = self.program.lock()?;
        if self.positions.is_empty() {
            let n = positions.len();
            if self.positions.try_reserve(n).is_err() {
                return Err(no_memory(n).into());
            }
            self.positions.extend_from_slice(positions);
            if let Err(error) = cache.begin(positions) {
                // No step is open, or the open step belongs to another owner.
                self.positions.clear();
                return Err(error.into());
            }
        } else if self.positions != positions {
            return Err(other_positions().into());
        }
        if self.has_made(call) {
            return Err(made_twice(call).into());
        }
        let result = work(&mut *cache)?;
        if let Some(made) = self.made.get_mut(call) {
            *made = true;
        }
        if self.made.iter().all(|&made| made) {
            cache.commit()?;
            drop(cache);
            self.close();
        }
        Ok(result)
    }

    /// Rolls back an unfinished forward, as dropping `self` does. Does nothing if there is none.
    pub fn abort(&mut self) {
        if !self.positions.is_empty() {
            // A poisoned cache has no step to roll back.
            if let Ok(mut cache) = self.program.lock() {
                cache.abort();
            }
            self.close();
        }
    }

    fn close(&mut self) {
        self.positions.clear();
        self.made.fill(false);
    }
}

impl<S: Store> Drop for Forwards<S> {
    fn drop(&mut self) {
        self.abort();
    }
}

fn no_memory(n: usize) -> Error {
    let text =
        format!("out of memory: {n} positions; free memory or pass fewer tokens in each step");
    Error::new(Status::Backend, text)
}

fn other_positions() -> Error {
    let text = "expected the positions of the forward's first layer, got others";
    Error::new(Status::Position, text)
}

fn made_twice(call: usize) -> Error {
    Error::new(Status::Step, format!("cannot make call {call} of a forward twice"))
}
