//! KV caches without a backend.
//!
//! A cache consists of *bookkeeping* (integers: which position is in which slot) and a backend's [`Store`] (bytes:
//! the rows of each slot). This crate has the bookkeeping, the kinds of caches over any store, their faces, the step,
//! the registry and the sessions. It does not depend on MLX, C++ or Python.
//!
//! A runner uses a [`Cache`], and a [`SeqCache`] or [`TreeCache`] if the kind has that face. A program uses an
//! [`AttendCache`], with one [`Step`] for each forward. The program finds the cache by the key of a [`Session`].
//!
//! A backend implements [`Store`]. It registers the kinds of this crate with [`BuilderRegistry::register_kinds`], and
//! kinds of its own with a builder for each:
//!
//! ```
//! use etkv_core::{BuilderRegistry, ContiguousCache, SharedCache, Store};
//!
//! fn register<S: Store>(backend_id: &str) {
//!     let builders = BuilderRegistry::global();
//!     builders.register_kinds::<S>(backend_id);
//!     builders.register(backend_id, "contiguous, of 8 positions", |mut config| {
//!         config.capacity = config.capacity.min(8);
//!         Ok(SharedCache::new(ContiguousCache::<S>::new(config)?))
//!     });
//! }
//! ```
#![forbid(unsafe_code)]

pub mod bookkeeping;
pub mod budget;
mod cache;
pub mod config;
pub mod error;
mod estimate;
mod finite;
pub mod format;
mod forwards;
mod growth;
pub mod memory;
mod metadata;
mod prefix;
mod process_report;
mod reach;
mod reclaim;
mod recurrent_layer;
mod registry;
mod report;
mod session;
mod shared;
pub mod snapshot;
mod spec;
mod step;
mod store;
mod store_layer;
mod watch;

pub use budget::{BudgetReport, HolderReport, MemoryBudget};
pub use cache::{AttendCache, Cache, CellsCache, ContiguousCache, SeqCache, TreeCache};
pub use config::{CacheConfig, LayerConfig, LayerGroups, LayerPolicy};
pub use error::{Error, Result, Status};
pub use format::{Element, KvFormat, Packing, PlaneFormat};
pub use forwards::Forwards;
pub use growth::Growth;
pub use memory::{Bytes, LayerMemory, Memory, RecurrentMemory};
pub use metadata::{LayerMetadata, Metadata};
pub use prefix::{Piece, Prefix, ShareCache};
pub use process_report::{MemoryBudgetReport, ProcessReport};
pub use reach::Reach;
pub use reclaim::{Reclaim, ReclaimClass};
pub use recurrent_layer::RecurrentLayer;
pub use registry::{Builder, BuilderRegistry, CacheRegistry, Entry};
pub use report::{
    BufferReport, BytesReport, CacheReport, ConfigReport, FormatsReport, LayerConfigReport,
    LayerReport, MemoryReport, RecurrentLayerReport, SequenceReport,
};
pub use session::Session;
pub use shared::{CacheGuard, ProgramCache, ProgramGuard, Shared, SharedCache, SharedGuard};
pub use snapshot::{SaveCache, Snapshot};
pub use spec::{AttendSpec, Mask, Placement, RecurrentRows, RecurrentSpec, Scoring};
pub use step::Step;
pub use store::{Extent, RecurrentWork, Spec, Store};
pub use store_layer::StoreLayer;
pub use watch::TARGET;
