//! Checks heads that are normalized, rotated and stored. Plain rows are compared with plain arithmetic.
//! Packed rows must have the same bits as codes that the host computes from the plain rows.

use etkv_core::KvFormat;
use etkv_cuda::{
    Address, Buffer, Device, Element, Heads, Launch, Memory, Norm, PlaceHeads, Plan, StepInputs,
};

use crate::codecs::{encode, packing, row_bytes, DevicePool, Planes, FORMATS};
use crate::model::{embed, periods, rounded, to_bytes, to_numbers, upload, Random};
use crate::reference::{self, normalized, rotated};
use crate::{say, Answer};

const CAPACITY: usize = 301;
const TABLE: usize = 96;
pub const EPS: f32 = 1e-6;

#[derive(Debug, Clone, Copy)]
struct Shape {
    element: Element,
    n_q: usize,
    n_kv: usize,
    dim: usize,
    /// Whether queries are normalized, and whether keys are.
    norms: [bool; 2],
    /// Whether the weights of norms are float32.
    wide: bool,
    /// The part of a head that rotates, in quarters.
    rotates: usize,
}

/// Returns the weights of a norm, in the plan's elements or in float32.
pub fn weights(
    device: &Device,
    element: Element,
    n: usize,
    wide: bool,
    random: &mut Random,
) -> Answer<(Vec<f64>, Memory)> {
    let number = |x: f64| if wide { f64::from(x as f32) } else { rounded(element, x) };
    let numbers: Vec<f64> = (0..n).map(|_| number(1.0 + 0.3 * random.next())).collect();
    let bytes = match wide {
        true => numbers.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect(),
        false => to_bytes(element, &numbers),
    };
    Ok((numbers, upload(device, &bytes)?))
}

/// The memory of a shape.
struct Case {
    shape: Shape,
    rows: Vec<f64>,
    table: Memory,
    norms: [(Vec<f64>, Memory); 2],
    periods: (Vec<f64>, Memory),
}

/// Runs the checks.
pub fn run(device: &Device) -> Answer<bool> {
    let mut good = true;
    for element in [Element::Bf16, Element::F16] {
        let (norms, wide, rotates) = ([true; 2], false, 4);
        let shape = Shape { element, n_q: 8, n_kv: 2, dim: 64, norms, wide, rotates };
        for shape in [
            shape,
            Shape { n_q: 32, n_kv: 8, dim: 128, norms: [false; 2], ..shape },
            Shape { n_q: 3, n_kv: 3, dim: 128, rotates: 0, ..shape },
            Shape { n_q: 20, n_kv: 2, dim: 256, norms: [true, false], ..shape },
            Shape { n_q: 4, n_kv: 2, dim: 96, norms: [false, true], ..shape },
            Shape { n_q: 4, n_kv: 1, dim: 256, wide: true, ..shape },
            Shape { n_q: 6, n_kv: 2, dim: 96, wide: true, ..shape },
            Shape { n_q: 24, n_kv: 8, dim: 128, rotates: 3, norms: [false; 2], ..shape },
            Shape { n_q: 4, n_kv: 4, dim: 64, rotates: 1, ..shape },
        ] {
            good &= check_shape(device, shape)?;
        }
    }
    Ok(good)
}

