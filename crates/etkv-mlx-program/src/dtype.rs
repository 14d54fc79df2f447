//! Converts ExecuTorch's numbers of dtypes to MLX's dtypes.

use mlx_rs::Dtype;

use crate::error::{fail, Result};

/// Returns the dtype with ExecuTorch's number `scalar_type`.
///
/// # Errors
/// [`Unsupported`](etkv::Status::Unsupported) for dtypes that MLX lacks.
pub fn dtype_of(scalar_type: i8) -> Result<Dtype> {
    Ok(match scalar_type {
        0 => Dtype::Uint8,
        1 => Dtype::Int8,
        2 => Dtype::Int16,
        3 => Dtype::Int32,
        4 => Dtype::Int64,
        5 => Dtype::Float16,
        6 => Dtype::Float32,
        11 => Dtype::Bool,
        15 => Dtype::Bfloat16,
        27 => Dtype::Uint16,
        28 => Dtype::Uint32,
        29 => Dtype::Uint64,
        other => fail!(Unsupported, "MLX cannot represent dtype number {other} of ExecuTorch"),
    })
}

/// Returns the number of bytes of one element.
pub fn item_size(dtype: Dtype) -> usize {
    match dtype {
        Dtype::Bool | Dtype::Uint8 | Dtype::Int8 => 1,
        Dtype::Uint16 | Dtype::Int16 | Dtype::Float16 | Dtype::Bfloat16 => 2,
        Dtype::Uint32 | Dtype::Int32 | Dtype::Float32 => 4,
        Dtype::Uint64 | Dtype::Int64 | Dtype::Float64 | Dtype::Complex64 => 8,
    }
}

/// Returns whether a dtype is a float that programs compute in.
pub fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::Float16 | Dtype::Bfloat16 | Dtype::Float32)
}

/// Returns the dtype's name, as users write it.
pub fn name(dtype: Dtype) -> &'static str {
    match dtype {
        Dtype::Bool => "bool",
        Dtype::Uint8 => "uint8",
        Dtype::Uint16 => "uint16",
        Dtype::Uint32 => "uint32",
        Dtype::Uint64 => "uint64",
        Dtype::Int8 => "int8",
        Dtype::Int16 => "int16",
        Dtype::Int32 => "int32",
        Dtype::Int64 => "int64",
        Dtype::Float16 => "float16",
        Dtype::Float32 => "float32",
        Dtype::Float64 => "float64",
        Dtype::Bfloat16 => "bfloat16",
        Dtype::Complex64 => "complex64",
    }
}
