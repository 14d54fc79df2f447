//! Plans, graphs, and the device that runs them.

mod attend;
mod captured;
mod check;
mod compile;
mod device;
mod driver;
mod error;
mod formats;
mod inputs;
mod launch;
mod mask;
mod norms;
mod plan;
mod pools;
mod source;
mod work;

pub use self::captured::{CapturedStep, Outputs};
pub use self::compile::Compiler;
pub use self::device::Device;
pub use self::driver::Memory;
pub use self::error::{Error, Result};
pub use self::inputs::StepInputs;
pub use self::mask::KeyMask;
pub use self::plan::{
    Address, Attend, Blend, Buffer, Columns, CopiedRows, Element, Embed, Gate, Heads, Launch,
    Logits, Norm, Normalize, PackedRows, PackedWeight, PlaceHeads, Plan, Pool, PoolRows, Product,
    Weight, MAX_FEW, MAX_GROUPS, MAX_TOKENS,
};
