//! An open step that waits for its host's next call.

/// The number of the step that was set aside, if one waits.
#[derive(Debug, Default)]
pub struct SetAsideStep {
    /// The number of the last step that was set aside. Numbers are unique.
    number: u64,
    waits: bool,
}

impl SetAsideStep {
    /// Sets the open step aside, and returns its number.
    pub fn set(&mut self) -> u64 {
        self.number += 1;
        self.waits = true;
        self.number
    }

    /// Resumes the step of this number. Returns whether it was still waiting.
    pub fn resume(&mut self, number: u64) -> bool {
        self.waits && self.number == number && self.end()
    }

    /// Returns whether a step waits.
    pub fn waits(&self) -> bool {
        self.waits
    }

    /// Records that no step waits any more, because it has ended or was resumed. Returns whether a step was waiting.
    pub fn end(&mut self) -> bool {
        std::mem::take(&mut self.waits)
    }
}
