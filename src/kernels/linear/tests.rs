//! Compares the kernel with products in float64. Without CUDA only the code around the kernel is tested.

use super::*;
use crate::kernels::testing::{array, on_cuda, values};
use crate::mlx::{run, slice_axis};

/// MLX declares the shapes and strides of inputs by their names. Without this test, only CUDA's compiler would find a
/// wrong name.
#[test]
fn the_call_names_inputs_alone() {
    let dtype = Dtype::Float16;
    for is_one in [false, true] {
        let call = Template { dtype, norm: dtype, rank: 3, is_one }.call("__half", "__half");
        let words = call.split(|c: char| !c.is_alphanumeric() && c != '_');
        let of_input = |word: &str| {
            let name = word.strip_suffix("_shape").or_else(|| word.strip_suffix("_strides"))?;
            Some(INPUTS.iter().any(|input| input.to_bytes() == name.as_bytes()))
        };
        let named: Vec<bool> = words.filter_map(of_input).collect();
        assert!(named.len() > 10 && named.iter().all(|&is_input| is_input), "{call}");
        for input in INPUTS.map(|input| input.to_str().unwrap()) {
            let is_read = ["_", ","].iter().any(|after| call.contains(&format!("{input}{after}")));
            assert!(is_read, "{input}");
        }
    }
}

/// The memory layout of the rows of `x`.
#[derive(Debug, Clone, Copy)]
enum Rows {
    Whole,
    /// Pieces of longer rows, which start at any address.
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
            Self::Columns => {
                let wide = array(1, &[inner, rows + 3], dtype).transpose_axes(&[1, 0]).unwrap();
                slice_axis(&wide, 0, 2, 2 + rows, 1).unwrap()
            }
        }
    }
}

/// The operations around the product in a test.
#[derive(Debug, Clone, Copy, Default)]
struct Surroundings {
    bias: bool,
    /// Whether the norm has weights, if there is a norm.
    norm: Option<bool>,
    /// Whether these weights are float32.
    wide: bool,
    gate: Option<Gate>,
    /// Whether the rows are contiguous or stored by column.
    residual: Option<bool>,
}

const PLAIN: Surroundings =
    Surroundings { bias: false, norm: None, wide: false, gate: None, residual: None };

fn activated(gate: Gate, x: f64) -> f64 {
    match gate {
        Gate::Silu => x / (1.0 + (-x).exp()),
        Gate::GeluTanh => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
            0.5 * x * (1.0 + inner.tanh())
        }
        // The integral of the normal density, by small steps.
        Gate::Gelu => {
            let steps = 400;
            let width = x / f64::from(steps);
            let bell = |at: f64| (-at * at / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt();
            let area: f64 = (0..steps).map(|i| bell((f64::from(i) + 0.5) * width) * width).sum();
            x * (0.5 + area)
        }
    }
}

