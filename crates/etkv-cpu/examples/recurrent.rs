//! Measures the kernels of recurrent layers, with anchors and rows that are not in the first-level caches.
//!
//! `cargo run --release -p etkv-cpu --example recurrent [-- <threads>]`. For a decode step it prints the time
//! of one layer, and the time of a plain read of the same bytes on the same threads. For a prompt it prints
//! the speed in GFLOP/s. Calls use 18 layers in turn.

use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use etkv_core::bookkeeping::{AnchorSource, Chain, RecurrentPlan, RowSource, Slots};
use etkv_core::{KvFormat, RecurrentSpec};
use etkv_cpu::attention::synthetic::{view, Random};
use etkv_cpu::recurrent::{
    convolve_into, scan_into, Activation, ConvolveInputs, Scan, ScanInputs, Workspace,
};
use etkv_cpu::{Dtype, Parallel, Tensor, View};
use measure::{median, sum, Threads};

#[allow(dead_code)] // Other examples use the other items.
mod measure;

const LAYERS: usize = 18;
/// The slots of rows and of anchors, which are more than a sequence uses.
const SLOTS: [usize; 2] = [160, 3];

/// A step of `n` tokens after `before` rows of a block.
fn plan(n: usize, before: usize) -> RecurrentPlan {
    let position = 640 + before;
    let folds = (position + n - 1) / 64 - 10;
    RecurrentPlan {
        chains: vec![Chain {
            tokens: 0..n,
            position: position as i32,
            // The slots are in order, but do not begin at 0.
            rows: (0..before).map(|at| RowSource::Slot(3 + at as i32)).collect(),
            anchor: AnchorSource::Slot(1),
            base: 640,
            folds: 0..folds,
        }],
        folds: (0..folds).map(|fold| (fold + 2 >= folds).then_some(fold as i32)).collect(),
        stored: (n.saturating_sub(128)..n).collect(),
        rows: Slots::Run(0..n.min(128) as i32),
        anchors: Slots::Run(0..folds.min(2) as i32),
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let filter = std::env::args().nth(2).unwrap_or_default();
    let n_threads = std::env::args().nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).use_current_thread();
    let threads = Threads(pool.build()?);
    println!("{} threads", threads.threads());
    let mut random = Random::new(1);
    let mut workspace = Workspace::new();
    for (name, k_heads, heads, k_dim, v_dim, channel_decay, delta) in [
        ("Qwen3.5-0.8B", 16, 16, 128, 128, false, true),
        ("Qwen3.5-9B", 16, 32, 128, 128, false, true),
        ("Kimi Linear", 32, 32, 128, 128, true, true),
        ("Mamba-2", 8, 64, 128, 64, false, false),
    ] {
        if !name.contains(&filter) {
            continue;
        }
        let scan = Scan { k_heads, heads, k_dim, v_dim, channel_decay, scale: 0.1 };
        let decay = if channel_decay { k_dim } else { 1 };
        let mut rows = |heads: usize, dim: usize, slots: usize| {
            (0..LAYERS)
                .map(|_| view(KvFormat::F32, heads, dim, slots, &mut random))
                .collect::<Result<Vec<View>, _>>()
        };
        let keys = rows(k_heads, k_dim, SLOTS[0])?;
        let updates = rows(heads, v_dim + decay, SLOTS[0])?;
        let anchors = rows(heads, k_dim * v_dim, SLOTS[1])?;
        for (n, before) in
            [(1, 0), (1, 32), (1, 63), (1, 64), (4, 32), (64, 0), (512, 0), (512, 40)]
        {
            let shape = |heads: usize, dim: usize| [1, heads as i32, n as i32, dim as i32];
            let mut tensor = |heads: usize, dim: usize, low: f32| {
                let values =
                    (0..heads * n * dim).map(|_| low + 0.1 * random.number()).collect::<Vec<_>>();
                Tensor::new(shape(heads, dim), values)
            };
            let (q, k) = (tensor(k_heads, k_dim, 0.0)?, tensor(k_heads, k_dim, 0.0)?);
            let (v, g) = (tensor(heads, v_dim, 0.0)?, tensor(heads, decay, -0.1)?);
            let beta = tensor(heads, 1, 0.5)?;
            let inputs = ScanInputs { q: &q, k: &k, v: &v, g: &g, beta: delta.then_some(&beta) };
            let plan = Arc::new(plan(n, before));
            let mut out = vec![0f32; heads * n * v_dim];
            let (mut times, mut reads) = (Vec::new(), Vec::new());
            if std::env::args().nth(3).is_some_and(|only| only != n.to_string()) {
                continue;
            }
            let rounds = if n > 64 { 40 } else { 20 * LAYERS };
            for round in 0..rounds {
                let layer = round % LAYERS;
                let spec = RecurrentSpec {
                    rows: [Some(keys[layer].clone()), Some(updates[layer].clone())],
                    anchors: Some(anchors[layer].clone()),
                    plan: plan.clone(),
                };
                let start = out.as_mut_ptr().cast();
                let begin = Instant::now();
                // SAFETY: the vector has room for the outputs, and the rows are dropped here.
                unsafe {
                    scan_into(&scan, &inputs, &spec, start, Dtype::F32, &mut workspace, &threads)?
                };
                times.push(begin.elapsed().as_secs_f64());
                black_box(&out);
            }
            for round in 0..rounds {
                let layer = round % LAYERS;
                let begin = Instant::now();
                threads.run(16, &|i| {
                    for head in i * heads / 16..(i + 1) * heads / 16 {
                        black_box(sum(anchors[layer].row(0, 1, head).unwrap_or_default()));
                    }
                    for slot in i * before / 16..(i + 1) * before / 16 {
                        for head in 0..k_heads {
                            black_box(sum(keys[layer].row(0, 3 + slot, head).unwrap_or_default()));
                        }
                        for head in 0..heads {
                            black_box(sum(updates[layer]
                                .row(0, 3 + slot, head)
                                .unwrap_or_default()));
                        }
                    }
                });
                reads.push(begin.elapsed().as_secs_f64());
            }
            let ([time, least], [read, least_read]) = (median(&mut times), median(&mut reads));
            // The operations of each vector are products with the state and with half a block of rows. The
            // operations of the folds are added.
            let vectors = if delta { 2 } else { 1 };
            let pairs: usize = (0..n).map(|t| (before + t) % 64).sum();
            let each = vectors * (n * k_dim * v_dim + pairs * (k_dim + v_dim));
            let flops = 2 * heads * (each + plan.folds.len() * 64 * k_dim * v_dim);
            println!(
                "{name:13} {n:3} tokens after {before:2} rows: {:8.1} us, least {:8.1}, read {:6.1} us, \
                 least {:6.1}, ratio {:5.2}, least {:5.2}, {:6.1} GFLOP/s",
                time * 1e6,
                least * 1e6,
                read * 1e6,
                least_read * 1e6,
                time / read,
                least / least_read,
                flops as f64 / least / 1e9
            );
        }
    }
    if !"convolution".contains(&filter) {
        return Ok(());
    }
    convolutions(&threads, &mut workspace, &mut random)
}

