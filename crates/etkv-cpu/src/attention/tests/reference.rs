//! The reference computation, and calls to compare with it.

use std::ops::Range;

use etkv_core::KvFormat;
use half::{bf16, f16};

use super::super::synthetic::{self, Random, Threads};
use super::super::*;

fn f16_at(bytes: &[u8], i: usize) -> f64 {
    f16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]).to_f64()
}

/// Decodes a small float with `mantissa` bits of mantissa.
pub(crate) fn small_float(code: u32, exponent_bits: u32, mantissa: u32) -> f64 {
    let bias = (1 << (exponent_bits - 1)) - 1;
    let exponent = (code >> mantissa & ((1 << exponent_bits) - 1)) as i32;
    let fraction = f64::from(code & ((1 << mantissa) - 1)) / f64::from(1 << mantissa);
    let size = match exponent {
        0 => fraction * 2f64.powi(1 - bias),
        _ => (1.0 + fraction) * 2f64.powi(exponent - bias),
    };
    if code >> (mantissa + exponent_bits) & 1 == 1 {
        -size
    } else {
        size
    }
}

/// Returns code number `i`, of `bits` bits, bit by bit.
fn code_at(bytes: &[u8], i: usize, bits: usize) -> u32 {
    (0..bits).fold(0, |code, bit| {
        let at = i * bits + bit;
        code | u32::from(bytes[at / 8] >> (at % 8) & 1) << bit
    })
}

fn decoded(view: &View, slot: usize, head: usize) -> Vec<f64> {
    let plane = |p: usize| view.row(p, slot, head).unwrap();
    let codes = plane(0);
    let scale = |i: usize, group: usize| {
        let scales = plane(1);
        match view.format {
            KvFormat::Mxfp8 | KvFormat::Mxfp4 => 2f64.powi(i32::from(scales[i / group]) - 127),
            KvFormat::Nvfp4 => small_float(scales[i / group].into(), 4, 3),
            _ => f16_at(scales, i / group),
        }
    };
    let element = |i: usize| match view.format {
        KvFormat::F32 => f32::from_le_bytes(codes[4 * i..4 * i + 4].try_into().unwrap()).into(),
        KvFormat::F16 => f16_at(codes, i),
        KvFormat::Bf16 => bf16::from_le_bytes([codes[2 * i], codes[2 * i + 1]]).to_f64(),
        KvFormat::Affine { bits, group } => {
            let offset = f16_at(plane(2), i / usize::from(group));
            f64::from(code_at(codes, i, bits.into())) * scale(i, group.into()) + offset
        }
        KvFormat::Mxfp8 => small_float(codes[i].into(), 4, 3) * scale(i, 32),
        KvFormat::Mxfp4 => small_float(code_at(codes, i, 4), 2, 1) * scale(i, 32),
        KvFormat::Nvfp4 => small_float(code_at(codes, i, 4), 2, 1) * scale(i, 16),
        KvFormat::RowInt4 => (f64::from(code_at(codes, i, 4)) - 8.0) * scale(i, view.head_dim),
        KvFormat::RowFp4 => small_float(code_at(codes, i, 4), 2, 1) * scale(i, view.head_dim),
    };
    (0..view.head_dim).map(element).collect()
}

/// A mask that owns its runs.
#[derive(Debug, Clone)]
pub enum TestMask {
    None,
    Causal,
    Runs(Vec<Range<u32>>, Vec<u32>),
}

impl TestMask {
    pub fn borrowed(&self) -> MaskRef<'_> {
        match self {
            Self::None => MaskRef::None,
            Self::Causal => MaskRef::Causal,
            Self::Runs(runs, ends) => MaskRef::Runs { runs, ends },
        }
    }

    fn sees(&self, token: usize, n_tokens: usize, slot: usize, n_slots: usize) -> bool {
        match self {
            Self::None => true,
            Self::Causal => slot + n_tokens < n_slots + 1 + token,
            Self::Runs(runs, ends) => {
                let begin = if token == 0 { 0 } else { ends[token - 1] as usize };
                runs[begin..ends[token] as usize].iter().any(|r| r.contains(&(slot as u32)))
            }
        }
    }

    /// Returns random runs: none, single slots, short, long and empty ones.
    pub fn random(n_tokens: usize, n_slots: usize, random: &mut Random) -> Self {
        let (mut runs, mut ends) = (Vec::new(), Vec::new());
        for _ in 0..n_tokens {
            let longest = [0, 1, 3, 90, n_slots][random.integer(0, 4)];
            let mut at = 0;
            while longest > 0 && at < n_slots && random.integer(0, 5) > 0 {
                let start = at + random.integer(0, 2 * longest);
                let end = start + random.integer(0, longest);
                if end > n_slots {
                    break;
                }
                runs.push(start as u32..end as u32);
                at = end;
            }
            ends.push(runs.len() as u32);
        }
        Self::Runs(runs, ends)
    }
}

