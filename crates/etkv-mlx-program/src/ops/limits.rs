//! The limits on the tensors of a program. A damaged file can contain any shape. MLX would allocate it, and on a CPU
//! its allocator ends the process if there is too little memory.

use std::sync::atomic::{AtomicUsize, Ordering};

use mlx_rs::{Array, Dtype};

use crate::dtype::item_size;
use crate::error::{fail, Result};
use crate::ir::Op;
use crate::ops::frame::Frame;

/// The maximum bytes by which a tensor may exceed the tensors from which it is computed. ExecuTorch has the same
/// limit.
static MAX_BYTES: AtomicUsize = AtomicUsize::new(4 << 30);

/// Returns the maximum bytes by which a program's tensor may exceed the tensors from which it is computed.
pub fn max_bytes() -> usize {
    MAX_BYTES.load(Ordering::Relaxed)
}

/// Sets that maximum, for tests with less memory.
#[doc(hidden)]
pub fn set_max_bytes(bytes: usize) {
    MAX_BYTES.store(bytes, Ordering::Relaxed);
}

/// Returns the bytes of a tensor, or `None` for a negative size or a number above 64 bits.
pub fn bytes_of(shape: &[i32], dtype: Dtype) -> Option<usize> {
    shape
        .iter()
        .try_fold(item_size(dtype), |bytes, &size| bytes.checked_mul(usize::try_from(size).ok()?))
}

/// Checks the shape of a tensor before it is created.
pub fn check_size(shape: &[i32], dtype: Dtype) -> Result<()> {
    let most = max_bytes();
    match bytes_of(shape, dtype) {
        Some(bytes) if bytes <= most => Ok(()),
        _ => fail!(
            Program,
            "expected a tensor of at most {most} bytes, got shape {shape:?} of {dtype:?}"
        ),
    }
}

/// Checks the size of an instruction's result before it is computed. A view may be as large as its tensor.
pub fn check_made(made: &Array, op: &Op, frame: &Frame) -> Result<()> {
    let bytes = bytes_of(made.shape(), made.dtype());
    if bytes.is_some_and(|bytes| bytes <= max_bytes()) {
        return Ok(());
    }
    let read = op.reads().into_iter().filter_map(|value| frame.tensor(value).ok());
    let most = read.map(Array::nbytes).fold(max_bytes(), usize::saturating_add);
    match bytes {
        Some(bytes) if bytes <= most => Ok(()),
        _ => fail!(
            Program,
            "expected a result of at most {most} bytes, got shape {:?} of {:?}",
            made.shape(),
            made.dtype()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_past_the_limit_are_refused() {
        let four_gib = 1 << 30;
        check_size(&[four_gib], Dtype::Float32).unwrap();
        check_size(&[0, i32::MAX, i32::MAX, i32::MAX], Dtype::Float32).unwrap();
        for shape in [&[four_gib + 1][..], &[-1], &[i32::MAX, i32::MAX, i32::MAX]] {
            let error = check_size(shape, Dtype::Float32).unwrap_err();
            assert!(error.message().contains("at most 4294967296 bytes"), "{error}");
        }
    }
}
