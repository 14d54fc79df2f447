//! The kernel, compared with products in float64. Without CUDA only what surrounds it is tested.

use super::*;
use crate::kernels::testing::{array, values};
use crate::mlx::{on_gpu, run, slice_axis};

/// How the rows of `x` lie in memory.
#[derive(Debug, Clone, Copy)]
enum Rows {
    Whole,
    /// Pieces of longer rows, which begin anywhere.
    Unaligned,
    /// Columns of a matrix.
    Columns,
}

impl Rows {
    fn make(self, rows: i32, inner: i32, dtype: Dtype) -> Array {
        match self {
            Self::Whole => array(1, &[1, rows, inner], dtype),
            Self::Unaligned => {
                slice_axis(&array(1, &[1, rows, inner + 5], dtype), 2, 3, 3 + inner, 1).unwrap()
            }
            Self::Columns => array(1, &[inner, rows], dtype).transpose_axes(&[1, 0]).unwrap(),
        }
    }
}

fn check(dtype: Dtype, rows: i32, outputs: i32, inner: i32, lie: Rows, has_bias: bool) {
    let x = lie.make(rows, inner, dtype);
    let w = array(2, &[outputs, inner], dtype);
    w.eval().unwrap();
    let transposed = rows % 2 == 0;
    let bias = has_bias.then(|| array(3, &[outputs], dtype));
    let seen = if transposed { w.transpose_axes(&[1, 0]).unwrap() } else { w.clone() };
    seen.eval().unwrap();
    let out = few_rows(&x, &seen, bias.as_ref(), transposed).unwrap().expect("the kernel takes it");
    assert_eq!((out.dtype(), out.shape().last()), (dtype, Some(&outputs)));
    let (x, w, out) = (values(&x), values(&w), values(&out));
    let bias = bias.map(|bias| values(&bias));
    let inner = inner as usize;
    for (at, &found) in out.iter().enumerate() {
        let (row, output) = (at / outputs as usize, at % outputs as usize);
        let (x, w) = (&x[row * inner..][..inner], &w[output * inner..][..inner]);
        let product: f64 = x.iter().zip(w).map(|(x, w)| x * w).sum();
        let wanted = product + bias.as_ref().map_or(0.0, |bias| bias[output]);
        let rounding = if dtype == Dtype::Float16 { 1e-3 } else { 8e-3 };
        let most = rounding * wanted.abs() + 1e-4 * (inner as f64).sqrt();
        let case = (dtype, rows, outputs, inner, lie, has_bias);
        assert!((found - wanted).abs() <= most, "{case:?}: {found} at {at} for {wanted}");
    }
}

#[test]
fn the_kernel_multiplies_as_the_definition_says() {
    run(|| {
        if !on_gpu()? || cfg!(target_os = "macos") {
            println!("skipped: MLX has no CUDA here");
            return Ok(());
        }
        let sizes = [(1, 8), (40, 72), (576, 1536), (960, 576), (4100, 264), (300, 8192)];
        let cases = [2, 3, 7, 8, 9, 15, 16]
            .into_iter()
            .zip([Rows::Whole, Rows::Unaligned].into_iter().cycle());
        for (outputs, inner) in sizes {
            for (rows, lie) in cases.clone() {
                for dtype in [Dtype::Bfloat16, Dtype::Float16] {
                    check(dtype, rows, outputs, inner, lie, rows % 3 == 0);
                }
            }
            for rows in [5, 12] {
                check(Dtype::Bfloat16, rows, outputs, inner, Rows::Columns, true);
            }
        }
        for rows in 2..=MOST_ROWS {
            check(Dtype::Bfloat16, rows, 100, 128, Rows::Whole, false);
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn only_what_the_kernel_reads_is_taken() {
    run(|| {
        let half = Dtype::Bfloat16;
        let takes = |x: &[i32], w: &[i32], transposed: bool| {
            let weight = array(2, w, half);
            weight.eval()?;
            Ok::<_, crate::Error>(Call::of(&array(1, x, half), &weight, None, transposed).is_some())
        };
        assert!(takes(&[1, 4, 64], &[10, 64], false)?);
        assert!(takes(&[4, 64], &[10, 64], false)?);
        // One row, many rows, several matrices, other elements, and elements of no whole piece.
        for x in [&[1, 1, 64][..], &[1, 17, 64], &[2, 4, 64], &[64], &[1, 4, 72]] {
            assert!(!takes(x, &[10, 64], false)?);
        }
        assert!(!takes(&[1, 4, 12], &[10, 12], false)?);
        // A weight that lies the other way round.
        assert!(!takes(&[1, 4, 64], &[64, 10], true)?);
        let x = array(1, &[1, 4, 64], half);
        let view = array(2, &[10, 64], half).transpose_axes(&[1, 0])?;
        view.eval()?;
        assert!(Call::of(&x, &view, None, true).is_some());
        let weight = array(2, &[10, 64], half);
        for (shape, dtype, fits) in
            [(&[10][..], half, true), (&[1], half, false), (&[10], Dtype::Float32, false)]
        {
            let bias = array(3, shape, dtype);
            assert_eq!(Call::of(&x, &weight, Some(&bias), false).is_some(), fits);
        }
        assert!(Call::of(&array(1, &[1, 4, 64], Dtype::Float32), &weight, None, false).is_none());
        Ok(())
    })
    .unwrap();
}

#[test]
fn blocks_take_every_output() {
    for outputs in [1, 16, 17, 4096, 128_256] {
        let blocks = threads(outputs).unwrap() / THREADS;
        assert!((blocks - 1) * TILE < outputs && outputs <= blocks * TILE);
    }
    assert_eq!(threads(i32::MAX), None);
}
