//! Compares pools of every format with plain Rust.

mod attention;
mod finite;
mod frozen;
mod memory;
mod placed;
mod relocate;
mod storage;

use mlx_rs::{Array, Dtype};

use super::Pool;
use crate::error::Result;
use crate::format::KvFormat;
use crate::kernels::testing::units;
use etkv_core::bookkeeping::Slots;

/// Every format, with values of `head_dim` that fit it.
fn formats() -> Vec<(KvFormat, i32)> {
    let mut formats = vec![
        (KvFormat::F32, 24),
        (KvFormat::F16, 24),
        (KvFormat::Bf16, 24),
        (KvFormat::Mxfp8, 64),
        (KvFormat::Mxfp8, 96),
        (KvFormat::Mxfp4, 64),
        (KvFormat::Mxfp4, 96),
        (KvFormat::Nvfp4, 48),
        (KvFormat::Nvfp4, 128),
    ];
    for format in [KvFormat::RowInt4, KvFormat::RowFp4] {
        formats.extend([24, 64, 80, 96, 256].map(|dim| (format, dim)));
    }
    for bits in [2, 3, 4, 5, 6, 8] {
        for (group, dims) in [(32, [32, 96]), (64, [64, 192]), (128, [128, 256])] {
            formats.extend(dims.map(|dim| (KvFormat::Affine { bits, group }, dim)));
        }
    }
    formats
}

/// Returns numbers that are roughly normally distributed and the same in every run.
fn normal(seed: u64, n: usize) -> Vec<f32> {
    let mut unit = units(seed);
    (0..n).map(|_| (0..6).map(|_| unit() - 0.5).sum::<f32>() * 1.4).collect()
}

fn array(values: &[f32], shape: &[i32]) -> Array {
    Array::from_slice(values, shape)
}

fn rows(seed: u64, heads: i32, n: i32, dim: i32) -> Array {
    array(&normal(seed, (heads * n * dim) as usize), &[1, heads, n, dim])
}

fn values(array: &Array) -> Result<Vec<f32>> {
    crate::mlx::elements(&array.as_dtype(Dtype::Float32)?.contiguous()?)
}

fn bytes_of(array: &Array) -> Result<Vec<u8>> {
    let flat = array.contiguous()?;
    flat.eval()?;
    let mut bytes = vec![0; flat.nbytes()];
    crate::mlx::copy_to(&flat, &mut bytes)?;
    Ok(bytes)
}

/// Returns the unpacked rows of some slots.
fn read(pool: &Pool, start: i32, stop: i32) -> Result<Vec<f32>> {
    values(&pool.read(start, stop)?.dequantized(Dtype::Float32)?)
}

fn pool_of(format: KvFormat, rows: &Array) -> Result<Pool> {
    let mut pool = Pool::new(format, rows.dim(1), rows.dim(3))?;
    pool.grow(rows.dim(2))?;
    pool.write(&Slots::Run(0..rows.dim(2)), rows)?;
    mlx_rs::transforms::eval(pool.buffers())?;
    Ok(pool)
}

/// Returns the bytes of one slot of `pool`.
fn slot_bytes(pool: &Pool) -> u64 {
    let row = pool.format().row_bytes(pool.head_dim() as usize);
    pool.n_kv_heads as u64 * row as u64
}