fn check_shape(device: &Device, shape: Shape) -> Answer<bool> {
    let Shape { element, dim, n_kv, .. } = shape;
    let case = Case::new(device, shape)?;
    let mut good = true;
    let mut largest = 0f64;
    let mut packed = Vec::new();
    let fits = |format: &KvFormat| dim % packing(*format).group_of(dim) == 0;
    for format in FORMATS.into_iter().filter(fits) {
        packed.push(DevicePool::new(device, Some(format), n_kv, CAPACITY, dim)?);
    }
    for tokens in [1, 5, 64] {
        let mut random = Random(77 + tokens as u64);
        let ids: Vec<i32> = (0..tokens).map(|t| (t * 7 + 3) % TABLE as i32).collect();
        let mut slots: Vec<i32> = (0..tokens).map(|t| 290 - 3 * t).collect();
        slots.sort_by_key(|slot| slot * 31 % 17);
        let positions: Vec<i32> =
            (0..tokens).map(|_| (random.next().abs() * 1e5) as i32 % 3000).collect();
        let step = StepInputs {
            ids: &ids,
            positions: &positions,
            slots: &slots,
            n_keys: CAPACITY,
            mask: None,
        };
        let plain = [
            DevicePool::new(device, None, n_kv, CAPACITY, dim)?,
            DevicePool::new(device, None, n_kv, CAPACITY, dim)?,
        ];
        let q = case.run(device, &step, [&plain[0], &plain[1]])?;
        largest = largest.max(case.difference(&step, &q, &plain)?);
        for n in 0..packed.len() {
            let pools = [&packed[n], &packed[(n + 3) % packed.len()]];
            let same = case.run(device, &step, pools)? == q;
            for (plain, packed) in plain.iter().zip(pools) {
                for head in 0..n_kv {
                    for &slot in &slots {
                        let row = head * CAPACITY + slot as usize;
                        if let Some(text) = case.other_codes(plain, packed, row)? {
                            say!("  FAIL {:?}, T {tokens}: {text}", packed.format);
                            good = false;
                            break;
                        }
                    }
                }
            }
            if !same {
                say!("  FAIL queries differ with {:?}, T {tokens}", pools[0].format);
                good = false;
            }
        }
    }
    let limit = if element == Element::Bf16 { 0.012 } else { 0.002 };
    let seen = case.hides_nothing(device, &packed)?;
    good &= largest <= limit && seen;
    let word = if good { "ok  " } else { "FAIL" };
    say!("  {word} {shape:?}: rows {largest:.5}, limit {limit}; NaN is detected: {seen}");
    Ok(good)
}

impl Case {
    fn new(device: &Device, shape: Shape) -> Answer<Self> {
        let Shape { element, n_q, n_kv, dim, .. } = shape;
        let mut random = Random(0x1234_5678_9abc_def1);
        let width = (n_q + 2 * n_kv) * dim;
        let mut rows: Vec<f64> = (0..TABLE * width)
            .map(|i| {
                // Groups of different signs and sizes. The third row and parts of the fifth are zeros.
                let scale = [1.0, 0.05, 30.0, 0.001][i / 32 % 4];
                let x = scale * random.next();
                let x = if i / 64 % 5 == 1 { -x.abs() } else { x };
                let is_zero = i / width == 3 || i / width == 5 && i % 64 < 32;
                rounded(element, if is_zero { 0.0 } else { x })
            })
            .collect();
        // Values halfway between codes, and values at the end of a scale.
        for (i, x) in rows.iter_mut().take(width).enumerate() {
            *x = [0.25, 0.75, 1.25, 2.5, 3.5, 5.0, 7.0, -7.0][i % 8];
        }
        let table = upload(device, &to_bytes(element, &rows))?;
        let mut norm = || weights(device, element, dim, shape.wide, &mut random);
        let norms = [norm()?, norm()?];
        let periods = periods(device, (dim * shape.rotates / 8).max(1))?;
        Ok(Self { shape, rows, table, norms, periods })
    }

    /// Runs a step, and returns the queries.
    fn run(&self, device: &Device, step: &StepInputs, pools: [&DevicePool; 2]) -> Answer<Vec<u8>> {
        let Shape { element, n_q, n_kv, dim, rotates, .. } = self.shape;
        let (tokens, width) = (step.ids.len(), (n_q + 2 * n_kv) * dim);
        let norm = |which: usize| {
            let weight = Some(self.norms[which].1.address());
            self.shape.norms[which].then_some(Norm { weight, wide: self.shape.wide, eps: EPS })
        };
        let periods: Option<Address> = (rotates > 0).then(|| self.periods.1.address());
        let rotated = if rotates > 0 { dim * rotates / 4 } else { dim };
        let [keys, values] = pools.map(DevicePool::pool);
        let heads = Heads { group: 0, n_q, n_kv, head_dim: dim, periods, rotated, keys, values };
        let (x, out, q_norm, k_norm) = (Buffer(0), Buffer(1), norm(0), norm(1));
        let launches = vec![
            embed(&self.table, TABLE, width, x),
            Launch::PlaceHeads(PlaceHeads { x, heads, q_norm, k_norm, out }),
        ];
        let buffers = vec![tokens * width, tokens * n_q * dim];
        let plan = Plan::new(element, tokens, buffers, launches);
        let mut captured = device.capture(&plan)?;
        // SAFETY: the case and the pools outlive the graph, and nothing else uses them.
        unsafe { captured.run(step) }?;
        let mut q = vec![0; 2 * tokens * n_q * dim];
        captured.read(Buffer(1), &mut q)?;
        Ok(q)
    }

