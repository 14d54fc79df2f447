//! Random numbers for tests, and the condition for tests of kernels.

use mlx_rs::{Array, Dtype};

use crate::error::Result;
use crate::mlx;

/// Runs a test of a kernel, unless MLX lacks CUDA.
pub fn on_cuda(test: impl FnOnce() -> Result<()>) {
    let ran = mlx::run(|| match mlx::on_gpu()? && !cfg!(target_os = "macos") {
        true => test(),
        false => {
            println!("skipped: MLX has no CUDA here");
            Ok(())
        }
    });
    ran.unwrap();
}

/// Returns a function that returns random numbers from 0 to 1.
pub fn units(seed: u64) -> impl FnMut() -> f32 {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 24) as f32
    }
}

/// Returns an array of numbers between -2 and 2.
pub fn array(seed: u64, shape: &[i32], dtype: Dtype) -> Array {
    let (n, mut unit) = (shape.iter().product::<i32>(), units(seed));
    let numbers: Vec<f32> = (0..n).map(|_| 4.0 * unit() - 2.0).collect();
    Array::from_slice(&numbers, shape).as_dtype(dtype).unwrap()
}

/// Returns the elements as float64.
pub fn values(array: &Array) -> Vec<f64> {
    let array = array.as_dtype(Dtype::Float32).unwrap().contiguous().unwrap();
    mlx::elements::<f32>(&array).unwrap().into_iter().map(f64::from).collect()
}
