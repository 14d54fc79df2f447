//! Rows that are normalized by a launch of their own.

use std::ffi::c_void;

use crate::step::launch::{int, or_null};
use crate::step::plan::Normalize;

/// Threads of a block, as in the kernel.
pub(crate) const NORM_THREADS: usize = 256;

/// The argument of the kernel.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct NormWork {
    x: u64,
    weight: u64,
    plus: u64,
    out: u64,
    next_weight: u64,
    next_out: u64,
    eps: f32,
    next_eps: f32,
    is_wide: i32,
    next_is_wide: i32,
    inner: i32,
    unused: i32,
}

// The kernel's file has the same size.
const _: () = assert!(size_of::<NormWork>() == 72);

impl NormWork {
    /// Returns the argument. `at` tells where buffers are.
    pub(crate) fn of(normalize: &Normalize, at: impl Fn(crate::Buffer) -> u64) -> Self {
        let Normalize { x, inner, norm, plus, out, next } = *normalize;
        let next_norm = next.map(|(norm, _)| norm);
        Self {
            x: at(x),
            weight: or_null(norm.weight),
            plus: plus.map_or(0, &at),
            out: at(out),
            next_weight: or_null(next_norm.and_then(|norm| norm.weight)),
            next_out: next.map_or(0, |(_, out)| at(out)),
            eps: norm.eps,
            next_eps: next_norm.map_or(0.0, |norm| norm.eps),
            is_wide: i32::from(norm.wide),
            next_is_wide: i32::from(next_norm.is_some_and(|norm| norm.wide)),
            inner: int(inner),
            unused: 0,
        }
    }

    pub(crate) fn argument(&self) -> *mut c_void {
        std::ptr::from_ref(self).cast_mut().cast()
    }
}
