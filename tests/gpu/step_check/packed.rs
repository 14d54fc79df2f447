//! Checks attention over packed pools against plain arithmetic over the decoded rows.

use etkv_core::KvFormat;
use etkv_cuda::{Attend, Buffer, Device, Element, Launch, Plan, StepInputs};

use crate::codecs::{decode, encode, DevicePool, Planes, FORMATS};
use crate::model::{embed, rounded, to_bytes, to_numbers, upload, Random};
use crate::reference::{attended, difference};
use crate::{say, Answer};

/// Odd, so that the planes of most heads are not aligned.
const CAPACITY: usize = 2177;
const TABLE: usize = 70;

#[derive(Debug, Clone, Copy)]
struct Case {
    element: Element,
    n_q: usize,
    n_kv: usize,
    dim: usize,
    formats: [Option<KvFormat>; 2],
    masked: bool,
    tokens: &'static [usize],
}

const ALL: &[usize] = &[1, 2, 5, 8, 16, 24, 64];
/// Token counts whose rows fill one part of a warp, and two parts. Each is compiled separately, which takes
/// seconds.
const FEW: &[usize] = &[1, 2, 4];
const MANY: &[usize] = &[5, 8, 16, 24, 64];

/// Checks each format, and some pairs of formats.
pub fn run(device: &Device) -> Answer<bool> {
    let all = FORMATS.map(Some);
    let base = Case {
        element: Element::Bf16,
        n_q: 8,
        n_kv: 2,
        dim: 64,
        formats: [all[0]; 2],
        masked: true,
        tokens: ALL,
    };
    let affine = |bits, group| Some(KvFormat::Affine { bits, group });
    let mut cases: Vec<Case> = Vec::new();
    // The formats for which there are more cases: both dtypes, and steps with and without masks.
    cases.push(Case { dim: 128, ..base });
    cases.push(Case { dim: 128, element: Element::F16, masked: false, ..base });
    for (n, &format) in all.iter().enumerate().skip(1) {
        let element = if n % 2 == 0 { Element::Bf16 } else { Element::F16 };
        let tokens = if n % 2 == 0 { FEW } else { MANY };
        cases.push(Case { element, formats: [format; 2], masked: n % 3 != 0, tokens, ..base });
    }
    for n in 2..7 {
        let element = if n % 2 == 0 { Element::F16 } else { Element::Bf16 };
        let tokens = if n % 2 == 0 { MANY } else { FEW };
        cases.push(Case { element, formats: [all[n], all[2 + (n + 1) % 5]], tokens, ..base });
    }
    cases.push(Case { formats: [None, all[0]], tokens: MANY, ..base });
    cases.push(Case { formats: [all[3], None], element: Element::F16, tokens: FEW, ..base });
    cases.push(Case { dim: 96, formats: [affine(4, 32), affine(8, 32)], ..base });
    cases.push(Case { dim: 256, formats: [affine(4, 128), all[2]], ..base });
    cases.push(Case { n_q: 20, n_kv: 2, formats: [all[6], all[5]], tokens: MANY, ..base });
    let mut good = true;
    for case in cases {
        good &= case.check(device)?;
    }
    Ok(good)
}

