//! The buffer of a layer's keys or values.

use std::ops::Range;
use std::sync::Arc;

use etkv_core::bookkeeping::Slots;
use etkv_core::error::fail;
use etkv_core::{Extent, KvFormat, Result};

use super::codec::Codec;
use super::row_codec::Widths;
use crate::floats::peak;
use crate::memory::{unshared, Memory, SHARES};
use crate::store::view::{Plane, View};
use crate::tensor::Tensor;

/// The rows of a layer's keys or values, in slots. In memory, the slot is the outer axis, and the heads of a
/// slot are contiguous. Slots that were never written are zero.
pub(super) struct Buffer {
    format: KvFormat,
    codec: Codec,
    n_kv_heads: usize,
    head_dim: usize,
    widths: Widths,
    pub(super) slots: i32,
    /// The slots below this number are in frozen memory, and were not written since they were frozen.
    pub(super) shared: i32,
    /// The memory of each plane of the format. Absent if there are no slots.
    pub(super) planes: [Option<Arc<Memory>>; 3],
}

/// Bitwise copies of rows. Each plane has a run of slots.
pub(super) struct Rows {
    format: KvFormat,
    n_slots: usize,
    planes: [Option<Memory>; 3],
}

impl Buffer {
    /// Returns a buffer without slots.
    ///
    /// # Errors
    /// - [`InvalidArgument`](etkv_core::Status::InvalidArgument) if the format does not support rows of
    ///   `head_dim` elements.
    pub fn new(format: KvFormat, n_kv_heads: usize, head_dim: usize) -> Result<Self> {
        format.check(i32::try_from(head_dim).unwrap_or(-1))?;
        let codec = Codec::of(format);
        let widths = codec.widths(head_dim);
        let planes = [None, None, None];
        Ok(Self { format, codec, n_kv_heads, head_dim, widths, slots: 0, shared: 0, planes })
    }

    pub fn extent(&self) -> Extent {
        let mapped = SHARES && self.planes.iter().flatten().all(|plane| plane.pieces().is_some());
        let shared = if mapped { self.shared } else { 0 };
        Extent { format: self.format, slots: self.slots, shared }
    }

    pub fn format(&self) -> KvFormat {
        self.format
    }

    pub fn n_kv_heads(&self) -> usize {
        self.n_kv_heads
    }

    pub fn head_dim(&self) -> usize {
        self.head_dim
    }

    /// Returns the bytes of one slot in a plane, including all heads.
    pub(super) fn slot_bytes(&self, plane: usize) -> usize {
        // The allocation refuses a saturated size.
        self.n_kv_heads.saturating_mul(self.widths[plane])
    }

    pub(super) fn has_plane(&self, plane: usize) -> bool {
        plane == 0 || self.widths[plane] > 0
    }

    /// Creates the planes for `n` slots. `make` creates a plane from its index and its bytes.
    fn planes_of<T>(
        &self,
        n: usize,
        make: impl Fn(usize, usize) -> Result<T>,
    ) -> Result<[Option<T>; 3]> {
        let mut planes = [None, None, None];
        for (at, plane) in planes.iter_mut().enumerate().filter(|(at, _)| self.has_plane(*at)) {
            *plane = Some(make(at, n.saturating_mul(self.slot_bytes(at)))?);
        }
        Ok(planes)
    }

    /// Grows to `slots` slots and keeps the rows. Never shrinks. The old planes exist until the new ones are
    /// complete.
    ///
    /// # Errors
    /// [`Backend`](etkv_core::Status::Backend). The buffer is then unchanged.
    pub fn grow(&mut self, slots: i32) -> Result<()> {
        if slots <= self.slots || self.extend(slots) {
            return Ok(());
        }
        let grown = self.planes_of(slots as usize, |at, size| {
            let grown = match &self.planes[at] {
                Some(before) => before.copied(size),
                None => Memory::zeroed(size),
            };
            Ok(Arc::new(grown?))
        });
        self.planes = grown.map_err(|error| {
            let [heads, dim] = [self.n_kv_heads, self.head_dim];
            error.at(format_args!("{slots} slots of {heads} KV heads of {dim} {}", self.format))
        })?;
        (self.slots, self.shared) = (slots, 0);
        Ok(())
    }

    /// Grows the planes in place, if they have room. Returns whether they do.
    fn extend(&mut self, slots: i32) -> bool {
        let sizes = [0, 1, 2].map(|at| (slots as usize).saturating_mul(self.slot_bytes(at)));
        let mut planes = Vec::new();
        for (plane, size) in self.planes.iter_mut().zip(sizes) {
            let Some(plane) = plane else { continue };
            match Arc::get_mut(plane).filter(|memory| memory.has_room(size)) {
                Some(memory) => planes.push((memory, size)),
                None => return false,
            }
        }
        if planes.is_empty() {
            return false;
        }
        planes.into_iter().for_each(|(memory, size)| memory.extend(size));
        self.slots = slots;
        true
    }

    pub fn release(&mut self) {
        self.planes = [None, None, None];
        (self.slots, self.shared) = (0, 0);
    }

