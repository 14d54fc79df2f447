//! Measures the cost of logging: a decode step with each kind of listener.
//!
//! Run `cargo bench -p etkv-benches --bench watching -- LEVEL`. `--features silent` compiles without tracing.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use etkv::{CacheConfig, ContiguousCache, Growth, KvFormat, Step};
use mlx_rs::Array;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

const LENGTHS: [i32; 3] = [64, 256, 1024];
const N_LAYERS: usize = 30;

fn rows(heads: i32, n: i32) -> Array {
    Array::ones::<f32>(&[1, heads, n, 64]).expect("an array")
}

/// Runs a step of `n` tokens through all layers. Attention is omitted: its time would hide the time of the cache.
fn step(cache: &mut ContiguousCache, first: i32, n: i32) {
    let positions: Vec<i32> = (first..first + n).collect();
    let rows = rows(3, n);
    let mut step = Step::begin(cache, &positions).expect("a step");
    for layer in 0..N_LAYERS {
        step.update_and_fetch(layer, &rows, &rows).expect("a layer");
    }
    step.commit(&[]).expect("a step");
}

fn decode(length: i32) -> Duration {
    const STEPS: u32 = 24;
    let config =
        CacheConfig { growth: Growth::Upfront, ..CacheConfig::uniform(N_LAYERS, 3, 64, 2048) };
    let mut cache = ContiguousCache::new(config.stored_as(KvFormat::F32)).expect("a cache");
    step(&mut cache, 0, length);
    let start = Instant::now();
    (0..STEPS as i32).for_each(|n| step(&mut cache, length + n, 1));
    start.elapsed() / STEPS
}

/// Formats each field, and discards the text.
struct Formats;

struct Text(String);

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        use std::fmt::Write;
        let _ = write!(self.0, " {}={value:?}", field.name());
    }
}

impl<S: Subscriber> Layer<S> for Formats {
    fn on_new_span(&self, attributes: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
        attributes.record(&mut Text(String::new()));
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        event.record(&mut Text(String::new()));
    }
}

/// Prints the minimum and the median time of many steps, in a process with only this listener.
fn main() {
    // Options that Cargo adds are ignored.
    let name = std::env::args().skip(1).find(|word| !word.starts_with('-'));
    let level = name.as_deref().map_or(LevelFilter::OFF, |name| name.parse().expect("a level"));
    if level != LevelFilter::OFF {
        let subscriber = tracing_subscriber::registry().with(Formats).with(level);
        tracing::subscriber::set_global_default(subscriber).expect("the first");
    }
    let built = if cfg!(feature = "silent") { "compiled without tracing" } else { "with tracing" };
    let measured = etkv::mlx::run(|| {
        for length in LENGTHS {
            let mut times: Vec<Duration> = (0..40).map(|_| decode(length)).collect();
            times.sort_unstable();
            println!(
                "{built}, level {level}: {length} positions: least {:?}, median {:?}",
                times[0],
                times[times.len() / 2]
            );
        }
        Ok(())
    });
    measured.expect("MLX");
}
