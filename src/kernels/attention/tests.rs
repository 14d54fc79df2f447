//! Compares the kernel with attention in float64. Without CUDA only the code around the kernel is tested.

use super::*;
use crate::kernels::testing::{array, on_cuda, values};
use crate::mlx::run;

/// The memory layout of rows.
#[derive(Debug, Clone, Copy)]
enum Layout {
    Whole,
    /// Keys and values are some slots of a pool. Queries are ordered by token, as a projection returns them.
    Pool,
    /// Rows that start at any address.
    Unaligned,
}

#[derive(Debug, Clone, Copy)]
struct Case {
    dims: (i32, i32),
    dtype: Dtype,
    kv_heads: i32,
    group: i32,
    t: i32,
    n: i32,
    layout: Layout,
}

impl Case {
    fn rows(&self, seed: u64, dim: i32) -> Array {
        let (heads, n) = (self.kv_heads, self.n);
        match self.layout {
            Layout::Whole => array(seed, &[1, heads, n, dim], self.dtype),
            Layout::Pool => {
                let pool = array(seed, &[1, heads, n + 9, dim], self.dtype);
                slice_axis(&pool, 2, 4, 4 + n, 1).unwrap()
            }
            Layout::Unaligned => {
                let pool = array(seed, &[1, heads, n, dim + 3], self.dtype);
                slice_axis(&pool, 3, 1, 1 + dim, 1).unwrap()
            }
        }
    }

    fn queries(&self) -> Array {
        let (heads, t, dim) = (self.kv_heads * self.group, self.t, self.dims.0);
        match self.layout {
            Layout::Whole => array(1, &[1, heads, t, dim], self.dtype),
            _ => array(1, &[1, t, heads, dim], self.dtype).transpose_axes(&[0, 2, 1, 3]).unwrap(),
        }
    }

    fn masks(&self) -> Vec<(Mask, Vec<bool>)> {
        let (t, n) = (self.t as usize, self.n as usize);
        let each = |sees: &dyn Fn(usize, usize) -> bool| -> Vec<bool> {
            (0..t * n).map(|at| sees(at / n, at % n)).collect()
        };
        let scattered = each(&|i, j| j == n - t + i || (j * 7 + i * 3) % 5 < 2);
        let diagonal = each(&|i, j| j * t / n == i);
        let blind = each(&|i, j| i > 0 && j > i);
        let marks = |seen: &[bool], shape: &[i32]| Mask::Explicit(Array::from_slice(seen, shape));
        vec![
            (Mask::None, vec![true; t * n]),
            (Mask::Causal, each(&|i, j| j <= n - t + i)),
            (marks(&scattered, &[self.t, self.n]), scattered),
            (marks(&diagonal, &[1, 1, self.t, self.n]), diagonal),
            // One query sees no keys.
            (marks(&blind, &[1, self.t, self.n]), blind),
        ]
    }

    fn reference(&self, [q, k, v]: [&[f64]; 3], seen: &[bool], scale: f64) -> Vec<f64> {
        let (t, n) = (self.t as usize, self.n as usize);
        let (dk, dv) = (self.dims.0 as usize, self.dims.1 as usize);
        let mut out = Vec::new();
        for row in 0..(self.kv_heads * self.group * self.t) as usize {
            let first = row / t / self.group as usize * n;
            let q = &q[row * dk..][..dk];
            let score = |j: usize| {
                let products = q.iter().zip(&k[(first + j) * dk..][..dk]).map(|(a, b)| a * b);
                match seen[row % t * n + j] {
                    true => products.sum::<f64>() * scale,
                    false => f64::from(f32::MIN),
                }
            };
            let scores: Vec<f64> = (0..n).map(score).collect();
            let most = scores.iter().copied().fold(f64::MIN, f64::max);
            let weights: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
            let total: f64 = weights.iter().sum();
            for d in 0..dv {
                let sum = weights.iter().enumerate().map(|(j, w)| w * v[(first + j) * dv + d]);
                out.push(sum.sum::<f64>() / total);
            }
        }
        out
    }

    fn check(&self, most_masks: usize) {
        let [q, k, v] = [self.queries(), self.rows(2, self.dims.0), self.rows(3, self.dims.1)];
        let held = [&q, &k, &v].map(values);
        let tolerance = match self.dtype {
            Dtype::Float32 => 5e-6,
            Dtype::Float16 => 2e-3,
            _ => 1e-2,
        };
        let scale = 0.25f32;
        for (mask, seen) in self.masks().into_iter().take(most_masks) {
            let out = attend(&q, &k, &v, &mask, scale).unwrap().expect("the kernel supports it");
            assert_eq!(out.shape(), [1, self.kv_heads * self.group, self.t, self.dims.1]);
            assert_eq!(out.dtype(), self.dtype);
            let wanted = self.reference([&held[0], &held[1], &held[2]], &seen, f64::from(scale));
            let most = wanted.iter().fold(0.0, |a: f64, b| a.max(b.abs()));
            let worst = values(&out).iter().zip(&wanted).fold(0.0, |a: f64, (x, y)| {
                if x.is_nan() {
                    return f64::INFINITY;
                }
                a.max((x - y).abs())
            });
            assert!(worst <= tolerance * most, "{self:?} {mask:?}: {worst} of {most}");
        }
    }
}

