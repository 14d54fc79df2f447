//! Steps that are committed before their values are read.

use etkv_core::{
    AttendCache, Cache, CacheConfig, CellsCache, KvFormat, LayerPolicy, Result, Status, Step, Store,
};

use super::filled;
use crate::backend::Backend;

const DIM: usize = 64;

/// The sequences of the tokens of a step that will be undone.
const BAD: [i32; 7] = [0, 1, 2, 2, 2, 2, 0];

fn cache<B: Backend>(config: CacheConfig) -> CellsCache<B::Store> {
    CellsCache::with_trees(config).unwrap()
}

/// Opens a step of tokens of these sequences, whose values in the last layer are `value`.
fn open<'a, B: Backend>(
    cache: &'a mut CellsCache<B::Store>,
    sequences: &[i32],
    value: f32,
) -> Result<Step<'a, B::Store>> {
    let n_layers = cache.config().layers.len();
    let positions: Vec<i32> = (0..sequences.len())
        .map(|token| {
            let before = sequences[..token].iter().filter(|&&one| one == sequences[token]).count();
            cache.sequences().unwrap().seq_next(sequences[token]).unwrap() + before as i32
        })
        .collect();
    cache.sequences_mut().unwrap().begin_step(sequences)?;
    let mut step = Step::begin(cache, &positions)?;
    let ones = filled::<B>(1, sequences.len(), DIM, 1.0);
    let last = filled::<B>(1, sequences.len(), DIM, value);
    for layer in 0..n_layers {
        let v = if layer + 1 == n_layers { &last } else { &ones };
        drop(step.update_and_fetch(layer, &ones, v)?);
    }
    Ok(step)
}

/// Commits a step of tokens of these sequences unread.
fn unread<B: Backend>(cache: &mut CellsCache<B::Store>, sequences: &[i32], value: f32) {
    let step = open::<B>(cache, sequences, value).unwrap();
    step.schedule(&[]).unwrap();
    step.commit_unread(&[]).unwrap();
}

/// Returns the attention of a query of each sequence in the last layer, where all values are 1.
fn seen<B: Backend>(cache: &mut CellsCache<B::Store>, sequences: &[i32]) -> Vec<f32> {
    let layer = cache.config().layers.len() - 1;
    let mut step = open::<B>(cache, sequences, 1.0).unwrap();
    let ones = filled::<B>(1, sequences.len(), DIM, 1.0);
    let spec = step.update_and_fetch(layer, &ones, &ones).unwrap();
    let q = filled::<B>(1, sequences.len(), DIM, 0.1);
    let out = B::attend(&q, &spec, 0.1).unwrap();
    drop(spec);
    step.commit(&[&out]).unwrap();
    B::rows(&out).into_iter().map(|row| row[0][0]).collect()
}

/// Returns a cache of three layers in which sequences 0 and 1 share two tokens, and have one more token each.
fn forked<B: Backend>(format: KvFormat) -> CellsCache<B::Store> {
    // There are enough cells to leave room between sequences.
    let mut cache = cache::<B>(CacheConfig::uniform(3, 1, DIM as i32, 512).stored_as(format));
    seen::<B>(&mut cache, &[0, 0]);
    cache.sequences_mut().unwrap().seq_cp(0, 1, 0..i32::MAX).unwrap();
    seen::<B>(&mut cache, &[0, 1]);
    cache
}

/// Checks that a committed step with values that are not finite is undone.
fn assert_undone<B: Backend>(cache: &mut CellsCache<B::Store>) {
    assert_eq!(cache.length(), 4);
    let cells = cache.sequences().unwrap();
    assert_eq!([0, 1, 2].map(|one| cells.seq_len(one).unwrap()), [3, 3, 0]);
    assert_eq!(cells.live_sequences(), [0, 1]);
    // Sequence 2 takes the first of the cells that are free again, and sequence 3 takes cells after these. The cells
    // between them are read with a mask.
    for sequences in [&[2][..], &[3], &[0, 3], &[2, 1, 0], &[0; 9], &[1, 2]] {
        for value in seen::<B>(cache, sequences) {
            assert!((value - 1.0).abs() < 0.1, "{value}");
        }
    }
}

type Change<B> = fn(&mut CellsCache<<B as Backend>::Store>) -> Result<()>;

/// Returns calls that read the values first, and change nothing if these are not finite.
fn changes<B: Backend>() -> Vec<Change<B>> {
    vec![
        |cache| cache.check_unread(),
        |cache| cache.sequences_mut().unwrap().seq_cp(0, 1, 0..i32::MAX),
        |cache| cache.sequences_mut().unwrap().seq_rm(0, 0..i32::MAX),
        |cache| cache.sequences_mut().unwrap().seq_keep(1),
        |cache| cache.sequences_mut().unwrap().compact(),
        |cache| cache.trees_mut().unwrap().propose(0, &[-1]),
        |cache| cache.rewind(1),
        |cache| cache.convert(KvFormat::F32, KvFormat::F32),
        // The next step, committed or committed unread, and a step that begins after another one was cancelled.
        |cache| open::<B>(cache, &[1, 2], 1.0)?.commit(&[]),
        |cache| open::<B>(cache, &[1, 2], 1.0)?.commit_unread(&[]),
        |cache| {
            drop(open::<B>(cache, &[1, 2], 1.0)?);
            cache.sequences_mut().unwrap().cancel_step()?;
            open::<B>(cache, &[1], 1.0).map(drop)
        },
        |cache| {
            let step = open::<B>(cache, &[1, 2], f32::NAN)?;
            step.eval(&[])?;
            let number = step.set_aside().ok().unwrap();
            let checked = cache.check_unread();
            assert_eq!(cache.resume(number), checked.is_ok());
            checked
        },
    ]
}

