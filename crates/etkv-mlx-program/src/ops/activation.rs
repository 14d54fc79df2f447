//! Activations, and their products with a gate's other half, as one kernel launch on a GPU.
//!
//! MLX's `compile` makes one kernel of a function's element-wise operations. The function is traced once for
//! the dtypes and ranks of its arguments. Later calls compare these and make one node.

use std::sync::OnceLock;

use mlx_rs::Array;
use mlx_sys::{mlx_closure, mlx_vector_array};

use super::elementwise::run_unary;
use crate::error::{fail, Result};
use crate::ir::Unary;
use crate::ops::frame::Frame;
use etkv::mlx::{self, arrays, check, Arrays};

/// Returns the function of `x`, times `by` if there is one.
pub fn run(frame: &Frame, function: Unary, x: &Array, by: Option<&Array>) -> Result<Array> {
    // On a CPU MLX would compile with the machine's C++ compiler.
    if !frame.on_gpu() {
        return plain(function, x, by);
    }
    let compiled = match (function, by) {
        (Unary::Silu, Some(_)) => &SILU_BY,
        (Unary::Gelu, Some(_)) => &GELU_BY,
        (Unary::GeluTanh, Some(_)) => &GELU_TANH_BY,
        (Unary::Silu, None) => &SILU,
        (Unary::Gelu, None) => &GELU,
        (Unary::GeluTanh, None) => &GELU_TANH,
        _ => return plain(function, x, by),
    };
    match by {
        Some(by) => compiled.call(&[x, by]),
        None => compiled.call(&[x]),
    }
}

fn plain(function: Unary, x: &Array, by: Option<&Array>) -> Result<Array> {
    let made = run_unary(function, x)?;
    Ok(match by {
        Some(by) => made.multiply(by)?,
        None => made,
    })
}

/// A function compiled by MLX. It is made once and lives until the process ends: MLX identifies compiled
/// functions by their addresses, on each thread that has called them.
struct CompiledFunction {
    function: unsafe extern "C" fn(*mut mlx_vector_array, mlx_vector_array) -> i32,
    made: OnceLock<Result<Closure>>,
}

struct Closure(mlx_closure);

// SAFETY: the closure has no state of its own; it is used under the lock of MLX only, by one thread at a
// time.
unsafe impl Send for Closure {}
// SAFETY: as above.
unsafe impl Sync for Closure {}

macro_rules! compiled {
    ($($name:ident, $traced:ident: $function:ident;)+) => {$(
        unsafe extern "C" fn $traced(made: *mut mlx_vector_array, given: mlx_vector_array) -> i32 {
            // SAFETY: MLX passes two live lists.
            unsafe { trace(Unary::$function, made, given) }
        }
        static $name: CompiledFunction = CompiledFunction { function: $traced, made: OnceLock::new() };
    )+};
}

compiled! {
    SILU, trace_silu: Silu;
    SILU_BY, trace_silu_by: Silu;
    GELU, trace_gelu: Gelu;
    GELU_BY, trace_gelu_by: Gelu;
    GELU_TANH, trace_gelu_tanh: GeluTanh;
    GELU_TANH_BY, trace_gelu_tanh_by: GeluTanh;
}

impl CompiledFunction {
    /// Calls the function. The caller holds the lock of MLX.
    fn call(&self, arguments: &[&Array]) -> Result<Array> {
        let closure = match self.made.get_or_init(|| self.compile()) {
            Ok(closure) => closure,
            Err(error) => return Err(error.clone()),
        };
        let (given, mut made) = (Arrays::of(arguments.iter().copied()), Arrays::empty());
        // SAFETY: the lists outlive the call.
        check(unsafe { mlx_sys::mlx_closure_apply(made.as_raw_mut(), closure.0, given.as_raw()) })?;
        match <[Array; 1]>::try_from(made.to_vec()?) {
            Ok([array]) => Ok(array),
            Err(made) => fail!(Internal, "a compiled function returns {} arrays", made.len()),
        }
    }

    fn compile(&self) -> Result<Closure> {
        // SAFETY: the function is static; handles are made here, and the result is kept.
        unsafe {
            let plain = mlx_sys::mlx_closure_new_func(Some(self.function));
            let mut compiled = mlx_sys::mlx_closure_new();
            // For any shapes, so that a prompt does not compile again.
            let status = check(mlx_sys::mlx_compile(&mut compiled, plain, true));
            mlx_sys::mlx_closure_free(plain);
            status.map(|()| Closure(compiled))
        }
    }
}

