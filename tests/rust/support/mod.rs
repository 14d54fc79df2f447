//! Shared parts of the tests: random numbers from a seed, the oracles, the backends on which caches are tested, and
//! the campaign that runs on each of them.

pub mod backend;
pub mod campaign;
pub mod kept;
pub mod model;
pub mod on_cpu;
#[cfg(feature = "mlx")]
pub mod on_mlx;
pub mod oracle;
pub mod recurrence;
pub mod shrink;
pub mod slots;
pub mod stores;
pub mod texts;
pub mod vec_store;

/// xorshift64*, which is small and gives the same numbers on every machine.
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// Returns a number below `n`, which must be at least 1.
    pub fn below(&mut self, n: usize) -> usize {
        ((self.next_u64() >> 33) % n as u64) as usize
    }

    pub fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Returns a number in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Runs a test for many seeds, and prints the seed that fails.
pub fn for_seeds(default_runs: u64, test: impl Fn(u64) + std::panic::RefUnwindSafe) {
    for seed in seeds(default_runs) {
        if let Err(panic) = std::panic::catch_unwind(|| test(seed)) {
            eprintln!("failed with ETKV_SEED={seed}");
            std::panic::resume_unwind(panic);
        }
    }
}

/// Returns the seed in `ETKV_SEED`, or `ETKV_RUNS` seeds that begin with `ETKV_FIRST`.
fn seeds(default_runs: u64) -> std::ops::Range<u64> {
    let first = number("ETKV_FIRST").unwrap_or(0);
    match number("ETKV_SEED") {
        Some(seed) => seed..seed + 1,
        None => first..first + runs(default_runs),
    }
}

/// Returns the number in `ETKV_RUNS`, or the default.
pub fn runs(default_runs: u64) -> u64 {
    number("ETKV_RUNS").unwrap_or(default_runs)
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}
