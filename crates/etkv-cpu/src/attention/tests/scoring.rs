//! Softcaps and sinks.

use super::reference::{case, TestMask};
use super::*;

#[test]
fn every_format_and_mask_and_shape_with_sinks_and_softcaps() {
    let mut work = Workspace::new();
    let mut random = Random::new(21);
    let (formats, mut worst) = (formats(), 0f64);
    for (i, &k) in formats.iter().enumerate() {
        let v = formats[(i + 5) % formats.len()];
        for mask in 0..3 {
            let n_tokens = [1, 2, 5, 13, 40, 70][random.integer(0, 5)];
            let most = [3, 64, 130, 700][random.integer(0, 3)];
            let n_slots = random.integer(1, most);
            let mask = match mask {
                0 => TestMask::None,
                1 => TestMask::Causal,
                _ => TestMask::random(n_tokens, n_slots, &mut random),
            };
            let shape = [random.integer(1, 3), random.integer(1, 8), n_tokens, n_slots];
            let (k, v) = ((k, head_dim(k, &mut random)), (v, head_dim(v, &mut random)));
            let mut case = case(shape, k, v, mask, &mut random);
            let which = random.integer(0, 2);
            if which < 2 {
                case = case.with_sinks(&mut random);
            }
            if which > 0 {
                // The softcaps range from one that changes nearly every score to one that changes almost
                // none.
                case = case.with_softcap([0.3, 2.0, 30.0][random.integer(0, 2)]);
            }
            worst = worst.max(case.check(&mut work));
        }
    }
    assert!(worst > 0.02, "{worst}");
}

#[test]
fn parts_share_one_sink() {
    let mut work = Workspace::new();
    let mut random = Random::new(22);
    for format in [KvFormat::F32, KvFormat::Affine { bits: 4, group: 64 }] {
        for (n_tokens, n_slots) in [(1, 2000), (4, 1537), (20, 2000), (70, 1800)] {
            let shape = [2, 3, n_tokens, n_slots];
            let of = (format, 64);
            let case = case(shape, of, of, TestMask::Causal, &mut random).with_sinks(&mut random);
            // Some sinks have as much weight as all slots together.
            let sinks = case.sinks.as_ref().unwrap().iter().map(|sink| sink + 8.0).collect();
            Case { sinks: Some(sinks), ..case }.with_softcap(5.0).check(&mut work);
        }
    }
}

#[test]
fn sinks_at_the_ends_of_the_range() {
    let mut random = Random::new(23);
    let format = (KvFormat::F32, 32);
    for n_tokens in [1, 30] {
        let plain = case([2, 2, n_tokens, 300], format, format, TestMask::Causal, &mut random);
        let expected = plain.attend(Instructions::best(), &Serial, &mut Workspace::new());
        let sinks = vec![f32::NEG_INFINITY, 1e4, f32::NAN, -1e4];
        let case = Case { sinks: Some(sinks), ..plain };
        for isa in Instructions::available() {
            let out = case.attend(isa, &Serial, &mut Workspace::new());
            for (at, (found, expected)) in out.iter().zip(&expected).enumerate() {
                let fits = match at / (32 * n_tokens) {
                    // The sink has all the weight.
                    1 => *found == 0.0,
                    2 => found.is_nan(),
                    _ => (found - expected).abs() < 1e-5,
                };
                assert!(fits, "{isa:?} {n_tokens} at {at}: {found}, without sinks {expected}");
            }
        }
    }
}

#[test]
fn a_query_that_sees_nothing_but_its_sink_gives_zeros() {
    let mut random = Random::new(24);
    for n_slots in [0, 5, 500] {
        let mask = TestMask::Runs(vec![0..0, 0..n_slots as u32], vec![1, 2]);
        let format = (KvFormat::F16, 32);
        let case = case([1, 2, 2, n_slots], format, format, mask, &mut random)
            .with_sinks(&mut random)
            .with_softcap(20.0);
        case.check(&mut Workspace::new());
    }
}

#[test]
fn wrong_sinks_and_softcaps_are_refused() {
    let mut random = Random::new(25);
    let format = (KvFormat::F32, 32);
    let case = case([1, 2, 1, 10], format, format, TestMask::None, &mut random);
    let refused = |scoring: Scoring<[f32]>| {
        let mut out = vec![7.0; 64];
        let queries = Queries::of_f32(&case.queries, Shape::contiguous(2, 1, 32)).unwrap();
        let mut output = Output::of_f32(&mut out, 2, 1, 32).unwrap();
        let mut work = Workspace::new();
        let (k, v) = (&case.k, &case.v);
        let error = attend(&mut work, &Serial, &queries, k, v, MaskRef::None, scoring, &mut output)
            .unwrap_err();
        assert!(out.iter().all(|&x| x == 7.0));
        (error.status(), error.message().to_owned())
    };
    let plain = case.scoring();
    assert_eq!(
        refused(Scoring { sinks: Some(&[0.0; 3]), ..plain }),
        (Status::Shape, "expected 2 sinks, one per head, got 3".to_owned())
    );
    for softcap in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-39] {
        let (status, message) = refused(Scoring { softcap: Some(softcap), ..plain });
        assert_eq!(status, Status::InvalidArgument);
        assert_eq!(message, format!("expected a softcap from 1e-30 to 1e30, got {softcap}"));
    }
}
