//! The KV cache of an ExecuTorch program, as a library.
//!
//! A cache is a *bookkeeping* (which position lies in which slot: integers) and
//! its *pools* (how rows are kept: MLX arrays). A runner holds its [`Cache`] face;
//! a program's attention drives its [`AttendCache`] face, one [`Step`] a forward.
//! The two meet by the key of a [`Session`].
//!
//! Without the feature `mlx` there is the bookkeeping alone.

pub mod bookkeeping;
mod config;
mod error;
mod format;
mod memory;

pub use config::{CacheConfig, Growth, LayerConfig, LayerPolicy};
pub use error::{Error, Result, Status};
pub use format::KvFormat;
pub use memory::{Bytes, LayerMemory, Memory};

#[cfg(feature = "mlx")]
mod attend;
#[cfg(feature = "mlx")]
mod cache;
#[cfg(feature = "mlx")]
mod layers;
#[cfg(feature = "mlx")]
pub mod mlx;
#[cfg(feature = "mlx")]
pub mod pool;
#[cfg(feature = "mlx")]
mod registry;
#[cfg(feature = "mlx")]
mod session;
#[cfg(feature = "mlx")]
mod shared;
#[cfg(feature = "mlx")]
mod step;

#[cfg(feature = "mlx")]
pub use {
    attend::{attend, attend_stored, AttendSpec, Mask},
    cache::{AttendCache, Cache, CellsCache, ContiguousCache, SeqCache, TreeCache},
    layers::{layer_caches, Forwards, KeyValueCache, LayerCache},
    registry::{Builder, BuilderRegistry, CacheRegistry, Entry, MLX_BACKEND},
    session::Session,
    shared::{CacheGuard, SharedCache},
    step::Step,
};

#[cfg(feature = "mlx")]
mod capi;

#[cfg(feature = "delegate")]
mod bridge;
#[cfg(feature = "delegate")]
pub mod program;
