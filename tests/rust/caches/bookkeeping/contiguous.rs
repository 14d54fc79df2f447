//! Generated operations on one growing sequence.

use etkv_core::bookkeeping::{ContiguousBookkeeping, MaskPlan, Move, Window};
use etkv_core::{Growth, LayerPolicy, Status};
use etkv_tests::kept::width;
use etkv_tests::model::{first_exact, is_seen};
use etkv_tests::shrink::{check, Case};
use etkv_tests::slots::{Id, LayerGroupSlots};
use etkv_tests::Rng;

use super::agreed;

/// `policies` has an entry for each layer group.
#[derive(Debug, Clone)]
pub struct Config {
    pub capacity: i32,
    pub max_step_tokens: i32,
    pub policies: Vec<LayerPolicy>,
}

#[derive(Debug, Clone)]
pub enum Op {
    /// Appends `n` tokens.
    Append {
        n: i32,
        abort: bool,
    },
    /// Writes `n` tokens that begin at position `start`, modulo the length plus one.
    Rewrite {
        start: i32,
        n: i32,
        abort: bool,
    },
    /// Writes tokens that begin at position `start`, modulo the length plus one. The position of token `odd` is wrong
    /// by `by`.
    Skewed {
        start: i32,
        n: i32,
        odd: usize,
        by: i32,
    },
    /// Rewinds to a length, modulo the current length plus two.
    Rewind {
        length: i32,
    },
    /// Rewinds to a length that differs by `by` from the least allowed one.
    RewindToLeast {
        by: i32,
    },
    Clear,
}

pub fn generate(rng: &mut Rng) -> Case<Config, Op> {
    let capacity = rng.pick(&[1, 5, 30, 64, 150, 400]);
    let group = |rng: &mut Rng| {
        let width = rng.pick(&[1, 2, 3, 8, 20, 64]);
        match rng.below(10) {
            0..=2 => LayerPolicy::Full,
            3..=5 => LayerPolicy::Chunk { chunk: width },
            _ => LayerPolicy::Window { window: width, sinks: rng.pick(&[0, 0, 1, 4, 9]) },
        }
    };
    let policies = (0..1 + rng.below(3)).map(|_| group(rng)).collect();
    let config = Config { capacity, max_step_tokens: rng.pick(&[1, 2, 7, 40]), policies };
    let longest = rng.pick(&[1, 3, config.max_step_tokens as usize, 40]);
    let op = |rng: &mut Rng| {
        let n = 1 + rng.below(longest) as i32;
        let place = rng.below(1000) as i32;
        let abort = rng.chance(0.2);
        match rng.below(40) {
            0 => Op::Clear,
            1..=3 => Op::Rewind { length: place },
            4..=7 => Op::RewindToLeast { by: rng.pick(&[0, 0, 0, 1, -1]) },
            8..=10 => Op::Rewrite { start: place, n, abort },
            11 | 12 => {
                let by = rng.pick(&[-1, 1, 2, i32::MAX, i32::MIN]);
                Op::Skewed { start: place, n, odd: rng.below(longest), by }
            }
            _ => Op::Append { n, abort },
        }
    };
    let ops = (0..200).map(|_| op(rng)).collect();
    Case { config, ops }
}

/// Returns the window of a layer group, or `None` for full history.
pub fn window(policy: LayerPolicy, step: i32, capacity: i32) -> Option<Window> {
    match policy {
        LayerPolicy::Full => None,
        LayerPolicy::Window { window, sinks } => Some(Window::new(window, sinks, step, capacity)),
        LayerPolicy::Chunk { chunk } => Some(Window::chunked(chunk, step, capacity)),
    }
}

struct Run {
    book: ContiguousBookkeeping,
    capacity: i32,
    policies: Vec<LayerPolicy>,
    slides: Vec<Option<Window>>,
    groups: Vec<LayerGroupSlots>,
    /// For each layer group, the number of slots by which rows have moved towards slot 0.
    moved: Vec<i32>,
    /// For each layer group, the number of tokens that were written since its last move.
    since_moved: Vec<i32>,
    max_step_tokens: i32,
    /// The token at each position.
    tokens: Vec<Id>,
    written: Id,
    /// The largest length since the sequence was last empty.
    peak: i32,
}

impl Run {
    fn new(config: &Config) -> Self {
        let Config { capacity, max_step_tokens, policies } = config.clone();
        let slides: Vec<Option<Window>> =
            policies.iter().map(|&policy| window(policy, max_step_tokens, capacity)).collect();
        Self {
            book: ContiguousBookkeeping::new(capacity, slides.clone()),
            capacity,
            groups: vec![LayerGroupSlots::new(capacity); policies.len()],
            moved: vec![0; policies.len()],
            since_moved: vec![i32::MAX; policies.len()],
            policies,
            slides,
            max_step_tokens,
            tokens: Vec::new(),
            written: 0,
            peak: 0,
        }
    }

