//! A limit for the total bytes of the buffers of all caches in the process.
//!
//! Before a cache's buffers grow, the cache reserves the bytes of the new buffers in addition to the bytes of the old
//! ones. After the step it settles: it reports the bytes that it actually holds. If the limit would be exceeded, the
//! budget first calls reclaimers to free memory. If this is not enough, it refuses the reservation before anything is
//! allocated.

use std::collections::BTreeMap;
use std::sync::Weak;

use parking_lot::Mutex;
use serde::Serialize;

use crate::error::{Error, Result, Status};
use crate::reclaim::{inside, Reclaim, ReclaimClass, Reclaimers};

/// The limit, and the total of all caches of the process.
#[derive(Debug)]
pub struct MemoryBudget {
    state: Mutex<State>,
    reclaimers: Reclaimers,
}

#[derive(Debug)]
struct State {
    limit: Option<u64>,
    /// The sum of the bytes of all holders. It cannot overflow: there are few holders, of less than 2^64 bytes each.
    held: u128,
    peak: u128,
    holders: BTreeMap<u64, Holder>,
    /// The id of the last new holder.
    last: u64,
}

#[derive(Debug)]
struct Holder {
    kind: String,
    name: Option<String>,
    is_cache: bool,
    held: u128,
    shares: usize,
}

/// The memory of all caches of the process, in bytes of buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BudgetReport {
    /// The maximum number of bytes, if there is a limit.
    pub limit: Option<u64>,
    /// The bytes that caches and prefixes hold now. While a step or a conversion replaces buffers, both the old and
    /// the new buffers count.
    pub held: u64,
    /// The peak: the maximum number of bytes that were held or reserved at once. A reservation counts even if its
    /// step is rolled back before it allocates. A refused reservation does not count.
    pub peak: u64,
    /// The number of caches, including empty ones.
    pub caches: usize,
}

/// The bytes of one holder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct HolderReport {
    /// The number of the holder, unique in the process.
    pub id: u64,
    /// The kind of the cache, or `prefix` for a prefix.
    pub kind: String,
    /// The name that the owner has set, if any.
    pub name: Option<String>,
    /// The keys under which a cache is registered.
    pub keys: Vec<String>,
    /// The number of bytes that it holds.
    pub held: u64,
}

/// The reason of a refused reservation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
struct OverBudget(String);

impl MemoryBudget {
    const fn new() -> Self {
        let holders = BTreeMap::new();
        let state = State { limit: None, held: 0, peak: 0, holders, last: 0 };
        Self { state: Mutex::new(state), reclaimers: Reclaimers::new() }
    }

    /// The budget of this process. Initially it has no limit.
    pub fn global() -> &'static Self {
        static GLOBAL: MemoryBudget = MemoryBudget::new();
        &GLOBAL
    }

    /// Sets the maximum number of bytes that all caches may hold, or removes the limit. A limit below the current
    /// bytes is not an error: caches keep their buffers, but do not grow until enough is free.
    pub fn set_limit(&self, limit: Option<u64>) {
        self.state.lock().limit = limit;
    }

    /// Adds a reclaimer after the others of its class. Before a reservation is refused, reclaimers are called in
    /// order until it fits, each with the number of bytes that are still lacking. No reclaimer is called for a
    /// reservation above the whole limit, because it can never fit. A reclaimer that has been dropped is removed.
    pub fn add_reclaimer(&self, class: ReclaimClass, reclaimer: Weak<dyn Reclaim>) {
        self.reclaimers.add(class, reclaimer);
    }

    /// Returns the number of bytes held, and the limit.
    pub fn report(&self) -> BudgetReport {
        self.state.lock().report()
    }

    /// Returns the number of bytes held, the limit, and the bytes of each holder, in the order in which holders were
    /// added. Their keys are omitted.
    pub fn holders(&self) -> (BudgetReport, Vec<HolderReport>) {
        let state = self.state.lock();
        let of = |(&id, holder): (&u64, &Holder)| HolderReport {
            id,
            kind: holder.kind.clone(),
            name: holder.name.clone(),
            keys: Vec::new(),
            held: shown(holder.held),
        };
        (state.report(), state.holders.iter().map(of).collect())
    }

    /// Returns whether this thread runs a reclaimer. Such a thread must not wait for a lock, because another thread
    /// may hold that lock while it requests memory.
    pub fn is_reclaiming() -> bool {
        inside()
    }

    /// Returns whether an error is the refusal of a budget, and not an error of the backend.
    pub fn is_refusal(error: &Error) -> bool {
        error.is_caused_by::<OverBudget>()
    }
}

impl State {
    fn report(&self) -> BudgetReport {
        let caches = self.holders.values().filter(|holder| holder.is_cache).count();
        let (held, peak) = (shown(self.held), shown(self.peak));
        BudgetReport { limit: self.limit, held, peak, caches }
    }
}