    /// Returns the largest error of queries and plain rows.
    fn difference(&self, step: &StepInputs, q: &[u8], pools: &[DevicePool; 2]) -> Answer<f64> {
        let Shape { element, n_q, n_kv, dim, .. } = self.shape;
        let q = to_numbers(element, q);
        let all = n_q + 2 * n_kv;
        let mut largest = 0f64;
        for (t, &id) in step.ids.iter().enumerate() {
            for head in 0..all {
                let row = &self.rows[(id as usize * all + head) * dim..][..dim];
                let kind = usize::from(head >= n_q) + usize::from(head >= n_q + n_kv);
                let expected = self.placed(row, kind, step.positions[t]);
                let found = match kind {
                    0 => q[(t * n_q + head) * dim..][..dim].to_vec(),
                    _ => {
                        let head = head - n_q - if kind == 2 { n_kv } else { 0 };
                        let row = head * CAPACITY + step.slots[t] as usize;
                        to_numbers(element, &pools[kind - 1].row(0, row, 2 * dim)?)
                    }
                };
                largest = largest.max(reference::difference(&found, &expected));
            }
        }
        Ok(largest)
    }

    /// Returns the expected head after normalization and rotation. `kind` is 0 for queries, 1 for keys and 2
    /// for values.
    fn placed(&self, row: &[f64], kind: usize, position: i32) -> Vec<f64> {
        let Shape { element, dim, rotates, .. } = self.shape;
        let mut row = row.to_vec();
        if kind < 2 && self.shape.norms[kind] {
            let weights = Some(&self.norms[kind].0[..]);
            row = normalized(element, &row, weights, self.shape.wide, EPS);
        }
        if kind == 2 || rotates == 0 {
            return row;
        }
        let rotated = |j| rounded(element, rotated(&row, &self.periods.0, position, j));
        (0..dim).map(rotated).collect()
    }

    /// Compares the codes of a packed row with those of the plain row. Returns a message if they differ.
    fn other_codes(
        &self,
        plain: &DevicePool,
        packed: &DevicePool,
        row: usize,
    ) -> Answer<Option<String>> {
        let Shape { element, dim, .. } = self.shape;
        let Some(format) = packed.format else {
            return Ok(None);
        };
        let numbers = to_numbers(element, &plain.row(0, row, 2 * dim)?);
        let numbers: Vec<f32> = numbers.into_iter().map(|x| x as f32).collect();
        let mut expected = Planes::default();
        encode(format, &numbers, &mut expected);
        let bytes = row_bytes(format, dim);
        let found = Planes {
            codes: packed.row(0, row, bytes[0])?,
            scales: packed.row(1, row, bytes[1])?,
            offsets: packed.row(2, row, bytes[2])?,
        };
        let is_same = found == expected;
        Ok((!is_same).then(|| format!("row {row} has {found:?}, expected {expected:?}")))
    }

    /// Checks that if a key or value is not finite, the queries of its token and KV head become NaN, and that
    /// no other queries do.
    fn hides_nothing(&self, device: &Device, pools: &[DevicePool]) -> Answer<bool> {
        let Shape { element, n_q, n_kv, dim, .. } = self.shape;
        let all = n_q + 2 * n_kv;
        let group = n_q / n_kv;
        let mut good = true;
        for (bad, place) in [(f64::NAN, n_q), (f64::INFINITY, n_q + 2 * n_kv - 1)] {
            let mut rows = self.rows.clone();
            rows[(all + place) * dim + 17] = bad;
            let mut other = Self::new(device, self.shape)?;
            other.table.write(0, &to_bytes(element, &rows))?;
            let step = StepInputs {
                ids: &[1, 2],
                positions: &[4, 5],
                slots: &[4, 5],
                n_keys: CAPACITY,
                mask: None,
            };
            let q = to_numbers(element, &other.run(device, &step, [&pools[0], &pools[1]])?);
            let hidden = if place == n_q { 0 } else { n_kv - 1 };
            for (i, x) in q.iter().enumerate() {
                let (t, head) = (i / dim / n_q, i / dim % n_q);
                good &= x.is_nan() == (t == 0 && head / group == hidden);
            }
        }
        Ok(good)
    }
}
