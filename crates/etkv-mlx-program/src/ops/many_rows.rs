//! Products of many rows with packed weights on CUDA.
//!
//! MLX multiplies eight or more rows in half precision with a kernel (`qmm_sm80`) that stages its results in shared
//! memory while copies of the last tiles to the same memory may still be under way. Then whole rows are wrong: on an
//! H200, 7 % of products with selected weights had such rows (MLX 0.32.2). Fewer rows are multiplied by another
//! kernel. So here weights are unpacked, or a few rows are multiplied at a time.

use mlx_rs::ops::{broadcast_to, matmul};
use mlx_rs::{Array, Dtype};

use super::shape::{broadcast, Sizes};
use super::weights::{as_rows, Weights};
use super::{by_expert, linear};
use crate::error::{fail, Result};
use etkv::kernels::Product;
use etkv::mlx::{self, cast, slice_axis};

/// The maximum number of rows for which MLX uses another kernel than `qmm_sm80`.
const FEW: i32 = 7;

/// The maximum number of weights that are unpacked together: 256 MiB in float32.
const MAX_UNPACKED: i32 = 1 << 26;

/// The minimum number of rows for each weight from which selected weights are unpacked. Unpacking reads and writes as
/// many bytes as four products with packed weights.
const ROWS_TO_UNPACK: i32 = 4;

/// Returns whether MLX's product of `x` with packed weights may be wrong. `x` has `rows` rows in all. Weights
/// with other bits or sizes use other kernels, which this function does not distinguish.
fn may_be_wrong(x: &Array, weights: &Weights, rows: usize) -> Result<bool> {
    let is_half = matches!(weights.product_dtype(x), Dtype::Float16 | Dtype::Bfloat16);
    // MLX reports weights of other shapes.
    let can_be = is_half && weights.are_matrices();
    Ok(can_be && rows > FEW as usize && !cfg!(target_os = "macos") && mlx::is_stream_on_gpu()?)
}

/// Returns the product of `x`, `[.., rows, in]`, with packed weights. `transpose` multiplies by rows of the weights.
pub fn product(x: &Array, weights: &Weights, transpose: bool) -> Result<Array> {
    let rows = x.size() / x.shape().last().map_or(1, |&features| features.max(1) as usize);
    let matrices: i32 = weights.leading().iter().product();
    // On CUDA, MLX's product of such weights with several rows is wrong too, for 8 bits with 64 features and 4 bits
    // with 128 features (MLX 0.32.2).
    if transpose
        && rows > 1
        && weights.are_matrices()
        && weights.has_one_group()
        && mlx::is_stream_on_gpu()?
    {
        return unpacked_product(x, weights);
    }
    if !transpose || !may_be_wrong(x, weights, rows * matrices.max(1) as usize)? {
        return weights.product(x, transpose);
    }
    // For a large weight, two products of few rows take a fraction of the time that unpacking the weight
    // takes.
    match weights.leading().is_empty() && rows <= 2 * FEW as usize {
        true => rows_in_parts(x, weights),
        false => unpacked_product(x, weights),
    }
}

/// Multiplies `x` by a matrix, at most [`FEW`] rows at a time.
fn rows_in_parts(x: &Array, weights: &Weights) -> Result<Array> {
    let rows = rows_of(x)?;
    let n = rows.dim(1);
    let parts = (0..n)
        .step_by(FEW as usize)
        .map(|start| weights.product(&slice_axis(&rows, 1, start, n.min(start + FEW), 1)?, true))
        .collect::<Result<Vec<_>>>()?;
    with_outputs(&mlx::joined(&parts, 1)?, x, weights.outputs())
}

