//! Plans norms of rows and heads that are not part of a product.

use etkv_cuda::{Address, Buffer, Columns, Norm, Normalize};
use mlx_rs::{Array, Dtype};

use super::{is_vector, recipe, Planner, PIECE};
use crate::steps::heads::RowNorm;
use etkv_mlx_program::ir::Value;

impl Planner {
    /// Adds the constants of rows that are normalized, and their buffers.
    pub(super) fn add_normalize<'a>(
        &mut self,
        rows: &recipe::Normalize,
        array: &dyn Fn(Value) -> Option<&'a Array>,
    ) -> Option<()> {
        let recipe::Normalize { x, norm, residual, out, next } = *rows;
        let inner = self.widths[x];
        let fits =
            inner % PIECE == 0 && residual.is_none_or(|residual| self.widths[residual] == inner);
        fits.then_some(())?;
        for (norm, out) in std::iter::once((norm, out)).chain(next) {
            self.add_norm(norm, inner, array)?;
            self.widths[out] = inner;
        }
        Some(())
    }

    /// Returns the launch. The next addresses are those of its weights.
    pub(super) fn normalize(
        &self,
        rows: &recipe::Normalize,
        next: &mut dyn FnMut() -> Address,
    ) -> Normalize {
        let recipe::Normalize { x, norm, residual, out, next: again } = *rows;
        // The addresses are in the order in which the constants were added.
        let norm = self.row_norm(norm, next);
        let again = again.map(|(norm, out)| (self.row_norm(norm, next), Buffer(out)));
        let (out, columns) = match self.columns.get(&out) {
            Some(&(out, first)) => (out, Some(Columns { first, width: self.widths[out] })),
            None => (out, None),
        };
        let (x, inner, residual, out) =
            (Buffer(x), self.widths[x], residual.map(Buffer), Buffer(out));
        Normalize { x, inner, norm, residual, out, columns, next: again }
    }

    /// Adds the weight of a row norm. Returns `None` unless the norm's result has the program's dtype. With a
    /// float32 weight it has that dtype only if the program converts the result.
    pub(super) fn add_norm<'a>(
        &mut self,
        norm: RowNorm,
        inner: usize,
        array: &dyn Fn(Value) -> Option<&'a Array>,
    ) -> Option<()> {
        let own = self.dtype;
        let Some(weight) = norm.weight else {
            return norm.out_dtype.is_none_or(|dtype| dtype == own).then_some(());
        };
        let found = array(weight)?;
        let is_wide = found.dtype() == Dtype::Float32;
        let out_dtype = norm.out_dtype.unwrap_or(found.dtype());
        let fits =
            out_dtype == own && is_vector(found, inner, if is_wide { Dtype::Float32 } else { own });
        fits.then_some(())?;
        if is_wide {
            self.wide.insert(weight);
        }
        self.constants.push(weight);
        Some(())
    }

    /// Returns a row norm. The next address is that of its weight.
    pub(super) fn row_norm(&self, norm: RowNorm, next: &mut dyn FnMut() -> Address) -> Norm {
        let wide = norm.weight.is_some_and(|weight| self.wide.contains(&weight));
        Norm { weight: norm.weight.map(|_| next()), wide, eps: norm.eps }
    }
}
