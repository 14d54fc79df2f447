//! Repeats sessions without a budget, in the order in which their calls ended.

use std::path::PathBuf;

use etkv_core::snapshot::Book;
use etkv_core::{MemoryBudget, Prefix};
use etkv_tests::backend::Backend;
use etkv_tests::campaign::saving::driver::{AnyCache, Shape};

use crate::calls::{call, state, Answer, State};
use crate::prefixes::{book, SharedAction, Text};

/// An action of a session.
#[derive(Debug, Clone)]
pub enum Action {
    Call(u64),
    SharedAction(SharedAction),
}

/// A call of a session: the action, its result, and the state of the cache after it.
pub struct Call {
    /// Its index in the order of the calls of all sessions.
    pub order: u64,
    pub what: Action,
    pub answer: Answer,
    pub after: State,
    /// The slots of the positions, after a call that was refused or that attached the cache.
    pub book: Option<Book>,
}

/// A session that has ended.
pub struct EndedSession {
    pub shape: Shape,
    pub file: PathBuf,
    pub calls: Vec<Call>,
}

/// The numbers of comparisons.
#[derive(Debug, Default, Clone, Copy)]
pub struct Counts {
    pub sessions: usize,
    pub calls: usize,
    /// The number of these calls that were refused.
    pub refused: usize,
    pub frozen: usize,
    pub attached: usize,
}

impl Counts {
    pub fn add(&mut self, other: Self) {
        self.sessions += other.sessions;
        self.calls += other.calls;
        self.refused += other.refused;
        self.frozen += other.frozen;
        self.attached += other.attached;
    }
}

/// A session without a budget, which repeats another.
struct Twin<B: Backend> {
    cache: AnyCache<B>,
    /// Whether the twin was frozen or attached. Its buffers may then have another capacity than the buffers of the
    /// session.
    shares: bool,
    /// Whether rows may be in other slots than in the session: a call that was refused late may have made room for
    /// more rows of a window. Values are then summed in another order.
    apart: bool,
    /// Whether the twin is no longer compared.
    ended: bool,
}

/// Repeats the calls of sessions without a budget, and compares the results.
pub fn compare<B: Backend>(sessions: &[EndedSession]) -> Counts {
    let make = |session: &EndedSession| {
        let _ = std::fs::remove_file(&session.file);
        Twin::<B> { cache: session.shape.make::<B>(), shares: false, apart: false, ended: false }
    };
    let mut twins: Vec<Twin<B>> = sessions.iter().map(make).collect();
    // No prefix is dropped, so that a twin can use all prefixes that its session used.
    let mut frozen: Vec<(Text, Prefix)> = Vec::new();
    let mut counts = Counts { sessions: sessions.len(), ..Counts::default() };
    let mut order: Vec<(usize, &Call)> = sessions
        .iter()
        .enumerate()
        .flat_map(|(at, session)| session.calls.iter().map(move |call| (at, call)))
        .collect();
    order.sort_by_key(|(_, call)| call.order);
    for (at, call) in order {
        if twins[at].ended {
            continue;
        }
        let others_ended = twins.iter().any(|twin| twin.ended);
        let twin = &mut twins[at];
        let goes_on = match &call.what {
            Action::Call(seed) => twin.call(*seed, call, &sessions[at]),
            Action::SharedAction(shared) => twin.share(shared, call, &mut frozen, &mut counts),
        };
        let formats = state::<B>(&twin.cache).1;
        if !goes_on || formats != call.after.1 {
            // A conversion at `quantized_kv_start` that waits for memory is not a refusal. Rows are then stored
            // in float for longer than without a budget, including rows of sessions that attach to them.
            let waits = sessions[at].shape.config.quantized_kv_start.is_some();
            assert!(waits && (goes_on || others_ended), "{:?}: {formats:?}", call.what);
            twin.ended = true;
            continue;
        }
        assert_eq!(twin.cache.length(), call.after.0, "{:?}: {:?}", call.what, call.answer);
        counts.calls += 1;
        counts.refused += usize::from(call.answer == Answer::Refused);
    }
    counts
}

impl<B: Backend> Twin<B> {
    fn call(&mut self, seed: u64, done: &Call, session: &EndedSession) -> bool {
        let is_refused = done.answer == Answer::Refused;
        if is_refused && self.shares {
            // A refused call has not changed anything.
            self.cache.abort();
        } else {
            let budget = MemoryBudget::global();
            budget.set_limit(is_refused.then_some(1));
            let found = Answer::of(call::<B>(seed, &mut self.cache, &session.file));
            budget.set_limit(None);
            let is_same = found == done.answer || (self.apart && found.is_close(&done.answer));
            let converts = state::<B>(&self.cache).1 != done.after.1;
            assert!(is_same || converts, "{found:?} for {:?}: {:?}", done.answer, session.shape);
        }
        self.apart |= is_refused && Some(book::<B>(&mut self.cache)) != done.book;
        true
    }

    /// Returns whether the twin is still compared. It is no longer compared if the prefix belongs to a twin that is
    /// no longer compared.
    fn share(
        &mut self,
        shared: &SharedAction,
        done: &Call,
        frozen: &mut Vec<(Text, Prefix)>,
        counts: &mut Counts,
    ) -> bool {
        self.cache.abort();
        match shared {
            SharedAction::Freeze(text) => {
                if matches!(done.answer, Answer::Done(_)) {
                    frozen.push((text.clone(), self.cache.sharing().unwrap().freeze().unwrap()));
                    counts.frozen += 1;
                    self.shares = true;
                }
                true
            }
            SharedAction::Attach { text, n, frees } => {
                self.cache.clear(*frees).unwrap();
                if *n == 0 {
                    return true;
                }
                (self.shares, self.apart) = (true, false);
                // If several prefixes have these rows, the twin uses the prefix with the same slots. With other
                // slots, windows would drop rows at other times, and values would be summed in another order.
                let is_attached = frozen.iter().any(|(of, prefix)| {
                    if of.get(..*n) != Some(text) || prefix.formats() != done.after.1 {
                        return false;
                    }
                    let face = self.cache.sharing().unwrap();
                    let same = face.attach(prefix, *n as i32).is_ok()
                        && Some(book::<B>(&mut self.cache)) == done.book;
                    if !same {
                        self.cache.clear(true).unwrap();
                    }
                    same
                });
                counts.attached += usize::from(is_attached);
                is_attached
            }
        }
    }
}
