//! What programs of every backend exchange with the host that runs them: options, arguments, and
//! calls of the host.

mod argument;
mod options;

pub use argument::{Argument, Host};
pub use options::{LoadOptions, LogitsRows, Passes};
