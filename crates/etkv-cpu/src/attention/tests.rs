//! Attention against a naive computation in float64 that shares no code with it.

use std::ops::Range;

use etkv_core::{KvFormat, Status};
use half::{bf16, f16};

use super::synthetic::{self, Random};
use super::*;
use crate::parallel::Pool;

/// Every format, with every size of group.
fn formats() -> Vec<KvFormat> {
    let mut formats = vec![KvFormat::F32, KvFormat::F16, KvFormat::Bf16];
    for bits in [2, 3, 4, 5, 6, 8] {
        formats.extend([32, 64, 128].map(|group| KvFormat::Affine { bits, group }));
    }
    formats.extend([KvFormat::Mxfp8, KvFormat::Mxfp4, KvFormat::Nvfp4]);
    formats.extend([KvFormat::RowInt4, KvFormat::RowFp4]);
    formats
}

/// The bytes of a row in plane `p`.
fn bytes_of(view: &View, p: usize, slot: usize, head: usize) -> &[u8] {
    let plane = view.planes[p].as_ref().unwrap();
    let at = plane.offset + slot * plane.slot_stride + head * plane.head_stride;
    // SAFETY: the plane has the row.
    unsafe { std::slice::from_raw_parts(plane.memory.as_ptr().add(at), plane.head_stride) }
}

fn f16_at(bytes: &[u8], i: usize) -> f64 {
    f16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f64()
}

/// The number of a small float with `mantissa` bits of mantissa.
fn small_float(code: u32, exponent_bits: u32, mantissa: u32) -> f64 {
    let bias = (1 << (exponent_bits - 1)) - 1;
    let exponent = (code >> mantissa & ((1 << exponent_bits) - 1)) as i32;
    let fraction = f64::from(code & ((1 << mantissa) - 1)) / f64::from(1 << mantissa);
    let size = match exponent {
        0 => fraction * 2f64.powi(1 - bias),
        _ => (1.0 + fraction) * 2f64.powi(exponent - bias),
    };
    if code >> (mantissa + exponent_bits) & 1 == 1 {
        -size
    } else {
        size
    }
}

/// The integer of `bits` bits at place `i`, bit by bit.
fn code_at(bytes: &[u8], i: usize, bits: usize) -> u32 {
    (0..bits).fold(0, |code, bit| {
        let at = i * bits + bit;
        code | u32::from(bytes[at / 8] >> (at % 8) & 1) << bit
    })
}

/// A row in float64.
fn decoded(view: &View, slot: usize, head: usize) -> Vec<f64> {
    let codes = bytes_of(view, 0, slot, head);
    let scale = |i: usize, group: usize| {
        let scales = bytes_of(view, 1, slot, head);
        match view.format {
            KvFormat::Mxfp8 | KvFormat::Mxfp4 => 2f64.powi(i32::from(scales[i / group]) - 127),
            KvFormat::Nvfp4 => small_float(scales[i / group].into(), 4, 3),
            _ => f16_at(scales, i / group),
        }
    };
    let element = |i: usize| match view.format {
        KvFormat::F32 => f32::from_le_bytes(codes[4 * i..4 * i + 4].try_into().unwrap()).into(),
        KvFormat::F16 => f16_at(codes, i),
        KvFormat::Bf16 => bf16::from_le_bytes([codes[2 * i], codes[2 * i + 1]]).to_f64(),
        KvFormat::Affine { bits, group } => {
            let offset = f16_at(bytes_of(view, 2, slot, head), i / usize::from(group));
            f64::from(code_at(codes, i, bits.into())) * scale(i, group.into()) + offset
        }
        KvFormat::Mxfp8 => small_float(codes[i].into(), 4, 3) * scale(i, 32),
        KvFormat::Mxfp4 => small_float(code_at(codes, i, 4), 2, 1) * scale(i, 32),
        KvFormat::Nvfp4 => small_float(code_at(codes, i, 4), 2, 1) * scale(i, 16),
        KvFormat::RowInt4 => (f64::from(code_at(codes, i, 4)) - 8.0) * scale(i, view.head_dim),
        KvFormat::RowFp4 => small_float(code_at(codes, i, 4), 2, 1) * scale(i, view.head_dim),
        _ => panic!("{}", view.format),
    };
    (0..view.head_dim).map(element).collect()
}

