//! Kernels of element-wise functions, whose texts callers generate.

use std::ffi::CString;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use etkv_cuda::text;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};

use super::raw::Kernel;
use super::{can_run, header, source};
use crate::error::{Error, Result, Status};

/// The number of threads of a block.
const THREADS: i32 = 256;

/// A function of an element's indices, as CUDA text: statements that end with `return`. Kernels define the names of its
/// inputs and indices. It may call the functions of `elementwise.cuh` of `etkv_cuda`.
///
/// Only clones are equal, so that a comparison reads no text.
#[derive(Debug, Clone)]
pub struct Function(Arc<str>);

impl PartialEq for Function {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Function {}

impl Hash for Function {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.as_ptr().hash(state);
    }
}

impl Function {
    /// The maximum number of arrays that a function reads.
    pub const MAX_INPUTS: usize = 8;

    /// Returns the function with these statements.
    pub fn new(body: &str) -> Self {
        Self(Arc::from(body))
    }

    /// Returns the statements.
    pub fn body(&self) -> &str {
        &self.0
    }
}

/// A kernel that computes each element of its result in a thread. Used under the lock of MLX only.
pub struct ElementwiseKernel(Kernel);

impl ElementwiseKernel {
    /// Compiles `body`, a function of the arrays `x0`, `x1`… and `out`. It may call the functions of
    /// `elementwise.cuh` of `etkv_cuda`. `inputs` and `shape` are the arguments of a first launch, which shows
    /// whether it can be compiled. Returns `None` if kernels cannot run here.
    ///
    /// # Errors
    /// [`Backend`](Status::Backend) if it cannot be compiled.
    pub fn new(body: &str, inputs: &[&Array], shape: &[i32], dtype: Dtype) -> Result<Option<Self>> {
        if !can_run()? {
            return Ok(None);
        }
        let names = (0..inputs.len())
            .map(|index| CString::new(format!("x{index}")))
            .collect::<std::result::Result<Vec<_>, _>>()
            .map_err(|_| Error::new(Status::Internal, "a zero byte in the name of an array"))?;
        let names: Vec<_> = names.iter().map(CString::as_c_str).collect();
        let (header, source) = (header("elementwise", text::ELEMENTWISE)?, source(body)?);
        let kernel =
            Self(Kernel::new(c"etkv_elementwise", &names, &[c"out"], &source, &header, 0)?);
        match kernel.launch(inputs, shape, dtype)? {
            Some(first) => eval([&first])?,
            None => return Ok(None),
        }
        Ok(Some(kernel))
    }

    /// Computes the function of `inputs`. They must have the numbers of axes and the dtypes for which the body was
    /// generated. Returns `None` if kernels cannot run here, or the result has no elements or too many.
    pub fn launch(&self, inputs: &[&Array], shape: &[i32], dtype: Dtype) -> Result<Option<Array>> {
        let elements = shape.iter().try_fold(1i32, |n, &size| n.checked_mul(size));
        match elements.filter(|n| (1..=i32::MAX - THREADS).contains(n)) {
            Some(threads) if can_run()? => {
                self.0.launch(inputs, &[(shape, dtype)], [threads, 1, 1], THREADS).map(Some)
            }
            _ => Ok(None),
        }
    }
}
