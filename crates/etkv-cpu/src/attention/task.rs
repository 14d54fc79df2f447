//! Runs one task: some query rows over some slots, tile by tile.

use std::f32::consts::LOG2_E;

use super::decode::{with_decode, Encoding};
use super::kernels::{Dots, Next, Product, Rows, Transpose, Unpack, TILE};
use super::mask::{compact, MaskRef};
use super::plan::{Plan, Task};
use super::softcap::Softcap;
use super::softmax::{Merge, Totals, Weigh, NO_PEAK};
use super::tensor::{Output, Queries};
use super::workspace::{Parts, Scratch};
use crate::simd::Simd;

/// The minimum elements of a long row. In dot products of long rows, the cost of the horizontal sums is
/// small.
const LONG: usize = 256;
/// The maximum number of query rows with which dot products of long rows are faster than products with a
/// transposed tile.
const MAX_DOTS: usize = 64;

/// The rows of keys or of values.
#[derive(Debug, Clone, Copy)]
pub(super) struct StoredRows {
    pub encoding: Encoding,
    pub dim: usize,
    /// The bytes of a row in the first plane.
    pub bytes: usize,
    /// The row of slot 0 and head 0 in each plane.
    pub first: [*const u8; 3],
    pub slot_strides: [usize; 3],
    pub head_strides: [usize; 3],
}

// SAFETY: the rows are only read, and the pointers are valid during the call.
unsafe impl Sync for StoredRows {}

impl StoredRows {
    /// Returns whether the kernels read the rows in place for `n_rows` query rows. Packed rows are then
    /// unpacked repeatedly, for a few query rows at a time. Otherwise they are unpacked once, to memory.
    fn in_place<S: Simd>(&self, n_rows: usize) -> bool {
        let most = match self.encoding {
            Encoding::F32 => 12,
            _ => 8,
        };
        S::ROWS > 0 && n_rows <= most && self.dim.is_multiple_of(S::WIDTH)
    }

    /// Returns whether these rows are the first elements of `keys`.
    fn is_in(&self, keys: &Self) -> bool {
        let planes = |rows: &Self| (rows.first, rows.slot_strides, rows.head_strides);
        self.encoding == keys.encoding && self.dim <= keys.dim && planes(self) == planes(keys)
    }

    /// Returns whether scores of `n_rows` query rows are computed as dot products with each row. The
    /// alternative is to transpose a tile, which takes longer if rows are long.
    fn by_dots<S: Simd>(&self, n_rows: usize) -> bool {
        S::ROWS > 0 && self.dim >= LONG && n_rows <= MAX_DOTS
    }

    /// Returns whether rows are used without unpacking: float32 rows of whole vectors.
    fn is_unpacked<S: Simd>(&self) -> bool {
        self.encoding == Encoding::F32 && self.dim.is_multiple_of(S::WIDTH)
    }

    fn rows<'a>(&self, head: usize, slots: &'a [u32]) -> Rows<'a> {
        let first =
            std::array::from_fn(|p| self.first[p].wrapping_add(head * self.head_strides[p]));
        Rows { first, strides: self.slot_strides, slots }
    }

    /// Returns the rows `ahead` slots later, for prefetching.
    fn next<'a>(&self, head: usize, slots: &'a [u32], ahead: usize) -> Next<'a> {
        let mut rows = self.rows(head, slots);
        rows.first[0] = rows.first[0].wrapping_add(ahead * self.slot_strides[0]);
        Next { rows, bytes: self.bytes }
    }
}

/// The data of a call that all tasks use.
pub(super) struct Job<'a> {
    pub plan: Plan,
    pub queries: &'a Queries<'a>,
    pub k: StoredRows,
    pub v: StoredRows,
    pub mask: MaskRef<'a>,
    /// The factor of the queries: the scale times log2(e), so that weights are powers of 2.
    pub factor: f32,
    /// The softcap, in the same unit as the scores.
    pub softcap: Option<f32>,
    /// The sink of each query head: a logit whose weight is a power of e.
    pub sinks: Option<&'a [f32]>,
    pub out: &'a Output<'a>,
    pub parts: Parts,
}

/// Divides `count` query rows into blocks of at most `most` rows, and runs an expression for each block. In
/// the expression, the constant `rows` is the number of rows in the block, and `at` the first one.
macro_rules! by_rows {
    ($count:expr, $most:expr, |$at:ident, $rows:ident| $body:expr) => {{
        let mut $at = 0;
        while $at < $count {
            let left = $count - $at;
            // Blocks have about the same size.
            match left.div_ceil(left.div_ceil(usize::max($most, 1))) {
                1 => by_rows!(1, $most, $at, $rows, $body),
                2 => by_rows!(2, $most, $at, $rows, $body),
                3 => by_rows!(3, $most, $at, $rows, $body),
                4 => by_rows!(4, $most, $at, $rows, $body),
                5 => by_rows!(5, $most, $at, $rows, $body),
                _ => by_rows!(6, $most, $at, $rows, $body),
            }
        }
    }};
    ($size:literal, $most:expr, $at:ident, $rows:ident, $body:expr) => {{
        if const { $size <= $most } {
            const $rows: usize = $size;
            $body;
        }
        $at += $size;
    }};
}

