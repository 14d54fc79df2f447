//! `etkv_forwards`: the forwards of a host that computes with MLX itself.

use std::cell::RefCell;
use std::ffi::c_void;

use etkv::mlx;
use etkv::{attend, AttendSpec, Forwards, Mask, Result};
use etkv_core::{fail, MemoryBudget};
use mlx_rs::{Array, Dtype};
use parking_lot::ReentrantMutex;

use super::boundary::{c_functions, free, list, out, read_struct};
use super::cache::etkv_cache;
use super::handle::{self, Object};

/// A handle on the forwards of a host.
#[allow(non_camel_case_types)]
pub struct etkv_forwards {
    /// Reentrant, to detect calls from inside a call.
    forwards: ReentrantMutex<RefCell<Forwards>>,
}

impl etkv_forwards {
    /// Calls `work` with the forwards, once no other thread uses them. Releases MLX while it waits, because
    /// the other threads may need it.
    fn with<T>(&self, work: impl FnOnce(&mut Forwards) -> Result<T>) -> Result<T> {
        let forwards = match self.forwards.try_lock() {
            Some(forwards) => forwards,
            None if MemoryBudget::is_reclaiming() => {
                fail!(
                    Step,
                    "the forwards are in use, and the memory callback must not wait for them"
                )
            }
            None => mlx::give_way(|| self.forwards.lock()),
        };
        let Ok(mut forwards) = forwards.try_borrow_mut() else {
            fail!(Step, "cannot call the forwards from inside a call on them");
        };
        work(&mut forwards)
    }
}

impl Object for etkv_forwards {
    const NAME: &'static str = "etkv_forwards";
}

/// The rows of a layer and the stream of the computation, as C passes them.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct etkv_mlx_rows {
    pub struct_size: usize,
    pub layer: usize,
    pub positions: *const i32,
    pub n_positions: usize,
    pub k: *const c_void,
    pub v: *const c_void,
    pub stream: *const c_void,
}

c_functions!(
    /// Makes the forwards of a host on a cache.
    unsafe fn etkv_forwards_new(
        cache: *const etkv_cache,
        forwards: *mut *mut etkv_forwards,
    ) -> Result<()> {
        let target = out(forwards, "forwards")?;
        let forwards = Forwards::new(handle::look_up(cache, "cache")?.cache.clone())?;
        let forwards = ReentrantMutex::new(RefCell::new(forwards));
        target.write(handle::give(etkv_forwards { forwards }));
        Ok(())
    }

    /// Rolls back an unfinished forward.
    unsafe fn etkv_forwards_abort(forwards: *mut etkv_forwards) -> Result<()> {
        let forwards = handle::look_up(forwards, "forwards")?;
        forwards.with(|forwards| {
            forwards.abort();
            Ok(())
        })
    }

    /// Writes a layer's rows and stores what its queries attend to.
    unsafe fn etkv_forwards_update_and_fetch(
        forwards: *mut etkv_forwards,
        rows: *const etkv_mlx_rows,
        k: *mut c_void,
        v: *mut c_void,
        mask_kind: *mut i32,
        mask: *mut c_void,
    ) -> Result<()> {
        let [k, v, mask] = [(k, "k"), (v, "v"), (mask, "mask")].map(target);
        let (k, v, mask, kind) = (k?, v?, mask?, out(mask_kind, "mask_kind")?);
        let forwards = handle::look_up(forwards, "forwards")?;
        let rows = Rows::read(rows)?;
        let make = |spec: &AttendSpec| {
            let keys = spec.k.dequantized(rows.k.dtype())?;
            let values = spec.v.dequantized(rows.v.dtype())?;
            Ok((keys, values, spec.mask.clone()))
        };
        rows.on_stream(&forwards, make, |(keys, values, seen)| {
            let found = match &seen {
                Mask::None => 0,
                Mask::Causal => 1,
                Mask::Explicit(seen) => {
                    give(mask, seen)?;
                    2
                }
            };
            give(k, &keys)?;
            give(v, &values)?;
            kind.write(found);
            Ok(())
        })
    }

    /// Writes a layer's rows and attends to the rows that its queries see.
    unsafe fn etkv_forwards_update_and_attend(
        forwards: *mut etkv_forwards,
        rows: *const etkv_mlx_rows,
        q: *const c_void,
        scale: f32,
        attended: *mut c_void,
    ) -> Result<()> {
        let attended = target((attended, "attended"))?;
        let forwards = handle::look_up(forwards, "forwards")?;
        let q = array(q, "q")?;
        let rows = Rows::read(rows)?;
        if !scale.is_finite() {
            fail!(InvalidArgument, "scale is {scale}, expected a finite number");
        }
        check_float("q", &q)?;
        let [heads, n, dim] = [1, 2, 3].map(|axis| rows.k.dim(axis));
        let fits = q.dim(0) == 1 && q.dim(2) == n && q.dim(3) == dim;
        if !fits || q.dim(1) <= 0 || q.dim(1) % heads.max(1) != 0 {
            fail!(
                Shape,
                "q has shape {:?}, expected [1, n_heads, {n}, {dim}] with a multiple of {heads} heads",
                q.shape()
            );
        }
        let make = |spec: &AttendSpec| attend(&q, spec, scale, None);
        rows.on_stream(&forwards, make, |out| give(attended, &out))
    }
);

