//! Random weights. Simple loops compute their products in float64.

use half::{bf16, f16};

use crate::attention::synthetic::Random;
use crate::attention::tests::reference::small_float;
use crate::linear::scales::{Scales, NESTED};
use crate::linear::weights::{Codes, WeightFormat, ROWS};

/// The weights of some matrices: packed, and as numbers `[matrices, rows, columns]`, with rows in the packed
/// order.
pub struct Weights {
    memory: Vec<u64>,
    size: usize,
    values: Vec<f32>,
    rows: usize,
    columns: usize,
}

impl Weights {
    pub fn new(
        format: WeightFormat,
        n: usize,
        rows: usize,
        columns: usize,
        random: &mut Random,
    ) -> Self {
        let tiles = rows.div_ceil(ROWS);
        let mut values = vec![0.0; n * tiles * ROWS * columns];
        let mut bytes = Vec::new();
        for tile in values.chunks_exact_mut(ROWS * columns) {
            match format.in_groups() {
                None => {
                    for column in 0..columns {
                        for row in 0..ROWS {
                            let value = bf16::from_f32(random.number());
                            tile[row * columns + column] = value.to_f32();
                            match format {
                                WeightFormat::F32 => bytes.extend(value.to_f32().to_le_bytes()),
                                _ => bytes.extend(value.to_le_bytes()),
                            }
                        }
                    }
                }
                Some((codes, group, scales)) => {
                    pack(tile, columns, group, codes, scales, &mut bytes, random);
                }
            }
        }
        let mut memory = vec![0u64; bytes.len().div_ceil(8)];
        // SAFETY: the memory has as many bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), memory.as_mut_ptr().cast(), bytes.len());
        }
        Self { memory, size: bytes.len(), values, rows: tiles * ROWS, columns }
    }

    pub fn bytes(&self) -> &[u8] {
        // SAFETY: the memory has as many bytes.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast(), self.size) }
    }

    /// Returns the number of rows of a matrix, rounded up to whole tiles.
    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn row(&self, matrix: usize, row: usize) -> &[f32] {
        &self.values[(matrix * self.rows + row) * self.columns..][..self.columns]
    }
}

/// Appends a tile of random codes, and records their values.
fn pack(
    tile: &mut [f32],
    columns: usize,
    group: usize,
    of_weights: Codes,
    stored: Scales,
    bytes: &mut Vec<u8>,
    random: &mut Random,
) {
    let bits = if of_weights == Codes::Int8 { 8 } else { 4 };
    let half = 1i32 << (bits - 1);
    let offset = if stored.are_biased() { 0 } else { half };
    let mut factors = Vec::new();
    for (at, first) in (0..columns).step_by(group).enumerate() {
        if stored == Scales::Nested && at % NESTED == 0 {
            factors = vec![halves(random, 1.0 / (256 * half) as f32), halves(random, 1.0 / 256.0)];
            bytes.extend(factors.iter().flatten().flat_map(|x| x.to_le_bytes()));
        }
        let (scales, biases) = numbers_of(stored, &factors, half as f32, bytes, random);
        let mut codes = vec![[0u8; ROWS]; group];
        for (at, codes) in codes.iter_mut().enumerate() {
            for (row, code) in codes.iter_mut().enumerate() {
                // Two rows have the codes of the largest and of the smallest number.
                *code = match (row, of_weights) {
                    (0, Codes::Fp4) => 7,
                    (0, _) => (1usize << bits).wrapping_sub(1) as u8,
                    (1, Codes::Fp4) => 15,
                    (1, _) => 0,
                    _ => random.below(1 << bits) as u8,
                };
                let number = match of_weights {
                    Codes::Fp4 => 2.0 * small_float((*code).into(), 2, 1) as f32,
                    _ => (i32::from(*code) - offset) as f32,
                };
                tile[row * columns + first + at] = scales[row] * number + biases[row];
            }
        }
        for eight in codes.chunks_exact(8) {
            let (low, high) = eight.split_at(4);
            let quads = |half: &[[u8; ROWS]]| -> Vec<u8> {
                (0..4 * ROWS).map(|at| half[at % 4][at / 4]).collect()
            };
            let (low, high) = (quads(low), quads(high));
            match bits {
                4 => bytes.extend(low.iter().zip(high).map(|(low, high)| low | high << 4)),
                _ => bytes.extend([low, high].concat()),
            }
        }
    }
}

fn halves(random: &mut Random, most: f32) -> Vec<f16> {
    (0..ROWS).map(|_| f16::from_f32(random.number() * most)).collect()
}

/// Appends the scales and biases of a group. Returns their values.
fn numbers_of(
    stored: Scales,
    factors: &[Vec<f16>],
    half: f32,
    bytes: &mut Vec<u8>,
    random: &mut Random,
) -> (Vec<f32>, Vec<f32>) {
    let mut made = [vec![0.0; ROWS], vec![-0.0; ROWS]];
    let kinds = if stored.are_biased() { 2 } else { 1 };
    for (kind, made) in made.iter_mut().enumerate().take(kinds) {
        let most = if kind == 0 { 1.0 / half } else { 1.0 };
        for (row, made) in made.iter_mut().enumerate() {
            let value = random.number() * most;
            match stored {
                Scales::Bf16 | Scales::Bf16Biased => {
                    bytes.extend(bf16::from_f32(value).to_le_bytes());
                    *made = bf16::from_f32(value).to_f32();
                }
                Scales::F16 | Scales::F16Biased => {
                    bytes.extend(f16::from_f32(value).to_le_bytes());
                    *made = f16::from_f32(value).to_f32();
                }
                Scales::F32 | Scales::F32Biased => {
                    bytes.extend(value.to_le_bytes());
                    *made = value;
                }
                Scales::Nested => {
                    let byte = random.below(256) as u8;
                    bytes.push(byte);
                    *made = factors[kind][row].to_f32() * f32::from(byte);
                }
            }
        }
    }
    let [scales, biases] = made;
    (scales, biases)
}

/// Returns numbers that are rounded to 8 bits in groups.
pub fn rounded(x: &[f64], format: WeightFormat) -> Vec<f64> {
    let Some(group) = format.group() else { return x.to_vec() };
    let mut made = Vec::new();
    for x in x.chunks_exact(group) {
        let most = x.iter().fold(0.0f64, |most, x| most.max(x.abs()));
        made.extend(x.iter().map(|x| match most {
            0.0 => 0.0,
            _ => (x * 127.0 / most).round_ties_even() * most / 127.0,
        }));
    }
    made
}

/// Returns a product in float64.
pub fn dot(weights: &[f32], x: &[f64]) -> f64 {
    weights.iter().zip(x).map(|(weight, x)| f64::from(*weight) * x).sum()
}
