//! Kernels whose own texts are generated, and call the functions of a header.

use std::ffi::CStr;
use std::hash::Hash;

use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use super::raw::Kernel;
use super::{header, source, CompiledKernels};
use crate::error::Result;

/// Everything on which the text of a kernel depends.
pub trait Template: Eq + Hash {
    /// The name of the kernel.
    fn name(&self) -> &'static CStr;

    /// Writes the text of the kernel. It calls the functions of the header.
    fn text(&self) -> String;
}

/// The kernels of one header. Used only under the lock of MLX.
pub struct TextKernels<T> {
    /// The name and the texts of the header.
    header: (&'static str, &'static [&'static str]),
    compiled: Option<CompiledKernels<T>>,
    /// An array that takes the place of arrays that are absent. Kernels do not read it.
    nothing: Option<Array>,
}

impl<T: Template> TextKernels<T> {
    /// Returns an empty set of kernels that include `texts`, in a file of this name.
    pub const fn new(name: &'static str, texts: &'static [&'static str]) -> Self {
        Self { header: (name, texts), compiled: None, nothing: None }
    }

    /// Launches the kernel of a template over `threads`, in blocks of `block` along the first axis. Returns `None` if
    /// it cannot be compiled.
    pub fn launch(
        &mut self,
        template: T,
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
        let shapes: Vec<(&[i32], Dtype)> =
            outputs.iter().map(|&(_, shape, dtype)| (shape, dtype)).collect();
        let run = |kernel: &Kernel| kernel.launch_all(&arrays, &shapes, threads, block);
        let (file, texts) = self.header;
        let make = |template: &T| {
            let (header, source) = (header(file, &texts.concat())?, source(&template.text())?);
            let names: Vec<&CStr> = inputs.iter().map(|&(name, _)| name).collect();
            let results: Vec<&CStr> = outputs.iter().map(|&(name, ..)| name).collect();
            let kernel = Kernel::new(template.name(), &names, &results, &source, &header, 0)?;
            // Whether a kernel compiles is only known after a run.
            eval(&run(&kernel)?)?;
            Ok(Some(kernel))
        };
        self.compiled.get_or_insert_default().get(template, make).map(run).transpose()
    }
}
