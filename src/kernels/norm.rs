//! RMS norms in float32 of rows of any float dtype, in one kernel launch on CUDA.
//!
//! MLX's function computes in the common dtype of the rows and the weight. Each conversion to that dtype is another
//! launch. See `norm_rows.cuh` of `etkv_cuda`.

use std::ffi::CStr;

use etkv_cuda::text;
use mlx_rs::{Array, Dtype};
use parking_lot::Mutex;

use super::by_text::{Template, TextKernels};
use super::{can_run, elements_of};
use crate::error::Result;

/// The maximum number of threads of a block.
const MAX_THREADS: i32 = 256;
/// The number of elements that a thread reads, unless the row would need more than `MAX_THREADS` threads.
const ELEMENTS: i32 = 4;
const WARP: i32 = 32;

/// A norm of rows.
#[derive(Debug, Clone, Copy)]
pub struct Norm<'a> {
    /// The rows, `[..., inner]`.
    pub x: &'a Array,
    /// `[inner]`.
    pub weight: Option<&'a Array>,
    /// One element, float32, by which the normalized rows are multiplied.
    pub scale: Option<&'a Array>,
    /// Added to the mean square.
    pub eps: f32,
    /// The dtype of the result.
    pub dtype: Dtype,
}

static KERNELS: Mutex<TextKernels<NormTemplate>> =
    Mutex::new(TextKernels::new("norm_rows", &[text::NORM_ROWS]));

/// Returns the normalized rows, rounded once, if the kernel supports the call.
pub fn norm(call: &Norm) -> Result<Option<Array>> {
    let Some(launch) = Launch::of(call) else {
        return Ok(None);
    };
    if !can_run()? {
        return Ok(None);
    }
    let inputs = [(c"x", Some(call.x)), (c"weight", call.weight), (c"scale", call.scale)];
    let outputs = [(c"out", call.x.shape(), call.dtype)];
    let threads = [launch.rows * launch.block, 1, 1];
    let template = launch.template;
    let made = KERNELS.lock().launch(template, &inputs, &outputs, threads, launch.block)?;
    Ok(made.and_then(|made| made.into_iter().next()))
}

/// A call that the kernel supports.
#[derive(Debug, PartialEq)]
struct Launch {
    template: NormTemplate,
    rows: i32,
    /// The number of threads of a block.
    block: i32,
}

impl Launch {
    fn of(call: &Norm) -> Option<Self> {
        let (&inner, leading) = call.x.shape().split_last()?;
        let rows = leading.iter().try_fold(1i32, |rows, &n| rows.checked_mul(n))?;
        let weight_dtype = call.weight.map_or(Dtype::Float32, Array::dtype);
        let fits = inner > 0
            && rows > 0
            && call.eps >= 0.0
            && call.weight.is_none_or(|weight| weight.shape() == [inner])
            && call.scale.is_none_or(|scale| scale.size() == 1 && scale.dtype() == Dtype::Float32);
        let threads = inner / ELEMENTS + i32::from(inner % ELEMENTS != 0);
        let warps = threads / WARP + i32::from(threads % WARP != 0);
        let block = warps.saturating_mul(WARP).min(MAX_THREADS);
        rows.checked_mul(block).filter(|_| fits)?;
        let template = NormTemplate {
            elements: elements_of([call.x.dtype(), weight_dtype, call.dtype])?,
            n_axes: call.x.ndim(),
            has_weight: call.weight.is_some(),
            has_scale: call.scale.is_some(),
            eps: call.eps.to_bits() as i32,
        };
        Some(Self { template, rows, block })
    }
}

/// What the text of a kernel depends on.
#[derive(Debug, PartialEq, Eq, Hash)]
struct NormTemplate {
    /// The names of the dtypes of the rows, the weight and the result in CUDA.
    elements: [&'static str; 3],
    n_axes: usize,
    has_weight: bool,
    has_scale: bool,
    /// The bits of the float.
    eps: i32,
}

impl Template for NormTemplate {
    fn name(&self) -> &'static CStr {
        c"etkv_norm_rows"
    }

