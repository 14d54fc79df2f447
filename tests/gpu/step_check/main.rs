//! Checks each launch of etkv-cuda on a GPU against plain arithmetic, and times steps.
//!
//! `step_check [FOLDER]` caches compiled kernels in FOLDER, or in a folder of the temporary directory.
//! `ETKV_ONLY` lists the parts to run, for example `placed,packed`. The parts are `steps`, `placed`,
//! `normalized`, `packed`, `products`, `timing` and `attention`. The default is all parts except `attention`,
//! which only times attention. `ETKV_ATTENTION=1` adds that part. If the variable is a part of a format's
//! name instead, such as `Mxfp4` or `bits: 4`, only such formats and plain rows are timed. With `ETKV_QUICK`,
//! nothing is checked.
#![allow(missing_docs)]

mod attention;
mod codecs;
mod given;
mod model;
mod normalized;
mod packed;
mod placed;
mod products;
mod reference;
mod timing;

use std::collections::BTreeMap;
use std::error::Error;
use std::iter::once;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

use etkv_cuda::{
    CapturedStep, CopiedRows, Device, Element, KeyMask, Launch, Plan, StepInputs, MAX_FEW,
};

use model::{copying, to_bytes, to_numbers, Model, Packing, Random, Shape};
use reference::CompletedStep;

type Answer<T> = Result<T, Box<dyn Error>>;

/// Prints a line and flushes it, so that it is visible even if the program ends abnormally.
macro_rules! say {
    ($($text:tt)*) => {{
        println!($($text)*);
        let _ = std::io::Write::flush(&mut std::io::stdout());
    }};
}
pub(crate) use say;

const SMALL: Shape = Shape {
    name: "8/2 heads",
    element: Element::Bf16,
    layers: 2,
    hidden: 256,
    n_q: 8,
    n_kv: 2,
    head_dim: 64,
    intermediate: 512,
    vocabulary: 1000,
    capacity: 2304,
    bias: false,
    rotates: true,
    packing: None,
};

const NINE: Shape = Shape { name: "9/3 heads", hidden: 576, n_q: 9, n_kv: 3, ..SMALL };

const WIDE: Shape = Shape { name: "4/2 heads of 128", n_q: 4, head_dim: 128, ..SMALL };

const ODD: Shape = Shape { name: "4/2 heads of 96", head_dim: 96, ..WIDE };

// More query rows for each KV head than a block has.
const MANY: Shape = Shape { name: "16/2 heads", n_q: 16, ..SMALL };

// Rows that do not stay in registers.
const LONG: Shape = Shape { name: "8/2 heads, long rows", intermediate: 4616, ..SMALL };

