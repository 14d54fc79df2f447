//! A decode step of a language model as one replayed CUDA graph.
//!
//! A [`Plan`] says what 1 to 64 tokens go through: rows of a table, products with weights, and attention over
//! the keys and values of each layer. [`Device::capture`] makes a CUDA graph of it, and [`CapturedStep::run`]
//! replays the graph: a step then costs the host one call, whatever its number of kernels.
//!
//! Weights, keys and values belong to another library of the same process; the plan has their addresses. This
//! crate does not know that library, caches, or programs. It builds and loads on machines without CUDA, where
//! [`Device::open`] returns an error. [`Compiler`] also compiles kernels that others launch.

#[cfg(feature = "device")]
mod step;
pub mod text;

#[cfg(feature = "device")]
pub use step::{
    Address, Attend, Blend, Buffer, CapturedStep, Columns, Compiler, CopiedRows, Device, Element,
    Embed, Error, Gate, Heads, KeyMask, Launch, Logits, Memory, Norm, Normalize, Outputs,
    PackedRows, PackedWeight, PlaceHeads, Plan, Pool, PoolRows, Product, Result, StepInputs,
    Weight, MAX_FEW, MAX_GROUPS, MAX_TOKENS,
};
