//! The campaign of the caches on plain vectors, and what a cache does where its store
//! fails.

use etkv_core::{AttendCache, Cache, CacheConfig, ContiguousCache, LayerPolicy, Status, Step};
use etkv_tests::backend::Backend;
use etkv_tests::vec_store::{fail_next, Failure, OnVec, Tensor, VecStore};

etkv_tests::campaign!(OnVec);

fn rows(n: usize) -> Tensor {
    OnVec::tensor(&vec![vec![vec![1.0; 4]]; n])
}

/// A step of tokens from `start` on.
fn append(cache: &mut ContiguousCache<VecStore>, start: i32, n: i32) -> etkv_core::Result<()> {
    let mut step = Step::begin(cache, &(start..start + n).collect::<Vec<_>>())?;
    step.update_and_fetch(0, &rows(n as usize), &rows(n as usize))?;
    step.commit(&[])
}

#[test]
fn a_cache_whose_rows_could_not_be_moved_refuses_steps_until_it_is_cleared() {
    for release in [false, true] {
        let mut config = CacheConfig { max_step: 4, ..CacheConfig::uniform(1, 1, 4, 100) };
        config.layers[0].policy = LayerPolicy::Window { window: 4, sinks: 0 };
        let mut cache = ContiguousCache::<VecStore>::new(config).unwrap();
        fail_next(Failure::Relocate);
        let failed = (0..25).find_map(|step| append(&mut cache, step * 4, 4).err()).unwrap();
        assert!(failed.message().contains("as the test asked for"), "{failed}");
        assert!(!cache.can_extend(1));
        let error = cache.begin(&[cache.length()]).unwrap_err();
        assert_eq!(error.status(), Status::Mlx);
        assert!(error.message().contains("as the test asked for"), "{error}");
        cache.clear(release).unwrap();
        assert!(cache.can_extend(1));
        append(&mut cache, 0, 4).unwrap();
    }
}

#[test]
fn a_step_that_finds_no_memory_has_not_been() {
    let mut cache = ContiguousCache::<VecStore>::new(CacheConfig::uniform(1, 1, 4, 1000)).unwrap();
    append(&mut cache, 0, 200).unwrap();
    fail_next(Failure::Grow);
    assert_eq!(append(&mut cache, 200, 100).unwrap_err().status(), Status::Mlx);
    assert_eq!(cache.length(), 200);
    append(&mut cache, 200, 100).unwrap();
    assert_eq!(cache.length(), 300);
}
