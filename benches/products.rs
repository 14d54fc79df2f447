//! Compares attention over packed rows with attention that unpacks the same rows first. The tables determine the
//! maximum number of queries for which a pool multiplies packed rows.

use std::time::{Duration, Instant};

use etkv::{AttendSpec, Cache, CacheConfig, ContiguousCache, Growth, KvFormat, Mask, Step};
use mlx_rs::{random, Array, Dtype};

const N_KV_HEADS: i32 = 2;
const GROUP: i32 = 4;
const LENGTHS: [i32; 3] = [512, 2048, 8192];
/// The numbers of queries of a step. A number times `GROUP` is the number of rows that are multiplied with a KV head.
const STEPS: [i32; 8] = [1, 2, 4, 8, 16, 32, 64, 128];
const FORMATS: [&str; 12] = [
    "f16",
    "bf16",
    "affine8g64",
    "affine6g64",
    "affine5g64",
    "affine4g64",
    "affine3g64",
    "affine2g64",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "row-int4",
];

fn rows(heads: i32, n: i32, head_dim: i32) -> etkv::Result<Array> {
    Ok(random::normal::<f32>(&[1, heads, n, head_dim], None, None, None)?)
}

/// Returns a layer of `length` random rows.
fn filled(
    format: KvFormat,
    length: i32,
    head_dim: i32,
) -> etkv::Result<(ContiguousCache, AttendSpec)> {
    let config = CacheConfig::uniform(1, N_KV_HEADS, head_dim, length).stored_as(format);
    let config = CacheConfig { growth: Growth::Upfront, max_step_tokens: length, ..config };
    let mut cache = ContiguousCache::new(config)?;
    let positions: Vec<i32> = (0..length).collect();
    let rows = rows(N_KV_HEADS, length, head_dim)?;
    let mut step = Step::begin(&mut cache, &positions)?;
    let spec = step.update_and_fetch(0, &rows, &rows)?;
    step.commit(&[])?;
    assert_eq!(cache.length(), length);
    Ok((cache, spec))
}

fn time(q: &Array, spec: &AttendSpec, packed: bool) -> etkv::Result<Duration> {
    let start = Instant::now();
    etkv::attend_stored(q, spec, 0.1, packed)?.eval()?;
    Ok(start.elapsed())
}

fn median(times: &mut [Duration]) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64()
}

/// Prints one line: for each number of queries, the time with unpacked rows divided by the time with packed rows.
/// Returns these ratios.
fn line(format: &str, length: i32, head_dim: i32, dtype: Dtype) -> etkv::Result<Vec<f64>> {
    let mut ratios = Vec::new();
    let (_cache, mut spec) = filled(format.parse()?, length, head_dim)?;
    print!("{format:>12}{length:>8}{head_dim:>6}");
    for t in STEPS {
        let q = rows(N_KV_HEADS * GROUP, t, head_dim)?.as_dtype(dtype)?;
        spec.mask = Mask::Causal;
        let (mut packed, mut unpacked) = (Vec::new(), Vec::new());
        for round in 0..8 {
            let times = (time(&q, &spec, true)?, time(&q, &spec, false)?);
            // The first call compiles and allocates.
            if round > 0 {
                packed.push(times.0);
                unpacked.push(times.1);
            }
        }
        ratios.push(median(&mut unpacked) / median(&mut packed));
        print!("{:>8.2}", ratios.last().copied().unwrap_or_default());
    }
    println!();
    Ok(ratios)
}

/// Returns the maximum rows per KV head for which packed products are faster, by the geometric mean of the lines; 0 if
/// packed products are never faster.
fn threshold(lines: &[Vec<f64>]) -> i32 {
    let faster = |at: &usize| lines.iter().map(|ratios| ratios[*at].ln()).sum::<f64>() >= 0.0;
    let n = (0..STEPS.len()).take_while(faster).count();
    n.checked_sub(1).map_or(0, |last| STEPS[last] * GROUP)
}

fn main() {
    let measured = etkv::mlx::run(|| {
        // The arguments are the formats to measure, by default all; `--half` selects bfloat16 queries.
        let words: Vec<String> = std::env::args().skip(1).collect();
        let named = |format: &&str| words.iter().any(|word| word == format);
        let all = !FORMATS.iter().any(named);
        let dtype = match words.iter().any(|word| word == "--half") {
            true => Dtype::Bfloat16,
            false => Dtype::Float32,
        };
        println!("Unpacking over packed products ({GROUP} query heads a KV head, {dtype:?}): above 1, packed is faster");
        print!("{:>12}{:>8}{:>6}", "format", "length", "dim");
        STEPS.iter().for_each(|t| print!("{:>8}", format!("T={t}")));
        println!();
        let mut thresholds = Vec::new();
        for format in FORMATS.into_iter().filter(|format| all || named(format)) {
            let mut lines = Vec::new();
            for head_dim in [64, 128] {
                for length in LENGTHS {
                    lines.push(line(format, length, head_dim, dtype)?);
                }
            }
            thresholds.push((format, threshold(&lines)));
        }
        println!("\nOn this machine packed products are faster for at most (rows a KV head; `max_packed` in src/store):");
        thresholds.iter().for_each(|(format, rows)| println!("{format:>12}{rows:>8}"));
        Ok(())
    });
    measured.expect("MLX");
}
