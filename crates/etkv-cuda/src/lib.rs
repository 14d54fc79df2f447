//! A decode step of a language model as one replayed CUDA graph.
//!
//! A [`Plan`] says what 1 to 64 tokens go through: rows of a table, products with
//! weights, and attention over the keys and values of each layer. [`Device::capture`] makes a graph of it,
//! and [`Captured::run`] replays that: a step then costs the host one launch, whatever its kernels.
//!
//! Weights, keys and values belong to another library of the same process; the plan has their addresses.
//! This crate knows nothing of that library, of caches, or of programs. It builds and loads where there
//! is no CUDA: [`Device::open`] then says so. [`Compiler`] also compiles kernels that others launch.

#[cfg(feature = "device")]
mod step;
pub mod text;

#[cfg(feature = "device")]
pub use step::{
    Address, Attend, Blend, Buffer, Captured, Columns, Compiler, Copied, Device, Element, Embed,
    Error, Gate, Heads, KeyMask, Launch, Logits, Memory, Norm, Normalize, Outputs, Packed,
    PackedRows, Place, Plan, Pool, PoolRows, Product, Result, StepInputs, Weight, MAX_FEW,
    MAX_GROUPS, MAX_TOKENS,
};
