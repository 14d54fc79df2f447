//! Measures products in the shapes of Llama-3.2-1B and SmolLM2-135M, with weights that are not in the
//! processor's caches.
//!
//! `cargo run --release -p etkv-cpu --example linear [-- <threads>]`. For one token it prints the bytes of
//! weights per second, and those of a plain read on the same threads. For a prompt it prints multiplications
//! and additions per second of processor time, on which other load has little effect.

use std::error::Error;
use std::hint::black_box;

use etkv_cpu::attention::synthetic::Random;
use etkv_cpu::linear::{multiply_into, Linear, Product, Scales, WeightFormat, Workspace};
use etkv_cpu::Parallel;
use measure::{seconds, sum, threads, weights};

#[allow(dead_code)] // Another example uses the other items.
mod measure;

/// The columns, and the rows of each matrix of a call.
const SHAPES: [(usize, &[usize]); 5] = [
    (2048, &[2048, 512, 512]),
    (2048, &[8192, 8192]),
    (8192, &[2048]),
    (576, &[576, 192, 192]),
    (576, &[1536, 1536]),
];

/// The total bytes of weights that calls use in turn, which exceed the caches.
const SIZE: usize = 256 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let threads = threads()?;
    let formats = [
        ("int4", WeightFormat::Int4 { group: 32, scales: Scales::Bf16 }),
        ("int4 f16", WeightFormat::Int4 { group: 32, scales: Scales::F16 }),
        ("int4 f32", WeightFormat::Int4 { group: 32, scales: Scales::F32 }),
        ("int8", WeightFormat::Int8 { group: 64, scales: Scales::Bf16 }),
        ("fp4", WeightFormat::Fp4 { group: 32 }),
        ("bfloat16", WeightFormat::Bf16),
    ];
    for (name, format) in formats {
        let mut random = Random::new(1);
        let memory = weights(SIZE, &mut random);
        let [read, _] = seconds(
            |_| {
                threads.run(2, &|half| {
                    black_box(sum(&memory[half * SIZE / 2..][..SIZE / 2]));
                });
            },
            8,
        );
        println!("{name}: a plain read of {:.1} GB/s", SIZE as f64 / read / 1e9);
        for (columns, rows) in SHAPES {
            let linear = Linear { columns, format, rows: rows.to_vec() };
            let sizes: Vec<usize> =
                rows.iter().map(|rows| rows / 16 * format.tile_size(columns)).collect();
            let all: usize = sizes.iter().sum();
            let mut workspace = Workspace::default();
            for n_tokens in [1, 4, 16, 512] {
                let x: Vec<f32> = (0..n_tokens * columns)
                    .map(|_| (random.bits() % 2001) as f32 / 1e3 - 1.0)
                    .collect();
                let mut out: Vec<Vec<f32>> =
                    rows.iter().map(|rows| vec![0.0; rows * n_tokens]).collect();
                let call = |number: usize| {
                    let mut at = number % (SIZE / all) * all;
                    let products = out.iter_mut().zip(&sizes).map(|(out, size)| {
                        at += size;
                        Product { weights: &memory[at - size..at], bias: None, out }
                    });
                    let mut products: Vec<Product> = products.collect();
                    let done = multiply_into(&linear, &x, &mut products, &mut workspace, &threads);
                    if let Err(error) = done {
                        eprintln!("{error}");
                    }
                };
                let [time, cpu] = seconds(call, if n_tokens < 32 { 300 } else { 8 });
                let n_rows: usize = rows.iter().sum();
                println!(
                    "{name:9}{columns:5} x {n_rows:5} {n_tokens:4} tokens: {:9.3} ms {:7.1} GB/s {:7.1} G products/s",
                    time * 1e3,
                    all as f64 / time / 1e9,
                    (n_tokens * n_rows * columns) as f64 / cpu / 1e9
                );
            }
        }
    }
    Ok(())
}