/// A mask that owns its runs.
#[derive(Debug, Clone)]
enum TestMask {
    None,
    Causal,
    Runs(Vec<Range<u32>>, Vec<u32>),
}

impl TestMask {
    fn borrowed(&self) -> MaskRef<'_> {
        match self {
            Self::None => MaskRef::None,
            Self::Causal => MaskRef::Causal,
            Self::Runs(runs, ends) => MaskRef::Runs { runs, ends },
        }
    }

    fn sees(&self, token: usize, n_tokens: usize, slot: usize, n_slots: usize) -> bool {
        match self {
            Self::None => true,
            Self::Causal => slot + n_tokens < n_slots + 1 + token,
            Self::Runs(runs, ends) => {
                let begin = if token == 0 { 0 } else { ends[token - 1] as usize };
                runs[begin..ends[token] as usize].iter().any(|r| r.contains(&(slot as u32)))
            }
        }
    }

    /// Runs of all kinds: none, single slots, short and long ones, empty ones.
    fn random(n_tokens: usize, n_slots: usize, random: &mut Random) -> Self {
        let (mut runs, mut ends) = (Vec::new(), Vec::new());
        for _ in 0..n_tokens {
            let longest = [0, 1, 3, 90, n_slots][random.integer(0, 4)];
            let mut at = 0;
            while longest > 0 && at < n_slots && random.integer(0, 5) > 0 {
                let start = at + random.integer(0, 2 * longest);
                let end = start + random.integer(0, longest);
                if end > n_slots {
                    break;
                }
                runs.push(start as u32..end as u32);
                at = end;
            }
            ends.push(runs.len() as u32);
        }
        Self::Runs(runs, ends)
    }
}

/// A call and its inputs.
struct Case {
    name: String,
    n_tokens: usize,
    group: usize,
    queries: Vec<f32>,
    k: View,
    v: View,
    mask: TestMask,
    scale: f32,
}

impl Case {
    fn n_heads(&self) -> usize {
        self.k.n_kv_heads * self.group
    }

    fn shape(&self) -> Shape {
        Shape::contiguous(self.n_heads(), self.n_tokens, self.k.head_dim)
    }

    fn len(&self) -> usize {
        self.n_heads() * self.n_tokens * self.v.head_dim
    }

