//! Norms that are not part of a product, because their weight is float32, or because their result is added to
//! a residual or read twice.

use super::{Normalize, Part, Reader, RowNorm};
use etkv_mlx_program::ir::{Binary, Op, Out, Value};

impl Reader<'_> {
    /// Returns the index of the only instruction that reads a value, its operation and its result.
    pub(super) fn reader(&self, value: Value) -> Option<(usize, &Op, Value)> {
        let &index = self.readers.get(&value)?;
        let instruction = &self.graph.main.instructions[index];
        match instruction.out {
            Out::Tensor(out) => Some((index, &instruction.op, out)),
            _ => None,
        }
    }

    /// Reads a norm, with the conversion and the sum after it.
    pub(super) fn read_norm(&mut self, op: &Op, mut out: Value) -> Option<()> {
        let &Op::RmsNorm { x, weight, eps } = op else {
            return None;
        };
        let x = self.buffer(x)?;
        self.optional(weight)?;
        let mut norm = RowNorm { weight, eps, out_dtype: None };
        if let Some((index, &Op::AsType { dtype, .. }, converted)) = self.reader(out) {
            (norm.out_dtype, out) = (Some(dtype), converted);
            self.taken.insert(index);
        }
        let mut residual = None;
        if let Some((index, &Op::Binary { function: Binary::Add, a, b }, sum)) = self.reader(out) {
            // If the other summand is computed later, it has no buffer yet, and the sum is read as a separate
            // instruction.
            residual = self.buffer(if a == out { b } else { a });
            if residual.is_some() {
                out = sum;
                self.taken.insert(index);
            }
        }
        let out = self.new_buffer(out);
        match self.parts.last_mut() {
            // One kernel computes a norm, the sum with the residual, and the norm of the sum.
            Some(Part::Normalize(last))
                if last.out == x && last.next.is_none() && residual.is_none() =>
            {
                last.next = Some((norm, out));
            }
            _ => self.parts.push(Part::Normalize(Normalize { x, norm, residual, out, next: None })),
        }
        Some(())
    }

    /// Reads the product of embeddings and a constant number.
    pub(super) fn read_scale(&mut self, op: &Op, out: Value) -> Option<()> {
        let &Op::Binary { function: Binary::Multiply, a, b } = op else {
            return None;
        };
        let (rows, by) = if self.constant(b).is_some() { (a, b) } else { (b, a) };
        let by = self.constant(by)?;
        let buffer = self.buffer(rows)?;
        let is_alone = self.readers.contains_key(&rows);
        match self.parts.last_mut() {
            Some(Part::Embed { out, scale: scale @ None, .. }) if *out == buffer && is_alone => {
                *scale = Some(by);
            }
            _ => return None,
        }
        self.same(out, rows)
    }
}