fn check(dtype: Dtype, rows: i32, outputs: i32, inner: i32, lie: Rows, around: Surroundings) {
    const EPS: f32 = 1e-5;
    let halves = if around.gate.is_some() { 2 } else { 1 };
    let x = lie.make(rows, inner, dtype);
    // Products are about 1, where no activation is saturated.
    let small = Array::from_f32(1.0 / (inner as f32).sqrt()).as_dtype(dtype).unwrap();
    let w = array(2, &[halves * outputs, inner], dtype).multiply(small).unwrap();
    let transposed = rows % 2 == 0;
    let seen = if transposed { w.transpose_axes(&[1, 0]).unwrap() } else { w.clone() };
    seen.eval().unwrap();
    w.eval().unwrap();
    let bias = around.bias.then(|| array(3, &[halves * outputs], dtype));
    let norm_weight = array(4, &[inner], if around.wide { Dtype::Float32 } else { dtype });
    let residual = around.residual.map(|whole| match whole {
        true => array(5, &[1, rows, outputs], dtype),
        false => array(5, &[1, outputs, rows], dtype).transpose_axes(&[0, 2, 1]).unwrap(),
    });
    let residual = residual.map(|residual| {
        residual.reshape(&[&x.shape()[..x.ndim() - 1], &[outputs]].concat()).unwrap()
    });
    let norm = around.norm.map(|weighs| RmsNorm {
        weight: weighs.then_some(&norm_weight),
        eps: EPS,
        in_float32: around.wide,
    });
    let product = Product {
        bias: bias.as_ref(),
        norm,
        gate: around.gate,
        residual: residual.as_ref(),
        ..Product::plain(&x, &seen, transposed)
    };
    let out = few_rows(&product).unwrap().expect("the kernel supports it");
    assert_eq!((out.dtype(), out.shape().last()), (dtype, Some(&outputs)));
    let (mut x, w, out) = (values(&x), values(&w), values(&out));
    let (bias, residual) =
        (bias.map(|bias| values(&bias)), residual.map(|residual| values(&residual)));
    let rounding = if dtype == Dtype::Float16 { 1e-3 } else { 8e-3 };
    let (inner, outputs) = (inner as usize, outputs as usize);
    if let Some(weighs) = around.norm {
        let by = values(&norm_weight);
        for row in x.chunks_mut(inner) {
            let mean: f64 = row.iter().map(|x| x * x).sum::<f64>() / inner as f64;
            let scale = 1.0 / (mean + f64::from(EPS)).sqrt();
            row.iter_mut()
                .zip(&by)
                .for_each(|(x, by)| *x *= scale * if weighs { *by } else { 1.0 });
        }
    }
    let product = |row: usize, output: usize| {
        let (x, w) = (&x[row * inner..][..inner], &w[output * inner..][..inner]);
        let product: f64 = x.iter().zip(w).map(|(x, w)| x * w).sum();
        product + bias.as_ref().map_or(0.0, |bias| bias[output])
    };
    for (at, &found) in out.iter().enumerate() {
        let (row, output) = (at / outputs, at % outputs);
        let mut wanted = product(row, output);
        let mut largest = wanted.abs();
        if let Some(gate) = around.gate {
            let gated = product(row, outputs + output);
            largest = largest.max(1.0) * gated.abs().max(1.0);
            wanted = activated(gate, wanted) * gated;
        }
        if let Some(residual) = &residual {
            wanted += residual[at];
            largest = largest.max(residual[at].abs()).max(wanted.abs());
        }
        // Normalized rows are rounded before they are multiplied.
        let roundings = if around.norm.is_some() { 4.0 } else { 2.0 };
        let most = roundings * rounding * largest.max(0.5);
        let case = (dtype, rows, outputs, inner, lie, around);
        assert!((found - wanted).abs() <= most, "{case:?}: {found} at {at} for {wanted}");
    }
}

#[test]
fn the_kernel_multiplies_as_the_definition_says() {
    on_cuda(|| {
        let sizes = [(1, 8), (40, 72), (576, 1536), (960, 576), (9001, 264), (300, 8192)];
        let cases = [2, 3, 7, 8, 9, 15, 16]
            .into_iter()
            .zip([Rows::Whole, Rows::Unaligned].into_iter().cycle());
        for (outputs, inner) in sizes {
            for (rows, lie) in cases.clone() {
                let around = Surroundings { bias: rows % 3 == 0, ..PLAIN };
                for dtype in [Dtype::Bfloat16, Dtype::Float16] {
                    check(dtype, rows, outputs, inner, lie, around);
                }
            }
            for rows in [5, 12] {
                let around = Surroundings { bias: true, ..PLAIN };
                check(Dtype::Bfloat16, rows, outputs, inner, Rows::Columns, around);
            }
        }
        for rows in 2..=MAX_ROWS {
            check(Dtype::Bfloat16, rows, 100, 128, Rows::Whole, PLAIN);
        }
        Ok(())
    });
}

#[test]
fn operations_around_a_product_are_fused() {
    on_cuda(|| {
        let norms = [None, Some(true), Some(false)];
        let gates = [None, Some(Gate::Silu), Some(Gate::Gelu), Some(Gate::GeluTanh)];
        let sums = [None, Some(true), Some(false)];
        let mut n = 0;
        for (outputs, inner) in [(1, 8), (20, 72), (576, 1536), (5003, 264)] {
            for norm in norms {
                for gate in gates {
                    for residual in sums {
                        n += 1;
                        let (bias, wide) = (n % 2 == 0, n % 5 < 2 && norm == Some(true));
                        let around = Surroundings { bias, norm, wide, gate, residual };
                        if norm.is_none() && gate.is_none() && residual.is_none() {
                            continue;
                        }
                        let lie = [Rows::Whole, Rows::Unaligned, Rows::Columns][n % 3];
                        let dtype = [Dtype::Bfloat16, Dtype::Float16][n / 3 % 2];
                        for rows in [1, 2, [3, 4, 8, 9, 16][n % 5]] {
                            check(dtype, rows, outputs, inner, lie, around);
                        }
                    }
                }
            }
        }
        Ok(())
    });
}

