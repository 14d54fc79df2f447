//! Loads the constants of a program, one at a time, each in its final layout.

use std::collections::HashMap;

use mlx_rs::ops::concatenate;
use mlx_rs::{Array, Dtype};

use crate::dtype;
use crate::error::{fail, Result};
use crate::ir::{Constant, Graph, Value};
use crate::ops::limits::bytes_of;
use crate::passes::Layout;

/// The source of a program's constants.
pub trait ConstantSource {
    /// Returns the bytes of a constant, row-major, or `None` if it does not exist.
    fn find(&mut self, name: &str) -> Option<&[u8]>;
}

/// Returns the values of constants with one float32 element that the init chain does not replace. Skips a missing or
/// damaged constant: the load of the constant returns the error.
pub fn scalars(graph: &Graph, source: &mut dyn ConstantSource) -> HashMap<Value, f32> {
    let mut scalars = HashMap::new();
    for (value, constant) in (0..).map(Value).zip(&graph.constants) {
        let is_one = constant.shape.iter().all(|&size| size == 1);
        if !is_one || constant.dtype != Dtype::Float32 || graph.init_targets.contains(&value) {
            continue;
        }
        if let Some(bytes) = source.find(&constant.name).and_then(|bytes| bytes.try_into().ok()) {
            scalars.insert(value, f32::from_ne_bytes(bytes));
        }
    }
    scalars
}

/// Loads a constant.
///
/// Copies the bytes once, into MLX's memory. The source may free them as soon as this returns, so a program's weights
/// are not in memory twice. Only the parts of a joined constant are in memory twice while they are joined.
///
/// # Errors
/// [`Program`](etkv::Status::Program) if the data are missing, or if their size differs from the size that
/// the program states; [`Backend`](etkv::Status::Backend).
pub fn load(constant: &Constant, layout: Layout, source: &mut dyn ConstantSource) -> Result<Array> {
    let mut stored = stored(constant, source)?;
    if !constant.joined.is_empty() {
        let mut parts = vec![stored];
        for part in &constant.joined {
            parts.push(self::stored(part, source)?);
        }
        stored = concatenate(&parts, 0)?;
        stored.eval()?;
    }
    let transposed = match layout {
        Layout::Transposed => stored.transpose_axes(&[1, 0])?.contiguous()?,
        Layout::View => stored.transpose_axes(&[1, 0])?,
        Layout::Stored | Layout::Absent => return Ok(stored),
    };
    transposed.eval()?;
    Ok(transposed)
}

/// Copies the bytes of a constant, without the constants that are joined to it.
fn stored(constant: &Constant, source: &mut dyn ConstantSource) -> Result<Array> {
    let Constant { name, shape, .. } = constant;
    let Some(bytes) = source.find(name) else {
        fail!(Program, "the program's data have no constant `{name}`");
    };
    let expected = bytes_of(shape, constant.dtype);
    if expected != Some(bytes.len()) {
        fail!(
            Program,
            "constant `{name}` has {} bytes, its shape {shape:?} of {} needs {}",
            bytes.len(),
            dtype::name(constant.dtype),
            expected.map_or_else(|| String::from("too many"), |size| size.to_string())
        );
    }
    // SAFETY: the number of bytes matches shape and dtype; MLX copies them.
    Ok(unsafe { Array::from_raw_data(bytes.as_ptr().cast(), shape, constant.dtype) })
}