    fn attend(&self, isa: Instructions, parallel: &dyn Parallel, work: &mut Workspace) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.len()];
        let queries = Queries::of_f32(&self.queries, self.shape()).unwrap();
        let dim = self.v.head_dim;
        let mut output = Output::of_f32(&mut out, self.n_heads(), self.n_tokens, dim).unwrap();
        let mask = self.mask.borrowed();
        attend_with(isa, work, parallel, &queries, &self.k, &self.v, mask, self.scale, &mut output)
            .unwrap();
        out
    }

    /// The result, and for each row how far off float32 may be.
    ///
    /// A score is a sum of `d` products of float32 numbers, each rounded once by a fused operation
    /// (twice without one) after the query is scaled, rounded twice. In the order of vectors the
    /// longest chain is `d / 8 + 4` additions; so a score is off by at most `(d / 8 + 10) * e` times
    /// the sum of the magnitudes of its products, with `e = 2^-24`, and some more for unpacking
    /// elements: one rounding. The difference from the peak and the power of two add `4 e` of the
    /// score and of the weight. A relative error `x` of all weights moves the mean by at most `2 x`
    /// times the largest magnitude of the values. Sums over `n` values in parts add `(n / 16 + 70) *
    /// e`. The bound below is half of that: errors do not all have the same sign.
    fn expected(&self) -> (Vec<f64>, Vec<f64>) {
        let (n, d) = (self.k.n_slots, self.k.head_dim);
        let e = f64::from(f32::EPSILON) / 2.0;
        let mut out = Vec::with_capacity(self.len());
        let mut bounds = Vec::new();
        for head in 0..self.k.n_kv_heads {
            let keys: Vec<_> = (0..n).map(|slot| decoded(&self.k, slot, head)).collect();
            let values: Vec<_> = (0..n).map(|slot| decoded(&self.v, slot, head)).collect();
            for row in 0..self.group * self.n_tokens {
                let token = row % self.n_tokens;
                let query = &self.queries[(head * self.group * self.n_tokens + row) * d..][..d];
                let seen: Vec<usize> =
                    (0..n).filter(|&slot| self.mask.sees(token, self.n_tokens, slot, n)).collect();
                let dots = |slot: usize| {
                    query
                        .iter()
                        .zip(&keys[slot])
                        .map(|(&q, k)| f64::from(q) * k * f64::from(self.scale))
                };
                let scores: Vec<f64> = seen.iter().map(|&slot| dots(slot).sum()).collect();
                let sizes = seen.iter().map(|&slot| dots(slot).map(f64::abs).sum());
                let size = sizes.fold(0.0, f64::max);
                let peak = scores.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
                let weights: Vec<f64> = scores.iter().map(|score| (score - peak).exp()).collect();
                let total: f64 = weights.iter().sum();
                let mut row = vec![0.0; self.v.head_dim];
                let mut largest = 0f64;
                for (&slot, weight) in seen.iter().zip(&weights) {
                    for (out, value) in row.iter_mut().zip(&values[slot]) {
                        *out += weight * value / total;
                        largest = largest.max(value.abs());
                    }
                }
                let of_scores = (d as f64 / 8.0 + 10.0) * size + 4.0 * size + 4.0;
                let of_sums = n as f64 / 16.0 + 70.0;
                bounds.push((of_scores + of_sums / 2.0) * e * largest + 1e-30);
                out.extend(row);
            }
        }
        (out, bounds)
    }

    /// Checks all instruction sets, each with 1, 2 and 3 threads. Returns the largest error as a part
    /// of its bound.
    fn check(&self, pools: &[Pool], work: &mut Workspace) -> f64 {
        let (expected, bounds) = self.expected();
        let mut worst = 0f64;
        for isa in Instructions::available() {
            let found = self.attend(isa, &Serial, work);
            for (i, (&found, &expected)) in found.iter().zip(&expected).enumerate() {
                let bound = bounds[i / self.v.head_dim];
                let error = (f64::from(found) - expected).abs();
                assert!(
                    error <= bound,
                    "{} {isa:?} at {i}: expected {expected}, got {found}, off by {error:e}, limit \
                     {bound:e}",
                    self.name
                );
                worst = worst.max(error / bound);
            }
            for pool in pools {
                let threads = pool.threads();
                let same = self.attend(isa, pool, work);
                assert!(same == found, "{} {isa:?} {threads} threads differ", self.name);
            }
        }
        worst
    }
}

fn case(
    [n_kv_heads, group, n_tokens, n_slots]: [usize; 4],
    k: (KvFormat, usize),
    v: (KvFormat, usize),
    mask: TestMask,
    random: &mut Random,
) -> Case {
    let name = format!(
        "{n_kv_heads} x {group} heads, {n_tokens} tokens, {n_slots} slots, k {} {}, v {} {}, {}",
        k.0,
        k.1,
        v.0,
        v.1,
        match mask {
            TestMask::None => "no mask",
            TestMask::Causal => "causal",
            TestMask::Runs(..) => "runs",
        }
    );
    let queries = (0..n_kv_heads * group * n_tokens * k.1).map(|_| 2.0 * random.number()).collect();
    Case {
        name,
        n_tokens,
        group,
        queries,
        k: synthetic::view(k.0, n_kv_heads, k.1, n_slots, random).unwrap(),
        v: synthetic::view(v.0, n_kv_heads, v.1, n_slots, random).unwrap(),
        mask,
        scale: 1.0 / (k.1 as f32).sqrt(),
    }
}

