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

/// The memory budget, and the bytes of each holder.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct MemoryBudgetReport {
    /// The maximum number of bytes that may be held; absent if there is no limit.
    pub limit: Option<u64>,
    /// The bytes that are held.
    pub held: u64,
    /// The bytes that are left below the limit; absent if there is no limit.
    pub free: Option<u64>,
    /// The maximum number of bytes that were held or reserved.
    pub peak: u64,
    /// The number of caches, including empty ones.
    pub caches: usize,
    /// The holders, in order of creation: caches, and prefixes.
    pub holders: Vec<HolderReport>,
}

impl ProcessReport {
    /// Returns the report of this process. Does not wait for any cache.
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
