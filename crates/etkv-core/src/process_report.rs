//! Reports of this process, for monitoring and debugging.

use serde::Serialize;

use crate::budget::{BudgetReport, HolderReport, MemoryBudget};
use crate::registry::CacheRegistry;

/// A report of this process. `docs/reports.md` lists the fields in JSON.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ProcessReport {
    /// The memory budget and its holders.
    pub memory: MemoryBudgetReport,
}

/// The memory budget, and how much of it each holder has.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct MemoryBudgetReport {
    /// The maximum number of bytes that may be held; absent without a limit.
    pub limit: Option<u64>,
    /// Bytes that are held.
    pub held: u64,
    /// Bytes of the limit that are free; absent without a limit.
    pub free: Option<u64>,
    /// The maximum number of bytes that were held or reserved.
    pub peak: u64,
    /// The number of caches, including empty ones.
    pub caches: usize,
    /// The holders, in the order in which they were created: caches, and kept prefixes.
    pub holders: Vec<HolderReport>,
}

impl ProcessReport {
    /// Returns the report of this process. It waits for no cache.
    pub fn now() -> Self {
        let (report, mut holders) = MemoryBudget::global().holders();
        for (key, holder) in CacheRegistry::global().holders() {
            if let Ok(at) = holders.binary_search_by_key(&holder, |found| found.id) {
                holders[at].keys.push(key);
            }
        }
        let BudgetReport { limit, held, peak, caches, .. } = report;
        let free = limit.map(|limit| limit.saturating_sub(held));
        Self { memory: MemoryBudgetReport { limit, held, free, peak, caches, holders } }
    }
}