/// Compares a product whose outputs are heads. All heads except the last two rotate.
fn check_heads(dtype: Dtype, rows: i32, n: i32, head_dim: i32, lie: Rows, bias: bool) {
    let (inner, outputs, half) = (72, n * head_dim, head_dim / 2);
    let x = lie.make(rows, inner, dtype);
    let small = Array::from_f32(1.0 / (inner as f32).sqrt()).as_dtype(dtype).unwrap();
    let w = array(2, &[outputs, inner], dtype).multiply(small).unwrap();
    let bias = bias.then(|| array(3, &[outputs], dtype));
    w.eval().unwrap();
    let at: Vec<i32> = (0..rows).map(|row| row * 371 % 1000).collect();
    let lengths: Vec<f32> = (0..half).map(|j| 1.5f32.powi(j % 16)).collect();
    let positions = Array::from_slice(&at, &[rows]);
    let periods = Array::from_slice(&lengths, &[half]);
    let rotation = Some(Rotation { positions: &positions, periods: &periods, heads: n - 2 });
    let norm = RmsNorm { weight: None, eps: 1e-5, in_float32: false };
    let norm = (rows % 2 == 0 || rows == 1).then_some(norm);
    let rotated = Product { bias: bias.as_ref(), rotation, norm, ..Product::plain(&x, &w, false) };
    let found = values(&few_rows(&rotated).unwrap().expect("the kernel supports it"));
    let plain = few_rows(&Product { rotation: None, ..rotated }).unwrap().unwrap();
    let plain = values(&plain);
    let rounding = if dtype == Dtype::Float16 { 1e-3 } else { 8e-3 };
    let (head_dim, half, outputs) = (head_dim as usize, half as usize, outputs as usize);
    for (i, &found) in found.iter().enumerate() {
        let (row, output) = (i / outputs, i % outputs);
        let j = output % head_dim;
        let first = i - j + j % half;
        let (x, y) = (plain[first], plain[first + half]);
        let angle = if output / head_dim < n as usize - 2 {
            f64::from(at[row]) / f64::from(lengths[j % half])
        } else {
            0.0
        };
        let wanted = match j < half {
            true => x * angle.cos() - y * angle.sin(),
            false => x * angle.sin() + y * angle.cos(),
        };
        // The angle is computed in float32.
        let most = rounding * x.abs().max(y.abs()) + 1e-6 * angle * x.abs().max(y.abs()) + 1e-6;
        let case = (dtype, rows, n, head_dim, lie);
        assert!((found - wanted).abs() <= most, "{case:?}: {found} at {i} for {wanted}");
    }
}

#[test]
fn heads_turn_on_the_way() {
    on_cuda(|| {
        for (n, head_dim) in [(3, 16), (15, 64), (48, 64), (9, 96), (5, 128)] {
            for (rows, lie) in [
                (1, Rows::Unaligned),
                (2, Rows::Whole),
                (5, Rows::Unaligned),
                (8, Rows::Unaligned),
                (11, Rows::Whole),
                (16, Rows::Whole),
            ] {
                for dtype in [Dtype::Bfloat16, Dtype::Float16] {
                    check_heads(dtype, rows, n, head_dim, lie, rows % 3 == 2);
                }
            }
        }
        Ok(())
    });
}

#[test]
fn heads_that_turn_fit_the_product() {
    run(|| {
        let half = Dtype::Bfloat16;
        let (x, weight) = (array(1, &[1, 3, 64], half), array(2, &[160, 64], half));
        let takes = |tokens: i32, n_periods: i32, heads: i32, gate: Option<Gate>| {
            let positions = Array::zeros::<i32>(&[tokens])?;
            let periods = Array::ones::<f32>(&[n_periods])?;
            let rotation = Some(Rotation { positions: &positions, periods: &periods, heads });
            let product = Product { rotation, gate, ..Product::plain(&x, &weight, false) };
            Ok::<_, crate::Error>(Call::of(&product).map(|call| call.form.rotated))
        };
        assert_eq!(takes(3, 16, 4, None)?, Some(128));
        assert_eq!(takes(3, 16, 5, None)?, Some(160));
        // The kernel refuses another number of tokens, heads that do not fill tiles or the outputs, no heads, and too
        // many heads.
        for (tokens, periods, heads) in [(4, 16, 4), (3, 4, 4), (3, 24, 1), (3, 16, 0), (3, 16, 6)]
        {
            assert_eq!(takes(tokens, periods, heads, None)?, None);
        }
        assert_eq!(takes(3, 16, 2, Some(Gate::Silu))?, None);
        let (positions, periods) = (Array::ones::<f32>(&[3])?, Array::ones::<f32>(&[16])?);
        let rotation = Some(Rotation { positions: &positions, periods: &periods, heads: 1 });
        assert!(Call::of(&Product { rotation, ..Product::plain(&x, &weight, false) }).is_none());
        Ok(())
    })
    .unwrap();
}

