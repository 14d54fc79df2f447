//! Sliding windows: what a query sees of a sequence, and how much of it a layer
//! keeps so that the last step can always be rolled back.

use crate::error::{fail, Result};
use crate::growth::Growth;

/// The window of a layer, and the slots that one sequence takes in it.
///
/// Rows are appended behind each other, so that a window is one run of slots, as
/// attention reads it fastest. When a step more may not fit, the rows that are
/// still needed move to the front, at the end of a step and never within one.
/// Needed are the window, and `max_step_tokens` positions more, so that a step of that
/// many tokens can be rewound.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Window {
    window: i32,
    sinks: i32,
    max_step_tokens: i32,
    slots: i32,
    capacity: i32,
}

impl Window {
    /// A window of at least 1 position with at least 0 sinks, for steps of
    /// `max_step_tokens` tokens at most and sequences of `capacity` positions at most.
    pub fn new(window: i32, sinks: i32, max_step_tokens: i32, capacity: i32) -> Self {
        let (wide, step) = (i64::from(window), i64::from(max_step_tokens));
        // Moving the window costs a copy of it: at most once in `room` tokens.
        let room = step.max(wide / 4);
        let slots = i64::from(sinks) + wide - 1 + 2 * step + room;
        // `capacity` is an i32, so the least of the two is one as well.
        let slots = slots.min(i64::from(capacity)) as i32;
        Self { window, sinks, max_step_tokens, slots, capacity }
    }

    /// Slots of one sequence, at most.
    pub fn slots(&self) -> i32 {
        self.slots
    }

    /// The most tokens of one step.
    pub fn max_step_tokens(&self) -> i32 {
        self.max_step_tokens
    }

    /// Positions at the front that every query sees.
    pub fn sinks(&self) -> i32 {
        self.sinks
    }

    /// Whether a sequence is ever longer than the slots.
    pub fn slides(&self) -> bool {
        self.slots < self.capacity
    }

    /// Whether a sequence that takes `used` slots has to give some back before
    /// the next step.
    pub fn is_full(&self, used: i32) -> bool {
        self.slides() && used > self.slots - self.max_step_tokens
    }

    /// Refuses a step of more tokens than can be rolled back.
    ///
    /// # Errors
    /// [`Capacity`](crate::Status::Capacity).
    pub fn check_step(&self, n_tokens: i32) -> Result<()> {
        if self.slides() && n_tokens > self.max_step_tokens {
            fail!(
                Capacity,
                "a step of {n_tokens} tokens: the window layers take at most max_step_tokens, {}",
                self.max_step_tokens
            );
        }
        Ok(())
    }

    /// The first position that a query at `position` sees, sinks apart.
    pub fn first_seen(&self, position: i32) -> i32 {
        (position - (self.window - 1)).max(0)
    }

    /// The first position, sinks apart, that a sequence of `next` positions still
    /// needs.
    pub fn first_needed(&self, next: i32) -> i32 {
        (next - (self.window - 1) - self.max_step_tokens).max(0)
    }

    /// The least length that a sequence can go back to where positions below
    /// `first_held` are gone, sinks apart.
    pub fn rewindable_to(&self, first_held: i32) -> i32 {
        if first_held <= self.sinks {
            0
        } else {
            first_held.saturating_add(self.window - 1)
        }
    }

    /// Positions of a sequence of `length` that it promises to hold.
    pub fn held(&self, length: i32) -> i32 {
        let promised =
            self.sinks.saturating_add(self.window - 1).saturating_add(self.max_step_tokens);
        length.min(if self.slides() { promised } else { length })
    }

    /// Slots that are allocated when one sequence has grown to `length`.
    pub fn allocated(&self, growth: Growth, length: i32) -> i32 {
        // Beyond this it slides, and all of the slots are used in turn.
        growth.slots(if self.is_full(length) { self.slots } else { length }, self.slots)
    }
}
