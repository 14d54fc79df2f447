//! The calls of a program, made in the same way as by ExecuTorch's delegates.

#![allow(clippy::panic, clippy::unwrap_used)]

mod calls;
mod refused;

use std::sync::mpsc::{channel, Receiver, Sender};
use std::time::Duration;

use calls::{attend_payload, bytes, Method, Taker, DIM, FLOAT, LONG};
use etkv_core::{
    CacheConfig, CacheRegistry, Entry, Error, KvFormat, Result, Session, SharedCache, Status,
};
use etkv_cpu::program::{abort_forward, Call};
use etkv_cpu::{builders, CellsCache, ContiguousCache, Serial, CPU_BACKEND};
use etkv_delegate::{Argument, Host, LoadOptions};
use refused::refused;

fn session(n_layers: usize) -> Session {
    let config = CacheConfig::uniform(n_layers, 1, DIM as i32, 8).stored_as(KvFormat::F32);
    Session::new(builders(), CPU_BACKEND, ContiguousCache::KIND, config).unwrap()
}

fn options(key: &str) -> LoadOptions {
    LoadOptions::parse(key, "all", "", "").unwrap()
}

/// Returns the output of layer 1 for the query at the last of these positions.
fn expected(positions: std::ops::RangeInclusive<i64>) -> Vec<f32> {
    let last = *positions.end();
    let row = |at: i64, add: f32| (0..DIM).map(move |i| (at as f32 + add) * 0.1 + i as f32 * 0.01);
    let score = |at| 0.5 * row(last, 1.0).zip(row(at, 2.0)).map(|(q, k)| q * k).sum::<f32>();
    let weights: Vec<f32> = positions.clone().map(|at| score(at).exp()).collect();
    let sum: f32 = weights.iter().sum();
    let mut out = vec![0.0; DIM];
    for (at, weight) in positions.zip(weights) {
        out.iter_mut().zip(row(at, 4.0)).for_each(|(out, v)| *out += weight / sum * v);
    }
    out
}

fn assert_near(found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    for (a, b) in found.iter().zip(expected) {
        assert!((a - b).abs() < 1e-5, "{found:?}, expected {expected:?}");
    }
}

fn length(session: &Session) -> i32 {
    session.cache().lock().unwrap().length()
}

#[test]
fn a_forward_attends_and_commits() {
    let session = session(2);
    let mut method = Method::load("forward", session.key());
    let prompt = method.forward(&[0, 1, 2]).unwrap();
    assert_near(&prompt[2 * DIM..], &expected(0..=2));
    assert_eq!(length(&session), 3);
    assert_near(&method.forward(&[3]).unwrap(), &expected(0..=3));
    assert_eq!(length(&session), 4);
}

/// A step is open between the calls of a forward. A failed call rolls it back.
#[test]
fn a_failed_forward_changes_nothing() {
    let session = session(2);
    let mut method = Method::load("fails", session.key());
    method.forward(&[0, 1, 2]).unwrap();
    let mut host = Taker::default();
    let mut refusing = Taker { refuses: true, ..Taker::default() };
    let check = |method: &mut Method, failed: Result<()>, status, told: &str| {
        refused(failed, status, told);
        assert_eq!(length(&session), 3);
        assert_near(&method.forward(&[3]).unwrap(), &expected(0..=3));
        session.cache().lock().unwrap().rewind(3).unwrap();
    };

    let failed = method.call(0, &[9], &mut host);
    check(&mut method, failed, Status::Position, "layer 0: position 9");
    let failed = method.call(0, &[i64::from(i32::MAX) + 1], &mut host);
    check(&mut method, failed, Status::Position, "2147483648 is not a 32-bit integer");
    let failed = method.call(0, &[3, 4, 5, 6, 7, 8], &mut host);
    check(&mut method, failed, Status::Capacity, "8");
    let failed = method.call(1, &[3], &mut host);
    check(&mut method, failed, Status::Step, "expected call 0 of a forward, got call 1");
    let failed = method.call(0, &[3], &mut refusing);
    check(&mut method, failed, Status::Shape, "no room");
    method.call(0, &[3], &mut host).unwrap();
    let failed = method.call(1, &[3], &mut refusing);
    check(&mut method, failed, Status::Shape, "no room");
    method.call(0, &[3], &mut host).unwrap();
    let failed = method.call(1, &[4], &mut host);
    check(&mut method, failed, Status::Position, "the positions of the forward's first layer");
}

