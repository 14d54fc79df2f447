//! The backends of this build: where caches lie.

use etkv_core::BuilderRegistry;

pub(crate) use etkv_cpu::CPU_BACKEND;

/// Returns the builders of this process, with the kinds of every backend among them.
pub(crate) fn builders() -> &'static BuilderRegistry {
    #[cfg(feature = "mlx")]
    etkv::builders();
    etkv_cpu::builders()
}

/// Returns the backend whose kinds a kind of the host's is made of.
pub(crate) fn storage_of(backend_id: &str) -> &'static str {
    #[cfg(feature = "mlx")]
    if backend_id != CPU_BACKEND {
        return etkv::MLX_BACKEND;
    }
    let _ = backend_id;
    CPU_BACKEND
}
