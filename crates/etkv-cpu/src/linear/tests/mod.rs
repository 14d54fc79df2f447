//! Products and embeddings of random sizes, formats and thread counts, compared with simple loops in float64.

pub(crate) mod reference;
mod refusals;
mod tiles;

use super::embedding::{embed_into, Embedding};
use super::run::{multiply_with, Linear, Product};
use super::scales::Scales;
use super::weights::WeightFormat;
use super::workspace::Workspace;
use crate::attention::synthetic::{Random, Threads};
use crate::simd::Instructions;
use reference::{dot, rounded, Weights};

pub(crate) const FORMATS: [WeightFormat; 15] = [
    WeightFormat::F32,
    WeightFormat::Bf16,
    WeightFormat::Int8 { group: 32, scales: Scales::Bf16 },
    WeightFormat::Int4 { group: 32, scales: Scales::Bf16 },
    WeightFormat::Int4 { group: 64, scales: Scales::Bf16 },
    WeightFormat::Int4 { group: 32, scales: Scales::F16 },
    WeightFormat::Int8 { group: 64, scales: Scales::F32 },
    WeightFormat::Int4 { group: 32, scales: Scales::F16Biased },
    WeightFormat::Int4 { group: 64, scales: Scales::Bf16Biased },
    WeightFormat::Int8 { group: 32, scales: Scales::Bf16Biased },
    WeightFormat::Int8 { group: 64, scales: Scales::F32Biased },
    WeightFormat::Int4 { group: 32, scales: Scales::Nested },
    WeightFormat::Int8 { group: 32, scales: Scales::Nested },
    WeightFormat::Fp4 { group: 32 },
    WeightFormat::Fp4 { group: 64 },
];

/// A call with random weights.
struct Call {
    linear: Linear,
    weights: Vec<Weights>,
    biases: Vec<Option<Vec<f32>>>,
}

impl Call {
    fn new(linear: Linear, random: &mut Random) -> Self {
        let Linear { columns, format, ref rows } = linear;
        let weights =
            rows.iter().map(|&rows| Weights::new(format, 1, rows, columns, random)).collect();
        let biases = rows.iter().map(|&rows| (rows % 2 == 0).then(|| random.numbers(rows)));
        let biases = biases.collect();
        Self { linear, weights, biases }
    }

    fn run(&self, instructions: Instructions, x: &[f32], threads: usize) -> Vec<Vec<f32>> {
        let n_tokens = x.len() / self.linear.columns;
        let mut out: Vec<Vec<f32>> =
            self.linear.rows.iter().map(|rows| vec![f32::NAN; n_tokens * rows]).collect();
        let parts = self.weights.iter().zip(&self.biases).zip(&mut out);
        let mut products: Vec<Product> = parts
            .map(|((weights, bias), out)| Product {
                weights: weights.bytes(),
                bias: bias.as_deref(),
                out,
            })
            .collect();
        let (mut workspace, threads) = (Workspace::default(), Threads(threads));
        multiply_with(instructions, &self.linear, x, &mut products, &mut workspace, &threads)
            .unwrap();
        out
    }

    /// Returns each output and the sum of the magnitudes of its terms.
    fn expected(&self, x: &[f32]) -> Vec<Vec<[f64; 2]>> {
        let Linear { columns, format, ref rows } = self.linear;
        let inputs: Vec<Vec<f64>> = x
            .chunks_exact(columns)
            .map(|x| rounded(&x.iter().map(|&x| f64::from(x)).collect::<Vec<_>>(), format))
            .collect();
        let of = |at: usize, rows: usize| {
            let (weights, bias) = (&self.weights[at], &self.biases[at]);
            inputs
                .iter()
                .flat_map(|x| (0..rows).map(move |row| (x, row)))
                .map(|(x, row)| {
                    let bias = bias.as_ref().map_or(0.0, |bias| f64::from(bias[row]));
                    let sizes: Vec<f64> = x.iter().map(|x| x.abs()).collect();
                    let magnitudes: Vec<f32> =
                        weights.row(0, row).iter().map(|x| x.abs()).collect();
                    let size = dot(&magnitudes, &sizes) + bias.abs();
                    [dot(weights.row(0, row), x) + bias, size]
                })
                .collect()
        };
        rows.iter().enumerate().map(|(at, &rows)| of(at, rows)).collect()
    }
}

