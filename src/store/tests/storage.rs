//! Error bounds of every format, and bits that must not change.

use half::f16;

use super::*;
use crate::mlx::run;
use crate::store::convert;

const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Returns the values of E4M3, which has no infinities and no code above 448.
fn e4m3() -> Vec<f32> {
    let value = |code: u32| match (code >> 3, code & 7) {
        (0, mantissa) => mantissa as f32 / 8.0 * 2f32.powi(-6),
        (exponent, mantissa) => (1.0 + mantissa as f32 / 8.0) * 2f32.powi(exponent as i32 - 7),
    };
    (0..0x7f).map(value).collect()
}

/// Returns the distance of `value` from the nearest of `magnitudes`, signed.
fn distance(value: f32, magnitudes: &[f32]) -> f32 {
    magnitudes.iter().map(|m| (value.abs() - m).abs()).fold(f32::INFINITY, f32::min)
}

fn peak(block: &[f32]) -> f32 {
    block.iter().fold(0.0, |most: f32, x| most.max(x.abs()))
}

/// Returns the maximum error of each element of a row by the definition of the format.
fn bounds(format: KvFormat, row: &[f32]) -> Vec<f32> {
    let power = |block: &[f32], top: i32| {
        // The smallest power of two that scales the peak to 1.75 times 2^top.
        (-126..127).map(|e| 2f32.powi(e)).find(|s| peak(block) / s <= 1.75 * 2f32.powi(top))
    };
    let nearest = |block: &[f32], scale: f32, table: &[f32]| {
        if scale == 0.0 {
            return block.iter().map(|x| x.abs()).collect();
        }
        let rounding = 1e-6 * peak(block);
        block.iter().map(|x| scale * distance(x / scale, table) + rounding).collect::<Vec<_>>()
    };
    let in_blocks = |size: usize, bound: &dyn Fn(&[f32]) -> Vec<f32>| {
        row.chunks(size).flat_map(bound).collect::<Vec<_>>()
    };
    match format {
        KvFormat::F32 => vec![0.0; row.len()],
        KvFormat::F16 => row.iter().map(|x| x.abs() / 2048.0 + 3e-8).collect(),
        KvFormat::Bf16 => row.iter().map(|x| x.abs() / 256.0).collect(),
        KvFormat::Mxfp8 => {
            in_blocks(32, &|block| nearest(block, power(block, 8).unwrap(), &e4m3()))
        }
        KvFormat::Mxfp4 => in_blocks(32, &|block| nearest(block, power(block, 2).unwrap(), &E2M1)),
        KvFormat::Nvfp4 => in_blocks(16, &|block| {
            let wanted = peak(block) / 6.0;
            let table = e4m3();
            let least = distance(wanted, &table) * (1.0 + 1e-5);
            // Both neighbouring scales, if the exact scale is between them.
            let scales = table.into_iter().filter(|scale| (scale - wanted).abs() <= least);
            let bounds = scales.map(|scale| nearest(block, scale, &E2M1));
            let larger = |a: Vec<f32>, b: Vec<f32>| {
                a.iter().zip(&b).map(|(a, b)| a.max(*b)).collect::<Vec<f32>>()
            };
            bounds.reduce(larger).unwrap()
        }),
        KvFormat::RowFp4 => nearest(row, f16::from_f32(peak(row) / 6.0).to_f32(), &E2M1),
        KvFormat::RowInt4 => {
            let integers: Vec<f32> = (0..8).map(|x| x as f32).collect();
            nearest(row, f16::from_f32(peak(row) / 7.0).to_f32(), &integers)
        }
        KvFormat::Affine { bits, group } => in_blocks(group as usize, &|block| {
            let most = block.iter().fold(f32::MIN, |a, &b| a.max(b));
            let least = block.iter().fold(f32::MAX, |a, &b| a.min(b));
            let codes = 2f32.powi(bits.into()) - 1.0;
            // The scale is stretched so that zero has a code, by at most half a step over at least half of the codes.
            let step = (most - least) / codes * (1.0 + 1.0 / codes);
            let far = most.abs().max(least.abs());
            // The error is at most half a step inside the range, and at most one step at its clipped ends.
            block.iter().map(|_| step * 1.01 + (2.0 * far + most - least) / 2048.0).collect()
        }),
    }
}

fn check_bounds(format: KvFormat, written: &[f32], read: &[f32], dim: usize) {
    for (at, (row, stored)) in written.chunks(dim).zip(read.chunks(dim)).enumerate() {
        for (bound, (x, y)) in bounds(format, row).iter().zip(row.iter().zip(stored)) {
            assert!(
                (x - y).abs() <= *bound + 1e-30,
                "{format}, head_dim {dim}, row {at}: {x} is read as {y}, {bound} is allowed"
            );
        }
    }
}

