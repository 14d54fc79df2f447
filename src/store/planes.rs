//! The buffers of a pool. Each is `[1, n_kv_heads, slots, width]` and is written in place. The first slots of a pool
//! may be in frozen pieces instead.

pub mod regions;

use mlx_rs::ops::indexing::scatter_single;
use mlx_rs::ops::zeros_dtype;
use mlx_rs::transforms::{async_eval, eval};
use mlx_rs::{Array, Dtype};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::Pool;
use crate::error::{fail, Result};
use crate::mlx::{self, slice_axis, update_axis};
use etkv_core::bookkeeping::Slots;

/// The axis of the slots. Heads come before it, so the rows of a head are contiguous, as attention reads them, and a
/// range of slots is a view.
pub(crate) const SLOTS: usize = 2;

/// The axis of the KV heads.
pub(crate) const HEADS: usize = 1;

/// The maximum number of runs of slots that are written one by one on the CPU. More runs are written by a scatter,
/// which moves the row of each head separately. On a GPU, each run is a kernel launch, and a scatter of all runs is a
/// single launch.
const MAX_RUNS: usize = 8;

/// One plane of a row: codes, scales or offsets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Plane {
    /// The number of elements in each row.
    pub width: i32,
    /// The dtype of the elements.
    pub dtype: Dtype,
}

impl Plane {
    pub(super) fn row_bytes(&self) -> u64 {
        let width = match self.dtype {
            Dtype::Uint8 => 1,
            Dtype::Float16 | Dtype::Bfloat16 => 2,
            _ => 4,
        };
        u64::from(self.width.unsigned_abs()) * width
    }
}

/// The planes of one pool.
pub type Layout = SmallVec<[Plane; 3]>;

/// One array for each plane, `[1, n_kv_heads, n, width]` each.
pub type Parts = SmallVec<[Array; 3]>;

/// Returns views of a range of some planes along `axis`.
pub(super) fn along(parts: &[Array], axis: usize, start: i32, stop: i32) -> Result<Parts> {
    parts.iter().map(|part| slice_axis(part, axis, start, stop, 1)).collect()
}

impl Pool {
    /// Returns the number of allocated slots.
    pub(super) fn slots(&self) -> i32 {
        self.base() + self.own_slots()
    }

    fn own_slots(&self) -> i32 {
        self.buffers.first().map_or(0, |buffer| buffer.dim(SLOTS as i32))
    }

    /// Returns the buffers, for evaluation. They do not contain frozen rows.
    pub(super) fn buffers(&self) -> &[Array] {
        &self.buffers
    }

    /// Frees the buffers.
    pub(super) fn release(&mut self) {
        self.buffers.clear();
        self.pieces.clear();
        self.shared = 0;
    }

    fn zeros(&self, plane: &Plane, slots: i32) -> Result<Array> {
        Ok(zeros_dtype(&[1, self.n_kv_heads, slots, plane.width], plane.dtype)?)
    }

    /// Grows to `slots` slots and keeps the rows; never shrinks. New slots are zero. The old and the new buffers are
    /// both in memory until the rows are copied.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); the pool is unchanged.
    pub(super) fn grow(&mut self, slots: i32) -> Result<()> {
        let (slots, before) = (slots - self.base(), self.own_slots());
        if slots <= before {
            return Ok(());
        }
        self.check_memory(slots)?;
        let grown = self
            .layout
            .iter()
            .enumerate()
            .map(|(at, plane)| {
                let zeros = self.zeros(plane, slots)?;
                match self.buffers.get(at) {
                    // Copies into the zeros, in place. Joining two arrays would need memory for a third array.
                    Some(buffer) => update_axis(&zeros, buffer, SLOTS, 0, before),
                    None => Ok(zeros),
                }
            })
            .collect::<Result<Parts>>()?;
        // Evaluates now, while the old buffers exist. If this fails, the old buffers remain.
        eval(&grown)?;
        self.buffers = grown;
        Ok(())
    }

    /// Refuses sizes that the system cannot allocate: MLX's CPU build would write to address 0.
    fn check_memory(&self, slots: i32) -> Result<()> {
        if mlx::on_gpu()? {
            return Ok(());
        }
        let width: u64 = self.layout.iter().map(Plane::row_bytes).sum();
        let rows = u64::from(self.n_kv_heads.unsigned_abs()) * u64::from(slots.unsigned_abs());
        let bytes = usize::try_from(rows.saturating_mul(width)).unwrap_or(usize::MAX);
        if Vec::<u8>::new().try_reserve_exact(bytes).is_err() {
            fail!(
                Backend,
                "out of memory: {slots} slots of {} KV heads take {bytes} bytes; free memory or lower the capacity",
                self.n_kv_heads
            );
        }
        Ok(())
    }

