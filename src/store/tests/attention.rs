//! Attention over pools, compared with attention in float64 over the stored rows.

use super::*;
use crate::attention::{attend, AttendSpec, Mask, Scoring};
use crate::error::Status;
use crate::mlx::run;

struct Case {
    k: (KvFormat, i32),
    v: (KvFormat, i32),
    heads: i32,
    group: i32,
    t: i32,
    /// The range of slots that is read.
    read: (i32, i32),
    softcap: Option<f32>,
    /// A sink for each query head, or empty.
    sinks: Vec<f32>,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            k: (KvFormat::F32, 32),
            v: (KvFormat::F32, 32),
            heads: 1,
            group: 1,
            t: 1,
            read: (0, 16),
            softcap: None,
            sinks: Vec::new(),
        }
    }
}

/// Returns whether query `i` of head `head` sees a key.
type Sees = dyn Fn(usize, usize, usize) -> bool;

fn oracle(q: &[f32], k: &[f32], v: &[f32], case: &Case, sees: &Sees) -> Vec<f64> {
    let n = (case.read.1 - case.read.0) as usize;
    let (dk, dv, t) = (case.k.1 as usize, case.v.1 as usize, case.t as usize);
    let mut out = Vec::new();
    for head in 0..(case.heads * case.group) as usize {
        let kv = head / case.group as usize;
        for i in 0..t {
            let q = &q[(head * t + i) * dk..][..dk];
            let score = |j: usize| {
                let k = &k[(kv * n + j) * dk..][..dk];
                let score =
                    q.iter().zip(k).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() * 0.25;
                match case.softcap.map(f64::from) {
                    Some(softcap) => softcap * (score / softcap).tanh(),
                    None => score,
                }
            };
            let seen: Vec<usize> = (0..n).filter(|&j| sees(head, i, j)).collect();
            let scores: Vec<f64> = seen.iter().map(|&j| score(j)).collect();
            let sink = case.sinks.get(head).map(|&sink| f64::from(sink));
            let most = scores.iter().chain(&sink).fold(f64::MIN, |a, &b| a.max(b));
            let weights: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
            let of_sink = sink.map_or(0.0, |sink| (sink - most).exp());
            let total = weights.iter().sum::<f64>() + of_sink;
            for d in 0..dv {
                let sum = |(&j, w): (&usize, &f64)| w * f64::from(v[(kv * n + j) * dv + d]);
                out.push(seen.iter().zip(&weights).map(sum).sum::<f64>() / total);
            }
        }
    }
    out
}

fn check(case: &Case) -> Result<()> {
    let (start, stop) = case.read;
    let (n, t) = (stop - start, case.t);
    let n_heads = case.heads * case.group;
    let slots = stop + 3;
    let k = pool_of(case.k.0, &rows(20, case.heads, slots, case.k.1))?.read(start, stop)?;
    let v = pool_of(case.v.0, &rows(21, case.heads, slots, case.v.1))?.read(start, stop)?;
    let q = rows(22, n_heads, t, case.k.1);
    let [held_k, held_v] =
        [&k, &v].map(|rows| values(&rows.dequantized(Dtype::Float32).unwrap()).unwrap());

    // Every query sees its own key. Some queries also see other keys.
    let offset = (n - t) as usize;
    let scattered =
        move |head: usize, i: usize, j: usize| j == offset + i || (j * 7 + i * 3 + head) % 5 < 2;
    let shared = move |_: usize, i: usize, j: usize| scattered(0, i, j);
    let array_of = |heads: usize, sees: &Sees, shape: &[i32]| {
        let mut mask = Vec::new();
        for head in 0..heads {
            for i in 0..t as usize {
                mask.extend((0..n as usize).map(|j| sees(head, i, j)));
            }
        }
        Array::from_slice(&mask, shape)
    };
    let masks: [(Mask, &Sees); 5] = [
        (Mask::None, &|_, _, _| true),
        (Mask::Causal, &move |_, i, j| j <= offset + i),
        (Mask::Explicit(array_of(1, &shared, &[t, n])), &shared),
        (Mask::Explicit(array_of(1, &shared, &[1, 1, t, n])), &shared),
        (Mask::Explicit(array_of(n_heads as usize, &scattered, &[1, n_heads, t, n])), &scattered),
    ];
    let tolerances = [(Dtype::Float32, 2e-5), (Dtype::Float16, 5e-3), (Dtype::Bfloat16, 4e-2)];
    for (mask, sees) in masks {
        for (dtype, tolerance) in tolerances {
            let q = q.as_dtype(dtype)?;
            let expected = oracle(&values(&q)?, &held_k, &held_v, case, sees);
            let spec = AttendSpec { k: k.clone(), v: v.clone(), mask: mask.clone() };
            // The dtype of sinks may be wider or narrower than that of the queries.
            let sinks = Array::from_slice(&case.sinks, &[case.sinks.len() as i32]);
            let sinks = sinks.as_dtype([Dtype::Float32, Dtype::Bfloat16][t as usize % 2])?;
            let sinks = (!case.sinks.is_empty()).then_some(&sinks);
            let scoring = Scoring { scale: 0.25, softcap: case.softcap, sinks };
            let out = attend(&q, &spec, scoring, None)?;
            assert_eq!(out.dtype(), dtype);
            assert_eq!(out.shape(), [1, n_heads, t, case.v.1]);
            for (at, (x, y)) in values(&out)?.iter().zip(&expected).enumerate() {
                assert!(
                    (f64::from(*x) - y).abs() <= tolerance * (1.0 + y.abs()),
                    "{:?} {:?}, {} heads of {}, {t} queries, {:?}, {dtype:?}, softcap {:?}, sinks {:?}: {x}, not \
                     {y}, at {at}",
                    case.k,
                    case.v,
                    case.heads,
                    case.group,
                    if let Mask::Explicit(mask) = &mask { mask.shape() } else { &[] },
                    case.softcap,
                    case.sinks,
                );
            }
        }
    }
    Ok(())
}

