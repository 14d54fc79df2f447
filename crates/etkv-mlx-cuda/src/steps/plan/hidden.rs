//! Plans the rows that the host exchanges with a program in addition to tokens and logits, and the operations
//! of drafts on these rows.

use std::borrow::Cow;

use super::{Planner, PIECE};
use crate::steps::recipe::Recipe;
use etkv_mlx_program::item_size;

impl Planner {
    /// Reads the widths of the rows that the host fills.
    pub(super) fn add_given(&mut self, recipe: &Recipe) -> Option<()> {
        for given in &recipe.given {
            (given.dtype == self.dtype).then_some(())?;
            self.widths[given.buffer] = given.width;
        }
        Some(())
    }

    /// Adds joined rows. The kernels that compute the parts write into one buffer.
    pub(super) fn add_join(&mut self, x: &[usize], out: usize) {
        let mut width = 0;
        for &buffer in x {
            self.columns.insert(buffer, (out, width));
            width += self.widths[buffer];
        }
        self.widths[out] = width;
    }

    /// Adds rows that are blended.
    pub(super) fn add_blend(&mut self, [x, y, share]: [usize; 3], out: usize) -> Option<()> {
        let inner = self.widths[x];
        let fits = self.widths[y] == inner && self.widths[share] == 1 && inner % PIECE == 0;
        fits.then_some(())?;
        self.widths[out] = inner;
        Some(())
    }

    /// Returns the first `n` rows of the tapped buffers, concatenated for each token, and their total width
    /// in elements.
    pub fn side_by_side<'a>(
        &self,
        recipe: &Recipe,
        tapped: &'a [u8],
        n: usize,
    ) -> (Cow<'a, [u8]>, usize) {
        let widths = || recipe.tapped.iter().map(|&buffer| self.widths[buffer]);
        let all: usize = widths().sum();
        let item = item_size(self.dtype);
        if let [_] = recipe.tapped[..] {
            return (Cow::Borrowed(&tapped[..n * all * item]), all);
        }
        // Each buffer has a row for each token of the plan, which may have more tokens than the step.
        let planned = tapped.len().checked_div(all * item).unwrap_or(0);
        let mut rows = Vec::with_capacity(n * all * item);
        for token in 0..n {
            let mut at = 0;
            for width in widths() {
                let bytes = width * item;
                rows.extend_from_slice(&tapped[at + token * bytes..][..bytes]);
                at += planned * bytes;
            }
        }
        (Cow::Owned(rows), all)
    }
}