#[test]
fn only_supported_products_are_accepted() {
    run(|| {
        let half = Dtype::Bfloat16;
        let takes = |x: &[i32], w: &[i32], transposed: bool| {
            let weight = array(2, w, half);
            weight.eval()?;
            let x = array(1, x, half);
            Ok::<_, crate::Error>(Call::of(&Product::plain(&x, &weight, transposed)).is_some())
        };
        assert!(takes(&[1, 4, 64], &[10, 64], false)?);
        assert!(takes(&[4, 64], &[10, 64], false)?);
        // One row, many rows, several matrices, other dtypes, and a number of elements that is not a multiple
        // of a piece.
        for x in [&[1, 1, 64][..], &[1, 17, 64], &[2, 4, 64], &[64], &[1, 4, 72]] {
            assert!(!takes(x, &[10, 64], false)?);
        }
        assert!(!takes(&[1, 4, 12], &[10, 12], false)?);
        // A weight with the transposed memory layout.
        assert!(!takes(&[1, 4, 64], &[64, 10], true)?);
        let x = array(1, &[1, 4, 64], half);
        let view = array(2, &[10, 64], half).transpose_axes(&[1, 0])?;
        view.eval()?;
        assert!(Call::of(&Product::plain(&x, &view, true)).is_some());
        let weight = array(2, &[10, 64], half);
        let plain = Product::plain(&x, &weight, false);
        for (shape, dtype, fits) in
            [(&[10][..], half, true), (&[1], half, false), (&[10], Dtype::Float32, false)]
        {
            let bias = array(3, shape, dtype);
            assert_eq!(Call::of(&Product { bias: Some(&bias), ..plain }).is_some(), fits);
        }
        let full = array(1, &[1, 4, 64], Dtype::Float32);
        assert!(Call::of(&Product { x: &full, ..plain }).is_none());
        Ok(())
    })
    .unwrap();
}

#[test]
fn operations_around_a_product_must_fit() {
    run(|| {
        let half = Dtype::Bfloat16;
        let (x, weight) = (array(1, &[1, 2, 64], half), array(2, &[10, 64], half));
        let plain = Product::plain(&x, &weight, false);
        let norm = |weight: &Array| {
            [false, true].map(|in_float32| {
                let norm = Some(RmsNorm { weight: Some(weight), eps: 1e-6, in_float32 });
                Call::of(&Product { norm, ..plain }).is_some()
            })
        };
        assert_eq!(norm(&array(3, &[64], half)), [true, false]);
        assert_eq!(norm(&array(3, &[64], Dtype::Float32)), [false, true]);
        assert_eq!(norm(&array(3, &[10], half)), [false, false]);
        // Rows that are too long to be normalized.
        for (rows, inner, fits) in [(16, 2048, true), (8, 4096, true), (16, 2056, false)] {
            let (x, weight) = (array(1, &[1, rows, inner], half), array(2, &[2, inner], half));
            let norm = Some(RmsNorm { weight: None, eps: 1e-6, in_float32: false });
            let product = Product { norm, ..Product::plain(&x, &weight, false) };
            assert_eq!(Call::of(&product).is_some(), fits);
        }
        let gated = Product { gate: Some(Gate::Silu), ..plain };
        assert_eq!(Call::of(&gated).map(|call| call.out.to_vec()), Some(vec![1, 2, 5]));
        let odd = array(2, &[9, 64], half);
        assert!(Call::of(&Product { weight: &odd, ..gated }).is_none());
        let residual = |shape: &[i32], gate: Option<Gate>| {
            let residual = array(3, shape, half);
            Call::of(&Product { residual: Some(&residual), gate, ..plain }).is_some()
        };
        assert!(residual(&[1, 2, 10], None) && residual(&[1, 2, 5], Some(Gate::Gelu)));
        // A residual that MLX would broadcast.
        assert!(!residual(&[10], None) && !residual(&[1, 1, 1], None));
        assert!(!residual(&[1, 1, 10], Some(Gate::Gelu)));
        Ok(())
    })
    .unwrap();
}

#[test]
fn blocks_share_the_tiles() {
    for (outputs, tile, blocks) in
        [(1, 16, 1), (16, 16, 1), (17, 16, 2), (17, 8, 3), (128_256, 16, 264)]
    {
        assert_eq!(threads(outputs, tile), blocks * THREADS);
    }
}