fn pools() -> [Pool; 2] {
    [Pool::new(2), Pool::new(3)]
}

/// A head_dim from 16 to 256 that fits the format.
fn head_dim(format: KvFormat, random: &mut Random) -> usize {
    let granule = format.granule();
    let least = 16usize.div_ceil(granule);
    granule * random.integer(least, (256 / granule).max(least))
}

#[test]
fn every_format_and_mask_and_shape() {
    let (pools, mut work) = (pools(), Workspace::new());
    let mut random = Random::new(1);
    let (formats, mut worst) = (formats(), 0f64);
    for round in 0..3 {
        for (i, &k) in formats.iter().enumerate() {
            // Values in the same format, then in others.
            let v = formats[(i + 7 * round) % formats.len()];
            for mask in 0..3 {
                let n_tokens = [1, 2, 5, 13, 40, 70][random.integer(0, 5)];
                let most = [3, 64, 130, 700][random.integer(0, 3)];
                let n_slots = random.integer(1, most);
                let heads = [random.integer(1, 3), random.integer(1, 8)];
                let k = (k, head_dim(k, &mut random));
                let v = (v, head_dim(v, &mut random));
                let mask = match mask {
                    0 => TestMask::None,
                    1 => TestMask::Causal,
                    _ => TestMask::random(n_tokens, n_slots, &mut random),
                };
                let shape = [heads[0], heads[1], n_tokens, n_slots];
                worst = worst.max(case(shape, k, v, mask, &mut random).check(&pools, &mut work));
            }
        }
    }
    // A bound that nothing comes near would find nothing.
    assert!(worst > 0.02, "{worst}");
}

#[test]
fn many_slots_are_split_and_put_together() {
    let (pools, mut work) = (pools(), Workspace::new());
    let mut random = Random::new(2);
    let affine = KvFormat::Affine { bits: 4, group: 64 };
    for format in [KvFormat::F32, KvFormat::Bf16, affine, KvFormat::Nvfp4] {
        for (n_tokens, n_slots) in [(1, 2000), (1, 1999), (4, 1537), (20, 2000), (70, 1800)] {
            for mask in
                [TestMask::None, TestMask::Causal, TestMask::random(n_tokens, n_slots, &mut random)]
            {
                let shape = [2, 3, n_tokens, n_slots];
                case(shape, (format, 64), (format, 128), mask, &mut random)
                    .check(&pools, &mut work);
            }
        }
    }
}

#[test]
fn a_query_that_sees_nothing_gives_zeros() {
    let mut random = Random::new(3);
    let mut work = Workspace::new();
    for n_slots in [0, 5, 500] {
        let end = n_slots as u32;
        let mask = TestMask::Runs(vec![0..0, 0..end], vec![1, 1, 2]);
        let case =
            case([2, 2, 3, n_slots], (KvFormat::F32, 32), (KvFormat::F32, 16), mask, &mut random);
        for isa in Instructions::available() {
            let out = case.attend(isa, &Serial, &mut work);
            for (i, row) in out.chunks_exact(16).enumerate() {
                let zeros = i % 3 < 2 || n_slots == 0;
                assert_eq!(row.iter().all(|&x| x == 0.0), zeros, "{isa:?} row {i} of {n_slots}");
            }
        }
    }
    // Causal, with more queries than slots: the first see nothing.
    let case =
        case([1, 1, 9, 4], (KvFormat::F16, 32), (KvFormat::F16, 32), TestMask::Causal, &mut random);
    case.check(&pools(), &mut work);
}

