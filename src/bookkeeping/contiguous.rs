//! One growing sequence: position `p` lies in slot `p`, so a length says all.

use std::ops::Range;

use crate::error::{fail, Result};

/// The length of one sequence in a pool of `capacity` slots.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContiguousBookkeeping {
    capacity: i32,
    length: i32,
}

/// What a step writes and reads. Made by [`ContiguousBookkeeping::plan`], which
/// changes nothing; [`ContiguousBookkeeping::commit`] makes it so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ContiguousPlan {
    /// The first slot written, which is the step's first position.
    pub start: i32,
    /// One past the last slot written: the length afterwards, and the number of
    /// slots that the last query sees.
    pub end: i32,
    /// The length before. Where it is more than `start`, the step rewinds.
    pub length: i32,
}

impl ContiguousPlan {
    /// Query tokens of the step.
    pub fn n_tokens(&self) -> i32 {
        self.end - self.start
    }

    /// The slots whose present rows the step writes over.
    pub fn displaced(&self) -> Range<i32> {
        self.start..self.end.min(self.length).max(self.start)
    }
}

impl ContiguousBookkeeping {
    /// An empty sequence of at most `capacity` positions.
    pub fn new(capacity: i32) -> Self {
        Self { capacity, length: 0 }
    }

    /// The most positions that it holds.
    pub fn capacity(&self) -> i32 {
        self.capacity
    }

    /// The positions that it holds.
    pub fn length(&self) -> i32 {
        self.length
    }

    /// Whether `n` more positions fit; negative `n` never do.
    pub fn can_extend(&self, n: i32) -> bool {
        n >= 0 && n <= self.capacity - self.length
    }

    /// Plans a step whose tokens have these positions. They are one run of
    /// consecutive positions; the first is at most the length. At the length
    /// the step appends; below it, the step first rewinds to there.
    ///
    /// # Errors
    /// - [`InvalidArgument`](crate::Status::InvalidArgument): no tokens.
    /// - [`Position`](crate::Status::Position): a negative position, a gap after
    ///   the sequence, or positions that are not consecutive.
    /// - [`Capacity`](crate::Status::Capacity): the run ends past the capacity.
    pub fn plan(&self, positions: &[i32]) -> Result<ContiguousPlan> {
        let Some(&start) = positions.first() else {
            fail!(InvalidArgument, "a step needs at least 1 token");
        };
        if start < 0 {
            fail!(Position, "position {start} is negative");
        }
        if start > self.length {
            fail!(Position, "position {start} leaves a gap: the next is {}", self.length);
        }
        for (offset, &position) in positions.iter().enumerate() {
            let expected = i64::from(start) + offset as i64;
            if i64::from(position) != expected {
                fail!(
                    Position,
                    "token {offset} of the step has position {position}, but one sequence \
                     runs on: {expected} follows"
                );
            }
        }
        let end = i64::from(start) + positions.len() as i64;
        if end > i64::from(self.capacity) {
            fail!(
                Capacity,
                "{} from position {start} on need {end} positions, the capacity is {}",
                match positions.len() {
                    1 => String::from("1 token"),
                    n => format!("{n} tokens"),
                },
                self.capacity
            );
        }
        // `end` is at most `capacity`, an i32.
        Ok(ContiguousPlan { start, end: end as i32, length: self.length })
    }

    /// Makes a plan so: the sequence ends where its step ended.
    pub fn commit(&mut self, plan: &ContiguousPlan) {
        self.length = plan.end;
    }

    /// Forgets the positions from `length` on.
    ///
    /// # Errors
    /// [`Position`](crate::Status::Position) if `length` is negative or more than
    /// the present length.
    pub fn rewind(&mut self, length: i32) -> Result<()> {
        if length < 0 || length > self.length {
            fail!(
                Position,
                "cannot rewind to length {length}: the sequence has {} positions",
                self.length
            );
        }
        self.length = length;
        Ok(())
    }

    /// Forgets every position.
    pub fn clear(&mut self) {
        self.length = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Status;

    fn of_length(capacity: i32, length: i32) -> ContiguousBookkeeping {
        ContiguousBookkeeping { capacity, length }
    }

    fn run(start: i32, n: i32) -> Vec<i32> {
        (start..start + n).collect()
    }

    #[test]
    fn appends_at_the_length() {
        let mut book = ContiguousBookkeeping::new(10);
        let plan = book.plan(&run(0, 4)).unwrap();
        assert_eq!((plan.start, plan.end, plan.displaced()), (0, 4, 0..0));
        assert_eq!(book.length(), 0, "a plan changes nothing");
        book.commit(&plan);
        assert_eq!(book.length(), 4);
        let plan = book.plan(&[4]).unwrap();
        assert_eq!((plan.start, plan.end, plan.n_tokens()), (4, 5, 1));
    }

    #[test]
    fn below_the_length_is_a_rewind() {
        let mut book = of_length(10, 8);
        let plan = book.plan(&run(3, 2)).unwrap();
        assert_eq!(plan.displaced(), 3..5);
        book.commit(&plan);
        assert_eq!(book.length(), 5);
    }

    #[test]
    fn refuses_what_would_corrupt() {
        let book = of_length(10, 4);
        let status = |positions: &[i32]| book.plan(positions).unwrap_err().status();
        assert_eq!(status(&[]), Status::InvalidArgument);
        assert_eq!(status(&[-1]), Status::Position);
        assert_eq!(status(&[5]), Status::Position);
        assert_eq!(status(&[4, 6]), Status::Position);
        assert_eq!(status(&[4, 4]), Status::Position);
        assert_eq!(status(&[4, 3]), Status::Position);
        assert_eq!(status(&run(4, 7)), Status::Capacity);
        assert!(book.plan(&run(4, 6)).is_ok());
        assert_eq!(
            book.plan(&[6]).unwrap_err().message(),
            "position 6 leaves a gap: the next is 4"
        );
    }

    #[test]
    fn positions_near_the_largest_integer_do_not_overflow() {
        let book = of_length(i32::MAX, i32::MAX - 1);
        assert!(book.plan(&[i32::MAX - 1]).is_ok());
        let status = book.plan(&[i32::MAX - 1, i32::MAX]).unwrap_err().status();
        assert_eq!(status, Status::Capacity);
    }

    #[test]
    fn can_extend_counts_what_is_left() {
        let book = of_length(10, 4);
        assert!(book.can_extend(0) && book.can_extend(6));
        assert!(!book.can_extend(7) && !book.can_extend(-1) && !book.can_extend(i32::MAX));
    }

    #[test]
    fn rewinds_within_the_sequence_only() {
        let mut book = of_length(10, 4);
        assert_eq!(book.rewind(5).unwrap_err().status(), Status::Position);
        assert_eq!(book.rewind(-1).unwrap_err().status(), Status::Position);
        assert_eq!(book.length(), 4);
        book.rewind(2).unwrap();
        assert_eq!(book.length(), 2);
    }
}
