//! `etkv_seq_cache`: a handle on a cache that many sequences share.

use etkv_core::{fail, Result, SeqCache, SharedCache};

use super::boundary::{c_functions, fill, free, list, put};
use super::cache::etkv_cache;
use super::handle::{self, Object};

/// A handle on a cache of several sequences.
#[allow(non_camel_case_types)]
pub struct etkv_seq_cache {
    cache: SharedCache,
}

impl Object for etkv_seq_cache {
    const NAME: &'static str = "etkv_seq_cache";
}

impl etkv_seq_cache {
    /// Makes a handle on this cache, if the cache has several sequences.
    pub(super) fn give(cache: SharedCache) -> Result<*mut Self> {
        with_sequences(&cache, |_| Ok(()))?;
        Ok(handle::give(Self { cache }))
    }

    pub(super) fn shared(&self) -> &SharedCache {
        &self.cache
    }
}

/// A range of positions: includes `begin`, excludes `end`; see the header.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy)]
pub struct etkv_range {
    begin: i32,
    end: i32,
}

fn with_sequences<T>(
    cache: &SharedCache,
    work: impl FnOnce(&mut dyn SeqCache) -> Result<T>,
) -> Result<T> {
    let mut cache = cache.lock()?;
    match cache.sequences_mut() {
        Some(sequences) => work(sequences),
        None => fail!(
            Kind,
            "a cache of kind `{}` holds one sequence only; use kind `seq` or `tree` for several",
            cache.kind()
        ),
    }
}

