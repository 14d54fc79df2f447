//! The trait that a backend implements to store the bytes of a cache.

use std::ops::Range;
use std::sync::Arc;

use crate::bookkeeping::{MaskRuns, Slots};
use crate::error::{fail, Result};
use crate::format::KvFormat;
use crate::snapshot::PlaneId;
use crate::spec::{AttendSpec, RecurrentRows, RecurrentSpec};
use crate::store_layer::StoreLayer;

/// The storage of one cache in a backend: the keys and values of every layer, in slots.
///
/// A store has slots and formats, but no notion of positions, sequences or plans: a cache's bookkeeping chooses the
/// slots, and the cache calls the store.
///
/// A store may be lazy: [`write`](Self::write) and [`read`](Self::read) may only record work, which
/// [`eval`](Self::eval) executes. [`abort`](Self::abort) undoes this work, whether it is executed or not.
///
/// # The order of calls
///
/// A step calls [`begin`](Self::begin); for each layer `grow`, `write` and `read`; `eval` or `schedule` to compute
/// outputs; `non_finite`; and [`end`](Self::end) to commit the step or [`abort`](Self::abort) to roll it back.
/// [`end_unread`](Self::end_unread) may replace `non_finite` and `end`. Then
/// [`unread_non_finite`](Self::unread_non_finite) is called before the commit of another step, and before any call
/// between steps except `begin`. `grow` and `eval` are also called between steps; `relocate`, `convert`, `clear` and
/// `release` only between steps. Layers are numbered from 0. The slots in a call are allocated and distinct. Shapes
/// are checked before a store is called.
///
/// # Errors
///
/// [`Backend`](crate::Status::Backend) if the device fails or there is too little memory. Unless a function says
/// otherwise, the store is then unchanged.
pub trait Store: Sized + Send + 'static {
    /// The name of the backend, for messages.
    const NAME: &'static str;

    /// Whether a step can end with [`end_unread`](Self::end_unread), before it is known whether its values are
    /// finite. This has no benefit for a store that computes eagerly.
    const ENDS_UNREAD: bool = false;

    /// Rows as programs pass them, `[1, n_kv_heads, T, head_dim]` in any float dtype. Outputs of programs also have
    /// this type.
    type Tensor;

    /// Rows as attention reads them, `[1, n_kv_heads, L, head_dim]` in the stored format.
    type View;

    /// A boolean mask, `[T, L]`.
    type Mask: Clone + Send;

    /// Bitwise copies of rows.
    type Saved: Send;

    /// Rows that several stores may read, and that no store writes. A clone refers to the same rows.
    type Frozen: Send + Sync;

    /// Returns a store without slots for these layers. A layer stores its rows in [the formats](StoreLayer::formats)
    /// that it has in a cache of `formats`. A missing second buffer has 0 bytes.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a format that the layers' rows do not fit,
    /// [`Unsupported`](crate::Status::Unsupported) for a format that this store lacks.
    fn new(layers: &[StoreLayer], formats: [KvFormat; 2]) -> Result<Self>;

    /// Returns the shape of a tensor.
    fn shape(tensor: &Self::Tensor) -> &[i32];

    /// Returns the format and slots of a layer's keys, and of its values.
    fn extents(&self, layer: usize) -> [Extent; 2];

    /// Grows a layer to `slots` slots and keeps its rows; never shrinks. New slots are zero. Does nothing if the
    /// layer already has that many.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); keys and values each have their old or their new size.
    fn grow(&mut self, layer: usize, slots: i32) -> Result<()>;

    /// Opens a step. Executes the writes of earlier steps, so that an abort does not undo them, and copies the rows
    /// in `displaced`, which the step overwrites.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); no step is then open.
    fn begin(&mut self, displaced: &[(usize, Slots)]) -> Result<Self::Saved>;

    /// Writes a layer's new rows, one for each slot. `v` is `None` for a layer without a second buffer.
    ///
    /// With `watch` the store records whether all values are finite in their stored format, for
    /// [`non_finite`](Self::non_finite). If values are in the keys, this includes all elements of the keys.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); some of the rows may have been written.
    fn write(
        &mut self,
        layer: usize,
        slots: &Slots,
        k: &Self::Tensor,
        v: Option<&Self::Tensor>,
        watch: bool,
    ) -> Result<()>;

    /// Returns whether each row of `k` begins with the elements of the same row of `v`, NaN included. The shapes
    /// differ only in their last axis. Waits for the computation of `k` and `v`.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn begins_with(k: &Self::Tensor, v: &Self::Tensor) -> Result<bool>;

    /// Returns views of a run of slots for attention: of keys and of values. For a layer without a second buffer, the
    /// second view is of the [first elements](StoreLayer::second_in_first) of the keys.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn read(&self, layer: usize, slots: Range<i32>) -> Result<[Self::View; 2]>;

    /// Returns a mask in the type that attention needs.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn mask(runs: &Arc<MaskRuns>) -> Result<Self::Mask>;

    /// Computes `outputs` together with the writes of the open step.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); the step stays open until it is aborted.
    fn eval(&self, outputs: &[&Self::Tensor]) -> Result<()>;

    /// Starts the work of [`eval`](Self::eval), and may return before it is finished: the caller waits for the
    /// outputs.
    ///
    /// # Errors
    /// Errors of [`eval`](Self::eval).
    fn schedule(&self, outputs: &[&Self::Tensor]) -> Result<()> {
        self.eval(outputs)
    }

    /// Returns the index, from 0, of the first watched write of the open step that has a value that is not finite.
    /// Returns `None` if all values are finite.
    fn non_finite(&self) -> Option<usize>;

    /// Ends the open step and keeps its writes.
    fn end(&mut self);

    /// Ends the open step like [`end`](Self::end), but without a call of [`non_finite`](Self::non_finite):
    /// [`unread_non_finite`](Self::unread_non_finite) returns its result later. The computation of all writes of the
    /// step must be finished or started.
    fn end_unread(&mut self) {
        self.end();
    }

    /// Returns the result of [`non_finite`](Self::non_finite) for the step that ended [unread](Self::end_unread).
    /// Drops the data recorded for it. Waits for the computation. Another step may be open.
    fn unread_non_finite(&mut self) -> Option<usize> {
        None
    }

    /// Ends the open step: undoes its writes, restores `saved`, and sets the slots of `blank` to zero.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); the contents of all slots are unknown.
    fn abort(&mut self, saved: Self::Saved, blank: &[(usize, Slots)]) -> Result<()>;

    /// Moves rows of these layers, the same slots in each layer. Reads all rows of a layer before it writes any of
    /// them. Grows layers to `slots` slots if they have fewer. Needs memory for the moved rows of one layer, or of
    /// all layers if the rows are few.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); the contents of all slots are unknown.
    fn relocate(&mut self, layers: &[usize], from: &Slots, to: &Slots, slots: i32) -> Result<()>;

    /// Converts the rows of a layer to other formats, which must fit and be
    /// [those of the layer](StoreLayer::formats). Needs memory for one more buffer.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); keys and values are each complete, in their old or their new format.
    fn convert(&mut self, layer: usize, formats: [KvFormat; 2]) -> Result<()>;

    /// Removes all rows. The store is then like a new one from [`new`](Self::new), with at least `slots[layer]`
    /// slots. Buffers that already have the right formats stay, with their contents.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); rows and formats are unchanged, but some layers may have more slots.
    fn clear(&mut self, formats: [KvFormat; 2], slots: &[i32]) -> Result<()>;

    /// Frees all buffers, even those with unfinished work.
    fn release(&mut self);

    /// Copies the rows of a plane at these slots, at least one, to `bytes`. Called between steps. The order is slot
    /// by slot, with the heads of a slot next to each other, in the layout of [`KvFormat::planes`].
    ///
    /// # Errors
    /// [`Unsupported`](crate::Status::Unsupported) by default, and
    /// [`Backend`](crate::Status::Backend).
    fn copy_out(&self, _id: PlaneId, _slots: &Slots, _bytes: &mut [u8]) -> Result<()> {
        fail!(Unsupported, "{} storage cannot be saved", Self::NAME)
    }

    /// Writes bytes that [`copy_out`](Self::copy_out) copied to these slots. Called between steps.
    ///
    /// # Errors
    /// [`Unsupported`](crate::Status::Unsupported) by default, and
    /// [`Backend`](crate::Status::Backend); the rows of these slots are unknown.
    fn copy_in(&mut self, _id: PlaneId, _slots: &Slots, _bytes: &[u8]) -> Result<()> {
        fail!(Unsupported, "{} storage cannot be loaded", Self::NAME)
    }

    /// Freezes the rows in the first `slots[layer]` slots of each layer, which must be allocated. Called between
    /// steps. Several stores, including this one, may then read these rows in place. If this store later writes to
    /// these slots, the frozen rows do not change. Rows that are already [shared](Extent::shared) stay in place,
    /// unless `anew` requests copies of them. No layer will grow above `most[layer]` slots.
    ///
    /// # Errors
    /// [`Unsupported`](crate::Status::Unsupported) by default, and [`Backend`](crate::Status::Backend). The rows of
    /// these slots are unchanged. Other slots, which no step reads, may become zero or be freed.
    fn freeze(&mut self, _slots: &[i32], _most: &[i32], _anew: bool) -> Result<Self::Frozen> {
        fail!(Unsupported, "{} storage cannot share memory with other caches", Self::NAME)
    }

    /// Makes a store without slots read frozen rows as its first slots. The rows must have the same layers and
    /// formats. No layer will grow above `most[layer]` slots.
    ///
    /// # Errors
    /// Errors of [`freeze`](Self::freeze). The store may then have some of the rows.
    fn attach(&mut self, _frozen: &Self::Frozen, _most: &[i32]) -> Result<()> {
        fail!(Unsupported, "{} storage cannot share memory with other caches", Self::NAME)
    }

    /// Runs `work`, which drops tensors, while no other thread uses the backend.
    fn exclusively(work: &mut dyn FnMut()) {
        work();
    }

    /// Runs `wait`, which blocks until another thread has released a cache. A backend with a process-wide lock
    /// releases that lock during `wait`, because the other thread may need it.
    fn give_way(wait: &mut dyn FnMut()) {
        wait();
    }
}

/// The format and slots of a layer's keys, or of its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The format of the rows.
    pub format: KvFormat,
    /// The number of allocated slots.
    pub slots: i32,
    /// The number of first slots whose rows other stores may also read in place.
    pub shared: i32,
}

impl Extent {
    /// Returns the number of slots whose rows only this store reads.
    pub fn own(&self) -> i32 {
        (self.slots - self.shared).max(0)
    }
}

/// The attention of a step on a store.
pub type Spec<S> = AttendSpec<<S as Store>::View, <S as Store>::Mask>;

/// Computes a recurrent layer of a step: reads the stored rows and anchors, and returns the rows and anchors that the
/// step adds.
pub type RecurrentWork<'a, S> = dyn FnMut(&RecurrentSpec<<S as Store>::View>) -> Result<RecurrentRows<<S as Store>::Tensor>>
    + 'a;