/// Runs the function on placeholders, which MLX records.
///
/// The recorded operations keep their stream. So they are recorded on the shared stream, which lives until
/// the process ends: the stream of an enclosing call may be gone at the next call.
///
/// # Safety
/// Both lists are live.
unsafe fn trace(function: Unary, made: *mut mlx_vector_array, given: mlx_vector_array) -> i32 {
    let traced = || -> Result<Array> {
        // SAFETY: the caller says that the list is live.
        let given = unsafe { arrays(given) }?;
        match &given[..] {
            [x] => plain(function, x, None),
            [x, by] => plain(function, x, Some(by)),
            other => fail!(Internal, "a compiled function has {} arguments", other.len()),
        }
    };
    // A panic must not unwind into MLX.
    let traced = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| mlx::on_shared(traced)));
    match traced {
        // SAFETY: the caller says that the list is live; it takes its own reference.
        Ok(Ok(array)) => unsafe {
            let one = [array.as_ptr()];
            mlx_sys::mlx_vector_array_set_data(made, one.as_ptr(), 1)
        },
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use mlx_rs::Dtype;

    use super::*;
    use crate::ops::views::run_split;

    #[test]
    fn a_traced_function_is_the_same() {
        mlx::run(|| {
            let x = Array::from_slice(&[-3.0f32, -0.5, 0.0, 0.25, 2.0, 7.0], &[1, 6]);
            let y = Array::from_slice(&[1.0f32, -2.0, 3.0, 0.5, -0.1, 2.0], &[1, 6]);
            for dtype in [Dtype::Float32, Dtype::Bfloat16] {
                let (x, y) = (x.as_dtype(dtype)?, y.as_dtype(dtype)?);
                let traced: [(unsafe extern "C" fn(_, _) -> _, Unary); 3] = [
                    (trace_silu_by, Unary::Silu),
                    (trace_gelu_by, Unary::Gelu),
                    (trace_gelu_tanh_by, Unary::GeluTanh),
                ];
                for (function, kind) in traced {
                    // The function itself: if compiled, it would need a C++ compiler on the CPU.
                    let (given, mut made) = (Arrays::of([&x, &y]), Arrays::empty());
                    // SAFETY: the handle is made and freed here; the lists outlive the call.
                    unsafe {
                        let closure = mlx_sys::mlx_closure_new_func(Some(function));
                        let called =
                            mlx_sys::mlx_closure_apply(made.as_raw_mut(), closure, given.as_raw());
                        mlx_sys::mlx_closure_free(closure);
                        check(called)?;
                    }
                    let made = made.to_vec()?;
                    assert_eq!(made[0].dtype(), dtype);
                    assert!(made[0].eq_values(&plain(kind, &x, Some(&y))?)?);
                }
            }
            Ok(())
        })
        .unwrap();
    }

    /// On the CPU MLX would need a C++ compiler.
    #[test]
    fn a_compiled_function_is_the_same_on_a_gpu() {
        let compare = || {
            mlx::run(|| {
                for n_tokens in [1, 5] {
                    let both = mlx_rs::random::normal::<f32>(&[1, n_tokens, 64], None, None, None)?;
                    let parts = run_split(&both, -1, &[32], &(64..=64))?;
                    for dtype in [Dtype::Float32, Dtype::Bfloat16] {
                        let (x, by) = (parts[0].as_dtype(dtype)?, parts[1].as_dtype(dtype)?);
                        for (compiled, function) in
                            [(&SILU_BY, Unary::Silu), (&GELU_TANH_BY, Unary::GeluTanh)]
                        {
                            let made = compiled.call(&[&x, &by])?;
                            let expected = plain(function, &x, Some(&by))?;
                            assert_eq!(made.shape(), expected.shape());
                            assert_eq!(made.dtype(), dtype);
                            assert!(made.all_close(&expected, 1e-2, 1e-2, None)?);
                        }
                    }
                }
                Ok(())
            })
            .unwrap();
        };
        if mlx::on_gpu().unwrap() {
            compare();
            // Each thread traces its own.
            std::thread::spawn(compare).join().unwrap();
            compare();
        }
    }
}