/// The config declares that the values of the second layer are in its keys, but those of the program are not.
#[test]
fn a_wrong_config_is_refused() {
    let mut config = CacheConfig::uniform(2, 1, DIM as i32, 8).stored_as(KvFormat::F32);
    config.layers[1].values_in_keys = true;
    let session = Session::new(builders(), CPU_BACKEND, ContiguousCache::KIND, config).unwrap();
    let mut method = Method::load("wrong config", session.key());
    // A step without tokens cannot show the difference.
    let _ = method.forward(&[]);
    for _ in 0..2 {
        let told =
            "values of layer 1 are not the first 8 elements of its keys, but the cache's config sets `values_in_keys`";
        refused(method.forward(&[0, 1]), Status::Shape, told);
        assert_eq!(length(&session), 0);
    }
}

/// If an operator between two calls fails, the next forward begins a new step. So does a forward after the
/// method is loaded again.
#[test]
fn an_unfinished_forward_is_rolled_back() {
    let session = session(2);
    let mut method = Method::load("unfinished", session.key());
    let mut host = Taker::default();
    method.call(0, &[0, 1], &mut host).unwrap();
    assert_eq!(length(&session), 0);
    refused(session.cache().lock().unwrap().rewind(0), Status::Step, "");
    method.forward(&[0, 1, 2]).unwrap();
    assert_eq!(length(&session), 3);

    method.call(0, &[3], &mut host).unwrap();
    drop(method);
    assert_eq!(length(&session), 3);
    session.cache().lock().unwrap().rewind(1).unwrap();
}

/// A host that notices the failure can roll the step back at once. Otherwise it could not declare the
/// sequences of the next step.
#[test]
fn a_host_aborts_an_unfinished_forward() {
    let config = CacheConfig::uniform(2, 1, DIM as i32, 8).stored_as(KvFormat::F32);
    let session = Session::new(builders(), CPU_BACKEND, CellsCache::SEQ, config).unwrap();
    let declare = || session.cache().lock().unwrap().sequences_mut().unwrap().begin_step(&[7]);
    let mut method = Method::load("aborted", session.key());
    abort_forward();
    declare().unwrap();
    method.call(0, &[0], &mut Taker::default()).unwrap();
    refused(declare(), Status::Step, "");
    abort_forward();
    assert_eq!(length(&session), 0);
    declare().unwrap();
    assert_near(&method.forward(&[0]).unwrap(), &expected(0..=0));
    assert_eq!(length(&session), 1);
    // There is nothing left to abort, also on a thread without a forward.
    abort_forward();
    declare().unwrap();
    method.call(0, &[1], &mut Taker::default()).unwrap();
    std::thread::scope(|scope| scope.spawn(abort_forward).join().unwrap());
    method.call(1, &[1], &mut Taker::default()).unwrap();
    assert_eq!(length(&session), 2);
}

/// Two programs run at the same time: each waits in a call until the other is also in one.
#[test]
fn programs_run_at_the_same_time() {
    struct Meeting(Sender<()>, Receiver<()>, Taker);
    impl Host for Meeting {
        fn place(&mut self, index: usize, shape: &[i32], n_bytes: usize) -> Result<&mut [u8]> {
            self.0.send(()).unwrap();
            match self.1.recv_timeout(Duration::from_secs(30)) {
                Ok(()) => self.2.place(index, shape, n_bytes),
                Err(_) => {
                    Err(Error::new(Status::Internal, "the other program did not run meanwhile"))
                }
            }
        }

        fn set_integer(&mut self, index: usize, value: i64) -> Result<()> {
            self.2.set_integer(index, value)
        }
    }
    let [(to_a, from_b), (to_b, from_a)] = [channel(), channel()];
    let meetings = [
        ("a", Meeting(to_b, from_b, Taker::default())),
        ("b", Meeting(to_a, from_a, Taker::default())),
    ];
    std::thread::scope(|scope| {
        for (name, mut host) in meetings {
            scope.spawn(move || {
                let session = session(2);
                let mut method = Method::load(name, session.key());
                method.call(0, &[0, 1], &mut host).unwrap();
                method.call(1, &[0, 1], &mut host).unwrap();
                assert_eq!(length(&session), 2);
            });
        }
    });
}

/// The same program is loaded twice, and the calls of both alternate on one thread.
#[test]
fn each_load_has_a_forward_of_its_own() {
    let [one, two] = [session(2), session(2)];
    let load = |session: &Session, call| {
        Call::load(attend_payload("twice", call, 2).as_bytes(), &options(session.key())).unwrap()
    };
    let mut first = Method::load("twice", one.key());
    let mut second = Method::load("twice", two.key());
    // The calls of a file may be in another order.
    let last = load(&one, 1);
    let mut third = Method(vec![load(&one, 0), last]);
    first.forward(&[0, 1]).unwrap();
    second.forward(&[0]).unwrap();
    assert_eq!((length(&one), length(&two)), (2, 1));
    let mut host = Taker::default();
    first.call(0, &[2], &mut host).unwrap();
    // The third method has the same cache as the first, but another forward.
    refused(third.call(1, &[2], &mut host), Status::Step, "expected call 0");
    refused(third.call(0, &[2], &mut host), Status::Step, "");
    first.call(1, &[2], &mut host).unwrap();
    third.forward(&[3]).unwrap();
    assert_eq!(length(&one), 4);
}

