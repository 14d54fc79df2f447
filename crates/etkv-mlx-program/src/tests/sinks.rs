//! Programs whose attention has sinks and a softcap.

use etkv::{builders, MLX_BACKEND};
use etkv_core::{CacheConfig, KvFormat};

use super::*;

/// The fields of the node.
#[derive(Clone, Copy)]
struct Fields {
    layer: Option<i32>,
    scale: Option<f32>,
    softcap: Option<f32>,
    sinks: bool,
}

const GOOD: Fields = Fields { layer: Some(0), scale: Some(1.0), softcap: Some(2.0), sinks: true };

const HEADS: i32 = 2;
const DIM: i32 = 4;

/// Returns a program of one attention layer. Each head of the input is query, key and value. Slots: 0 sinks, 1 rows,
/// 2 positions, 3 result.
fn payload(fields: Fields, n_sinks: i32) -> Vec<u8> {
    let parts = Parts {
        constants: vec![(String::from("sinks"), vec![n_sinks])],
        inputs: vec![(vec![1, HEADS, OPEN, DIM], FLOAT32), (vec![OPEN], INT64)],
        n_temporaries: 1,
        outputs: vec![3],
        ..Default::default()
    };
    parts.payload(|builder| {
        let sinks = fb::Tid::new(0);
        vec![vec![node!(
            builder, UpdateAndAttendSinksNode, UpdateAndAttendSinksNodeArgs,
            [q: 1, k: 1, v: 1, position: 2, out: 3],
            sinks: fields.sinks.then_some(&sinks), layer_id: fields.layer, scale: fields.scale,
            softcap: fields.softcap, out_dtype: None
        )]]
    })
}

fn session() -> Session {
    let config = CacheConfig::uniform(1, HEADS, DIM, 64).stored_as(KvFormat::F32);
    Session::new(builders(), MLX_BACKEND, "contiguous", config).unwrap()
}

fn load(session: &Session, fields: Fields, sinks: &[f32]) -> Result<Program> {
    let payload = payload(fields, sinks.len() as i32);
    super::load(&payload, Weights::of([("sinks", sinks)]), Some(session))
}

/// The row of a head at a position.
fn row(head: usize, at: usize) -> impl Iterator<Item = f32> {
    (0..DIM as usize).map(move |i| ((at * 7 + head * 3 + i * 5) % 11) as f32 * 0.3 - 1.0)
}

/// Returns the outputs of tokens `first..end`.
fn step(program: &Program, first: usize, end: usize) -> Result<Vec<f32>> {
    let rows = (0..HEADS as usize).flat_map(|head| (first..end).flat_map(move |at| row(head, at)));
    let rows = bytes(&rows.collect::<Vec<_>>());
    let positions = positions(first as i64..end as i64);
    let shape = [1, HEADS, (end - first) as i32, DIM];
    let arguments = [
        Argument::tensor(FLOAT32, &shape, &rows),
        Argument::tensor(INT64, &shape[2..3], &positions),
    ];
    // A damaged program may have no outputs.
    let made = execute(program, &arguments)?.pop();
    Ok(made.map(|(_, numbers)| numbers).unwrap_or_default())
}

fn expected(head: usize, at: usize, softcap: Option<f32>, sink: Option<f32>) -> Vec<f32> {
    let score = |key| {
        let score = row(head, at).zip(row(head, key)).map(|(q, k)| q * k).sum::<f32>();
        softcap.map_or(score, |softcap| softcap * (score / softcap).tanh())
    };
    let weights: Vec<f32> = (0..=at).map(|key| score(key).exp()).collect();
    let total = weights.iter().sum::<f32>() + sink.map_or(0.0, f32::exp);
    let mut out = vec![0.0; DIM as usize];
    for (key, weight) in weights.iter().enumerate() {
        out.iter_mut().zip(row(head, key)).for_each(|(out, v)| *out += weight / total * v);
    }
    out
}

#[test]
fn attention_has_sinks_and_a_softcap() {
    let sinks = [1.5, -0.5];
    for softcap in [None, Some(0.8)] {
        for has_sinks in [false, true] {
            let session = session();
            let fields = Fields { softcap, sinks: has_sinks, ..GOOD };
            let program = load(&session, fields, &sinks).unwrap();
            for (first, end) in [(0, 5), (5, 6), (6, 9)] {
                let made = step(&program, first, end).unwrap();
                for (i, found) in made.chunks(DIM as usize).enumerate() {
                    let (head, at) = (i / (end - first), first + i % (end - first));
                    let sink = has_sinks.then(|| sinks[head]);
                    for (found, expected) in found.iter().zip(expected(head, at, softcap, sink)) {
                        assert!(
                            (found - expected).abs() < 1e-5,
                            "head {head} at {at}, {softcap:?} {sink:?}: {found}, not {expected}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn sinks_of_other_heads_change_nothing() {
    let session = session();
    let program = load(&session, GOOD, &[0.0; 3]).unwrap();
    let error = step(&program, 0, 2).unwrap_err();
    assert_eq!(error.status(), Status::Shape);
    assert!(
        error.message().ends_with("expected sinks of shape [2], one for each head, got [3]"),
        "{error}"
    );
    assert_eq!(session.cache().lock().unwrap().length(), 0);
}

#[test]
fn nodes_that_lack_what_they_need_are_refused() {
    let cases = [
        (Fields { layer: None, ..GOOD }, "expected a layer_id of UpdateAndAttendSinks, got none"),
        (Fields { layer: Some(-2), ..GOOD }, "UpdateAndAttendSinks of at least 0, got -2"),
        (Fields { scale: None, ..GOOD }, "a scale of UpdateAndAttendSinks of layer 0, got none"),
        (
            Fields { softcap: Some(0.0), ..GOOD },
            "UpdateAndAttendSinks of layer 0: expected a softcap from 1e-30 to 1e30, got 0",
        ),
        (Fields { softcap: Some(f32::NAN), ..GOOD }, "got NaN"),
    ];
    for (fields, words) in cases {
        let message = refusal(&payload(fields, HEADS));
        assert!(message.contains(words), "{message}");
    }
}

/// Changes each byte of a payload in several ways. Each time the program must run or be refused.
#[test]
fn damaged_nodes_run_or_are_refused() {
    let session = session();
    let payload = payload(GOOD, HEADS);
    let (mut refused, mut ran) = (0, 0);
    for at in 24..payload.len() {
        for value in [0, 1, 255, payload[at] ^ 4, payload[at] ^ 64] {
            let mut damaged = payload.clone();
            damaged[at] = value;
            let sinks = Weights::of([("sinks", &[0.5, -0.5])]);
            let done = super::load(&damaged, sinks, Some(&session))
                .and_then(|program| step(&program, 0, 3));
            match done {
                Ok(_) => ran += 1,
                Err(error) => {
                    assert_ne!(error.status(), Status::Internal, "byte {at} is {value}: {error}");
                    refused += 1;
                }
            }
            session.cache().lock().unwrap().rewind(0).unwrap();
        }
    }
    assert!(refused > 100 && ran > 100, "{refused} refused, {ran} ran");
}
