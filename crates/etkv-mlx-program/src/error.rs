//! The error type, the same as that of the caches.

pub use etkv::{Error, Result, Status};
pub use etkv_core::fail;