    fn length(&self) -> i32 {
        self.tokens.len() as i32
    }

    fn any_slides(&self) -> bool {
        self.slides.iter().flatten().any(Window::slides)
    }

    /// Returns the least length at which the next query finds all rows that it sees, or 0 if this holds for every
    /// length.
    fn least(&self) -> i32 {
        let least = |group: usize| {
            let policy = self.policies[group];
            let sinks = self.slides[group]?.sinks();
            let is_there = |&at: &i32| {
                let slot = usize::try_from(at - self.moved[group]).ok();
                slot.is_some_and(|slot| {
                    self.groups[group].ids()[slot] == Some(self.tokens[at as usize])
                })
            };
            let n = (sinks..self.length()).rev().take_while(is_there).count() as i32;
            let first = self.length() - n;
            (first > sinks).then(|| first_exact(policy, first - 1))
        };
        (0..self.groups.len()).filter_map(least).max().unwrap_or(0)
    }

    fn refusals(&self, positions: &[i32]) -> Vec<Status> {
        let Some(&start) = positions.first() else {
            return vec![Status::InvalidArgument];
        };
        let mut refusals = Vec::new();
        let runs_on = positions.windows(2).all(|pair| pair[0].checked_add(1) == Some(pair[1]));
        let least = self.least();
        if start < 0 || start > self.length() || !runs_on || (start > 0 && start < least) {
            refusals.push(Status::Position);
        }
        let n = positions.len() as i32;
        let fits = i64::from(start) + i64::from(n) <= i64::from(self.capacity);
        if !fits || (self.any_slides() && n > self.max_step_tokens) {
            refusals.push(Status::Capacity);
        }
        refusals
    }

    fn step(&mut self, positions: &[i32], abort: bool) {
        let before = self.book.clone();
        let Some(plan) = agreed(self.book.plan(positions), &self.refusals(positions)) else {
            return assert_eq!(self.book, before);
        };
        let ids: Vec<Id> = (self.written..).take(positions.len()).collect();
        self.written += ids.len();
        let mut after = self.tokens[..positions[0] as usize].to_vec();
        after.extend(&ids);

        let mut saved = Vec::new();
        for (group, slots) in self.groups.iter_mut().enumerate() {
            let displaced = self.book.displaced(group, &plan);
            saved.push((displaced.start, slots.saved(displaced)));
            let todo = self.book.group(group, &plan).unwrap();
            slots.write(&todo, &ids);
            for (query, &at) in positions.iter().enumerate() {
                let policy = self.policies[group];
                let seen = |position: &usize| is_seen(policy, at, *position as i32);
                let mut expected: Vec<Id> =
                    (0..after.len()).filter(seen).map(|position| after[position]).collect();
                expected.sort_unstable();
                let shown = slots.shown(&todo, query, ids.len());
                assert_eq!(shown, expected, "query {query} of {positions:?} in group {group}");
            }
            assert!(!(ids.len() == 1 && todo.mask == MaskPlan::Causal), "{todo:?}");
            let is_explicit = matches!(todo.mask, MaskPlan::Explicit(_));
            let end = after.len() as i32;
            match self.slides[group] {
                None => {
                    assert!(!is_explicit && todo.needed() <= end, "{todo:?}");
                }
                Some(window) => {
                    let is_one_run = ids.len() == 1 && window.sinks() == 0;
                    assert!(!(is_explicit && is_one_run), "{todo:?}");
                    let last = end - 1;
                    let sees_all = (0..end).all(|at| is_seen(self.policies[group], last, at));
                    assert!(!(is_explicit && sees_all), "a mask that hides nothing: {todo:?}");
                    let first = slots.shown(&todo, 0, ids.len());
                    let start = slots.ids()[todo.read.start as usize].unwrap();
                    assert!(first.contains(&start), "{todo:?} reads slots that no query sees");
                    let most = window.allocated(Growth::Exact, self.peak.max(end));
                    assert!(todo.needed() <= most, "{todo:?}, {most} slots");
                }
            }
        }
        if abort {
            for (slots, (start, rows)) in self.groups.iter_mut().zip(saved) {
                slots.restore(start, &rows);
            }
            return assert_eq!(self.book, before);
        }
        let moves = self.book.commit(&plan).unwrap();
        for since in &mut self.since_moved {
            *since = since.saturating_add(plan.n_tokens());
        }
        if positions[0] == 0 {
            self.moved.fill(0);
        }
        for moved in moves {
            self.moved[moved.group] +=
                moved.from.iter().next().unwrap() - moved.to.iter().next().unwrap();
            self.groups[moved.group].relocate(&moved.from, &moved.to);
            self.check_move(&moved, after.len() as i32);
        }
        let peak = if positions[0] == 0 { 0 } else { self.peak };
        self.tokens = after;
        self.peak = peak.max(self.length());
    }

