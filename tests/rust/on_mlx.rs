//! The campaign of the caches on MLX arrays.

use etkv_core::{CacheConfig, ContiguousCache, SharedCache, Status};
use etkv_tests::vec_store::VecStore;

etkv_tests::campaign!(etkv_tests::on_mlx::OnMlx);
etkv_tests::campaign! {
    etkv_tests::on_mlx::OnMlx:
    sharing::caches_that_share_rows_answer_as_those_that_do_not,
}

#[test]
fn a_cache_of_another_backend_is_refused() {
    let config = CacheConfig::uniform(1, 1, 4, 8);
    let foreign = SharedCache::new(ContiguousCache::<VecStore>::new(config.clone()).unwrap());
    let error = foreign.program::<etkv::MlxStore>().err().unwrap();
    assert_eq!(error.status(), Status::Kind);
    for words in ["MLX storage", "Vec storage"] {
        assert!(error.message().contains(words), "{error}");
    }
    let own = SharedCache::new(etkv::ContiguousCache::new(config).unwrap());
    assert!(own.program::<etkv::MlxStore>().is_ok());
}

#[test]
fn files_cross_backends() {
    use etkv_tests::campaign::saving::files_cross_backends;
    use etkv_tests::{on_cpu::OnCpu, on_mlx::OnMlx};
    files_cross_backends::<OnMlx, OnCpu>();
    files_cross_backends::<OnCpu, OnMlx>();
}