/// Returns the number of query rows that fit the registers in addition to four unpacked stored rows.
const fn rows_of_dots<S: Simd>() -> usize {
    match S::COLS {
        4 => 6,
        _ => S::ROWS,
    }
}

/// Runs a task.
///
/// # Safety
/// The machine must have the instructions of `S`. The scratch memory and the parts must be those of the plan.
/// No other thread may use the scratch memory or the rows of this task.
pub(super) unsafe fn run<S: Simd>(job: &Job, task: Task, scratch: &mut Scratch) {
    let sizes = &job.plan.sizes;
    let rows = (task.end_token - task.first_token) * sizes.group;
    let heads = task.first_head..task.end_head;
    read_queries(job, task, scratch);
    let end = job.mask.end(task.end_token - 1, sizes.n_tokens, sizes.n_slots).min(task.end_slot);
    for head in heads.clone() {
        // SAFETY: the rows belong to this task.
        let (totals, _) = unsafe { job.totals_and_values(task, head, scratch.part) };
        for row in 0..rows {
            // SAFETY: the same as above.
            unsafe {
                *totals.peaks.add(row) = NO_PEAK;
                *totals.sums.add(row) = 0.0;
            }
        }
    }
    let mut slots = [0u32; TILE];
    for first in (task.first_slot..end).step_by(TILE) {
        let Some(tile) = Tile::new(job, task, first, end, &mut slots, scratch) else {
            continue;
        };
        for head in heads.clone() {
            // SAFETY: the caller upholds the contract.
            unsafe { attend_tile::<S>(job, task, head, &tile, scratch) };
        }
    }
    if job.plan.n_parts == 1 {
        for head in heads {
            for row in 0..rows {
                // SAFETY: the rows belong to this task.
                unsafe { finish::<S>(job, task, head, row, scratch) };
            }
        }
    }
}

/// The slots of a tile that some query of the task sees.
struct Tile<'a> {
    slots: &'a [u32],
    /// The number of rows in `scratch.rows`: those that see one of the slots.
    n_rows: usize,
    /// Whether the task continues with the next tile.
    goes_on: bool,
}

impl<'a> Tile<'a> {
    /// Returns the tile at slot `first`, or `None` if no query sees a slot of it. Writes the rows that see
    /// one of its slots, and the slots that each row sees, to the scratch memory.
    fn new(
        job: &Job,
        task: Task,
        first: usize,
        end: usize,
        slots: &'a mut [u32; TILE],
        scratch: &mut Scratch,
    ) -> Option<Self> {
        let sizes = &job.plan.sizes;
        let n_tokens = task.end_token - task.first_token;
        let seen = &mut scratch.seen_by_token[..n_tokens];
        for (i, seen) in seen.iter_mut().enumerate() {
            *seen = job.mask.seen(task.first_token + i, sizes.n_tokens, first, sizes.n_slots);
        }
        let all = seen.iter().fold(0, |all, seen| all | seen);
        if all == 0 {
            return None;
        }
        let mut n_rows = 0;
        for (i, &seen) in seen.iter().enumerate().filter(|(_, &seen)| seen != 0) {
            let seen = compact(seen, all);
            for row in i * sizes.group..(i + 1) * sizes.group {
                scratch.rows[n_rows] = row as u32;
                scratch.seen[n_rows] = seen;
                n_rows += 1;
            }
        }
        let count = all.count_ones() as usize;
        let mut rest = all;
        for slot in &mut slots[..count] {
            *slot = first as u32 + rest.trailing_zeros();
            rest &= rest - 1;
        }
        let goes_on = count == TILE && first + TILE < end;
        Some(Self { slots: &slots[..count], n_rows, goes_on })
    }
}

/// Converts the queries of a task to scaled float32.
fn read_queries(job: &Job, task: Task, scratch: &mut Scratch) {
    let (group, padded) = (job.plan.sizes.group, job.plan.sizes.k_padded());
    let mut rows = scratch.queries.chunks_exact_mut(padded);
    for head in task.first_head..task.end_head {
        let n_rows = job.plan.rows();
        for (row, out) in (0..n_rows).zip(&mut rows) {
            let token = task.first_token + row / group;
            if token < task.end_token {
                job.queries.read(head * group + row % group, token, job.factor, out);
            }
        }
    }
}