impl Case {
    fn check(self, device: &Device) -> Answer<bool> {
        let Self { element, n_q, n_kv, dim, formats, .. } = self;
        let mut random = Random(0x0dd0_beef_1234_5678);
        let q = random.numbers(element, TABLE * n_q * dim, 1.0);
        let table = upload(device, &to_bytes(element, &q))?;
        let mut pools = Vec::new();
        let mut rows = Vec::new();
        for format in formats {
            let mut pool = DevicePool::new(device, format, n_kv, CAPACITY, dim)?;
            let numbers = random.numbers(element, n_kv * CAPACITY * dim, 1.0);
            match format {
                None => {
                    pool.planes[0].write(0, &to_bytes(element, &numbers))?;
                    rows.push(numbers);
                }
                Some(format) => {
                    let mut planes = Planes::default();
                    for row in numbers.chunks_exact(dim) {
                        let row: Vec<f32> = row.iter().map(|&x| x as f32).collect();
                        encode(format, &row, &mut planes);
                    }
                    pool.write(&planes)?;
                    // The numbers are rounded as in the kernel, which unpacks affine rows to float16.
                    let inner = match format {
                        KvFormat::Affine { .. } => Element::F16,
                        _ => element,
                    };
                    let decoded = decode(format, dim, &planes);
                    rows.push(decoded.into_iter().map(|x| rounded(inner, x)).collect());
                }
            }
            pools.push(pool);
        }
        let is_affine = |format: &Option<KvFormat>| matches!(format, Some(KvFormat::Affine { .. }));
        // A scaled code is rounded before the offset is added, and may be twice as large as the element.
        let limit = match element {
            Element::Bf16 => 0.012,
            Element::F16 if formats.iter().any(is_affine) => 0.004,
            Element::F16 => 0.002,
        };
        let mut largest = 0f64;
        let mut worst = String::new();
        for &tokens in self.tokens {
            let attend = Attend {
                group: 0,
                q: Buffer(0),
                keys: pools[0].pool(),
                values: pools[1].pool(),
                n_q,
                n_kv,
                head_dim: dim,
                scale: 1.0 / (dim as f32).sqrt(),
                out: Buffer(1),
            };
            let launches = vec![embed(&table, TABLE, n_q * dim, Buffer(0)), Launch::Attend(attend)];
            let plan = Plan {
                masked: vec![self.masked],
                small_blocks: self.masked && tokens == 64,
                ..Plan::new(element, tokens, vec![tokens * n_q * dim; 2], launches)
            };
            let mut captured = device.capture(&plan)?;
            let mut one_block =
                device.capture(&Plan { attention_blocks: Some(1), overlap: false, ..plan })?;
            for keys in [1, 63, 64, 65, 300, 2100] {
                if keys < tokens || tokens == 64 && keys == 2100 {
                    continue;
                }
                let ids: Vec<i32> = (0..tokens as i32).map(|t| (t * 11 + 5) % 70).collect();
                let slots: Vec<i32> = ((keys - tokens) as i32..).take(tokens).collect();
                let mask = random.mask(keys, keys - tokens..keys);
                let step = StepInputs {
                    ids: &ids,
                    positions: &slots,
                    slots: &slots,
                    n_keys: keys,
                    mask: self.masked.then_some(&mask),
                };
                let sees = |t: usize, key: usize| match self.masked {
                    true => mask.sees(t, key),
                    false => key < keys - tokens + t + 1,
                };
                let expected = self.attended(&q, &ids, &rows, keys, sees);
                for (what, graph) in [("", &mut captured), (", one block", &mut one_block)] {
                    // SAFETY: table and pools outlive the graphs, and nothing else uses them.
                    unsafe { graph.run(&step) }?;
                    let mut found = vec![0; 2 * tokens * n_q * dim];
                    graph.read(Buffer(1), &mut found)?;
                    let distance = difference(&to_numbers(element, &found), &expected);
                    if distance > largest {
                        largest = distance;
                        worst = format!("T {tokens}, {keys} keys{what}");
                    }
                }
            }
        }
        let good = largest <= limit;
        let word = if good { "ok  " } else { "FAIL" };
        say!("  {word} {self:?}: {largest:.5} at {worst}, limit {limit}");
        Ok(good)
    }

    fn attended(
        &self,
        q: &[f64],
        ids: &[i32],
        rows: &[Vec<f64>],
        n_keys: usize,
        sees: impl Fn(usize, usize) -> bool,
    ) -> Vec<f64> {
        let Self { element, n_q, n_kv, dim, .. } = *self;
        let mut expected = Vec::new();
        for (t, &id) in ids.iter().enumerate() {
            let seen: Vec<usize> = (0..n_keys).filter(|&key| sees(t, key)).collect();
            for head in 0..n_q {
                let query = &q[(id as usize * n_q + head) * dim..][..dim];
                let first = head / (n_q / n_kv) * CAPACITY;
                let row = |of: usize, key: usize| &rows[of][(first + key) * dim..][..dim];
                let scale = 1.0 / (dim as f64).sqrt();
                let sums = attended(query, &seen, |at| row(0, at), |at| row(1, at), scale);
                expected.extend(sums.into_iter().map(|sum| rounded(element, sum)));
            }
        }
        expected
    }
}
