//! Windows that slide, and chunks: the positions that a query sees, and the number of positions that a layer keeps. A
//! layer keeps more than the window, so that the last step can be rolled back.

use crate::error::{fail, Result};
use crate::growth::Growth;

/// The window of a layer, and the slots that it needs for one sequence.
///
/// Rows are appended, so a window is one run of slots, which attention reads fastest. If another step might not fit,
/// the rows that are still needed move to the first slots. They move at the end of a step, never within a step. The
/// rows that are still needed are those of the window and of `max_step_tokens` more positions, so that a step of that
/// many tokens can be rolled back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Window {
    window: i32,
    sinks: i32,
    is_chunk: bool,
    max_step_tokens: i32,
    slots: i32,
    capacity: i32,
}

impl Window {
    /// Returns a window of `window` positions, at least 1, with `sinks` sinks, at least 0, for steps of at most
    /// `max_step_tokens` tokens and sequences of at most `capacity` positions.
    pub fn new(window: i32, sinks: i32, max_step_tokens: i32, capacity: i32) -> Self {
        let (wide, step) = (i64::from(window), i64::from(max_step_tokens));
        // Each move copies the window. There is at most one move for every `room` tokens.
        let room = step.max(wide / 4);
        let slots = i64::from(sinks) + wide - 1 + 2 * step + room;
        // At most `capacity`, which is an i32.
        let slots = slots.min(i64::from(capacity)) as i32;
        Self { window, sinks, is_chunk: false, max_step_tokens, slots, capacity }
    }

    /// Returns a window that begins at each multiple of `chunk`, at least 1: a query sees the positions of its own
    /// chunk. The other arguments are as in [`new`](Self::new).
    pub fn chunked(chunk: i32, max_step_tokens: i32, capacity: i32) -> Self {
        Self { is_chunk: true, ..Self::new(chunk, 0, max_step_tokens, capacity) }
    }

    /// Returns the maximum number of slots that one sequence takes.
    pub fn slots(&self) -> i32 {
        self.slots
    }

    /// Returns the maximum number of tokens of one step.
    pub fn max_step_tokens(&self) -> i32 {
        self.max_step_tokens
    }

    /// Returns the number of sinks: first positions that every query sees.
    pub fn sinks(&self) -> i32 {
        self.sinks
    }

    /// Returns whether a sequence can be longer than the window's slots.
    pub fn slides(&self) -> bool {
        self.slots < self.capacity
    }

    /// Returns whether a sequence that takes `used` slots must free some slots before the next step.
    pub fn is_full(&self, used: i32) -> bool {
        self.slides() && used > self.slots - self.max_step_tokens
    }

    /// Checks that a step of `n_tokens` tokens can be rolled back.
    ///
    /// # Errors
    /// [`Capacity`](crate::Status::Capacity).
    pub fn check_step(&self, n_tokens: i32) -> Result<()> {
        if self.slides() && n_tokens > self.max_step_tokens {
            fail!(
                Capacity,
                "a step of {n_tokens} tokens is too long: window layers accept at most max_step_tokens, {}",
                self.max_step_tokens
            );
        }
        Ok(())
    }

    /// Returns the first position that a query at `position` sees, apart from the sinks.
    pub fn first_seen(&self, position: i32) -> i32 {
        if self.is_chunk {
            position - position % self.window
        } else {
            (position - (self.window - 1)).max(0)
        }
    }

    /// Returns the first position that a sequence of `next` positions still needs, apart from the sinks.
    pub fn first_needed(&self, next: i32) -> i32 {
        self.first_seen((next - self.max_step_tokens).max(0))
    }

    /// Returns the least length to which a sequence can be rewound if positions below `first_held`, except the sinks,
    /// are dropped.
    pub fn rewindable_to(&self, first_held: i32) -> i32 {
        if first_held <= self.sinks {
            0
        } else if self.is_chunk {
            // A query in the next chunk sees no dropped positions.
            let chunks = i64::from(first_held) + i64::from(self.window) - 1;
            i32::try_from(chunks - chunks % i64::from(self.window)).unwrap_or(i32::MAX)
        } else {
            first_held.saturating_add(self.window - 1)
        }
    }

    /// Returns the number of positions of a sequence of `length` positions that the layer is guaranteed to keep.
    pub fn held(&self, length: i32) -> i32 {
        let dropped = if self.slides() { self.first_needed(length) - self.sinks } else { 0 };
        length - dropped.max(0)
    }

    /// Returns the number of slots that are allocated when one sequence has grown to `length`.
    pub fn allocated(&self, growth: Growth, length: i32) -> i32 {
        // A full window slides and uses all of its slots.
        growth.slots(if self.is_full(length) { self.slots } else { length }, self.slots)
    }
}