pub struct Case {
    pub name: String,
    pub n_tokens: usize,
    pub group: usize,
    pub queries: Vec<f32>,
    pub k: View,
    pub v: View,
    pub mask: TestMask,
    pub scale: f32,
    pub softcap: Option<f32>,
    pub sinks: Option<Vec<f32>>,
}

impl Case {
    fn n_heads(&self) -> usize {
        self.k.n_kv_heads * self.group
    }

    fn shape(&self) -> Shape {
        Shape::contiguous(self.n_heads(), self.n_tokens, self.k.head_dim)
    }

    fn len(&self) -> usize {
        self.n_heads() * self.n_tokens * self.v.head_dim
    }

    pub fn attend(
        &self,
        isa: Instructions,
        parallel: &dyn Parallel,
        work: &mut Workspace,
    ) -> Vec<f32> {
        let mut out = vec![f32::NAN; self.len()];
        let queries = Queries::of_f32(&self.queries, self.shape()).unwrap();
        let dim = self.v.head_dim;
        let mut output = Output::of_f32(&mut out, self.n_heads(), self.n_tokens, dim).unwrap();
        let (mask, scoring) = (self.mask.borrowed(), self.scoring());
        attend_with(isa, work, parallel, &queries, &self.k, &self.v, mask, scoring, &mut output)
            .unwrap();
        out
    }

