//! Measures one layer of experts in the shapes of Qwen3-30B-A3B, with weights that are not in the processor's
//! caches.
//!
//! `cargo run --release -p etkv-cpu --example experts [-- <threads>]`. For a decode step it prints the time
//! of a layer, and the time of a plain read of the same bytes on the same threads. For a prompt it prints
//! multiplications and additions per second of processor time, on which other load has little effect. Calls
//! use four layers in turn.

use std::error::Error;
use std::hint::black_box;

use etkv_cpu::attention::synthetic::Random;
use etkv_cpu::experts::{route_into, Activation, Experts, Function, Inputs, Workspace};
use etkv_cpu::linear::{Scales, WeightFormat};
use etkv_cpu::Parallel;
use measure::{seconds, sum, threads, weights};

#[allow(dead_code)] // Another example uses the other items.
mod measure;

const LAYERS: usize = 4;
const K: usize = 8;

fn main() -> Result<(), Box<dyn Error>> {
    let threads = threads()?;
    let formats = [
        ("int4", WeightFormat::Int4 { group: 32, scales: Scales::Bf16 }),
        ("int8", WeightFormat::Int8 { group: 32, scales: Scales::Bf16 }),
        ("bfloat16", WeightFormat::Bf16),
    ];
    for (name, weights_format) in formats {
        let experts = Experts {
            n_experts: if name == "bfloat16" { 32 } else { 128 },
            hidden: 2048,
            intermediate: 768,
            weights: [weights_format; 2],
            activation: Activation {
                function: Function::Silu,
                gated: true,
                alpha: 1.0,
                limit: f32::INFINITY,
                offset: 0.0,
            },
        };
        let mut random = Random::new(1);
        let layers: Vec<[Vec<u8>; 2]> = (0..LAYERS)
            .map(|_| [experts.first_size(), experts.second_size()].map(|n| weights(n, &mut random)))
            .collect();
        let of_expert = (layers[0][0].len() + layers[0][1].len()) / experts.n_experts;
        let mut workspace = Workspace::default();
        for n_tokens in [1, 4, 32, 128, 512] {
            let x: Vec<f32> =
                (0..n_tokens * 2048).map(|_| (random.bits() % 2001) as f32 / 1e3 - 1.0).collect();
            let indices: Vec<u8> = (0..n_tokens * K)
                .flat_map(|_| (random.bits() % experts.n_experts as u64).to_le_bytes())
                .collect();
            let mut other = indices.clone();
            let factors = vec![0.125; n_tokens * K];
            let mut out = vec![0.0; x.len()];
            let calls = if n_tokens == 1 { 200 } else { 12 };
            let [time, cpu] = seconds(
                |number| {
                    // The experts differ from those of the previous call.
                    for (index, &first) in other.chunks_exact_mut(8).zip(indices.iter().step_by(8))
                    {
                        let expert =
                            (u64::from(first) + number as u64 * 7) % experts.n_experts as u64;
                        index.copy_from_slice(&expert.to_le_bytes());
                    }
                    let [first, second] = &layers[number % LAYERS];
                    let inputs = Inputs {
                        x: &x,
                        k: K,
                        experts: &other,
                        routing_weights: &factors,
                        first,
                        second,
                        first_bias: None,
                        second_bias: None,
                    };
                    if let Err(error) =
                        route_into(&experts, &inputs, &mut out, &mut workspace, &threads)
                    {
                        eprintln!("{error}");
                    }
                    black_box(&out);
                },
                calls,
            );
            let products = (n_tokens * K * 3 * 2048 * 768) as f64;
            println!(
                "{name:9}{n_tokens:4} tokens: {:9.3} ms, {:7.1} G products for a second of one core",
                time * 1e3,
                products / cpu / 1e9
            );
        }
        let [read, _] = seconds(
            |number| {
                let size = of_expert * K / 2;
                threads.run(2, &|half| {
                    let weights = &layers[number % LAYERS][0];
                    let at = (number * 7919 * 4096 + half * size) % (weights.len() - size);
                    black_box(sum(&weights[at..at + size]));
                });
            },
            200,
        );
        println!("{name:9}a read of the bytes of one token: {:9.3} ms", read * 1e3);
    }
    Ok(())
}
