//! Tests of async decode, with a program that counts: the token after `n` is `n + 1`. The key and value rows
//! of one token are not finite, but its logits are.

use etkv_core::{CacheConfig, LayerPolicy, SeqCache, Session};

use super::super::read;
use super::*;
use crate::generation::{GenerationOptions, Prompt};
use crate::tests::{attend, expand, load, take, Parts, Weights, INT64, OPEN};
use crate::Program;
use etkv::builders;
use etkv::MLX_BACKEND;

const VOCABULARY: i64 = 32;
const DIM: usize = 8;
/// The token whose key and value rows are infinite.
const BAD: i64 = 20;

/// Loads the program for the cache of a session.
fn counting(session: &Session) -> Program {
    let n = VOCABULARY as i32;
    let parts = Parts {
        constants: [("rows", DIM as i32), ("next", n)]
            .map(|(name, width)| (name.to_owned(), vec![n, width]))
            .to_vec(),
        // 2: tokens, 3: positions.
        inputs: vec![(vec![1, OPEN], INT64), (vec![OPEN], INT64)],
        n_temporaries: 4,
        outputs: vec![7, 6],
        ..Default::default()
    };
    let payload = parts.payload(|builder| {
        vec![vec![
            take(builder, 0, 2, 4),
            expand(builder, 4, 5),
            attend(builder, 5, 3, 6),
            take(builder, 1, 2, 7),
        ]]
    });
    let row = |token: i64| vec![if token == BAD { f32::INFINITY } else { 1.0 }; DIM];
    let after = |token: i64| (0..VOCABULARY).map(move |id| f32::from(id == token + 1));
    let weights = Weights::of([
        ("rows", &(0..VOCABULARY).flat_map(row).collect::<Vec<_>>()),
        ("next", &(0..VOCABULARY).flat_map(after).collect::<Vec<_>>()),
    ]);
    load(&payload, weights, Some(session)).unwrap()
}

fn session(kind: &str, policy: LayerPolicy) -> Session {
    let mut config = CacheConfig { max_step_tokens: 8, ..CacheConfig::uniform(1, 1, 8, 200) };
    config.layers[0].policy = policy;
    Session::new(builders(), MLX_BACKEND, kind, config).unwrap()
}

/// Begins answers to prompts of two tokens, in sequences 0, 2 and so on. `lasts` are the last tokens of the prompts.
fn generation(program: &Program, lasts: &[i64], ahead: bool) -> Generation {
    let prompts = (0..).zip(lasts).map(|(n, &last)| Prompt::new(2 * n, vec![last - 1, last]));
    let run_ahead = if ahead { RunAhead::Always } else { RunAhead::Never };
    let options = GenerationOptions { run_ahead, max_tokens: 11, ..GenerationOptions::default() };
    Generation::new(program, prompts.collect(), options).unwrap()
}

/// The result of a call, and the contents of the cache after it.
type Observations = (Result<Vec<(usize, i64)>>, Vec<(i32, i32)>);

/// Calls `next_tokens` until the answers end, and twice more.
fn called(kind: &str, policy: LayerPolicy, lasts: &[i64], ahead: bool) -> Vec<Observations> {
    let session = session(kind, policy);
    let program = counting(&session);
    let mut generation = generation(&program, lasts, ahead);
    let mut all = Vec::new();
    let mut more = 2;
    while more > 0 {
        let next = generation.next_tokens();
        let next = next.map(|list| list.iter().map(|one| (one.prompt, one.token)).collect());
        if next.as_ref().map_or(true, Vec::is_empty) {
            more -= 1;
        }
        let shared = session.cache();
        let cache = shared.lock().unwrap();
        let held = |cells: &dyn SeqCache| {
            let live = cells.live_sequences();
            live.into_iter().map(|one| (one, cells.seq_next(one).unwrap())).collect()
        };
        all.push((next, cache.sequences().map_or(vec![(0, cache.length())], held)));
    }
    all
}

const WINDOW: LayerPolicy = LayerPolicy::Window { window: 4, sinks: 0 };

