//! Arguments of the kernels that normalize and blend rows.

use crate::step::launch::{int, or_null};
use crate::step::plan::{Blend, Normalize};

/// Threads of a block, as in the kernels.
pub(crate) const NORM_THREADS: usize = 256;

/// The argument of the kernel that normalizes rows.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct NormWork {
    x: u64,
    weight: u64,
    residual: u64,
    out: u64,
    next_weight: u64,
    next_out: u64,
    eps: f32,
    next_eps: f32,
    is_wide: i32,
    next_is_wide: i32,
    inner: i32,
    out_width: i32,
}

// The type in the kernel's file has the same size.
const _: () = assert!(size_of::<NormWork>() == 72);

impl NormWork {
    /// Returns the argument. `at` returns the address of a buffer.
    pub(crate) fn of(normalize: &Normalize, at: impl Fn(crate::Buffer) -> u64) -> Self {
        let Normalize { x, inner, norm, residual, out, columns, next } = *normalize;
        let next_norm = next.map(|(norm, _)| norm);
        Self {
            x: at(x),
            weight: or_null(norm.weight),
            residual: residual.map_or(0, &at),
            out: at(out) + columns.map_or(0, |columns| 2 * columns.first as u64),
            next_weight: or_null(next_norm.and_then(|norm| norm.weight)),
            next_out: next.map_or(0, |(_, out)| at(out)),
            eps: norm.eps,
            next_eps: next_norm.map_or(0.0, |norm| norm.eps),
            is_wide: i32::from(norm.wide),
            next_is_wide: i32::from(next_norm.is_some_and(|norm| norm.wide)),
            inner: int(inner),
            out_width: int(columns.map_or(inner, |columns| columns.width)),
        }
    }
}

/// The argument of the kernel that blends rows.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct BlendWork {
    x: u64,
    y: u64,
    share: u64,
    out: u64,
    inner: i32,
    unused: i32,
}

// The type in the kernel's file has the same size.
const _: () = assert!(size_of::<BlendWork>() == 40);

impl BlendWork {
    /// Returns the argument. `at` returns the address of a buffer.
    pub(crate) fn of(blend: &Blend, at: impl Fn(crate::Buffer) -> u64) -> Self {
        let Blend { x, y, share, inner, out } = *blend;
        let inner = int(inner);
        Self { x: at(x), y: at(y), share: at(share), out: at(out), inner, unused: 0 }
    }
}
