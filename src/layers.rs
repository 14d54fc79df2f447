//! Caches for hosts that do not use steps: each layer writes its rows and reads the rows that it attends to. The
//! forward commits once every layer has been called exactly once.

use std::sync::Arc;

use etkv_core::SharedCache;
use mlx_rs::Array;
use parking_lot::Mutex;

use crate::attention::{AttendSpec, Mask};
use crate::config::LayerPolicy;
use crate::error::{fail, Result};
use crate::mlx;
use crate::store::MlxStore;

/// The forwards of a host over a cache. The first call of a layer opens a step, and the call of the last layer
/// commits it.
///
/// If a layer is called a second time, or with other positions, the unfinished forward is rolled back and a new one
/// begins. So a layer cannot be called twice within a forward, as it can in a [`Step`](crate::Step). If several
/// layers of a model share keys and values, the host calls one of them and attends to its result again in the others.
///
/// The step commits before the host evaluates its outputs. If that evaluation fails, the cache holds positions whose
/// rows are undefined: remove these positions, or clear the cache.
pub struct Forwards {
    cache: SharedCache,
    forwards: etkv_core::Forwards<MlxStore>,
    /// Whether the host can apply a mask.
    masks: bool,
}

impl Forwards {
    /// Creates forwards over `cache`. As long as they exist, the caller must not write rows to the cache in another
    /// way.
    ///
    /// # Errors
    /// Errors of [`SharedCache::program`].
    pub fn new(cache: SharedCache) -> Result<Self> {
        let forwards = etkv_core::Forwards::new(cache.program()?, cache.n_layers());
        mlx::end_epochs();
        Ok(Self { cache, forwards, masks: true })
    }

    /// Creates forwards for a host that supports only causal attention. Queries that need a mask are refused with
    /// [`Unsupported`](crate::Status::Unsupported).
    ///
    /// # Errors
    /// Errors of [`Forwards::new`].
    pub fn without_masks(cache: SharedCache) -> Result<Self> {
        let mut forwards = Self::new(cache)?;
        forwards.masks = false;
        Ok(forwards)
    }

    /// Returns the cache.
    pub fn cache(&self) -> &SharedCache {
        &self.cache
    }

    /// Returns the position of the next token of `layer`, in a cache of one sequence.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) if the cache has several sequences.
    pub fn offset(&self, layer: usize) -> Result<i32> {
        match self.forwards.positions() {
            [.., last] if self.forwards.has_made(layer) => Ok(last + 1),
            [first, ..] => Ok(*first),
            [] => Ok(self.cache.lock()?.next_position()?),
        }
    }

    /// Writes a layer's new rows and returns the rows that its queries attend to; see
    /// [`AttendCache::update_and_fetch`](crate::AttendCache::update_and_fetch).
    ///
    /// # Errors
    /// Errors of [`AttendCache::begin`](crate::AttendCache::begin), `update_and_fetch` and `commit`.
    /// The forward is then rolled back.
    pub fn update_and_fetch(
        &mut self,
        layer: usize,
        positions: &[i32],
        k: &Array,
        v: &Array,
    ) -> Result<AttendSpec> {
        self.update_and(layer, positions, k, v, |spec| Ok(spec.clone()))
    }

    /// Writes a layer's new rows, as [`update_and_fetch`](Self::update_and_fetch) does. Calls `work` with the rows that
    /// the layer's queries attend to, and returns the result of `work`. If `work` fails, the forward is rolled back,
    /// even in the last layer: a forward commits only if the host has all of its results.
    ///
    /// # Errors
    /// Errors of [`update_and_fetch`](Self::update_and_fetch) and of `work`.
    pub fn update_and<T>(
        &mut self,
        layer: usize,
        positions: &[i32],
        k: &Array,
        v: &Array,
        work: impl FnOnce(&AttendSpec) -> Result<T>,
    ) -> Result<T> {
        if self.forwards.has_made(layer) || self.forwards.positions() != positions {
            self.abort();
        }
        let masks = self.masks;
        mlx::run(|| {
            self.forwards.call((layer, layer), positions, k, v, |spec| {
                // A host without masks expects rows that begin at position 0, but the rows of a chunk begin later.
                let is_late = matches!(spec.mask, Mask::Causal) && spec.k.len() <= positions[0];
                if !masks && (is_late || matches!(spec.mask, Mask::Explicit(_))) {
                    fail!(
                        Unsupported,
                        "this interface of the cache supports no masks, but {} queries of layer {layer} from position {} on need one",
                        positions.len(),
                        positions[0]
                    );
                }
                work(spec)
            })
        })
    }

