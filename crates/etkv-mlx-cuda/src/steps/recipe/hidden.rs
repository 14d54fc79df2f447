//! Hidden states that a program accepts and returns: the outputs of tapped layers, and the operations of
//! drafts on them.

use super::{Part, Reader, RowInput, FEATURES};
use etkv_mlx_program::dtype_of;
use etkv_mlx_program::ir::{Binary, Dim, Graph, InputSpec, Op, Out, Value};

/// Returns the inputs that have a row of floats for each token, and the other inputs.
pub(super) fn inputs(graph: &Graph) -> (Vec<RowInput>, Vec<InputSpec>) {
    let (mut given, mut text) = (Vec::new(), Vec::new());
    for input in &graph.inputs {
        match given_rows(input, given.len()) {
            Some(rows) => given.push(rows),
            None => text.push(input.clone()),
        }
    }
    (given, text)
}

fn given_rows(input: &InputSpec, buffer: usize) -> Option<RowInput> {
    let InputSpec::Tensor { value, shape, scalar_type, .. } = input else {
        return None;
    };
    let [Dim::Static(1), Dim::UpTo(_), Dim::Static(width)] = shape[..] else {
        return None;
    };
    let (dtype, width) = (dtype_of(*scalar_type).ok()?, usize::try_from(width).ok()?);
    (dtype.is_float() && width > 0).then_some(RowInput { value: *value, width, dtype, buffer })
}

impl Reader<'_> {
    /// Reads a concatenation of rows. It must be an output of the program, or a concatenation of norms that
    /// nothing else reads.
    pub(super) fn read_join(&mut self, op: &Op, out: Value) -> Option<()> {
        let Op::Concatenate { tensors, axis } = op else {
            return None;
        };
        // The first two axes are the batch, which is 1, and the tokens.
        FEATURES.contains(axis).then_some(())?;
        let x: Vec<usize> = tensors.iter().map(|&x| self.buffer(x)).collect::<Option<_>>()?;
        if self.graph.main.outputs.contains(&Out::Tensor(out)) {
            self.joined.insert(out, x);
            return Some(());
        }
        let is_norm = |(value, buffer): (&Value, &usize)| {
            let makes = |part: &Part| matches!(part, Part::Normalize(rows) if rows.out == *buffer && rows.next.is_none());
            self.readers.contains_key(value) && self.parts.iter().any(makes)
        };
        tensors.iter().zip(&x).all(is_norm).then_some(())?;
        let out = self.new_buffer(out);
        self.parts.push(Part::Join { x, out });
        Some(())
    }

    /// Reads `x + share * (y - x)`, beginning at the difference. The host passes the shares.
    pub(super) fn read_blend(&mut self, op: &Op, difference: Value) -> Option<()> {
        let &Op::Binary { function: Binary::Subtract, a: from, b: taken } = op else {
            return None;
        };
        let (y, x) = (self.buffer(from)?, self.buffer(taken)?);
        let other = |a, b, known| match known {
            _ if a == known => Some(b),
            _ if b == known => Some(a),
            _ => None,
        };
        let (product, op, moved) = self.reader(difference)?;
        let &Op::Binary { function: Binary::Multiply, a, b } = op else {
            return None;
        };
        let share = self.buffer(other(a, b, difference)?)?;
        let (sum, op, out) = self.reader(moved)?;
        let &Op::Binary { function: Binary::Add, a, b } = op else {
            return None;
        };
        (other(a, b, moved)? == taken).then_some(())?;
        self.taken.extend([product, sum]);
        let out = self.new_buffer(out);
        self.parts.push(Part::Blend { x, y, share, out });
        Some(())
    }

    /// Returns the buffer of the logits, their index in the outputs, and the buffers of the other output. The
    /// last part computes the logits.
    pub(super) fn outputs(&self) -> Option<(usize, usize, Vec<usize>)> {
        let last = match self.parts.last()? {
            Part::Product(product) => product.out,
            Part::Normalize(rows) => rows.next.map_or(rows.out, |(_, out)| out),
            Part::Embed { out, .. }
            | Part::Join { out, .. }
            | Part::Blend { out, .. }
            | Part::Attend { out, .. } => *out,
        };
        let is_logits = |value| self.buffer(value) == Some(last);
        let (hidden, at) = match self.graph.main.outputs[..] {
            [Out::Tensor(logits)] => return Some((self.buffer(logits)?, 0, Vec::new())),
            [Out::Tensor(logits), Out::Tensor(hidden)] if is_logits(logits) => (hidden, 0),
            [Out::Tensor(hidden), Out::Tensor(logits)] if is_logits(logits) => (hidden, 1),
            _ => return None,
        };
        let tapped = match self.joined.get(&hidden) {
            Some(joined) => joined.clone(),
            None => vec![self.buffer(hidden)?],
        };
        let is_again = |(n, buffer): (usize, &usize)| tapped[..n].contains(buffer);
        let fits = !tapped.contains(&last) && !tapped.iter().enumerate().any(is_again);
        // No part writes a buffer that the host fills, so it is not an output.
        let is_given = |&buffer: &usize| buffer < self.n_given;
        (fits && !tapped.iter().any(is_given)).then_some((last, at, tapped))
    }
}