fn unpacked_product(x: &Array, weights: &Weights) -> Result<Array> {
    let dtype = weights.product_dtype(x);
    let x = &cast(x, dtype)?;
    let (inputs, outputs) = (x.dim(-1), weights.outputs());
    let matrices: i32 = weights.leading().iter().product();
    let each = (MAX_UNPACKED / inputs.max(1) / matrices.max(1)).clamp(1, outputs.max(1));
    let parts = (0..outputs)
        .step_by(each as usize)
        .map(|start| {
            let part = weights.of_outputs(start..outputs.min(start + each))?.unpacked(dtype)?;
            let made = match part.ndim() {
                2 => linear::linear(&Product::plain(&rows_of(x)?, &part, false))?,
                _ => matmul(x, part.swap_axes(-1, -2)?)?,
            };
            // MLX would otherwise unpack several parts before it multiplies the first one.
            if each < outputs {
                made.eval()?;
            }
            Ok(made)
        })
        .collect::<Result<Vec<_>>>()?;
    let made = mlx::joined(&parts, -1)?;
    match weights.leading().is_empty() {
        true => with_outputs(&made, x, outputs),
        false => Ok(made),
    }
}

/// Returns the rows of `x` as `[1, rows, in]`.
fn rows_of(x: &Array) -> Result<Array> {
    Ok(x.reshape(&[1, -1, x.dim(-1)])?)
}

/// Returns the rows of `made` with the leading axes of `x`.
fn with_outputs(made: &Array, x: &Array, outputs: i32) -> Result<Array> {
    let mut shape = Sizes::from_slice(x.shape());
    shape.pop();
    shape.push(outputs);
    Ok(made.reshape(&shape)?)
}

/// Returns products of matrices of `x`, `[.., m, in]`, with rows of packed weights. Indices select the
/// matrices and the weights, as in [`Weights::gathered`]. Returns `None` if MLX's product is right. The
/// indices must be in range.
pub fn gathered(
    x: &Array,
    weights: &Weights,
    [lhs, rhs]: [Option<&Array>; 2],
) -> Result<Option<Array>> {
    let Some((x_leading, &[m, _])) = x.shape().split_last_chunk::<2>() else {
        return Ok(None);
    };
    let left = lhs.map_or(x_leading, Array::shape);
    let right = rhs.map_or(weights.leading(), Array::shape);
    let Some(leading) = broadcast(left, right) else {
        fail!(Program, "expected indices whose shapes broadcast, got {left:?} and {right:?}");
    };
    let n: i32 = leading.iter().product();
    match may_be_wrong(x, weights, n as usize * m as usize)? {
        true => Ok(Some(selected(x, weights, [lhs, rhs], &leading)?)),
        false => Ok(None),
    }
}

fn selected(
    x: &Array,
    weights: &Weights,
    [lhs, rhs]: [Option<&Array>; 2],
    leading: &[i32],
) -> Result<Array> {
    let (n, m, features) = (leading.iter().product(), x.dim(-2), x.dim(-1));
    let with = |matrix: &[i32]| leading.iter().chain(matrix).copied().collect::<Sizes>();
    let rows = match lhs {
        Some(lhs) => {
            let lhs = broadcast_to(lhs, leading)?.reshape(&[n])?;
            x.reshape(&[-1, m, features])?.take_axis(lhs, 0)?
        }
        None => broadcast_to(x, &with(&[m, features]))?.reshape(&[n, m, features])?,
    };
    let weights_in_all: i32 = weights.leading().iter().product();
    let indices = match rhs {
        Some(rhs) => rhs.clone(),
        None => Array::arange::<_, u32>(None, weights_in_all, None)?.reshape(weights.leading())?,
    };
    let indices = broadcast_to(&indices, leading)?.reshape(&[n])?;
    let made = match m <= FEW && n * m < ROWS_TO_UNPACK * weights_in_all {
        true => few_at_a_time(&rows, &weights.stacked()?, &indices)?,
        false => each_weight(&rows, &weights.stacked()?, &indices)?,
    };
    Ok(made.reshape(&with(&[m, weights.outputs()]))?)
}

/// Multiplies `[n, m, in]` by one weight after the other, each with all of its rows.
fn each_weight(rows: &Array, weights: &Weights, indices: &Array) -> Result<Array> {
    let indices = mlx::elements::<i32>(&cast(indices, Dtype::Int32)?.contiguous()?)?;
    by_expert::multiply(rows, &indices, &[rows.dim(0)], |rows, index| {
        product(rows, &weights.matrix(index)?, true)
    })
}

