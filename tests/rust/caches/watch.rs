//! The spans and events of a cache, as a subscriber records them, and its report.

use std::fmt::{Debug, Write};
use std::sync::{Arc, Mutex, Once};

use etkv_core::{
    AttendCache, Cache, CacheConfig, CellsCache, ContiguousCache, KvFormat, LayerPolicy, SeqCache,
    SharedCache, Step,
};
use etkv_tests::backend::Backend;
use etkv_tests::vec_store::{append, fail_next, Failure, OnVec, Tensor, VecStore};
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

/// A subscriber that records each event and each new span as a line: level, target, message, fields.
#[derive(Clone, Default)]
struct EventRecorder(Arc<Mutex<Vec<String>>>);

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        write!(self.0, " {}={value:?}", field.name()).unwrap();
    }
}

impl<S: Subscriber + for<'a> LookupSpan<'a>> Layer<S> for EventRecorder {
    fn on_new_span(&self, attributes: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
        let metadata = attributes.metadata();
        let mut line =
            Line(format!("{} {} {}:", metadata.level(), metadata.target(), metadata.name()));
        attributes.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let metadata = event.metadata();
        let span = context.event_span(event).map_or("", |span| span.name());
        let mut line = Line(format!("{} {} in [{span}]:", metadata.level(), metadata.target()));
        event.record(&mut line);
        self.0.lock().unwrap().push(line.0);
    }
}

/// The subscriber of threads that record nothing.
///
/// Without it, such a thread may be the first to reach an event and switch it off for all threads: `tracing` asks only
/// the current thread's subscriber if the process has had a single one.
struct Unrecorded;

impl Subscriber for Unrecorded {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> Interest {
        Interest::sometimes()
    }

