//! The memory of MLX and the handles in this process.

use super::handle;

/// Returns the number of handles that were made and not freed.
#[no_mangle]
pub extern "C" fn etkv_live_handles() -> usize {
    handle::count()
}

#[cfg(feature = "mlx")]
mod of_mlx {
    use etkv::{mlx, Result};

    use crate::boundary::{c_functions, out, read_struct};

    /// Bytes that MLX holds in this process; see the header.
    #[allow(non_camel_case_types)]
    #[repr(C)]
    #[derive(Clone, Copy)]
    pub struct etkv_mlx_memory {
        struct_size: usize,
        active: u64,
        cached: u64,
        peak: u64,
    }

    c_functions!(
        /// Fills `memory`.
        unsafe fn etkv_mlx_memory_read(memory: *mut etkv_mlx_memory) -> Result<()> {
            let target = out(memory, "memory")?;
            let memory = read_struct(target, "memory")?;
            let [active, cached, peak] = mlx::run(|| {
                Ok([
                    mlx_rs::memory::active_memory()?,
                    mlx_rs::memory::cache_memory()?,
                    mlx_rs::memory::peak_memory()?,
                ])
            })?;
            target.write(etkv_mlx_memory {
                active: active as u64,
                cached: cached as u64,
                peak: peak as u64,
                ..memory
            });
            Ok(())
        }
    );
}
