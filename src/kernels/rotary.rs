//! Rotary embedding of several tokens, each with its own position, in one kernel launch on CUDA.
//!
//! MLX's function treats the tokens as a batch, which must be contiguous. Queries and keys are pieces of a joined
//! product, so MLX would have to copy them.

use etkv_cuda::text;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};
use parking_lot::Mutex;

use super::raw::Kernel;
use super::{can_run, element, header, source, CompiledKernels};
use crate::error::Result;

#[cfg(test)]
mod tests;

const THREADS: i32 = 128;

static KERNELS: Mutex<Option<CompiledKernels<Dtype>>> = Mutex::new(None);

/// Returns the rotary embedding of `x`, `[1, heads, T, head_dim]`, or `None` if the kernel does not support it. Token
/// `i` is at `positions[i]`. Element `j` rotates together with element `head_dim / 2 + j`, by `1 / periods[j]`
/// radians for each position. `positions` are int32, `periods` float32.
pub fn rotary(x: &Array, positions: &Array, periods: &Array) -> Result<Option<Array>> {
    let Some(threads) = threads(x, positions, periods) else {
        return Ok(None);
    };
    if !can_run()? {
        return Ok(None);
    }
    let mut kernels = KERNELS.lock();
    match kernels.get_or_insert_default().get(x.dtype(), compile_and_run) {
        Some(kernel) => launch(kernel, [x, positions, periods], threads).map(Some),
        None => Ok(None),
    }
}

/// Returns the number of threads, one for each pair of elements, if the kernel supports the call.
fn threads(x: &Array, positions: &Array, periods: &Array) -> Option<i32> {
    let &[1, heads, tokens, dim] = x.shape() else {
        return None;
    };
    let fits = dim > 0
        && dim % 2 == 0
        && positions.shape() == [tokens]
        && positions.dtype() == Dtype::Int32
        && periods.shape() == [dim / 2]
        && periods.dtype() == Dtype::Float32;
    let threads = tokens.checked_mul(heads)?.checked_mul(dim / 2)?;
    // MLX rounds the number of threads up to whole blocks.
    (fits && threads > 0 && threads <= i32::MAX - THREADS).then_some(threads)
}

fn launch(kernel: &Kernel, inputs: [&Array; 3], threads: i32) -> Result<Array> {
    let [x, ..] = inputs;
    let out = [1, x.dim(2), x.dim(1), x.dim(3)];
    let by_token = kernel.launch(&inputs, &[(&out, x.dtype())], [threads, 1, 1], THREADS)?;
    Ok(by_token.transpose_axes(&[0, 2, 1, 3])?)
}

/// Compiles a kernel and runs it over one token.
fn compile_and_run(dtype: &Dtype) -> Result<Option<Kernel>> {
    let Some((name, _)) = element(*dtype) else {
        return Ok(None);
    };
    let call = format!(
        "etkv::Rotary<{name}> work{{x, x_strides[1], x_strides[2], x_strides[3], positions, positions_strides[0],\n\
         periods, periods_strides[0], x_shape[1], x_shape[2], x_shape[3] / 2}};\n\
         work.run(out);\n",
    );
    let inputs = [c"x", c"positions", c"periods"];
    let header = header("rotary", &[text::ROTATION, text::ROTARY].concat())?;
    let kernel = Kernel::new(c"etkv_rotary", &inputs, &[c"out"], &source(&call)?, &header, 0)?;
    let x = Array::ones::<f32>(&[1, 1, 1, 2])?.as_dtype(*dtype)?;
    let (positions, periods) = (Array::zeros::<i32>(&[1])?, Array::ones::<f32>(&[1])?);
    eval([&launch(&kernel, [&x, &positions, &periods], 1)?])?;
    Ok(Some(kernel))
}