#[test]
fn attention_over_every_format_is_attention_over_its_rows() {
    run(|| {
        for form in formats() {
            for (t, heads, group) in [(1, 2, 4), (3, 3, 1), (40, 2, 2)] {
                let (k, v, read) = (form, form, (2, 47));
                check(&Case { k, v, heads, group, t, read, ..Case::default() })?;
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn keys_and_values_differ_in_format_and_in_head_dim() {
    let affine = |bits| KvFormat::Affine { bits, group: 32 };
    let pairs = [
        ((KvFormat::F16, 48), (affine(4), 64)),
        ((affine(8), 64), (KvFormat::F32, 40)),
        ((KvFormat::RowInt4, 80), (KvFormat::Nvfp4, 32)),
        ((KvFormat::Mxfp8, 32), (affine(3), 96)),
        ((KvFormat::RowFp4, 64), (KvFormat::Bf16, 64)),
        ((affine(2), 128), (KvFormat::RowFp4, 40)),
        ((KvFormat::F32, 16), (KvFormat::F16, 24)),
    ];
    run(|| {
        for (k, v) in pairs {
            for (t, heads, group) in [(1, 1, 3), (5, 2, 2), (150, 2, 2)] {
                check(&Case { k, v, heads, group, t, read: (0, 160), ..Case::default() })?;
            }
        }
        Ok(())
    })
    .unwrap();
}

/// The sinks are exact in bfloat16.
#[test]
fn every_format_has_sinks_and_softcaps() {
    run(|| {
        let scorings = [(None, true), (Some(0.5), false), (Some(4.0), true)];
        for (number, form) in formats().into_iter().enumerate() {
            let shapes = [(1, 2, 4), (4, 1, 2), (3, 3, 1), (40, 2, 2)];
            for (shape, (t, heads, group)) in shapes.into_iter().enumerate() {
                // Float rows have every scoring with every shape, other formats with one shape or two.
                let one = [scorings[(number + shape) % 3]];
                for (softcap, sinks) in if form.0.is_float() { &scorings[..] } else { &one } {
                    let sink = |head: i32| [0.5, -2.0, 3.0, -0.25][head as usize % 4];
                    let sinks = (0..heads * group).map(sink).filter(|_| *sinks).collect();
                    let (k, v, read, softcap) = (form, form, (2, 47), *softcap);
                    check(&Case { k, v, heads, group, t, read, softcap, sinks })?;
                }
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn sinks_and_softcaps_that_do_not_fit_are_refused() {
    run(|| {
        let pool = pool_of(KvFormat::F32, &rows(1, 1, 8, 32))?;
        let q = rows(2, 4, 2, 32);
        let refused = |scoring: Scoring| {
            let spec = AttendSpec { k: pool.read(0, 8)?, v: pool.read(0, 8)?, mask: Mask::Causal };
            let error = attend(&q, &spec, scoring, None).unwrap_err();
            Ok::<_, crate::Error>((error.status(), error.message().to_owned()))
        };
        let plain = Scoring::from(0.5);
        for shape in [&[3][..], &[1, 4], &[]] {
            let sinks = Array::zeros::<f32>(shape)?;
            let told = format!("expected sinks of shape [4], one for each head, got {shape:?}");
            let found = refused(Scoring { sinks: Some(&sinks), ..plain })?;
            assert_eq!(found, (Status::Shape, told));
        }
        for softcap in [0.0, -3.0, f32::INFINITY, f32::NAN] {
            let (status, message) = refused(Scoring { softcap: Some(softcap), ..plain })?;
            assert_eq!(status, Status::InvalidArgument);
            assert_eq!(message, format!("expected a softcap from 1e-30 to 1e30, got {softcap}"));
        }
        Ok(())
    })
    .unwrap();
}

/// Reads that span several unpacked blocks.
#[test]
fn blocks_join() {
    run(|| {
        for format in [KvFormat::Mxfp8, KvFormat::RowInt4, KvFormat::RowFp4] {
            let form = (format, if format == KvFormat::Mxfp8 { 64 } else { 40 });
            let (k, v, read) = (form, form, (1, 6000));
            check(&Case { k, v, heads: 8, t: 2, read, ..Case::default() })?;
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_query_that_sees_nothing_is_still_a_number() {
    run(|| {
        for (format, dim) in formats() {
            let pool = pool_of(format, &rows(1, 1, 8, dim))?;
            let mask = Mask::Explicit(Array::from_slice(&[false; 8], &[1, 8]));
            let spec = AttendSpec { k: pool.read(0, 8)?, v: pool.read(0, 8)?, mask };
            let out = values(&attend(&rows(2, 1, 1, dim), &spec, 1.0, None)?)?;
            assert!(out.iter().all(|x| x.is_finite()), "{format}");
        }
        Ok(())
    })
    .unwrap();
}
