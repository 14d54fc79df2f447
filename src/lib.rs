//! The KV cache of an ExecuTorch program, as a library.
//!
//! A cache is a *bookkeeping* (which position lies in which slot: integers) and
//! its *pools* (how rows are kept: MLX arrays). A runner holds its [`Cache`] face;
//! a program's attention drives its [`AttendCache`] face, one [`Step`] a forward.
//! The two meet by the key of a [`Session`].
//!
//! Without the feature `mlx` there is the bookkeeping alone.
//!
//! # Examples
//!
//! Two sequences in one cache, of which the second goes on where the first was after
//! three tokens, without copying a row:
//!
//! ```
//! # #[cfg(feature = "mlx")]
//! # fn main() -> etkv::Result<()> {
//! use etkv::{attend, Cache, CacheConfig, CellsCache, SeqCache, Step};
//! use mlx_rs::Array;
//!
//! let config = CacheConfig::uniform(1, 2, 64, 1024).stored_as("affine4g64".parse()?);
//! println!("{} bytes at 1000 tokens", config.estimate_shared(1000).allocated);
//! let mut cache = CellsCache::new(config)?;
//! etkv::mlx::run(|| {
//!     // What a layer of the model computes for `n` tokens.
//!     let rows = |heads, n| Ok::<_, etkv::Error>(Array::ones::<f32>(&[1, heads, n, 64])?);
//!     let mut forward = |cache: &mut CellsCache, positions: &[i32]| {
//!         let n = positions.len() as i32;
//!         let mut step = Step::begin(cache, positions)?;
//!         let spec = step.update_and_fetch(0, &rows(2, n)?, &rows(2, n)?)?;
//!         let out = attend(&rows(8, n)?, &spec, 0.125, None)?;
//!         drop(spec);
//!         step.commit(&[&out])
//!     };
//!     forward(&mut cache, &[0, 1, 2])?;
//!     cache.seq_cp(0, 1, 0..i32::MAX)?;
//!     // The next token of both, in one step.
//!     cache.begin_step(&[0, 1])?;
//!     forward(&mut cache, &[3, 3])
//! })?;
//! assert_eq!((cache.seq_len(0)?, cache.seq_len(1)?, cache.length()), (4, 4, 5));
//! cache.rewind(3).expect_err("which of the two?");
//! cache.seq_keep(1)?;
//! assert_eq!(cache.length(), 4);
//! # Ok(())
//! # }
//! # #[cfg(not(feature = "mlx"))]
//! # fn main() {}
//! ```

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
