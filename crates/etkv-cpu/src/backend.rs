//! The cache kinds of this backend, and their builders.

use std::sync::Once;

use etkv_core::{AttendCache, BuilderRegistry};

use crate::store::CpuStore;

/// The backend id of caches in plain memory.
pub const CPU_BACKEND: &str = "cpu";

/// A cache of one sequence. It needs no mask if all layers have full history.
pub type ContiguousCache = etkv_core::ContiguousCache<CpuStore>;

/// A cache of several sequences that share cells. A single sequence is read like a contiguous cache.
pub type CellsCache = etkv_core::CellsCache<CpuStore>;

/// A cache of any kind in plain memory.
pub type CpuCache = dyn AttendCache<Store = CpuStore>;

/// A cache with the face for CPU programs.
pub type ProgramCache = etkv_core::ProgramCache<CpuStore>;

/// One forward of a CPU program on a cache.
///
/// ```
/// use etkv_core::{Cache, CacheConfig};
/// use etkv_cpu::{ContiguousCache, Step, Tensor};
///
/// # fn main() -> etkv_core::Result<()> {
/// let mut cache = ContiguousCache::new(CacheConfig::uniform(1, 2, 4, 16))?;
/// let rows = Tensor::new([1, 2, 3, 4], vec![1f32; 24])?;
/// let mut step = Step::begin(&mut cache, &[0, 1, 2])?;
/// let spec = step.update_and_fetch(0, &rows, &rows)?;
/// assert_eq!(spec.k.dequantized()?, vec![1.0; 24]);
/// drop(spec);
/// step.commit(&[])?;
/// assert_eq!(cache.length(), 3);
/// # Ok(())
/// # }
/// ```
pub type Step<'a> = etkv_core::Step<'a, CpuStore>;

/// Returns the builders of this process, including the kinds of this crate.
pub fn builders() -> &'static BuilderRegistry {
    static REGISTERED: Once = Once::new();
    let builders = BuilderRegistry::global();
    REGISTERED.call_once(|| builders.register_kinds::<CpuStore>(CPU_BACKEND));
    builders
}

#[cfg(test)]
mod tests {
    use etkv_core::{CacheConfig, CacheRegistry, Session};

    use super::*;

    #[test]
    fn sessions_find_every_kind() {
        for kind in [ContiguousCache::KIND, CellsCache::SEQ, CellsCache::TREE] {
            let config = CacheConfig::uniform(1, 1, 4, 8);
            let session = Session::new(builders(), CPU_BACKEND, kind, config).unwrap();
            let entry = CacheRegistry::global().get(session.key()).unwrap();
            assert_eq!(entry.backend_id, CPU_BACKEND);
            let program: ProgramCache = entry.cache.program().unwrap();
            assert_eq!(program.lock().unwrap().kind(), kind);
        }
    }
}
