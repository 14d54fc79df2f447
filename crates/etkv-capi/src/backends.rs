//! The backends of this build, each of which stores caches in its own memory.

use etkv_core::BuilderRegistry;

/// Returns the cache builders of this process, including the kinds of every backend.
pub(crate) fn builders() -> &'static BuilderRegistry {
    #[cfg(feature = "mlx")]
    etkv::builders();
    etkv_cpu::builders()
}
