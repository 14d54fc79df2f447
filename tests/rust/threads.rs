//! Many sessions and caches on many threads, without MLX: what `make test-threads` runs under
//! ThreadSanitizer.

use std::sync::atomic::{AtomicUsize, Ordering};

use etkv_core::{CacheConfig, CacheRegistry, KvFormat, MemoryBudget, Session, Status};
use etkv_cpu::attention::Workspace;
use etkv_cpu::{builders, Pool, ProgramCache, Step, Tensor, CPU_BACKEND};

const LAYERS: usize = 2;
const CAPACITY: i32 = 48;
const STEPS: usize = 40;

/// Returns `[1, heads, n, 32]`, of which all numbers are `value`.
fn rows(heads: i32, n: i32, value: f32) -> Tensor {
    Tensor::new([1, heads, n, 32], vec![value; (heads * n * 32) as usize]).unwrap()
}

/// Runs a step of `n` tokens behind what the cache holds. Every row is `value`, and so is what attention
/// answers: rows of another cache or of half a step would show.
fn step(cache: &ProgramCache, n: i32, value: f32, pool: &Pool) -> etkv_core::Result<()> {
    let mut cache = cache.lock()?;
    if !cache.can_extend(n) {
        cache.rewind(0)?;
    }
    let at = cache.length();
    let mut step = Step::begin(&mut *cache, &(at..at + n).collect::<Vec<_>>())?;
    for layer in 0..LAYERS {
        let spec = step.update_and_fetch(layer, &rows(2, n, value), &rows(2, n, value))?;
        let made =
            etkv_cpu::attend(&rows(4, n, value), &spec, 1.0, None, &mut Workspace::new(), pool)?;
        let made = made.to_f32();
        assert!(made.iter().all(|one| (one - value).abs() < 0.05 * value), "{value}: {made:?}");
    }
    step.commit(&[])
}

/// Two threads run steps on each cache, others ask it and take tokens back, and one opens and closes
/// sessions meanwhile. All share a pool of threads.
#[test]
fn sessions_side_by_side() {
    let pool = Pool::new(2);
    let formats = [KvFormat::F32, KvFormat::F16, "affine8".parse().unwrap()];
    let sessions: Vec<Session> = formats
        .into_iter()
        .map(|format| {
            let config = CacheConfig::uniform(LAYERS, 2, 32, CAPACITY).stored_as(format);
            Session::new(builders(), CPU_BACKEND, "contiguous", config).unwrap()
        })
        .collect();
    let done = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for (index, session) in sessions.iter().enumerate() {
            let value = index as f32 + 1.0;
            for n in [1, 3] {
                let (pool, done) = (&pool, &done);
                scope.spawn(move || {
                    let entry = CacheRegistry::global().get(session.key()).unwrap();
                    let program: ProgramCache = entry.cache.program().unwrap();
                    for _ in 0..STEPS {
                        step(&program, n, value, pool).unwrap();
                    }
                    done.fetch_add(1, Ordering::Relaxed);
                });
            }
            let done = &done;
            let all = 2 * sessions.len();
            scope.spawn(move || {
                let shared = session.cache();
                while done.load(Ordering::Relaxed) < all {
                    assert_eq!(shared.capacity(), CAPACITY);
                    let mut cache = shared.lock().unwrap();
                    let length = cache.length();
                    assert!((0..=CAPACITY).contains(&length));
                    assert!(cache.memory().used <= cache.memory().allocated);
                    if length > 4 {
                        cache.rewind(length - 2).unwrap();
                    }
                    assert_eq!(cache.rewind(CAPACITY + 1).unwrap_err().status(), Status::Position);
                    drop(cache);
                    assert!(MemoryBudget::global().report().caches >= 3);
                    std::thread::yield_now();
                }
            });
        }
        scope.spawn(|| {
            for _ in 0..STEPS {
                let config = CacheConfig::uniform(1, 1, 32, 8);
                let session = Session::new(builders(), CPU_BACKEND, "contiguous", config).unwrap();
                let key = session.key().to_owned();
                assert!(CacheRegistry::global().get(&key).is_ok());
                drop(session);
                assert!(CacheRegistry::global().get(&key).is_err());
            }
        });
    });
}