    fn enabled(&self, _: &Metadata<'_>) -> bool {
        false
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Runs `work` with a subscriber of this thread.
fn observe(subscriber: impl Subscriber + Send + Sync + 'static, work: impl FnOnce()) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| tracing::subscriber::set_global_default(Unrecorded).unwrap());
    tracing::subscriber::with_default(subscriber, work);
}

/// Returns the events of `work`.
fn recorded(work: impl FnOnce()) -> Vec<String> {
    let caught = EventRecorder::default();
    let subscriber = tracing_subscriber::registry().with(caught.clone());
    observe(subscriber, work);
    let lines = std::mem::take(&mut *caught.0.lock().unwrap());
    lines
}

#[track_caller]
fn has(lines: &[String], words: &[&str]) {
    let found = lines.iter().any(|line| words.iter().all(|word| line.contains(word)));
    assert!(found, "no line has {words:?}:\n{}", lines.join("\n"));
}

fn warnings(lines: &[String]) -> Vec<&String> {
    let grave = |line: &&String| line.starts_with("WARN") || line.starts_with("ERROR");
    lines.iter().filter(grave).collect()
}

fn rows(n: usize) -> Tensor {
    OnVec::tensor(&vec![vec![vec![1.0; 8]]; n])
}

fn contiguous(config: CacheConfig) -> ContiguousCache<VecStore> {
    ContiguousCache::new(config).unwrap()
}

fn windowed() -> ContiguousCache<VecStore> {
    let mut config = CacheConfig { max_step_tokens: 4, ..CacheConfig::uniform(1, 1, 8, 100) };
    config.layers[0].policy = LayerPolicy::Window { window: 4, sinks: 0 };
    contiguous(config)
}

#[test]
fn a_step_tells_its_tokens_mask_and_read() {
    let mut cache = contiguous(CacheConfig::uniform(1, 1, 8, 100));
    let lines = recorded(|| append(&mut cache, 0, 3).unwrap());
    has(&lines, &["DEBUG etkv::core step:", "tokens=3", "first=0", "mask=causal", "read=3"]);
    has(&lines, &["DEBUG etkv::core grow:", "layer=0", "from=0", "to=100"]);
    has(&lines, &["TRACE etkv::core in [step]:", "layer=0", "written=3", "read=0..3"]);
    assert_eq!(warnings(&lines), Vec::<&String>::new());
    // A single token sees all rows, and no buffer grows.
    let lines = recorded(|| append(&mut cache, 3, 1).unwrap());
    has(&lines, &["step:", "tokens=1", "first=3", "mask=none", "read=4"]);
    assert!(!lines.iter().any(|line| line.contains("grow")), "{lines:?}");
}

#[test]
fn the_mask_is_that_of_layer_groups_with_layers() {
    let mut cache = windowed();
    (0..5).for_each(|step| append(&mut cache, step * 4, 4).unwrap());
    let lines = recorded(|| append(&mut cache, 20, 4).unwrap());
    has(&lines, &["step:", "mask=explicit", "read=7"]);
}

#[test]
fn refused_steps_are_logged() {
    let mut cache = contiguous(CacheConfig::uniform(1, 1, 8, 16));
    let lines = recorded(|| drop(append(&mut cache, 5, 1).unwrap_err()));
    has(&lines, &["WARN etkv::core in []:", "tokens=1", "first=5", "Position", "is refused"]);
    let mut cells = CellsCache::<VecStore>::new(CacheConfig::uniform(1, 1, 8, 16)).unwrap();
    let lines = recorded(|| drop(append(&mut cells, 0, 17).unwrap_err()));
    has(&lines, &["WARN etkv::core in []:", "tokens=17", "Capacity", "is refused"]);
}

#[test]
fn rollbacks_are_logged() {
    let mut cache = contiguous(CacheConfig::uniform(2, 1, 8, 16));
    let lines = recorded(|| {
        let error = append(&mut cache, 0, 2).unwrap_err();
        assert!(error.message().contains("without layer 1"), "{error}");
    });
    has(&lines, &["WARN etkv::core in [step]:", "cannot end", "without layer 1"]);
    has(&lines, &["WARN etkv::core in [step]:", "a step is rolled back", "layers=1"]);
    let mut cells = CellsCache::<VecStore>::new(CacheConfig::uniform(1, 1, 8, 16)).unwrap();
    let lines = recorded(|| drop(Step::begin(&mut cells, &[0, 1]).unwrap()));
    has(&lines, &["WARN etkv::core in [step]:", "a step is rolled back", "layers=0"]);
    // A step that another implementation computes instead causes no warning.
    let lines = recorded(|| Step::begin(&mut cells, &[0, 1]).unwrap().decline());
    has(&lines, &["DEBUG etkv::core in [step]:", "that was set aside is rolled back", "layers=0"]);
    assert!(!lines.iter().any(|line| line.starts_with("WARN")), "{lines:?}");
    assert_eq!(cells.length(), 0);
    append(&mut cells, 0, 2).unwrap();
}

#[test]
fn steps_that_cannot_be_computed_are_logged() {
    let failing = OnVec::failing(&rows(2)).unwrap();
    type Compute = fn(&Step<VecStore>) -> etkv_core::Result<()>;
    let both: [Compute; 2] = [|step| step.schedule(&[]), |step| step.eval(&[])];
    for compute in both {
        let mut cache = contiguous(CacheConfig::uniform(1, 1, 8, 16));
        let lines = recorded(|| {
            let mut step = Step::begin(&mut cache, &[0, 1]).unwrap();
            step.update_and_fetch(0, &failing, &rows(2)).unwrap();
            compute(&step).unwrap_err();
        });
        has(&lines, &["WARN etkv::core in [step]:", "a step cannot be computed", "that fails"]);
    }
}

#[test]
fn rows_of_another_shape_are_logged() {
    let mut cache = contiguous(CacheConfig::uniform(1, 1, 8, 16));
    let lines = recorded(|| {
        let mut step = Step::begin(&mut cache, &[0, 1]).unwrap();
        step.update_and_fetch(0, &rows(3), &rows(3)).unwrap_err();
    });
    has(&lines, &["WARN etkv::core in [step]:", "the rows of a layer are refused", "Shape"]);
}

#[test]
fn conversions_and_their_failures_are_logged() {
    let config = CacheConfig { quantized_kv_start: Some(4), ..CacheConfig::uniform(1, 1, 8, 100) };
    let mut cache = contiguous(config.stored_as(KvFormat::RowInt4));
    fail_next(Failure::Convert);
    let lines = recorded(|| append(&mut cache, 0, 8).unwrap());
    has(
        &lines,
        &[
            "WARN etkv::core",
            "a conversion failed",
            "length=8",
            "k_format=row-int4",
            "as the test asked for",
        ],
    );
    let lines = recorded(|| append(&mut cache, 8, 1).unwrap());
    has(&lines, &["DEBUG etkv::core convert:", "k_format=row-int4"]);
    has(&lines, &["INFO etkv::core in [convert]:", "the cache is converted"]);
    assert_eq!(warnings(&lines), Vec::<&String>::new());
}

#[test]
fn poisoned_caches_are_logged_and_reported() {
    let mut cache = windowed();
    assert_eq!(cache.report().poisoned, None);
    fail_next(Failure::Relocate);
    let lines = recorded(|| {
        (0..25).find_map(|step| append(&mut cache, step * 4, 4).err()).unwrap();
    });
    has(&lines, &["DEBUG etkv::core move:", "slots="]);
    has(&lines, &["ERROR etkv::core in [move]:", "the cache is poisoned", "as the test asked for"]);
    assert!(cache.report().poisoned.unwrap().contains("as the test asked for"));
    let lines = recorded(|| drop(cache.begin(&[cache.length()]).unwrap_err()));
    has(&lines, &["WARN", "is refused", "poisoned"]);
}

#[test]
fn panics_are_logged_once() {
    let shared = SharedCache::new(contiguous(CacheConfig::uniform(1, 1, 8, 16)));
    let panic = || {
        let _cache = shared.lock().unwrap();
        panic!("as the test asked for");
    };
    let lines = recorded(|| {
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(panic)).unwrap_err();
    });
    assert_eq!(warnings(&lines).len(), 1, "{lines:?}");
    has(&lines, &["ERROR etkv::core", "the cache is poisoned", "defect"]);
    // A second cache that is locked while a thread unwinds is not poisoned.
    struct LockOnDrop(SharedCache);
    impl Drop for LockOnDrop {
        fn drop(&mut self) {
            assert_eq!(self.0.lock().unwrap().length(), 0);
        }
    }
    let other = SharedCache::new(contiguous(CacheConfig::uniform(1, 1, 8, 16)));
    let lines = recorded(|| {
        let unwind = || {
            let _looks = LockOnDrop(other.clone());
            panic!("as the test asked for");
        };
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(unwind)).unwrap_err();
    });
    assert_eq!(lines, Vec::<String>::new());
}