/// Frees a handle, and rolls back an unfinished forward.
#[no_mangle]
pub extern "C" fn etkv_forwards_free(forwards: *mut etkv_forwards) {
    free(forwards);
}

/// The checked rows of a call.
struct Rows<'a> {
    layer: usize,
    positions: &'a [i32],
    k: Array,
    v: Array,
    stream: *const c_void,
}

impl Rows<'_> {
    /// # Safety
    /// `rows` is NULL or as the header says.
    unsafe fn read(rows: *const etkv_mlx_rows) -> Result<Self> {
        // SAFETY: the caller keeps the contract above.
        unsafe {
            let rows = read_struct(rows, "rows")?;
            let read = Self {
                layer: rows.layer,
                positions: list(rows.positions, rows.n_positions, "positions")?,
                k: array(rows.k, "rows.k")?,
                v: array(rows.v, "rows.v")?,
                stream: rows.stream,
            };
            check_float("k", &read.k)?;
            check_float("v", &read.v)?;
            Ok(read)
        }
    }

    /// Writes the rows to their layer, on the host's stream. Calls `make` with the layer's `AttendSpec`, and
    /// `deliver` with the result. If `make` fails, the forward is rolled back. `deliver` runs once the
    /// forward can no longer fail.
    fn on_stream<T>(
        &self,
        forwards: &etkv_forwards,
        make: impl FnOnce(&AttendSpec) -> Result<T>,
        deliver: impl FnOnce(T) -> Result<()>,
    ) -> Result<()> {
        forwards.with(|forwards| {
            let work = || {
                deliver(forwards.update_and(self.layer, self.positions, &self.k, &self.v, make)?)
            };
            if self.stream.is_null() {
                return mlx::run(work);
            }
            let stream = mlx_sys::mlx_stream { ctx: self.stream.cast_mut() };
            // SAFETY: the caller guarantees that it is a stream of MLX.
            unsafe { mlx::run_on(stream, work) }
        })
    }
}

fn check_float(name: &str, rows: &Array) -> Result<()> {
    if !matches!(rows.dtype(), Dtype::Float32 | Dtype::Float16 | Dtype::Bfloat16) {
        fail!(Dtype, "{name} is {:?}, expected float32, float16 or bfloat16", rows.dtype());
    }
    if rows.ndim() != 4 {
        fail!(Shape, "{name} has shape {:?}, expected [1, heads, T, head_dim]", rows.shape());
    }
    Ok(())
}

/// Returns an array that the host shares.
///
/// # Safety
/// `pointer` is NULL or points to an `mlx::core::array`.
unsafe fn array(pointer: *const c_void, name: &str) -> Result<Array> {
    if pointer.is_null() {
        fail!(InvalidArgument, "{name} is NULL");
    }
    // SAFETY: the caller guarantees that it is an array; the handle created here has no other owner.
    unsafe {
        let mut copy = mlx_sys::mlx_array_new();
        let status =
            mlx_sys::mlx_array_set(&mut copy, mlx_sys::mlx_array { ctx: pointer.cast_mut() });
        let array = Array::from_ptr(copy);
        mlx::check(status).map(|()| array)
    }
}

fn target((pointer, name): (*mut c_void, &str)) -> Result<mlx_sys::mlx_array> {
    Ok(mlx_sys::mlx_array { ctx: out(pointer, name)? })
}

/// Assigns to an array of the host.
fn give(mut target: mlx_sys::mlx_array, array: &Array) -> Result<()> {
    // SAFETY: the caller guarantees that `target` is an `mlx::core::array`.
    mlx::check(unsafe { mlx_sys::mlx_array_set(&mut target, array.as_ptr()) })
}
