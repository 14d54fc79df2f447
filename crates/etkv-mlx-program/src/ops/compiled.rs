//! Computes element-wise expressions, each with one kernel launch on a GPU.
//!
//! On CUDA, etkv's own kernel computes an expression. MLX's `compile` would compile some thirty kernels for
//! each expression. This takes seconds on a machine that has not run the expression before. On Metal, MLX's
//! `compile` is used: it traces a function once for the dtypes and ranks of its arguments. A later call
//! compares these and adds one node to the graph.

use std::collections::HashMap;
use std::ffi::c_void;

use mlx_rs::ops::concatenate;
use mlx_rs::{Array, Dtype};
use mlx_sys::{mlx_closure, mlx_vector_array};
use parking_lot::Mutex;
use smallvec::SmallVec;
use tracing::warn;

use super::cuda_text::{self, InputType};
use super::elementwise::{run_binary, run_unary};
use super::limits::check_size;
use crate::error::{fail, Result};
use crate::ir::{Expression, Node};
use crate::TARGET;
use etkv::kernels::{can_run, ElementwiseKernel};
use etkv::mlx::{self, arrays, cast, check, Arrays};

/// The maximum number of expressions that a process compiles, and the maximum number of input types for each
/// of them. A program has a few of both.
const MAX_COMPILED: usize = 256;
const MAX_TYPES: usize = 8;

/// Returns the result of an expression.
pub fn run(on_gpu: bool, expression: &Expression, inputs: &[&Array]) -> Result<Array> {
    // On a CPU, MLX would compile with the machine's C++ compiler.
    let result = match on_gpu {
        true if cfg!(target_os = "macos") => by_mlx(expression, inputs)?,
        true => by_kernel(expression, inputs)?,
        false => None,
    };
    match result {
        Some(result) => Ok(result),
        None => separately(expression, inputs),
    }
}

/// The kernels of an expression, by the types of its inputs, with the dtype that each returns; `None` if there is no
/// kernel.
type Kernels = Vec<(SmallVec<[InputType; 4]>, Option<(ElementwiseKernel, Dtype)>)>;

/// The kernels of all expressions. Use them only under the lock of MLX.
static KERNELS: Mutex<Option<HashMap<Expression, Kernels>>> = Mutex::new(None);

/// Computes an expression with a kernel, if it has one.
fn by_kernel(expression: &Expression, inputs: &[&Array]) -> Result<Option<Array>> {
    let types: SmallVec<[InputType; 4]> =
        inputs.iter().map(|input| (input.dtype(), input.ndim())).collect();
    let Some(shape) = cuda_text::shape(expression, inputs) else {
        return Ok(None);
    };
    let mut all = KERNELS.lock();
    let all = all.get_or_insert_default();
    if !all.contains_key(expression) {
        if all.len() >= MAX_COMPILED {
            return Ok(None);
        }
        all.insert(expression.clone(), Kernels::new());
    }
    let Some(kernels) = all.get_mut(expression) else {
        return Ok(None);
    };
    if let Some((_, kernel)) = kernels.iter().find(|(known, _)| *known == types) {
        return match kernel {
            Some((kernel, dtype)) => kernel.launch(inputs, &shape, *dtype),
            None => Ok(None),
        };
    }
    // Kernels cannot run while a host uses its own stream. They may be able to run in a later call.
    if kernels.len() >= MAX_TYPES || !can_run()? {
        return Ok(None);
    }
    let compiled = match cuda_text::text(expression, &types) {
        // The first launch of a kernel computes immediately, before the size of the instruction's result is
        // checked. So the size is checked here.
        Some(text) if check_size(&shape, text.dtype).is_err() => return Ok(None),
        Some(text) => ElementwiseKernel::new(&text.body, inputs, &shape, text.dtype)
            .unwrap_or_else(|error| {
                warn!(target: TARGET, %error, "operations run one by one: their kernel cannot be compiled");
                None
            })
            .map(|kernel| (kernel, text.dtype)),
        None => None,
    };
    let result = match &compiled {
        Some((kernel, dtype)) => kernel.launch(inputs, &shape, *dtype)?,
        None => None,
    };
    kernels.push((types, compiled));
    Ok(result)
}

/// Computes an expression with a function that MLX has compiled.
fn by_mlx(expression: &Expression, inputs: &[&Array]) -> Result<Option<Array>> {
    if expression.nodes.iter().any(|node| matches!(node, Node::Concatenate(..))) {
        return Ok(None);
    }
    let compiled = {
        let mut all = COMPILED.lock();
        let all = all.get_or_insert_default();
        match all.get(expression) {
            Some(compiled) => *compiled,
            None if all.len() >= MAX_COMPILED => return Ok(None),
            None => {
                let compiled: &'static Compiled = Box::leak(Box::new(Compiled::new(expression)?));
                all.entry(expression.clone()).or_insert(compiled)
            }
        }
    };
    compiled.call(inputs).map(Some)
}