fn main() -> ExitCode {
    match run() {
        Ok(true) => {
            say!("ok: all checks passed");
            ExitCode::SUCCESS
        }
        Ok(false) => {
            say!("FAIL: see above");
            ExitCode::FAILURE
        }
        Err(error) => {
            say!("FAIL: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Answer<bool> {
    let begin = Instant::now();
    let folder = std::env::args().nth(1).map(PathBuf::from);
    let folder = folder.unwrap_or_else(|| std::env::temp_dir().join("etkv-cubins"));
    let device = Device::open(Some(&folder))?;
    say!("device open after {:?}, kernels in {}", begin.elapsed(), folder.display());
    let mut good = true;
    let quick = std::env::var_os("ETKV_QUICK").is_some();
    let checked: &[Element] =
        if quick || !runs("steps") { &[] } else { &[Element::Bf16, Element::F16] };
    for &element in checked {
        for shape in [
            SMALL,
            Shape { bias: true, rotates: false, ..SMALL },
            NINE,
            Shape { bias: true, ..NINE },
            WIDE,
            ODD,
            MANY,
            LONG,
            with_packed(SMALL, 4, 32),
            with_packed(Shape { bias: true, ..SMALL }, 4, 128),
            with_packed(NINE, 4, 64),
            with_packed(SMALL, 8, 128),
            with_packed(Shape { bias: true, rotates: false, ..NINE }, 8, 64),
            with_packed(WIDE, 8, 32),
        ] {
            good &= check_shape(&device, Shape { element, ..shape })?;
        }
    }
    say!("checked steps after {:?}", begin.elapsed());
    if runs("placed") && !quick {
        good &= placed::run(&device)?;
        say!("checked placed heads after {:?}", begin.elapsed());
    }
    if runs("normalized") && !quick {
        good &= normalized::run(&device)?;
        good &= given::run(&device)?;
        say!("checked normalized rows after {:?}", begin.elapsed());
    }
    if runs("packed") && !quick {
        good &= packed::run(&device)?;
        say!("checked packed attention after {:?}", begin.elapsed());
    }
    if runs("products") {
        products::run(&device, timing::LLAMA)?;
        products::run(&device, timing::SMOL)?;
    }
    if runs("timing") {
        timing::run(&device)?;
    }
    if runs("attention") {
        attention::run(&device)?;
    }
    say!("all after {:?}", begin.elapsed());
    Ok(good)
}

fn runs(part: &str) -> bool {
    let is_attention = part == "attention";
    match std::env::var("ETKV_ONLY") {
        Ok(parts) => parts.split(',').any(|one| one == part),
        Err(_) => is_attention == std::env::var_os("ETKV_ATTENTION").is_some(),
    }
}

/// Returns the shape with packed matrices, including the table and the output head.
fn with_packed(shape: Shape, bits: usize, group: usize) -> Shape {
    Shape { packing: Some(Packing { bits, group }), ..shape }
}

fn check_shape(device: &Device, shape: Shape) -> Answer<bool> {
    let Shape { name, element, bias, rotates, packing, .. } = shape;
    say!("{name}, {element:?}, bias {bias}, rotates {rotates}, {packing:?}");
    let limit = if element == Element::Bf16 { 0.012 } else { 0.002 };
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut model = Model::new(device, shape, Some(Random(88_172_645_463_325_252)))?;
    fill_pools(&mut model, &mut random)?;
    let mut good = true;
    // Packed weights support only a few tokens.
    let is_many = |tokens: &usize| *tokens <= MAX_FEW || packing.is_none();
    for tokens in [1, 2, 5, 8, 16, 24, 32, 41, 64].into_iter().filter(is_many) {
        let spread = model.plan(tokens, true, false);
        let overlapping = Plan { overlap: true, ..model.plan(tokens, false, false) };
        let mut kinds = Vec::new();
        for (what, plan) in [
            ("compact", model.plan(tokens, false, false)),
            ("overlap", overlapping.clone()),
            ("last row", Plan { overlap: true, ..model.plan(tokens, false, true) }),
            ("last copied", copying(CopiedRows::Last, overlapping.clone())),
            ("few blocks", Plan { attention_blocks: Some(1), ..model.plan(tokens, true, false) }),
        ] {
            kinds.push((what, device.capture(&plan)?));
        }
        let mut captured = device.capture(&spread)?;
        let mut largest = BTreeMap::new();
        for before in [0, 47, 64, 1000, 2100] {
            let step = Tokens::new(tokens, before, before % 2 == 1, &mut random, shape);
            let step = step.inputs(before);
            // SAFETY: the model outlives the graphs, and nothing else uses it.
            let outputs = unsafe { captured.run(&step) }?;
            let logits = outputs.logits.to_vec();
            let chosen = outputs.chosen.to_vec();
            good &= are_argmax(&to_numbers(element, &logits), &chosen);
            let done = CompletedStep { model: &model, plan: &spread, captured: &captured, step };
            done.add_differences(|_| true, &mut largest)?;
            let pools = read_pools(&model)?;
            for (what, other) in &mut kinds {
                for again in 0..2 {
                    let same = is_same(what, other, &step, &logits, &chosen, limit, element)?;
                    let same = same && (*what == "few blocks" || read_pools(&model)? == pools);
                    if !same {
                        say!("  FAIL {what}: T {tokens}, {before} keys before, run {again}");
                        good = false;
                    }
                }
            }
            // The next steps read the rows that the first plan wrote.
            for (memory, bytes) in model.pools.iter_mut().zip(&pools) {
                memory.write(0, bytes)?;
            }
        }
        good &= is_within(&format!("T {tokens}"), &largest, limit);
        for small_blocks in [false, true] {
            good &= check_masks(device, &model, (tokens, small_blocks), limit, &mut random)?;
        }
        if tokens > MAX_FEW {
            good &= check_padding(device, &model, tokens, limit, &mut random)?;
        }
    }
    Ok(good)
}

fn is_within(what: &str, largest: &BTreeMap<&str, f64>, limit: f64) -> bool {
    // The output of a gate is rounded three times, other outputs once. The order of sums can change each
    // rounding.
    let most_of = |name: &str| if name == "gated" { 1.5 * limit } else { limit };
    let within = largest.iter().all(|(name, &most)| most <= most_of(name));
    let word = if within { "ok  " } else { "FAIL" };
    let all: Vec<String> = largest.iter().map(|(what, most)| format!("{what} {most:.5}")).collect();
    say!("  {word} {what}: {}; limit {limit}", all.join(", "));
    within
}

/// Checks steps whose tokens see different keys. Also checks that a mask of all earlier keys gives the same
/// bits as no mask.
fn check_masks(
    device: &Device,
    model: &Model,
    (tokens, small_blocks): (usize, bool),
    limit: f64,
    random: &mut Random,
) -> Answer<bool> {
    let plain = model.plan(tokens, true, false);
    let plan = Plan { masked: vec![true], small_blocks, overlap: true, ..plain.clone() };
    let (mut plain, mut captured) = (device.capture(&plain)?, device.capture(&plan)?);
    let mut largest = BTreeMap::new();
    let mut good = true;
    for before in [0, 47, 1000, 2100] {
        let mut step = Tokens::new(tokens, before, false, random, model.shape);
        let causal = KeyMask::of((0..tokens).map(|t| once(0..before + t + 1)));
        let inputs = step.inputs(before);
        // SAFETY: the model outlives the graphs, and nothing else uses it.
        let expected = unsafe { plain.run(&inputs) }?.logits.to_vec();
        // SAFETY: the same as above.
        let found = unsafe { captured.run(&StepInputs { mask: Some(&causal), ..inputs }) }?;
        // The bits are the same if all rows are in one block. Otherwise a mask may divide sums differently.
        let most = if small_blocks { 16 } else { 64 };
        let one_block = tokens * model.shape.n_q / model.shape.n_kv <= most;
        let same = match one_block {
            true => found.logits == expected,
            false => are_near(found.logits, &expected, limit, model.shape.element),
        };
        if !same {
            say!("  FAIL mask of all earlier keys: T {tokens}, {before} keys before");
            good = false;
        }
        let n_keys = before + tokens;
        for _ in 0..3 {
            for t in 0..tokens {
                step.slots.swap(t, random.below(tokens));
                step.positions[t] = random.below(n_keys) as i32;
            }
            let mask = random.mask(n_keys, step.slots.iter().map(|&slot| slot as usize));
            let step = StepInputs { mask: Some(&mask), ..step.inputs(before) };
            // SAFETY: the same as above.
            unsafe { captured.run(&step) }?;
            let done = CompletedStep { model, plan: &plan, captured: &captured, step };
            // The other launches do not use masks.
            let attends = |launch: &Launch| matches!(launch, Launch::Attend(_));
            done.add_differences(attends, &mut largest)?;
        }
    }
    Ok(is_within(&format!("T {tokens}, masks"), &largest, limit) && good)
}

/// Checks that a step with fewer tokens than its plan has the right logits for them, and writes no other
/// rows.
fn check_padding(
    device: &Device,
    model: &Model,
    tokens: usize,
    limit: f64,
    random: &mut Random,
) -> Answer<bool> {
    let plan =
        |tokens| Plan { masked: vec![true], overlap: true, ..model.plan(tokens, true, false) };
    let (n, before) = (tokens - 5, 700);
    let (mut exact, mut padded) = (device.capture(&plan(n))?, device.capture(&plan(tokens))?);
    let mut last = device.capture(&copying(CopiedRows::Last, plan(tokens)))?;
    let step = Tokens::new(n, before, true, random, model.shape);
    let runs = (0..n).map(|t| [100..300, before + n - 1 - t..before + n - t]);
    let (few, all) = (KeyMask::of(runs.clone()), KeyMask::padded(tokens, runs));
    let inputs = step.inputs(before);
    // SAFETY: the model outlives the graphs, and nothing else uses it.
    let expected =
        unsafe { exact.run(&StepInputs { mask: Some(&few), ..inputs }) }?.logits.to_vec();
    let pools = read_pools(model)?;
    // SAFETY: the same as above.
    let found = unsafe { padded.run(&StepInputs { mask: Some(&all), ..inputs }) }?;
    let near = are_near(&found.logits[..expected.len()], &expected, limit, model.shape.element);
    let last_row = found.logits[expected.len() / n * (n - 1)..expected.len()].to_vec();
    // SAFETY: the same as above.
    let found = unsafe { last.run(&StepInputs { mask: Some(&all), ..inputs }) }?;
    let is_last = found.logits == last_row;
    let row = 2 * model.shape.head_dim;
    let slot = |at: usize| at / row % model.shape.capacity;
    let is_own = |at: usize| (before..before + n).contains(&slot(at));
    let kept = read_pools(model)?.iter().zip(&pools).all(|(now, then)| {
        now.iter().zip(then).enumerate().all(|(at, (x, y))| x == y || is_own(at))
    });
    if !(near && kept && is_last) {
        say!(
            "FAIL {n} tokens of a plan of {tokens}: near {near}, other rows unchanged {kept}, last \
         {is_last}"
        );
    }
    Ok(near && kept && is_last)
}

struct Tokens {
    ids: Vec<i32>,
    positions: Vec<i32>,
    slots: Vec<i32>,
}

impl Tokens {
    /// Creates `n` tokens after `before` keys. With `mixed`, the slots are not in order.
    fn new(n: usize, before: usize, mixed: bool, random: &mut Random, shape: Shape) -> Self {
        let id = |x: f64| (x.abs() * 1e4) as i32 % shape.vocabulary as i32;
        let mut ids: Vec<i32> = (0..n).map(|_| id(random.next())).collect();
        if n > 4 {
            ids[1] = -5;
            ids[2] = i32::MAX;
        }
        let positions = (before as i32..).take(n).collect();
        let mut slots: Vec<i32> = (before as i32..).take(n).collect();
        if mixed {
            slots.reverse();
        }
        Self { ids, positions, slots }
    }

    fn inputs(&self, before: usize) -> StepInputs<'_> {
        let Self { ids, positions, slots } = self;
        StepInputs { ids, positions, slots, n_keys: before + ids.len(), mask: None }
    }
}

fn fill_pools(model: &mut Model, random: &mut Random) -> Answer<()> {
    let element = model.shape.element;
    for pool in &mut model.pools {
        let rows = random.numbers(element, pool.bytes() / 2, 1.0);
        pool.write(0, &to_bytes(element, &rows))?;
    }
    Ok(())
}

fn read_pools(model: &Model) -> Answer<Vec<Vec<u8>>> {
    let mut all = Vec::new();
    for pool in &model.pools {
        let mut bytes = vec![0; pool.bytes()];
        pool.read(0, &mut bytes)?;
        all.push(bytes);
    }
    Ok(all)
}

fn are_argmax(logits: &[f64], chosen: &[i32]) -> bool {
    let vocabulary = logits.len() / chosen.len().max(1);
    let argmax = |row: &[f64]| {
        let first = |best: usize, (i, x): (usize, &f64)| if *x > row[best] { i } else { best };
        row.iter().enumerate().fold(0, first) as i32
    };
    let expected: Vec<i32> = logits.chunks_exact(vocabulary).map(argmax).collect();
    if expected != chosen {
        say!("  FAIL chosen {chosen:?}, expected {expected:?}");
    }
    expected == chosen
}

/// Returns whether another plan for the same step has the same logits: the same bits, or similar values if
/// the plan divides the work differently.
fn is_same(
    what: &str,
    other: &mut CapturedStep,
    step: &StepInputs,
    logits: &[u8],
    chosen: &[i32],
    limit: f64,
    element: Element,
) -> Answer<bool> {
    // SAFETY: the model outlives the graphs, and nothing else uses it.
    let outputs = unsafe { other.run(step) }?;
    if what == "last copied" {
        let last = &logits[logits.len() - logits.len() / step.ids.len()..];
        return Ok(outputs.logits == last && outputs.chosen == chosen);
    }
    if what != "few blocks" && what != "last row" {
        return Ok(outputs.logits == logits && outputs.chosen == chosen);
    }
    // In a plan for only the last row, other warps normalize that row than in a plan for all rows.
    let last = logits.len().saturating_sub(outputs.logits.len());
    let near = are_near(outputs.logits, &logits[last..], limit, element);
    Ok(near && are_argmax(&to_numbers(element, outputs.logits), outputs.chosen))
}

/// Returns whether logits are nearly the same. The limit allows for differences in attention, which grow in
/// later layers.
fn are_near(found: &[u8], expected: &[u8], limit: f64, element: Element) -> bool {
    let [x, y] = [found, expected].map(|bytes| to_numbers(element, bytes));
    let near = x.iter().zip(&y).all(|(x, y)| (x - y).abs() < 8.0 * limit);
    near && x.len() == y.len() && !y.is_empty()
}
