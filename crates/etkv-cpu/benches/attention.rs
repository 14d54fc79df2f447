//! Measures attention on the CPU, with keys and values that are not in its caches. "latents" are keys that
//! contain the values, with the sizes of GLM-4.7-Flash. "expanded" are the keys and values that are computed
//! from such latents.
//!
//! `cargo bench -p etkv-cpu --bench attention [-- <part of a name> [<threads> [<rounds>]]]`. Prints the
//! median and the minimum of interleaved rounds in milliseconds, the same for a plain read of the same bytes
//! on the same threads, and the ratio of the two speeds.

use std::hint::black_box;
use std::time::Instant;

use etkv_core::KvFormat;
use etkv_cpu::attention::synthetic::{self, Random};
use etkv_cpu::attention::{attend, MaskRef, Output, Queries, Shape, Workspace};
use etkv_cpu::{Parallel, View};
use measure::{median, Threads};

#[allow(dead_code)] // The examples use the other items.
#[path = "../examples/measure/mod.rs"]
mod measure;

#[derive(Clone, Copy, PartialEq)]
struct Layer {
    name: &'static str,
    heads: usize,
    kv_heads: usize,
    k_dim: usize,
    v_dim: usize,
    /// Whether the values are the first elements of the keys.
    in_keys: bool,
}

/// SmolLM2-135M.
const HEADS: Layer =
    Layer { name: "", heads: 9, kv_heads: 3, k_dim: 64, v_dim: 64, in_keys: false };
const LATENTS: Layer =
    Layer { name: "latents, ", heads: 20, kv_heads: 1, k_dim: 576, v_dim: 512, in_keys: true };
const EXPANDED: Layer =
    Layer { name: "expanded, ", heads: 20, kv_heads: 20, k_dim: 256, v_dim: 256, in_keys: false };
/// After reads of this many other bytes, keys and values are not in the caches any more.
const COLD: usize = 600 << 20;

/// A call, and several copies of its keys and values, which rounds use in turn.
struct Case {
    name: String,
    layer: Layer,
    n_tokens: usize,
    views: std::rc::Rc<Vec<(View, View)>>,
    bytes: usize,
    queries: Vec<f32>,
    out: Vec<f32>,
    times: Vec<f64>,
    reads: Vec<f64>,
}

impl Case {
    fn call(
        &mut self,
        threads: &Threads,
        work: &mut Workspace,
        round: usize,
    ) -> Result<(), etkv_core::Error> {
        let (k, v) = &self.views[round % self.views.len()];
        let Layer { heads, k_dim, v_dim, .. } = self.layer;
        let shape = Shape::contiguous(heads, self.n_tokens, k_dim);
        let (Some(queries), Some(mut out)) = (
            Queries::of_f32(&self.queries, shape),
            Output::of_f32(&mut self.out, heads, self.n_tokens, v_dim),
        ) else {
            return Ok(());
        };
        let begin = Instant::now();
        attend(work, threads, &queries, k, v, MaskRef::Causal, 0.125, &mut out)?;
        self.times.push(begin.elapsed().as_secs_f64() * 1e3);
        black_box(&self.out);
        Ok(())
    }

