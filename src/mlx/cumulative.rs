//! Cumulative sums and products along an axis.

use mlx_rs::Array;

use super::is_stream_on_gpu;
use crate::error::Result;

/// Returns `scan(x, axis)`, where `scan` computes cumulative sums or products along `axis`.
///
/// On CUDA, MLX 0.32.2 reads wrong memory if the stride of `axis` is not a multiple of four elements. So on CUDA the
/// axis is first made contiguous.
///
/// # Errors
/// Errors of `scan` and of MLX. `axis` must exist.
pub fn cumulative(
    x: &Array,
    axis: i32,
    scan: impl FnOnce(&Array, i32) -> Result<Array>,
) -> Result<Array> {
    if cfg!(target_os = "macos") || !is_stream_on_gpu()? {
        return scan(x, axis);
    }
    let last = x.swap_axes(axis, -1)?.contiguous()?;
    Ok(scan(&last, -1)?.swap_axes(axis, -1)?)
}

/// Returns the cumulative sums along `axis`.
///
/// # Errors
/// Errors of MLX. `axis` must exist.
pub fn cumsum(x: &Array, axis: i32) -> Result<Array> {
    cumulative(x, axis, |x, axis| Ok(x.cumsum(axis, None, None)?))
}

/// Returns the cumulative products along `axis`.
///
/// # Errors
/// Errors of MLX. `axis` must exist.
pub fn cumprod(x: &Array, axis: i32) -> Result<Array> {
    cumulative(x, axis, |x, axis| Ok(x.cumprod(axis, None, None)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mlx::{elements, run};

    /// With a stride of ten elements, MLX's own sums are wrong on CUDA.
    #[test]
    fn sums_and_products_do_not_depend_on_how_far_elements_lie_apart() {
        run(|| {
            for width in [1, 6, 10, 16] {
                for n in [1, 17, 64] {
                    let x: Vec<f32> =
                        (0..2 * n * width).map(|i| 0.99 + (i % 7) as f32 * 0.004).collect();
                    let array = Array::from_slice(&x, &[2, n, width]);
                    let (sums, products) = (cumsum(&array, 1)?, cumprod(&array, 1)?);
                    assert_eq!(sums.shape(), array.shape());
                    let sums: Vec<f32> = elements(&sums.contiguous()?)?;
                    let products: Vec<f32> = elements(&products.contiguous()?)?;
                    for first in (0..2 * n * width).filter(|i| i / width % n == 0) {
                        let (mut sum, mut product) = (0.0, 1.0);
                        for at in (0..n).map(|row| (first + row * width) as usize) {
                            sum += f64::from(x[at]);
                            product *= f64::from(x[at]);
                            let off = (f64::from(sums[at]) - sum).abs();
                            let ratio = f64::from(products[at]) / product;
                            assert!(
                                off < 1e-4 && (ratio - 1.0).abs() < 1e-4,
                                "{at} of {n} rows of {width}"
                            );
                        }
                    }
                }
            }
            Ok(())
        })
        .unwrap();
    }
}
