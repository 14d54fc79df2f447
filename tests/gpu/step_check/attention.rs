//! Measures the time of attention alone: launches that depend on each other, as in the layers of a model, in
//! one CUDA graph.

use std::iter::once;

use etkv_core::KvFormat;
use etkv_cuda::{Attend, Buffer, Device, Element, KeyMask, Launch, Plan, Result};

use crate::codecs::{row_bytes, DevicePool};
use crate::model::embed;
use crate::say;
use crate::timing::median;

const N_Q: usize = 32;
const N_KV: usize = 8;
const DIM: usize = 128;
const LAUNCHES: usize = 16;
/// Each launch has separate pools, as in a model, so that the keys of the last step are not in the device's
/// caches.
const CAPACITY: usize = 65_536;

const FORMATS: [Option<KvFormat>; 6] = [
    None,
    Some(KvFormat::Affine { bits: 4, group: 64 }),
    Some(KvFormat::Mxfp4),
    Some(KvFormat::Affine { bits: 8, group: 64 }),
    Some(KvFormat::Mxfp8),
    Some(KvFormat::RowInt4),
];
/// The number of formats that are timed in bfloat16, too. Each is compiled four times, which takes seconds.
const IN_BF16: usize = 3;

#[derive(Clone, Copy)]
struct TimedAttention<'a> {
    device: &'a Device,
    element: Element,
    pools: &'a [DevicePool],
    blocks: Option<usize>,
    small_blocks: bool,
}

/// Prints the time of a launch in microseconds, and the rate at which it reads keys and values.
pub fn run(device: &Device) -> Result<()> {
    for element in [Element::F16, Element::Bf16] {
        say!("attention of {N_Q}/{N_KV} heads of {DIM}, {element:?}: us a launch (GB/s of keys and values)");
        let mut plain = Vec::new();
        let count = if element == Element::Bf16 { IN_BF16 } else { FORMATS.len() };
        for format in FORMATS.into_iter().take(count).filter(|&format| is_wanted(format)) {
            let mut pools = Vec::new();
            for _ in 0..2 * LAUNCHES {
                pools.push(DevicePool::new(device, format, N_KV, CAPACITY, DIM)?);
            }
            let timed = TimedAttention {
                device,
                element,
                pools: &pools,
                blocks: None,
                small_blocks: false,
            };
            say!("{}", format.map_or("plain".to_owned(), |format| format!("{format:?}")));
            let mut times = Vec::new();
            for tokens in [1, 8, 16, 32] {
                for keys in [2048, 8192, 32_768] {
                    let time = timed.time(tokens, keys, None)?;
                    times.push((format!("T {tokens:2} {keys:5}"), time, keys));
                }
            }
            let sequences = (0..16).map(|t| once(t * 4096..(t + 1) * 4096));
            let mask = KeyMask::of(sequences);
            let many = TimedAttention { small_blocks: true, ..timed };
            let many = many.time(16, 65_536, Some(&mask))?;
            times.push(("16 sequences of 4096".to_owned(), many, 65_536));
            for branches in [1, 8] {
                let trunk = 16_384;
                let runs = (0..branches).map(|t| [0..trunk, trunk + 64 * t..trunk + 64 * (t + 1)]);
                let mask = KeyMask::of(runs);
                let keys = trunk + 64 * branches;
                let time = timed.time(branches, keys, Some(&mask))?;
                times.push((format!("{branches} branches of 16384"), time, keys));
            }
            for (n, (what, time, keys)) in times.iter().enumerate() {
                let rate = (keys * N_KV * 2 * bytes(format)) as f64 / time / 1e3;
                let against = match plain.get(n) {
                    Some(plain) => format!("; {:.2} of plain", time / plain),
                    None => String::new(),
                };
                say!("  {what:22} {time:7.2} ({rate:4.0}){against}");
            }
            let of = |n: usize| times[n].1;
            say!(
                "  at 32768: 8 tokens {:.2} of one, 16 {:.2}, 32 {:.2}; 8 branches {:.2} of one",
                of(5) / of(2),
                of(8) / of(2),
                of(11) / of(2),
                of(14) / of(13),
            );
            if format.is_none() {
                plain = times.iter().map(|(_, time, _)| *time).collect();
            }
            for tokens in [1, 8, 16] {
                let mut text = String::new();
                for blocks in [132, 264, 396, 528] {
                    let timed = TimedAttention { blocks: Some(blocks), ..timed };
                    text.push_str(&format!(" {blocks}: {:.2}", timed.time(tokens, 32_768, None)?));
                }
                say!("  {tokens} tokens at 32768 by blocks:{text}");
            }
        }
    }
    Ok(())
}

/// Returns whether a format is timed: if `ETKV_ATTENTION` is 1 or a part of the format's name. Plain rows are
/// always timed.
fn is_wanted(format: Option<KvFormat>) -> bool {
    let wanted = std::env::var("ETKV_ATTENTION").unwrap_or_default();
    let is_named = |format: KvFormat| format!("{format:?}").contains(&wanted);
    wanted == "1" || format.is_none_or(is_named)
}

fn bytes(format: Option<KvFormat>) -> usize {
    format.map_or(2 * DIM, |format| row_bytes(format, DIM).iter().sum())
}

impl TimedAttention<'_> {
    fn time(&self, tokens: usize, keys: usize, mask: Option<&KeyMask>) -> Result<f64> {
        let whole = self.median(tokens, keys, mask, LAUNCHES)?;
        // A graph with one launch has the same overhead, which is subtracted.
        let one = self.median(tokens, keys, mask, 1)?;
        Ok((whole - one) / (LAUNCHES - 1) as f64)
    }

    fn median(
        &self,
        tokens: usize,
        keys: usize,
        mask: Option<&KeyMask>,
        launches: usize,
    ) -> Result<f64> {
        let width = N_Q * DIM;
        let table = self.device.allocate(2 * 64 * width)?;
        let attend = |n: usize| {
            Launch::Attend(Attend {
                group: 0,
                q: Buffer(n % 2),
                keys: self.pools[2 * n].pool(),
                values: self.pools[2 * n + 1].pool(),
                n_q: N_Q,
                n_kv: N_KV,
                head_dim: DIM,
                scale: 0.1,
                out: Buffer((n + 1) % 2),
            })
        };
        let embed = embed(&table, 64, width, Buffer(0));
        let launches = once(embed).chain((0..launches).map(attend)).collect();
        let plan = Plan {
            masked: vec![mask.is_some()],
            small_blocks: self.small_blocks,
            attention_blocks: self.blocks,
            ..Plan::new(self.element, tokens, vec![tokens * width; 2], launches)
        };
        median(&mut self.device.capture(&plan)?, tokens, keys, mask)
    }
}
