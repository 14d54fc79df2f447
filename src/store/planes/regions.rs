//! The regions of a pool: frozen pieces that other pools may also read, and after them the pool's own buffers.

use std::sync::Arc;

use mlx_rs::ops::indexing::take_axis;
use mlx_rs::ops::maximum;
use mlx_rs::transforms::eval;
use mlx_rs::Array;

use super::{indices, Parts, SLOTS};
use crate::error::{fail, Result};
use crate::mlx::{joined, slice_axis};
use crate::store::Pool;
use etkv_core::bookkeeping::Slots;

/// The planes of a piece. The arrays are computed and never written.
struct FrozenParts(Parts);

// SAFETY: the arrays are computed before they are shared, and never written. Only a thread with the lock of MLX
// copies, reads and drops their handles. Only such threads use pools, and the owner of a `Frozen` drops it on such a
// thread.
unsafe impl Send for FrozenParts {}
// SAFETY: as above.
unsafe impl Sync for FrozenParts {}

/// The first slots of some frozen rows. A clone refers to the same rows. Must be dropped while MLX is held.
#[derive(Clone)]
pub struct Piece {
    parts: Arc<FrozenParts>,
    slots: i32,
}

/// Returns rows in memory that no other array shares, even if they are a single array.
fn copied(parts: &[Array]) -> Result<Array> {
    match parts {
        // MLX would return the array itself as its copy.
        [one] => Ok(maximum(one, one)?),
        several => joined(several, SLOTS as i32),
    }
}

impl Pool {
    /// Returns the number of frozen slots. These are the first slots, and the buffers begin after them.
    pub(in crate::store) fn base(&self) -> i32 {
        self.pieces.iter().map(|piece| piece.slots).sum()
    }

    /// Returns views of the slots from `start` to `stop` of a plane: one view for each region that has some of these
    /// slots, but at least one view.
    fn views(&self, plane: usize, start: i32, stop: i32) -> Result<Vec<Array>> {
        let frozen = self.pieces.iter().map(|piece| (piece.parts.0.get(plane), piece.slots));
        let own = (self.buffers.get(plane), self.own_slots());
        let mut views = Vec::new();
        let mut first = 0;
        for (array, slots) in frozen.chain([own]) {
            let (from, to) = ((start - first).max(0), (stop - first).min(slots));
            first += slots;
            let Some(array) = array else {
                continue;
            };
            // An empty range is a view of the region that contains its start.
            let is_empty_here = start == stop && from == to && views.is_empty();
            if from < to || is_empty_here {
                views.push(slice_axis(array, SLOTS, from, to, 1)?);
            }
        }
        if views.is_empty() {
            fail!(
                Internal,
                "cannot read slots {start} to {stop} of a pool of {} slots",
                self.slots()
            );
        }
        Ok(views)
    }

    /// Returns the rows of a plane at a run of slots, as a view if they are in one region.
    pub(in crate::store) fn range(&self, plane: usize, start: i32, stop: i32) -> Result<Array> {
        joined(&self.views(plane, start, stop)?, SLOTS as i32)
    }

    /// Returns the rows of a plane at these slots. There is at least one slot.
    pub(in crate::store) fn taken(&self, plane: usize, slots: &Slots) -> Result<Array> {
        let list = match slots {
            Slots::Run(run) => return self.range(plane, run.start, run.end),
            Slots::List(list) => list,
        };
        let base = self.base();
        let take =
            |array: &Array, list: &[i32]| Ok(take_axis(array, indices(list)?, SLOTS as i32)?);
        if let (0, Some(buffer)) = (base, self.buffers.get(plane)) {
            return take(buffer, list);
        }
        // Reads the range from the first to the last slot. If the range spans regions, it is a temporary copy.
        let first = slots.least().unwrap_or(0);
        let list: Vec<i32> = list.iter().map(|slot| slot - first).collect();
        take(&self.range(plane, first, slots.end())?, &list)
    }

    /// Returns slots as indices in the pool's own buffers. First copies the frozen rows at and after the first of
    /// these slots to these buffers.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); the pool is unchanged.
    pub(in crate::store) fn for_writing(&mut self, slots: &Slots) -> Result<Slots> {
        if self.pieces.is_empty() {
            return Ok(slots.clone());
        }
        self.own_from(slots.least().unwrap_or(i32::MAX))?;
        let base = self.base();
        Ok(match slots {
            Slots::Run(run) => Slots::Run(run.start - base..run.end - base),
            Slots::List(list) => Slots::List(list.iter().map(|slot| slot - base).collect()),
        })
    }

    /// Copies all frozen rows to the pool's own buffers, which then have all slots.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); the pool is unchanged.
    pub(in crate::store) fn own(&mut self) -> Result<()> {
        self.own_from(0)
    }

