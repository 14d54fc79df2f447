//! A limit of bytes for the buffers of all caches of the process together.
//!
//! A cache reserves what its buffers are about to grow by, while it still holds those that they replace,
//! and settles what it holds when the step has ended. What is beyond the limit is refused before anything
//! is allocated.

use parking_lot::Mutex;

use crate::error::{fail, Result};

/// The limit, and what all caches of the process hold.
#[derive(Debug)]
pub struct MemoryBudget {
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    limit: Option<u64>,
    held: u64,
    peak: u64,
    caches: usize,
}

/// What all caches of the process hold, in bytes of buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct BudgetReport {
    /// The most that they may hold, if there is a limit.
    pub limit: Option<u64>,
    /// What they hold now. While a step or a conversion replaces buffers, both are held.
    pub held: u64,
    /// The most that they have held or reserved.
    pub peak: u64,
    /// The caches that there are, empty ones too.
    pub caches: usize,
}

impl MemoryBudget {
    const fn new() -> Self {
        Self { state: Mutex::new(State { limit: None, held: 0, peak: 0, caches: 0 }) }
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

    /// Returns what is held, and the limit.
    pub fn report(&self) -> BudgetReport {
        let State { limit, held, peak, caches } = *self.state.lock();
        BudgetReport { limit, held, peak, caches }
    }
}

/// What one cache holds of a budget. It gives all of it back when it is dropped.
#[derive(Debug)]
pub struct Share {
    budget: &'static MemoryBudget,
    held: u64,
}

impl Default for Share {
    fn default() -> Self {
        Self::of(MemoryBudget::global())
    }
}

impl Share {
    fn of(budget: &'static MemoryBudget) -> Self {
        budget.state.lock().caches += 1;
        Self { budget, held: 0 }
    }

    /// Takes so many bytes more, if the limit allows them.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend): it does not. Nothing is taken.
    pub fn reserve(&mut self, bytes: u64) -> Result<()> {
        if bytes == 0 {
            return Ok(());
        }
        let mut state = self.budget.state.lock();
        let held = state.held.saturating_add(bytes);
        if let Some(limit) = state.limit.filter(|&limit| held > limit) {
            let all = state.held;
            fail!(
                Backend,
                "the memory budget is {limit} bytes, caches hold {all}, and this one needs {bytes} more; \
                 free one, clear one with `release`, or raise the budget"
            );
        }
        state.held = held;
        state.peak = state.peak.max(held);
        self.held = self.held.saturating_add(bytes);
        Ok(())
    }

    /// Says what the cache holds now.
    pub fn settle(&mut self, held: u64) {
        if held == self.held {
            return;
        }
        let mut state = self.budget.state.lock();
        state.held = state.held.saturating_sub(self.held).saturating_add(held);
        state.peak = state.peak.max(state.held);
        self.held = held;
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.settle(0);
        self.budget.state.lock().caches -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_end_at_the_limit() {
        static BUDGET: MemoryBudget = MemoryBudget::new();
        let report = || {
            let BudgetReport { limit, held, peak, caches } = BUDGET.report();
            (limit, held, peak, caches)
        };
        let (mut a, mut b) = (Share::of(&BUDGET), Share::of(&BUDGET));
        a.reserve(u64::MAX - 1).unwrap();
        a.settle(100);
        BUDGET.set_limit(Some(300));
        b.reserve(200).unwrap();
        assert_eq!(report(), (Some(300), 300, u64::MAX - 1, 2));
        let error = a.reserve(1).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the memory budget is 300 bytes, caches hold 300, and this one needs 1 more; free one, clear one \
             with `release`, or raise the budget"
        );
        a.reserve(0).unwrap();
        // What grew has replaced what was there.
        b.settle(150);
        a.reserve(50).unwrap();
        assert_eq!(report().1, 300);
        BUDGET.set_limit(Some(10));
        assert!(b.reserve(1).is_err());
        drop(a);
        assert_eq!(report(), (Some(10), 150, u64::MAX - 1, 1));
        b.settle(5);
        b.reserve(5).unwrap();
        BUDGET.set_limit(None);
        b.reserve(1000).unwrap();
        drop(b);
        assert_eq!((report().1, report().3), (0, 0));
    }
}
