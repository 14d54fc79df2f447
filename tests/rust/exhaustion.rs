//! The state of a cache after the system has refused memory.
//!
//! The limit applies to the whole process, so each test runs in a separate process.
#![cfg(target_os = "linux")]

use std::process::Command;

use etkv::{CacheConfig, CellsCache, ContiguousCache, Growth, KvFormat, MlxCache, Status, Step};
use etkv_tests::{on_mlx, oracle, Rng};
use mlx_rs::Array;

const N_KV_HEADS: usize = 8;
const HEAD_DIM: usize = 64;
const CAPACITY: i32 = 1 << 16;
/// The number of bytes that a process may still allocate: enough for steps of a few tokens, but fewer than the bytes
/// of any pool of full capacity.
const LEFT: u64 = 8 << 20;

/// Runs `body` in a separate process. `name` is the name of the calling test.
fn in_a_process_of_its_own(name: &str, body: fn() -> etkv::Result<()>) {
    const INSIDE: &str = "ETKV_TEST_EXHAUSTION";
    if etkv::mlx::on_gpu().unwrap() {
        // A limit of the process does not limit the memory of the device.
        return;
    }
    if std::env::var_os(INSIDE).is_some() {
        return etkv::mlx::run(body).unwrap();
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env(INSIDE, "1")
        .output()
        .unwrap();
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {told}", output.status);
    // A process that runs no test also succeeds, so tests are counted.
    let counted = String::from_utf8_lossy(&output.stdout);
    assert!(counted.contains("ok. 1 passed"), "{counted}");
}

/// Limits the process to its current memory plus `left` bytes, or removes the limit.
fn limit(left: Option<u64>) {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = status.split(' ').next().unwrap().parse().unwrap();
    let soft = left.map_or(libc::RLIM_INFINITY, |left| pages * 4096 + left);
    let limit = libc::rlimit { rlim_cur: soft, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: the struct outlives the call.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_AS, &limit) }, 0);
}

fn config() -> CacheConfig {
    CacheConfig {
        growth: Growth::Upfront,
        max_step_tokens: 8,
        ..CacheConfig::uniform(1, N_KV_HEADS as i32, HEAD_DIM as i32, CAPACITY)
    }
}

fn rows(seed: u64, n: usize) -> Array {
    on_mlx::array(&oracle::random_rows(&mut Rng::new(seed), n, N_KV_HEADS, HEAD_DIM))
}

/// Runs a step of `n` tokens, starting at position `at`. Returns its attention.
fn append(cache: &mut MlxCache, at: i32, n: i32) -> etkv::Result<Vec<f32>> {
    let positions: Vec<i32> = (at..at + n).collect();
    let rows = rows(at as u64, n as usize);
    let mut step = Step::begin(cache, &positions)?;
    let spec = step.update_and_fetch(0, &rows, &rows)?;
    let out = etkv::attend(&rows, &spec, 0.125, None)?;
    drop(spec);
    step.commit(&[&out])?;
    Ok(on_mlx::rows(&out).into_iter().flatten().flatten().collect())
}

/// A failed clear changes nothing: the next step attends to the old rows.
fn clears(mut caches: [Box<MlxCache>; 2]) -> etkv::Result<()> {
    for cache in &mut caches {
        append(&mut **cache, 0, 8)?;
        append(&mut **cache, 8, 8)?;
        cache.convert(KvFormat::RowInt4, KvFormat::RowInt4)?;
    }
    let [undisturbed, cache] = &mut caches;
    let expected = append(&mut **undisturbed, 16, 1)?;
    limit(Some(LEFT));
    let error = cache.clear(false).unwrap_err();
    assert_eq!(error.status(), Status::Backend);
    assert!(error.message().contains("out of memory"), "{error}");
    assert_eq!(cache.length(), 16);
    assert_eq!(cache.formats(), [KvFormat::RowInt4; 2]);
    assert_eq!(append(&mut **cache, 16, 1)?, expected);
    limit(None);
    cache.clear(false)?;
    assert_eq!((cache.length(), cache.formats()), (0, [KvFormat::F32; 2]));
    append(&mut **cache, 0, 8)?;
    Ok(())
}

#[test]
fn a_clear_that_fails_changes_nothing() {
    in_a_process_of_its_own("a_clear_that_fails_changes_nothing", || {
        let config = || config().stored_as(KvFormat::F32);
        clears([
            Box::new(ContiguousCache::new(config())?),
            Box::new(ContiguousCache::new(config())?),
        ])
    });
}

#[test]
fn a_clear_of_sequences_that_fails_changes_nothing() {
    in_a_process_of_its_own("a_clear_of_sequences_that_fails_changes_nothing", || {
        let config = || config().stored_as(KvFormat::F32);
        clears([Box::new(CellsCache::new(config())?), Box::new(CellsCache::new(config())?)])
    });
}

/// Steps continue in float as long as there is not enough memory for the conversion at `quantized_kv_start`. The
/// first step without room is refused with the conversion's error. It succeeds once there is memory.
fn conversions(cache: &mut MlxCache) -> etkv::Result<()> {
    append(cache, 0, 8)?;
    limit(Some(LEFT));
    append(cache, 8, 4)?;
    assert_eq!(cache.formats(), [KvFormat::F16; 2], "the conversion fails");
    append(cache, 12, 5)?;
    let error = append(cache, 17, 1).unwrap_err();
    assert_eq!(error.status(), Status::Backend);
    for words in ["17 positions in f16", "row-int4", "out of memory", "free memory"] {
        assert!(error.message().contains(words), "{error}");
    }
    assert_eq!((cache.length(), cache.formats()), (17, [KvFormat::F16; 2]));
    limit(None);
    append(cache, 17, 1)?;
    assert_eq!((cache.length(), cache.formats()), (18, [KvFormat::RowInt4; 2]));
    Ok(())
}

fn quantized_later() -> CacheConfig {
    // The allocator keeps up to 32 MiB of freed memory, so the pools are larger.
    CacheConfig {
        quantized_kv_start: Some(10),
        capacity: 4 * CAPACITY,
        ..config().stored_as(KvFormat::RowInt4)
    }
}

#[test]
fn a_failed_conversion_is_reported_and_repeated() {
    in_a_process_of_its_own("a_failed_conversion_is_reported_and_repeated", || {
        conversions(&mut ContiguousCache::new(quantized_later())?)
    });
}

#[test]
fn a_failed_conversion_of_sequences_is_reported_and_repeated() {
    in_a_process_of_its_own("a_failed_conversion_of_sequences_is_reported_and_repeated", || {
        conversions(&mut CellsCache::new(quantized_later())?)
    });
}