/// Computes the operations one by one.
pub fn separately(expression: &Expression, inputs: &[&Array]) -> Result<Array> {
    let mut results: Vec<Array> = Vec::with_capacity(expression.nodes.len());
    for node in &expression.nodes {
        let result = match *node {
            Node::Input(index) => match inputs.get(index) {
                Some(input) => (*input).clone(),
                None => fail!(Internal, "an expression of {} inputs reads {index}", inputs.len()),
            },
            Node::Unary(function, x) => run_unary(function, &results[x])?,
            Node::Binary(function, a, b) => run_binary(function, &results[a], &results[b])?,
            Node::AsType(x, dtype) => cast(&results[x], dtype)?,
            Node::Concatenate([a, b], axis) => concatenate(&[&results[a], &results[b]], axis)?,
        };
        results.push(result);
    }
    match results.pop() {
        Some(result) => Ok(result),
        None => fail!(Internal, "an expression without operations"),
    }
}

/// The expressions that MLX has compiled. Use it only under the lock of MLX.
static COMPILED: Mutex<Option<HashMap<Expression, &'static Compiled>>> = Mutex::new(None);

/// An expression that MLX compiled. It lives until the process ends, because each thread's MLX identifies compiled
/// functions by their addresses.
struct Compiled(mlx_closure);

// SAFETY: the closure only reads an expression, which never changes; it is used only under the lock of MLX, by one
// thread at a time.
unsafe impl Send for Compiled {}
// SAFETY: as above.
unsafe impl Sync for Compiled {}

impl Compiled {
    fn new(expression: &Expression) -> Result<Self> {
        let expression = Box::into_raw(Box::new(expression.clone()));
        // SAFETY: the expression is never freed; the handles are created here, and the result is kept.
        unsafe {
            let traced =
                mlx_sys::mlx_closure_new_func_payload(Some(trace), expression.cast(), None);
            let mut compiled = mlx_sys::mlx_closure_new();
            // The function is compiled for any shape, so that prompts of other lengths need no further
            // compilation.
            let status = check(mlx_sys::mlx_compile(&mut compiled, traced, true));
            mlx_sys::mlx_closure_free(traced);
            status.map(|()| Self(compiled))
        }
    }

    /// Computes the expression. The caller holds the lock of MLX.
    fn call(&self, inputs: &[&Array]) -> Result<Array> {
        let (inputs, mut results) = (Arrays::of(inputs.iter().copied()), Arrays::empty());
        // SAFETY: the lists outlive the call.
        check(unsafe {
            mlx_sys::mlx_closure_apply(results.as_raw_mut(), self.0, inputs.as_raw())
        })?;
        match <[Array; 1]>::try_from(results.to_vec()?) {
            Ok([array]) => Ok(array),
            Err(results) => fail!(Internal, "an expression returns {} arrays", results.len()),
        }
    }
}

