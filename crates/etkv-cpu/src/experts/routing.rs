//! Sorts the pairs of a token and an expert of a step by expert.

use std::ops::Range;

use etkv_core::{fail, Error, Result, Status};

/// An expert that some token of the step has chosen, and its pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chosen {
    pub expert: usize,
    /// The range of its pairs is `first..end`.
    pub first: usize,
    pub end: usize,
}

impl Chosen {
    /// Returns the range of its pairs.
    pub fn pairs(&self) -> Range<usize> {
        self.first..self.end
    }
}

/// The pairs of a step.
#[derive(Debug, Default)]
pub(super) struct Routing {
    /// The pairs, sorted by expert, and by token for each expert. A pair is represented by its position in
    /// the indices `[T, k]`.
    pub pairs: Vec<u32>,
    /// The experts that have pairs, in ascending order.
    pub chosen: Vec<Chosen>,
    counts: Vec<usize>,
}

impl Routing {
    /// Sorts the pairs of `indices`, `[T, k]` little-endian integers of 64 bits.
    ///
    /// # Errors
    /// [`InvalidArgument`](Status::InvalidArgument) for an index without an expert, and
    /// [`Backend`](Status::Backend) if memory is lacking.
    pub fn sort(&mut self, indices: &[u8], k: usize, n_experts: usize) -> Result<()> {
        let Self { pairs, chosen, counts } = self;
        let n_pairs = indices.len() / 8;
        counts.clear();
        chosen.clear();
        pairs.clear();
        reserve(counts, n_experts + 1)?;
        reserve(chosen, n_experts.min(n_pairs))?;
        reserve(pairs, n_pairs)?;
        if u32::try_from(n_pairs).is_err() {
            fail!(Shape, "expected at most {} chosen experts in a step, got {n_pairs}", u32::MAX);
        }
        counts.resize(n_experts + 1, 0);
        for (at, expert) in numbers(indices).enumerate() {
            match usize::try_from(expert) {
                Ok(expert) if expert < n_experts => counts[expert + 1] += 1,
                _ => fail!(
                    InvalidArgument,
                    "experts: expected indices from 0 to {}, got {expert} for token {}",
                    n_experts - 1,
                    at / k.max(1)
                ),
            }
        }
        for expert in 0..n_experts {
            let first = counts[expert];
            counts[expert + 1] += first;
            let end = counts[expert + 1];
            if end > first {
                chosen.push(Chosen { expert, first, end });
            }
        }
        pairs.resize(n_pairs, 0);
        for (at, expert) in numbers(indices).enumerate() {
            let place = &mut counts[expert as usize];
            pairs[*place] = at as u32;
            *place += 1;
        }
        Ok(())
    }
}

fn numbers(indices: &[u8]) -> impl Iterator<Item = i64> + '_ {
    let (numbers, _) = indices.as_chunks::<8>();
    numbers.iter().map(|number| i64::from_le_bytes(*number))
}

/// Reserves room for `n` numbers in an empty list.
fn reserve<T>(list: &mut Vec<T>, n: usize) -> Result<()> {
    list.try_reserve(n).map_err(|_| {
        let bytes = n.saturating_mul(size_of::<T>());
        Error::new(
            Status::Backend,
            format_args!("out of memory: {bytes} bytes for a step of experts; free memory or pass fewer tokens in each step"),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::refused::refused;

    fn bytes(indices: &[i64]) -> Vec<u8> {
        indices.iter().flat_map(|index| index.to_le_bytes()).collect()
    }

    #[test]
    fn pairs_are_sorted_by_expert_and_token() {
        let mut routing = Routing::default();
        for _ in 0..2 {
            routing.sort(&bytes(&[3, 1, 1, 3, 0, 0]), 2, 5).unwrap();
            assert_eq!(routing.pairs, [4, 5, 1, 2, 0, 3]);
            let chosen = |expert, first, end| Chosen { expert, first, end };
            assert_eq!(routing.chosen, [chosen(0, 0, 2), chosen(1, 2, 4), chosen(3, 4, 6)]);
        }
        routing.sort(&[], 2, 5).unwrap();
        assert!(routing.pairs.is_empty() && routing.chosen.is_empty());
    }

    #[test]
    fn indices_of_no_expert_are_refused() {
        for index in [5, -1, i64::MAX, i64::MIN] {
            let sorted = Routing::default().sort(&bytes(&[0, 4, 2, index]), 2, 5);
            let told = format!("0 to 4, got {index} for token 1");
            refused(sorted, Status::InvalidArgument, &told);
        }
    }
}
