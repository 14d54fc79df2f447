//! Masks: the slots that a query sees, without a matrix of booleans.

use std::ops::Range;

use etkv_core::{fail, Result};

use super::kernels::TILE;

/// The slots of a view that the queries of a step see.
#[derive(Debug, Clone, Copy)]
pub enum MaskRef<'a> {
    /// Every slot.
    None,
    /// Query `i` of `T` sees all slots except the last `T - 1 - i`. The last slot is that of the last query.
    Causal,
    /// Query `i` sees the slots of `runs[ends[i - 1]..ends[i]]`. The runs of query 0 begin at index 0.
    Runs {
        /// Runs of slots. The runs of one query are ascending and do not overlap; they may be empty.
        runs: &'a [Range<u32>],
        /// For each query, the end (exclusive) of its runs.
        ends: &'a [u32],
    },
}

impl<'a> MaskRef<'a> {
    /// Checks that the mask is for `n_tokens` queries and `n_slots` slots.
    ///
    /// # Errors
    /// [`Shape`](etkv_core::Status::Shape) or
    /// [`InvalidArgument`](etkv_core::Status::InvalidArgument), naming the value and the limit.
    pub(super) fn check(&self, n_tokens: usize, n_slots: usize) -> Result<()> {
        let Self::Runs { runs, ends } = *self else {
            return Ok(());
        };
        if ends.len() != n_tokens {
            fail!(Shape, "expected runs for {n_tokens} queries, got runs for {}", ends.len());
        }
        let mut begin = 0;
        for (query, &end) in ends.iter().enumerate() {
            let Some(runs) = runs.get(begin..end as usize) else {
                fail!(
                    InvalidArgument,
                    "expected the runs of query {query} to end between {begin} and {}, got {end}",
                    runs.len()
                );
            };
            let mut least = 0;
            for run in runs {
                if run.start < least || run.end < run.start || run.end as usize > n_slots {
                    fail!(
                        InvalidArgument,
                        "expected ascending runs of slots from {least} to {n_slots}, got {run:?} \
                         for query {query}"
                    );
                }
                least = run.end;
            }
            begin = end as usize;
        }
        Ok(())
    }

    /// Returns the runs of query `token`.
    fn runs_of(runs: &'a [Range<u32>], ends: &[u32], token: usize) -> &'a [Range<u32>] {
        let begin = if token == 0 { 0 } else { ends[token - 1] as usize };
        &runs[begin..ends[token] as usize]
    }

    /// Returns a bit for each of the [`TILE`] slots from `first` on. The bit is 1 if query `token` of
    /// `n_tokens` sees the slot. The lowest bit is that of `first`.
    pub(super) fn seen(&self, token: usize, n_tokens: usize, first: usize, n_slots: usize) -> u64 {
        match *self {
            Self::None => bits(0, n_slots.saturating_sub(first)),
            Self::Causal => {
                let end = (n_slots + token + 1).saturating_sub(n_tokens);
                bits(0, end.saturating_sub(first))
            }
            Self::Runs { runs, ends } => {
                let runs = Self::runs_of(runs, ends, token);
                let near = runs.partition_point(|run| run.end as usize <= first);
                let near =
                    runs[near..].iter().take_while(|run| (run.start as usize) < first + TILE);
                near.fold(0, |seen, run| {
                    let end = run.end as usize - first;
                    seen | bits((run.start as usize).saturating_sub(first), end)
                })
            }
        }
    }

    /// Returns an upper bound (exclusive) of the slots that the queries up to `last_token` see.
    pub(super) fn end(&self, last_token: usize, n_tokens: usize, n_slots: usize) -> usize {
        match self {
            Self::Causal => (n_slots + last_token + 1).saturating_sub(n_tokens),
            _ => n_slots,
        }
    }
}

/// Returns a word with the bits `begin..end` set. Both may exceed the number of bits.
fn bits(begin: usize, end: usize) -> u64 {
    let below = |bit: usize| if bit >= TILE { u64::MAX } else { (1 << bit) - 1 };
    below(end) & !below(begin)
}

/// Extracts the bits of `seen` at the set bits of `all` to contiguous low bits.
pub(super) fn compact(seen: u64, all: u64) -> u64 {
    if all & all.wrapping_add(1) == 0 {
        return seen;
    }
    let (mut rest, mut place, mut out) = (all, 0, 0);
    while rest != 0 {
        out |= ((seen >> rest.trailing_zeros()) & 1) << place;
        place += 1;
        rest &= rest - 1;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_sees_the_slots_of_its_runs() {
        let (runs, ends) = ([3..5, 60..130, 130..131, 200..201], [2, 2, 4]);
        let mask = MaskRef::Runs { runs: &runs, ends: &ends };
        mask.check(3, 201).unwrap();
        for (token, slots) in
            [vec![3..5, 60..130], vec![], vec![130..131, 200..201]].into_iter().enumerate()
        {
            for first in (0..256).step_by(TILE) {
                let seen = mask.seen(token, 3, first, 201);
                for bit in 0..TILE {
                    let expected = slots.iter().any(|run| run.contains(&((first + bit) as u32)));
                    assert_eq!((seen >> bit) & 1 == 1, expected, "{token} {first} {bit}");
                }
            }
        }
    }

    #[test]
    fn runs_are_checked() {
        let check = |runs: &[Range<u32>], ends: &[u32]| {
            let error = MaskRef::Runs { runs, ends }.check(1, 10).unwrap_err();
            error.message().to_owned()
        };
        assert_eq!(check(&[], &[]), "expected runs for 1 queries, got runs for 0");
        assert_eq!(check(&[], &[1]), "expected the runs of query 0 to end between 0 and 0, got 1");
        let disorder = [4..6, 5..7];
        assert_eq!(
            check(&disorder, &[2]),
            "expected ascending runs of slots from 6 to 10, got 5..7 for query 0"
        );
        assert!(check(&[0..1, 4..11], &[2]).contains("got 4..11"));
    }

    #[test]
    fn compact_bits_keep_their_order() {
        assert_eq!(compact(0b1010_0000, 0b1110_0100), 0b1010);
        assert_eq!(compact(u64::MAX, u64::MAX), u64::MAX);
        assert_eq!(compact(1 << 63, 1 << 63), 1);
    }
}
