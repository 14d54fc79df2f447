//! Damaged programs of every operation: each runs or is refused. None ends its process, takes more than 10
//! CPU seconds, or requests unlimited memory.
//!
//! `python -m tests.upstream_ops.damage` runs it. Without its environment variables it does nothing: it needs
//! the programs that ExecuTorch's own tests export.
//!
//! | variable | meaning |
//! | --- | --- |
//! | `ETKV_DAMAGE_PROGRAMS` | the file of `tests.upstream_ops.payloads` |
//! | `ETKV_RUNS` | damaged programs |
//! | `ETKV_SEED` | runs this seed alone |
//! | `ETKV_FIRST_SEED` | the first seed; 1 without it |
//! | `ETKV_JOBS` | worker processes |

#[cfg(target_os = "linux")]
#[path = "damage/mod.rs"]
mod damage;

fn main() {
    #[cfg(target_os = "linux")]
    damage::main();
}