fn shown(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// A part of the bytes of one holder. Its bytes are released when it is dropped.
#[derive(Debug)]
pub struct Share {
    budget: &'static MemoryBudget,
    /// The number of the holder.
    id: u64,
    held: u64,
}

impl Default for Share {
    /// Returns the share of a new cache in the budget of this process.
    fn default() -> Self {
        Self::of(MemoryBudget::global(), "cache", true)
    }
}

impl Share {
    fn of(budget: &'static MemoryBudget, kind: &str, is_cache: bool) -> Self {
        let mut state = budget.state.lock();
        state.last += 1;
        let id = state.last;
        let kind = kind.to_owned();
        state.holders.insert(id, Holder { kind, name: None, is_cache, held: 0, shares: 1 });
        Self { budget, id, held: 0 }
    }

    /// Returns the share of a new holder that is not a cache, in the budget of this process. `kind` is the kind in
    /// reports, such as `prefix`.
    pub fn new(kind: &str) -> Self {
        Self::of(MemoryBudget::global(), kind, false)
    }

    /// Returns another share of the same holder, with 0 bytes.
    #[must_use]
    pub fn sibling(&self) -> Self {
        if let Some(holder) = self.budget.state.lock().holders.get_mut(&self.id) {
            holder.shares += 1;
        }
        Self { budget: self.budget, id: self.id, held: 0 }
    }

    /// Returns the number of the holder.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Sets the holder's kind and name in reports.
    pub fn describe(&self, kind: &str, name: Option<&str>) {
        if let Some(holder) = self.budget.state.lock().holders.get_mut(&self.id) {
            (holder.kind, holder.name) = (kind.to_owned(), name.map(str::to_owned));
        }
    }

    /// Reserves this number of additional bytes. If the limit does not allow them, calls reclaimers first.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend) if the limit does not allow these bytes, or if `bytes` is [`u64::MAX`],
    /// which stands for a sum above 2^64. Nothing is reserved.
    pub fn reserve(&mut self, bytes: u64) -> Result<()> {
        self.reserve_giving_way(bytes, |reclaim| reclaim())
    }

    /// Does the same as [`reserve`](Self::reserve), but calls reclaimers inside `give_way`. Like
    /// [`Store::give_way`](crate::Store::give_way), `give_way` releases locks for which reclaimers may wait.
    ///
    /// # Errors
    /// Errors of [`reserve`](Self::reserve).
    pub fn reserve_giving_way(
        &mut self,
        bytes: u64,
        give_way: impl FnOnce(&mut dyn FnMut()),
    ) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let mut taken = self.take(bytes);
        let can_fit = |refused: &Refusal| refused.limit.is_some_and(|limit| bytes <= limit);
        if taken.as_ref().is_err_and(can_fit) && !inside() {
            let budget = self.budget;
            give_way(&mut || {
                budget.reclaimers.ask(&mut || {
                    if taken.is_err() {
                        taken = self.take(bytes);
                    }
                    taken.as_ref().err().map(|refused| refused.lacking)
                });
            });
        }
        taken.map_err(|refused| refused.error(bytes))
    }

    fn take(&mut self, bytes: u64) -> std::result::Result<(), Refusal> {
        let mut state = self.budget.state.lock();
        let held = state.held + u128::from(bytes);
        let limit = state.limit;
        let most = u128::from(limit.unwrap_or(u64::MAX));
        if held > most || bytes == u64::MAX {
            let lacking = shown(held.saturating_sub(most));
            return Err(Refusal { limit, held: state.held, lacking });
        }
        self.change(&mut state, self.held + bytes);
        Ok(())
    }

    /// Sets the number of bytes that the share holds now.
    pub fn settle(&mut self, held: u64) {
        if held != self.held {
            let budget = self.budget;
            self.change(&mut budget.state.lock(), held);
        }
    }

    fn change(&mut self, state: &mut State, held: u64) {
        let after = |sum: u128| sum - u128::from(self.held) + u128::from(held);
        state.held = after(state.held);
        state.peak = state.peak.max(state.held);
        if let Some(holder) = state.holders.get_mut(&self.id) {
            holder.held = after(holder.held);
        }
        self.held = held;
    }
}

struct Refusal {
    limit: Option<u64>,
    held: u128,
    /// The number of bytes that other holders would have to free.
    lacking: u64,
}

impl Refusal {
    fn error(self, bytes: u64) -> Error {
        let Self { limit, held, .. } = self;
        let message = match limit {
            _ if bytes == u64::MAX => String::from("the buffers would have 2^64 bytes or more"),
            None => format!("cannot reserve {bytes} bytes more: {held} bytes are held, and the sum is 2^64 bytes or more"),
            Some(limit) => format!(
                "the memory budget is {limit} bytes, {held} are held, and this call needs {bytes} more; \
                 free a cache, clear one with `release` set (otherwise it keeps its buffers), or raise \
                 the budget"
            ),
        };
        Error::new(Status::Backend, &message).caused_by(OverBudget(message))
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        let budget = self.budget;
        let mut state = budget.state.lock();
        self.change(&mut state, 0);
        if let Some(holder) = state.holders.get_mut(&self.id) {
            holder.shares -= 1;
            if holder.shares == 0 {
                state.holders.remove(&self.id);
            }
        }
    }
}

#[cfg(test)]
mod tests;
