//! Checks and converts the arguments of a call.

use etkv_core::{fail, Result};
use etkv_delegate::Argument;

use crate::linear::WeightFormat;
use crate::tensor::{row_major, Dtype, Tensor};

/// ExecuTorch's numbers for dtypes.
const BYTE: i8 = 0;
const INT: i8 = 3;
const LONG: i8 = 4;
const HALF: i8 = 5;
const FLOAT: i8 = 6;
const BFLOAT16: i8 = 15;

/// Returns the dtype with this number in ExecuTorch.
///
/// # Errors
/// [`Dtype`](etkv_core::Status::Dtype) for types other than float32, float16 and bfloat16.
pub fn dtype(scalar_type: i8) -> Result<Dtype> {
    match scalar_type {
        FLOAT => Ok(Dtype::F32),
        HALF => Ok(Dtype::F16),
        BFLOAT16 => Ok(Dtype::Bf16),
        other => fail!(
            Dtype,
            "expected a tensor in float32, float16 or bfloat16, got ExecuTorch's type {other}"
        ),
    }
}

/// Returns the rows `[1, heads, T, dim]` of an argument, without a copy.
///
/// # Errors
/// [`Shape`](etkv_core::Status::Shape) and [`Dtype`](etkv_core::Status::Dtype) for any other argument. The
/// message includes `name`.
pub fn rows(argument: &Argument, name: &str) -> Result<Tensor> {
    check_tensor(argument, name)?;
    let &[batch, heads, n, dim] = argument.shape() else {
        fail!(Shape, "{name}: expected 4 dimensions, got shape {:?}", argument.shape());
    };
    let shape = [batch, heads, n, dim];
    if n == 0 {
        fail!(Shape, "{name}: the step has no tokens, got shape {shape:?}; pass at least one");
    }
    contiguous(argument, name, shape)
}

/// Returns the elements of an argument, in the order of its memory, as a tensor of this shape.
///
/// # Errors
/// As [`rows`].
pub fn contiguous(argument: &Argument, name: &str, shape: [i32; 4]) -> Result<Tensor> {
    check_tensor(argument, name)?;
    let dtype = dtype(argument.scalar_type()).map_err(|error| error.at(name))?;
    let count = elements(&shape);
    let bytes = argument.bytes();
    if bytes.len() != count * dtype.size() || bytes.as_ptr().align_offset(dtype.size()) != 0 {
        fail!(
            Shape,
            "{name}: expected {} aligned bytes for shape {shape:?}, got {}",
            count * dtype.size(),
            bytes.len()
        );
    }
    // SAFETY: the argument has the bytes of the shape, and outlives the call.
    unsafe { Tensor::borrowed(bytes.as_ptr().cast(), dtype, shape, row_major(shape)) }
}

/// Returns an argument of shape `expected` as a tensor of shape `axes`.
///
/// # Errors
/// As [`rows`].
pub fn tensor(argument: &Argument, name: &str, expected: &[i32], axes: [i32; 4]) -> Result<Tensor> {
    if argument.is_tensor() && argument.shape() != expected {
        fail!(Shape, "{name}: expected shape {expected:?}, got {:?}", argument.shape());
    }
    contiguous(argument, name, axes)
}

/// Returns the elements of a float32 tensor.
///
/// # Errors
/// [`Shape`](etkv_core::Status::Shape) and [`Dtype`](etkv_core::Status::Dtype) for any other argument. The
/// message includes `name`.
pub fn floats<'a>(argument: &Argument<'a>, name: &str) -> Result<&'a [f32]> {
    if !argument.is_tensor() || argument.scalar_type() != FLOAT {
        fail!(
            Dtype,
            "{name}: expected a tensor in float32, got ExecuTorch's type {}",
            argument.scalar_type()
        );
    }
    // SAFETY: every bit pattern is a float32 number.
    let (before, floats, after) = unsafe { argument.bytes().align_to::<f32>() };
    if !before.is_empty() || !after.is_empty() {
        fail!(Shape, "{name}: expected aligned numbers");
    }
    check_elements(argument, name, floats.len())?;
    Ok(floats)
}

