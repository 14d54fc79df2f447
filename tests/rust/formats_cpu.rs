//! In every format, rows in plain memory have the same bits as rows in MLX arrays.

use etkv_core::{Cache, CacheConfig, ContiguousCache, KvFormat, LayerConfig, LayerPolicy, Step};
use etkv_cpu::{CpuStore, Tensor, View};
use etkv_tests::{for_seeds, Rng};
use half::{bf16, f16};
use mlx_rs::ops::{clip, quantize};
use mlx_rs::{Array, ArrayElement, Dtype};

const HEADS: usize = 2;

/// Every format, with values of `head_dim` that fit it.
fn formats() -> Vec<(KvFormat, usize)> {
    let mut formats: Vec<(KvFormat, usize)> =
        [KvFormat::F32, KvFormat::F16, KvFormat::Bf16].map(|format| (format, 72)).to_vec();
    for format in [KvFormat::Mxfp8, KvFormat::Mxfp4, KvFormat::Nvfp4] {
        formats.extend([64, 96].map(|dim| (format, dim)));
    }
    for format in [KvFormat::RowInt4, KvFormat::RowFp4] {
        formats.extend([24, 64, 136].map(|dim| (format, dim)));
    }
    for bits in [2, 3, 4, 5, 6, 8] {
        for (group, dim) in [(32, 96), (64, 128), (128, 256)] {
            formats.push((KvFormat::Affine { bits, group }, dim));
        }
    }
    formats
}

/// Returns a random row: ordinary, or at a limit of the float range.
fn row(rng: &mut Rng, dim: usize) -> Vec<f32> {
    let normal = |rng: &mut Rng| ((0..6).map(|_| rng.unit() - 0.5).sum::<f64>() * 1.4) as f32;
    let bits = |rng: &mut Rng| f32::from_bits(rng.next_u64() as u32);
    let finite = |x: f32| if x.is_finite() { x } else { 1.0 };
    let mut row: Vec<f32> = match rng.below(12) {
        0 => vec![0.0; dim],
        1 => vec![normal(rng); dim],
        2 => (0..dim).map(|_| rng.pick(&[0.0, -0.0])).collect(),
        3 => (0..dim).map(|_| f32::from_bits(rng.below(1 << 23) as u32)).collect(),
        4 => (0..dim).map(|_| finite(bits(rng))).collect(),
        // Multiples of 1/8, many of them halfway between two codes.
        5 => (0..dim).map(|_| rng.below(129) as f32 / 8.0 - 8.0).collect(),
        6 => {
            let positive = rng.unit() as f32 * 1e5;
            (0..dim).map(|_| positive + normal(rng)).collect()
        }
        7 => (0..dim).map(|_| rng.pick(&[1e-7, 1e-8, -3e-8, 6e-8, 2e-9])).collect(),
        _ => {
            let scale = 2f32.powi(rng.below(60) as i32 - 30);
            (0..dim).map(|_| normal(rng) * rng.pick(&[scale, 1.0])).collect()
        }
    };
    let special = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 65519.0, 65520.0, 3e38];
    match rng.below(8) {
        0 => row[rng.below(dim)] = rng.pick(&special),
        1 => {
            row.iter_mut().for_each(|x| *x = if rng.chance(0.3) { rng.pick(&special) } else { *x })
        }
        2 if rng.chance(0.3) => row.fill(rng.pick(&special)),
        _ => (),
    }
    row
}

