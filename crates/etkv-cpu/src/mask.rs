//! Masks as the runs of slots that each query sees.

use std::ops::Range;
use std::sync::Arc;

use etkv_core::{Error, Result, Status};

use crate::attention::MaskRef;

/// The slots that each query of a step sees, of those that are read. Most are long runs, and
/// attention skips what lies between them.
#[derive(Debug, Clone)]
pub struct Mask {
    runs: Arc<Runs>,
}

#[derive(Debug)]
struct Runs {
    n_slots: usize,
    /// The runs of all queries, one query after the other.
    runs: Vec<Range<u32>>,
    /// For each query, where its runs end.
    ends: Vec<u32>,
}

impl Mask {
    /// Returns the mask of `n_tokens` queries from one byte for each slot that is read: 1 is seen,
    /// 0 is not.
    ///
    /// # Errors
    /// [`Backend`](Status::Backend) if memory is lacking.
    pub(crate) fn new(bytes: &[u8], n_tokens: usize) -> Result<Self> {
        let n_slots = bytes.len() / n_tokens.max(1);
        let lacking = |_| {
            Error::new(
                Status::Backend,
                format_args!(
                    "out of memory: the mask of {n_tokens} tokens over {n_slots} slots; free memory \
                     or take fewer tokens at a time"
                ),
            )
        };
        let mut all = Runs { n_slots, runs: Vec::new(), ends: Vec::new() };
        all.ends.try_reserve_exact(n_tokens).map_err(lacking)?;
        for query in 0..n_tokens {
            let bytes = &bytes[query * n_slots..][..n_slots];
            let mut start = end_of_run(bytes, 0, 0);
            while start < n_slots {
                let stop = end_of_run(bytes, start, 1);
                all.runs.try_reserve(1).map_err(lacking)?;
                all.runs.push(start as u32..stop as u32);
                start = end_of_run(bytes, stop, 0);
            }
            all.ends.push(all.runs.len() as u32);
        }
        Ok(Self { runs: Arc::new(all) })
    }

    /// Returns the number of queries.
    pub fn n_tokens(&self) -> usize {
        self.runs.ends.len()
    }

    /// Returns the number of slots that are read.
    pub fn n_slots(&self) -> usize {
        self.runs.n_slots
    }

    /// Returns the runs of slots that a query sees, in order and with slots between them. The first
    /// slot that is read is 0. A query that the mask lacks sees none.
    pub fn runs(&self, query: usize) -> &[Range<u32>] {
        let Runs { runs, ends, .. } = &*self.runs;
        let start = query.checked_sub(1).and_then(|before| ends.get(before)).map_or(0, |end| *end);
        let stop = ends.get(query).map_or(start, |end| *end);
        &runs[start as usize..stop as usize]
    }

    /// Returns the mask as attention takes it.
    pub(crate) fn as_ref(&self) -> MaskRef<'_> {
        MaskRef::Runs { runs: &self.runs.runs, ends: &self.runs.ends }
    }
}

/// Returns where a run of `byte` from `start` on ends.
fn end_of_run(bytes: &[u8], start: usize, byte: u8) -> usize {
    let pattern = u64::from_ne_bytes([byte; 8]);
    let (words, rest) = (bytes[start..].chunks_exact(8), bytes[start..].chunks_exact(8));
    let n_words = words.len();
    for (at, bytes) in words.enumerate() {
        let mut word = [0; 8];
        word.copy_from_slice(bytes);
        let others = u64::from_le_bytes(word) ^ pattern;
        if others != 0 {
            return start + 8 * at + others.trailing_zeros() as usize / 8;
        }
    }
    let rest = rest.remainder();
    let tail = rest.iter().position(|&other| other != byte).unwrap_or(rest.len());
    start + 8 * n_words + tail
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The runs that a scan byte by byte finds.
    fn slowly(bytes: &[u8]) -> Vec<Range<u32>> {
        let mut runs: Vec<Range<u32>> = Vec::new();
        for (slot, _) in (0..).zip(bytes).filter(|(_, &byte)| byte == 1) {
            match runs.last_mut() {
                Some(run) if run.end == slot => run.end += 1,
                _ => runs.push(slot..slot + 1),
            }
        }
        runs
    }

    #[test]
    fn runs_are_those_of_the_bytes() {
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state >> 33
        };
        for n_slots in (0..40).chain([63, 64, 65, 200]) {
            for longest in [1, 3, 20] {
                let n_tokens = 5;
                let mut bytes = Vec::new();
                while bytes.len() < n_slots * n_tokens {
                    let n = 1 + next() % longest;
                    bytes.extend(std::iter::repeat_n((next() % 2) as u8, n as usize));
                }
                bytes.truncate(n_slots * n_tokens);
                let mask = Mask::new(&bytes, n_tokens).unwrap();
                assert_eq!((mask.n_tokens(), mask.n_slots()), (n_tokens, n_slots));
                for query in 0..n_tokens {
                    let row = &bytes[query * n_slots..][..n_slots];
                    assert_eq!(mask.runs(query), slowly(row), "{row:?}");
                }
                assert!(mask.runs(n_tokens).is_empty());
            }
        }
    }

    #[test]
    fn whole_rows_are_one_run_or_none() {
        let bytes = [[1; 4096], [0; 4096]].concat();
        let mask = Mask::new(&bytes, 2).unwrap();
        let [whole] = mask.runs(0) else { panic!("{:?}", mask.runs(0)) };
        assert_eq!(*whole, 0..4096);
        assert!(mask.runs(1).is_empty());
    }
}