    /// Rolls back an unfinished forward, as dropping `self` does. Does nothing if there is none.
    pub fn abort(&mut self) {
        if !self.forwards.positions().is_empty() {
            let _held = mlx::hold();
            self.forwards.abort();
        }
    }
}

impl Drop for Forwards {
    fn drop(&mut self) {
        self.abort();
    }
}

/// The interface of a layer's cache in models for mlx-rs.
pub trait KeyValueCache {
    /// Returns the position of the next token.
    fn offset(&self) -> i32;

    /// Returns the maximum number of positions that the layer sees, if it has a window.
    fn max_size(&self) -> Option<i32>;

    /// Appends rows, `[1, n_kv_heads, T, head_dim]`, and returns all keys and values in the dtype of the new rows.
    /// Attention over them is causal: the last key belongs to the last query.
    ///
    /// # Errors
    /// Errors of the underlying cache.
    fn update_and_fetch(&mut self, keys: Array, values: Array) -> Result<(Array, Array)>;
}

/// One layer of a cache of any kind, as a [`KeyValueCache`].
///
/// ```
/// use etkv::{layer_caches, CacheConfig, ContiguousCache, KeyValueCache, SharedCache};
/// use mlx_rs::Array;
///
/// # fn main() -> etkv::Result<()> {
/// let config = CacheConfig::uniform(2, 4, 64, 4096).stored_as("affine8g64".parse()?);
/// let mut layers = layer_caches(SharedCache::new(ContiguousCache::new(config)?))?;
/// etkv::mlx::run(|| {
///     let rows = Array::ones::<f32>(&[1, 4, 3, 64])?;
///     for layer in &mut layers {
///         assert_eq!(layer.offset(), 0);
///         let (keys, _values) = layer.update_and_fetch(rows.clone(), rows.clone())?;
///         assert_eq!(keys.shape(), [1, 4, 3, 64]);
///     }
///     assert_eq!(layers[0].offset(), 3);
///     Ok(())
/// })
/// # }
/// ```
pub struct LayerCache {
    forwards: Arc<Mutex<Forwards>>,
    layer: usize,
    window: Option<i32>,
}

/// Returns the layers of a cache, in order. They share one forward.
///
/// # Errors
/// Errors of [`SharedCache::lock`].
pub fn layer_caches(cache: SharedCache) -> Result<Vec<LayerCache>> {
    let policies: Vec<LayerPolicy> =
        cache.lock()?.config().layers.iter().map(|layer| layer.policy).collect();
    let forwards = Arc::new(Mutex::new(Forwards::without_masks(cache)?));
    let of = |(layer, policy)| LayerCache {
        forwards: Arc::clone(&forwards),
        layer,
        window: match policy {
            LayerPolicy::Full => None,
            LayerPolicy::Window { window, sinks } => Some(window.saturating_add(sinks)),
            LayerPolicy::Chunk { chunk } => Some(chunk),
        },
    };
    Ok(policies.into_iter().enumerate().map(of).collect())
}

impl KeyValueCache for LayerCache {
    /// Returns the position of the next token, or 0 if several sequences have no common next position.
    fn offset(&self) -> i32 {
        mlx::lock(&self.forwards).offset(self.layer).unwrap_or(0)
    }

    fn max_size(&self) -> Option<i32> {
        self.window
    }

    /// # Errors
    /// [`Unsupported`](crate::Status::Unsupported) if the queries do not see all rows, for example at the
    /// edge of a window: use a [`Step`](crate::Step).
    fn update_and_fetch(&mut self, keys: Array, values: Array) -> Result<(Array, Array)> {
        mlx::run(|| {
            let mut forwards = mlx::lock(&self.forwards);
            let offset = forwards.offset(self.layer)?;
            let n = if keys.ndim() == 4 { keys.dim(2) } else { 0 };
            let positions: Vec<i32> = (offset..offset.saturating_add(n)).collect();
            forwards.update_and(self.layer, &positions, &keys, &values, |spec| {
                Ok((spec.k.dequantized(keys.dtype())?, spec.v.dequantized(values.dtype())?))
            })
        })
    }
}
