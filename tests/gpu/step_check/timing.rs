//! Measures the time of a step.

use std::time::Instant;

use etkv_cuda::{
    CapturedStep, CopiedRows, Device, Element, KeyMask, Plan, Result, StepInputs, MAX_FEW,
};

use crate::model::{copying, Matrix, Model, Packing, Shape};
use crate::say;

const CAPACITY: usize = 8192;
const RUNS: usize = 40;

pub const LLAMA: Shape = Shape {
    name: "Llama-3.2-1B",
    element: Element::Bf16,
    layers: 16,
    hidden: 2048,
    n_q: 32,
    n_kv: 8,
    head_dim: 64,
    intermediate: 8192,
    vocabulary: 128_256,
    capacity: CAPACITY,
    bias: false,
    rotates: true,
    packing: None,
};

/// This shape has the default group size of mlx-lm. The next shape has the group size of this project.
const LLAMA_64: Shape = packed("Llama-3.2-1B in 4 bits, groups of 64", 4, 64);
const LLAMA_32: Shape = packed("Llama-3.2-1B in 4 bits, groups of 32", 4, 32);
const LLAMA_8: Shape = packed("Llama-3.2-1B in 8 bits, groups of 64", 8, 64);

const fn packed(name: &'static str, bits: usize, group: usize) -> Shape {
    Shape { name, packing: Some(Packing { bits, group }), ..LLAMA }
}

pub const SMOL: Shape = Shape {
    name: "SmolLM2-135M",
    layers: 30,
    hidden: 576,
    n_q: 9,
    n_kv: 3,
    intermediate: 1536,
    vocabulary: 49_152,
    ..LLAMA
};

/// Prints the median time of steps, including the launch and the wait on the host.
pub fn run(device: &Device) -> Result<()> {
    for shape in [LLAMA, LLAMA_64, LLAMA_32, LLAMA_8, SMOL] {
        let model = Model::new(device, shape, None)?;
        let bytes: usize = model.weights[1..].iter().map(Matrix::bytes).sum();
        say!(
            "{}: {} MB of weights a step; median us of {RUNS} steps",
            shape.name,
            bytes / 1_000_000
        );
        sequences(device, &model)?;
        if std::env::var_os("ETKV_QUICK").is_some() {
            for tokens in tokens_of(shape) {
                let mut text = String::new();
                for keys in [16, 256, 2048] {
                    for copied in [CopiedRows::All, CopiedRows::None] {
                        let plan = overlapping(&model, tokens, copied);
                        let time = median(&mut device.capture(&plan)?, tokens, keys, None)?;
                        text.push_str(&format!(" {time:8.1}"));
                    }
                }
                say!("  T {tokens}, keys 16, 256, 2048, copied and chosen: {text}");
            }
            continue;
        }
        say!("  T  keys | logits copied: serial overlap | argmax only: serial overlap | GB/s of weights");
        for tokens in tokens_of(shape) {
            let mut graphs = Vec::new();
            for copied in [CopiedRows::All, CopiedRows::None] {
                for overlap in [false, true] {
                    let plan = Plan { overlap, ..overlapping(&model, tokens, copied) };
                    graphs.push(device.capture(&plan)?);
                }
            }
            for keys in [256, 2048, 8000] {
                let mut times = Vec::new();
                for graph in &mut graphs {
                    times.push(median(graph, tokens, keys, None)?);
                }
                let rate = bytes as f64 / times[3] / 1e3;
                say!(
                    "  {tokens:2} {keys:5} | {:21.1} {:7.1} | {:19.1} {:7.1} | {rate:.0}",
                    times[0],
                    times[1],
                    times[2],
                    times[3],
                );
            }
        }
        let blocks = [66, 132, 264, 396, 528];
        say!("  blocks of attention {blocks:?}, chosen only, overlap");
        for tokens in [1, 8] {
            for keys in [256, 2048, 8000] {
                let mut times = Vec::new();
                for blocks in blocks {
                    let mut plan = overlapping(&model, tokens, CopiedRows::None);
                    plan.attention_blocks = Some(blocks);
                    times.push(median(&mut device.capture(&plan)?, tokens, keys, None)?);
                }
                let times: Vec<String> = times.iter().map(|time| format!("{time:.1}")).collect();
                say!("  {tokens:2} {keys:5} | {}", times.join(" "));
            }
        }
    }
    Ok(())
}