/// A load that fails halfway does not affect the next one.
#[test]
fn a_load_that_fails_is_forgotten() {
    let session = session(2);
    let load = |call| {
        Call::load(attend_payload("half", call, 2).as_bytes(), &options(session.key())).unwrap()
    };
    drop(load(1));
    let mut method = Method((0..2).map(load).collect());
    method.forward(&[0]).unwrap();
    assert_eq!(length(&session), 1);
}

#[test]
fn caches_that_do_not_fit_are_refused() {
    let check = |key: &str, status, told: &str| {
        refused(Call::load(attend_payload("x", 0, 2).as_bytes(), &options(key)), status, told);
    };
    check("no such", Status::NoCache, "no such");
    let three = session(3);
    check(three.key(), Status::Shape, "attends in 2 layers");
    let cache = ContiguousCache::new(CacheConfig::uniform(2, 1, DIM as i32, 8)).unwrap();
    let entry = Entry { backend_id: "other".to_owned(), cache: SharedCache::new(cache) };
    CacheRegistry::global().install("of another", entry).unwrap();
    check("of another", Status::Kind, "for backend `cpu`, the cache `of another` for `other`");
    CacheRegistry::global().erase("of another");

    let mut method = Method::load("none", "");
    let failed = method.call(0, &[0], &mut Taker::default());
    refused(failed, Status::NoCache, "pass `cache_key`");
}

#[test]
fn arguments_that_do_not_fit_are_refused() {
    let session = session(2);
    let mut method = Method::load("arguments", session.key());
    let row = [0.5f32; DIM];
    let shape = [1, 1, 1, DIM as i32];
    let tensor = Argument::tensor;
    let good = tensor(FLOAT, &shape, bytes(&row));
    let at = tensor(LONG, &[1], &[0; 8]);
    let refusals = [
        (0, Argument::of(3), Status::InvalidArgument, "queries: expected a tensor"),
        (1, tensor(LONG, &shape, bytes(&row)), Status::Dtype, "keys: expected a tensor in float32"),
        (
            2,
            tensor(FLOAT, &shape[1..], bytes(&row)),
            Status::Shape,
            "values: expected 4 dimensions",
        ),
        (0, tensor(FLOAT, &shape, &bytes(&row)[4..]), Status::Shape, "expected 32 aligned bytes"),
        (1, tensor(FLOAT, &[1, 2, 1, 4], bytes(&row)), Status::Shape, "expected keys of shape"),
        (3, tensor(FLOAT, &[1], &[0; 4]), Status::Dtype, "positions: expected int64 or int32"),
        (3, tensor(LONG, &[1, 1, 1], &[0; 8]), Status::Shape, "positions: expected [T] or [T, n]"),
        (3, tensor(LONG, &[2], &[0; 16]), Status::Position, "expected"),
    ];
    for (place, argument, status, told) in refusals {
        let mut inputs = [good, good, good, at];
        inputs[place] = argument;
        let failed = method.0[0].execute(&inputs, &[FLOAT], &mut Taker::default(), &Serial);
        refused(failed, status, told);
        assert_eq!(length(&session), 0);
    }
    let inputs = [good, good, good, at];
    for (inputs, outputs) in [(&inputs[..3], &[FLOAT][..]), (&inputs[..], &[])] {
        let failed = method.0[0].execute(inputs, outputs, &mut Taker::default(), &Serial);
        refused(failed, Status::InvalidArgument, "expected 4 inputs and 1 output");
    }
    let failed = method.0[0].execute(&inputs, &[LONG], &mut Taker::default(), &Serial);
    refused(failed, Status::Dtype, "");
    method.forward(&[0]).unwrap();
}

#[test]
fn rows_are_selected_at_load() {
    let values: Vec<f32> = (0..12).map(|i| i as f32).collect();
    let payload = br#"{"op": "select_rows", "version": 1}"#;
    for (logits, rows, expected) in [("all", 3, &values[..]), ("last", 1, &values[8..])] {
        let mut call =
            Call::load(payload, &LoadOptions::parse("", logits, "", "").unwrap()).unwrap();
        let mut host = Taker::default();
        let hidden = Argument::tensor(FLOAT, &[1, 3, 4], bytes(&values));
        call.execute(&[hidden], &[FLOAT], &mut host, &Serial).unwrap();
        assert_eq!((host.shape, &host.values[..]), (vec![1, rows, 4], expected));
    }
    let proposed = LoadOptions::parse("", "proposed", "", "").unwrap();
    for payload in [&payload[..], attend_payload("x", 0, 2).as_bytes()] {
        refused(Call::load(payload, &proposed), Status::Unsupported, "");
    }
    let all = attend_payload("x", 0, 2).replace("selected", "all");
    let last = LoadOptions::parse("", "last", "", "").unwrap();
    refused(Call::load(all.as_bytes(), &last), Status::Unsupported, "");
}

