//! A step is a transaction: dropped before its commit, it has not been.

use mlx_rs::Array;

use crate::attend::AttendSpec;
use crate::cache::AttendCache;
use crate::error::Result;

/// One forward of a program on a cache.
///
/// ```
/// use etkv::{CacheConfig, ContiguousCache, Step};
/// use mlx_rs::Array;
///
/// # fn main() -> etkv::Result<()> {
/// let mut cache = ContiguousCache::new(CacheConfig::uniform(1, 2, 4, 16))?;
/// etkv::mlx::run(|| {
///     let rows = Array::ones::<f32>(&[1, 2, 3, 4])?;
///     let mut step = Step::begin(&mut cache, &[0, 1, 2])?;
///     let spec = step.update_and_fetch(0, &rows, &rows)?;
///     let q = Array::ones::<f32>(&[1, 2, 3, 4])?;
///     let out = etkv::attend(&q, &spec, 0.5, None)?;
///     drop(spec);
///     step.commit(&[&out])
/// })?;
/// # use etkv::Cache;
/// assert_eq!(cache.length(), 3);
/// # Ok(())
/// # }
/// ```
pub struct Step<'a> {
    cache: &'a mut dyn AttendCache,
    open: bool,
}

impl<'a> Step<'a> {
    /// Opens a step of these positions, one a query token.
    ///
    /// # Errors
    /// Those of [`AttendCache::begin`].
    pub fn begin(cache: &'a mut dyn AttendCache, positions: &[i32]) -> Result<Self> {
        cache.begin(positions)?;
        Ok(Self { cache, open: true })
    }

    /// Writes a layer's new rows and tells what its queries attend to; see
    /// [`AttendCache::update_and_fetch`].
    ///
    /// # Errors
    /// Those of [`AttendCache::update_and_fetch`].
    pub fn update_and_fetch(&mut self, layer: usize, k: &Array, v: &Array) -> Result<AttendSpec> {
        self.cache.update_and_fetch(layer, k, v)
    }

    /// Evaluates `outputs` together with what the step wrote.
    ///
    /// # Errors
    /// [`Mlx`](crate::Status::Mlx) if evaluating fails.
    pub fn eval(&self, outputs: &[&Array]) -> Result<()> {
        self.cache.eval(outputs)
    }

    /// Evaluates `outputs` together with what the step wrote, and makes the
    /// step's positions visible.
    ///
    /// # Errors
    /// - [`Mlx`](crate::Status::Mlx) if evaluating fails,
    ///   [`Step`](crate::Status::Step) if a layer is missing,
    ///   [`InvalidArgument`](crate::Status::InvalidArgument) where values that are no
    ///   numbers would reach other sequences. The step has not been.
    /// - [`Mlx`](crate::Status::Mlx) where rows that slide could not be moved: the
    ///   cache is lost until it is cleared.
    pub fn commit(mut self, outputs: &[&Array]) -> Result<()> {
        self.eval(outputs)?;
        self.cache.commit()?;
        self.open = false;
        Ok(())
    }
}

impl Drop for Step<'_> {
    fn drop(&mut self) {
        if self.open {
            self.cache.abort();
        }
    }
}
