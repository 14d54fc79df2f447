//! What programs of every backend exchange with the host that runs them: options, arguments,
//! calls of the host, and how tokens are chosen.

mod argument;
mod options;
mod sampling;

pub use argument::{Argument, Host};
pub use options::{LoadOptions, LogitsRows, Passes};
pub use sampling::Sampling;