#[test]
fn outputs_are_those_of_plain_loops() {
    let mut random = Random::new(11);
    for case in 0..150 {
        let format = FORMATS[case % FORMATS.len()];
        let unit = format.unit();
        let columns = unit * (1 + random.below(if unit == 1 { 130 } else { 288 / unit }));
        let rows = (0..1 + random.below(3)).map(|_| 1 + random.below(150)).collect();
        let call = Call::new(Linear { columns, format, rows }, &mut random);
        let n_tokens = if case % 4 == 0 { 1 } else { 1 + random.below(40) };
        let x = random.numbers(n_tokens * columns);
        let expected = call.expected(&x);
        for instructions in Instructions::available() {
            let found = call.run(instructions, &x, 1 + case % 3);
            for (found, expected) in found.iter().zip(&expected) {
                assert_eq!(found.len(), expected.len());
                for (&found, [value, size]) in found.iter().zip(expected) {
                    // When inputs are rounded to 8 bits, a tie may be rounded in the other direction than in
                    // the reference.
                    let most = if format.group().is_some() { 5e-3 } else { 2e-6 };
                    let error = (f64::from(found) - value).abs();
                    let what = format!("case {case}, {instructions:?}, {format:?}");
                    assert!(error <= most * size, "{what}: {found}, not {value}");
                }
            }
        }
    }
}

#[test]
fn an_output_depends_on_its_input_alone() {
    let mut random = Random::new(12);
    for format in FORMATS {
        let linear = Linear { columns: 256, format, rows: vec![300, 48] };
        let call = Call::new(linear, &mut random);
        let x = random.numbers(70 * 256);
        for instructions in Instructions::available() {
            let all = call.run(instructions, &x, 4);
            for cut in [1, 3, 64] {
                let mut cuts = vec![Vec::new(); 2];
                for x in x.chunks(cut * 256) {
                    let made = call.run(instructions, x, 1 + cut % 3);
                    cuts.iter_mut().zip(made).for_each(|(cuts, made)| cuts.extend(made));
                }
                let bits = |all: &[Vec<f32>]| -> Vec<u32> {
                    all.iter().flatten().map(|x| x.to_bits()).collect()
                };
                assert!(bits(&cuts) == bits(&all), "{format:?}, {instructions:?}, steps of {cut}");
            }
        }
    }
}

#[test]
fn what_is_not_finite_stays_in_its_row() {
    let mut random = Random::new(13);
    for format in FORMATS {
        let call = Call::new(Linear { columns: 256, format, rows: vec![20] }, &mut random);
        let mut x = random.numbers(20 * 256);
        let whole = call.run(Instructions::best(), &x, 2);
        for (token, number) in [(3, f32::NAN), (7, f32::INFINITY)] {
            x[token * 256 + 9] = number;
        }
        let found = call.run(Instructions::best(), &x, 2);
        for (token, (found, whole)) in found[0].chunks(20).zip(whole[0].chunks(20)).enumerate() {
            match token {
                3 | 7 => assert!(found.iter().all(|x| !x.is_finite()), "{format:?}"),
                _ => assert_eq!(found, whole, "{format:?}"),
            }
        }
    }
}

#[test]
fn rows_of_embeddings_are_the_weights() {
    let mut random = Random::new(14);
    for format in FORMATS {
        let (rows, width) = (75, 512);
        let weights = Weights::new(format, 1, rows, width, &mut random);
        let embedding = Embedding { rows, width, format };
        for n in [0, 1, 5, 90] {
            let ids: Vec<i64> = (0..n).map(|_| random.below(rows) as i64).collect();
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            let mut out = vec![f32::NAN; n * width];
            embed_into(&embedding, &bytes, weights.bytes(), &mut out, &Threads(2)).unwrap();
            for (id, row) in ids.iter().zip(out.chunks_exact(width)) {
                assert_eq!(row, weights.row(0, *id as usize), "{format:?}");
            }
        }
    }
}
