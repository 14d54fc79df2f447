//! The kinds of caches on MLX arrays, and where sessions find them.

use std::sync::Once;

use etkv_core::{AttendCache, BuilderRegistry};

use crate::store::MlxStore;

/// The backend id of ExecuTorch's MLX delegate.
pub const MLX_BACKEND: &str = "MLXBackend";

/// One sequence, without a mask where all layers have full history.
pub type ContiguousCache = etkv_core::ContiguousCache<MlxStore>;

/// Sequences that share cells; a single one is read like a contiguous cache.
pub type CellsCache = etkv_core::CellsCache<MlxStore>;

/// A cache of any kind on MLX arrays.
pub type MlxCache = dyn AttendCache<Store = MlxStore>;

/// A shared cache as MLX programs see it.
pub type ProgramCache = etkv_core::ProgramCache<MlxStore>;

/// One forward of an MLX program on a cache.
///
/// ```
/// use etkv::{CacheConfig, ContiguousCache, Step};
/// use mlx_rs::Array;
///
/// # fn main() -> etkv::Result<()> {
/// let mut cache = ContiguousCache::new(CacheConfig::uniform(1, 2, 4, 16))?;
/// etkv::mlx::run(|| {
///     let rows = Array::ones::<f32>(&[1, 2, 3, 4])?;
///     let mut step = Step::begin(&mut cache, &[0, 1, 2])?;
///     let spec = step.update_and_fetch(0, &rows, &rows)?;
///     let q = Array::ones::<f32>(&[1, 2, 3, 4])?;
///     let out = etkv::attend(&q, &spec, 0.5, None)?;
///     drop(spec);
///     Ok(step.commit(&[&out])?)
/// })?;
/// # use etkv::Cache;
/// assert_eq!(cache.length(), 3);
/// # Ok(())
/// # }
/// ```
pub type Step<'a> = etkv_core::Step<'a, MlxStore>;

/// The builders of this process, with the kinds of this crate among them.
pub fn builders() -> &'static BuilderRegistry {
    static REGISTERED: Once = Once::new();
    let builders = BuilderRegistry::global();
    REGISTERED.call_once(|| builders.register_kinds::<MlxStore>(MLX_BACKEND));
    builders
}

#[cfg(test)]
mod tests {
    use etkv_core::{CacheConfig, CacheRegistry, Session};

    use super::*;

    /// A host may name keys of its own as sessions do.
    #[test]
    fn keys_pass_by_those_of_the_host() {
        let config = CacheConfig::uniform(1, 1, 4, 8);
        let new = || Session::new(builders(), MLX_BACKEND, "contiguous", config.clone()).unwrap();
        let session = new();
        let number: u64 = session.key().trim_start_matches("cache-").parse().unwrap();
        let registry = CacheRegistry::global();
        let entry = registry.get(session.key()).unwrap();
        let taken: Vec<String> = (1..20).map(|next| format!("cache-{}", number + next)).collect();
        let installed: Vec<&String> =
            taken.iter().filter(|key| registry.install(key, entry.clone()).is_ok()).collect();
        let other = new();
        assert!(!other.cache().is(&session.cache()));
        assert!(registry.get(other.key()).unwrap().cache.is(&other.cache()));
        for key in installed {
            registry.erase(key);
        }
        for key in ["", &"k".repeat(256)] {
            let error = registry.install(key, entry.clone()).unwrap_err();
            assert!(error.message().contains(&format!("of {} bytes", key.len())), "{error}");
        }
    }
}