#[test]
fn slots_that_no_query_sees_are_not_read() {
    let mut random = Random::new(4);
    for n_tokens in [1, 12] {
        // Every second run of 5 slots.
        let runs = (0..40 * n_tokens as u32).map(|i| i % 40 * 10..i % 40 * 10 + 5).collect();
        let mask = TestMask::Runs(runs, (1..=n_tokens as u32).map(|i| 40 * i).collect());
        let format = (KvFormat::F32, 64);
        let case = case([2, 2, n_tokens, 400], format, format, mask, &mut random);
        for view in [&case.k, &case.v] {
            let plane = view.planes[0].as_ref().unwrap();
            for slot in (0..400).filter(|slot| slot % 10 >= 5) {
                // SAFETY: the plane has the slot.
                unsafe {
                    let row = plane.memory.as_ptr().add(plane.offset + slot * plane.slot_stride);
                    row.cast::<f32>().write_bytes(0xff, plane.slot_stride / 4);
                }
            }
        }
        case.check(&pools(), &mut Workspace::new());
    }
}

#[test]
fn a_nan_that_is_seen_is_shown() {
    let mut random = Random::new(5);
    for (n_tokens, in_values) in [(1, false), (1, true), (30, false), (30, true)] {
        let format = (KvFormat::F32, 64);
        let case = case([1, 2, n_tokens, 300], format, format, TestMask::None, &mut random);
        let view = if in_values { &case.v } else { &case.k };
        let plane = view.planes[0].as_ref().unwrap();
        // SAFETY: the plane has slot 200, all of whose elements become NaN.
        unsafe {
            plane.memory.as_ptr().add(plane.offset + 200 * 256).cast::<f32>().write_bytes(0xff, 64);
        }
        for isa in Instructions::available() {
            let out = case.attend(isa, &Serial, &mut Workspace::new());
            assert!(out.iter().all(|x| x.is_nan()), "{isa:?} {n_tokens} {in_values}");
        }
    }
}

#[test]
fn large_scores_stay_finite() {
    let mut random = Random::new(6);
    let format = (KvFormat::F32, 64);
    for n_tokens in [1, 30] {
        let mut case = case([1, 1, n_tokens, 900], format, format, TestMask::None, &mut random);
        // Scores of several thousands: one slot takes all the weight.
        case.scale = 100.0;
        let (expected, _) = case.expected();
        for isa in Instructions::available() {
            let out = case.attend(isa, &Serial, &mut Workspace::new());
            for (found, expected) in out.iter().zip(&expected) {
                assert!((f64::from(*found) - expected).abs() < 2e-2, "{found} {expected}");
            }
        }
    }
}

#[test]
fn tensors_have_strides_and_dtypes() {
    let mut random = Random::new(7);
    let format = (KvFormat::F32, 48);
    let mask = TestMask::Causal;
    let case = case([2, 2, 5, 90], format, (KvFormat::F32, 40), mask, &mut random);
    // Token-major, with a gap after each token.
    let strided = |dim: usize| Shape {
        head_stride: dim,
        token_stride: 4 * dim + 3,
        ..Shape::contiguous(4, 5, dim)
    };
    let (from, to) = (strided(48), strided(40));
    macro_rules! check {
        ($float:ty, $dtype:expr) => {{
            let of = |x: f32| <$float>::from_f32(x);
            let mut queries = vec![of(f32::NAN); 5 * from.token_stride];
            let mut rounded = case.queries.clone();
            for (i, x) in rounded.iter_mut().enumerate() {
                let (head, token, at) = (i / 240, i / 48 % 5, i % 48);
                queries[head * from.head_stride + token * from.token_stride + at] = of(*x);
                *x = of(*x).to_f32();
            }
            let case = Case {
                queries: rounded,
                k: case.k.clone(),
                v: case.v.clone(),
                mask: case.mask.clone(),
                name: String::new(),
                ..case
            };
            let expected = case.attend(Instructions::best(), &Serial, &mut Workspace::new());
            let mut out = vec![of(7.0); 5 * to.token_stride];
            // SAFETY: the elements lie where the shapes say.
            let (queries, mut output) = unsafe {
                (
                    Queries::new(queries.as_ptr().cast(), $dtype, from),
                    Output::new(out.as_mut_ptr().cast(), $dtype, to),
                )
            };
            let mut work = Workspace::new();
            let (mask, scale) = (MaskRef::Causal, case.scale);
            attend(&mut work, &Serial, &queries, &case.k, &case.v, mask, scale, &mut output)
                .unwrap();
            let mut written = 0;
            for (i, x) in expected.into_iter().enumerate() {
                let (head, token, at) = (i / 200, i / 40 % 5, i % 40);
                let found = &mut out[head * to.head_stride + token * to.token_stride + at];
                assert_eq!(found.to_f32(), of(x).to_f32());
                *found = of(7.0);
                written += 1;
            }
            assert_eq!(written, 800);
            assert!(out.iter().all(|x| x.to_f32() == 7.0), "the gaps are written");
        }};
    }
    check!(f16, Float::F16);
    check!(bf16, Float::Bf16);
}

