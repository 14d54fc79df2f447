//! Damaged programs of every operation: each runs or is refused. No program ends its process, takes more than 10 CPU
//! seconds, or requests memory without limit.
//!
//! `python -m tests.upstream_ops.damage` runs this test. Without its environment variables the test does nothing,
//! because it needs the programs that ExecuTorch's tests export.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `ETKV_DAMAGE_PROGRAMS` | the file of `tests.upstream_ops.payloads` |
//! | `ETKV_RUNS` | the number of damaged programs |
//! | `ETKV_SEED` | runs only this seed |
//! | `ETKV_FIRST_SEED` | the first seed, 1 by default |
//! | `ETKV_JOBS` | the number of worker processes |

#[cfg(target_os = "linux")]
#[path = "damage/mod.rs"]
mod damage;

fn main() {
    #[cfg(target_os = "linux")]
    damage::main();
}
