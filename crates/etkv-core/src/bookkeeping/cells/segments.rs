//! The sequences of a step's tokens.

use std::ops::Range;

/// Consecutive tokens of a step that belong to the same sequences.
#[derive(Debug, Clone, Copy)]
pub struct Segment {
    first_member: usize,
    n_members: usize,
    n_tokens: usize,
}

impl Segment {
    fn members(&self) -> Range<usize> {
        self.first_member..self.first_member + self.n_members
    }
}

/// The sequences of a step's tokens.
#[derive(Debug, Clone)]
pub enum Segments {
    /// All tokens belong to one sequence. This case allocates nothing.
    One { sequence: i32, n_tokens: usize },
    /// The segments in order, and the members of all of them.
    Many { members: Vec<i32>, list: Vec<Segment> },
}

impl Segments {
    pub fn none() -> Self {
        Self::Many { members: Vec::new(), list: Vec::new() }
    }

    /// Adds `n_tokens` tokens of the sequences `added`.
    pub fn push(&mut self, added: &[i32], n_tokens: usize) {
        if let Self::One { sequence, n_tokens: before } = *self {
            *self = Self::none();
            self.push(&[sequence], before);
        }
        if let Self::Many { members, list } = self {
            match list.last_mut() {
                Some(last) if &members[last.members()] == added => last.n_tokens += n_tokens,
                _ => {
                    let first_member = members.len();
                    members.extend_from_slice(added);
                    list.push(Segment { first_member, n_members: added.len(), n_tokens });
                }
            }
        }
    }

    /// Returns the same segments as `One` if possible.
    pub fn simplified(self) -> Self {
        match &self {
            Self::Many { members, list } => match (members.as_slice(), list.as_slice()) {
                (&[sequence], [segment]) => Self::One { sequence, n_tokens: segment.n_tokens },
                _ => self,
            },
            Self::One { .. } => self,
        }
    }

    pub fn n_tokens(&self) -> usize {
        self.iter().map(|(_, n_tokens)| n_tokens).sum()
    }

    /// Returns the members and the number of tokens of each segment.
    pub fn iter(&self) -> impl Iterator<Item = (&[i32], usize)> {
        let (one, members, list): (_, &[i32], &[Segment]) = match self {
            Self::One { sequence, n_tokens } => {
                (Some((std::slice::from_ref(sequence), *n_tokens)), &[], &[])
            }
            Self::Many { members, list } => (None, members, list),
        };
        let many = list.iter().map(|segment| (&members[segment.members()], segment.n_tokens));
        one.into_iter().chain(many)
    }

    /// Returns the members of all segments.
    pub fn members(&self) -> &[i32] {
        match self {
            Self::One { sequence, .. } => std::slice::from_ref(sequence),
            Self::Many { members, .. } => members,
        }
    }

    /// Returns the sequence of all tokens, if they belong to a single sequence.
    pub fn only_member(&self) -> Option<i32> {
        match self {
            Self::One { sequence, .. } => Some(*sequence),
            Self::Many { .. } => None,
        }
    }
}
