//! Measures the times of each product and of attention, in launches that follow each other as in a step.

use etkv_cuda::{
    Address, Attend, Buffer, Device, Element, Gate, Heads, Launch, Norm, Plan, Pool, PoolRows,
    Product, Result, Weight,
};

use crate::model::{embed, Shape};
use crate::say;
use crate::timing::{median, median_of_sequences};

/// The total bytes of weights that launches read, which exceed a device's caches.
const BYTES: usize = 540 << 20;
/// The minimum number of launches of a plan.
const MIN: usize = 4;
const MAX: usize = 64;
const MAX_TOKENS: usize = 64;
const TOKENS: [usize; 7] = [1, 2, 4, 8, 16, 32, 64];

/// Prints the median microseconds of a launch for 1 to 64 tokens.
pub fn run(device: &Device, shape: Shape) -> Result<()> {
    let Shape { hidden, n_q, n_kv, head_dim, intermediate, vocabulary, .. } = shape;
    let weights = device.allocate(BYTES)?;
    let rows = (n_q + 2 * n_kv) * head_dim;
    let kinds = [
        ("heads", hidden, rows),
        ("out", n_q * head_dim, hidden),
        ("gate", hidden, intermediate),
        ("down", intermediate, hidden),
        ("head", hidden, vocabulary),
    ];
    let pool = device.allocate(2 * n_kv * shape.capacity * head_dim)?;
    let pool = Pool { rows: PoolRows::Plain(pool.address()), capacity: shape.capacity };
    let (keys, values, rotated) = (pool, pool, head_dim);
    let heads = Heads { group: 0, n_q, n_kv, head_dim, periods: None, rotated, keys, values };
    say!("{}: microseconds of a launch, T {TOKENS:?}", shape.name);
    for (name, inner, outputs) in kinds {
        let bytes = 2 * inner * outputs * if name == "gate" { 2 } else { 1 };
        let count = (BYTES / bytes).clamp(MIN, MAX);
        let at = |offset: usize| Address(weights.address().0 + offset as u64);
        let adds = name == "out" || name == "down";
        let norm = (!adds).then_some(Norm { weight: None, wide: false, eps: 1e-5 });
        let product = |number: usize| {
            let weight = Weight::Plain(at(number % (BYTES / bytes) * bytes));
            Launch::Product(Product {
                norm,
                gate: (name == "gate").then_some(Gate::Silu),
                residual: adds.then_some(Buffer(1)),
                heads: (name == "heads").then_some(heads),
                ..Product::plain(Buffer(0), weight, inner, outputs, Buffer(1))
            })
        };
        let launches: Vec<Launch> = (0..count).map(product).collect();
        let times = times_of(device, shape, 256, false, &launches)?;
        let floor = bytes as f64 / 4.2e6;
        say!("  {name:5} {times}   ({floor:.1} at 4.2 TB/s)");
    }
    for keys in [128, 256, 2048, 8000] {
        let attend = Attend {
            group: 0,
            q: Buffer(0),
            keys: pool,
            values: pool,
            n_q,
            n_kv,
            head_dim,
            scale: 0.1,
            out: Buffer(1),
        };
        let launches = [Launch::Attend(attend); MAX];
        let text = times_of(device, shape, keys, false, &launches)?;
        say!("  attention over {keys}: {text}");
        if keys * MAX_TOKENS <= shape.capacity {
            let text = times_of(device, shape, keys, true, &launches)?;
            say!("  sequences of {keys}: {text}");
        }
    }
    Ok(())
}

fn times_of(
    device: &Device,
    shape: Shape,
    keys: usize,
    small_blocks: bool,
    launches: &[Launch],
) -> Result<String> {
    let widest = shape.vocabulary.max(2 * shape.intermediate).max(shape.hidden);
    let table = device.allocate(2 * 1024 * widest)?;
    let mut text = String::new();
    for tokens in TOKENS {
        let base = [0, 1].map(|index| embed(&table, 1024, widest, Buffer(index)));
        let plan = |launches| Plan::new(Element::Bf16, tokens, vec![tokens * widest; 2], launches);
        let empty = median(&mut device.capture(&plan(base.to_vec()))?, tokens, keys, None)?;
        let small_blocks = small_blocks && tokens > 1;
        let all = plan([&base, launches].concat());
        let mut graph =
            device.capture(&Plan { masked: vec![small_blocks], small_blocks, ..all })?;
        let whole = match small_blocks {
            true => median_of_sequences(&mut graph, tokens, keys)?,
            false => median(&mut graph, tokens, keys, None)?,
        };
        text.push_str(&format!(" {:8.2}", (whole - empty) / launches.len() as f64));
    }
    Ok(text)
}