/// Returns the elements of an int64 tensor, 8 little-endian bytes each.
///
/// # Errors
/// [`Dtype`](etkv_core::Status::Dtype) for any other argument. The message includes `name`.
pub fn integers<'a>(argument: &Argument<'a>, name: &str) -> Result<&'a [u8]> {
    if !argument.is_tensor() || argument.scalar_type() != LONG {
        let found = argument.scalar_type();
        fail!(Dtype, "{name}: expected int64, got ExecuTorch's type {found}");
    }
    Ok(argument.bytes())
}

/// Checks that an argument has as many elements as its shape, since an output of that shape has room for no
/// more.
///
/// # Errors
/// [`Shape`](etkv_core::Status::Shape).
pub fn check_elements(argument: &Argument, name: &str, found: usize) -> Result<()> {
    let shape = argument.shape();
    let expected = elements(shape);
    if found != expected {
        fail!(Shape, "{name}: expected {expected} elements for shape {shape:?}, got {found}");
    }
    Ok(())
}

fn elements(shape: &[i32]) -> usize {
    shape.iter().map(|&size| usize::try_from(size).unwrap_or(0)).product()
}

/// Returns the bytes of packed weights.
///
/// # Errors
/// [`Dtype`](etkv_core::Status::Dtype) if the tensor does not have the dtype of `format`.
pub fn packed<'a>(argument: &Argument<'a>, format: WeightFormat) -> Result<&'a [u8]> {
    let expected = match format {
        WeightFormat::F32 => FLOAT,
        WeightFormat::Bf16 => BFLOAT16,
        WeightFormat::Int8 { .. } | WeightFormat::Int4 { .. } | WeightFormat::Fp4 { .. } => BYTE,
    };
    if !argument.is_tensor() || argument.scalar_type() != expected {
        fail!(
            Dtype,
            "weights: expected ExecuTorch's type {expected}, got {}",
            argument.scalar_type()
        );
    }
    Ok(argument.bytes())
}

/// Returns the arguments of a call in the order of its payload's `inputs`.
pub fn pick<'a, const N: usize>(
    inputs: &'a [Argument<'a>],
    order: &[Option<usize>; N],
) -> [Option<&'a Argument<'a>>; N] {
    order.map(|input| input.and_then(|input| inputs.get(input)))
}

/// Reads positions from int64 or int32 `[T]` or `[T, n]`. In the latter, the first column has the positions.
///
/// # Errors
/// [`Position`](etkv_core::Status::Position) for a value that is not a 32-bit integer;
/// [`Dtype`](etkv_core::Status::Dtype) and [`Shape`](etkv_core::Status::Shape) for other tensors.
pub fn positions(argument: &Argument, out: &mut Vec<i32>) -> Result<()> {
    check_tensor(argument, "positions")?;
    let components = match *argument.shape() {
        [_] => 1,
        [_, n] if n > 0 => n as usize,
        _ => fail!(Shape, "positions: expected [T] or [T, n], got {:?}", argument.shape()),
    };
    let size = match argument.scalar_type() {
        LONG => 8,
        INT => 4,
        other => fail!(Dtype, "positions: expected int64 or int32, got ExecuTorch's type {other}"),
    };
    out.clear();
    reserve(out, argument.bytes().len() / (size * components))?;
    for token in argument.bytes().chunks_exact(size * components) {
        let position = match size {
            8 => i64::from_ne_bytes(token[..8].try_into().unwrap_or_default()),
            _ => i64::from(i32::from_ne_bytes(token[..4].try_into().unwrap_or_default())),
        };
        match i32::try_from(position) {
            Ok(position) => out.push(position),
            Err(_) => fail!(Position, "position {position} is not a 32-bit integer"),
        }
    }
    Ok(())
}

/// Reserves room for `n` more positions.
///
/// # Errors
/// [`Backend`](etkv_core::Status::Backend) if memory is lacking.
pub fn reserve(positions: &mut Vec<i32>, n: usize) -> Result<()> {
    if positions.try_reserve(n).is_err() {
        fail!(
            Backend,
            "out of memory: {n} positions; free memory or pass fewer tokens in each step"
        );
    }
    Ok(())
}

fn check_tensor(argument: &Argument, name: &str) -> Result<()> {
    if !argument.is_tensor() {
        fail!(InvalidArgument, "{name}: expected a tensor of {name}, got an integer");
    }
    Ok(())
}
