//! Checks rows that a separate launch normalizes, adds and normalizes again, and scaled embeddings, against
//! plain arithmetic.

use etkv_cuda::{
    Buffer, Device, Element, Embed, Launch, Norm, Normalize, Plan, StepInputs, Weight,
};

use crate::model::{rounded, to_bytes, to_numbers, Random};
use crate::placed::{normalized, weights, EPS};
use crate::{say, Answer};
use std::io::Write;

const TABLE: usize = 70;

#[derive(Debug, Clone, Copy)]
struct Case {
    element: Element,
    inner: usize,
    /// Whether the weights of the first norm, and of the next, are float32.
    wide: [bool; 2],
    residual: bool,
    next: bool,
}

/// Runs the checks.
pub fn run(device: &Device) -> Answer<bool> {
    let mut good = true;
    for element in [Element::Bf16, Element::F16] {
        for (n, inner) in [64, 640, 1152, 2560, 5384].into_iter().enumerate() {
            let wide = [n % 2 == 0, n % 3 == 0];
            good &= Case { element, inner, wide, residual: n != 1, next: n != 2 }.check(device)?;
        }
    }
    Ok(good)
}

impl Case {
    fn check(&self, device: &Device) -> Answer<bool> {
        let Self { element, inner, wide, residual, next } = *self;
        let mut random = Random(0x2545_f491_4f6c_dd1d + inner as u64);
        let mut largest = 0f64;
        for tokens in [1, 5, 64] {
            let scale = 33.0;
            let mut by = device.allocate(2)?;
            by.write(0, &to_bytes(element, &[scale]))?;
            let rows: Vec<f64> =
                (0..TABLE * inner).map(|_| rounded(element, 0.03 * random.next())).collect();
            let mut table = device.allocate(2 * rows.len())?;
            table.write(0, &to_bytes(element, &rows))?;
            let norms = [
                weights(device, element, inner, wide[0], &mut random)?,
                weights(device, element, inner, wide[1], &mut random)?,
            ];
            let norm =
                |n: usize| Norm { weight: Some(norms[n].1.address()), wide: wide[n], eps: EPS };
            let embed = |scale, out| {
                let table = Weight::Plain(table.address());
                Launch::Embed(Embed { table, scale, vocabulary: TABLE, inner, out })
            };
            let plan = Plan {
                element,
                tokens,
                buffers: vec![tokens * inner; 4],
                launches: vec![
                    embed(Some(by.address()), Buffer(0)),
                    embed(None, Buffer(1)),
                    Launch::Normalize(Normalize {
                        x: Buffer(1),
                        inner,
                        norm: norm(0),
                        residual: residual.then_some(Buffer(0)),
                        // The result sometimes replaces the residual.
                        out: Buffer(if residual && tokens == 5 { 0 } else { 2 }),
                        columns: None,
                        next: next.then(|| (norm(1), Buffer(3))),
                    }),
                ],
                logits: None,
                overlap: true,
                given: Vec::new(),
                tapped: Vec::new(),
                attention_blocks: None,
                masked: vec![false],
                small_blocks: false,
            };
            let mut captured = device.capture(&plan)?;
            let ids: Vec<i32> = (0..tokens as i32).map(|t| (t * 11 + 5) % TABLE as i32).collect();
            let slots: Vec<i32> = (0..tokens as i32).collect();
            let (positions, n_keys, mask) = (&slots[..], tokens, None);
            let step = StepInputs { ids: &ids, positions, slots: &slots, n_keys, mask };
            for _ in 0..2 {
                // SAFETY: the table and the weights outlive the graph, and nothing else uses them.
                unsafe { captured.run(&step) }?;
            }
            let read = |index: usize| -> Answer<Vec<f64>> {
                let mut bytes = vec![0; 2 * tokens * inner];
                captured.read(Buffer(index), &mut bytes)?;
                Ok(to_numbers(element, &bytes))
            };
            let sums = read(if residual && tokens == 5 { 0 } else { 2 })?;
            let again = read(3)?;
            for (t, &id) in ids.iter().enumerate() {
                let row = &rows[id as usize * inner..][..inner];
                let mut expected = normalized(element, row, &norms[0].0, wide[0]);
                for (x, y) in expected.iter_mut().zip(row) {
                    let scaled = rounded(element, y * scale);
                    *x = if residual { rounded(element, *x + scaled) } else { *x };
                }
                let found = &sums[t * inner..][..inner];
                largest = largest.max(difference(found, &expected));
                if next {
                    // The expected norm is computed from the device's sum, whose rounding may differ.
                    let expected = normalized(element, found, &norms[1].0, wide[1]);
                    largest = largest.max(difference(&again[t * inner..][..inner], &expected));
                }
            }
        }
        let limit = if element == Element::Bf16 { 0.012 } else { 0.002 };
        let good = largest <= limit;
        let word = if good { "ok  " } else { "FAIL" };
        say!("  {word} {self:?}: {largest:.5}, limit {limit}");
        Ok(good)
    }
}

/// Returns the largest difference, relative to the number itself and to the size of all numbers.
pub fn difference(found: &[f64], expected: &[f64]) -> f64 {
    let squares: f64 = expected.iter().map(|x| x * x).sum();
    let size = (squares / expected.len() as f64).sqrt();
    let of = |(x, y): (&f64, &f64)| {
        let distance = (x - y).abs() / (y.abs() + size + 1e-9);
        if distance.is_finite() {
            distance
        } else {
            f64::INFINITY
        }
    };
    found.iter().zip(expected).map(of).fold(0.0, f64::max)
}
