use etkv_core::{Cache, CacheConfig, LayerPolicy, SeqCache, TreeCache};

use super::rows::Rows;
use super::*;
use etkv::{CellsCache, ContiguousCache};

const LAYERS: usize = 2;
const CAPACITY: i32 = 96;

fn config() -> CacheConfig {
    let config = CacheConfig::uniform(LAYERS, 1, 8, 32).stored_as(KvFormat::F16);
    CacheConfig { max_step_tokens: 8, ..config }
}

const FULL: LayerPolicy = LayerPolicy::Full;

fn window(window: i32, sinks: i32) -> LayerPolicy {
    LayerPolicy::Window { window, sinks }
}

/// A config with one layer for each policy.
fn with_policies(policies: &[LayerPolicy]) -> CacheConfig {
    let mut config = CacheConfig::uniform(policies.len(), 1, 8, CAPACITY).stored_as(KvFormat::F32);
    for (layer, &policy) in config.layers.iter_mut().zip(policies) {
        layer.policy = policy;
    }
    CacheConfig { max_step_tokens: 6, ..config }
}

/// Assigns slots to the rows of a step whose layers share a policy, and commits the step.
fn placed(cache: &mut MlxCache, positions: &[i32]) -> Option<Rows> {
    let groups = Groups::of(&cache.config().layers).unwrap();
    let mut step = Step::begin(cache, positions).unwrap();
    let mut rows = groups.place(&mut step).unwrap()?;
    step.commit(&[]).unwrap();
    assert_eq!(rows.len(), 1);
    rows.pop()
}

/// Returns the keys that each token sees.
fn seen(rows: &Rows) -> Vec<Vec<usize>> {
    let mask = rows.mask.as_ref().unwrap();
    let of = |token| (0..rows.n_keys).filter(|&key| mask.sees(token, key)).collect();
    (0..rows.slots.len()).map(of).collect()
}

#[test]
fn rows_of_full_history_go_after_all_that_is_read() {
    let mut contiguous = ContiguousCache::new(config()).unwrap();
    // A cell cache reads a single sequence in the same way.
    let mut cells = CellsCache::new(config()).unwrap();
    for cache in [&mut contiguous as &mut MlxCache, &mut cells] {
        for (first, n) in [(0, 3), (3, 1), (4, 2)] {
            let slots = first..first + n;
            let rows = placed(cache, &slots.clone().collect::<Vec<_>>()).unwrap();
            assert!(slots.clone().eq(rows.slots.iter().copied()), "{rows:?}");
            assert_eq!((rows.n_keys, rows.mask), (slots.end as usize, None));
        }
    }
    // A step at an earlier position rewinds the cache.
    let rows = placed(&mut contiguous, &[1]).unwrap();
    assert_eq!((&rows.slots[..], rows.n_keys, rows.mask), (&[1][..], 2, None));
    assert_eq!(contiguous.length(), 2);
}

#[test]
fn layers_of_one_policy_are_a_group() {
    let policies = [FULL, window(4, 0), FULL, window(4, 1), window(4, 0)];
    let groups = Groups::of(&with_policies(&policies).layers).unwrap();
    assert_eq!(groups.of_layer(), [0, 1, 0, 2, 1]);
    // A window has a mask even before it slides.
    assert_eq!(groups.may_be_masked(false)[..], [false, true, true]);
    assert_eq!(groups.may_be_masked(true)[..], [true; 3]);
    let many: Vec<LayerPolicy> = (2..7).map(|width| window(width, 0)).collect();
    assert_eq!(Groups::of(&with_policies(&many).layers), None);
}

#[test]
fn tokens_of_several_sequences_see_their_own_keys() {
    let mut cells = CellsCache::new(config()).unwrap();
    for sequence in [0, 1] {
        cells.begin_step(&[sequence; 3]).unwrap();
        placed(&mut cells, &[0, 1, 2]).unwrap();
    }
    cells.begin_step(&[1, 0]).unwrap();
    let rows = placed(&mut cells, &[3, 3]).unwrap();
    assert_eq!((&rows.slots[..], rows.n_keys), (&[6, 7][..], 8));
    assert_eq!(seen(&rows), [[3, 4, 5, 6], [0, 1, 2, 7]]);
    // A single sequence is one run of slots, wherever it begins.
    cells.seq_rm(0, 0..i32::MAX).unwrap();
    let rows = placed(&mut cells, &[4]).unwrap();
    assert_eq!((&rows.slots[..], seen(&rows)), (&[7][..], vec![vec![3, 4, 5, 6, 7]]));
}

#[test]
fn candidates_see_those_that_lead_to_them() {
    let mut cells = CellsCache::with_trees(config()).unwrap();
    placed(&mut cells, &[0, 1]).unwrap();
    // Two nodes follow the sequence, and one node follows each of them.
    cells.propose(0, &[-1, -1, 0, 1]).unwrap();
    let rows = placed(&mut cells, &[2, 2, 3, 3]).unwrap();
    assert_eq!(rows.slots[..], [2, 3, 4, 5]);
    assert_eq!(seen(&rows), [vec![0, 1, 2], vec![0, 1, 3], vec![0, 1, 2, 4], vec![0, 1, 3, 5]]);
}