#[test]
fn the_kernel_attends_as_the_definition_says() {
    on_cuda(|| {
        let shapes = [
            (2, 4, 1, 5),
            (2, 4, 2, 64),
            (1, 4, 3, 65),
            (8, 4, 8, 1501),
            (2, 3, 7, 130),
            (1, 4, 16, 2000),
            (2, 1, 64, 64),
            (1, 2, 2, 9999),
            (1, 7, 33, 9000),
            (2, 4, 100, 100),
            (1, 4, 333, 1200),
            (4, 1, 512, 700),
        ];
        let common =
            [(Dtype::Bfloat16, (64, 64)), (Dtype::Float16, (128, 128)), (Dtype::Float32, (64, 64))];
        for (dtype, dims) in common {
            for (i, (kv_heads, group, t, n)) in shapes.into_iter().enumerate() {
                let layout = [Layout::Whole, Layout::Pool, Layout::Unaligned][i % 3];
                Case { dims, dtype, kv_heads, group, t, n, layout }.check(5);
            }
        }
        let rare = [
            (Dtype::Bfloat16, (256, 256)),
            (Dtype::Float16, (192, 128)),
            (Dtype::Float16, (80, 112)),
            (Dtype::Float32, (128, 128)),
        ];
        for (dtype, dims) in rare {
            for (t, n) in [(5, 333), (20, 1000)] {
                let layout = Layout::Pool;
                Case { dims, dtype, kv_heads: 2, group: 4, t, n, layout }.check(2);
            }
        }
        Ok(())
    });
}

/// Calls of one graph that do not depend on each other have separate counters.
#[test]
fn calls_that_run_at_a_time_do_not_disturb_each_other() {
    on_cuda(|| {
        let shape = |heads, n| [1, heads, n, 64];
        let q = array(1, &shape(32, 8), Dtype::Bfloat16);
        let [k, v] = [2, 3].map(|seed| array(seed, &shape(8, 3000), Dtype::Bfloat16));
        let once = || attend(&q, &k, &v, &Mask::Causal, 0.125).map(|out| out.expect("a kernel"));
        let first = values(&once()?);
        for _ in 0..20 {
            let outs: Vec<Array> = (0..64).map(|_| once()).collect::<Result<_>>()?;
            eval(&outs)?;
            for out in &outs {
                assert!(values(out) == first);
            }
        }
        Ok(())
    });
}

#[test]
fn slices_fill_a_gpu_and_are_worth_merging() {
    assert_eq!(slices_of(64, 8), 1);
    assert_eq!(slices_of(1500, 8), 24);
    assert_eq!(slices_of(32_768, 8), MAX_SLICES);
    assert_eq!(slices_of(32_768, 32), 16);
    assert_eq!(slices_of(i32::MAX, 1), MAX_SLICES);
    for rows in 1..600 {
        let counters = match slices_of(i32::MAX, rows) {
            1 => 0,
            ..=MAX_MERGED => rows,
            _ => rows * 9,
        };
        assert!(counters <= COUNTERS);
    }
}

#[test]
fn supported_calls_fit_any_gpu() {
    for dtype in [Dtype::Float16, Dtype::Bfloat16, Dtype::Float32] {
        for (k_dim, v_dim) in
            (16..=272).step_by(16).flat_map(|k| (16..=272).step_by(16).map(move |v| (k, v)))
        {
            let template = Template { dtype, k_dim, v_dim, mask: 0, scale: 0 };
            let (tiles, bytes) = template.memory().unwrap();
            assert!(tiles >= 1 && (!template.is_supported() || bytes <= MAX_SHARED));
            let small = [k_dim, v_dim].iter().all(|dim| (32..=128).contains(dim));
            assert!(template.is_supported() || !small);
        }
    }
    assert!(Template { dtype: Dtype::Bfloat16, k_dim: 256, v_dim: 256, mask: 0, scale: 0 }
        .is_supported());
    assert!(
        !Template { dtype: Dtype::Int32, k_dim: 64, v_dim: 64, mask: 0, scale: 0 }.is_supported()
    );
}

#[test]
fn masks_with_heads_stay_with_mlx() {
    run(|| {
        let kind =
            |shape: &[i32]| kind_of(&Mask::Explicit(Array::ones::<bool>(shape).unwrap()), 4, 9);
        for shape in [&[4, 9][..], &[1, 9], &[1, 1, 4, 9], &[1, 4, 1]] {
            assert_eq!(kind(shape), Some(2));
        }
        for shape in [&[9][..], &[1, 8, 4, 9], &[8, 4, 9], &[4, 8], &[1, 1, 1, 4, 9]] {
            assert_eq!(kind(shape), None);
        }
        let floats = Mask::Explicit(Array::ones::<f32>(&[4, 9])?);
        assert_eq!(kind_of(&floats, 4, 9), None);
        assert_eq!(kind_of(&Mask::Causal, 10, 9), None);
        Ok(())
    })
    .unwrap();
}
