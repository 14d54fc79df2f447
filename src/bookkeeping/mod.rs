//! Which position lies in which slot: integers only, no tensors.

mod contiguous;

pub use contiguous::{ContiguousBookkeeping, ContiguousPlan};
