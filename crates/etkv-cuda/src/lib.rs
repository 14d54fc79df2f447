//! A decode step of a language model as one replayed CUDA graph.
//!
//! A [`Plan`] describes the computation for 1 to 64 tokens: embeddings, products with weights, and attention
//! over the keys and values of each layer. [`Device::capture`] captures it as a CUDA graph, and
//! [`CapturedStep::run`] replays the graph. A step then costs the host one call, whatever its number of
//! kernels.
//!
//! Weights, keys and values belong to another library of the same process; the plan has their addresses. This
//! crate does not depend on that library, on caches, or on programs. It builds and loads on machines without
//! CUDA, where [`Device::open`] returns an error. [`Compiler`] also compiles kernels that callers launch
//! themselves.

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