    /// Rolls back the writes since the buffers were last evaluated. Evaluated writes stay.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    pub(super) fn roll_back(&mut self) -> Result<()> {
        let slots = self.own_slots();
        let before = self
            .layout
            .iter()
            .zip(&self.buffers)
            .map(|(plane, buffer)| match mlx::before_writes(buffer)? {
                Some(before) => Ok(before),
                // All slots were rewritten, so the old rows are not needed.
                None => self.zeros(plane, slots),
            })
            .collect::<Result<Parts>>()?;
        self.buffers = before;
        Ok(())
    }

    /// Writes one array for each plane, with a row for each slot.
    pub(super) fn write_parts(&mut self, slots: &Slots, parts: &[Array]) -> Result<()> {
        if slots.is_empty() {
            return Ok(());
        }
        if slots.end() > self.slots() || parts.len() != self.layout.len() {
            fail!(
                Internal,
                "cannot write {} planes of rows to slots up to {}: the pool has {} planes and {} slots",
                parts.len(),
                slots.end(),
                self.layout.len(),
                self.slots()
            );
        }
        let slots = self.for_writing(slots)?;
        let written = self
            .buffers
            .iter()
            .zip(parts)
            .map(|(buffer, rows)| with_rows(buffer, rows, &slots))
            .collect::<Result<Parts>>()?;
        self.buffers = written;
        Ok(())
    }

    /// Returns the slots from `start` to `stop`: views if they are in one region, otherwise joined copies.
    pub(super) fn slice(&self, start: i32, stop: i32) -> Result<Parts> {
        if start < 0 || stop < start || stop > self.slots() || self.slots() == 0 {
            fail!(
                Internal,
                "cannot read slots {start} to {stop} of a pool of {} slots",
                self.slots()
            );
        }
        (0..self.layout.len()).map(|plane| self.range(plane, start, stop)).collect()
    }

    /// Returns copies of these slots, which are not evaluated yet.
    pub(super) fn copied_parts(&self, slots: &Slots) -> Result<Parts> {
        if slots.is_empty() || slots.end() > self.slots() {
            fail!(
                Internal,
                "cannot copy slots up to {} of a pool of {} slots",
                slots.end(),
                self.slots()
            );
        }
        let copy = |plane| match slots {
            Slots::Run(_) => Ok(self.taken(plane, slots)?.contiguous()?),
            Slots::List(_) => self.taken(plane, slots),
        };
        (0..self.layout.len()).map(copy).collect()
    }
}

/// The maximum number of slots in a list whose array is kept. The lists of most steps are shorter.
const MAX_KEPT: usize = 4096;

/// Returns slots as an array. All planes of all layers use the same slots in a step, so the last array is kept on the
/// device. This applies only to the shared stream of a GPU, where creating the array costs a kernel launch.
pub(super) fn indices(list: &[i32]) -> Result<Array> {
    static LAST: Mutex<Option<(Vec<i32>, Array)>> = Mutex::new(None);
    let make = || mlx::on_device(&mlx::array_of(list, &[list.len() as i32])?);
    if list.len() > MAX_KEPT || !mlx::is_stream_on_gpu()? || !mlx::is_stream_shared()? {
        return make();
    }
    let mut last = LAST.lock();
    match &*last {
        Some((slots, array)) if slots == list => Ok(array.clone()),
        _ => {
            let array = make()?;
            async_eval([&array])?;
            *last = Some((list.to_vec(), array.clone()));
            Ok(array)
        }
    }
}

/// Returns a plane's buffer with rows written to these slots, which are numbered from the start of the buffer.
pub(super) fn with_rows(buffer: &Array, rows: &Array, slots: &Slots) -> Result<Array> {
    match slots {
        // If rows replace a whole buffer, MLX would use these rows as the buffer, with their strides. The axis of the
        // slots would then come before the heads.
        Slots::Run(run) if run.end - run.start == buffer.dim(SLOTS as i32) => {
            update_axis(buffer, &rows.contiguous()?, SLOTS, run.start, run.end)
        }
        Slots::Run(run) => update_axis(buffer, rows, SLOTS, run.start, run.end),
        Slots::List(list) => update_list(buffer, rows, list),
    }
}

/// Returns `buffer` with the slots of `list` replaced, in place.
pub(super) fn update_list(buffer: &Array, rows: &Array, list: &[i32]) -> Result<Array> {
    if rows.size() == 0 {
        // MLX divides by the number of elements of a row, and a layer without a second buffer has rows without
        // elements there.
        return Ok(buffer.clone());
    }
    let runs = runs(list);
    if runs.len() > 1 && (runs.len() > MAX_RUNS || mlx::is_stream_on_gpu()?) {
        // Scattered updates have the axis of the slots first.
        let rows = rows.transpose_axes(&[2, 0, 1, 3])?.expand_dims(3)?;
        return Ok(scatter_single(buffer, indices(list)?, rows, SLOTS as i32)?);
    }
    let mut buffer = buffer.clone();
    for (first, n) in runs {
        let (first, n) = (first as i32, n as i32);
        let start = list[first as usize];
        let part = slice_axis(rows, SLOTS, first, first + n, 1)?;
        buffer = update_axis(&buffer, &part, SLOTS, start, start + n)?;
    }
    Ok(buffer)
}

/// Returns the runs of consecutive slots in `list`: for each run, the index at which it begins, and its length.
fn runs(list: &[i32]) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (at, &slot) in list.iter().enumerate() {
        match runs.last_mut() {
            Some((_, n)) if list[at - 1] + 1 == slot => *n += 1,
            _ => runs.push((at, 1)),
        }
    }
    runs
}