    /// Copies the frozen rows at and after slot `start` to the pool's own buffers. Earlier writes to these buffers
    /// have already been evaluated, so a rollback does not lose them.
    fn own_from(&mut self, start: i32) -> Result<()> {
        if start >= self.base() {
            return Ok(());
        }
        let (start, stop) = (start.max(0), self.slots());
        self.check_memory(stop - start)?;
        let mut own = Parts::new();
        for plane in 0..self.layout.len() {
            own.push(copied(&self.views(plane, start, stop)?)?);
            // Evaluates one plane after the other, to limit the memory for temporary copies.
            eval(&own[plane..])?;
        }
        self.trim(start);
        self.buffers = own;
        self.shared = self.shared.min(start);
        Ok(())
    }

    /// Drops the frozen rows at and after slot `end`.
    fn trim(&mut self, end: i32) {
        self.pieces = first_of(&self.pieces, end);
    }

    /// Makes the rows of the first `end` slots read-only: moves the pool's own rows below `end` into a frozen piece.
    /// With `anew`, copies all rows below `end` into a single piece, even rows that are read-only already. The piece
    /// counts as the pool's own until [`share`](Self::share). A write to a frozen slot first copies its row, and all
    /// frozen rows after it, to the pool's own buffers.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend); the pool is unchanged.
    pub(in crate::store) fn freeze(&mut self, end: i32, anew: bool) -> Result<()> {
        let slots = self.slots();
        if end < 0 || end > slots {
            fail!(Internal, "cannot freeze {end} slots of a pool of {slots}");
        }
        let from = if anew { 0 } else { self.base() };
        if end <= from {
            return Ok(());
        }
        self.check_memory(slots - from)?;
        let (mut piece, mut own) = (Parts::new(), Parts::new());
        for plane in 0..self.layout.len() {
            piece.push(self.range(plane, from, end)?.contiguous()?);
            if end < slots {
                own.push(self.range(plane, end, slots)?.contiguous()?);
            }
        }
        eval(piece.iter().chain(&own))?;
        self.trim(from);
        self.pieces.push(Piece { parts: Arc::new(FrozenParts(piece)), slots: end - from });
        self.buffers = own;
        self.shared = self.shared.min(from);
        Ok(())
    }

    /// Returns the frozen rows of the first `end` slots, which other pools may now read.
    pub(in crate::store) fn share(&mut self, end: i32) -> Vec<Piece> {
        self.shared = self.base();
        first_of(&self.pieces, end)
    }

    /// Makes a pool without slots read frozen rows of its format as its first slots.
    ///
    /// # Errors
    /// [`Internal`](crate::Status::Internal) for rows of another format, or a pool with slots.
    pub(in crate::store) fn attach(&mut self, pieces: &[Piece]) -> Result<()> {
        if self.slots() > 0 {
            fail!(
                Internal,
                "cannot attach frozen rows to a pool that already has {} slots",
                self.slots()
            );
        }
        if pieces.iter().any(|piece| piece.parts.0.len() != self.layout.len()) {
            fail!(
                Internal,
                "expected frozen rows of {} planes, got another number",
                self.layout.len()
            );
        }
        self.pieces = pieces.to_vec();
        self.shared = self.base();
        Ok(())
    }

    /// Writes back rows that an open step may have overwritten, or zeros to slots that it may have written. Slots
    /// that are still frozen are skipped: a write would have copied them to the pool's own buffers.
    pub(in crate::store) fn write_unfrozen(
        &mut self,
        slots: &Slots,
        parts: &[Array],
    ) -> Result<()> {
        let base = self.base();
        if slots.least().is_none_or(|least| least >= base) {
            return self.write_parts(slots, parts);
        }
        let at: Vec<i32> =
            (0..).zip(slots.iter()).filter(|&(_, s)| s >= base).map(|(n, _)| n).collect();
        if at.is_empty() {
            return Ok(());
        }
        let written: Vec<i32> = slots.iter().filter(|&slot| slot >= base).collect();
        let rows = |part| Ok(take_axis(part, indices(&at)?, SLOTS as i32)?);
        let rows = parts.iter().map(rows).collect::<Result<Parts>>()?;
        self.write_parts(&Slots::of(&written), &rows)
    }
}

/// Returns the pieces of the first `end` slots.
fn first_of(pieces: &[Piece], end: i32) -> Vec<Piece> {
    let mut left = end;
    let mut first = Vec::new();
    for piece in pieces {
        let slots = piece.slots.min(left);
        if slots > 0 {
            first.push(Piece { parts: Arc::clone(&piece.parts), slots });
        }
        left -= slots;
    }
    first
}
