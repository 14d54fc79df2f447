//! Attention against a naive computation in float64 that shares no code with it.

pub(crate) mod reference;
mod scoring;

use etkv_core::{KvFormat, Status};
use half::{bf16, f16};

use self::reference::{case, Case, TestMask};
use super::synthetic::{self, formats, Random, Threads};
use super::*;
use crate::Dtype;

/// Returns a head_dim from 16 to 256 that the format supports.
fn head_dim(format: KvFormat, random: &mut Random) -> usize {
    let granule = format.granule();
    let least = 16usize.div_ceil(granule);
    granule * random.integer(least, (256 / granule).max(least))
}

#[test]
fn every_format_and_mask_and_shape() {
    let mut work = Workspace::new();
    let mut random = Random::new(1);
    let (formats, mut worst) = (formats(), 0f64);
    for round in 0..2 {
        for (i, &k) in formats.iter().enumerate() {
            // In the first round, the values have the format of the keys. In the second round, they have
            // another format.
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
                worst = worst.max(case(shape, k, v, mask, &mut random).check(&mut work));
            }
        }
    }
    // A bound that is much larger than all errors would not detect anything.
    assert!(worst > 0.02, "{worst}");
}

/// Long and short rows, with few and many queries.
#[test]
fn values_are_read_from_their_keys() {
    let mut work = Workspace::new();
    let mut random = Random::new(7);
    for format in formats() {
        for (n_tokens, group) in [(1, 2), (1, 20), (4, 10), (10, 9)] {
            for longest in [200, 600] {
                let granule = format.granule();
                let k_dim = granule * (random.integer(longest - 70, longest) / granule).max(1);
                let shape = [random.integer(1, 2), group, n_tokens, random.integer(1, 200)];
                let (rows, mask) = ((format, k_dim), TestMask::Causal);
                let mut case = case(shape, rows, rows, mask, &mut random);
                case.v = case.k.first(random.integer(1, k_dim));
                case.name.push_str(&format!(", {} values in keys", case.v.head_dim));
                case.check(&mut work);
            }
        }
    }
}

#[test]
fn many_slots_are_split_and_put_together() {
    let mut work = Workspace::new();
    let mut random = Random::new(2);
    let affine = KvFormat::Affine { bits: 4, group: 64 };
    for format in [KvFormat::F32, KvFormat::Bf16, affine, KvFormat::Nvfp4] {
        for (n_tokens, n_slots) in [(1, 2000), (1, 1999), (4, 1537), (20, 2000), (70, 1800)] {
            for mask in
                [TestMask::None, TestMask::Causal, TestMask::random(n_tokens, n_slots, &mut random)]
            {
                let shape = [2, 3, n_tokens, n_slots];
                case(shape, (format, 64), (format, 128), mask, &mut random).check(&mut work);
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
    // A causal mask with more queries than slots. The first queries see no slot.
    let case =
        case([1, 1, 9, 4], (KvFormat::F16, 32), (KvFormat::F16, 32), TestMask::Causal, &mut random);
    case.check(&mut work);
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
        case.check(&mut Workspace::new());
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
        // SAFETY: the plane has slot 200. All its elements become NaN.
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
        // With scores of several thousands, one slot has all the weight.
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
    // Rows in the order of tokens, with a gap after each token.
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
                sinks: None,
                ..case
            };
            let expected = case.attend(Instructions::best(), &Serial, &mut Workspace::new());
            let mut out = vec![of(7.0); 5 * to.token_stride];
            // SAFETY: the vectors have the elements at the strides of the shapes.
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
    check!(f16, Dtype::F16);
    check!(bf16, Dtype::Bf16);
}

#[test]
fn steps_of_one_shape_keep_their_memory() {
    let mut random = Random::new(8);
    let format = (KvFormat::F32, 64);
    let mut work = Workspace::new();
    let case = case([3, 3, 1, 1000], format, format, TestMask::None, &mut random);
    let first = case.attend(Instructions::best(), &Threads(2), &mut work);
    let size = work.size();
    assert!(size > 0);
    for _ in 0..3 {
        assert_eq!(case.attend(Instructions::best(), &Threads(2), &mut work), first);
        assert_eq!(work.size(), size);
    }
}

#[test]
fn threads_attend_at_the_same_time() {
    let mut random = Random::new(9);
    let format = (KvFormat::F32, 64);
    let case = case([3, 3, 2, 1000], format, format, TestMask::Causal, &mut random);
    let expected = case.attend(Instructions::best(), &Serial, &mut Workspace::new());
    let case = std::sync::Arc::new(case);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut work = Workspace::new();
                for _ in 0..50 {
                    assert!(case.attend(Instructions::best(), &Threads(3), &mut work) == expected);
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
        "expected values of 2 heads and 10 slots, like the keys, got 2 heads and 9 slots"
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
    let runs = [0..1, 4..11];
    let error = check(&k, &v, shape, 32, MaskRef::Runs { runs: &runs, ends: &[2] });
    assert_eq!(error.status(), Status::InvalidArgument);
    assert!(Queries::of_f32(&[0.0; 255], shape).is_none());
}