    /// The kernel computes the offset of a row from the row's indices along all axes except the last.
    fn text(&self) -> String {
        let Self { elements: [x, weight, out], n_axes, has_weight, has_scale, eps } = *self;
        let last = n_axes - 1;
        let mut text = String::from(
            "__shared__ float squares[etkv::MAX_NORM_WARPS];\nint row = blockIdx.x;\nlong long at = 0;\n",
        );
        for axis in (0..last).rev() {
            text += &format!(
                "at += (row % x_shape[{axis}]) * static_cast<long long>(x_strides[{axis}]);\n\
                 row /= x_shape[{axis}];\n"
            );
        }
        text += &format!(
            "etkv::NormRows<{x}, {weight}, {out}> work{{x + at, x_strides[{last}],\n\
             {has_weight} ? weight : nullptr, {has_weight} ? weight_strides[0] : 0,\n\
             {has_scale} ? scale : nullptr, __int_as_float({eps}), x_shape[{last}]}};\n\
             work.run(out + static_cast<long long>(blockIdx.x) * x_shape[{last}], squares);\n"
        );
        text
    }
}

#[cfg(test)]
mod tests {
    use mlx_rs::fast::rms_norm;
    use mlx_rs::random::normal;

    use super::*;
    use crate::mlx;

    #[test]
    fn blocks_have_the_threads_of_a_row() {
        for (inner, block) in [(1, 32), (128, 32), (129, 64), (1024, 256), (5000, 256)] {
            let x = Array::zeros::<f32>(&[3, 2, inner]).unwrap();
            let call = Norm { x: &x, weight: None, scale: None, eps: 1e-6, dtype: Dtype::Float32 };
            let launch = Launch::of(&call).unwrap();
            assert_eq!((launch.rows, launch.block), (6, block));
            let negative = Norm { eps: -1.0, ..call };
            assert_eq!(Launch::of(&negative), None);
            let integers = x.as_dtype(Dtype::Int32).unwrap();
            assert_eq!(Launch::of(&Norm { x: &integers, ..call }), None);
            assert_eq!(Launch::of(&Norm { weight: Some(&x), ..call }), None);
        }
    }

    #[test]
    fn norms_are_those_of_mlx_on_a_gpu() {
        let compare = |dtype, inner| -> Result<()> {
            let scale = Array::from_f32(0.75);
            let weight = normal::<f32>(&[inner], None, None, None)?;
            let wide = normal::<f32>(&[1, 5, 3, 2 * inner], None, None, None)?.as_dtype(dtype)?;
            // Rows that are parts of longer rows, in another order.
            let views = mlx::slice_axis(&wide, 3, inner, 2 * inner, 1)?;
            for x in [views.clone(), views.transpose_axes(&[0, 2, 1, 3])?] {
                for (weight, scale) in [(Some(&weight), None), (None, Some(&scale)), (None, None)] {
                    for out in [Dtype::Float32, Dtype::Bfloat16] {
                        let call = Norm { x: &x, weight, scale, eps: 1e-5, dtype: out };
                        let made = norm(&call)?.expect("a kernel");
                        assert_eq!((made.shape(), made.dtype()), (x.shape(), out));
                        let wide = x.as_dtype(Dtype::Float32)?;
                        let mut expected = rms_norm(&wide, weight, call.eps)?;
                        if let Some(scale) = scale {
                            expected = expected.multiply(scale)?;
                        }
                        let limit = if out == Dtype::Float32 { 1e-5 } else { 8e-3 };
                        assert!(made.all_close(&expected, limit, limit, None)?);
                    }
                }
            }
            Ok(())
        };
        let every = || {
            compare(Dtype::Bfloat16, 96)?;
            compare(Dtype::Float16, 1030)?;
            compare(Dtype::Float32, 8)
        };
        if mlx::on_gpu().unwrap() {
            mlx::run(every).unwrap();
        }
    }
}