impl Job<'_> {
    /// Returns the memory for totals and weighted values of the first row of a head in a task. It is in the
    /// task's part, or in scratch memory if there is only one part.
    ///
    /// # Safety
    /// The memory must be that of the plan.
    unsafe fn totals_and_values(&self, task: Task, head: usize, own: Parts) -> (Totals, *mut f32) {
        let sizes = &self.plan.sizes;
        let (parts, row) = match self.plan.n_parts {
            1 => (own, (head - task.first_head) * self.plan.rows()),
            _ => {
                let row = head * sizes.rows() + task.first_token * sizes.group;
                (self.parts, task.part * self.plan.all_rows() + row)
            }
        };
        // SAFETY: the row is inside the memory.
        unsafe {
            let totals = Totals { peaks: parts.peaks.add(row), sums: parts.sums.add(row) };
            (totals, parts.values.add(row * sizes.v_padded()))
        }
    }
}

/// Computes attention of one head's rows over one tile.
///
/// # Safety
/// The same as for [`run`].
unsafe fn attend_tile<S: Simd>(
    job: &Job,
    task: Task,
    head: usize,
    tile: &Tile,
    scratch: &mut Scratch,
) {
    let sizes = &job.plan.sizes;
    let (k_padded, v_padded) = (sizes.k_padded(), sizes.v_padded());
    // SAFETY: the caller upholds the contract.
    let (totals, values) = unsafe { job.totals_and_values(task, head, scratch.part) };
    let n_rows = tile.n_rows;
    let rows = &scratch.rows[..n_rows];
    let own = (head - task.first_head) * job.plan.rows() * k_padded;
    let queries = scratch.queries[own..].as_mut_ptr();
    let scores = scratch.scores.as_mut_ptr();
    let unpacked = scratch.unpacked.as_mut_ptr();
    // The loop over keys prefetches their values. The loop over values prefetches the keys of the next head
    // or tile.
    let in_keys = job.v.is_in(&job.k);
    let after_values = if head + 1 < task.end_head {
        Some(job.k.next(head + 1, tile.slots, 0))
    } else {
        tile.goes_on.then(|| job.k.next(task.first_head, tile.slots, TILE))
    };
    let (after_keys, after_values) = match (in_keys, after_values) {
        (false, after_values) => (Some(job.v.next(head, tile.slots, 0)), after_values),
        // Both loops read the same rows, and each prefetches half of the next ones.
        (true, Some(next)) => (Some(next.share(0, 1, 2)), Some(next.share(1, 2, 2))),
        (true, None) => (None, None),
    };
    let keys = job.k.rows(head, tile.slots);
    // Whether the keys of this tile are unpacked in scratch memory.
    let mut has_keys = false;
    // SAFETY: the scratch memory has the sizes of the plan, so the pointers are valid as the kernels' fields
    // document. The machine has the instructions.
    unsafe {
        if job.k.in_place::<S>(n_rows) {
            with_decode!(job.k.encoding, |decode| by_rows!(n_rows, S::ROWS, |at, R| {
                S::enter(Dots {
                    decode,
                    queries: rows_at::<R>(queries, &rows[at..], k_padded)
                        .map(<*mut f32>::cast_const),
                    keys,
                    dim: job.k.dim,
                    scores: scores.add(at * TILE),
                    next: after_keys.map(|next| next.share(at, at + R, n_rows)),
                })
            }));
        } else if job.k.by_dots::<S>(n_rows) {
            let keys = if job.k.is_unpacked::<S>() {
                keys
            } else {
                unpack::<S>(&job.k, keys, unpacked, k_padded);
                has_keys = true;
                in_order(unpacked, k_padded, &scratch.in_order[..tile.slots.len()])
            };
            by_rows!(n_rows, rows_of_dots::<S>(), |at, R| S::enter(Dots {
                decode: super::decode::F32,
                queries: rows_at::<R>(queries, &rows[at..], k_padded).map(<*mut f32>::cast_const),
                keys,
                dim: k_padded,
                scores: scores.add(at * TILE),
                next: after_keys.map(|next| next.share(at, at + R, n_rows)),
            }));
        } else {
            unpack::<S>(&job.k, keys, unpacked, k_padded);
            has_keys = true;
            let columns = scratch.columns.as_mut_ptr();
            S::enter(Transpose { from: unpacked, dim: k_padded, to: columns });
            by_rows!(n_rows, 6, |at, R| S::enter(Product {
                decode: super::decode::F32,
                factors: rows_at::<R>(queries, &rows[at..], k_padded).map(<*mut f32>::cast_const),
                rows: in_order(columns, TILE, &scratch.in_order[..k_padded]),
                dim: TILE,
                out: scores_at(scores, at),
                keep: [0.0; R],
                next: after_keys.map(|next| next.share(at, at + R, n_rows)),
            }));
        }
        if let Some(softcap) = job.softcap {
            S::enter(Softcap { scores, count: n_rows * TILE, softcap });
        }
        let keep = &mut scratch.keep[..n_rows];
        let (count, seen) = (tile.slots.len(), &scratch.seen[..n_rows]);
        S::enter(Weigh { scores, count, rows, seen, totals, keep });
        let keep = &scratch.keep[..n_rows];
        let stored = job.v.rows(head, tile.slots);
        if job.v.in_place::<S>(n_rows) {
            with_decode!(job.v.encoding, |decode| by_rows!(n_rows, S::ROWS, |at, R| {
                S::enter(Product {
                    decode,
                    factors: scores_at::<R>(scores, at).map(<*mut f32>::cast_const),
                    rows: stored,
                    dim: job.v.dim,
                    out: rows_at(values, &rows[at..], v_padded),
                    keep: numbers_at(keep, at),
                    next: after_values.map(|next| next.share(at, at + R, n_rows)),
                })
            }));
        } else {
            let stored = if job.v.is_unpacked::<S>() {
                stored
            } else if in_keys && has_keys {
                in_order(unpacked, k_padded, &scratch.in_order[..count])
            } else {
                unpack::<S>(&job.v, stored, unpacked, v_padded);
                in_order(unpacked, v_padded, &scratch.in_order[..count])
            };
            by_rows!(n_rows, 6, |at, R| S::enter(Product {
                decode: super::decode::F32,
                factors: scores_at::<R>(scores, at).map(<*mut f32>::cast_const),
                rows: stored,
                dim: v_padded,
                out: rows_at(values, &rows[at..], v_padded),
                keep: numbers_at(keep, at),
                next: after_values.map(|next| next.share(at, at + R, n_rows)),
            }));
        }
    }
}

