//! The KV cache of an ExecuTorch program, as a library.
//!
//! A cache consists of *bookkeeping* (integers: which position is in which slot) and a *store* (MLX arrays: the rows
//! of each slot). A runner uses its [`Cache`] face. A program's attention uses its [`AttendCache`] face, with one
//! [`Step`] for each forward. The program finds the cache by the key of a [`Session`].
//!
//! Bookkeeping, kinds, registry and sessions come from `etkv_core`, which does not depend on MLX. This crate adds
//! storage in MLX arrays, and attention over it. `etkv_mlx_program` runs programs on these caches.
//!
//! # Examples
//!
//! Two sequences in one cache. The second continues from the first three tokens of the first,
//! without copying a row:
//!
//! ```
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
//!         Ok(step.commit(&[&out])?)
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
//! ```

pub mod attention;
mod backend;
mod error;
mod kernel_cache;
pub mod kernels;
mod layers;
pub mod mlx;
pub mod recurrent;
mod store;

use etkv_core::{config, format};
pub use etkv_core::{
    AttendCache, Builder, BuilderRegistry, Bytes, Cache, CacheConfig, CacheGuard, CacheRegistry,
    CacheReport, Entry, Growth, KvFormat, LayerConfig, LayerMemory, LayerPolicy, Memory, SeqCache,
    Session, SharedCache, Status, TreeCache,
};
pub use etkv_file as file;
/// The mlx-rs whose arrays the caches accept and return.
pub use mlx_rs;
pub use {
    attention::{attend, attend_rows, attend_stored, AttendSpec, Mask, Scoring},
    backend::{builders, CellsCache, ContiguousCache, MlxCache, ProgramCache, Step, MLX_BACKEND},
    error::{Error, Result},
    layers::{layer_caches, Forwards, KeyValueCache, LayerCache},
    store::{KvView, MlxStore},
};
