//! Checks whether the elements of several arrays are finite, in one kernel launch on CUDA. MLX's operations would
//! first copy all arrays into one.

use std::ffi::{CStr, CString};
use std::fmt::Write;

use etkv_cuda::text;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::raw::Kernel;
use super::{c_text, can_run, element, header, source, CompiledKernels};
use crate::error::{Error, Result, Status};

/// The maximum number of arrays of a call.
pub const MAX_ARRAYS: usize = 16;

/// The number of threads of a block. There is one block for each array.
const THREADS: i32 = 512;

/// The maximum number of elements of an array: one block reads them in some microseconds.
const MAX_ELEMENTS: usize = 1 << 17;

static KERNELS: Mutex<Option<CompiledKernels<Dtype>>> = Mutex::new(None);

/// Returns a number for each array: 0 if all its elements are finite. Returns `None` if the kernel does not support
/// the arrays. It supports up to [`MAX_ARRAYS`] arrays with four axes and the same float dtype.
pub fn non_finite(arrays: &[&Array]) -> Result<Option<Array>> {
    if !takes(arrays) || !can_run()? {
        return Ok(None);
    }
    let mut kernels = KERNELS.lock();
    match kernels.get_or_insert_default().get(arrays[0].dtype(), compile_and_run) {
        Some(kernel) => launch(kernel, arrays).map(Some),
        None => Ok(None),
    }
}

fn takes(arrays: &[&Array]) -> bool {
    let Some(first) = arrays.first() else {
        return false;
    };
    arrays.len() <= MAX_ARRAYS
        && arrays.iter().all(|array| {
            array.ndim() == 4
                && array.dim(0) == 1
                && array.dtype() == first.dtype()
                && array.size() <= MAX_ELEMENTS
        })
}

fn launch(kernel: &Kernel, arrays: &[&Array]) -> Result<Array> {
    // These inputs take the place of absent arrays. The kernel does not read them.
    let inputs: SmallVec<[&Array; MAX_ARRAYS]> =
        (0..MAX_ARRAYS).map(|i| arrays[i % arrays.len()]).collect();
    let n = arrays.len() as i32;
    kernel.launch(&inputs, &[(&[n], Dtype::Uint32)], [n * THREADS, 1, 1], THREADS)
}

/// Compiles a kernel and runs it over one element.
fn compile_and_run(dtype: &Dtype) -> Result<Option<Kernel>> {
    let Some((name, _)) = element(*dtype) else {
        return Ok(None);
    };
    let mut call = format!("etkv::Elements<{name}> rows;\nswitch (blockIdx.x) {{\n");
    let mut inputs: Vec<CString> = Vec::new();
    for (i, letter) in ('a'..='z').take(MAX_ARRAYS).enumerate() {
        let x = format!("rows_{letter}");
        let written = writeln!(
            call,
            "case {i}: rows = {{{x}, {x}_strides[1], {x}_strides[2], {x}_strides[3], {x}_shape[1], {x}_shape[2], \
             {x}_shape[3]}}; break;"
        );
        written.map_err(|_| Error::new(Status::Internal, "cannot write the text of a kernel"))?;
        inputs.push(c_text(x)?);
    }
    call.push_str(
        "}\nbool bad = rows.has_non_finite();\nif (threadIdx.x == 0) out[blockIdx.x] = bad;\n",
    );
    let inputs: Vec<&CStr> = inputs.iter().map(CString::as_c_str).collect();
    let header = header("finite", text::FINITE)?;
    let kernel = Kernel::new(c"etkv_finite", &inputs, &[c"out"], &source(&call)?, &header, 0)?;
    let one = Array::ones::<f32>(&[1, 1, 1, 1])?.as_dtype(*dtype)?;
    eval([&launch(&kernel, &[&one])?])?;
    Ok(Some(kernel))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{array, on_cuda};
    use crate::mlx::{slice_axis, update_axis};

    #[test]
    fn the_kernel_finds_each_array_with_other_elements() {
        on_cuda(|| {
            for dtype in [Dtype::Bfloat16, Dtype::Float16, Dtype::Float32] {
                for n in [1, 2, 5, MAX_ARRAYS] {
                    let mut arrays = Vec::new();
                    for i in 0..n {
                        let x = array(i as u64, &[1, 3, 5 + i as i32, 48], dtype);
                        let bad = match i % 4 {
                            1 => f32::NAN,
                            2 => f32::NEG_INFINITY,
                            _ => 65_504.0,
                        };
                        let bad = Array::from_slice(&[bad], &[1, 1, 1, 1]).as_dtype(dtype)?;
                        // Damages the last column of the fifth token of one head.
                        let at = i as i32 % 3;
                        let head = slice_axis(&x, 1, at, at + 1, 1)?;
                        let token = update_axis(&slice_axis(&head, 2, 4, 5, 1)?, &bad, 3, 47, 48)?;
                        let x =
                            update_axis(&x, &update_axis(&head, &token, 2, 4, 5)?, 1, at, at + 1)?;
                        arrays.push(if i % 2 == 0 { x } else { x.transpose_axes(&[0, 2, 1, 3])? });
                    }
                    let all: Vec<&Array> = arrays.iter().collect();
                    let found = non_finite(&all)?.expect("the kernel supports them");
                    found.eval()?;
                    let wanted: Vec<u32> =
                        (0..n).map(|i| u32::from(matches!(i % 4, 1 | 2))).collect();
                    assert_eq!(found.as_slice::<u32>(), wanted, "{dtype:?}");
                }
            }
            Ok(())
        });
    }

    #[test]
    fn only_supported_calls_are_accepted() {
        let half = array(1, &[1, 2, 3, 4], Dtype::Float16);
        let full = array(1, &[1, 2, 3, 4], Dtype::Float32);
        assert!(takes(&[&half, &half]));
        assert!(!takes(&[]));
        assert!(!takes(&[&half, &full]));
        assert!(!takes(&[&half; MAX_ARRAYS + 1]));
        assert!(!takes(&[&array(1, &[2, 3, 4], Dtype::Float16)]));
        assert!(!takes(&[&array(1, &[1, 8, 1 << 10, 32], Dtype::Float16)]));
    }
}
