//! Masks as the runs of slots that each query sees.

use std::ops::Range;

use crate::error::{fail, Error, Result, Status};

/// The maximum number of elements of a mask. Arrays count elements in 32 bits.
const MAX_MASK: usize = i32::MAX as usize;

/// The slots that each query of a step sees, among those that the step reads. They are usually a few long runs. A
/// backend either skips the gaps between runs or creates a mask array from the runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MaskRuns {
    n_slots: usize,
    /// The runs of all queries, one query after the other.
    runs: Vec<Range<u32>>,
    /// The index in `runs` at which each query's runs end.
    ends: Vec<u32>,
}

impl MaskRuns {
    /// Returns a mask of `n_tokens` queries over `n_slots` slots. The queries are added later.
    ///
    /// # Errors
    /// Errors of [`mask_len`]; [`Backend`](Status::Backend) if there is too little memory.
    pub(crate) fn new(n_tokens: usize, n_slots: usize) -> Result<Self> {
        mask_len(n_tokens, n_slots)?;
        let mut made = Self { n_slots, runs: Vec::new(), ends: Vec::new() };
        if made.ends.try_reserve_exact(n_tokens).is_err() {
            return Err(lacking(n_tokens, n_slots));
        }
        Ok(made)
    }

    /// Adds slots that the next query sees, in any order. A slot may be added twice. Slots are numbered from the
    /// first slot that is read.
    ///
    /// # Errors
    /// [`Backend`](Status::Backend) if there is too little memory, [`Internal`](Status::Internal) for slots that are
    /// not read.
    pub(crate) fn see(&mut self, slots: Range<i32>) -> Result<()> {
        if slots.is_empty() {
            return Ok(());
        }
        let fits = slots.start >= 0 && slots.end as usize <= self.n_slots;
        if !fits {
            fail!(Internal, "a query cannot see slots {slots:?}: the step reads {}", self.n_slots);
        }
        let slots = slots.start as u32..slots.end as u32;
        let begun = self.runs.len() > self.begin();
        match self.runs.last_mut() {
            Some(last) if begun && last.end == slots.start => last.end = slots.end,
            _ => {
                if self.runs.try_reserve(1).is_err() {
                    return Err(lacking(self.ends.capacity(), self.n_slots));
                }
                self.runs.push(slots);
            }
        }
        Ok(())
    }

    /// Ends the next query, which sees the slots that were added.
    pub(crate) fn end_query(&mut self) {
        let begin = self.begin();
        let own = &mut self.runs[begin..];
        if own.windows(2).any(|pair| pair[1].start <= pair[0].end) {
            own.sort_unstable_by_key(|run| run.start);
            let mut kept = 0;
            for at in 1..own.len() {
                let run = own[at].clone();
                if run.start <= own[kept].end {
                    own[kept].end = own[kept].end.max(run.end);
                } else {
                    kept += 1;
                    own[kept] = run;
                }
            }
            self.runs.truncate(begin + kept + 1);
        }
        self.ends.push(self.runs.len() as u32);
    }

    /// Returns the index at which the runs of the next query begin.
    fn begin(&self) -> usize {
        self.ends.last().map_or(0, |&end| end as usize)
    }

    /// Returns the number of queries.
    pub fn n_tokens(&self) -> usize {
        self.ends.len()
    }

    /// Returns the number of slots that are read.
    pub fn n_slots(&self) -> usize {
        self.n_slots
    }

    /// Returns the runs of slots that a query sees, in order, with gaps between them. Slots are numbered from the
    /// first slot that is read. A query that does not exist sees no slot.
    pub fn runs(&self, query: usize) -> &[Range<u32>] {
        let start =
            query.checked_sub(1).and_then(|before| self.ends.get(before)).map_or(0, |end| *end);
        let stop = self.ends.get(query).map_or(start, |end| *end);
        &self.runs[start as usize..stop as usize]
    }

    /// Returns the runs of all queries, one query after the other, and the index at which each query's runs end.
    pub fn all(&self) -> (&[Range<u32>], &[u32]) {
        (&self.runs, &self.ends)
    }

    /// Returns whether a query sees a slot.
    pub fn sees(&self, query: usize, slot: usize) -> bool {
        self.runs(query).iter().any(|run| run.contains(&(slot as u32)))
    }

    /// Returns the mask as `n_tokens` rows of one byte for each slot: 1 if the query sees the slot, else 0.
    ///
    /// # Errors
    /// [`Backend`](Status::Backend) if there is too little memory.
    pub fn bytes(&self) -> Result<Vec<u8>> {
        let len = self.n_tokens() * self.n_slots;
        let mut bytes = Vec::new();
        if bytes.try_reserve_exact(len).is_err() {
            return Err(lacking(self.n_tokens(), self.n_slots));
        }
        bytes.resize(len, 0);
        for (query, row) in bytes.chunks_exact_mut(self.n_slots.max(1)).enumerate() {
            for run in self.runs(query) {
                row[run.start as usize..run.end as usize].fill(1);
            }
        }
        Ok(bytes)
    }
}

fn lacking(n_tokens: usize, n_slots: usize) -> Error {
    Error::new(
        Status::Backend,
        format_args!(
            "out of memory: the mask of {n_tokens} tokens over {n_slots} slots; free memory or pass \
             fewer tokens in each step"
        ),
    )
}

/// Returns the number of elements of the mask of `n_tokens` queries over `width` slots.
///
/// # Errors
/// [`Capacity`](Status::Capacity) if no array can have that many elements.
pub(crate) fn mask_len(n_tokens: usize, width: usize) -> Result<usize> {
    match n_tokens.checked_mul(width) {
        Some(len) if len <= MAX_MASK => Ok(len),
        _ => fail!(
            Capacity,
            "a step of {n_tokens} tokens that reads {width} slots needs a mask of \
             {n_tokens} x {width} elements, the maximum is {MAX_MASK}: pass fewer tokens in each step"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_and_bytes_are_those_that_were_added() {
        let mut state = 1u64;
        let mut next = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        for n_slots in [1, 2, 7, 40, 200] {
            for n_runs in [0, 1, 3, 30] {
                let mut mask = MaskRuns::new(5, n_slots).unwrap();
                let mut expected = vec![vec![0; n_slots]; 5];
                for row in &mut expected {
                    for _ in 0..n_runs {
                        let start = next(n_slots as u64) as usize;
                        let end = start + next((n_slots - start) as u64 + 1) as usize;
                        row[start..end].fill(1);
                        mask.see(start as i32..end as i32).unwrap();
                    }
                    mask.end_query();
                }
                assert_eq!((mask.n_tokens(), mask.n_slots()), (5, n_slots));
                assert_eq!(mask.bytes().unwrap(), expected.concat());
                for (query, row) in expected.iter().enumerate() {
                    let apart = mask.runs(query).windows(2).all(|two| two[0].end < two[1].start);
                    assert!(apart && mask.runs(query).iter().all(|run| !run.is_empty()));
                    let seen = |slot: usize| mask.sees(query, slot) == (row[slot] == 1);
                    assert!((0..n_slots).all(seen));
                }
                assert!(mask.runs(5).is_empty());
            }
        }
    }
}
