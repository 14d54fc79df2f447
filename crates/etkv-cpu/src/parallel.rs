//! Threads that share the work of one call.

use std::cell::UnsafeCell;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Something that can make calls at the same time: a pool of threads.
pub trait Parallel: Send + Sync {
    /// Returns the most calls that run at the same time.
    fn threads(&self) -> usize;

    /// Calls `call` with each of `0..count` once, and returns after the last. Calls may run at the
    /// same time and in any order.
    fn run(&self, count: usize, call: &(dyn Fn(usize) + Sync));
}

/// Makes calls one after another.
#[derive(Debug, Clone, Copy, Default)]
pub struct Serial;

impl Parallel for Serial {
    fn threads(&self) -> usize {
        1
    }

    fn run(&self, count: usize, call: &(dyn Fn(usize) + Sync)) {
        (0..count).for_each(call);
    }
}

/// A few threads that live as long as the pool. The thread that calls [`run`](Parallel::run) works
/// too. While one thread is in `run`, others that call it work alone: no one waits.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
}

type Call = *const (dyn Fn(usize) + Sync);

struct Shared {
    /// Whether a thread is in `run`.
    busy: AtomicBool,
    /// What to call; written while no call is left.
    call: UnsafeCell<Option<Call>>,
    /// Calls that no thread has begun. A thread that takes one off makes it, and may read `call`: it stays
    /// until that call is done.
    left: AtomicUsize,
    /// Calls that are not done.
    undone: AtomicUsize,
    /// Whether one of the calls panicked.
    panicked: AtomicBool,
    stop: AtomicBool,
    /// Workers that wait for `wake`.
    asleep: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
}

// SAFETY: `call` is written and read as its comment says.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl std::fmt::Debug for Shared {
    fn fmt(&self, out: &mut std::fmt::Formatter) -> std::fmt::Result {
        out.debug_struct("Shared").field("left", &self.left).finish_non_exhaustive()
    }
}

/// How long a worker looks for work before it sleeps: about as long as the machine needs to wake it.
const SPIN: Duration = Duration::from_micros(30);

impl Pool {
    /// Returns a pool that makes `threads` calls at the same time, or fewer if the system starts no
    /// more threads. One of them is the caller's.
    pub fn new(threads: usize) -> Self {
        let shared = Arc::new(Shared {
            busy: AtomicBool::new(false),
            call: UnsafeCell::new(None),
            left: AtomicUsize::new(0),
            undone: AtomicUsize::new(0),
            panicked: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            asleep: AtomicUsize::new(0),
            lock: Mutex::new(()),
            wake: Condvar::new(),
        });
        let start = |i: usize| {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name(format!("etkv-cpu-{i}"));
            thread.spawn(move || shared.work()).ok()
        };
        let workers = (1..threads).map_while(start).collect();
        Self { shared, workers }
    }

    /// Returns a pool with as many threads as the process may use processors.
    pub fn of_host() -> Self {
        Self::new(std::thread::available_parallelism().map_or(1, usize::from))
    }
}

impl Parallel for Pool {
    fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    fn run(&self, count: usize, call: &(dyn Fn(usize) + Sync)) {
        let shared = &*self.shared;
        if count < 2 || self.workers.is_empty() || shared.busy.swap(true, Ordering::Acquire) {
            return Serial.run(count, call);
        }
        // SAFETY: only the lifetime changes; `Finish` waits until no thread uses it.
        let call: Call = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), Call>(call) };
        // SAFETY: no call is left, and `busy` keeps others out.
        unsafe { *shared.call.get() = Some(call) };
        shared.undone.store(count, Ordering::Relaxed);
        // Together with `sleep`: either the worker sees that calls are left, or this thread that
        // it sleeps.
        shared.left.store(count, Ordering::SeqCst);
        if shared.asleep.load(Ordering::SeqCst) > 0 {
            drop(shared.lock.lock().unwrap_or_else(PoisonError::into_inner));
            shared.wake.notify_all();
        }
        let finish = Finish(shared);
        while shared.call_one() {}
        drop(finish);
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(self.shared.lock.lock().unwrap_or_else(PoisonError::into_inner));
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // Workers catch panics.
            let _ = worker.join();
        }
    }
}