    pub fn scoring(&self) -> Scoring<'_, [f32]> {
        let sinks = self.sinks.as_deref();
        Scoring { scale: self.scale, softcap: self.softcap, sinks }
    }

    /// Returns the case with sinks from -4 to 4.
    pub fn with_sinks(mut self, random: &mut Random) -> Self {
        self.sinks = Some((0..self.n_heads()).map(|_| 4.0 * random.number()).collect());
        self.name.push_str(", sinks");
        self
    }

    pub fn with_softcap(mut self, softcap: f32) -> Self {
        self.softcap = Some(softcap);
        self.name.push_str(&format!(", softcap {softcap}"));
        self
    }

    /// Returns the result, and the allowed float32 error of each row.
    ///
    /// A score is a sum of `d` products of float32 numbers. The scaling of the query rounds twice. Each
    /// product is rounded once by a fused operation, or twice without one. With vectors, the longest chain of
    /// additions is `d / 8 + 4`. So the error of a score is at most `(d / 8 + 10) * e` times the sum of the
    /// magnitudes of its products, where `e = 2^-24`. Unpacked elements add one rounding. The difference from
    /// the peak and the power of two add `4 e` of the score and of the weight. A relative error `x` of all
    /// weights changes the mean by at most `2 x` times the largest magnitude of the values. Sums over `n`
    /// values in parts add `(n / 16 + 70) * e`. The bound is half of the total, since errors have different
    /// signs. A softcap does not increase differences between scores, and adds `10 * e` of its result.
    pub fn expected(&self) -> (Vec<f64>, Vec<f64>) {
        let (n, d) = (self.k.n_slots, self.k.head_dim);
        let e = f64::from(f32::EPSILON) / 2.0;
        let mut out = Vec::with_capacity(self.len());
        let mut bounds = Vec::new();
        for head in 0..self.k.n_kv_heads {
            let keys: Vec<_> = (0..n).map(|slot| decoded(&self.k, slot, head)).collect();
            let values: Vec<_> = (0..n).map(|slot| decoded(&self.v, slot, head)).collect();
            for row in 0..self.group * self.n_tokens {
                let token = row % self.n_tokens;
                let query = &self.queries[(head * self.group * self.n_tokens + row) * d..][..d];
                let seen: Vec<usize> =
                    (0..n).filter(|&slot| self.mask.sees(token, self.n_tokens, slot, n)).collect();
                let dots = |slot: usize| {
                    query
                        .iter()
                        .zip(&keys[slot])
                        .map(|(&q, k)| f64::from(q) * k * f64::from(self.scale))
                };
                let capped = |score: f64| match self.softcap.map(f64::from) {
                    Some(softcap) => softcap * (score / softcap).tanh(),
                    None => score,
                };
                let scores: Vec<f64> = seen.iter().map(|&slot| capped(dots(slot).sum())).collect();
                let query_head = head * self.group + row / self.n_tokens;
                let sink = self.sinks.as_ref().map(|sinks| f64::from(sinks[query_head]));
                let sizes = seen.iter().map(|&slot| dots(slot).map(f64::abs).sum());
                let size = sizes.fold(0.0, f64::max);
                let of_softcap = match self.softcap.is_some() {
                    true => 10.0 * scores.iter().fold(0.0, |a, score| score.abs().max(a)),
                    false => 0.0,
                };
                let peak = scores.iter().chain(&sink).fold(f64::NEG_INFINITY, |a, &b| a.max(b));
                let weights: Vec<f64> = scores.iter().map(|score| (score - peak).exp()).collect();
                let of_sink = sink.map_or(0.0, |sink| (sink - peak).exp());
                let total: f64 = weights.iter().sum::<f64>() + of_sink;
                let mut row = vec![0.0; self.v.head_dim];
                let mut largest = 0f64;
                for (&slot, weight) in seen.iter().zip(&weights) {
                    for (out, value) in row.iter_mut().zip(&values[slot]) {
                        *out += weight * value / total;
                        largest = largest.max(value.abs());
                    }
                }
                let of_scores = (d as f64 / 8.0 + 10.0) * size + 4.0 * size + 4.0 + of_softcap;
                let of_sums = n as f64 / 16.0 + 70.0;
                bounds.push((of_scores + of_sums / 2.0) * e * largest + 1e-30);
                out.extend(row);
            }
        }
        (out, bounds)
    }

    /// Checks all instruction sets, each with 1, 2 and 3 threads. Returns the largest error, as a fraction of
    /// its bound.
    pub fn check(&self, work: &mut Workspace) -> f64 {
        let (expected, bounds) = self.expected();
        let mut worst = 0f64;
        for isa in Instructions::available() {
            let found = self.attend(isa, &Serial, work);
            for (i, (&found, &expected)) in found.iter().zip(&expected).enumerate() {
                let bound = bounds[i / self.v.head_dim];
                let error = (f64::from(found) - expected).abs();
                assert!(
                    error <= bound,
                    "{} {isa:?} at {i}: expected {expected}, got {found}, off by {error:e}, limit \
                     {bound:e}",
                    self.name
                );
                worst = worst.max(error / bound);
            }
            for threads in [2, 3] {
                let same = self.attend(isa, &Threads(threads), work);
                assert!(same == found, "{} {isa:?} {threads} threads differ", self.name);
            }
        }
        worst
    }
}

pub fn case(
    [n_kv_heads, group, n_tokens, n_slots]: [usize; 4],
    k: (KvFormat, usize),
    v: (KvFormat, usize),
    mask: TestMask,
    random: &mut Random,
) -> Case {
    let name = format!(
        "{n_kv_heads} x {group} heads, {n_tokens} tokens, {n_slots} slots, k {} {}, v {} {}, {}",
        k.0,
        k.1,
        v.0,
        v.1,
        match mask {
            TestMask::None => "no mask",
            TestMask::Causal => "causal",
            TestMask::Runs(..) => "runs",
        }
    );
    let queries = (0..n_kv_heads * group * n_tokens * k.1).map(|_| 2.0 * random.number()).collect();
    Case {
        name,
        n_tokens,
        group,
        queries,
        k: synthetic::view(k.0, n_kv_heads, k.1, n_slots, random).unwrap(),
        v: synthetic::view(v.0, n_kv_heads, v.1, n_slots, random).unwrap(),
        mask,
        scale: 1.0 / (k.1 as f32).sqrt(),
        softcap: None,
        sinks: None,
    }
}
