//! MLX's custom CUDA kernels, which mlx-rs does not offer.

use std::cell::Cell;
use std::ffi::CStr;

use mlx_rs::{Array, Dtype};

use crate::error::{Error, Result, Status};
use crate::mlx::{call, check, Arrays};

/// A kernel. MLX compiles it on first use unless it is [cached](super::kept).
pub struct Kernel {
    raw: mlx_sys::mlx_fast_cuda_kernel,
    launched: Cell<bool>,
}

// SAFETY: the kernel belongs to no thread, and is used under the lock of MLX only.
unsafe impl Send for Kernel {}

impl Kernel {
    /// Creates a kernel of `source`, the body of a function of `inputs` and `outputs`, with `bytes` of shared memory.
    /// The kernel receives inputs in their memory layout, without a copy.
    pub fn new(
        name: &CStr,
        inputs: &[&CStr],
        outputs: &[&CStr],
        source: &CStr,
        header: &CStr,
        bytes: i32,
    ) -> Result<Self> {
        let [inputs, outputs] = [Strings::new(inputs)?, Strings::new(outputs)?];
        let (name, source, header) = (name.as_ptr(), source.as_ptr(), header.as_ptr());
        // SAFETY: the lists and strings outlive the call, which copies them.
        let raw = unsafe {
            mlx_sys::mlx_fast_cuda_kernel_new(
                name, inputs.0, outputs.0, source, header, false, bytes,
            )
        };
        let kernel = Self { raw, launched: Cell::new(false) };
        if kernel.raw.ctx.is_null() {
            return Err(Error::new(Status::Backend, "MLX cannot create a kernel"));
        }
        Ok(kernel)
    }

    /// Launches the kernel over `threads`, in blocks of `block` along the first axis. Returns the
    /// first output.
    pub fn launch(
        &self,
        inputs: &[&Array],
        outputs: &[(&[i32], Dtype)],
        threads: [i32; 3],
        block: i32,
    ) -> Result<Array> {
        self.apply(inputs, outputs, threads, block).map(|(first, _)| first)
    }

    /// Launches the kernel like [`launch`](Self::launch), but returns all outputs.
    pub fn launch_all(
        &self,
        inputs: &[&Array],
        outputs: &[(&[i32], Dtype)],
        threads: [i32; 3],
        block: i32,
    ) -> Result<Vec<Array>> {
        let (first, made) = self.apply(inputs, outputs, threads, block)?;
        let mut all = vec![first];
        for output in 1..outputs.len() {
            // SAFETY: the list is live and has an array for each output; `out` receives a new handle.
            all.push(call(|out, _| unsafe {
                mlx_sys::mlx_vector_array_get(out, made.as_raw(), output)
            })?);
        }
        Ok(all)
    }

    /// Returns the first output, and the list of all outputs.
    fn apply(
        &self,
        inputs: &[&Array],
        outputs: &[(&[i32], Dtype)],
        threads: [i32; 3],
        block: i32,
    ) -> Result<(Array, Arrays)> {
        let inputs = Arrays::of(inputs.iter().copied());
        let mut made = Arrays::empty();
        // SAFETY: the handle is freed with its owner.
        let config = Config(unsafe { mlx_sys::mlx_fast_cuda_kernel_config_new() });
        // SAFETY: the handle is live; each shape has the given number of elements.
        unsafe {
            for (shape, dtype) in outputs {
                check(mlx_sys::mlx_fast_cuda_kernel_config_add_output_arg(
                    config.0,
                    shape.as_ptr(),
                    shape.len(),
                    (*dtype).into(),
                ))?;
            }
            let [x, y, z] = threads;
            check(mlx_sys::mlx_fast_cuda_kernel_config_set_grid(config.0, x, y, z))?;
            check(mlx_sys::mlx_fast_cuda_kernel_config_set_thread_group(config.0, block, 1, 1))?;
        }
        let out = call(|first, stream| {
            // SAFETY: all handles are live; `out` receives a new handle.
            unsafe {
                match mlx_sys::mlx_fast_cuda_kernel_apply(
                    made.as_raw_mut(),
                    self.raw,
                    inputs.as_raw(),
                    config.0,
                    stream,
                ) {
                    0 => mlx_sys::mlx_vector_array_get(first, made.as_raw(), 0),
                    status => status,
                }
            }
        })?;
        if !self.launched.replace(true) {
            #[cfg(target_os = "linux")]
            super::kept::provide(&out);
        }
        Ok((out, made))
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        // SAFETY: the handle has no other owner.
        unsafe { mlx_sys::mlx_fast_cuda_kernel_free(self.raw) };
    }
}

struct Config(mlx_sys::mlx_fast_cuda_kernel_config);

impl Drop for Config {
    fn drop(&mut self) {
        // SAFETY: the handle has no other owner.
        unsafe { mlx_sys::mlx_fast_cuda_kernel_config_free(self.0) };
    }
}

struct Strings(mlx_sys::mlx_vector_string);

impl Strings {
    fn new(strings: &[&CStr]) -> Result<Self> {
        // SAFETY: the list copies each string.
        unsafe {
            let list = Self(mlx_sys::mlx_vector_string_new());
            for string in strings {
                check(mlx_sys::mlx_vector_string_append_value(list.0, string.as_ptr()))?;
            }
            Ok(list)
        }
    }
}

impl Drop for Strings {
    fn drop(&mut self) {
        // SAFETY: the handle has no other owner.
        unsafe { mlx_sys::mlx_vector_string_free(self.0) };
    }
}
