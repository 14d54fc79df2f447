//! Compares the kernel with the definition in float64. Without CUDA only the code around the kernel is tested.

use super::*;
use crate::kernels::testing::{array, on_cuda, values};
use crate::mlx::{run, slice_axis};

/// The memory layout of the tokens of `x`.
#[derive(Debug, Clone, Copy)]
enum TokenLayout {
    /// One head after another.
    Whole,
    /// A piece of a joined product, between other heads.
    Piece,
    /// With gaps between the elements.
    Apart,
}

impl TokenLayout {
    fn make(self, heads: i32, tokens: i32, dim: i32, dtype: Dtype) -> Array {
        let by_token = |x: Array| x.transpose_axes(&[0, 2, 1, 3]).unwrap();
        match self {
            Self::Whole => array(1, &[1, heads, tokens, dim], dtype),
            Self::Piece => {
                let all = by_token(array(1, &[1, tokens, heads + 3, dim], dtype));
                slice_axis(&all, 1, 2, 2 + heads, 1).unwrap()
            }
            Self::Apart => {
                let all = array(1, &[1, heads, tokens, 3 * dim], dtype);
                slice_axis(&all, 3, 1, 3 * dim, 3).unwrap()
            }
        }
    }
}

fn check(dtype: Dtype, lie: TokenLayout, heads: i32, positions: &[i32], periods: &[f32]) {
    let (tokens, half) = (positions.len(), periods.len());
    let x = lie.make(heads, tokens as i32, 2 * half as i32, dtype);
    let at = Array::from_slice(positions, &[tokens as i32]);
    let by = Array::from_slice(periods, &[half as i32]);
    let out = rotary(&x, &at, &by).unwrap().expect("the kernel supports it");
    assert_eq!((out.dtype(), out.shape()), (dtype, x.shape()));
    let (x, out) = (values(&x), values(&out));
    for (i, &found) in out.iter().enumerate() {
        let (row, j) = (i / (2 * half), i % (2 * half));
        let angle = f64::from(positions[row % tokens]) / f64::from(periods[j % half]);
        let (first, second) = (x[row * 2 * half + j % half], x[row * 2 * half + half + j % half]);
        let wanted = match j < half {
            true => first * angle.cos() - second * angle.sin(),
            false => first * angle.sin() + second * angle.cos(),
        };
        let rounding = match dtype {
            Dtype::Float32 => 1e-6,
            Dtype::Float16 => 1e-3,
            _ => 8e-3,
        };
        // The angle is computed in float32.
        let most = rounding * 4.0 + angle.abs() * 5e-7;
        assert!((found - wanted).abs() <= most, "{dtype:?} {lie:?}: {found} at {i} for {wanted}");
    }
}

#[test]
fn the_kernel_turns_as_the_definition_says() {
    on_cuda(|| {
        let periods: Vec<f32> = (0..32).map(|j| 10_000f32.powf(j as f32 / 32.0)).collect();
        for dtype in [Dtype::Bfloat16, Dtype::Float16, Dtype::Float32] {
            for lie in [TokenLayout::Whole, TokenLayout::Piece, TokenLayout::Apart] {
                for positions in [&[0][..], &[5], &[0, 1, 2, 3], &[9, 9, 2, 7000, 11]] {
                    check(dtype, lie, 7, positions, &periods);
                }
            }
            check(dtype, TokenLayout::Piece, 3, &[4, 700], &[1.0]);
            check(dtype, TokenLayout::Piece, 2, &[4, 700, 3], &[1.0, 30.0, f32::INFINITY]);
        }
        Ok(())
    });
}

#[test]
fn only_supported_calls_are_accepted() {
    let x = |shape: &[i32]| array(1, shape, Dtype::Bfloat16);
    run(|| {
        let positions = Array::from_slice(&[3i32, 4], &[2]);
        let periods = Array::from_slice(&[1.0f32, 2.0], &[2]);
        assert_eq!(threads(&x(&[1, 3, 2, 4]), &positions, &periods), Some(12));
        for shape in [&[1, 3, 3, 4][..], &[1, 3, 2, 6], &[2, 3, 2, 4], &[3, 2, 4], &[1, 3, 2, 5]] {
            assert_eq!(threads(&x(shape), &positions, &periods), None);
        }
        let far = positions.as_dtype(Dtype::Int64)?;
        assert_eq!(threads(&x(&[1, 3, 2, 4]), &far, &periods), None);
        Ok(())
    })
    .unwrap();
}
