//! The campaign of the caches on plain vectors, and the behaviour of a cache whose store fails.

use etkv_core::{
    AttendCache, BuilderRegistry, Cache, CacheConfig, CacheRegistry, ContiguousCache, Growth,
    KvFormat, LayerPolicy, Session, SharedCache, Status, Step,
};
use etkv_tests::backend::Backend;
use etkv_tests::vec_store::{append, fail_next, Failure, OnVec, VecStore};

etkv_tests::campaign!(OnVec);

/// Returns a cache with a window whose rows move.
fn windowed(growth: Growth) -> ContiguousCache<VecStore> {
    let mut config = CacheConfig {
        max_step_tokens: 4,
        growth,
        ..CacheConfig::uniform(1, 1, 4, 100).stored_as(KvFormat::F32)
    };
    config.layers[0].policy = LayerPolicy::Window { window: 4, sinks: 0 };
    ContiguousCache::new(config).unwrap()
}

#[test]
fn a_cache_whose_rows_could_not_be_moved_refuses_steps_until_it_is_cleared() {
    for release in [false, true] {
        let mut cache = windowed(Growth::default());
        fail_next(Failure::Relocate);
        let failed = (0..25).find_map(|step| append(&mut cache, step * 4, 4).err()).unwrap();
        assert!(failed.message().contains("as the test asked for"), "{failed}");
        assert!(!cache.can_extend(1));
        let error = cache.begin(&[cache.length()]).unwrap_err();
        assert_eq!(error.status(), Status::Backend);
        assert!(error.message().contains("as the test asked for"), "{error}");
        cache.clear(release).unwrap();
        assert!(cache.can_extend(1));
        append(&mut cache, 0, 4).unwrap();
    }
}

#[test]
fn a_clear_that_fails_changes_nothing() {
    let mut cache = windowed(Growth::Upfront);
    append(&mut cache, 0, 4).unwrap();
    cache.convert(KvFormat::F16, KvFormat::F16).unwrap();
    fail_next(Failure::Grow);
    assert_eq!(cache.clear(false).unwrap_err().status(), Status::Backend);
    assert_eq!((cache.length(), cache.formats()), (4, [KvFormat::F16; 2]));
    append(&mut cache, 4, 1).unwrap();
    cache.clear(false).unwrap();
    assert_eq!((cache.length(), cache.formats()), (0, [KvFormat::F32; 2]));
}

#[test]
fn a_clear_that_fails_leaves_a_poisoned_cache_poisoned() {
    let mut cache = windowed(Growth::Upfront);
    fail_next(Failure::Relocate);
    (0..25).find_map(|step| append(&mut cache, step * 4, 4).err()).unwrap();
    fail_next(Failure::Grow);
    cache.clear(false).unwrap_err();
    assert!(!cache.can_extend(1));
    cache.clear(true).unwrap();
    append(&mut cache, 0, 4).unwrap();
}

#[test]
fn a_conversion_that_fails_is_tried_again() {
    let config = CacheConfig { quantized_kv_start: Some(4), ..CacheConfig::uniform(1, 1, 8, 100) };
    let mut cache = ContiguousCache::<VecStore>::new(config.stored_as(KvFormat::RowInt4)).unwrap();
    fail_next(Failure::Convert);
    append(&mut cache, 0, 8).unwrap();
    assert_eq!(cache.formats(), [KvFormat::F16; 2]);
    append(&mut cache, 8, 1).unwrap();
    assert_eq!(cache.formats(), [KvFormat::RowInt4; 2]);
}

#[test]
fn a_step_without_memory_is_rolled_back() {
    let mut cache = ContiguousCache::<VecStore>::new(CacheConfig::uniform(1, 1, 4, 1000)).unwrap();
    append(&mut cache, 0, 200).unwrap();
    fail_next(Failure::Grow);
    assert_eq!(append(&mut cache, 200, 100).unwrap_err().status(), Status::Backend);
    assert_eq!(cache.length(), 200);
    append(&mut cache, 200, 100).unwrap();
    assert_eq!(cache.length(), 300);
}

/// After a backend has registered its kinds, sessions can be created, and programs find their caches.
#[test]
fn a_backend_registers_its_kinds() {
    const BACKEND: &str = "VecBackend";
    let builders = BuilderRegistry::global();
    let config = CacheConfig::uniform(1, 1, 4, 8);
    let unknown = Session::new(builders, BACKEND, "contiguous", config.clone());
    assert_eq!(unknown.err().unwrap().status(), Status::Kind);
    builders.register(BACKEND, ContiguousCache::<VecStore>::KIND, |config| {
        Ok(SharedCache::new(ContiguousCache::<VecStore>::new(config)?))
    });
    let session = Session::new(builders, BACKEND, "contiguous", config).unwrap();
    let entry = CacheRegistry::global().get(session.key()).unwrap();
    assert_eq!(entry.backend_id, BACKEND);
    let program = entry.cache.program::<VecStore>().unwrap();
    let mut cache = program.lock().unwrap();
    let mut step = Step::begin(&mut *cache, &[0, 1]).unwrap();
    let rows = OnVec::tensor(&vec![vec![vec![1.0; 4]]; 2]);
    step.update_and_fetch(0, &rows, &rows).unwrap();
    step.commit(&[]).unwrap();
    // Both faces share one lock.
    assert_eq!(session.cache().lock().err().unwrap().status(), Status::Step);
    drop(cache);
    assert_eq!(session.cache().lock().unwrap().length(), 2);
    let key = session.key().to_owned();
    drop(session);
    assert_eq!(CacheRegistry::global().get(&key).err().unwrap().status(), Status::NoCache);
}
