//! Pools in the kernels' layout, and the launch parameters of the kernel that places heads.

use etkv_core::KvFormat;

use crate::step::device::Device;
use crate::step::driver::Kernel;
use crate::step::error::Result;
use crate::step::launch::{int, or_null};
use crate::step::plan::{PlaceHeads, Plan, Pool, PoolRows};
use crate::step::source::Source;

/// The maximum number of warps of a block that places heads, as in the kernel.
const MAX_PLACE_WARPS: usize = 8;

/// The addresses of a pool's planes. In a plain pool, `codes` is the address of the rows.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Planes {
    codes: u64,
    scales: u64,
    offsets: u64,
    capacity: i64,
}

impl Planes {
    pub(crate) fn of(pool: Pool) -> Self {
        let capacity = pool.capacity as i64;
        match pool.rows {
            PoolRows::Plain(rows) => Self { codes: rows.0, capacity, ..Self::default() },
            PoolRows::Packed(rows) => Self {
                codes: rows.codes.0,
                scales: rows.scales.0,
                offsets: or_null(rows.offsets),
                capacity,
            },
        }
    }
}

/// The argument of the kernel that places heads.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct PlaceWork {
    x: u64,
    q_norm: u64,
    k_norm: u64,
    periods: u64,
    out: u64,
    step: u64,
    keys: Planes,
    values: Planes,
    q_eps: f32,
    k_eps: f32,
    q_normalizes: i32,
    k_normalizes: i32,
    queries: i32,
    each: i32,
    dim: i32,
    rotated: i32,
}

// The types in the kernels' files have the same sizes.
const _: () = assert!(size_of::<Planes>() == 32);
const _: () = assert!(size_of::<PlaceWork>() == 144);

impl PlaceWork {
    /// Returns the argument. `[x, out, step]` are the addresses of the buffers and of the step.
    pub(crate) fn of(place: &PlaceHeads, [x, out, step]: [u64; 3]) -> Self {
        let heads = &place.heads;
        let weight = |norm: Option<crate::Norm>| or_null(norm.and_then(|norm| norm.weight));
        Self {
            x,
            q_norm: weight(place.q_norm),
            k_norm: weight(place.k_norm),
            periods: or_null(heads.periods),
            out,
            step,
            keys: Planes::of(heads.keys),
            values: Planes::of(heads.values),
            q_eps: place.q_norm.map_or(0.0, |norm| norm.eps),
            k_eps: place.k_norm.map_or(0.0, |norm| norm.eps),
            q_normalizes: kind_of(place.q_norm),
            k_normalizes: kind_of(place.k_norm),
            queries: int(heads.n_q),
            each: int(heads.n_kv),
            dim: int(heads.head_dim),
            rotated: int(heads.rotated),
        }
    }
}

/// Returns the number by which the kernel identifies the kind of a norm.
fn kind_of(norm: Option<crate::Norm>) -> i32 {
    norm.map_or(0, |norm| if norm.wide { 2 } else { 1 })
}

/// Returns the kernel that places heads in the pools of `place`.
pub(crate) fn place_kernel(device: &Device, plan: &Plan, place: &PlaceHeads) -> Result<Kernel> {
    let [keys, values] = [place.heads.keys, place.heads.values].map(format_of);
    device.kernel(Source::PlaceHeads { element: plan.element, keys, values }, c"etkv_place", 0)
}

/// Returns the grid of a launch that places heads, and the threads of a block.
pub(crate) fn place_grid(plan: &Plan, place: &PlaceHeads) -> ([usize; 3], usize) {
    let heads = &place.heads;
    let warps = (heads.n_q / heads.n_kv + 2).min(MAX_PLACE_WARPS);
    ([heads.n_kv, plan.tokens, 1], 32 * warps)
}

/// Returns the format of a packed pool, or `None` for a plain one.
pub(crate) fn format_of(pool: Pool) -> Option<KvFormat> {
    match pool.rows {
        PoolRows::Plain(_) => None,
        PoolRows::Packed(rows) => Some(rows.format),
    }
}