/// Multiplies `[n, m, in]`, at most [`FEW`] rows at a time.
fn few_at_a_time(rows: &Array, weights: &Weights, indices: &Array) -> Result<Array> {
    let (n, each) = (rows.dim(0), FEW / rows.dim(1).max(1));
    let parts = (0..n)
        .step_by(each as usize)
        .map(|start| {
            let of = |array| slice_axis(array, 0, start, n.min(start + each), 1);
            weights.gathered(&as_rows(of(rows)?)?, [None, Some(&of(indices)?)], true, false)
        })
        .collect::<Result<Vec<_>>>()?;
    mlx::joined(&parts, 0)
}

#[cfg(test)]
mod tests {
    use mlx_rs::ops::{abs, max, subtract};
    use mlx_rs::random::{normal, randint};

    use super::*;
    use crate::ir::{Packing, PackingMode};
    use etkv::mlx::{call, check, optional_int};

    const PACKINGS: [Packing; 3] = [
        Packing { mode: PackingMode::Affine, group_size: 32, bits: 4 },
        Packing { mode: PackingMode::Affine, group_size: 64, bits: 8 },
        Packing { mode: PackingMode::Mxfp4, group_size: 32, bits: 4 },
    ];

    fn numbers(shape: &[i32], dtype: Dtype) -> Result<Array> {
        cast(&normal::<f32>(shape, None, None, None)?, dtype)
    }

    fn packed(shape: &[i32], dtype: Dtype, packing: Packing) -> Result<Weights> {
        let w = numbers(shape, dtype)?;
        // SAFETY: the handles are live; the list is freed after its arrays are taken.
        let parts = unsafe {
            let mut list = mlx_sys::mlx_vector_array_new();
            check(mlx_sys::mlx_quantize(
                &mut list,
                w.as_ptr(),
                optional_int(packing.group_size),
                optional_int(packing.bits),
                packing.name().as_ptr(),
                mlx_sys::mlx_array { ctx: std::ptr::null_mut() },
                mlx_rs::Stream::thread_local_or_default().as_ptr(),
            ))?;
            let parts: Result<Vec<_>> = (0..mlx_sys::mlx_vector_array_size(list))
                .map(|i| call(|made, _| mlx_sys::mlx_vector_array_get(made, list, i)))
                .collect();
            mlx_sys::mlx_vector_array_free(list);
            parts?
        };
        Ok(Weights::new([&parts[0], &parts[1]], parts.get(2), packing))
    }

    /// Checks the products of `x` with weights. The expected products are computed in the same evaluation, so
    /// that a GPU is busy with them. MLX's kernel is wrong only on a busy GPU, and wrong rows are off by a
    /// quarter or more. On a CPU, MLX adds products of half precision in half precision.
    fn assert_right(made: &Array, x: &Array, unpacked: &Array) -> Result<()> {
        let wide = |array| cast(array, Dtype::Float32);
        let expected = matmul(wide(x)?, unpacked.swap_axes(-1, -2)?)?;
        let error = error(&wide(made)?, &expected)?;
        assert!(error < 0.15, "{:?} of {:?}: off by {error}", x.shape(), x.dtype());
        Ok(())
    }

    /// Returns the maximum difference, relative to the largest expected number.
    fn error(made: &Array, expected: &Array) -> Result<f32> {
        let difference = max(abs(subtract(made, expected)?)?, None)?;
        Ok(difference.divide(max(abs(expected)?, None)?)?.item_exact::<f32>())
    }

