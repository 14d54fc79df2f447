//! The backends of this build: where caches lie.

use etkv_core::BuilderRegistry;

/// Returns the builders of this process, with the kinds of every backend among them.
pub(crate) fn builders() -> &'static BuilderRegistry {
    #[cfg(feature = "mlx")]
    etkv::builders();
    etkv_cpu::builders()
}
