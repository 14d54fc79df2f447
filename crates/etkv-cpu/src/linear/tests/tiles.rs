//! The kernels of tiles, and rounding.

use super::reference::{rounded, Weights};
use super::FORMATS;
use crate::attention::synthetic::Random;
use crate::linear::blocks::{Block, Packed, BLOCK};
use crate::linear::float_tile::FloatTile;
use crate::linear::integer_tile::{Dot, IntegerTile};
use crate::linear::quantize::Quantize;
use crate::linear::scales::Scales;
use crate::linear::weights::{Codes, WeightFormat, ROWS};
use crate::simd::{with_simd, Instructions, Simd};

/// Products are exact except for float32 rounding, even with the largest codes and inputs.
#[test]
fn products_of_a_tile() {
    let mut random = Random::new(5);
    for format in FORMATS {
        for instructions in Instructions::available() {
            let dot = Dot::of(instructions);
            let columns = if format.group().is_some() { 2 * format.unit() } else { 37 };
            let floats = BLOCK * with_simd!(instructions, |S| S::WIDTH) / ROWS;
            let most = if format.group().is_some() { dot.most() } else { floats };
            for n in 1..=most {
                let weights = Weights::new(format, 1, ROWS, columns, &mut random);
                let (of_weights, group, stored) =
                    format.in_groups().unwrap_or((Codes::Int8, 0, Scales::Bf16));
                let n_groups = columns.checked_div(group).unwrap_or(0);
                let mut rows = vec![0f32; n * columns];
                let (mut scales, mut starts) = (vec![0f32; n * n_groups], vec![0i32; n * n_groups]);
                let packed = Packed {
                    rows: rows.as_mut_ptr().cast(),
                    scales: scales.as_mut_ptr(),
                    starts: starts.as_mut_ptr(),
                    columns,
                    group,
                };
                let block = Block { first: 0, n };
                let mut inputs: Vec<Vec<f64>> = Vec::new();
                for i in 0..n {
                    if group == 0 {
                        let row = random.numbers(columns);
                        // SAFETY: the vectors have the sizes of the block.
                        unsafe { packed.put_floats(block, i, 0, &row) };
                        inputs.push(row.iter().map(|&x| f64::from(x)).collect());
                        continue;
                    }
                    let codes: Vec<i8> = (0..columns)
                        .map(|_| match i {
                            0 => 127,
                            1 => -127,
                            _ => (random.below(255) as i32 - 127) as i8,
                        })
                        .collect();
                    let scale = random.numbers(n_groups);
                    let zero = match stored.are_biased() {
                        true => -1,
                        false => i32::from(of_weights.zero()),
                    };
                    let start: Vec<i32> = codes
                        .chunks_exact(group)
                        .map(|codes| -zero * codes.iter().map(|&code| i32::from(code)).sum::<i32>())
                        .collect();
                    // SAFETY: the same as above.
                    unsafe { packed.put_integers(block, i, 0, &codes, &scale, &start) };
                    let value =
                        |(at, &code): (usize, &i8)| f64::from(scale[at / group]) * f64::from(code);
                    inputs.push(codes.iter().enumerate().map(value).collect());
                }
                let mut out = [f32::NAN; BLOCK * ROWS];
                let weight_bytes = weights.bytes().as_ptr();
                // SAFETY: the machine has the instructions, and the vectors have the sizes of the block.
                unsafe {
                    if group == 0 {
                        let is_bf16 = format == WeightFormat::Bf16;
                        let (inputs, out) = (packed.floats(block), out.as_mut_ptr());
                        let tile =
                            FloatTile { weights: weight_bytes, is_bf16, columns, inputs, n, out };
                        with_simd!(instructions, |S| S::enter(tile));
                    } else {
                        let tile = IntegerTile {
                            weights: weight_bytes,
                            codes: of_weights,
                            stored,
                            n_groups,
                            group,
                            inputs: packed.integers(block),
                            scales: scales.as_ptr(),
                            starts: starts.as_ptr(),
                            n,
                            out: out.as_mut_ptr(),
                        };
                        tile.run(dot);
                    }
                }
                for (i, x) in inputs.iter().enumerate() {
                    for row in 0..ROWS {
                        let terms = weights.row(0, row).iter().zip(x);
                        let products = terms.map(|(&weight, x)| f64::from(weight) * x);
                        let (sum, size) = products
                            .fold((0.0, 0.0), |(sum, size): (f64, f64), x| {
                                (sum + x, size + x.abs())
                            });
                        let found = f64::from(out[i * ROWS + row]);
                        let what = format!("{format:?} {dot:?} {n} {i} {row}: {found} {sum}");
                        assert!((found - sum).abs() <= 1e-6 * size, "{what}");
                    }
                }
            }
        }
    }
}

#[test]
fn numbers_in_8_bits() {
    let mut random = Random::new(6);
    let format = WeightFormat::Int8 { group: 32, scales: Scales::Bf16 };
    for instructions in Instructions::available() {
        for size in [1.0, 1e-20, 1e-31, 1e30, 0.0] {
            let x: Vec<f32> = random.numbers(32).iter().map(|x| x * size).collect();
            let (mut codes, mut scale, mut sum) = ([0i8; 32], 0.0, 0);
            let quantize =
                Quantize { from: &x, codes: &mut codes, scale: &mut scale, sum: &mut sum };
            // SAFETY: the machine has the instructions.
            with_simd!(instructions, |S| unsafe { S::enter(quantize) });
            assert_eq!(sum, codes.iter().map(|&code| i32::from(code)).sum::<i32>());
            let wide: Vec<f64> = x.iter().map(|&x| f64::from(x)).collect();
            let most = wide.iter().fold(0.0f64, |most, x| most.max(x.abs()));
            for (code, expected) in codes.iter().zip(rounded(&wide, format)) {
                let found = f64::from(scale) * f64::from(*code);
                // Ties may be rounded in either direction, and tiny numbers become zeros.
                let step = if most < 1e-30 { most } else { most / 127.0 * 1.001 };
                assert!((found - expected).abs() <= step, "{size}: {found} {expected}");
            }
            if most > 1e-30 {
                assert!(codes.iter().any(|code| code.abs() == 127));
            }
        }
    }
}