    fn read(&mut self, threads: &Threads, bytes: &[u64], round: usize) {
        let words = self.bytes / 8;
        let copies = bytes.len() / words;
        let bytes = &bytes[round % copies * words..][..words];
        let begin = Instant::now();
        let each = words.div_ceil(32);
        threads.run(32, &|i| {
            let part = &bytes[(i * each).min(words)..((i + 1) * each).min(words)];
            // Eight sums, so that reads do not wait for each other.
            let mut sums = [0u64; 8];
            for chunk in part.chunks_exact(8) {
                sums.iter_mut().zip(chunk).for_each(|(sum, x)| *sum = sum.wrapping_add(*x));
            }
            black_box(sums);
        });
        self.reads.push(begin.elapsed().as_secs_f64() * 1e3);
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut args = std::env::args().skip(1).filter(|arg| !arg.starts_with('-'));
    let filter = args.next().unwrap_or_default();
    // rayon uses one thread for each available processor if the number is 0.
    let n_threads = args.next().and_then(|n| n.parse().ok()).unwrap_or(0);
    let pool = rayon::ThreadPoolBuilder::new().num_threads(n_threads).use_current_thread();
    let threads = Threads(pool.build()?);
    let rounds: Option<usize> = args.next().and_then(|n| n.parse().ok());
    let mut work = Workspace::new();
    let bytes = vec![1u64; COLD / 8];
    println!("causal, {} threads", threads.threads());
    println!(
        "{:36} {:>8} {:>8}   {:>8} {:>8}   {:>5} {:>5}  {:>7}",
        "", "ms", "least", "read, ms", "least", "ratio", "least", "GFLOP/s"
    );
    let mut random = Random::new(1);
    let formats = ["f32", "f16", "bf16", "affine8g64", "affine4g64", "mxfp4", "row-int4"];
    for (layer, n_slots, tokens) in [
        (HEADS, 512, &[1, 2, 4, 8, 16][..]),
        (HEADS, 4096, &[1, 2, 4, 8, 16]),
        (HEADS, 16384, &[1, 2, 4, 8, 16]),
        (HEADS, 512, &[512]),
        (HEADS, 2560, &[512]),
        (HEADS, 4096, &[512]),
        (HEADS, 16384, &[512]),
        (LATENTS, 4096, &[1, 2]),
        (LATENTS, 16384, &[1, 2]),
        (LATENTS, 2048, &[512]),
        (EXPANDED, 2048, &[512]),
    ] {
        let Layer { heads, kv_heads, k_dim, v_dim, in_keys, .. } = layer;
        let mut cases = Vec::new();
        for format in formats {
            let format: KvFormat = format.parse()?;
            let of_values = if in_keys { 0 } else { format.row_bytes(v_dim) };
            let bytes = n_slots * kv_heads * (format.row_bytes(k_dim) + of_values);
            let names: Vec<_> = tokens
                .iter()
                .map(|n_tokens| {
                    format!("{}{format}, {n_slots} slots, {n_tokens} tokens", layer.name)
                })
                .collect();
            if !names.iter().any(|name| name.contains(&filter)) {
                continue;
            }
            let copies = if tokens == [512] { 1 } else { COLD.div_ceil(bytes) };
            // All copies have the same rows.
            let made = [k_dim, v_dim]
                .map(|dim| synthetic::view(format, kv_heads, dim, n_slots, &mut random));
            let [k, v] = made;
            let (k, v) = (k?, v?);
            let views = (0..copies)
                .map(|_| {
                    let k = k.deep_copy()?;
                    let v = if in_keys { k.first(v_dim) } else { v.deep_copy()? };
                    Ok((k, v))
                })
                .collect::<Result<Vec<_>, etkv_core::Error>>()?;
            let views = std::rc::Rc::new(views);
            for (name, &n_tokens) in names.into_iter().zip(tokens) {
                let queries = (0..heads * n_tokens * k_dim).map(|_| random.number()).collect();
                cases.push(Case {
                    name,
                    layer,
                    n_tokens,
                    views: views.clone(),
                    bytes,
                    queries,
                    out: vec![0.0; heads * n_tokens * v_dim],
                    times: Vec::new(),
                    reads: Vec::new(),
                });
            }
        }
        cases.retain(|case| case.name.contains(&filter));
        let rounds = rounds.unwrap_or(if tokens == [512] { 9 } else { 31 });
        let mut round = 0;
        for _ in 0..rounds {
            for case in &mut cases {
                // Consecutive calls read different copies.
                round += 1;
                case.call(&threads, &mut work, round)?;
                case.read(&threads, &bytes, round);
            }
        }
        for case in &mut cases {
            let ([time, least], [read, min_read]) =
                (median(&mut case.times), median(&mut case.reads));
            // With a causal mask, each query sees one slot more than the one before it.
            let pairs = case.n_tokens * n_slots - case.n_tokens * (case.n_tokens - 1) / 2;
            let flops = 2.0 * (heads * (k_dim + v_dim) * pairs) as f64;
            println!(
                "{:36} {time:8.4} {least:8.4}   {read:8.4} {min_read:8.4}   {:5.2} {:5.2}  {:7.1}",
                case.name,
                read / time,
                min_read / least,
                flops / least / 1e6
            );
        }
    }
    Ok(())
}
