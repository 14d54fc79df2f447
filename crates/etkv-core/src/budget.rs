//! A limit of bytes for the buffers of all caches of the process together.
//!
//! A cache reserves what its buffers are about to grow by, while it still holds those that they replace,
//! and settles what it holds when the step has ended. Where the limit is reached, reclaimers are asked to
//! free memory. What is beyond the limit even then is refused before anything is allocated.

use std::collections::BTreeMap;
use std::sync::Weak;

use parking_lot::Mutex;
use serde::Serialize;

use crate::error::{Error, Result, Status};
use crate::reclaim::{inside, Reclaim, ReclaimClass, Reclaimers};

/// The limit, and what all caches of the process hold.
#[derive(Debug)]
pub struct MemoryBudget {
    state: Mutex<State>,
    reclaimers: Reclaimers,
}

#[derive(Debug)]
struct State {
    limit: Option<u64>,
    /// The sum of what the holders hold. It cannot overflow: few holders have less than 2^64 bytes each.
    held: u128,
    peak: u128,
    holders: BTreeMap<u64, Holder>,
    /// The id of the holder that was added last.
    last: u64,
}

#[derive(Debug)]
struct Holder {
    kind: String,
    name: Option<String>,
    is_cache: bool,
    held: u128,
    /// The shares that count for this holder.
    shares: usize,
}

/// What all caches of the process hold, in bytes of buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BudgetReport {
    /// The most that they may hold, if there is a limit.
    pub limit: Option<u64>,
    /// What they hold now. While a step or a conversion replaces buffers, both are held.
    pub held: u64,
    /// The most that they have held or reserved. What a step reserves counts even if the step is rolled back
    /// before it allocates; what is refused does not.
    pub peak: u64,
    /// The caches that there are, empty ones too.
    pub caches: usize,
}

/// What one holder has of the budget.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct HolderReport {
    /// Its number. A process uses no number twice.
    pub id: u64,
    /// The kind of the cache, or `prefix` for the beginning of prompts that is kept.
    pub kind: String,
    /// What its owner calls it, if anything.
    pub name: Option<String>,
    /// The keys that a cache is registered under.
    pub keys: Vec<String>,
    /// Bytes that it holds.
    pub held: u64,
}

/// Why a reservation is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
struct OverBudget(String);

impl MemoryBudget {
    const fn new() -> Self {
        let holders = BTreeMap::new();
        let state = State { limit: None, held: 0, peak: 0, holders, last: 0 };
        Self { state: Mutex::new(state), reclaimers: Reclaimers::new() }
    }

    /// The budget of this process. At first it has no limit.
    pub fn global() -> &'static Self {
        static GLOBAL: MemoryBudget = MemoryBudget::new();
        &GLOBAL
    }

    /// Sets the most bytes that all caches may hold, or none. Less than they hold is no error: they keep
    /// what they have, and grow no more until enough is free.
    pub fn set_limit(&self, limit: Option<u64>) {
        self.state.lock().limit = limit;
    }

    /// Adds a reclaimer behind the others of its class. Before a reservation is refused, they are called in
    /// order, each with the bytes that are still lacking, until it fits. What is more than the whole limit
    /// fits never, and nothing is reclaimed for it. The budget forgets a reclaimer that is dropped.
    pub fn add_reclaimer(&self, class: ReclaimClass, reclaimer: Weak<dyn Reclaim>) {
        self.reclaimers.add(class, reclaimer);
    }

    /// Returns what is held, and the limit.
    pub fn report(&self) -> BudgetReport {
        self.state.lock().report()
    }

    /// Returns what is held, the limit, and what each holder has of it, in the order in which they were
    /// added. Their keys are left out.
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

    /// Returns whether this thread is in a reclaimer, and so waits for no lock that another thread may hold
    /// while it asks for memory.
    pub fn is_reclaiming() -> bool {
        inside()
    }

    /// Returns whether an error is a refusal of a budget, and not of the backend.
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

/// A part of what one holder has of a budget. It gives all of it back when it is dropped.
#[derive(Debug)]
pub struct Share {
    budget: &'static MemoryBudget,
    /// The number of its holder.
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

    /// Returns the share of a new holder that is no cache, in the budget of this process. `kind` is its kind
    /// in reports, as in `prefix`.
    pub fn new(kind: &str) -> Self {
        Self::of(MemoryBudget::global(), kind, false)
    }

    /// Returns another share of the same holder, which has nothing yet.
    #[must_use]
    pub fn sibling(&self) -> Self {
        if let Some(holder) = self.budget.state.lock().holders.get_mut(&self.id) {
            holder.shares += 1;
        }
        Self { budget: self.budget, id: self.id, held: 0 }
    }

    /// Returns the number of its holder.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Describes its holder in reports: the kind, and what its owner calls it.
    pub fn describe(&self, kind: &str, name: Option<&str>) {
        if let Some(holder) = self.budget.state.lock().holders.get_mut(&self.id) {
            (holder.kind, holder.name) = (kind.to_owned(), name.map(str::to_owned));
        }
    }

    /// Takes so many bytes more, if the limit allows them. Asks reclaimers if it does not.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend): it does not, or `bytes` is [`u64::MAX`], which stands for sums
    /// that no memory can hold. Nothing is taken.
    pub fn reserve(&mut self, bytes: u64) -> Result<()> {
        self.reserve_giving_way(bytes, |reclaim| reclaim())
    }

    /// Does what [`reserve`](Self::reserve) does. Reclaimers run within `give_way`: as
    /// [`Store::give_way`](crate::Store::give_way), it gives up locks that they may wait for.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    pub fn reserve_giving_way(
        &mut self,
        bytes: u64,
        give_way: impl FnOnce(&mut dyn FnMut()),
    ) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let mut taken = self.take(bytes);
        let can_fit = |refused: &Refused| refused.limit.is_some_and(|limit| bytes <= limit);
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

    fn take(&mut self, bytes: u64) -> std::result::Result<(), Refused> {
        let mut state = self.budget.state.lock();
        let held = state.held + u128::from(bytes);
        let limit = state.limit;
        let most = u128::from(limit.unwrap_or(u64::MAX));
        if held > most || bytes == u64::MAX {
            let lacking = shown(held.saturating_sub(most));
            return Err(Refused { limit, held: state.held, lacking });
        }
        self.change(&mut state, self.held + bytes);
        Ok(())
    }

    /// Says what the share holds now.
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

struct Refused {
    limit: Option<u64>,
    held: u128,
    /// The bytes that others would have to free.
    lacking: u64,
}

impl Refused {
    fn error(self, bytes: u64) -> Error {
        let Self { limit, held, .. } = self;
        let message = match limit {
            _ if bytes == u64::MAX => String::from("the buffers would have 2^64 bytes or more"),
            None => format!("{held} bytes are held, and {bytes} more are 2^64 bytes or more"),
            Some(limit) => format!(
                "the memory budget is {limit} bytes, {held} are held, and this one needs {bytes} more; \
                 free a cache, clear one with `release` set, without which it keeps its buffers, or raise \
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