/// Returns pointers to the rows of `dim` numbers that the first `R` numbers of `rows` select.
///
/// This and the two functions below do not depend on instructions and formats. A closure in [`attend_tile`]
/// would be compiled for each of them.
///
/// # Safety
/// The rows must exist.
unsafe fn rows_at<const R: usize>(first: *mut f32, rows: &[u32], dim: usize) -> [*mut f32; R] {
    // SAFETY: the caller upholds the contract.
    std::array::from_fn(|r| unsafe { first.add(rows[r] as usize * dim) })
}

/// Returns pointers to the scores of `R` rows from row `at`.
///
/// # Safety
/// The rows must exist.
unsafe fn scores_at<const R: usize>(scores: *mut f32, at: usize) -> [*mut f32; R] {
    // SAFETY: the caller upholds the contract.
    std::array::from_fn(|r| unsafe { scores.add((at + r) * TILE) })
}

fn numbers_at<const R: usize>(numbers: &[f32], at: usize) -> [f32; R] {
    std::array::from_fn(|r| numbers[at + r])
}

/// Returns rows of float32 numbers in scratch memory, `dim` numbers each.
fn in_order(first: *const f32, dim: usize, slots: &[u32]) -> Rows<'_> {
    Rows { first: [first.cast(); 3], strides: [4 * dim; 3], slots }
}

/// Unpacks rows to `out`, as rows of `padded` numbers.
///
/// # Safety
/// The same as for [`run`], and `out` must have room.
unsafe fn unpack<S: Simd>(stored: &StoredRows, rows: Rows, out: *mut f32, padded: usize) {
    let dim = stored.dim;
    // SAFETY: the caller upholds the contract.
    unsafe {
        with_decode!(stored.encoding, |decode| {
            S::enter(Unpack { decode, rows, dim, out, padded });
        });
    }
}

/// Merges all parts of row `row` of a head, and writes the result.
///
/// # Safety
/// The same as for [`run`], and all parts must be complete.
pub(super) unsafe fn finish<S: Simd>(
    job: &Job,
    task: Task,
    head: usize,
    row: usize,
    scratch: &mut Scratch,
) {
    let sizes = &job.plan.sizes;
    let v_padded = sizes.v_padded();
    // SAFETY: the caller upholds the contract.
    unsafe {
        let (totals, values) = job.totals_and_values(task, head, scratch.part);
        let out = &mut scratch.result[..v_padded];
        let query_head = head * sizes.group + row % sizes.group;
        S::enter(Merge {
            totals: Totals { peaks: totals.peaks.add(row), sums: totals.sums.add(row) },
            totals_stride: job.plan.all_rows(),
            values: values.add(row * v_padded),
            values_stride: job.plan.all_rows() * v_padded,
            parts: job.plan.n_parts,
            sink: job.sinks.map(|sinks| sinks[query_head] * LOG2_E),
            out,
        });
        let token = task.first_token + row / sizes.group;
        job.out.write(query_head, token, &scratch.result);
    }
}