/// Ends a `run`, also if a call of its own panics: calls that no thread has begun are dropped, the
/// others waited for.
struct Finish<'a>(&'a Shared);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        let shared = self.0;
        let dropped = shared.left.swap(0, Ordering::AcqRel);
        shared.undone.fetch_sub(dropped, Ordering::AcqRel);
        let mut turns = 0u32;
        while shared.undone.load(Ordering::Acquire) > 0 {
            turns += 1;
            if turns.is_multiple_of(1024) {
                std::thread::yield_now();
            }
            std::hint::spin_loop();
        }
        let panicked = shared.panicked.swap(false, Ordering::Relaxed);
        shared.busy.store(false, Ordering::Release);
        if panicked && !std::thread::panicking() {
            std::panic::resume_unwind(Box::new("a call panicked on another thread"));
        }
    }
}

impl Shared {
    /// Makes one call, if one is left.
    fn call_one(&self) -> bool {
        let take = |left: usize| left.checked_sub(1);
        let Ok(left) = self.left.fetch_update(Ordering::AcqRel, Ordering::Relaxed, take) else {
            return false;
        };
        struct Done<'a>(&'a Shared);
        impl Drop for Done<'_> {
            fn drop(&mut self) {
                if std::thread::panicking() {
                    self.0.panicked.store(true, Ordering::Relaxed);
                }
                self.0.undone.fetch_sub(1, Ordering::AcqRel);
            }
        }
        let _done = Done(self);
        // SAFETY: this thread has taken a call, so the one that set `call` waits for it.
        if let Some(call) = unsafe { *self.call.get() } {
            // SAFETY: as above.
            unsafe { (*call)(left - 1) };
        }
        true
    }

    /// The life of a worker.
    fn work(&self) {
        while !self.stop.load(Ordering::Relaxed) {
            // The one that called `run` panics in turn.
            let called = catch_unwind(AssertUnwindSafe(|| self.call_one()));
            if !matches!(called, Ok(true)) {
                self.wait();
            }
        }
    }

    /// Returns when calls are left, or the pool stops.
    fn wait(&self) {
        let begin = Instant::now();
        while begin.elapsed() < SPIN {
            for _ in 0..64 {
                if self.left.load(Ordering::Relaxed) > 0 {
                    return;
                }
                std::hint::spin_loop();
            }
        }
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.asleep.fetch_add(1, Ordering::SeqCst);
        while self.left.load(Ordering::SeqCst) == 0 && !self.stop.load(Ordering::SeqCst) {
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.asleep.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_call_is_made_once() {
        for threads in [1, 2, 3, 8] {
            let pool = Pool::new(threads);
            assert_eq!(pool.threads(), threads);
            for count in (0..200).chain([1000]) {
                let made: Vec<_> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                pool.run(count, &|i| {
                    made[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(made.iter().all(|made| made.load(Ordering::Relaxed) == 1));
                if count % 50 == 0 {
                    // Workers fall asleep.
                    std::thread::sleep(10 * SPIN);
                }
            }
        }
    }

    #[test]
    fn workers_work_at_the_same_time() {
        let pool = Pool::new(2);
        for _ in 0..10 {
            // Each call waits for the other.
            let barrier = std::sync::Barrier::new(2);
            pool.run(2, &|_| {
                barrier.wait();
            });
            std::thread::sleep(10 * SPIN);
        }
    }

    #[test]
    fn a_thread_does_not_wait_for_another_that_has_the_pool() {
        let pool = Pool::new(2);
        let (first, second) = (std::sync::Barrier::new(2), std::sync::Barrier::new(2));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let waits = AtomicBool::new(true);
                pool.run(2, &|_| {
                    // One call holds the pool until the other thread is done.
                    if waits.swap(false, Ordering::SeqCst) {
                        first.wait();
                        second.wait();
                    }
                });
            });
            first.wait();
            let made = AtomicUsize::new(0);
            pool.run(5, &|_| {
                made.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(made.into_inner(), 5);
            second.wait();
        });
    }

    #[test]
    fn a_panic_is_the_callers() {
        let pool = Pool::new(3);
        for bad in [0, 7] {
            let call = AssertUnwindSafe(|| pool.run(20, &|i| assert_ne!(i, bad, "made to fail")));
            assert!(catch_unwind(call).is_err());
            let made = AtomicUsize::new(0);
            pool.run(20, &|_| {
                made.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(made.into_inner(), 20);
        }
    }
}