/// The next call that changes the cache returns the error of the step, and the step is undone.
pub fn values_that_are_not_finite_undo_a_committed_step<B: Backend>() {
    B::run(|| {
        for format in ["f16", "f32", "affine4g64"].map(|name| name.parse().unwrap()) {
            for (number, change) in changes::<B>().into_iter().enumerate() {
                let mut cache = forked::<B>(format);
                let step = open::<B>(&mut cache, &BAD, f32::INFINITY).unwrap();
                let at_once = step.commit(&[]).unwrap_err();
                cache.sequences_mut().unwrap().cancel_step().unwrap();
                let step = open::<B>(&mut cache, &BAD, f32::INFINITY).unwrap();
                if !B::Store::ENDS_UNREAD {
                    assert_eq!(step.commit_unread(&[]).unwrap_err(), at_once);
                    continue;
                }
                step.commit_unread(&[]).unwrap();
                assert_eq!(cache.length(), 4 + BAD.len() as i32);
                let formats = cache.formats();
                let error = change(&mut cache).unwrap_err();
                let (status, words) = (error.status(), error.message());
                assert_eq!(status, Status::InvalidArgument, "change {number}: {error}");
                assert!(words.ends_with(at_once.message()), "{error} is not {at_once}");
                assert!(words.contains("attention layer 2 of"), "{error}");
                assert_eq!(cache.formats(), formats);
                cache.check_unread().unwrap();
                cache.sequences_mut().unwrap().cancel_step().unwrap();
                assert_undone::<B>(&mut cache);
            }
        }
    });
}

/// Finite values are read once, and a later step that was set aside remains.
pub fn a_step_that_was_committed_unread_stays<B: Backend>() {
    B::run(|| {
        let mut cache = forked::<B>(KvFormat::F16);
        unread::<B>(&mut cache, &[0, 1, 2], 1.0);
        assert_eq!(cache.length(), 7);
        let number = open::<B>(&mut cache, &[0, 2], 1.0).unwrap().set_aside().ok().unwrap();
        cache.check_unread().unwrap();
        let step = Step::resume(&mut cache, number).expect("it is still there");
        step.commit_unread(&[]).unwrap();
        assert_eq!(cache.length(), 9);
        for change in changes::<B>() {
            let mut cache = forked::<B>(KvFormat::F16);
            unread::<B>(&mut cache, &[0, 1, 2], 1.0);
            let changed = change(&mut cache);
            // The copy is refused because sequence 1 has another token at the target, and the rewind because there
            // are several sequences.
            assert!(changed.is_ok() || !changed.unwrap_err().message().contains("finite"));
        }
        // Dropping or clearing the cache is not an error. Values that are not finite must not remain, because a mask
        // cannot hide them.
        let mut cache = forked::<B>(KvFormat::F16);
        if B::Store::ENDS_UNREAD {
            unread::<B>(&mut cache, &[0, 1, 2], f32::NAN);
            cache.clear(false).unwrap();
            assert_eq!(cache.length(), 0);
            for value in seen::<B>(&mut cache, &[3, 4, 3, 4, 3]) {
                assert!((value - 1.0).abs() < 0.01, "{value}");
            }
            unread::<B>(&mut cache, &[0], f32::NAN);
        }
    });
}

/// A commit that drops, moves or converts rows cannot be undone, so the values of such a step are read immediately.
pub fn steps_that_cannot_be_undone_are_read_immediately<B: Backend>() {
    B::run(|| {
        let uniform = || CacheConfig::uniform(2, 1, DIM as i32, 64);
        let mut windowed = CacheConfig { max_step_tokens: 4, ..uniform() };
        windowed.layers[1].policy = LayerPolicy::Window { window: 8, sinks: 0 };
        let quantized = CacheConfig {
            k_format: "affine4g64".parse().unwrap(),
            v_format: "affine4g64".parse().unwrap(),
            quantized_kv_start: Some(3),
            ..uniform()
        };
        for config in [windowed, quantized] {
            let mut cache = cache::<B>(config);
            seen::<B>(&mut cache, &[0]);
            let step = open::<B>(&mut cache, &[0, 1], f32::NAN).unwrap();
            let error = step.commit_unread(&[]).unwrap_err();
            assert_eq!(error.status(), Status::InvalidArgument);
            assert_eq!(cache.length(), 1);
        }
        let mut tree = cache::<B>(uniform());
        seen::<B>(&mut tree, &[0]);
        tree.trees_mut().unwrap().propose(1, &[-1]).unwrap();
        let step = open::<B>(&mut tree, &[0], f32::NAN).unwrap();
        assert_eq!(step.commit_unread(&[]).unwrap_err().status(), Status::InvalidArgument);
        assert_eq!(tree.length(), 1);
        // A layer was not called.
        let mut cache = cache::<B>(uniform());
        let ones = filled::<B>(1, 1, DIM, 1.0);
        let mut step = Step::begin(&mut cache, &[0]).unwrap();
        drop(step.update_and_fetch(0, &ones, &ones).unwrap());
        assert_eq!(step.commit_unread(&[]).unwrap_err().status(), Status::Step);
        assert_eq!(cache.length(), 0);
        assert!(!cache.can_commit_unread(), "no step is open");
        assert_eq!(cache.commit_unread().unwrap_err().status(), Status::Step);
    });
}
