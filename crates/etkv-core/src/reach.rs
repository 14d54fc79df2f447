//! The lengths that a text in a cache can be rewound to.

/// The lengths, other than 0, that a text can be rewound to: from a least one on all, and some below.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Reach {
    /// From this length on, every length can be reached.
    pub rewindable_to: i32,
    /// The lengths below that can be reached too, ascending.
    pub checkpoints: Vec<i32>,
}

impl Reach {
    /// Returns the greatest length, at most `length`, that a text of `n` tokens can be rewound to; 0 if there
    /// is none.
    pub fn below(&self, length: i32, n: i32) -> i32 {
        if length == n || (length >= self.rewindable_to && length <= n) {
            return length;
        }
        let kept = self.checkpoints.iter().copied().filter(|&kept| kept <= length);
        kept.max().unwrap_or(0)
    }

    /// Returns whether a text reaches every length up to `n` that another text, of `n` tokens, reaches.
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
