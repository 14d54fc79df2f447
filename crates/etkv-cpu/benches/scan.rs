//! Measures the scan of one token in recurrent layers on one thread, and for comparison a plain read of the anchor
//! and the rows that the scan reads. There are as many layers as in a model, so most of these bytes are in no cache
//! of the processor when a layer is called again.
//!
//! `cargo bench -p etkv-cpu --bench scan`. Prints medians in microseconds per layer, for several numbers of
//! rows after the anchor.

use std::hint::black_box;
use std::time::Instant;

use etkv_core::bookkeeping::{AnchorSource, RowSource};
use etkv_core::{AttendCache, CacheConfig, CellsCache, RecurrentLayer, RecurrentSpec, Result};
use etkv_cpu::attention::synthetic::{Random, Threads};
use etkv_cpu::recurrent::{scan, Scan, ScanInputs, Workspace};
use etkv_cpu::{CpuStore, Tensor, View};

struct Model {
    name: &'static str,
    heads: i32,
    v_dim: i32,
    channel_decay: bool,
    /// Whether updates follow the delta rule.
    delta: bool,
}

/// The recurrent layers of a model.
const LAYERS: usize = 18;
const K_DIM: i32 = 128;
const MODELS: [Model; 3] = [
    Model { name: "Qwen3.5-0.8B", heads: 16, v_dim: 128, channel_decay: false, delta: true },
    Model { name: "Mamba-2, 48 heads", heads: 48, v_dim: 64, channel_decay: false, delta: false },
    Model { name: "a decay per channel", heads: 16, v_dim: 128, channel_decay: true, delta: true },
];
/// The steps begin here, at a multiple of the block.
const PROMPT: i32 = 512;
const DECODED: i32 = 63;
const CHUNK: i32 = 64;

impl Model {
    fn layer(&self) -> RecurrentLayer {
        let &Self { heads, v_dim, channel_decay, .. } = self;
        RecurrentLayer::Recurrence { k_heads: heads, heads, k_dim: K_DIM, v_dim, channel_decay }
    }

    fn sizes(&self) -> Scan {
        let (heads, channel_decay) = (self.heads as usize, self.channel_decay);
        let [k_dim, v_dim] = [K_DIM, self.v_dim].map(|size| size as usize);
        Scan { k_heads: heads, heads, k_dim, v_dim, channel_decay, scale: 0.1 }
    }
}

/// The inputs of a step of `n` tokens.
struct Inputs {
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
}

impl Inputs {
    fn new(model: &Model, n: i32, random: &mut Random) -> Result<Self> {
        let mut made = |dim: i32, scale: f32, offset: f32| {
            let count = (model.heads * n * dim) as usize;
            let elements: Vec<f32> = (0..count).map(|_| random.number() * scale + offset).collect();
            Tensor::new([1, model.heads, n, dim], elements)
        };
        let decays = if model.channel_decay { K_DIM } else { 1 };
        Ok(Self {
            q: made(K_DIM, 0.1, 0.0)?,
            k: made(K_DIM, 0.05, 0.0)?,
            v: made(model.v_dim, 1.0, 0.0)?,
            g: made(decays, 0.01, -0.05)?,
            beta: made(1, 0.1, 0.5)?,
        })
    }
}

/// Adds up the elements that a scan of one token reads. Eight sums let the compiler use vectors.
fn read(spec: &RecurrentSpec<View>) -> f32 {
    let mut sums = [0f32; 8];
    let mut add = |bytes: &[u8]| {
        for chunk in bytes.chunks_exact(32) {
            for (sum, element) in sums.iter_mut().zip(chunk.chunks_exact(4)) {
                *sum += f32::from_le_bytes([element[0], element[1], element[2], element[3]]);
            }
        }
    };
    let mut add_slot = |view: &View, slot: i32| {
        for head in 0..view.n_kv_heads() {
            view.row(0, slot as usize, head).into_iter().for_each(&mut add);
        }
    };
    let chain = &spec.plan.chains[0];
    if let (Some(anchors), AnchorSource::Slot(slot)) = (&spec.anchors, chain.anchor) {
        add_slot(anchors, slot);
    }
    for source in &chain.rows {
        let RowSource::Slot(slot) = *source else { continue };
        spec.rows.iter().flatten().for_each(|view| add_slot(view, slot));
    }
    sums.iter().sum()
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn measure(model: &Model) -> Result<()> {
    let config = CacheConfig {
        layers: Vec::new(),
        recurrent_layers: vec![model.layer(); LAYERS],
        ..CacheConfig::uniform(0, 1, 1, PROMPT + DECODED)
    };
    let mut cache = CellsCache::<CpuStore>::contiguous(config)?;
    let mut random = Random::new(1);
    let chunk = Inputs::new(model, CHUNK, &mut random)?;
    let one = Inputs::new(model, 1, &mut random)?;
    let mut workspace = Workspace::default();
    let sizes = model.sizes();
    // Microseconds of a scan and of a read, for each number of rows.
    let mut times = Vec::new();
    let mut position = 0;
    while position < PROMPT + DECODED {
        let n = if position < PROMPT { CHUNK } else { 1 };
        let inputs = if n == 1 { &one } else { &chunk };
        let call = ScanInputs {
            q: &inputs.q,
            k: &inputs.k,
            v: &inputs.v,
            g: &inputs.g,
            beta: model.delta.then_some(&inputs.beta),
        };
        let (mut scans, mut reads) = (Vec::new(), Vec::new());
        cache.begin(&(position..position + n).collect::<Vec<_>>())?;
        for layer in 0..LAYERS {
            let update = &mut |spec: &RecurrentSpec<View>| {
                // A read brings the bytes into the processor's caches, so a layer is either read or scanned first.
                let is_read = (layer + position as usize).is_multiple_of(2);
                if n == 1 && is_read {
                    let start = Instant::now();
                    black_box(read(black_box(spec)));
                    reads.push(start.elapsed().as_secs_f64() * 1e6);
                }
                let start = Instant::now();
                let (out, rows) = scan(&sizes, &call, spec, None, &mut workspace, &Threads(1))?;
                if n == 1 && !is_read {
                    scans.push(start.elapsed().as_secs_f64() * 1e6);
                }
                black_box(out);
                Ok(rows)
            };
            cache.update_recurrent(layer, update)?;
        }
        cache.commit()?;
        if n == 1 {
            times.push((position - PROMPT, median(scans), median(reads)));
        }
        position += n;
    }
    println!("\n{}\n{:>6}{:>10}{:>10}{:>8}", model.name, "rows", "scan", "read", "ratio");
    for &(rows, scan, read) in times.iter().filter(|(rows, ..)| rows % 8 == 1 || *rows == 62) {
        println!("{rows:>6}{scan:>10.1}{read:>10.1}{:>8.2}", scan / read);
    }
    let total = |of: fn(&(i32, f64, f64)) -> f64| times.iter().map(of).sum::<f64>();
    println!("{:>6}{:>26.2}", "all", total(|time| time.1) / total(|time| time.2));
    Ok(())
}

fn main() -> Result<()> {
    MODELS.iter().try_for_each(measure)
}
