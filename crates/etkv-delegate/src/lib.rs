//! What programs of every backend exchange with the host that runs them: options, arguments, callbacks, and
//! sampling.

mod argument;
mod options;
mod sampling;

pub use argument::{Argument, Host};
pub use options::{LoadOptions, LogitsRows, Passes};
pub use sampling::Sampling;
