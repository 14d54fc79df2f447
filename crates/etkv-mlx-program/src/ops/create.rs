//! New tensors.

use mlx_rs::{Array, Dtype};

use super::calls::{check_size, decode, none, Arguments};
use super::ints;
use crate::dtype::dtype_of;
use crate::error::{fail, Result};
use crate::fb;
use crate::ir::{Fill, Function, Instruction, Int};
use crate::ops::slots::Slots;
use etkv::mlx::{call, cast, check};

pub fn arange(slots: &mut Slots, node: fb::ARangeNode) -> Result<Instruction> {
    let ints = vec![slots.int(node.start())?, slots.int(node.stop())?, slots.int(node.step())?];
    let dtype = node.scalar_type().map_or(Ok(Dtype::Int32), dtype_of)?;
    decode(slots, Function::ARange { dtype }, &[], ints, node.out())
}

pub fn full(slots: &mut Slots, node: fb::FullNode) -> Result<Instruction> {
    let mut ints = ints(slots, node.shape())?;
    let v = fill(slots, node.v(), &mut ints)?;
    let function = Function::Full { v, dtype: dtype_of(node.scalar_type())? };
    decode(slots, function, &[], ints, node.out())
}

pub fn full_like(slots: &mut Slots, node: fb::FullLikeNode) -> Result<Instruction> {
    let mut ints = Vec::new();
    let v = fill(slots, node.v(), &mut ints)?;
    let function = Function::FullLike { v, dtype: node.scalar_type().map(dtype_of).transpose()? };
    decode(slots, function, &[node.x()], ints, node.out())
}

fn fill(slots: &Slots, v: fb::FloatOrVid, ints: &mut Vec<Int>) -> Result<Fill> {
    if !v.is_vid() {
        return Ok(Fill::Literal(v.literal()));
    }
    let Some(vid) = v.vid() else {
        fail!(Program, "expected a number or a value, got neither");
    };
    ints.push(Int::Value(slots.read_int(vid)?));
    Ok(Fill::Last)
}

pub fn random_bits(slots: &mut Slots, node: fb::RandomBitsNode) -> Result<Instruction> {
    if !matches!(node.width(), 1 | 2 | 4) {
        fail!(Program, "expected random elements of 1, 2 or 4 bytes, got {}", node.width());
    }
    let mut ints = ints(slots, node.shape())?;
    let seed = node.seed().map(|vid| slots.read_int(vid)).transpose()?;
    ints.extend(seed.map(Int::Value));
    let function = Function::RandomBits { width: node.width(), seed: seed.is_some() };
    decode(slots, function, &[], ints, node.out())
}

pub fn tri(slots: &mut Slots, node: fb::TriNode) -> Result<Instruction> {
    let ints = vec![slots.int(node.n())?, slots.int(node.m())?];
    let function = Function::Tri { k: node.k(), dtype: dtype_of(node.scalar_type())? };
    decode(slots, function, &[], ints, node.out())
}

pub fn run_arange(arguments: &Arguments, dtype: Dtype) -> Result<Array> {
    let [start, stop, step] = [0, 1, 2].map(|index| arguments.int(index).map(i64::from));
    let (start, stop, step) = (start?, stop?, step?);
    if step == 0 {
        fail!(Program, "expected a range with a step other than 0");
    }
    let n = ((stop - start + step - step.signum()) / step).max(0);
    check_size(&[n.min(i64::from(i32::MAX)) as i32], dtype)?;
    let [start, stop, step] = [start, stop, step].map(|number| number as f64);
    // SAFETY: numbers are passed.
    call(|made, stream| unsafe {
        mlx_sys::mlx_arange(made, start, stop, step, dtype.into(), stream)
    })
}

/// Returns the number that fills a tensor, and the integers before it in the call.
fn filled<'a>(arguments: &'a Arguments, v: Fill) -> Result<(&'a [i32], Array)> {
    Ok(match (v, arguments.ints.split_last()) {
        (Fill::Literal(v), _) => (&arguments.ints, number(v)),
        (Fill::Last, Some((&v, rest))) => (rest, Array::from_int(v)),
        (Fill::Last, None) => fail!(Internal, "a filled tensor has no value"),
    })
}

/// Returns a number in a dtype that MLX supports on every device: GPUs have no 64-bit floats.
fn number(v: f64) -> Array {
    const EXACT: f64 = (1u64 << 53) as f64;
    // Integers have no negative zero.
    if v.fract() == 0.0 && v.abs() <= EXACT && (v != 0.0 || v.is_sign_positive()) {
        return Array::from_slice(&[v as i64], &[]);
    }
    Array::from_f32(v as f32)
}

fn full_of(shape: &[i32], v: &Array, dtype: Dtype) -> Result<Array> {
    check_size(shape, dtype)?;
    let v = cast(v, dtype)?;
    // SAFETY: the list has the given length, and the array is live.
    call(|made, stream| unsafe {
        mlx_sys::mlx_full(made, shape.as_ptr(), shape.len(), v.as_ptr(), dtype.into(), stream)
    })
}

pub fn run_full(arguments: &Arguments, v: Fill, dtype: Dtype) -> Result<Array> {
    let (shape, v) = filled(arguments, v)?;
    full_of(shape, &v, dtype)
}

pub fn run_full_like(arguments: &Arguments, v: Fill, dtype: Option<Dtype>) -> Result<Array> {
    let x = arguments.tensor(0)?;
    let (_, v) = filled(arguments, v)?;
    full_of(x.shape(), &v, dtype.unwrap_or(x.dtype()))
}

pub fn run_random_bits(arguments: &Arguments, width: i32, seed: bool) -> Result<Array> {
    let (seed, shape) = match arguments.ints.split_last() {
        Some((&last, rest)) if seed => (Some(last), rest),
        _ => (None, &arguments.ints[..]),
    };
    check_size(shape, Dtype::Uint32)?;
    let key = seed.map(|seed| {
        // The seed keeps its bits, as in ExecuTorch.
        let seed = i64::from(seed) as u64;
        // SAFETY: the handle is empty, and the call sets it or leaves it empty.
        unsafe {
            let mut key = mlx_sys::mlx_array_new();
            let status = mlx_sys::mlx_random_key(&mut key, seed);
            let key = Array::from_ptr(key);
            check(status).map(|()| key)
        }
    });
    let key = key.transpose()?;
    let handle = key.as_ref().map_or(none(), Array::as_ptr);
    // SAFETY: the list has the given length. Without a key MLX uses its own.
    call(|made, stream| unsafe {
        mlx_sys::mlx_random_bits(made, shape.as_ptr(), shape.len(), width, handle, stream)
    })
}

pub fn run_tri(arguments: &Arguments, k: i32, dtype: Dtype) -> Result<Array> {
    let (n, m) = (arguments.int(0)?, arguments.int(1)?);
    check_size(&[n, m], dtype)?;
    // SAFETY: numbers are passed.
    call(|made, stream| unsafe { mlx_sys::mlx_tri(made, n, m, k, dtype.into(), stream) })
}