fn convolutions(
    threads: &Threads,
    workspace: &mut Workspace,
    random: &mut Random,
) -> Result<(), Box<dyn Error>> {
    let (channels, width) = (8192, 4);
    let stored = view(KvFormat::F32, 1, channels, SLOTS[0], random)?;
    let shape = [1, 1, channels as i32, width as i32];
    let weight = Tensor::new(shape, random.numbers(channels * width))?;
    for n in [1usize, 4, 512] {
        let x = Tensor::new([1, channels as i32, n as i32, 1], random.numbers(channels * n))?;
        let inputs =
            ConvolveInputs { x: &x, weight: &weight, bias: None, activation: Activation::Silu };
        let spec = RecurrentSpec {
            rows: [Some(stored.clone()), None],
            anchors: None,
            plan: Arc::new(plan(n, 32)),
        };
        let mut out = vec![0f32; channels * n];
        let mut times = Vec::new();
        for _ in 0..60 {
            let begin = Instant::now();
            // SAFETY: the vector has room for the outputs, and the columns are dropped here.
            unsafe {
                convolve_into(
                    &inputs,
                    &spec,
                    out.as_mut_ptr().cast(),
                    Dtype::F32,
                    workspace,
                    threads,
                )?;
            }
            times.push(begin.elapsed().as_secs_f64());
        }
        let [time, least] = median(&mut times);
        println!(
            "convolution of {channels} channels, width {width}, {n:3} tokens: {:8.1} us, least {:8.1}",
            time * 1e6,
            least * 1e6
        );
    }
    Ok(())
}