/// Returns the same rows, `[1, HEADS, n, dim]`, for both backends.
fn tensors(rng: &mut Rng, n: usize, dim: usize) -> (Array, Tensor) {
    let values: Vec<f32> = (0..HEADS * n).flat_map(|_| row(rng, dim)).collect();
    let shape = [1, HEADS as i32, n as i32, dim as i32];
    match rng.below(3) {
        0 => (Array::from_slice(&values, &shape), Tensor::new(shape, values).unwrap()),
        1 => {
            let values: Vec<f16> = values.into_iter().map(f16::from_f32).collect();
            (Array::from_slice(&values, &shape), Tensor::new(shape, values).unwrap())
        }
        _ => {
            let values: Vec<bf16> = values.into_iter().map(bf16::from_f32).collect();
            (Array::from_slice(&values, &shape), Tensor::new(shape, values).unwrap())
        }
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

fn on_mlx(view: &etkv::KvView) -> Vec<u32> {
    let rows = view.dequantized(Dtype::Float32).unwrap().contiguous().unwrap();
    rows.eval().unwrap();
    bits(rows.as_slice::<f32>())
}

#[track_caller]
fn assert_same(mlx: &etkv::KvView, cpu: &View) {
    let (expected, found) = (on_mlx(mlx), bits(&cpu.dequantized().unwrap()));
    let wrong = expected.iter().zip(&found).position(|(a, b)| a != b);
    if let Some(at) = wrong {
        let (row, dim) = (at / cpu.head_dim(), cpu.head_dim());
        let value = |bits: &[u32]| f32::from_bits(bits[at]);
        panic!(
            "{}, head_dim {dim}, row {row}, element {}: {:e} on MLX, {:e} here",
            cpu.format(),
            at % dim,
            value(&expected),
            value(&found),
        );
    }
    assert_eq!(expected.len(), found.len());
}

/// One cache of the same config on each backend.
struct CachePair {
    mlx: etkv::ContiguousCache,
    cpu: ContiguousCache<CpuStore>,
    dim: usize,
}

impl CachePair {
    fn new([k_format, v_format]: [KvFormat; 2], dim: usize) -> Self {
        let layer = LayerConfig {
            n_kv_heads: HEADS as i32,
            k_head_dim: dim as i32,
            v_head_dim: dim as i32,
            policy: LayerPolicy::Full,
            values_in_keys: false,
        };
        let config = CacheConfig {
            layers: vec![layer],
            k_format,
            v_format,
            ..CacheConfig::uniform(1, 1, 1, 64)
        };
        let mlx = ContiguousCache::new(config.clone()).unwrap();
        Self { mlx, cpu: ContiguousCache::new(config).unwrap(), dim }
    }

    /// Appends generated rows, and compares all rows.
    fn append(&mut self, rng: &mut Rng, n: usize) {
        let [k, v] = [0, 1].map(|_| tensors(rng, n, self.dim));
        let length = self.mlx.length();
        let positions: Vec<i32> = (length..length + n as i32).collect();
        let mut mlx = Step::begin(&mut self.mlx, &positions).unwrap();
        let mut cpu = Step::begin(&mut self.cpu, &positions).unwrap();
        let expected = mlx.update_and_fetch(0, &k.0, &v.0).unwrap();
        let found = cpu.update_and_fetch(0, &k.1, &v.1).unwrap();
        assert_same(&expected.k, &found.k);
        assert_same(&expected.v, &found.v);
        drop((expected, found));
        mlx.commit(&[]).unwrap();
        cpu.commit(&[]).unwrap();
    }
}

#[test]
fn rows_have_the_same_bits() {
    for_seeds(40, |seed| {
        etkv::mlx::run(|| {
            let mut rng = Rng::new(seed);
            for (format, dim) in formats() {
                let mut both = CachePair::new([format; 2], dim);
                for n in [9, 1, 16] {
                    both.append(&mut rng, n);
                }
            }
            Ok(())
        })
        .unwrap();
    });
}

#[test]
fn converted_rows_have_the_same_bits() {
    for_seeds(20, |seed| {
        etkv::mlx::run(|| {
            let mut rng = Rng::new(seed);
            let formats: Vec<KvFormat> = formats().into_iter().map(|(format, _)| format).collect();
            let mut both = CachePair::new([0, 1].map(|_| rng.pick(&formats)), 256);
            for _ in 0..4 {
                both.append(&mut rng, 4);
                let [k, v] = [0, 1].map(|_| rng.pick(&formats));
                both.mlx.convert(k, v).unwrap();
                both.cpu.convert(k, v).unwrap();
            }
            both.append(&mut rng, 4);
            Ok(())
        })
        .unwrap();
    });
}

fn bytes<T: ArrayElement + Copy>(array: &Array, to: impl Fn(T) -> Vec<u8>) -> Vec<u8> {
    let flat = array.contiguous().unwrap();
    flat.eval().unwrap();
    flat.as_slice::<T>().iter().flat_map(|&word| to(word)).collect()
}

/// The planes are those that MLX's own function computes.
#[test]
fn affine_planes_are_those_of_mlx() {
    for_seeds(20, |seed| {
        etkv::mlx::run(|| {
            let mut rng = Rng::new(seed);
            for (format, dim) in formats() {
                let KvFormat::Affine { bits, group } = format else { continue };
                let (rows, tensor) = tensors(&mut rng, 6, dim);
                let rows = clip(rows.as_dtype(Dtype::Float32)?, (-65504.0, 65504.0))?;
                let (codes, scales, offsets) = quantize(rows, i32::from(group), i32::from(bits))?;
                let halves = |array: &Array| {
                    let halves = array.as_dtype(Dtype::Float16).unwrap();
                    bytes::<f16>(&halves, |half| half.to_le_bytes().to_vec())
                };
                let planes = [
                    bytes::<u32>(&codes, |word| word.to_le_bytes().to_vec()),
                    halves(&scales),
                    halves(&offsets),
                ];
                let mut cache = CachePair::new([format; 2], dim).cpu;
                let mut step = Step::begin(&mut cache, &(0..6).collect::<Vec<_>>()).unwrap();
                let view = step.update_and_fetch(0, &tensor, &tensor).unwrap().k;
                for (at, plane) in planes.iter().enumerate() {
                    let width = plane.len() / (HEADS * 6);
                    for (row, expected) in plane.chunks(width).enumerate() {
                        let found = view.row(at, row % 6, row / 6).unwrap();
                        assert_eq!(found, expected, "{format}, plane {at}, row {row}");
                    }
                }
            }
            Ok(())
        })
        .unwrap();
    });
}