/// Prints the time of steps with one token of each of several sequences, and the ratio of their tokens per
/// second to those of one sequence. Only argmax ids are copied to the host.
fn sequences(device: &Device, model: &Model) -> Result<()> {
    for each in [128, 256, 512].into_iter().filter(|_| model.shape.capacity >= CAPACITY) {
        let mut text = String::new();
        let mut first = None;
        for tokens in tokens_of(model.shape).filter(|tokens| tokens * each <= CAPACITY) {
            let mut plan = overlapping(model, tokens, CopiedRows::None);
            plan.small_blocks = tokens > 1;
            plan.masked = vec![tokens > 1];
            let time = median_of_sequences(&mut device.capture(&plan)?, tokens, each)?;
            let rate = tokens as f64 / time;
            let ratio = rate / *first.get_or_insert(rate);
            text.push_str(&format!(" {tokens}: {time:.0} ({ratio:.1})"));
        }
        say!("  sequences of {each} keys, us a step (ratio of tokens/s to one):{text}");
    }
    Ok(())
}

/// Returns the token counts for which a shape is timed.
fn tokens_of(shape: Shape) -> impl Iterator<Item = usize> {
    let takes = move |tokens: &usize| *tokens <= MAX_FEW || shape.packing.is_none();
    [1, 2, 4, 8, 16, 32, 64].into_iter().filter(takes)
}

/// Returns the plan of a step whose kernels overlap.
fn overlapping(model: &Model, tokens: usize, copied: CopiedRows) -> Plan {
    copying(copied, Plan { overlap: true, ..model.plan(tokens, false, false) })
}

/// Returns the median time of steps whose tokens are the last of `keys` keys.
pub fn median(
    graph: &mut CapturedStep,
    tokens: usize,
    keys: usize,
    mask: Option<&KeyMask>,
) -> Result<f64> {
    let ids: Vec<i32> = (0..tokens as i32).collect();
    let slots: Vec<i32> = ((keys - tokens) as i32..).take(tokens).collect();
    let step = StepInputs { ids: &ids, positions: &slots, slots: &slots, n_keys: keys, mask };
    median_of(graph, &step)
}

/// Returns the median time of steps with one token of each of several sequences. Each sequence has `each`
/// keys.
pub fn median_of_sequences(graph: &mut CapturedStep, tokens: usize, each: usize) -> Result<f64> {
    let mask = KeyMask::of((0..tokens).map(|t| std::iter::once(t * each..(t + 1) * each)));
    let ids: Vec<i32> = (0..tokens as i32).collect();
    let positions = vec![each as i32 - 1; tokens];
    let slots: Vec<i32> = (1..=tokens).map(|t| (t * each) as i32 - 1).collect();
    let step = StepInputs {
        ids: &ids,
        positions: &positions,
        slots: &slots,
        n_keys: tokens * each,
        mask: (tokens > 1).then_some(&mask),
    };
    median_of(graph, &step)
}

fn median_of(graph: &mut CapturedStep, step: &StepInputs) -> Result<f64> {
    let mut times = Vec::new();
    for run in 0..RUNS + 4 {
        let begin = Instant::now();
        // SAFETY: the model or the pools outlive the graph, and nothing else uses them.
        unsafe { graph.run(step) }?;
        if run >= 4 {
            times.push(begin.elapsed().as_secs_f64() * 1e6);
        }
    }
    times.sort_by(f64::total_cmp);
    Ok(times[times.len() / 2])
}
