//! Stores of texts, and processes that share one.

use std::ffi::OsStr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use etkv_file::{Labels, PrefixCache, PrefixCacheReport, PrefixStore, MIN_TOKENS};

use crate::on_cpu::OnCpu;
use crate::texts::{some_text, TextShape};
use crate::Rng;

pub const MODEL: &str = "a model";

pub fn labels(tokens: &[i64]) -> Labels<'_> {
    Labels { fingerprint: MODEL, tokens }
}

/// Saves a cache that has read a text. Returns whether a file was written.
pub fn save(store: &PrefixStore, shape: TextShape, text: &[i64]) -> bool {
    store.save(&mut *shape.with_text::<OnCpu>(text), labels(text)).unwrap()
}

/// Loads the longest stored prefix of a text, and checks that the cache then equals a cache that read the prefix.
/// Returns its length.
#[track_caller]
pub fn load(store: &PrefixStore, shape: TextShape, text: &[i64]) -> usize {
    let mut cache = shape.make::<OnCpu>();
    let n = store.load(&mut *cache, MODEL, text).unwrap();
    assert_eq!(cache.next_position(), Ok(n as i32));
    assert!(n == 0 || n >= MIN_TOKENS, "{n} tokens");
    shape.check_read::<OnCpu>(&mut cache, &text[..n]);
    n
}

/// Waits until no text is queued to be read ahead.
pub fn when_read(prefixes: &PrefixCache) -> PrefixCacheReport {
    let until = Instant::now() + Duration::from_secs(60);
    while prefixes.report().ahead_waiting > 0 {
        assert!(Instant::now() < until, "{} texts wait", prefixes.report().ahead_waiting);
        std::thread::sleep(Duration::from_millis(5));
    }
    prefixes.report()
}

const PLACE: &str = "ETKV_TEST_STORE";
const SECONDS: &str = "ETKV_TEST_STORE_SECONDS";

/// Starts a process that runs the test `a_process_stores_and_loads` of the same file.
pub fn start(place: impl AsRef<OsStr>, seconds: f64) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_process_stores_and_loads", "--ignored", "--nocapture"])
        .env(PLACE, place)
        .env(SECONDS, seconds.to_string())
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// The body of the test that such a process runs: it stores and loads texts. `open` opens a store at a place, with a
/// limit of bytes.
pub fn store_and_load(open: impl Fn(&str, u64) -> PrefixStore) {
    let place = std::env::var(PLACE).unwrap();
    let seconds: f64 = std::env::var(SECONDS).unwrap().parse().unwrap();
    let until = Instant::now() + Duration::from_secs_f64(seconds);
    let rng = &mut Rng::new(u64::from(std::process::id()));
    // There is room for a dozen files.
    let store = open(&place, 400_000);
    while Instant::now() < until {
        let (shape, text) = (TextShape::of(rng.next_u64() % 6), some_text(rng));
        if rng.chance(0.5) {
            save(&store, shape, &text);
        } else {
            load(&store, shape, &text);
        }
    }
}