#[test]
fn a_step_ahead_whose_values_are_not_finite_is_refused_as_any_other() {
    for (kind, policy) in [("seq", LayerPolicy::Full), ("tree", LayerPolicy::Full), ("seq", WINDOW)]
    {
        for lasts in [&[1][..], &[14], &[1, 14, 5], &[17, 2], &[18], &[19, 3], &[10]] {
            let waiting = called(kind, policy, lasts, false);
            let ahead = called(kind, policy, lasts, true);
            assert_eq!(ahead, waiting, "{kind} {policy:?} {lasts:?}");
            let meets = lasts.iter().any(|last| (last + 1..last + 11).contains(&BAD));
            let errors: Vec<_> = ahead.iter().filter_map(|(next, _)| next.as_ref().err()).collect();
            assert_eq!(errors.len(), if meets { 2 } else { 0 }, "{lasts:?}");
            for error in errors {
                assert_eq!(error.status(), etkv::Status::InvalidArgument);
                assert!(error.message().contains("(attention layer 0 of"), "{error}");
            }
        }
    }
}

/// There is no pause between calls. So when the refused step is undone, the next step is running.
#[test]
fn nothing_is_left_of_the_step_after_one_that_is_undone() {
    let session = session("seq", LayerPolicy::Full);
    let program = counting(&session);
    let mut generation = generation(&program, &[16, 2, 5], true);
    let mut text = Vec::new();
    let error = loop {
        match generation.next_tokens() {
            Ok(next) if next.is_empty() => panic!("no step is refused: {text:?}"),
            Ok(next) => text.extend(next.iter().filter(|one| one.prompt == 0).map(|one| one.token)),
            Err(error) => break error,
        }
    };
    assert!(error.message().contains("not finite"), "{error}");
    assert_eq!(text, [17, 18, 19, BAD], "the token is returned, its step's choice is not");
    assert!(generation.ahead.is_none());
    drop(generation);
    let shared = session.cache();
    let mut cache = shared.lock().unwrap();
    assert!(!cache.report().step_open && cache.report().poisoned.is_none());
    let cells = cache.sequences_mut().unwrap();
    assert_eq!([0, 2, 4].map(|one| cells.seq_next(one).unwrap()), [5; 3]);
    // The other answers go on, in cells after the cells that the step wrote.
    cells.seq_rm(0, 0..i32::MAX).unwrap();
    drop(cache);
    let options = GenerationOptions { max_tokens: 3, ..GenerationOptions::default() };
    let prompts = vec![Prompt::new(2, vec![6]), Prompt::new(4, vec![9]), Prompt::new(6, vec![1])];
    let mut others = Generation::new(&program, prompts, options).unwrap();
    let mut tokens = Vec::new();
    while let [first, ..] = others.next_tokens().unwrap()[..] {
        tokens.push(first.token);
    }
    assert_eq!(tokens, [7, 8, 9]);
}

/// If a step can be undone, the next step begins before the values of the first are known to be finite.
#[test]
fn a_step_of_full_history_is_committed_before_its_values_are_read() {
    for (kind, policy, unread) in [
        ("seq", LayerPolicy::Full, true),
        ("tree", LayerPolicy::Full, true),
        ("seq", WINDOW, false),
        ("contiguous", LayerPolicy::Full, false),
    ] {
        let session = session(kind, policy);
        let program = counting(&session);
        let mut generation = generation(&program, &[1], true);
        generation.next_tokens().unwrap();
        let shared = generation.cache.clone();
        let mut cache = shared.lock().unwrap();
        let ahead = generation.ahead.take().unwrap();
        let length = cache.length();
        let settled = generation.settled(&mut *cache, ahead).unwrap();
        assert_eq!((settled.unread, cache.length()), (unread, length + 1), "{kind} {policy:?}");
        generation.ahead = generation.run_ahead(&mut *cache, &settled).unwrap();
        let checked = generation.check(&mut *cache, settled).unwrap();
        assert!(!checked.unread);
        assert_eq!(read(checked.chosen).unwrap(), [3]);
        let number = generation.ahead.as_ref().and_then(|ahead| ahead.step).unwrap();
        assert!(cache.resume(number), "the next step stays");
        cache.abort();
    }
}
