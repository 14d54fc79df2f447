//! Attention from first principles, in float64, one query at a time.

use etkv_core::{KvFormat, LayerConfig, LayerPolicy};
use half::{bf16, f16};

use super::Rng;

/// A row of every head: `row[head][dim]`.
pub type Row = Vec<Vec<f32>>;

/// Rows by position.
pub type Rows = Vec<Row>;

pub fn random_rows(rng: &mut Rng, n: usize, heads: usize, dim: usize) -> Rows {
    let mut number = || (rng.unit() * 4.0 - 2.0) as f32;
    let mut row = || (0..heads).map(|_| (0..dim).map(|_| number()).collect()).collect();
    (0..n).map(|_| row()).collect()
}

/// Returns the first `elements` elements of each row: the values of a layer whose values are in its keys.
pub fn first(rows: &[Row], elements: i32) -> Rows {
    let cut = |values: &Vec<f32>| values[..elements as usize].to_vec();
    rows.iter().map(|heads| heads.iter().map(cut).collect()).collect()
}

/// Returns a layer of random policy, whose values may be in its keys. Its rows fit every format.
pub fn random_layer(rng: &mut Rng) -> LayerConfig {
    let layer = LayerConfig {
        n_kv_heads: rng.pick(&[1, 2, 4]),
        k_head_dim: rng.pick(&[64, 128]),
        v_head_dim: 64,
        policy: match rng.below(3) {
            0 => LayerPolicy::Full,
            1 => LayerPolicy::Chunk { chunk: rng.pick(&[1, 5, 16]) },
            _ => LayerPolicy::Window { window: rng.pick(&[1, 4, 16]), sinks: rng.pick(&[0, 3]) },
        },
        values_in_keys: false,
    };
    maybe_in_keys(rng, layer)
}

/// Returns the layer, or one like it whose values are in its keys.
pub fn maybe_in_keys(rng: &mut Rng, layer: LayerConfig) -> LayerConfig {
    if rng.chance(0.6) {
        return layer;
    }
    let v_head_dim = 1 + rng.below(layer.k_head_dim as usize) as i32;
    LayerConfig { v_head_dim, values_in_keys: true, ..layer }
}

/// Makes the format of values equal to that of keys, if no layer stores values.
pub fn match_formats(layers: &[LayerConfig], formats: &mut [KvFormat; 2]) {
    if !layers.is_empty() && layers.iter().all(|layer| layer.values_in_keys) {
        formats[1] = formats[0];
    }
}

/// A format of every kind and size.
pub const FORMATS: [&str; 14] = [
    "f32",
    "f16",
    "bf16",
    "affine8g64",
    "affine6g32",
    "affine5g32",
    "affine4g64",
    "affine3g32",
    "affine2g64",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "row-int4",
    "row-fp4",
];

/// Returns rows rounded to a float format.
pub fn rounded(rows: &[Row], format: KvFormat) -> Rows {
    let row = |values: &Vec<f32>| values.iter().map(|&value| round(value, format)).collect();
    rows.iter().map(|heads| heads.iter().map(row).collect()).collect()
}

/// Rounds a number to a float format. Other formats do not change it.
pub fn round(value: f32, format: KvFormat) -> f32 {
    match format {
        KvFormat::F16 => f16::from_f32(value).to_f32(),
        KvFormat::Bf16 => bf16::from_f32(value).to_f32(),
        _ => value,
    }
}

/// Returns one query's attention over the rows that it sees. Adjacent query heads share a KV head, in groups of equal
/// size.
pub fn attention(query: &Row, keys: &[Row], values: &[Row], scale: f32) -> Row {
    let share = query.len() / keys[0].len();
    query
        .iter()
        .enumerate()
        .map(|(head, q)| {
            let kv_head = head / share;
            let scores: Vec<f64> =
                keys.iter().map(|key| f64::from(scale) * dot(q, &key[kv_head])).collect();
            let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
            let total: f64 = weights.iter().sum();
            (0..values[0][kv_head].len())
                .map(|dim| {
                    let sum: f64 = weights
                        .iter()
                        .zip(values)
                        .map(|(weight, value)| weight * f64::from(value[kv_head][dim]))
                        .sum();
                    (sum / total) as f32
                })
                .collect()
        })
        .collect()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(&a, &b)| f64::from(a) * f64::from(b)).sum()
}

pub fn assert_close(found: &Row, expected: &Row, tolerance: f32) {
    for (head, (found, expected)) in found.iter().zip(expected).enumerate() {
        for (dim, (a, b)) in found.iter().zip(expected).enumerate() {
            assert!(
                (a - b).abs() <= tolerance * (1.0 + b.abs()),
                "head {head}, element {dim}: {a}, expected {b}"
            );
        }
    }
}
