//! Measures attention of 1 to 64 queries on a GPU, with etkv's kernel and with MLX. A measurement runs 16 calls, each
//! of which reads the result of the previous call, as layers do. Each measurement has a new length.
//!
//! With the argument `kernel`, only the kernel is measured. With `differences`, the output is the largest difference
//! from a result in float32, as a share of the largest value. Set `MLX_ENABLE_TF32=0` for `differences`.

use std::time::Instant;

use etkv::{attend_rows, Mask, Result};
use mlx_rs::ops::indexing::IndexOp;
use mlx_rs::{Array, Dtype};

const LAYERS: usize = 16;
const HEADS: i32 = 32;
const KV_HEADS: i32 = 8;
const QUERIES: [i32; 7] = [1, 2, 4, 8, 16, 32, 64];
const LENGTHS: [i32; 4] = [300, 1500, 4096, 32_768];
const ROUNDS: i32 = 9;
const WARM: i32 = 2;

/// The number of rows of the pool: more than any step reads.
struct Pool {
    k: Array,
    v: Array,
}

fn noise(shape: &[i32]) -> Result<Array> {
    let x = mlx_rs::random::normal::<f32>(shape, None, None, None)?.as_dtype(Dtype::Bfloat16)?;
    x.eval()?;
    Ok(x)
}

impl Pool {
    fn new(n: i32, dim: i32) -> Result<Self> {
        let shape = [1, KV_HEADS, n + 64, dim];
        Ok(Self { k: noise(&shape)?, v: noise(&shape)? })
    }

    fn first(&self, n: i32) -> [Array; 2] {
        [&self.k, &self.v].map(|rows| rows.index((.., .., ..n, ..)))
    }
}

/// Returns the median milliseconds of one call, or `None` if there is no kernel.
fn time(
    q: &Array,
    pool: &Pool,
    n: i32,
    mask: &dyn Fn(i32) -> Mask,
    ours: bool,
) -> Result<Option<f64>> {
    if !ours && is_asked_for("kernel") {
        return Ok(None);
    }
    let scale = (q.dim(3) as f32).sqrt().recip();
    let mut times = Vec::new();
    for round in 0..WARM + ROUNDS {
        let mask = mask(n + round);
        let start = Instant::now();
        let mut x = q.clone();
        for _ in 0..LAYERS {
            let [k, v] = pool.first(n + round);
            match attend_rows([&x, &k, &v], &mask, scale, ours)? {
                Some(out) => x = out,
                None => return Ok(None),
            }
        }
        x.eval()?;
        times.push(start.elapsed().as_secs_f64() * 1e3 / LAYERS as f64);
    }
    let mut times = times.split_off(WARM as usize);
    times.sort_by(f64::total_cmp);
    Ok(Some(times[times.len() / 2]))
}

fn difference(q: &Array, pool: &Pool, n: i32, ours: bool) -> Result<Option<f32>> {
    let scale = (q.dim(3) as f32).sqrt().recip();
    let [k, v] = pool.first(n);
    let [wide_q, wide_k, wide_v] =
        [q.as_dtype(Dtype::Float32)?, k.as_dtype(Dtype::Float32)?, v.as_dtype(Dtype::Float32)?];
    let exact = attend_rows([&wide_q, &wide_k, &wide_v], &Mask::Causal, scale, false)?;
    let (Some(exact), Some(out)) = (exact, attend_rows([q, &k, &v], &Mask::Causal, scale, ours)?)
    else {
        return Ok(None);
    };
    let most = exact.abs()?.max(None)?.item_exact::<f32>();
    let worst =
        out.as_dtype(Dtype::Float32)?.subtract(&exact)?.abs()?.max(None)?.item_exact::<f32>();
    Ok(Some(worst / most))
}

fn is_asked_for(what: &str) -> bool {
    std::env::args().any(|argument| argument == what)
}

fn shown(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| String::from("-"), |value| format!("{value:.digits$}"))
}

/// Prints a row for each number of queries, and two columns for each length: the kernel and MLX.
fn table(title: &str, mut cell: impl FnMut(i32, i32, bool) -> Result<String>) -> Result<()> {
    println!(
        "\n{title}\n{:>8}{}",
        "queries",
        LENGTHS.map(|n| format!("{n:>11}{:>10}", "MLX")).concat()
    );
    for t in QUERIES {
        print!("{t:>8}");
        for n in LENGTHS {
            print!("{:>11}{:>10}", cell(t, n, true)?, cell(t, n, false)?);
        }
        println!();
    }
    Ok(())
}

/// Measures a step of one token of each of `sequences` sequences. Each sequence has `n` tokens in a common pool.
fn batch(sequences: i32, n: i32, dim: i32) -> Result<()> {
    let pool = Pool::new(sequences * n, dim)?;
    let q = noise(&[1, HEADS, sequences, dim])?;
    let marks = |all: i32| {
        let seen: Vec<bool> =
            (0..sequences).flat_map(|i| (0..all).map(move |key| key % sequences == i)).collect();
        let mask = Array::from_slice(&seen, &[sequences, all]);
        // The arrays are evaluated before the clock starts.
        mask.logical_and(&mask)
            .map_or(Mask::None, |mask| mask.eval().map_or(Mask::None, |()| Mask::Explicit(mask)))
    };
    let [ours, mlx] = [true, false].map(|ours| time(&q, &pool, sequences * n, &marks, ours));
    println!(
        "{sequences:>4} sequences of {n:>6}, {dim}: {:>8} {:>8}",
        shown(ours?, 4),
        shown(mlx?, 4)
    );
    Ok(())
}

fn main() {
    let differences = is_asked_for("differences");
    let measured = etkv::mlx::run(|| {
        if !etkv::mlx::on_gpu()? {
            println!("MLX has no GPU on this machine");
            return Ok(());
        }
        for dim in [64, 128] {
            let title = format!("{HEADS} query and {KV_HEADS} KV heads of {dim}, bfloat16, causal");
            if differences {
                table(&format!("{title}: the largest difference from float32"), |t, n, ours| {
                    let (q, pool) = (noise(&[1, HEADS, t, dim])?, Pool::new(n, dim)?);
                    Ok(shown(difference(&q, &pool, n, ours)?.map(f64::from), 5))
                })?;
                continue;
            }
            table(&format!("{title}: ms a call"), |t, n, ours| {
                let (q, pool) = (noise(&[1, HEADS, t, dim])?, Pool::new(n, dim)?);
                Ok(shown(time(&q, &pool, n, &|_| Mask::Causal, ours)?, 4))
            })?;
        }
        if !differences {
            println!("\nA batch, one token each, with a mask, ms a call: the kernel, MLX");
            for (sequences, n) in [(4, 1000), (16, 300), (16, 4096), (64, 500)] {
                batch(sequences, n, 64)?;
                batch(sequences, n, 128)?;
            }
        }
        Ok(())
    });
    if let Err(error) = measured {
        eprintln!("{error}");
        std::process::exit(1);
    }
}
