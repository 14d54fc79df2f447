//! The limits of a cache's programs that its capacity exceeds.

use crate::error::{fail, Result};

/// The limits, in ascending order.
#[derive(Debug, Clone, Default)]
pub struct PassedLimits(Vec<i32>);

impl PassedLimits {
    pub fn limits(&self) -> &[i32] {
        &self.0
    }

    /// Adds a limit to the limits of a cache with `length` positions.
    ///
    /// # Errors
    /// [`Kind`](crate::Status::Kind) if the limit is new and the cache has rows: a program without that limit wrote
    /// them.
    pub fn add(&mut self, limit: i32, length: i32) -> Result<()> {
        let Err(place) = self.0.binary_search(&limit) else {
            return Ok(());
        };
        if length > 0 {
            fail!(
                Kind,
                "the cache holds {length} positions that were written for texts of at most \
                 {limit} tokens, but its capacity is larger; load the program before the cache \
                 is filled"
            );
        }
        self.0.insert(place, limit);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Status;

    #[test]
    fn limits_ascend_and_are_there_once() {
        let mut passed = PassedLimits::default();
        for limit in [4096, 32, 4096] {
            passed.add(limit, 0).unwrap();
        }
        assert_eq!(passed.limits(), [32, 4096]);
    }

    #[test]
    fn rows_are_of_the_limits_that_were_there() {
        let mut passed = PassedLimits::default();
        passed.add(32, 0).unwrap();
        passed.add(32, 5).unwrap();
        let error = passed.add(64, 5).unwrap_err();
        assert_eq!(error.status(), Status::Kind);
        assert!(error.message().contains("holds 5 positions"), "{error}");
        assert_eq!(passed.limits(), [32]);
    }
}