/// Computes an expression with placeholders as inputs. MLX records the operations.
///
/// Recorded operations keep their stream, and the stream of the current call may be gone at the next call. So
/// operations are recorded on the shared stream, which lives until the process ends.
///
/// # Safety
/// Both lists are live, and `expression` is an [`Expression`].
unsafe extern "C" fn trace(
    results: *mut mlx_vector_array,
    inputs: mlx_vector_array,
    expression: *mut c_void,
) -> i32 {
    let traced = || -> Result<Array> {
        // SAFETY: the caller upholds the contract above.
        let (expression, inputs) = unsafe { (&*expression.cast::<Expression>(), arrays(inputs)?) };
        separately(expression, &inputs.iter().collect::<Vec<_>>())
    };
    // A panic must not unwind into MLX.
    let traced = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| mlx::on_shared(traced)));
    match traced {
        // SAFETY: the caller guarantees that the list is live. The list takes a reference of its own.
        Ok(Ok(array)) => unsafe {
            let one = [array.as_ptr()];
            mlx_sys::mlx_vector_array_set_data(results, one.as_ptr(), 1)
        },
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use mlx_rs::Dtype;

    use super::*;
    use crate::ir::{Binary, Unary};
    use crate::ops::views::run_split;

    fn activation(function: Unary) -> Expression {
        let nodes = vec![
            Node::Input(0),
            Node::Unary(function, 0),
            Node::Input(1),
            Node::Binary(Binary::Multiply, 1, 2),
        ];
        Expression { nodes }
    }

    /// The decay of a recurrent layer: the sum of two tensors of different dtypes and shapes is broadcast.
    fn decay() -> Expression {
        let nodes = vec![
            Node::Input(0),
            Node::AsType(0, Dtype::Float32),
            Node::Input(1),
            Node::Binary(Binary::Add, 1, 2),
            Node::Input(2),
            Node::Binary(Binary::LogAddExp, 3, 4),
            Node::Input(3),
            Node::Binary(Binary::Multiply, 6, 5),
        ];
        Expression { nodes }
    }

    /// The rotary embedding of the first half of each row of two: `[x cos + (-x2, x1) sin, rest]`.
    fn rotary() -> Expression {
        let nodes = vec![
            Node::Input(0),
            Node::Input(1),
            Node::Binary(Binary::Multiply, 0, 1),
            Node::Input(2),
            Node::Unary(Unary::Neg, 3),
            Node::Input(4),
            Node::Concatenate([4, 5], -1),
            Node::Input(3),
            Node::Binary(Binary::Multiply, 6, 7),
            Node::Binary(Binary::Add, 2, 8),
            Node::Input(5),
            Node::Concatenate([9, 10], 3),
        ];
        Expression { nodes }
    }

    #[test]
    fn a_traced_expression_is_the_same() {
        mlx::run(|| {
            let x = Array::from_slice(&[-3.0f32, -0.5, 0.0, 0.25, 2.0, 7.0], &[1, 6]);
            let y = Array::from_slice(&[1.0f32, -2.0, 3.0, 0.5, -0.1, 2.0], &[1, 6]);
            for dtype in [Dtype::Float32, Dtype::Bfloat16] {
                let (x, y) = (x.as_dtype(dtype)?, y.as_dtype(dtype)?);
                for function in [Unary::Silu, Unary::Gelu, Unary::GeluTanh] {
                    // Calls the function directly: on the CPU, compiling it would need a C++ compiler.
                    let mut expression = activation(function);
                    let (inputs, mut results) = (Arrays::of([&x, &y]), Arrays::empty());
                    let payload = (&raw mut expression).cast();
                    // SAFETY: the handle is made and freed here; the lists and the expression outlive the call.
                    unsafe {
                        let closure =
                            mlx_sys::mlx_closure_new_func_payload(Some(trace), payload, None);
                        let called = mlx_sys::mlx_closure_apply(
                            results.as_raw_mut(),
                            closure,
                            inputs.as_raw(),
                        );
                        mlx_sys::mlx_closure_free(closure);
                        check(called)?;
                    }
                    let results = results.to_vec()?;
                    let expected = run_unary(function, &x)?.multiply(&y)?;
                    assert_eq!(results[0].dtype(), dtype);
                    assert!(results[0].eq_values(&expected)?);
                }
            }
            Ok(())
        })
        .unwrap();
    }

    /// On the CPU, MLX would need a C++ compiler.
    #[test]
    fn a_compiled_expression_is_the_same_on_a_gpu() {
        let compare = || {
            mlx::run(|| {
                let normal = |shape: &[i32]| mlx_rs::random::normal::<f32>(shape, None, None, None);
                let vectors = [normal(&[32])?, Array::from_f32(0.0), normal(&[32])?];
                for n_tokens in [1, 5] {
                    let parts = run_split(&normal(&[1, n_tokens, 64])?, -1, &[32], &(64..=64))?;
                    for dtype in [Dtype::Float32, Dtype::Bfloat16] {
                        let (x, by) = (parts[0].as_dtype(dtype)?, parts[1].as_dtype(dtype)?);
                        let [bias, zero, rate] = &vectors;
                        let heads = normal(&[1, 3, n_tokens, 48])?.as_dtype(dtype)?;
                        let heads = run_split(&heads, -1, &[16, 32], &(48..=48))?;
                        let halves = run_split(&heads[0], -1, &[8], &(16..=16))?;
                        let table = normal(&[1, 1, n_tokens, 32])?.as_dtype(dtype)?;
                        let table = run_split(&table, -1, &[16], &(32..=32))?;
                        let rotated =
                            [&heads[0], &table[0], &halves[1], &table[1], &halves[0], &heads[1]];
                        for (expression, inputs, made) in [
                            (rotary(), &rotated[..], dtype),
                            (activation(Unary::Silu), &[&x, &by][..], dtype),
                            (activation(Unary::GeluTanh), &[&x, &by], dtype),
                            (decay(), &[&x, bias, zero, rate], Dtype::Float32),
                        ] {
                            let result = run(true, &expression, inputs)?;
                            let expected = separately(&expression, inputs)?;
                            assert_eq!(result.shape(), expected.shape());
                            assert_eq!(result.dtype(), made);
                            assert!(result.all_close(&expected, 1e-2, 1e-2, None)?);
                        }
                    }
                }
                Ok(())
            })
            .unwrap();
        };
        if mlx::on_gpu().unwrap() {
            compare();
            // Each thread traces the expression again.
            std::thread::spawn(compare).join().unwrap();
            compare();
        }
    }
}