    /// Records that these slots are written. From the first of them on, rows are not shared any more.
    pub(super) fn own(&mut self, slots: &Slots) {
        if self.shared > 0 {
            self.shared = slots.least().map_or(self.shared, |first| first.min(self.shared));
        }
    }

    pub(super) fn check(&self, slots: &Slots) -> Result<()> {
        let least = match slots {
            Slots::Run(run) => run.start,
            Slots::List(list) => list.iter().min().copied().unwrap_or(0),
        };
        if least < 0 || slots.end() > self.slots {
            fail!(
                Internal,
                "expected slots within 0..{}, got {least}..{}",
                self.slots,
                slots.end()
            );
        }
        Ok(())
    }

    /// Writes one row for each slot. Returns whether all stored values are finite. This is checked only with
    /// `watch`. `row` must have room for a row.
    ///
    /// # Errors
    /// [`Backend`](etkv_core::Status::Backend) if a view uses the buffer and memory for a copy is lacking. No
    /// row is then written.
    pub fn write(
        &mut self,
        slots: &Slots,
        rows: &Tensor,
        watch: bool,
        row: &mut [f32],
    ) -> Result<bool> {
        let n = slots.len();
        let expected = [1, self.n_kv_heads, n, self.head_dim];
        if rows.shape().map(|size| usize::try_from(size).unwrap_or(usize::MAX)) != expected {
            fail!(Shape, "expected rows of shape {expected:?}, got {:?}", rows.shape());
        }
        self.check(slots)?;
        if n == 0 {
            return Ok(true);
        }
        self.own(slots);
        let Self { codec, n_kv_heads: heads, head_dim, widths, planes, .. } = self;
        let mut out: [&mut [u8]; 3] = Default::default();
        for (plane, bytes) in planes.iter_mut().flatten().zip(&mut out) {
            *bytes = unshared(plane)?;
        }
        let infinite = codec.infinite_from();
        let mut finite = true;
        if matches!(codec, Codec::Float(dtype) if *dtype == rows.dtype()) {
            let row = &mut row[..*head_dim];
            let copied = rows.for_each_run(|at, head, bytes| {
                let place = slot_at(slots, at) * *heads + head;
                out[0][place * widths[0]..][..widths[0]].copy_from_slice(bytes);
                if watch {
                    rows.dtype().load(bytes, row);
                    finite &= peak(row) < infinite;
                }
            });
            if copied {
                return Ok(finite);
            }
        }
        rows.for_each_row(row, |at, head, row| {
            let place = slot_at(slots, at) * *heads + head;
            codec.encode(row, rows_mut(&mut out, widths, place));
            finite &= !watch || peak(row) < infinite;
        });
        Ok(finite)
    }

    /// Returns a view of a run of slots, for attention.
    ///
    /// # Errors
    /// [`Internal`](etkv_core::Status::Internal) for slots that are not allocated.
    pub fn read(&self, slots: Range<i32>) -> Result<View> {
        if slots.start > slots.end {
            fail!(Internal, "slots {} to {} are read", slots.start, slots.end);
        }
        self.check(&Slots::Run(slots.clone()))?;
        let plane = |at: usize| {
            let memory = Arc::clone(self.planes[at].as_ref()?);
            let slot_stride = self.slot_bytes(at);
            let offset = slots.start as usize * slot_stride;
            Some(Plane { memory, offset, slot_stride, head_stride: self.widths[at] })
        };
        Ok(View {
            format: self.format,
            n_kv_heads: self.n_kv_heads,
            head_dim: self.head_dim,
            stored_dim: self.head_dim,
            n_slots: slots.len(),
            planes: [plane(0), plane(1), plane(2)],
        })
    }

    /// Returns copies of these slots.
    ///
    /// # Errors
    /// [`Backend`](etkv_core::Status::Backend).
    pub fn copy(&self, slots: &Slots) -> Result<Rows> {
        self.check(slots)?;
        let mut copies = self.planes_of(slots.len(), |_, size| Memory::zeroed(size))?;
        for (at, (copy, plane)) in copies.iter_mut().zip(&self.planes).enumerate() {
            let (Some(copy), Some(plane)) = (copy, plane) else { continue };
            for_each_run(slots, self.slot_bytes(at), |there, here| {
                copy.bytes_mut()[here].copy_from_slice(&plane.bytes()[there]);
            });
        }
        Ok(Rows { format: self.format, n_slots: slots.len(), planes: copies })
    }

    /// Writes copies of rows to the same number of slots.
    ///
    /// # Errors
    /// [`Backend`](etkv_core::Status::Backend).
    pub fn put(&mut self, slots: &Slots, rows: &Rows) -> Result<()> {
        self.check(slots)?;
        let (format, n) = (self.format, slots.len());
        if rows.format != format || rows.n_slots != n {
            let Rows { format: other, n_slots, .. } = rows;
            fail!(Internal, "{n_slots} rows of {other} do not fit {n} slots of {format}");
        }
        self.own(slots);
        self.for_each_plane(|at, slot_bytes, bytes| {
            let Some(copy) = &rows.planes[at] else { return };
            for_each_run(slots, slot_bytes, |there, here| {
                bytes[there].copy_from_slice(&copy.bytes()[here]);
            });
        })
    }