    /// Runs a test with weights of each packing and dtype. On a GPU, MLX's kernel was wrong in 7 % of products with
    /// weights of this size.
    fn on_each(run: impl Fn(&Weights, &Array, Dtype) -> Result<()>) {
        mlx::run(|| {
            mlx_rs::random::seed(1)?;
            let shape = if mlx::on_gpu()? { [32, 5760, 2880] } else { [5, 64, 192] };
            for packing in PACKINGS {
                for dtype in [Dtype::Bfloat16, Dtype::Float16, Dtype::Float32] {
                    let weights = packed(&shape, dtype, packing)?;
                    let unpacked = weights.unpacked(Dtype::Float32)?;
                    run(&weights, &unpacked, dtype)?;
                }
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn rows_with_selected_weights() {
        on_each(|weights, unpacked, dtype| {
            let (n_weights, inputs) = (unpacked.dim(0), unpacked.dim(2));
            let times = if mlx::on_gpu()? { 20 } else { 1 };
            for n in [&[1, 7, 8, 16].repeat(times)[..], &[40]].concat() {
                let x = numbers(&[n, 1, inputs], dtype)?;
                let chosen =
                    randint::<_, i32>(0, n_weights, &[n], None)?.as_dtype(Dtype::Uint32)?;
                let unpacked = unpacked.take_axis(&chosen, 0)?;
                let indices = [None, Some(&chosen)];
                let made = match gathered(&x, weights, indices)? {
                    Some(made) => made,
                    None => weights.gathered(&x, indices, true, false)?,
                };
                assert_right(&made, &x, &unpacked)?;
                assert_right(&few_at_a_time(&x, weights, &chosen)?, &x, &unpacked)?;
                assert_right(&each_weight(&x, weights, &chosen)?, &x, &unpacked)?;
            }
            Ok(())
        });
    }

    #[test]
    fn rows_with_one_weight() {
        on_each(|weights, unpacked, dtype| {
            let times = if mlx::on_gpu()? { 20 } else { 1 };
            for (i, n) in (0..).zip([1, 7, 8, 24, 300].repeat(times)) {
                let matrix = i % unpacked.dim(0);
                let (weights, unpacked) =
                    (weights.matrix(matrix)?, slice_axis(unpacked, 0, matrix, matrix + 1, 1)?);
                let x = numbers(&[1, n, unpacked.dim(2)], dtype)?;
                assert_right(&product(&x, &weights, true)?, &x, &unpacked)?;
                assert_right(&unpacked_product(&x, &weights)?, &x, &unpacked)?;
                assert_right(&rows_in_parts(&x, &weights)?, &x, &unpacked)?;
            }
            Ok(())
        });
    }

    #[test]
    fn indices_of_both_sides() {
        mlx::run(|| {
            mlx_rs::random::seed(1)?;
            let weights = packed(&[4, 32, 64], Dtype::Float32, PACKINGS[0])?;
            let of = |indices: &[u32], shape: &[i32]| Array::from_slice(indices, shape);
            let (lhs, rhs) = (of(&[2, 0], &[2, 1]), of(&[3, 1, 1], &[3]));
            for m in [1, 3, 9] {
                let x = numbers(&[3, m, 64], Dtype::Float32)?;
                for (indices, leading) in [
                    ([Some(&lhs), Some(&rhs)], &[2, 3][..]),
                    ([Some(&lhs), None], &[2, 4]),
                    ([None, Some(&rhs)], &[3]),
                ] {
                    let expected = weights.gathered(&x, indices, true, false)?;
                    assert_eq!(expected.shape(), [leading, &[m, 32]].concat());
                    let made = selected(&x, &weights, indices, leading)?;
                    // GPU kernels compute sums in another order.
                    let error = error(&made, &expected)?;
                    assert!(error < 1e-5, "{indices:?}, {m} rows: off by {error}");
                }
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn results_have_the_dtype_of_mlx() {
        mlx::run(|| {
            for (rows, scales) in [
                (Dtype::Bfloat16, Dtype::Float32),
                (Dtype::Float16, Dtype::Float16),
                (Dtype::Float32, Dtype::Float32),
            ] {
                let weights = packed(&[32, 64], scales, PACKINGS[0])?;
                let x = numbers(&[2, 5, 64], rows)?;
                let expected = weights.product(&x, true)?;
                for made in [unpacked_product(&x, &weights)?, rows_in_parts(&x, &weights)?] {
                    assert_eq!((made.dtype(), made.shape()), (expected.dtype(), expected.shape()));
                }
            }
            Ok(())
        })
        .unwrap();
    }
}
