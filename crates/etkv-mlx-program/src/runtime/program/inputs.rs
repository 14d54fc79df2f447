//! The inputs of a program.

use etkv_delegate::Argument;
use mlx_rs::{Array, Dtype};

use crate::dtype::{self, dtype_of};
use crate::error::{fail, Error, Result, Status};
use crate::ir::{Dim, InputSpec};
use crate::ops::frame::{Frame, HostInts};
use etkv::mlx;

/// Binds the inputs of a run.
pub fn bind_inputs(specs: &[InputSpec], inputs: &[Argument], frame: &mut Frame) -> Result<()> {
    if inputs.len() != specs.len() {
        fail!(InvalidArgument, "expected {} inputs, got {}", specs.len(), inputs.len());
    }
    for (index, (spec, input)) in specs.iter().zip(inputs).enumerate() {
        match spec {
            InputSpec::Int(value) => {
                let Some(number) = input.integer() else {
                    fail!(InvalidArgument, "input {index}: expected an integer, got a tensor");
                };
                match i32::try_from(number) {
                    Ok(number) => frame.set_int(*value, number),
                    Err(_) => fail!(
                        InvalidArgument,
                        "input {index}: expected a number within 32 bits, got {number}"
                    ),
                }
            }
            InputSpec::Tensor { value, name, shape, scalar_type } => {
                let array = tensor(input, shape, *scalar_type)
                    .map_err(|error| error.at(format_args!("input {index}, {name}")))?;
                if let Some(numbers) = integers(array.dtype(), input.bytes()) {
                    frame.set_host_ints(*value, numbers);
                }
                frame.set(*value, array);
            }
        }
    }
    Ok(())
}

/// Returns an input as an array. Copies its elements.
fn tensor(input: &Argument, shape: &[Dim], scalar_type: i8) -> Result<Array> {
    let dtype = dtype_of(scalar_type)?;
    if !input.is_tensor() {
        fail!(InvalidArgument, "expected a tensor, got an integer");
    }
    if input.scalar_type() != scalar_type {
        let found = dtype_of(input.scalar_type()).map_or("another dtype", dtype::name);
        fail!(Dtype, "expected {}, got {found}", dtype::name(dtype));
    }
    check_shape(input.shape(), shape)?;
    let n: usize = input.shape().iter().map(|&dim| dim as usize).product();
    if n * dtype::item_size(dtype) != input.bytes().len() {
        fail!(Internal, "got {} bytes for shape {:?}", input.bytes().len(), input.shape());
    }
    // SAFETY: the number of bytes matches shape and dtype.
    let array = unsafe { mlx::host_array(input.bytes(), input.shape(), dtype) }?;
    match dtype {
        // Ids and positions are read only once.
        Dtype::Int32 | Dtype::Int64 => Ok(array),
        _ => mlx::on_device(&array),
    }
}

pub fn check_shape(found: &[i32], expected: &[Dim]) -> Result<()> {
    let fits = |(&size, dim): (&i32, &Dim)| match *dim {
        Dim::Static(expected) => size == expected,
        Dim::UpTo(limit) => size >= 1 && limit.is_none_or(|limit| size <= limit),
    };
    if found.len() == expected.len() && found.iter().zip(expected).all(fits) {
        return Ok(());
    }
    let expected: Vec<String> = expected
        .iter()
        .map(|dim| match dim {
            Dim::Static(size) => size.to_string(),
            Dim::UpTo(Some(limit)) => format!("1 to {limit}"),
            Dim::UpTo(None) => String::from("1 or more"),
        })
        .collect();
    Err(Error::new(
        Status::Shape,
        format!("expected shape [{}], got {found:?}", expected.join(", ")),
    ))
}

/// Returns the elements of an integer tensor, or `None` for other dtypes.
pub fn integers(dtype: Dtype, bytes: &[u8]) -> Option<HostInts> {
    let chunks = |size: usize| bytes.chunks_exact(size);
    match dtype {
        Dtype::Int64 => Some(
            chunks(8)
                .map(|chunk| i64::from_ne_bytes(chunk.try_into().unwrap_or_default()))
                .collect(),
        ),
        Dtype::Int32 => Some(
            chunks(4)
                .map(|chunk| i64::from(i32::from_ne_bytes(chunk.try_into().unwrap_or_default())))
                .collect(),
        ),
        _ => None,
    }
}
