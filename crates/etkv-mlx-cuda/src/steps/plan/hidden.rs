//! Rows that the host gives and gets besides tokens and logits, and what drafts make of them.

use std::borrow::Cow;

use super::{Planner, PIECE};
use crate::steps::recipe::Recipe;
use etkv_mlx_program::item_size;

impl Planner {
    /// Takes the widths of the rows that the host gives.
    pub(super) fn add_given(&mut self, recipe: &Recipe) -> Option<()> {
        for given in &recipe.given {
            (given.dtype == self.dtype).then_some(())?;
            self.widths[given.buffer] = given.width;
        }
        Some(())
    }

    /// Adds rows that lie side by side: those that make them write there.
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

    /// Returns the first rows of tapped buffers, side by side, and how many elements of each token they are.
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
        // Each has a row for each token of the plan.
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
