//! The trait that a backend implements: the bytes of a cache.

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
/// A store knows slots and formats. It knows no positions, sequences or plans: a cache's bookkeeping chooses
/// the slots, and the cache drives the store.
///
/// A store may be lazy: [`write`](Self::write) and [`read`](Self::read) may only record work, which
/// [`eval`](Self::eval) executes. [`abort`](Self::abort) undoes it, executed or not.
///
/// # The order of calls
///
/// The order of calls is [`begin`](Self::begin); for each layer `grow`, `write` and `read`; `eval` or
/// `schedule` to compute outputs; `non_finite`; and [`end`](Self::end) to commit the step or
/// [`abort`](Self::abort) to roll it back. [`end_unread`](Self::end_unread) may replace `non_finite` and
/// `end`. Then [`unread_non_finite`](Self::unread_non_finite) follows before the commit of another step and
/// before any call between steps but `begin`. `grow` and `eval` are also called between steps; `relocate`,
/// `convert`, `clear` and `release` between steps only. Layers are numbered from 0. Slots are allocated
/// before they are named, and no call names a slot twice. Shapes are checked before a store is called.
///
/// # Errors
///
/// [`Backend`](crate::Status::Backend) is the error of a failing device and of lacking memory. Unless a
/// function says otherwise, the store is then unchanged.
pub trait Store: Sized + Send + 'static {
    /// The backend's name, for messages.
    const NAME: &'static str;

    /// Whether a step can end before it is known whether its values are finite, with
    /// [`end_unread`](Self::end_unread). A store that computes eagerly gains nothing from it.
    const ENDS_UNREAD: bool = false;

    /// Rows as programs pass them, `[1, n_kv_heads, T, head_dim]` in any float dtype. Outputs of programs
    /// have this type too.
    type Tensor;

    /// Rows as attention reads them, `[1, n_kv_heads, L, head_dim]` as they are stored.
    type View;

    /// A boolean mask, `[T, L]`.
    type Mask: Clone + Send;

    /// Copies of rows, bit for bit.
    type Saved: Send;

    /// Rows that any number of stores read and none writes. A clone of the handle is the same rows.
    type Frozen: Send + Sync;

    /// Returns a store without slots for these layers. The rows of each are stored in [its
    /// formats](StoreLayer::formats) in a cache of `formats`. A layer without a second buffer has a buffer of
    /// 0 bytes there.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a format that the layers' rows do
    /// not fit, [`Unsupported`](crate::Status::Unsupported) for one that this store lacks.
    fn new(layers: &[StoreLayer], formats: [KvFormat; 2]) -> Result<Self>;

    /// Returns the shape of a tensor.
    fn shape(tensor: &Self::Tensor) -> &[i32];

    /// Returns the format and slots of a layer's keys, and of its values.
    fn extents(&self, layer: usize) -> [Extent; 2];

    /// Grows a layer to `slots` slots and keeps its rows; never shrinks. New slots are zero. Does nothing if
    /// the layer has that many already.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); keys and values each have their old size or the new one.
    fn grow(&mut self, layer: usize, slots: i32) -> Result<()>;

    /// Opens a step: executes the writes of earlier steps, so that an abort does not undo them, and copies
    /// the rows in `displaced`, which the step overwrites.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); no step is then open.
    fn begin(&mut self, displaced: &[(usize, Slots)]) -> Result<Self::Saved>;

    /// Writes a layer's new rows, one for each slot. `v` is absent for a layer without a second buffer.
    ///
    /// With `watch` the store remembers whether all values are finite in their stored format, for
    /// [`non_finite`](Self::non_finite). If values are in the keys, all elements of these count.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); some of the rows may be written.
    fn write(
        &mut self,
        layer: usize,
        slots: &Slots,
        k: &Self::Tensor,
        v: Option<&Self::Tensor>,
        watch: bool,
    ) -> Result<()>;

    /// Returns a run of slots as attention reads them: the keys and the values. For a layer without a second
    /// buffer, the second view has the [first elements](StoreLayer::second_in_first) of the keys.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn read(&self, layer: usize, slots: Range<i32>) -> Result<[Self::View; 2]>;

    /// Returns a mask in the form that attention takes.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    fn mask(runs: &Arc<MaskRuns>) -> Result<Self::Mask>;

    /// Computes `outputs` together with the writes of the open step.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); the step stays open until it is aborted.
    fn eval(&self, outputs: &[&Self::Tensor]) -> Result<()>;

    /// Starts what [`eval`](Self::eval) does, and may return before it is finished: the caller waits for the
    /// outputs.
    ///
    /// # Errors
    /// As [`eval`](Self::eval).
    fn schedule(&self, outputs: &[&Self::Tensor]) -> Result<()> {
        self.eval(outputs)
    }

    /// Returns the index, from 0, of the first watched write of the open step that has a value that
    /// is not finite. Returns `None` if all are finite.
    fn non_finite(&self) -> Option<usize>;

    /// Ends the open step and keeps its writes.
    fn end(&mut self);

    /// Ends the open step like [`end`](Self::end), without a call of [`non_finite`](Self::non_finite):
    /// [`unread_non_finite`](Self::unread_non_finite) answers that later. The computation of all writes of
    /// the step is finished or started.
    fn end_unread(&mut self) {
        self.end();
    }

    /// Returns what [`non_finite`](Self::non_finite) would have returned for the step that ended
    /// [unread](Self::end_unread), and forgets it. Waits for the computation. Another step may be open.
    fn unread_non_finite(&mut self) -> Option<usize> {
        None
    }

    /// Ends the open step: undoes its writes, restores `saved`, and sets the slots of `blank` to zero.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); the contents of all slots are unknown.
    fn abort(&mut self, saved: Self::Saved, blank: &[(usize, Slots)]) -> Result<()>;

    /// Moves rows of these layers, the same slots in each. Reads all rows of a layer before it writes any row
    /// of it. Grows layers to `slots` if they have fewer. Needs the memory of the moved rows of one layer at
    /// a time, or of all layers if the rows are few.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); the contents of all slots are unknown.
    fn relocate(&mut self, layers: &[usize], from: &Slots, to: &Slots, slots: i32) -> Result<()>;

    /// Converts the rows of a layer to other formats, which fit them and are [those of the
    /// layer](StoreLayer::formats). Needs the memory of one more buffer.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); keys and values are each complete, in their old format or in the
    /// new one.
    fn convert(&mut self, layer: usize, formats: [KvFormat; 2]) -> Result<()>;

    /// Removes all rows and stores later ones as in [`new`](Self::new), with at least `slots[layer]` slots. Buffers
    /// that already have their formats stay, with their contents.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend): rows and formats are as before; some layers may have more
    /// slots.
    fn clear(&mut self, formats: [KvFormat; 2], slots: &[i32]) -> Result<()>;

    /// Frees all buffers, even those with unfinished work.
    fn release(&mut self);

    /// Copies the rows of a plane at these slots to `bytes`, between steps: slot by slot, the heads of a slot
    /// next to each other, in the layout of [`KvFormat::planes`]. There is at least one slot.
    ///
    /// # Errors
    /// [`Unsupported`](crate::Status::Unsupported) by default, and
    /// [`Backend`](crate::Status::Backend).
    fn copy_out(&self, _id: PlaneId, _slots: &Slots, _bytes: &mut [u8]) -> Result<()> {
        fail!(Unsupported, "{} storage cannot be saved", Self::NAME)
    }

    /// Writes what [`copy_out`](Self::copy_out) copied to these slots, between steps.
    ///
    /// # Errors
    /// [`Unsupported`](crate::Status::Unsupported) by default, and
    /// [`Backend`](crate::Status::Backend); the rows of these slots are unknown.
    fn copy_in(&mut self, _id: PlaneId, _slots: &Slots, _bytes: &[u8]) -> Result<()> {
        fail!(Unsupported, "{} storage cannot be loaded", Self::NAME)
    }

    /// Freezes the rows in the first `slots[layer]` slots of each layer, which are allocated, between steps.
    /// Any number of stores may then read them in place, including this one. If this store later writes to
    /// these slots, it changes its own rows only. Rows that are already [shared](Extent::shared) stay in
    /// place, unless `anew` requests copies of them. No layer grows above `most[layer]` slots.
    ///
    /// # Errors
    /// [`Unsupported`](crate::Status::Unsupported) by default, and [`Backend`](crate::Status::Backend). The
    /// rows of these slots are as before. Other slots hold rows that no step reads: they may become zero or
    /// be freed.
    fn freeze(&mut self, _slots: &[i32], _most: &[i32], _anew: bool) -> Result<Self::Frozen> {
        fail!(Unsupported, "{} storage shares no memory with other caches", Self::NAME)
    }

    /// Makes a store without slots read frozen rows in its first slots. They are of the same layers and
    /// formats. No layer grows above `most[layer]` slots.
    ///
    /// # Errors
    /// As [`freeze`](Self::freeze). The store may then have some of the rows.
    fn attach(&mut self, _frozen: &Self::Frozen, _most: &[i32]) -> Result<()> {
        fail!(Unsupported, "{} storage shares no memory with other caches", Self::NAME)
    }

    /// Runs `work`, which drops tensors, while no other thread uses the backend.
    fn exclusively(work: &mut dyn FnMut()) {
        work();
    }

    /// Runs `wait`, which blocks until another thread is done with a cache. A backend with a process-wide
    /// lock releases it meanwhile: the other thread may need it.
    fn give_way(wait: &mut dyn FnMut()) {
        wait();
    }
}

/// The format and slots of a layer's keys, or of its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// The format of the rows.
    pub format: KvFormat,
    /// Slots allocated.
    pub slots: i32,
    /// The number of first slots whose rows lie in memory that other stores may read too.
    pub shared: i32,
}

impl Extent {
    /// Returns the number of slots whose rows lie in memory of this store only.
    pub fn own(&self) -> i32 {
        (self.slots - self.shared).max(0)
    }
}

/// The attention of a step on a store.
pub type Spec<S> = AttendSpec<<S as Store>::View, <S as Store>::Mask>;

/// Computes a recurrent layer of a step: reads what the cache has, and returns the rows and anchors that the
/// step adds.
pub type RecurrentWork<'a, S> = dyn FnMut(&RecurrentSpec<<S as Store>::View>) -> Result<RecurrentRows<<S as Store>::Tensor>>
    + 'a;
