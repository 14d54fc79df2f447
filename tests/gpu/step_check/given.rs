//! Checks rows that the host passes with a step. They are normalized into columns of wider rows, blended, and
//! returned with the logits. The results are compared with plain arithmetic.

use etkv_cuda::{
    Blend, Buffer, Columns, CopiedRows, Device, Element, Launch, Logits, Norm, Normalize, Plan,
    StepInputs,
};

use crate::model::{copying, embed, rounded, to_bytes, to_numbers, upload, Random};
use crate::placed::EPS;
use crate::reference::{difference, normalized};
use crate::{say, Answer};

const TABLE: usize = 70;

/// Runs the checks.
pub fn run(device: &Device) -> Answer<bool> {
    let mut good = true;
    for element in [Element::Bf16, Element::F16] {
        for inner in [64, 576, 2048, 5384] {
            for tokens in [1, 3, 64] {
                good &= check(device, element, inner, tokens)?;
            }
        }
    }
    Ok(good)
}

fn check(device: &Device, element: Element, inner: usize, tokens: usize) -> Answer<bool> {
    let mut random = Random(0x2545_f491_4f6c_dd1d + inner as u64);
    let rows = random.numbers(element, TABLE * inner, 0.03);
    let table = upload(device, &to_bytes(element, &rows))?;
    let [embedded, given, share, wide, blended] = [0, 1, 2, 3, 4].map(Buffer);
    let norm = Norm { weight: None, wide: false, eps: EPS };
    let columns = |first| Some(Columns { first, width: 2 * inner });
    let rows_of = |x, first| {
        let (residual, columns) = (None, columns(first));
        Launch::Normalize(Normalize { x, inner, norm, residual, out: wide, columns, next: None })
    };
    let blend = Blend { x: embedded, y: given, share, inner, out: blended };
    let all = tokens * inner;
    let launches = vec![
        embed(&table, TABLE, inner, embedded),
        rows_of(embedded, 0),
        rows_of(given, inner),
        Launch::Blend(blend),
    ];
    let (buffer, copied, chosen) = (embedded, CopiedRows::All, false);
    let plan = Plan {
        given: vec![given, share],
        // The embeddings are returned as logits.
        logits: Some(Logits { buffer, rows: tokens, vocabulary: inner, copied, chosen }),
        tapped: vec![blended, wide],
        ..Plan::new(element, tokens, vec![all, all, tokens, 2 * all, all], launches)
    };
    let mut captured = device.capture(&plan)?;
    let mut last = device.capture(&copying(CopiedRows::Last, plan))?;
    let slots: Vec<i32> = (0..tokens as i32).collect();
    let (mut largest, mut same) = (0f64, true);
    // Repeated steps show that no rows of an earlier step remain.
    for again in 0..3 {
        let ids: Vec<i32> = slots.iter().map(|t| (t * 11 + 5 + again) % TABLE as i32).collect();
        let given = random.numbers(element, all, 1.5);
        let shares: Vec<f64> =
            (0..tokens).map(|t| [0.0, 1.0, 0.375][(t + again as usize) % 3]).collect();
        let bytes = [to_bytes(element, &given), to_bytes(element, &shares)];
        let (positions, n_keys, mask) = (&slots[..], tokens, None);
        let step = StepInputs { ids: &ids, positions, slots: &slots, n_keys, mask };
        // SAFETY: the table outlives the graph, and nothing else uses it.
        let outputs = unsafe { captured.run_groups(&[step], &[&bytes[0], &bytes[1]]) }?;
        let logits = to_numbers(element, outputs.logits);
        let (blended, wide) = outputs.tapped.split_at(2 * all);
        let (blended, wide) = (to_numbers(element, blended), to_numbers(element, wide));
        // SAFETY: the same as above.
        let only = unsafe { last.run_groups(&[step], &[&bytes[0], &bytes[1]]) }?;
        same &= outputs.logits.ends_with(only.logits) && only.logits.len() == 2 * inner;
        same &= outputs.tapped == only.tapped;
        for (t, &id) in ids.iter().enumerate() {
            let row = |of: &[f64]| of[t * inner..][..inner].to_vec();
            let (x, y) = (&rows[id as usize * inner..][..inner], row(&given));
            let round = |x: f64| rounded(element, x);
            let moved = |(x, y): (&f64, &f64)| round(x + round(shares[t] * round(y - x)));
            let expected: Vec<f64> = x.iter().zip(&y).map(moved).collect();
            same &= row(&logits) == x && row(&blended) == expected;
            let expected = [x, &y].map(|row| normalized(element, row, None, false, EPS)).concat();
            largest = largest.max(difference(&wide[2 * t * inner..][..2 * inner], &expected));
        }
    }
    let limit = if element == Element::Bf16 { 0.012 } else { 0.002 };
    let good = same && largest <= limit;
    let word = if good { "ok  " } else { "FAIL" };
    say!(
        "{word} given rows, {element:?}, {inner}, T {tokens}: same {same}, {largest:.5}, limit \
     {limit}"
    );
    Ok(good)
}