c_functions!(
    /// Makes a handle on the same cache, as a cache of several sequences.
    unsafe fn etkv_cache_as_seq(
        cache: *const etkv_cache,
        sequences: *mut *mut etkv_seq_cache,
    ) -> Result<()> {
        put(sequences, "sequences", || {
            etkv_seq_cache::give(handle::look_up(cache, "cache")?.cache.clone())
        })
    }

    /// Declares the sequence of each token of the next step.
    unsafe fn etkv_seq_cache_begin_step(
        cache: *mut etkv_seq_cache,
        sequences: *const i32,
        n_tokens: usize,
    ) -> Result<()> {
        with(cache, |cache| cache.begin_step(list(sequences, n_tokens, "sequences")?))
    }

    /// Declares the sequences of each token of the next step.
    unsafe fn etkv_seq_cache_begin_step_shared(
        cache: *mut etkv_seq_cache,
        sequences: *const i32,
        n_sequences: usize,
        counts: *const i32,
        n_tokens: usize,
    ) -> Result<()> {
        with(cache, |cache| {
            let all = list(sequences, n_sequences, "sequences")?;
            let counts = list(counts, n_tokens, "counts")?;
            cache.begin_step_shared(&split(all, counts)?)
        })
    }

    /// Withdraws the declaration for the next step.
    unsafe fn etkv_seq_cache_cancel_step(cache: *mut etkv_seq_cache) -> Result<()> {
        with(cache, |cache| cache.cancel_step())
    }

    /// Makes a sequence share positions of another.
    unsafe fn etkv_seq_cache_cp(
        cache: *mut etkv_seq_cache,
        source: i32,
        target: i32,
        begin: i32,
        end: i32,
    ) -> Result<()> {
        with(cache, |cache| cache.seq_cp(source, target, begin..end))
    }

    /// Removes positions from a sequence.
    unsafe fn etkv_seq_cache_rm(
        cache: *mut etkv_seq_cache,
        sequence: i32,
        begin: i32,
        end: i32,
    ) -> Result<()> {
        with(cache, |cache| cache.seq_rm(sequence, begin..end))
    }

    /// Removes every sequence except one.
    unsafe fn etkv_seq_cache_keep(cache: *mut etkv_seq_cache, sequence: i32) -> Result<()> {
        with(cache, |cache| cache.seq_keep(sequence))
    }

    /// Makes each sequence one run of cells, unless shared cells prevent it.
    unsafe fn etkv_seq_cache_compact(cache: *mut etkv_seq_cache) -> Result<()> {
        with(cache, |cache| cache.compact())
    }

    /// Stores the number of positions that a sequence holds.
    unsafe fn etkv_seq_cache_len(
        cache: *const etkv_seq_cache,
        sequence: i32,
        length: *mut i32,
    ) -> Result<()> {
        put(length, "length", || with(cache, |cache| cache.seq_len(sequence)))
    }

    /// Stores the position of a sequence's next token.
    unsafe fn etkv_seq_cache_next(
        cache: *const etkv_seq_cache,
        sequence: i32,
        position: *mut i32,
    ) -> Result<()> {
        put(position, "position", || with(cache, |cache| cache.seq_next(sequence)))
    }

    /// Stores the smallest length such that a sequence can be rewound to it and to every greater length.
    unsafe fn etkv_seq_cache_rewindable_to(
        cache: *const etkv_seq_cache,
        sequence: i32,
        length: *mut i32,
    ) -> Result<()> {
        put(length, "length", || with(cache, |cache| cache.seq_rewindable_to(sequence)))
    }

    /// Stores the greatest length, at most `position`, to which a sequence can be rewound.
    unsafe fn etkv_seq_cache_reachable(
        cache: *const etkv_seq_cache,
        sequence: i32,
        position: i32,
        reachable: *mut i32,
    ) -> Result<()> {
        put(reachable, "reachable", || with(cache, |cache| cache.seq_reachable(sequence, position)))
    }

    /// Marks where the prompt of a sequence's turn will end.
    unsafe fn etkv_seq_cache_mark_turn(
        cache: *mut etkv_seq_cache,
        sequence: i32,
        end: i32,
    ) -> Result<()> {
        with(cache, |cache| cache.seq_mark_turn(sequence, end))
    }

    /// Makes a checkpoint of a sequence, and stores its position.
    unsafe fn etkv_seq_cache_mark(
        cache: *mut etkv_seq_cache,
        sequence: i32,
        position: i32,
        marked: *mut i32,
    ) -> Result<()> {
        put(marked, "marked", || with(cache, |cache| cache.seq_mark(sequence, position)))
    }

    /// Stores the positions that a sequence holds, as ranges in order.
    unsafe fn etkv_seq_cache_positions(
        cache: *const etkv_seq_cache,
        sequence: i32,
        ranges: *mut etkv_range,
        room: usize,
        n: *mut usize,
    ) -> Result<()> {
        with(cache, |cache| {
            let found = cache.seq_positions(sequence)?;
            let found: Vec<etkv_range> = found
                .iter()
                .map(|range| etkv_range { begin: range.start, end: range.end })
                .collect();
            fill(&found, ranges, room, n, "ranges")
        })
    }

    /// Stores the sequences that hold positions or carry trees, in order.
    unsafe fn etkv_seq_cache_sequences(
        cache: *const etkv_seq_cache,
        sequences: *mut i32,
        room: usize,
        n: *mut usize,
    ) -> Result<()> {
        with(cache, |cache| fill(&cache.live_sequences(), sequences, room, n, "sequences"))
    }
);

/// Frees a handle.
#[no_mangle]
pub extern "C" fn etkv_seq_cache_free(cache: *mut etkv_seq_cache) {
    free(cache);
}

/// Splits the list of all tokens' sequences into the sequences of each token.
fn split<'a>(mut all: &'a [i32], counts: &[i32]) -> Result<Vec<&'a [i32]>> {
    let n_sequences = all.len();
    let mut tokens = Vec::with_capacity(counts.len());
    for (token, &count) in counts.iter().enumerate() {
        let split = usize::try_from(count).ok().and_then(|count| all.split_at_checked(count));
        let Some((members, rest)) = split else {
            fail!(
                InvalidArgument,
                "token {token} has a count of {count}, but {} of {n_sequences} sequences are left",
                all.len()
            );
        };
        tokens.push(members);
        all = rest;
    }
    if !all.is_empty() {
        fail!(
            InvalidArgument,
            "the counts of {} tokens leave {} of {n_sequences} sequences unused",
            counts.len(),
            all.len()
        );
    }
    Ok(tokens)
}

/// Calls `work` with the cache of a handle.
fn with<T>(
    cache: *const etkv_seq_cache,
    work: impl FnOnce(&mut dyn SeqCache) -> Result<T>,
) -> Result<T> {
    with_sequences(&handle::look_up(cache, "cache")?.cache, work)
}