#[test]
fn buffers_have_the_bytes_of_the_format_and_start_as_zeros() {
    run(|| {
        for (format, dim) in formats() {
            let mut pool = Pool::new(format, 3, dim)?;
            assert_eq!((pool.slots(), pool.buffers().len()), (0, 0));
            pool.grow(7)?;
            let held: usize = pool.buffers().iter().map(|buffer| buffer.nbytes()).sum();
            assert_eq!(held as u64, 7 * slot_bytes(&pool), "{format}");
            let rows = pool.read(1, 6)?;
            assert_eq!((rows.len(), rows.head_dim(), rows.n_kv_heads()), (5, dim, 3));
            let zeros = values(&rows.dequantized(Dtype::Float32)?)?;
            assert_eq!(zeros.len(), 3 * 5 * dim as usize);
            assert!(zeros.iter().all(|&x| x == 0.0), "{format}");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn rows_are_as_near_as_the_format_allows() {
    run(|| {
        for (format, dim) in formats() {
            for (seed, factor) in [(1, 1.0), (2, 1e-3), (3, 700.0)] {
                let mut written = normal(seed, (2 * 9 * dim) as usize);
                written.iter_mut().for_each(|x| *x *= factor);
                // One row of zeros, one of equal elements, one with a lone outlier.
                let dim = dim as usize;
                written[..dim].fill(0.0);
                written[dim..2 * dim].fill(factor);
                written[2 * dim..3 * dim].fill(factor / 64.0);
                written[2 * dim] = -factor;
                let rows = array(&written, &[1, 2, 9, dim as i32]);
                for dtype in [Dtype::Float32, Dtype::Float16, Dtype::Bfloat16] {
                    let rows = rows.as_dtype(dtype)?;
                    let pool = pool_of(format, &rows)?;
                    check_bounds(format, &values(&rows)?, &read(&pool, 0, 9)?, dim);
                }
            }
        }
        Ok(())
    })
    .unwrap();
}

/// Rows outside the range of a narrow format are stored as the nearest values. Neither such rows nor rows of NaN
/// change neighbouring rows.
#[test]
fn rows_beyond_a_format_stay_by_themselves() {
    run(|| {
        for (format, dim) in formats() {
            let size = dim as usize;
            let mut written = normal(4, 5 * size);
            written[size] = 1e30;
            written[2 * size] = f32::INFINITY;
            written[3 * size + 1] = f32::NAN;
            let pool = pool_of(format, &array(&written, &[1, 1, 5, dim]))?;
            let read = read(&pool, 0, 5)?;
            for row in [0, 4] {
                let span = row * size..(row + 1) * size;
                check_bounds(format, &written[span.clone()], &read[span], size);
            }
            if !format.is_float() {
                let large = &read[size..3 * size];
                assert!(large.iter().all(|x| x.is_finite()), "{format}: {large:?}");
                assert!(read[size] > 2000.0 && read[2 * size] > 2000.0, "{format}");
            }
        }
        Ok(())
    })
    .unwrap();
}

/// Returns lists of slots: one run, a few runs, and more runs than are written one by one.
fn lists() -> [Slots; 4] {
    [
        Slots::Run(3..9),
        Slots::List(vec![3, 4, 9, 10, 11, 0]),
        Slots::List((0..12).rev().collect()),
        Slots::List((0..12).map(|at| at * 5 % 12).collect()),
    ]
}

#[test]
fn rows_are_written_to_the_slots_that_are_named() {
    run(|| {
        for (format, dim) in formats() {
            for slots in lists() {
                let n = slots.len() as i32;
                let (before, after) = (rows(5, 2, 12, dim), rows(6, 2, n, dim));
                let mut pool = pool_of(format, &before)?;
                let other = pool_of(format, &after)?;
                let (mut expected, fresh) = (read(&pool, 0, 12)?, read(&other, 0, n)?);
                pool.write(&slots, &after)?;
                let size = dim as usize;
                for head in 0..2 {
                    for (at, slot) in slots.iter().enumerate() {
                        let from = (head * n as usize + at) * size;
                        let to = (head * 12 + slot as usize) * size;
                        expected[to..to + size].copy_from_slice(&fresh[from..from + size]);
                    }
                }
                assert_eq!(read(&pool, 0, 12)?, expected, "{format} to {slots:?}");
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn copies_are_put_back_bit_for_bit() {
    run(|| {
        for (format, dim) in formats() {
            for slots in lists() {
                let mut pool = pool_of(format, &rows(7, 2, 12, dim))?;
                let all =
                    |pool: &Pool| pool.buffers().iter().map(bytes_of).collect::<Result<Vec<_>>>();
                let before = all(&pool)?;
                let copy = pool.copy(&slots)?;
                mlx_rs::transforms::eval(copy.arrays())?;
                assert_eq!(copy.len(), slots.len());
                pool.write(&slots, &rows(8, 2, slots.len() as i32, dim))?;
                assert_ne!(all(&pool)?, before);
                pool.put(&slots, &copy)?;
                assert_eq!(all(&pool)?, before, "{format} {slots:?}");
                // The other slots.
                let mut other = Pool::new(format, 2, dim)?;
                other.grow(12)?;
                other.put(&Slots::Run(0..slots.len() as i32), &copy)?;
                other.put(&slots, &other.copy(&Slots::Run(0..slots.len() as i32))?)?;
                let first = slots.iter().next().unwrap();
                assert_eq!(read(&other, first, first + 1)?, read(&pool, first, first + 1)?);
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn growing_keeps_rows_and_adds_zeros() {
    run(|| {
        for (format, dim) in formats() {
            let mut pool = pool_of(format, &rows(9, 2, 5, dim))?;
            let before = read(&pool, 0, 5)?;
            pool.grow(8)?;
            pool.grow(3)?;
            assert_eq!(pool.slots(), 8);
            assert_eq!(read(&pool, 0, 5)?, before);
            assert!(read(&pool, 5, 8)?.iter().all(|&x| x == 0.0));
            pool.release();
            assert_eq!(pool.slots(), 0);
            pool.grow(2)?;
            assert!(read(&pool, 0, 2)?.iter().all(|&x| x == 0.0));
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn rows_are_converted_to_any_format() {
    run(|| {
        let n = 1500;
        let written = rows(10, 1, n, 128);
        for from in [KvFormat::F16, KvFormat::Affine { bits: 4, group: 64 }] {
            let all = formats().into_iter().filter(|(format, _)| format.check(128).is_ok());
            for (to, _) in all.filter(|(to, _)| *to != from) {
                let mut pool = pool_of(from, &written)?;
                pool.grow(2000)?;
                let source = pool.read(0, n)?.dequantized(Dtype::Float32)?;
                convert(&mut pool, to, n)?;
                assert_eq!((pool.format(), pool.slots()), (to, 2000));
                let expected = read(&pool_of(to, &source)?, 0, n)?;
                assert!(read(&pool, 0, n)? == expected, "{from} to {to}");
            }
        }
        let mut pool = pool_of(KvFormat::F16, &rows(10, 1, 4, 80))?;
        let error = convert(&mut pool, KvFormat::Mxfp4, 4).unwrap_err();
        assert!(error.message().contains("head_dim 80"), "{error}");
        assert_eq!(pool.format(), KvFormat::F16);
        Ok(())
    })
    .unwrap();
}

#[test]
fn misuse_is_refused() {
    run(|| {
        let mut pool = pool_of(KvFormat::F16, &rows(11, 1, 4, 8))?;
        assert!(pool.read(0, 5).is_err());
        assert!(pool.copy(&Slots::Run(3..5)).is_err());
        assert!(pool.write(&Slots::Run(3..5), &rows(1, 1, 2, 8)).is_err());
        assert!(pool.write(&Slots::Run(0..2), &rows(1, 1, 3, 8)).is_err());
        let copy = pool.copy(&Slots::Run(0..2))?;
        assert!(pool.put(&Slots::Run(0..1), &copy).is_err());
        Ok(())
    })
    .unwrap();
}

/// Kernels of a captured step read pools in place and expect one head after another.
#[test]
fn rows_that_fill_a_pool_lie_head_by_head() {
    for format in [KvFormat::F32, KvFormat::Mxfp8, KvFormat::Affine { bits: 4, group: 32 }] {
        for n in [1, 2, 7] {
            // Rows in a model's layout: token by token.
            let (heads, dim) = (3, 64);
            let of_tokens =
                array(&normal(n as u64, (n * heads * dim) as usize), &[1, n, heads, dim]);
            let pool = pool_of(format, &of_tokens.transpose_axes(&[0, 2, 1, 3]).unwrap()).unwrap();
            for buffer in pool.buffers() {
                let width = buffer.dim(3) as usize;
                let strides = [3 * n as usize * width, n as usize * width, width, 1];
                assert_eq!(buffer.shape()[..3], [1, heads, n], "{format:?}");
                // The stride of an axis with one element is arbitrary.
                let mut axes = buffer.shape().iter().zip(buffer.strides()).zip(strides);
                let fits = axes.all(|((&size, &stride), expected)| size == 1 || stride == expected);
                assert!(fits, "{format:?}, {n} rows: {:?}", buffer.strides());
            }
        }
    }
}
