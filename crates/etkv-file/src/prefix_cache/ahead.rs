//! Reads texts from the store before they are needed, on a separate thread.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{sync_channel, Receiver, SyncSender, TrySendError};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use etkv_core::{Cache, Error, Result, Status};
use parking_lot::Mutex;
use tracing::{debug, warn};

use super::{Inner, PrefixCacheReport};
use crate::prefix_cache::capacity_of;
use crate::store::index::Group;
use crate::store::TARGET;

/// The maximum number of texts that wait to be read.
const MAX_WAITING: usize = 16;

/// The maximum number of texts whose results are remembered.
const MAX_ANSWERS: usize = 64;

/// The time after which the store is queried again for a text that was read ahead: other processes may have stored
/// more of the text.
const ANSWERED_FOR: Duration = Duration::from_secs(60);

/// A text that waits to be read.
struct Job {
    /// An empty cache, into which the text is read and which is then frozen.
    cache: Box<dyn Cache>,
    group: Group,
    fingerprint: String,
    tokens: Arc<[i64]>,
}

/// The result of a text that was read ahead.
#[derive(Debug)]
struct Answer {
    group: Group,
    tokens: Arc<[i64]>,
    n_there: usize,
    when: Instant,
}

/// The result of reading a waiting text.
struct ReadCount {
    /// The number of tokens that were read.
    n: usize,
    /// The number of the text's first tokens that memory or the store had.
    n_there: usize,
}

/// The queue of texts to read ahead, and the results.
#[derive(Debug, Default)]
pub struct ReadQueue {
    waiting: VecDeque<(Group, Arc<[i64]>)>,
    answered: VecDeque<Answer>,
    read: u64,
    tokens: u64,
    failed: u64,
}

impl ReadQueue {
    /// Returns whether the store recently had no more of a text than its first `in_memory` tokens, which are in
    /// memory.
    pub fn has(&self, group: &str, tokens: &[i64], in_memory: usize) -> bool {
        self.answered.iter().any(|answer| {
            answer.when.elapsed() < ANSWERED_FOR
                && answer.n_there <= in_memory
                && answer.group == group
                && *answer.tokens == *tokens
        })
    }

    pub fn add_to(&self, report: &mut PrefixCacheReport) {
        report.ahead_waiting = self.waiting.len();
        report.ahead_read = self.read;
        report.tokens_ahead = self.tokens;
        report.ahead_failed = self.failed;
    }

    fn waits(&self, group: &str, tokens: &[i64]) -> bool {
        self.waiting.iter().any(|(of, text)| of == group && **text == *tokens)
    }

    /// Records the result of reading a waiting text.
    fn end(&mut self, group: Group, tokens: Arc<[i64]>, read: Result<ReadCount>) {
        self.waiting.retain(|(of, text)| !(*of == group && *text == tokens));
        match read {
            Ok(ReadCount { n, n_there }) => {
                self.read += u64::from(n > 0);
                self.tokens = self.tokens.saturating_add(n as u64);
                self.answered.retain(|old| !(old.group == group && old.tokens == tokens));
                if self.answered.len() == MAX_ANSWERS {
                    self.answered.pop_front();
                }
                self.answered.push_back(Answer { group, tokens, n_there, when: Instant::now() });
            }
            Err(_) => self.failed += 1,
        }
    }
}

/// A thread that reads texts ahead. It starts with the first text. When this is dropped, the thread ends as soon as
/// the current text has been read.
#[derive(Debug)]
pub struct ReadAhead {
    inner: Arc<Inner>,
    ends: Arc<AtomicBool>,
    thread: Mutex<Option<Thread>>,
}

#[derive(Debug)]
struct Thread {
    jobs: SyncSender<Job>,
    handle: JoinHandle<()>,
}

impl ReadAhead {
    pub fn of(inner: Arc<Inner>) -> Self {
        Self { inner, ends: Arc::default(), thread: Mutex::default() }
    }

