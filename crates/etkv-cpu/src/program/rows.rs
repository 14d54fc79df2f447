//! The rows of hidden states for which a model's head computes logits.

use etkv_core::{fail, Result};
use etkv_delegate::{Argument, Host, LogitsRows};

/// Gives `host` all rows of the input, `[1, T, hidden]`, or only the last.
///
/// # Errors
/// [`Shape`](etkv_core::Status::Shape) for another input, and those of the host.
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

/// Gives `host` an output of this shape and these bytes.
///
/// # Errors
/// Those of the host.
pub fn copy(host: &mut dyn Host, shape: &[i32], bytes: &[u8]) -> Result<()> {
    host.place(0, shape, bytes.len())?.copy_from_slice(bytes);
    Ok(())
}
