//! Gates after a split of a product's output into halves. The passes do not merge such gates into the
//! product.

use super::{gate_of, Part, Reader, Weight, FEATURES};
use etkv_mlx_program::ir::{Op, Out};

impl Reader<'_> {
    /// Reads a split of a product into halves. An activation of the first half is multiplied by the second.
    pub(super) fn read_gate(&mut self, op: &Op, out: Out) -> Option<()> {
        let &Op::Split { x, axis, ref at, .. } = op else {
            return None;
        };
        let halves: Vec<_> = out.tensors().collect();
        let (&[first, second], &[half]) = (&halves[..], &at[..]) else {
            return None;
        };
        let (index, activation, gated) = self.reader(first)?;
        let &Op::Activation { function, x: activated, by: Some(by) } = activation else {
            return None;
        };
        let (gate, buffer) = (gate_of(function)?, self.buffer(x)?);
        let is_alone = self.readers.contains_key(&x) && self.readers.contains_key(&second);
        let fits = FEATURES.contains(&axis) && [activated, by] == [first, second] && is_alone;
        fits.then_some(())?;
        let weight = match self.parts.last()? {
            Part::Product(product) if product.out == buffer => product.weight,
            _ => return None,
        };
        (self.rows_of(weight)? == 2 * i64::from(half)).then_some(())?;
        match self.parts.last_mut() {
            Some(Part::Product(product))
                if product.gate.is_none()
                    && product.residual.is_none()
                    && product.heads.is_none() =>
            {
                product.gate = Some(gate);
            }
            _ => return None,
        }
        self.taken.insert(index);
        self.same(gated, x)
    }

    /// Returns the number of rows of a weight, including the rows of weights that are joined to it.
    fn rows_of(&self, weight: Weight) -> Option<i64> {
        let (Weight::Plain { value, .. }
        | Weight::Packed(super::PackedConstants { codes: value, .. })) = weight;
        let constant = self.graph.constants.get(value.0 as usize)?;
        std::iter::once(constant)
            .chain(&constant.joined)
            .map(|part| part.shape.first().map(|&rows| i64::from(rows)))
            .sum()
    }
}