    /// Queues a text to be read into an empty cache. Returns whether it was queued.
    pub fn read(
        &self,
        cache: Box<dyn Cache>,
        group: Group,
        fingerprint: &str,
        tokens: &[i64],
        in_memory: usize,
    ) -> Result<bool> {
        let mut thread = self.thread.lock();
        let thread = match &*thread {
            Some(thread) => thread,
            None => thread.insert(self.start()?),
        };
        let tokens: Arc<[i64]> = tokens.into();
        {
            let mut asked = self.inner.asked.lock();
            if asked.waits(&group, &tokens) {
                return Ok(true);
            }
            if asked.has(&group, &tokens, in_memory) {
                return Ok(false);
            }
            asked.waiting.push_back((group.clone(), Arc::clone(&tokens)));
        }
        let fingerprint = fingerprint.to_owned();
        let job = Job { cache, group, fingerprint, tokens };
        let refused = match thread.jobs.try_send(job) {
            Ok(()) => return Ok(true),
            Err(TrySendError::Full(job)) => {
                debug!(target: TARGET, most = MAX_WAITING, "cannot read a text ahead: too many others wait");
                job
            }
            Err(TrySendError::Disconnected(job)) => {
                self.inner.asked.lock().failed += 1;
                job
            }
        };
        let waits = |(group, tokens): &(Group, Arc<[i64]>)| {
            !(*group == refused.group && *tokens == refused.tokens)
        };
        self.inner.asked.lock().waiting.retain(waits);
        Ok(false)
    }

    fn start(&self) -> Result<Thread> {
        let (jobs, waiting) = sync_channel(MAX_WAITING);
        let (inner, ends) = (Arc::clone(&self.inner), Arc::clone(&self.ends));
        let named = std::thread::Builder::new().name("etkv-read-ahead".into());
        let handle = named.spawn(move || work(&inner, &ends, &waiting)).map_err(|error| {
            Error::new(Status::Backend, "cannot start the thread that reads ahead").caused_by(error)
        })?;
        Ok(Thread { jobs, handle })
    }
}

impl Drop for ReadAhead {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        if let Some(Thread { jobs, handle }) = self.thread.get_mut().take() {
            drop(jobs);
            // A callback of the memory budget may drop this on the thread itself, which cannot join itself.
            if handle.thread().id() != std::thread::current().id() {
                // The thread has logged its errors.
                let _ = handle.join();
            }
        }
    }
}

fn work(inner: &Inner, ends: &AtomicBool, waiting: &Receiver<Job>) {
    for Job { mut cache, group, fingerprint, tokens } in waiting {
        if ends.load(Ordering::Relaxed) {
            return;
        }
        let read = inner.read_ahead(&mut *cache, &group, &fingerprint, &tokens);
        if let Err(error) = &read {
            warn!(target: TARGET, %error, tokens = tokens.len(), "cannot read a text ahead");
        }
        // The rows now belong to the prefix.
        drop(cache);
        inner.asked.lock().end(group, tokens, read);
    }
}

impl Inner {
    /// Reads the part of a text that the store has and memory lacks.
    fn read_ahead(
        &self,
        cache: &mut dyn Cache,
        group: &Group,
        fingerprint: &str,
        tokens: &[i64],
    ) -> Result<ReadCount> {
        let found = self.kept.lock().matches(group, tokens, capacity_of(cache), 1);
        let in_memory = found.first().map_or(0, |(n, ..)| *n);
        let nothing = Ok(ReadCount { n: 0, n_there: in_memory });
        let Some(store) = &self.store else { return nothing };
        if store.n_stored(cache, fingerprint, tokens)? <= in_memory {
            return nothing;
        }
        let n = store.load(cache, fingerprint, tokens)?;
        if n == 0 {
            return Err(Error::new(Status::File, "the files of the text cannot be used"));
        }
        if !self.keep(cache, group, &tokens[..n])? {
            let most = self.max_bytes;
            let message = format_args!("its {n} tokens need more than max_bytes, {most}");
            return Err(Error::new(Status::Backend, message));
        }
        debug!(target: TARGET, tokens = n, "a text was read ahead");
        Ok(ReadCount { n, n_there: n.max(in_memory) })
    }
}
