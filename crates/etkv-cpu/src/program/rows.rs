//! The rows of hidden states that the head of a model computes logits of.

use etkv_core::{fail, Result};
use etkv_host::{Argument, Host, LogitsRows};

/// Gives `host` all rows of the input, `[1, T, hidden]`, or the last.
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
            let last = &bytes[bytes.len() - row..];
            host.take(&[Argument::tensor(input.scalar_type(), &[1, 1, width], last)])
        }
        _ => host.take(std::slice::from_ref(input)),
    }
}
