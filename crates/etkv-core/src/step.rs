//! A step as a transaction: dropping it before its commit rolls it back.

use crate::cache::AttendCache;
use crate::error::Result;
use crate::spec::Placement;
use crate::store::{RecurrentWork, Spec, Store};

/// One forward of a program on a cache.
///
/// ```
/// use etkv_core::{AttendCache, Result, Step, Store};
///
/// /// A forward of one layer.
/// fn forward<S: Store>(
///     cache: &mut dyn AttendCache<Store = S>,
///     positions: &[i32],
///     [k, v]: [&S::Tensor; 2],
///     attend: impl FnOnce(etkv_core::Spec<S>) -> Result<S::Tensor>,
/// ) -> Result<S::Tensor> {
///     let mut step = Step::begin(cache, positions)?;
///     let output = attend(step.update_and_fetch(0, k, v)?)?;
///     step.commit(&[&output])?;
///     Ok(output)
/// }
/// ```
pub struct Step<'a, S: Store> {
    cache: &'a mut dyn AttendCache<Store = S>,
    open: bool,
}

impl<'a, S: Store> Step<'a, S> {
    /// Opens a step for tokens at these positions, one for each query token.
    ///
    /// # Errors
    /// Errors of [`AttendCache::begin`].
    pub fn begin(cache: &'a mut dyn AttendCache<Store = S>, positions: &[i32]) -> Result<Self> {
        cache.begin(positions)?;
        Ok(Self { cache, open: true })
    }

    /// Writes a layer's new rows and returns the rows that its queries attend to; see
    /// [`AttendCache::update_and_fetch`].
    ///
    /// # Errors
    /// Errors of [`AttendCache::update_and_fetch`].
    pub fn update_and_fetch(
        &mut self,
        layer: usize,
        k: &S::Tensor,
        v: &S::Tensor,
    ) -> Result<Spec<S>> {
        self.cache.update_and_fetch(layer, k, v)
    }

    /// Passes the rows and anchors that a recurrent layer reads to `work`, and writes the rows and anchors that
    /// `work` returns; see [`AttendCache::update_recurrent`].
    ///
    /// # Errors
    /// Errors of [`AttendCache::update_recurrent`].
    pub fn update_recurrent(&mut self, layer: usize, work: &mut RecurrentWork<S>) -> Result<()> {
        self.cache.update_recurrent(layer, work)
    }

    /// Returns the slots to which the caller writes a layer's new rows, and counts the rows as written; see
    /// [`AttendCache::place`].
    ///
    /// # Errors
    /// Errors of [`AttendCache::place`].
    pub fn place(&mut self, layer: usize) -> Result<Option<Placement>> {
        self.cache.place(layer)
    }

    /// Returns the store, if rows can be placed in it.
    pub fn store(&self) -> Option<&S> {
        self.cache.store()
    }

    /// Evaluates `outputs` together with the writes of the step.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend) if the evaluation fails.
    pub fn eval(&self, outputs: &[&S::Tensor]) -> Result<()> {
        self.cache.eval(outputs)
    }

    /// Starts the work of [`eval`](Self::eval), and may return before it is finished.
    ///
    /// # Errors
    /// Errors of [`eval`](Self::eval).
    pub fn schedule(&self, outputs: &[&S::Tensor]) -> Result<()> {
        self.cache.schedule(outputs)
    }

    /// Evaluates `outputs` together with the writes of the step, unless the evaluation has been started already. Then
    /// makes the step's positions visible.
    ///
    /// # Errors
    /// - [`Backend`](crate::Status::Backend) if the evaluation fails, [`Step`](crate::Status::Step) if a layer was
    ///   not called, [`InvalidArgument`](crate::Status::InvalidArgument) if values are not finite and other sequences
    ///   could read them. The step is then rolled back.
    /// - [`Backend`](crate::Status::Backend) if rows of a window could not be moved. The cache is then poisoned until
    ///   it is cleared.
    pub fn commit(mut self, outputs: &[&S::Tensor]) -> Result<()> {
        self.eval(outputs)?;
        self.cache.commit()?;
        self.open = false;
        Ok(())
    }

    /// Makes the step's positions visible before its values are read, if the cache supports it; see
    /// [`AttendCache::commit_unread`]. Starts the computation of `outputs` and of the step's writes, unless it has
    /// been started already.
    ///
    /// # Errors
    /// Errors of [`commit`](Self::commit), except that values that are not finite become an error of
    /// [`AttendCache::check_unread`].
    pub fn commit_unread(mut self, outputs: &[&S::Tensor]) -> Result<()> {
        if !self.cache.can_commit_unread() {
            return self.commit(outputs);
        }
        self.schedule(outputs)?;
        self.cache.commit_unread()?;
        self.open = false;
        Ok(())
    }

    /// Leaves the step open and releases the cache; see [`AttendCache::set_aside`]. Returns the step's number.
    ///
    /// # Errors
    /// Returns the step itself if the cache cannot set steps aside.
    pub fn set_aside(mut self) -> std::result::Result<u64, Self> {
        match self.cache.set_aside() {
            Some(number) => {
                self.open = false;
                Ok(number)
            }
            None => Err(self),
        }
    }

    /// Rolls the step back because another implementation computes it instead. This is normal, so it logs no warning.
    pub fn decline(self) {
        // Dropping the step rolls it back.
        self.cache.set_aside();
    }

    /// Resumes the step that was set aside with this number. Returns `None` if it has been rolled back.
    pub fn resume(cache: &'a mut dyn AttendCache<Store = S>, number: u64) -> Option<Self> {
        cache.resume(number).then_some(Self { cache, open: true })
    }
}

impl<S: Store> Drop for Step<'_, S> {
    fn drop(&mut self) {
        if self.open {
            self.cache.abort();
        }
    }
}
