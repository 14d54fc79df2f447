//! Attention from first principles, in float64, one query at a time.

use etkv::bookkeeping::Slots;
use etkv::pool::pool_for;
use etkv::KvFormat;
use half::{bf16, f16};
use mlx_rs::{Array, Dtype};

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

/// `[1, heads, rows, dim]`, as a program passes it.
pub fn array(rows: &[Row]) -> Array {
    let (heads, dim) = (rows[0].len(), rows[0][0].len());
    let values: Vec<f32> = (0..heads)
        .flat_map(|head| rows.iter().flat_map(move |row| row[head].iter().copied()))
        .collect();
    Array::from_slice(&values, &[1, heads as i32, rows.len() as i32, dim as i32])
}

/// Row `index` of an evaluated `[1, heads, rows, dim]`.
pub fn row(array: &Array, index: usize) -> Row {
    let shape = array.shape().to_vec();
    let (heads, rows, dim) = (shape[1] as usize, shape[2] as usize, shape[3] as usize);
    let flat = array.contiguous().unwrap();
    let values = flat.as_slice::<f32>();
    (0..heads).map(|head| values[(head * rows + index) * dim..][..dim].to_vec()).collect()
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

/// What storing rows in `format` leaves of them: for formats that quantize what a
/// pool gives back, which the pools' own tests compare with their bounds.
pub fn stored(rows: &[Row], format: KvFormat) -> Rows {
    if format.is_float() || rows.is_empty() {
        return rows.iter().map(|row| rounded(row, format)).collect();
    }
    let (heads, dim) = (rows[0].len() as i32, rows[0][0].len() as i32);
    let mut pool = pool_for(format, heads, dim).unwrap();
    let n = rows.len() as i32;
    pool.grow(n).unwrap();
    pool.write(&Slots::Run(0..n), &array(rows)).unwrap();
    let read = pool.read(0, n).unwrap().dequantized(Dtype::Float32).unwrap();
    read.eval().unwrap();
    (0..rows.len()).map(|index| row(&read, index)).collect()
}

fn rounded(row: &Row, format: KvFormat) -> Row {
    let round = |&value: &f32| match format {
        KvFormat::F16 => f16::from_f32(value).to_f32(),
        KvFormat::Bf16 => bf16::from_f32(value).to_f32(),
        _ => value,
    };
    row.iter().map(|values| values.iter().map(round).collect()).collect()
}

/// One query's attention over the rows that it sees. Query heads share KV heads
/// evenly, neighbours together.
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
