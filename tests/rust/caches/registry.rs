//! The registries: builders that use a registry while they are called or dropped, and threads that use it
//! concurrently.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use etkv_core::{
    BuilderRegistry, CacheConfig, CacheRegistry, ContiguousCache, Entry, Session, SharedCache,
};
use etkv_tests::vec_store::VecStore;

fn cache(config: CacheConfig) -> etkv_core::Result<SharedCache> {
    Ok(SharedCache::new(ContiguousCache::<VecStore>::new(config)?))
}

fn config() -> CacheConfig {
    CacheConfig::uniform(1, 1, 8, 8)
}

/// An object that uses the registry when it is dropped. It is dropped when its builder is replaced.
struct RegisterOnDrop(Arc<AtomicUsize>);

impl Drop for RegisterOnDrop {
    fn drop(&mut self) {
        BuilderRegistry::global().register("Dropping", "within", cache);
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// Every name belongs to a shard of the table. No shard may be locked while a builder is called or dropped.
#[test]
fn builders_use_the_registry_from_within() {
    let builders = BuilderRegistry::global();
    for n in 0..200 {
        let name = format!("within {n}");
        let same = name.clone();
        builders.register("Nesting", &name, move |config| {
            let builders = BuilderRegistry::global();
            // Registers the builder's own name, and other names.
            builders.register("Nesting", &same, cache);
            assert!(builders.kinds().contains(&("Nesting".into(), same.clone())));
            builders.build("Nesting", &same, config)
        });
        assert!(builders.build("Nesting", &name, config()).is_ok());
    }
    let drops = Arc::new(AtomicUsize::new(0));
    for _ in 0..50 {
        let held = RegisterOnDrop(drops.clone());
        builders.register("Dropping", "within", move |config| {
            let _held = &held;
            cache(config)
        });
    }
    // The last builder was replaced by a registration of the previous one.
    assert!(drops.load(Ordering::Relaxed) >= 49);
}

#[test]
fn errors_for_unknown_names_list_the_available_ones() {
    let builders = BuilderRegistry::global();
    builders.register("one", "ring", cache);
    builders.register("one", "stack", cache);
    builders.register("two", "ring", cache);
    let told = |backend, kind| builders.build(backend, kind, config()).err().unwrap().to_string();
    assert_eq!(
        told("one", "tree"),
        "unknown cache kind `tree` for backend `one`; available: ring, stack"
    );
    let backend = told("three", "ring");
    assert!(backend.starts_with("unknown backend `three`; available: "), "{backend}");
    assert!(backend.contains("one, two"), "{backend}");
}

#[test]
fn keys_are_unique_across_threads() {
    BuilderRegistry::global().register("Meeting", "contiguous", cache);
    let make = || {
        let of = |_| {
            let builders = BuilderRegistry::global();
            let session = Session::new(builders, "Meeting", "contiguous", config()).unwrap();
            session.key().to_owned()
        };
        (0..200).map(of).collect::<Vec<_>>()
    };
    let threads: Vec<_> = (0..4).map(|_| std::thread::spawn(make)).collect();
    let mut keys: Vec<String> = threads.into_iter().flat_map(|t| t.join().unwrap()).collect();
    let n = keys.len();
    keys.sort();
    keys.dedup();
    assert_eq!((n, keys.len()), (800, 800));
    assert!(keys.iter().all(|key| CacheRegistry::global().get(key).is_err()));
}

#[test]
fn one_of_many_gets_a_key() {
    let registry = CacheRegistry::global();
    let entry = Entry { backend_id: "Meeting".into(), cache: cache(config()).unwrap() };
    for n in 0..100 {
        let key = format!("a key {n}");
        let installed = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    if registry.install(&key, entry.clone()).is_ok() {
                        installed.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        assert_eq!(installed.into_inner(), 1);
        // The entry of another cache is not erased.
        assert!(registry.erase_own(&key, &cache(config()).unwrap()).is_none());
        assert!(registry.erase_own(&key, &entry.cache).is_some());
        assert!(registry.erase(&key).is_none());
    }
}
