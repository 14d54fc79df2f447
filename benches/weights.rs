//! Compares the ways to multiply rows by a weight on the CPU: float32 weights transposed or as stored, and quantized
//! weights packed or unpacked first. The tables determine the layouts of
//! `crates/etkv-mlx-program/src/passes/linear.rs` and the thresholds of
//! `crates/etkv-mlx-program/src/ops/quantized.rs`.

use std::time::{Duration, Instant};

use mlx_rs::ops::{dequantize, matmul, quantize, quantized_matmul};
use mlx_rs::{random, Array, Dtype};

/// Shapes `[out, in]` of the weights of SmolLM2-135M and of Llama-3.2-1B, except the head of Llama-3.2-1B.
const SHAPES: [[i32; 2]; 9] = [
    [192, 576],
    [576, 576],
    [1536, 576],
    [576, 1536],
    [49152, 576],
    [512, 2048],
    [2048, 2048],
    [8192, 2048],
    [2048, 8192],
];
const ROWS: [i32; 10] = [1, 2, 4, 6, 8, 12, 16, 24, 32, 64];
/// The total bytes of the copies of a weight that are read in turn: more than the CPU's caches hold.
const COLD: usize = 128 << 20;
const ROUNDS: usize = 9;

type Product<'a> = &'a dyn Fn(&Array, usize) -> etkv::Result<Array>;

fn random(shape: &[i32]) -> etkv::Result<Array> {
    let array = random::normal::<f32>(shape, None, None, None)?;
    array.eval()?;
    Ok(array)
}

/// Returns random weights of this shape: so many copies that the CPU's caches cannot hold them all.
fn weights([out, into]: [i32; 2]) -> etkv::Result<Vec<Array>> {
    let n = COLD / (4 * out as usize * into as usize);
    (0..n.clamp(2, 64)).map(|_| random(&[out, into])).collect()
}

/// Returns the ratio of the median times of `first` and `second`. They run in turn, each on weights that were not read
/// recently.
fn ratio(x: &Array, n_weights: usize, first: Product, second: Product) -> etkv::Result<f64> {
    let mut times: [Vec<Duration>; 2] = Default::default();
    let mut next = 0;
    for round in 0..=ROUNDS {
        for (product, times) in [first, second].into_iter().zip(&mut times) {
            next = (next + 1) % n_weights;
            let start = Instant::now();
            product(x, next)?.eval()?;
            // The first call allocates.
            if round > 0 {
                times.push(start.elapsed());
            }
        }
    }
    let [first, second] = times.map(|mut times| {
        times.sort_unstable();
        times[ROUNDS / 2].as_secs_f64()
    });
    Ok(first / second)
}

/// Prints a table: a line for each shape, a column for each number of rows.
fn table(
    title: &str,
    line: impl Fn([i32; 2], &mut Vec<f64>) -> etkv::Result<()>,
) -> etkv::Result<()> {
    println!("\n{title}");
    print!("{:>14}", "[out, in]");
    ROWS.iter().for_each(|rows| print!("{:>8}", format!("T={rows}")));
    println!();
    let mut logs = vec![0.0; ROWS.len()];
    for shape in SHAPES {
        let mut ratios = Vec::new();
        line(shape, &mut ratios)?;
        print!("{:>14}", format!("{shape:?}"));
        for (ratio, log) in ratios.iter().zip(&mut logs) {
            print!("{ratio:>8.2}");
            *log += ratio.ln();
        }
        println!();
    }
    print!("{:>14}", "mean");
    logs.iter().for_each(|log| print!("{:>8.2}", (log / SHAPES.len() as f64).exp()));
    println!();
    Ok(())
}

fn layouts() -> etkv::Result<()> {
    table("float32, stored over transposed: above 1, transposed is faster", |shape, ratios| {
        let stored = weights(shape)?;
        let mut transposed = Vec::new();
        for weight in &stored {
            let weight = weight.transpose_axes(&[1, 0])?.contiguous()?;
            weight.eval()?;
            transposed.push(weight);
        }
        for rows in ROWS {
            let x = random(&[1, rows, shape[1]])?;
            ratios.push(ratio(
                &x,
                stored.len(),
                &|x, at| Ok(matmul(x, stored[at].transpose_axes(&[1, 0])?)?),
                &|x, at| Ok(matmul(x, &transposed[at])?),
            )?);
        }
        Ok(())
    })
}

/// `dtype` is the dtype of the rows and of the scales. In exported programs both have the same dtype.
fn packed(bits: i32, dtype: Dtype) -> etkv::Result<()> {
    const GROUP: i32 = 32;
    let title = format!(
        "{bits} bits in groups of {GROUP}, {dtype:?}, unpacked over packed: above 1, packed is faster"
    );
    table(&title, |shape, ratios| {
        let mut kept = Vec::new();
        for weight in weights(shape)? {
            let (w, scales, biases) = quantize(weight, GROUP, bits)?;
            let [scales, biases] = [scales.as_dtype(dtype)?, biases.as_dtype(dtype)?];
            mlx_rs::transforms::eval([&w, &scales, &biases])?;
            kept.push((w, scales, biases));
        }
        let wide = |array: &Array| array.as_dtype(Dtype::Float32);
        for rows in ROWS {
            let x = random(&[1, rows, shape[1]])?.as_dtype(dtype)?;
            x.eval()?;
            ratios.push(ratio(
                &x,
                kept.len(),
                &|x, at| {
                    let (w, scales, biases) = &kept[at];
                    let w = dequantize(w, wide(scales)?, &wide(biases)?, GROUP, bits)?;
                    let columns = x.reshape(&[x.dim(1), -1])?.transpose_axes(&[1, 0])?;
                    Ok(matmul(w.as_dtype(dtype)?, columns.contiguous()?)?)
                },
                &|x, at| {
                    let (w, scales, biases) = &kept[at];
                    let [scales, biases] = [wide(scales)?, wide(biases)?];
                    let product =
                        quantized_matmul(wide(x)?, w, scales, &biases, true, GROUP, bits)?;
                    Ok(product.as_dtype(dtype)?)
                },
            )?);
        }
        Ok(())
    })
}

fn main() {
    let measured = etkv::mlx::run(|| {
        println!("MLX {}, products by {}", etkv::mlx::version(), etkv::mlx::blas());
        layouts()?;
        for dtype in [Dtype::Float32, Dtype::Bfloat16] {
            for bits in [4, 8] {
                packed(bits, dtype)?;
            }
        }
        Ok(())
    });
    measured.expect("MLX");
}
