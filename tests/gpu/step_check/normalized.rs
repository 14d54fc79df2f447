//! Checks rows that a separate launch normalizes, adds and normalizes again, and scaled embeddings, against
//! plain arithmetic.

use etkv_cuda::{
    Buffer, Device, Element, Embed, Launch, Norm, Normalize, Plan, StepInputs, Weight,
};

use crate::model::{rounded, to_bytes, to_numbers, upload, Random};
use crate::placed::{weights, EPS};
use crate::reference::{difference, normalized};
use crate::{say, Answer};

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
            let by = upload(device, &to_bytes(element, &[scale]))?;
            let rows = random.numbers(element, TABLE * inner, 0.03);
            let table = upload(device, &to_bytes(element, &rows))?;
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
            // The result sometimes replaces the residual.
            let out = Buffer(if residual && tokens == 5 { 0 } else { 2 });
            let launches = vec![
                embed(Some(by.address()), Buffer(0)),
                embed(None, Buffer(1)),
                Launch::Normalize(Normalize {
                    x: Buffer(1),
                    inner,
                    norm: norm(0),
                    residual: residual.then_some(Buffer(0)),
                    out,
                    columns: None,
                    next: next.then(|| (norm(1), Buffer(3))),
                }),
            ];
            let plan = Plan::new(element, tokens, vec![tokens * inner; 4], launches);
            let mut captured = device.capture(&plan)?;
            let ids: Vec<i32> = (0..tokens as i32).map(|t| (t * 11 + 5) % TABLE as i32).collect();
            let slots: Vec<i32> = (0..tokens as i32).collect();
            let (positions, n_keys, mask) = (&slots[..], tokens, None);
            let step = StepInputs { ids: &ids, positions, slots: &slots, n_keys, mask };
            for _ in 0..2 {
                // SAFETY: the table and the weights outlive the graph, and nothing else uses them.
                unsafe { captured.run(&step) }?;
            }
            let read = |buffer: Buffer| -> Answer<Vec<f64>> {
                let mut bytes = vec![0; 2 * tokens * inner];
                captured.read(buffer, &mut bytes)?;
                Ok(to_numbers(element, &bytes))
            };
            let (sums, again) = (read(out)?, read(Buffer(3))?);
            for (t, &id) in ids.iter().enumerate() {
                let row = &rows[id as usize * inner..][..inner];
                let mut expected = normalized(element, row, Some(&norms[0].0), wide[0], EPS);
                for (x, y) in expected.iter_mut().zip(row) {
                    let scaled = rounded(element, y * scale);
                    *x = if residual { rounded(element, *x + scaled) } else { *x };
                }
                let found = &sums[t * inner..][..inner];
                largest = largest.max(difference(found, &expected));
                if next {
                    // The expected norm is computed from the device's sum, whose rounding may differ.
                    let expected = normalized(element, found, Some(&norms[1].0), wide[1], EPS);
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
