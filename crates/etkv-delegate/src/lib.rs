//! The interface between the programs of every backend and their host: options, arguments, callbacks, and sampling.

mod argument;
mod options;
mod sampling;

pub use argument::{Argument, Host};
pub use options::{LoadOptions, LogitsRows, Passes};
pub use sampling::Sampling;
