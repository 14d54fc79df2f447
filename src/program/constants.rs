//! The constants of a program: loaded one at a time, each as it will be used.

use mlx_rs::Array;

use super::dtype;
use super::ir::Constant;
use crate::error::{fail, Result};

/// Where a program's constants come from.
pub trait ConstantSource {
    /// The bytes of a constant, row-major; `None` where there is no such one.
    fn find(&mut self, name: &str) -> Option<&[u8]>;
}

/// How a constant is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// As it is stored.
    Stored,
    /// Transposed, as a matrix product reads it.
    Transposed,
    /// Not at all: nothing uses it.
    Absent,
}

/// Loads a constant.
///
/// The bytes are copied once, into memory of MLX's. The source may let them go
/// as soon as this returns, so that a program's weights are never there twice.
///
/// # Errors
/// [`Program`](crate::Status::Program) where the data are missing or of another
/// size than the program says; [`Backend`](crate::Status::Backend).
pub fn load(constant: &Constant, layout: Layout, source: &mut dyn ConstantSource) -> Result<Array> {
    let Constant { name, shape, .. } = constant;
    let Some(bytes) = source.find(name) else {
        fail!(Program, "the program's data have no constant `{name}`");
    };
    let expected = shape
        .iter()
        .try_fold(dtype::item_size(constant.dtype), |size, &dim| size.checked_mul(dim as usize));
    if expected != Some(bytes.len()) {
        fail!(
            Program,
            "constant `{name}` has {} bytes, its shape {shape:?} of {} needs {}",
            bytes.len(),
            dtype::name(constant.dtype),
            expected.map_or_else(|| String::from("too many"), |size| size.to_string())
        );
    }
    // SAFETY: the bytes are as many as shape and dtype say; MLX copies them.
    let stored = unsafe { Array::from_raw_data(bytes.as_ptr().cast(), shape, constant.dtype) };
    if layout == Layout::Transposed {
        let transposed = stored.transpose_axes(&[1, 0])?.contiguous()?;
        transposed.eval()?;
        return Ok(transposed);
    }
    Ok(stored)
}
