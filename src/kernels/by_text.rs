//! Kernels, each identified by the text that calls its functions.

use std::ffi::CStr;

use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use super::raw::Kernel;
use super::{header, source, CompiledKernels};
use crate::error::Result;

/// The kernels of one header. Used only under the lock of MLX.
pub struct TextKernels {
    /// The name and the text of the header.
    header: (&'static str, &'static str),
    compiled: Option<CompiledKernels<String>>,
    /// An array that takes the place of arrays that are absent. Kernels do not read it.
    nothing: Option<Array>,
}

impl TextKernels {
    /// Returns an empty set of kernels that include `text`, in a file of this name.
    pub const fn new(name: &'static str, text: &'static str) -> Self {
        Self { header: (name, text), compiled: None, nothing: None }
    }

    /// Launches the kernel of `call` over `threads`, in blocks of `block` along the first axis. Returns `None` if
    /// it cannot be compiled.
    pub fn launch(
        &mut self,
        name: &CStr,
        call: String,
        inputs: &[(&CStr, Option<&Array>)],
        outputs: &[(&CStr, &[i32], Dtype)],
        threads: [i32; 3],
        block: i32,
    ) -> Result<Option<Vec<Array>>> {
        let nothing = match self.nothing.take() {
            Some(nothing) => nothing,
            None => Array::from_slice(&[0f32], &[1, 1, 1, 1]),
        };
        let nothing = &*self.nothing.insert(nothing);
        let arrays: Vec<&Array> =
            inputs.iter().map(|(_, array)| array.unwrap_or(nothing)).collect();
        let names: Vec<&CStr> = inputs.iter().map(|&(name, _)| name).collect();
        let results: Vec<&CStr> = outputs.iter().map(|&(name, ..)| name).collect();
        let shapes: Vec<(&[i32], Dtype)> =
            outputs.iter().map(|&(_, shape, dtype)| (shape, dtype)).collect();
        let run = |kernel: &Kernel| kernel.launch_all(&arrays, &shapes, threads, block);
        let (file, text) = self.header;
        let make = |call: &String| {
            let header = header(file, text)?;
            let kernel = Kernel::new(name, &names, &results, &source(call)?, &header, 0)?;
            // Whether a kernel compiles is only known after a run.
            eval(&run(&kernel)?)?;
            Ok(Some(kernel))
        };
        self.compiled.get_or_insert_default().get(call, make).map(run).transpose()
    }
}