/// Returns a function that returns random numbers below a limit.
fn numbers(mut state: u64) -> impl FnMut(usize) -> usize {
    move |below| {
        // A step of xorshift64.
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 33) as usize % below
    }
}

/// Returns the positions of a step of one token for each element of `sequences`.
fn positions(cells: &CellsCache, sequences: &[i32]) -> Vec<i32> {
    let mut next: Vec<i32> = (0..SEQUENCES).map(|one| cells.seq_next(one).unwrap()).collect();
    let position = |&sequence: &i32| {
        next[sequence as usize] += 1;
        next[sequence as usize] - 1
    };
    sequences.iter().map(position).collect()
}

/// The contents of a slot: a position, and the sequences that it belongs to.
#[derive(Clone, Default)]
struct SlotContents {
    position: i32,
    sequences: Vec<i32>,
}

const SEQUENCES: i32 = 5;

/// A cache and the expected contents of its slots.
struct Sequences {
    cells: CellsCache,
    held: Vec<SlotContents>,
}

impl Sequences {
    fn next(&self, sequence: i32) -> i32 {
        self.cells.seq_next(sequence).unwrap()
    }

    fn remove(&mut self, sequence: i32, from: i32) {
        self.cells.seq_rm(sequence, from..i32::MAX).unwrap();
        for cell in self.held.iter_mut().filter(|cell| cell.position >= from) {
            cell.sequences.retain(|&other| other != sequence);
        }
    }

    fn fork(&mut self, source: i32, target: i32) {
        self.cells.seq_cp(source, target, 0..i32::MAX).unwrap();
        for cell in self.held.iter_mut().filter(|cell| cell.sequences.contains(&source)) {
            cell.sequences.push(target);
        }
    }

    /// Runs a step of one token for each element of `sequences`. Returns the step's rows, and the keys that
    /// each token must see.
    fn step(&mut self, sequences: &[i32]) -> (Rows, Vec<Vec<usize>>) {
        let positions = positions(&self.cells, sequences);
        self.cells.begin_step(sequences).unwrap();
        let rows = placed(&mut self.cells, &positions).unwrap();
        for (t, &slot) in rows.slots.iter().enumerate() {
            let cell = &mut self.held[slot as usize];
            assert!(cell.sequences.is_empty(), "slot {slot} is in use");
            *cell = SlotContents { position: positions[t], sequences: vec![sequences[t]] };
        }
        let of = |t: usize| {
            let sees = |&key: &usize| {
                let SlotContents { position, sequences: owners } = &self.held[key];
                owners.contains(&sequences[t]) && *position <= positions[t]
            };
            (0..self.held.len()).filter(sees).collect()
        };
        let expected = (0..sequences.len()).map(of).collect();
        (rows, expected)
    }
}

/// The keys that each token sees without a mask.
fn seen_without(rows: &Rows) -> Vec<Vec<usize>> {
    let first = rows.n_keys - rows.slots.len();
    let is_last = (first..rows.n_keys).eq(rows.slots.iter().map(|&slot| slot as usize));
    assert!(is_last, "without a mask, the last slots must be those of the step: {rows:?}");
    (first..rows.n_keys).map(|own| (0..=own).collect()).collect()
}

#[test]
fn tokens_see_what_their_sequences_hold() {
    let mut number = numbers(0x2545_f491_4f6c_dd1d);
    let mut kinds = [0; 3];
    for _ in 0..60 {
        let config = config();
        let held = vec![SlotContents::default(); config.capacity as usize];
        let mut all = Sequences { cells: CellsCache::new(config).unwrap(), held };
        for _ in 0..40 {
            let [sequence, other] = [(); 2].map(|()| number(SEQUENCES as usize) as i32);
            let n = 1 + number(6);
            match number(8) {
                0 => all.remove(sequence, number(12) as i32),
                1 if other != sequence && all.next(other) == 0 => all.fork(sequence, other),
                2.. if all.cells.can_extend(n as i32) => {
                    let shared = number(3) > 0;
                    let of = |t: i32| if shared { (sequence + t) % 3 } else { sequence };
                    let sequences: Vec<i32> = (0..n as i32).map(of).collect();
                    let (rows, expected) = all.step(&sequences);
                    let found = match rows.mask {
                        Some(_) => seen(&rows),
                        None => seen_without(&rows),
                    };
                    assert_eq!(found, expected, "tokens of {sequences:?}: {rows:?}");
                    let has_gaps = rows.slots.windows(2).any(|pair| pair[1] != pair[0] + 1);
                    kinds[usize::from(rows.mask.is_some()) + usize::from(has_gaps)] += 1;
                }
                _ => {}
            }
        }
    }
    // Steps without a mask, with a mask, and with slots that are not contiguous.
    assert!(kinds.iter().all(|&n| n > 20), "{kinds:?}");
}

mod windows;