    /// Moves rows, as if all were read before any is written. The move needs no memory for a run of slots, or
    /// if rows are in the order of their slots and move towards slot 0. These cases include windows, accepted
    /// candidates and compaction.
    ///
    /// # Errors
    /// [`Backend`](etkv_core::Status::Backend) if memory for a copy of the rows is lacking. Nothing is then
    /// moved.
    pub fn relocate(&mut self, from: &Slots, to: &Slots) -> Result<()> {
        self.check(from)?;
        self.check(to)?;
        let n = from.len();
        if to.len() != n {
            fail!(Internal, "{n} rows do not fit {} slots", to.len());
        }
        self.own(to);
        let runs = matches!((from, to), (Slots::Run(_), Slots::Run(_)));
        let ascend = |slots: &Slots| (1..n).all(|at| slot_at(slots, at - 1) < slot_at(slots, at));
        let down = |at: usize| slot_at(to, at) <= slot_at(from, at);
        let in_place = runs || ((0..n).all(down) && ascend(from) && ascend(to));
        if !in_place {
            let rows = self.copy(from)?;
            return self.put(to, &rows);
        }
        self.for_each_plane(|_, size, bytes| {
            let mut shift = |first: usize, n: usize| {
                let start = slot_at(from, first) * size;
                bytes.copy_within(start..start + n * size, slot_at(to, first) * size);
            };
            if runs && n > 0 {
                shift(0, n);
            } else {
                (0..n).for_each(|at| shift(at, 1));
            }
        })
    }

    /// Sets slots to zero.
    ///
    /// # Errors
    /// [`Backend`](etkv_core::Status::Backend) if a view uses the buffer and memory for a copy is lacking.
    pub fn blank(&mut self, slots: &Slots) -> Result<()> {
        self.check(slots)?;
        self.own(slots);
        self.for_each_plane(|_, slot_bytes, bytes| {
            for_each_run(slots, slot_bytes, |there, _| bytes[there].fill(0));
        })
    }

    /// Passes each plane to `change`: its index, the bytes of a slot, and all its bytes. If a view uses a
    /// plane, the plane is copied first.
    fn for_each_plane(&mut self, mut change: impl FnMut(usize, usize, &mut [u8])) -> Result<()> {
        for at in 0..self.planes.len() {
            let slot_bytes = self.slot_bytes(at);
            if let Some(plane) = &mut self.planes[at] {
                change(at, slot_bytes, unshared(plane)?);
            }
        }
        Ok(())
    }

    /// Returns the same rows in another format. `row` must have room for a row.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new) and [`grow`](Self::grow).
    pub fn converted(&self, format: KvFormat, row: &mut [f32]) -> Result<Self> {
        let mut converted = Self::new(format, self.n_kv_heads, self.head_dim)?;
        converted.grow(self.slots)?;
        let mut from: [&[u8]; 3] = Default::default();
        for (plane, bytes) in self.planes.iter().flatten().zip(&mut from) {
            *bytes = plane.bytes();
        }
        let Self { codec, widths, planes, .. } = &mut converted;
        let mut to: [&mut [u8]; 3] = Default::default();
        for (plane, bytes) in planes.iter_mut().flatten().zip(&mut to) {
            *bytes = unshared(plane)?;
        }
        let row = &mut row[..self.head_dim];
        for place in 0..self.slots as usize * self.n_kv_heads {
            let stored =
                [0, 1, 2].map(|at| &from[at][place * self.widths[at]..][..self.widths[at]]);
            self.codec.decode(stored, row);
            codec.encode(row, rows_mut(&mut to, widths, place));
        }
        Ok(converted)
    }
}

/// Returns the bytes of row number `place` in each plane.
fn rows_mut<'a>(
    planes: &'a mut [&mut [u8]; 3],
    widths: &Widths,
    place: usize,
) -> [&'a mut [u8]; 3] {
    let [a, b, c] = planes;
    let row = |plane: &'a mut [u8], width: usize| &mut plane[place * width..][..width];
    [row(a, widths[0]), row(b, widths[1]), row(c, widths[2])]
}

/// Returns the slot of row number `at`.
fn slot_at(slots: &Slots, at: usize) -> usize {
    match slots {
        Slots::Run(run) => run.start as usize + at,
        Slots::List(list) => list[at] as usize,
    }
}

/// Passes each run of slots to `take`, as two ranges of bytes: in a plane, and in a copy of only these slots.
pub(super) fn for_each_run(
    slots: &Slots,
    slot_bytes: usize,
    mut take: impl FnMut(Range<usize>, Range<usize>),
) {
    let mut run = |slot: usize, at: usize, n: usize| {
        let bytes = |start: usize| start * slot_bytes..(start + n) * slot_bytes;
        take(bytes(slot), bytes(at));
    };
    match slots {
        Slots::Run(slots) => run(slots.start as usize, 0, slots.len()),
        Slots::List(list) => (0..list.len()).for_each(|at| run(list[at] as usize, at, 1)),
    }
}
