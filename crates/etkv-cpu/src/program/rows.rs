//! Selects the rows of hidden states for which the model's head computes logits.

use etkv_core::{fail, Result};
use etkv_delegate::{Argument, Host, LogitsRows};

/// Copies all rows of the input, `[1, T, hidden]`, or only the last one, to an output of `host`.
///
/// # Errors
/// [`Shape`](etkv_core::Status::Shape) for an input of another shape, and the errors of the host.
pub fn select(rows: LogitsRows, input: &Argument, host: &mut dyn Host) -> Result<()> {
    let (bytes, shape) = (input.bytes(), input.shape());
    let &[1, n, width] = shape else {
        fail!(Shape, "expected hidden states of shape [1, T, hidden], got {shape:?}");
    };
    match rows {
        LogitsRows::Last if n > 1 => {
            let row = bytes.len() / n as usize;
            copy(host, &[1, 1, width], &bytes[bytes.len() - row..])
        }
        _ => copy(host, shape, bytes),
    }
}

/// Copies these bytes to an output of `host` of this shape.
///
/// # Errors
/// The errors of the host.
pub fn copy(host: &mut dyn Host, shape: &[i32], bytes: &[u8]) -> Result<()> {
    host.place(0, shape, bytes.len())?.copy_from_slice(bytes);
    Ok(())
}
