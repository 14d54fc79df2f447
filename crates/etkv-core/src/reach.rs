//! The lengths to which a text in a cache can be rewound.

/// The lengths, other than 0, to which a text can be rewound: every length at or above a minimum, and some below it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reach {
    /// The minimum: every length at or above it is reachable.
    pub rewindable_to: i32,
    /// Lower lengths that are also reachable, ascending.
    pub checkpoints: Vec<i32>,
}

impl Reach {
    /// Returns the greatest length, at most `length`, to which a text of `n` tokens can be rewound, or 0 if there is
    /// none.
    pub fn below(&self, length: i32, n: i32) -> i32 {
        if length == n || (length >= self.rewindable_to && length <= n) {
            return length;
        }
        let kept = self.checkpoints.iter().copied().filter(|&kept| kept <= length);
        kept.max().unwrap_or(0)
    }

    /// Returns whether every length up to `n` that is reachable in `other`, a text of `n` tokens, is also reachable
    /// in `self`.
    pub fn covers(&self, other: &Self, n: i32) -> bool {
        let reaches =
            |length: i32| length >= self.rewindable_to || self.checkpoints.contains(&length);
        self.rewindable_to <= other.rewindable_to.min(n)
            && other.checkpoints.iter().filter(|&&kept| kept <= n).all(|&kept| reaches(kept))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_length_is_reached_from_the_least_on_and_at_checkpoints() {
        let reach = Reach { rewindable_to: 128, checkpoints: vec![64, 192] };
        let below = |length| reach.below(length, 200);
        assert_eq!([63, 64, 100, 127, 128, 150, 200].map(below), [0, 64, 64, 64, 128, 150, 200]);
        assert_eq!(Reach { rewindable_to: 99, ..Reach::default() }.below(50, 50), 50);
    }

    #[test]
    fn a_text_covers_another_if_nothing_is_lost() {
        let of = |rewindable_to, checkpoints: &[i32]| Reach {
            rewindable_to,
            checkpoints: checkpoints.to_vec(),
        };
        assert!(of(0, &[]).covers(&of(100, &[64]), 120));
        assert!(of(100, &[64]).covers(&of(100, &[64]), 120));
        assert!(!of(101, &[64]).covers(&of(100, &[]), 120));
        assert!(!of(100, &[]).covers(&of(100, &[64]), 120));
        assert!(!of(192, &[]).covers(&of(192, &[]), 120), "the other text ends before");
    }
}
