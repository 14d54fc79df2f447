//! The kinds of caches on MLX arrays, and their builders.

use std::sync::Once;

use etkv_core::{AttendCache, BuilderRegistry};

use crate::store::MlxStore;

/// The backend id of ExecuTorch's MLX delegate.
pub const MLX_BACKEND: &str = "MLXBackend";

/// A cache of one sequence. It needs no mask if all layers have full history.
pub type ContiguousCache = etkv_core::ContiguousCache<MlxStore>;

/// A cache whose sequences share cells. A single sequence is read as in a contiguous cache.
pub type CellsCache = etkv_core::CellsCache<MlxStore>;

/// A cache of any kind on MLX arrays.
pub type MlxCache = dyn AttendCache<Store = MlxStore>;

/// A shared cache with the face for MLX programs.
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

/// Returns the builders of this process, with the kinds of this crate.
pub fn builders() -> &'static BuilderRegistry {
    static REGISTERED: Once = Once::new();
    let builders = BuilderRegistry::global();
    REGISTERED.call_once(|| builders.register_kinds::<MlxStore>(MLX_BACKEND));
    builders
}

#[cfg(test)]
mod tests {
    use etkv_core::bookkeeping::{MaskPlan, Slots};
    use etkv_core::{Cache, CacheConfig, CacheRegistry, Placement, SeqCache, Session};

    use super::*;

    /// A program may place the rows of a step itself, so the store does not see them.
    #[test]
    fn rows_are_placed_without_being_seen() {
        let config = CacheConfig::uniform(2, 1, 4, 16).stored_as(etkv_core::KvFormat::F16);
        let mut cache = ContiguousCache::new(config.clone()).unwrap();
        let placed = |n: i32, first: i32, mask| Placement {
            write: Slots::Run(first..first + n),
            read: 0..first + n,
            mask,
        };
        let mut step = Step::begin(&mut cache, &[0, 1, 2]).unwrap();
        assert_eq!(step.place(0), Ok(Some(placed(3, 0, MaskPlan::Causal))));
        assert_eq!(step.place(2).unwrap_err().status(), etkv_core::Status::Shape);
        let error = step.commit(&[]).unwrap_err();
        assert!(error.message().contains("without layer 1"), "{error}");
        assert_eq!(cache.length(), 0);

        for (first, n, mask) in [(0, 3, MaskPlan::Causal), (3, 1, MaskPlan::None)] {
            let positions: Vec<i32> = (first..first + n).collect();
            let mut step = Step::begin(&mut cache, &positions).unwrap();
            for layer in 0..2 {
                assert_eq!(step.place(layer), Ok(Some(placed(n, first, mask.clone()))));
            }
            let planes = step.store().unwrap().planes(1).unwrap();
            let [keys, values] = planes.map(|(_, buffers)| buffers[0]);
            assert!(keys.dim(2) >= first + n && keys.shape() == values.shape());
            step.commit(&[]).unwrap();
            assert_eq!(cache.length(), first + n);
        }
        // Each of two sequences sees only its own cells.
        let mut cells = CellsCache::new(config).unwrap();
        for sequence in [0, 1] {
            cells.begin_step(&[sequence; 2]).unwrap();
            let mut step = Step::begin(&mut cells, &[0, 1]).unwrap();
            let slots = 2 * sequence..2 * sequence + 2;
            let write = Slots::Run(slots.clone());
            let expected = Placement { write, read: slots, mask: MaskPlan::Causal };
            for layer in 0..2 {
                assert_eq!(step.place(layer), Ok(Some(expected.clone())));
            }
            assert_eq!(step.store().unwrap().planes(0).unwrap()[0].1[0].dim(1), 1);
            step.commit(&[]).unwrap();
        }
        cells.begin_step(&[0, 1]).unwrap();
        let mut step = Step::begin(&mut cells, &[2, 2]).unwrap();
        let Placement { write, read, mask } = step.place(1).unwrap().unwrap();
        assert_eq!((write, read), (Slots::Run(4..6), 0..6));
        let MaskPlan::Explicit(runs) = mask else { panic!("{mask:?}") };
        assert_eq!((runs.runs(0), runs.runs(1)), (&[0..2, 4..5][..], &[2..4, 5..6][..]));
    }

    /// The host may already have registered the next keys that sessions would choose.
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