#[test]
fn steps_of_one_shape_keep_their_memory() {
    let mut random = Random::new(8);
    let format = (KvFormat::F32, 64);
    let mut work = Workspace::new();
    let pool = Pool::new(2);
    let case = case([3, 3, 1, 1000], format, format, TestMask::None, &mut random);
    let first = case.attend(Instructions::best(), &pool, &mut work);
    let size = work.size();
    assert!(size > 0);
    for _ in 0..3 {
        assert_eq!(case.attend(Instructions::best(), &pool, &mut work), first);
        assert_eq!(work.size(), size);
    }
}

#[test]
fn threads_attend_at_the_same_time_over_one_pool() {
    let mut random = Random::new(9);
    let format = (KvFormat::F32, 64);
    let case = case([3, 3, 2, 1000], format, format, TestMask::Causal, &mut random);
    let pool = Pool::new(3);
    let expected = case.attend(Instructions::best(), &Serial, &mut Workspace::new());
    let case = std::sync::Arc::new(case);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut work = Workspace::new();
                for _ in 0..50 {
                    assert!(case.attend(Instructions::best(), &pool, &mut work) == expected);
                }
            });
        }
    });
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    let mut random = Random::new(10);
    let mut view =
        |heads, dim, slots| synthetic::view(KvFormat::F32, heads, dim, slots, &mut random).unwrap();
    let (k, v) = (view(2, 64, 10), view(2, 32, 10));
    let (few, wide) = (view(2, 32, 9), view(3, 32, 10));
    let check = |k: &View, v: &View, shape: Shape, out_dim: usize, mask: MaskRef| {
        let (queries, mut out) = (vec![0.0; 1024], vec![7.0; 1024]);
        let queries = Queries::of_f32(&queries, shape).unwrap();
        let mut output = Output::of_f32(&mut out, 4, 1, out_dim).unwrap();
        let mut work = Workspace::new();
        let error = attend(&mut work, &Serial, &queries, k, v, mask, 1.0, &mut output).unwrap_err();
        assert!(out.iter().all(|&x| x == 7.0));
        error
    };
    let shape = Shape::contiguous(4, 1, 64);
    let error = check(&k, &few, shape, 32, MaskRef::None);
    assert_eq!(error.status(), Status::Shape);
    assert_eq!(
        error.message(),
        "expected values of 2 heads and 10 slots as the keys have, got 2 heads and 9 slots"
    );
    check(&k, &wide, shape, 32, MaskRef::None);
    let error = check(&k, &v, Shape::contiguous(3, 1, 64), 32, MaskRef::None);
    assert_eq!(
        error.message(),
        "expected queries with a multiple of 2 heads and head_dim 64, got 3 heads and head_dim 64"
    );
    check(&k, &v, Shape::contiguous(4, 1, 32), 32, MaskRef::None);
    let error = check(&k, &v, shape, 64, MaskRef::None);
    assert_eq!(error.message(), "expected an output of shape [4, 1, 32], got [4, 1, 64]");
    let runs = [0..11];
    let error = check(&k, &v, shape, 32, MaskRef::Runs { runs: &runs, ends: &[1] });
    assert_eq!(error.status(), Status::InvalidArgument);
    assert!(Queries::of_f32(&[0.0; 255], shape).is_none());
}
