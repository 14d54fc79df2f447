//! The number of slots that a cache allocates if it needs a given number.

/// How buffers grow with the number of positions. They never grow beyond the capacity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Growth {
    /// Buffers begin with `first` slots, and double as needed.
    Doubling {
        /// The slots of the first allocation, at least 1.
        first: i32,
    },
    /// Buffers grow in steps of `step` slots.
    Step {
        /// At least 1.
        step: i32,
    },
    /// Buffers grow to the slots that a step needs. This uses the least memory, but copies buffers at each step.
    Exact,
    /// Buffers have the full capacity when the cache is created.
    Upfront,
}

impl Default for Growth {
    fn default() -> Self {
        Self::Doubling { first: Self::DEFAULT_CHUNK }
    }
}

impl Growth {
    /// The default number of slots of the first allocation.
    pub const DEFAULT_CHUNK: i32 = 256;

    /// Returns the number of slots to allocate if `needed` are needed, at most `most`.
    pub fn slots(self, needed: i32, most: i32) -> i32 {
        if needed <= 0 && self != Self::Upfront {
            return 0;
        }
        let slots = match self {
            Self::Doubling { first } => {
                let mut slots = i64::from(first.max(1));
                while slots < i64::from(needed) {
                    slots *= 2;
                }
                slots
            }
            Self::Step { step } => {
                let step = i64::from(step.max(1));
                (i64::from(needed) + step - 1) / step * step
            }
            Self::Exact => i64::from(needed),
            Self::Upfront => i64::from(most),
        };
        // At most `most`, which is an i32.
        slots.min(i64::from(most)) as i32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_grow_as_the_config_says_and_end_at_capacity() {
        let of = |growth: Growth| [0, 1, 16, 17, 33, 64, 65, 100].map(|n| growth.slots(n, 100));
        assert_eq!(of(Growth::Doubling { first: 16 }), [0, 16, 16, 32, 64, 64, 100, 100]);
        assert_eq!(of(Growth::Step { step: 30 }), [0, 30, 30, 30, 60, 90, 90, 100]);
        assert_eq!(of(Growth::Exact), [0, 1, 16, 17, 33, 64, 65, 100]);
        assert_eq!(of(Growth::Upfront), [100; 8]);
    }
}