/// Runs one layer whose call has sinks and a softcap, for tokens from position 0. Returns its output.
fn attend_with_sinks(
    key: &str,
    softcap: &str,
    sinks: Option<&Argument>,
    n_tokens: usize,
) -> Result<Vec<f32>> {
    let input = if sinks.is_some() { "4" } else { "null" };
    let payload = attend_payload("sinks", 0, 1)
        .replace("\"update_and_attend\"", "\"update_and_attend_sinks\"")
        .replace("[0, 1, 2, 3]", &format!("[0, 1, 2, 3, {input}]"))
        .replace("\"scale\"", &format!("\"softcap\": {softcap}, \"scale\""));
    let mut call = Call::load(payload.as_bytes(), &options(key))?;
    let row = |at: usize| (0..2 * DIM).map(move |i| ((at * 7 + i * 5) % 11) as f32 * 0.3 - 1.0);
    let queries: Vec<f32> = (0..n_tokens).flat_map(row).collect();
    let rows: Vec<f32> = (0..n_tokens).flat_map(|at| row(at + 3).take(DIM)).collect();
    let at: Vec<u8> = (0..n_tokens as i64).flat_map(|at| at.to_ne_bytes()).collect();
    let n = n_tokens as i32;
    let (of_queries, of_rows, of_positions) =
        ([1, 2, n, DIM as i32], [1, 1, n, DIM as i32], [n, 1]);
    let mut inputs = vec![
        Argument::tensor(FLOAT, &of_queries, bytes(&queries)),
        Argument::tensor(FLOAT, &of_rows, bytes(&rows)),
        Argument::tensor(FLOAT, &of_rows, bytes(&rows)),
        Argument::tensor(LONG, &of_positions, &at),
    ];
    assert_eq!(call.n_inputs(), inputs.len() + usize::from(sinks.is_some()));
    inputs.extend(sinks.cloned());
    let mut host = Taker::default();
    call.execute(&inputs, &[FLOAT], &mut host, &Serial)?;
    Ok(host.values)
}

#[test]
fn a_call_has_sinks_and_a_softcap() {
    let values = [3.0f32, -1.0];
    let row = |at: usize| (0..2 * DIM).map(move |i| ((at * 7 + i * 5) % 11) as f32 * 0.3 - 1.0);
    let n = 3;
    for (softcap, cap) in [("null", None), ("0.75", Some(0.75f32))] {
        for with_sinks in [false, true] {
            let session = session(1);
            let sinks = Argument::tensor(FLOAT, &[2], bytes(&values));
            let sinks = with_sinks.then_some(&sinks);
            let found = attend_with_sinks(session.key(), softcap, sinks, n).unwrap();
            let all: Vec<f32> = (0..n).flat_map(row).collect();
            let key = |at: usize| row(at + 3).take(DIM);
            for (row, found) in found.chunks(DIM).enumerate() {
                let (head, token) = (row / n, row % n);
                let score = |at| {
                    let query = &all[row * DIM..][..DIM];
                    let score = 0.5 * key(at).zip(query).map(|(k, q)| k * q).sum::<f32>();
                    cap.map_or(score, |cap| cap * (score / cap).tanh())
                };
                let weights: Vec<f32> = (0..=token).map(|at| score(at).exp()).collect();
                let sink = if with_sinks { values[head].exp() } else { 0.0 };
                let sum = weights.iter().sum::<f32>() + sink;
                let mut out = vec![0.0; DIM];
                for (at, weight) in weights.iter().enumerate() {
                    out.iter_mut().zip(key(at)).for_each(|(out, v)| *out += weight / sum * v);
                }
                assert_near(found, &out);
            }
        }
    }
}

#[test]
fn sinks_that_do_not_fit_change_nothing() {
    let session = session(1);
    let three = [0.0f32; 3];
    let check = |sinks: Argument, status, told: &str| {
        refused(attend_with_sinks(session.key(), "null", Some(&sinks), 2), status, told);
        assert_eq!(length(&session), 0);
    };
    let sinks = Argument::tensor(FLOAT, &[3], bytes(&three));
    check(sinks, Status::Shape, "layer 0: sinks: expected shape [2], got [3]");
    check(Argument::tensor(LONG, &[2], &[0; 16]), Status::Dtype, "layer 0: sinks: ");
    attend_with_sinks(session.key(), "2.5", None, 2).unwrap();
    assert_eq!(length(&session), 2);
}
