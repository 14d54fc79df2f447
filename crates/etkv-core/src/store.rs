//! What a backend is to a cache: the bytes.

use std::ops::Range;

use crate::bookkeeping::Slots;
use crate::config::LayerConfig;
use crate::error::Result;
use crate::format::KvFormat;
use crate::spec::AttendSpec;

/// The storage of one cache in a backend: the keys and values of every layer, in slots.
///
/// A store knows slots and formats. It does not know positions, sequences or steps'
/// plans: a cache's bookkeeping says which slots, and the cache drives the store.
///
/// A store may be lazy: [`write`](Self::write) and [`read`](Self::read) may record what
/// is to be computed. [`eval`](Self::eval) carries it out, and
/// [`abort`](Self::abort) undoes it whether or not it was carried out.
///
/// # The order of calls
///
/// [`begin`](Self::begin), then for each layer `grow`, `write` and `read`, then
/// [`end`](Self::end) where the step is committed and [`abort`](Self::abort) where it is
/// not. All other functions are called between steps. Layers have numbers from 0 on;
/// slots are allocated before they are named, and no call names a slot twice. Shapes are
/// checked before a store is called.
///
/// # Errors
///
/// [`Backend`](crate::Status::Backend) stands for what a device reports, and for memory that is
/// not there. Unless a function says otherwise, the store is unchanged then.
pub trait Store: Sized + Send + 'static {
    /// The backend's name in messages.
    const NAME: &'static str;

    /// Rows as programs bring them, `[1, n_kv_heads, T, head_dim]` in any float dtype;
    /// also the outputs of programs.
    type Tensor;

    /// Rows as attention reads them, `[1, n_kv_heads, L, head_dim]` as they are stored.
    type View;

    /// A boolean mask, `[T, L]`.
    type Mask: Clone + Send;

    /// Rows taken out of their slots, bit for bit.
    type Saved: Send;

    /// A store without slots for these layers, of keys and of values in `formats`.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a format that the layers'
    /// rows do not fit, [`Unsupported`](crate::Status::Unsupported) for one that this
    /// store does not have.
    fn new(layers: &[LayerConfig], formats: [KvFormat; 2]) -> Result<Self>;

    /// The shape of a tensor.
    fn shape(tensor: &Self::Tensor) -> &[i32];

    /// What is held of a layer's keys, and of its values.
    fn extents(&self, layer: usize) -> [Extent; 2];

    /// Grows a layer to `slots` slots, keeping what is there; never shrinks. New slots
    /// are zero. Growing by nothing costs nothing.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); each of keys and values has its old size or the new.
    fn grow(&mut self, layer: usize, slots: i32) -> Result<()>;

    /// Opens a step: carries out what earlier steps wrote, so that an abort does not
    /// undo it, and copies the rows in `displaced`, which the step writes over.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); no step is open then.
    fn begin(&mut self, displaced: &[(usize, Slots)]) -> Result<Self::Saved>;

    /// Writes a layer's new rows, of which there are as many as slots.
    ///
    /// With `watch` the store remembers whether all of the values are finite, in the
    /// format in which they are stored, for [`non_finite`](Self::non_finite).
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); some of the rows may be written.
    fn write(
        &mut self,
        layer: usize,
        slots: &Slots,
        k: &Self::Tensor,
        v: &Self::Tensor,
        watch: bool,
    ) -> Result<()>;

    /// A run of slots as attention reads them, the keys and the values.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn read(&self, layer: usize, slots: Range<i32>) -> Result<[Self::View; 2]>;

    /// A mask of `n_tokens` rows, at least 1, with a byte for each slot that is read: 1 is
    /// seen, 0 is not.
    fn mask(bytes: &[u8], n_tokens: i32) -> Self::Mask;

    /// Computes `outputs` together with what the open step wrote.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); the step stays open, to be aborted.
    fn eval(&self, outputs: &[&Self::Tensor]) -> Result<()>;

    /// Starts what [`eval`](Self::eval) does, and may return before it is done: the
    /// caller waits for the outputs.
    ///
    /// # Errors
    /// As [`eval`](Self::eval).
    fn schedule(&self, outputs: &[&Self::Tensor]) -> Result<()> {
        self.eval(outputs)
    }

    /// The first of the writes of the open step that was watched and brought a value that
    /// is not finite, counted from 0.
    fn non_finite(&self) -> Option<usize>;

    /// Ends the open step: what it wrote stays.
    fn end(&mut self);

    /// Ends the open step: undoes what it wrote, puts back what was `saved`, and makes
    /// the values in the slots of `blank` zero.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); the content of all slots is unknown.
    fn abort(&mut self, saved: Self::Saved, blank: &[(usize, Slots)]) -> Result<()>;

    /// Moves rows of a layer, all of which are read before any is written. Grows the
    /// layer to `slots` where it has fewer. Takes the memory of the moved rows of one
    /// buffer at a time.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); the content of all slots is unknown.
    fn relocate(&mut self, layer: usize, from: &Slots, to: &Slots, slots: i32) -> Result<()>;

    /// Stores the rows of a layer in other formats, which they fit. Takes the memory of
    /// one buffer besides.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); each of keys and values is whole, in its old format or
    /// in the new.
    fn convert(&mut self, layer: usize, formats: [KvFormat; 2]) -> Result<()>;

    /// Forgets what is stored, and stores what comes in `formats`, with at least
    /// `slots[layer]` slots. Buffers of these formats stay, with whatever is in them.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend): rows and formats are as before, and there may be more
    /// slots.
    fn clear(&mut self, formats: [KvFormat; 2], slots: &[i32]) -> Result<()>;

    /// Gives all buffers back, unfinished work in them included.
    fn release(&mut self);

    /// Runs `wait`, which blocks until another thread is done with a cache. A backend
    /// with a lock for the whole process gives it up meanwhile: the other thread may
    /// need it.
    fn give_way(wait: &mut dyn FnMut()) {
        wait();
    }
}

/// What is held of a layer's keys, or of its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// How they are stored.
    pub format: KvFormat,
    /// Slots allocated.
    pub slots: i32,
}

/// What a step on a store attends to.
pub type Spec<S> = AttendSpec<<S as Store>::View, <S as Store>::Mask>;