#[test]
fn compactions_are_logged() {
    let mut cache = CellsCache::<VecStore>::new(CacheConfig::uniform(1, 1, 8, 400)).unwrap();
    append(&mut cache, 0, 300).unwrap();
    cache.seq_rm(0, 100..150).unwrap();
    let lines = recorded(|| cache.compact().unwrap());
    has(&lines, &["DEBUG etkv::core compact:"]);
    has(&lines, &["DEBUG etkv::core move:", "runs=1"]);
}

#[test]
fn reports_agree_with_the_faces() {
    let config = CacheConfig::uniform(2, 1, 8, 64);
    let mut cache = CellsCache::<VecStore>::with_trees(config).unwrap();
    let mut step = Step::begin(&mut cache, &[0, 1, 2]).unwrap();
    for layer in 0..2 {
        step.update_and_fetch(layer, &rows(3), &rows(3)).unwrap();
    }
    step.commit(&[]).unwrap();
    cache.seq_cp(0, 7, 0..2).unwrap();
    cache.trees_mut().unwrap().propose(0, &[-1, -1]).unwrap();
    let report = cache.report();
    assert_eq!((report.kind.as_str(), report.length, report.capacity), ("tree", 3, 64));
    assert_eq!((report.step_open, report.poisoned.as_ref()), (false, None));
    let of = |at: usize| {
        let found = &report.sequences[at];
        (found.sequence, found.length, found.next, found.tree)
    };
    assert_eq!(report.sequences.len(), 2);
    assert_eq!((of(0), of(1)), ((0, 3, 3, 2), (7, 2, 2, 0)));
    let memory = cache.memory();
    assert_eq!(report.memory.allocated, memory.allocated);
    assert_eq!(report.memory.used, memory.used);
    let sum: u64 = report.layers.iter().map(|layer| layer.k.allocated + layer.v.allocated).sum();
    assert_eq!(sum, memory.allocated);
    assert_eq!(report.layers[1].k.slots, Some(64));
    assert_eq!(report.config.growth, "doubling");
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["formats"]["k"], "f16");
    assert_eq!(json["config"]["layers"][0]["window"], serde_json::Value::Null);
}

#[test]
fn a_report_tells_of_an_open_step() {
    let mut cache = contiguous(CacheConfig::uniform(1, 1, 8, 64));
    cache.begin(&[0]).unwrap();
    assert!(cache.report().step_open);
    cache.abort();
    assert!(!cache.report().step_open);
}

/// If no layer of the subscriber records an event, nothing is formatted and no cache is queried.
#[test]
fn levels_that_are_off_cost_no_formatting() {
    struct Counts(Level, Arc<Mutex<usize>>);
    impl<S: Subscriber> Layer<S> for Counts {
        fn enabled(&self, metadata: &tracing::Metadata<'_>, _: Context<'_, S>) -> bool {
            *metadata.level() <= self.0
        }
        fn on_new_span(&self, _: &Attributes<'_>, _: &Id, _: Context<'_, S>) {
            *self.1.lock().unwrap() += 1;
        }
        fn on_event(&self, _: &Event<'_>, _: Context<'_, S>) {
            *self.1.lock().unwrap() += 1;
        }
    }
    let count = |level| {
        let told = Arc::new(Mutex::new(0));
        let subscriber = tracing_subscriber::registry().with(Counts(level, told.clone()));
        let mut cache = contiguous(CacheConfig::uniform(1, 1, 8, 100));
        observe(subscriber, || append(&mut cache, 0, 3).unwrap());
        let told = *told.lock().unwrap();
        told
    };
    assert_eq!(count(Level::INFO), 0);
    assert!(count(Level::DEBUG) >= 2);
    assert!(count(Level::TRACE) > count(Level::DEBUG));
}