    /// Checks that a layer group moves rows only if the next step might not fit, that it keeps no more rows than it
    /// must, and that it does not move rows again within `room` tokens.
    fn check_move(&mut self, moved: &Move, length: i32) {
        let (window, sinks) = width(self.policies[moved.group]);
        let slots = self.slides[moved.group].unwrap().slots();
        assert!(moved.from.end() + self.max_step_tokens > slots, "{moved:?}: there is room");
        assert_eq!(moved.to.end(), self.promised(moved.group, length), "{moved:?}");
        let room = self.max_step_tokens.max(window / 4);
        let since = std::mem::take(&mut self.since_moved[moved.group]);
        assert!(since > room, "{moved:?} after {since} tokens, sinks: {sinks}");
    }

    /// Returns the number of positions that a layer group must keep of a sequence of `length` positions.
    fn promised(&self, group: usize, length: i32) -> i32 {
        let Some(slides) = self.slides[group].filter(Window::slides) else {
            return length;
        };
        let at = (length - self.max_step_tokens).max(0);
        let is_needed = |&position: &i32| {
            position < slides.sinks()
                || position > at
                || is_seen(self.policies[group], at, position)
        };
        (0..length).filter(is_needed).count() as i32
    }

    fn run_of(start: i32, n: i32) -> Vec<i32> {
        (start..start + n).collect()
    }

    fn rewind(&mut self, length: i32) {
        let before = self.book.clone();
        let least = self.least();
        let possible = length == 0 || (least..=self.length()).contains(&length);
        let refusals: &[Status] = if possible { &[] } else { &[Status::Position] };
        if agreed(self.book.rewind(length), refusals).is_none() {
            return assert_eq!(self.book, before);
        }
        self.tokens.truncate(length as usize);
        if length == 0 {
            self.peak = 0;
            self.moved.fill(0);
        }
    }

    fn apply(&mut self, op: &Op) {
        let length = self.length();
        match *op {
            Op::Append { n, abort } => self.step(&Self::run_of(length, n), abort),
            Op::Rewrite { start, n, abort } => {
                self.step(&Self::run_of(start % (length + 1), n), abort);
            }
            Op::Skewed { start, n, odd, by } => {
                let mut positions = Self::run_of(start % (length + 1), n);
                let odd = odd % positions.len();
                positions[odd] = positions[odd].wrapping_add(by);
                self.step(&positions, false);
            }
            Op::Rewind { length: to } => self.rewind(to % (length + 2)),
            Op::RewindToLeast { by } => self.rewind(self.least() + by),
            Op::Clear => {
                self.book.clear();
                self.tokens.clear();
                self.peak = 0;
                self.moved.fill(0);
            }
        }
        self.check();
    }

    fn check(&mut self) {
        let length = self.length();
        assert_eq!(self.book.length(), length);
        assert_eq!(self.book.capacity(), self.capacity);
        for n in [i32::MIN, -1, 0, 1, self.capacity - length, i32::MAX] {
            let fits = n >= 0 && i64::from(length) + i64::from(n) <= i64::from(self.capacity);
            assert_eq!(self.book.can_extend(n), fits, "{n} more than {length}");
        }
        for group in 0..self.groups.len() {
            let used = self.promised(group, length).min(length - self.moved[group]);
            assert_eq!(self.book.used(group), used, "group {group}");
        }
        let promised =
            if self.any_slides() { (self.peak - self.max_step_tokens).max(0) } else { 0 };
        let least = self.least();
        assert_eq!(self.book.rewindable_to(), least);
        assert!((0..=promised).contains(&least), "{least}, of {promised} positions to keep");
        self.step(&[], false);
        // The positions that the next tokens will see.
        for n in [1, 3.min(self.max_step_tokens)] {
            if self.book.can_extend(n) {
                self.step(&Self::run_of(length, n), true);
            }
        }
    }
}

pub fn replay(config: Config, ops: &[Op]) {
    let mut run = Run::new(&config);
    ops.iter().for_each(|op| run.apply(op));
}

#[test]
fn contiguous_equals_a_list_of_tokens() {
    check(500, generate, |config, ops| replay(config.clone(), ops));
}
