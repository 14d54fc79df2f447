//! The campaign of the caches in plain memory.

use etkv_core::{CacheConfig, SharedCache, Status};
use etkv_cpu::{ContiguousCache, CpuStore};
use etkv_tests::vec_store::VecStore;

etkv_tests::campaign!(etkv_tests::on_cpu::OnCpu);

#[test]
fn a_cache_of_another_backend_is_refused() {
    let config = CacheConfig::uniform(1, 1, 4, 8);
    let foreign = etkv_core::ContiguousCache::<VecStore>::new(config.clone()).unwrap();
    let error = SharedCache::new(foreign).program::<CpuStore>().err().unwrap();
    assert_eq!(error.status(), Status::Kind);
    for words in ["CPU storage", "Vec storage"] {
        assert!(error.message().contains(words), "{error}");
    }
    let own = SharedCache::new(ContiguousCache::new(config).unwrap());
    assert!(own.program::<CpuStore>().is_ok());
}
