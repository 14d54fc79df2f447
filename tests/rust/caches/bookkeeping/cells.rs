//! Generated operations on sequences in a pool of cells, and on trees after them.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Range, RangeInclusive};

use etkv_core::bookkeeping::{CellsBookkeeping, LayerGroupPlan, MaskPlan, Move, Slots, Window};
use etkv_core::{LayerPolicy, Status};
use etkv_tests::kept::{width, WindowModel};
use etkv_tests::model::{is_seen, Members, Model};
use etkv_tests::shrink::{check, Case};
use etkv_tests::slots::{Id, LayerGroupSlots};
use etkv_tests::Rng;

use super::agreed;
use super::contiguous::window;

/// `policies` has an entry for each layer group except the first, which has full history.
#[derive(Debug, Clone)]
pub struct Config {
    pub capacity: i32,
    pub max_step_tokens: i32,
    pub policies: Vec<LayerPolicy>,
}

/// When the operation runs, each number is reduced modulo the number of possible values.
#[derive(Debug, Clone)]
pub enum Op {
    /// Runs a step of `n` tokens for each of these sequences, interleaved or one sequence after the other.
    Step {
        sequences: Vec<i32>,
        n: i32,
        in_turns: bool,
        abort: bool,
    },
    /// Runs a step of `n` tokens that all of these sequences share.
    Shared {
        sequences: Vec<i32>,
        n: i32,
        abort: bool,
    },
    /// Runs a step of `n` tokens without a declaration of their sequences.
    Undeclared {
        n: i32,
        abort: bool,
    },
    /// Runs a step in which the position of one token is wrong by `by`.
    Skewed {
        sequence: i32,
        n: i32,
        odd: usize,
        by: i32,
    },
    Copy {
        source: i32,
        target: i32,
        start: i32,
        end: i32,
    },
    Remove {
        sequence: i32,
        start: i32,
        end: i32,
    },
    /// Rewinds to a position that differs by `by` from the least allowed one.
    BackToLeast {
        sequence: i32,
        by: i32,
    },
    Keep {
        sequence: i32,
    },
    /// A number n stands for the parent `n % (number of earlier nodes + 2) - 1`. `i32::MAX` stands for the previous
    /// node.
    Propose {
        sequence: i32,
        parents: Vec<i32>,
    },
    /// Accepts a node and its ancestors, or, if `chain` is false, arbitrary nodes.
    Accept {
        sequence: i32,
        node: i32,
        chain: bool,
    },
    Compact,
    Clear,
}

fn generate(rng: &mut Rng) -> Case<Config, Op> {
    let policy = |rng: &mut Rng| {
        let width = rng.pick(&[1, 2, 3, 8, 20, 64]);
        match rng.chance(0.4) {
            true => LayerPolicy::Chunk { chunk: width },
            false => LayerPolicy::Window { window: width, sinks: rng.pick(&[0, 0, 1, 4, 9]) },
        }
    };
    let config = Config {
        capacity: rng.pick(&[1, 8, 30, 100, 300]),
        max_step_tokens: rng.pick(&[1, 2, 7, 40]),
        policies: (0..rng.below(3)).map(|_| policy(rng)).collect(),
    };
    let n_sequences = rng.pick(&[1, 2, 4, 12]);
    let longest = rng.pick(&[1, 3, config.max_step_tokens as usize, 40]);
    let trees = rng.chance(0.6);
    let op = |rng: &mut Rng| {
        let any = |rng: &mut Rng| match rng.below(60) {
            0 => rng.pick(&[-1, 255, 256, i32::MAX, i32::MIN]),
            _ => (rng.below(n_sequences) * rng.pick(&[1, 1, 21])) as i32,
        };
        let several = |rng: &mut Rng| -> Vec<i32> {
            let n = if rng.chance(0.02) { 0 } else { 1 + rng.below(n_sequences) };
            (0..n).map(|_| any(rng)).collect()
        };
        let (place, other) = (rng.below(1000) as i32, rng.below(1000) as i32);
        let n = 1 + rng.below(longest) as i32;
        let abort = rng.chance(0.2);
        let tree_op = rng.below(10);
        match rng.below(if trees { 50 } else { 32 }) {
            0 if rng.chance(0.2) => Op::Clear,
            0 | 1 => Op::Compact,
            2 => Op::Skewed {
                sequence: any(rng),
                n,
                odd: rng.below(longest),
                by: rng.pick(&[-1, 1, 2, i32::MAX, i32::MIN]),
            },
            3..=6 => Op::Copy {
                source: any(rng),
                target: any(rng),
                start: if rng.chance(0.7) { -i32::from(rng.chance(0.02)) } else { place },
                end: if rng.chance(0.6) { i32::MAX } else { other },
            },
            7..=10 => Op::Remove {
                sequence: any(rng),
                start: if rng.chance(0.4) { -i32::from(rng.chance(0.02)) } else { place },
                end: if rng.chance(0.6) { i32::MAX } else { other },
            },
            11 | 12 => Op::BackToLeast { sequence: any(rng), by: rng.pick(&[0, 0, 1, -1]) },
            13 if rng.chance(0.3) => Op::Keep { sequence: any(rng) },
            14 | 15 => Op::Shared { sequences: several(rng), n, abort },
            16..=21 => Op::Undeclared { n, abort },
            32..=41 if tree_op < 6 => Op::Propose {
                sequence: any(rng),
                parents: match rng.chance(0.3) {
                    true => vec![i32::MAX; 1 + rng.below(3)],
                    false => (0..rng.below(12)).map(|_| rng.below(1000) as i32).collect(),
                },
            },
            32..=41 => Op::Accept { sequence: any(rng), node: place, chain: rng.chance(0.9) },
            42..=49 => Op::Undeclared { n, abort },
            _ => Op::Step { sequences: several(rng), n, in_turns: rng.chance(0.5), abort },
        }
    };
    let ops = (0..150).map(|_| op(rng)).collect();
    Case { config, ops }
}

/// The number of free cells after a sequence. Each of them counts as much as a move.
const ROOM: i32 = 64;

struct Run {
    book: CellsBookkeeping,
    model: Model,
    policies: Vec<LayerPolicy>,
    windows: Vec<Window>,
    groups: Vec<LayerGroupSlots>,
    /// One entry for each layer group except the first.
    kept: Vec<WindowModel>,
}

impl Run {
    fn new(config: &Config) -> Self {
        let &Config { capacity, max_step_tokens, ref policies } = config;
        let step = max_step_tokens.min(capacity);
        let kept = |&policy: &LayerPolicy| WindowModel::new(policy, step, capacity);
        let windows: Vec<Window> =
            policies.iter().filter_map(|&policy| window(policy, step, capacity)).collect();
        let limits = windows.iter().any(Window::slides);
        Self {
            book: CellsBookkeeping::new(capacity, windows.iter().copied()),
            model: Model::new(capacity, limits.then_some(step)),
            policies: std::iter::once(LayerPolicy::Full).chain(policies.iter().copied()).collect(),
            groups: vec![LayerGroupSlots::new(capacity); windows.len() + 1],
            kept: policies.iter().map(kept).collect(),
            windows,
        }
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Step { sequences, n, in_turns, abort } => {
                let of = |sequence: &i32| vec![vec![*sequence]; *n as usize];
                let members: Vec<Members> = match in_turns {
                    false => sequences.iter().flat_map(of).collect(),
                    true => (0..*n).flat_map(|_| sequences.iter().map(|&s| vec![s])).collect(),
                };
                self.declare(members);
                self.step(None, *abort);
            }
            Op::Shared { sequences, n, abort } => {
                self.declare(vec![sequences.clone(); *n as usize]);
                self.step(None, *abort);
            }
            Op::Undeclared { n, abort } => self.step(Some(*n as usize), *abort),
            Op::Skewed { sequence, n, odd, by } => {
                self.declare(vec![vec![*sequence]; *n as usize]);
                self.skewed(*odd, *by);
            }
            Op::Copy { source, target, start, end } => {
                let range = self.range(*source, *start, *end);
                self.copy([*source, *target], range);
            }
            Op::Remove { sequence, start, end } => {
                let range = self.range(*sequence, *start, *end);
                self.remove(*sequence, range);
            }
            Op::BackToLeast { sequence, by } => {
                if is_known(*sequence) {
                    let least = self.least(*sequence);
                    self.check_held_at(*sequence, least);
                    self.remove(*sequence, (least + by).max(0)..i32::MAX);
                }
            }
            Op::Keep { sequence } => {
                let refusals = unknown(&[*sequence]);
                if agreed(self.book.seq_keep(*sequence), &refusals).is_some() {
                    self.model.keep(*sequence);
                    self.settle();
                }
            }
            Op::Propose { sequence, parents } => self.propose(*sequence, parents),
            Op::Accept { sequence, node, chain } => self.accept(*sequence, *node, *chain),
            Op::Compact => self.compact(),
            Op::Clear => {
                self.book.clear();
                self.model.clear();
                self.settle();
            }
        }
    }

    fn range(&self, sequence: i32, start: i32, end: i32) -> Range<i32> {
        let next = if is_known(sequence) { self.model.next(sequence) } else { 0 };
        let place = |at: i32| if at == i32::MAX || at < 0 { at } else { at % (next + 2) };
        place(start)..place(end)
    }

    fn declare(&mut self, members: Vec<Members>) {
        let mut refusals = unknown(&members.concat());
        let twice = |members: &Members| {
            (1..members.len()).any(|index| members[..index].contains(&members[index]))
        };
        let bad = |members: &Members| twice(members) || members.is_empty();
        if members.is_empty() || members.iter().any(bad) {
            refusals.push(Status::InvalidArgument);
        }
        let alone: Option<Vec<i32>> = members
            .iter()
            .map(|members| <[i32; 1]>::try_from(&members[..]).ok().map(|[one]| one))
            .collect();
        let result = match alone {
            Some(alone) => self.book.begin_step(&alone),
            None => {
                let sets: Vec<&[i32]> = members.iter().map(Vec::as_slice).collect();
                self.book.begin_step_shared(&sets)
            }
        };
        if agreed(result, &refusals).is_some() {
            self.model.declared = Some(members);
        }
    }

    /// Runs a step at the expected positions, if there are any.
    fn step(&mut self, n: Option<usize>, abort: bool) {
        let n = n.unwrap_or_else(|| self.model.declared.as_ref().map_or(1, Vec::len));
        let owners = self.model.owners(n);
        let positions: Vec<i32> = match &owners {
            Err(_) => vec![0; n],
            Ok(owners) => (0..owners.len())
                .map(|token| self.model.expected(owners, token, owners[token][0]).unwrap_or(0))
                .collect(),
        };
        self.run_step(owners, &positions, abort);
    }

    fn skewed(&mut self, odd: usize, by: i32) {
        let Some(n) = self.model.declared.as_ref().map(Vec::len) else {
            return;
        };
        let Ok(owners) = self.model.owners(n) else {
            return;
        };
        let mut positions: Vec<i32> = (0..owners.len())
            .map(|token| self.model.expected(&owners, token, owners[token][0]).unwrap_or(0))
            .collect();
        let n = positions.len();
        positions[odd % n] = positions[odd % n].wrapping_add(by);
        self.run_step(Ok(owners), &positions, false);
    }

    fn run_step(&mut self, owners: Result<Vec<Members>, Status>, positions: &[i32], abort: bool) {
        let refusals = match &owners {
            Err(status) => vec![*status],
            Ok(owners) => self.model.step_refusals(owners, positions),
        };
        let before = self.book.clone();
        let Some(plans) = agreed(self.book.plan(positions).map(<[_]>::to_vec), &refusals) else {
            return;
        };
        self.check_same(&before);
        let owners = owners.unwrap();
        self.check_cells(&owners, &plans[0].write);
        let ids = self.model.write(positions);
        for (group, plan) in plans.iter().enumerate() {
            assert!(plan.needed() <= self.model.capacity, "group {group} reads past the capacity");
            self.groups[group].write(plan, &ids);
            self.check_read(group, plan, &owners, &ids);
            for query in 0..ids.len() {
                let expected = self.model.visible(self.policies[group], &owners, &ids, query);
                let shown = self.groups[group].shown(plan, query, ids.len());
                assert_eq!(shown, expected, "group {group}, query {query}: {plan:?}");
            }
        }
        if abort {
            self.refuses_in_step();
            self.book.abort();
            assert_eq!(self.book.plans(), []);
            self.check_same(&before);
            return;
        }
        let moves = self.book.commit().unwrap();
        self.relocate(&moves);
        self.model.commit(&owners, &ids);
        self.keep(&owners, &ids);
    }

    fn settle(&mut self) {
        self.kept.iter_mut().for_each(|kept| kept.settle(&self.model));
    }

    /// Records the tokens of a step in the layer groups with windows, and slides the windows. Trees are not recorded.
    fn keep(&mut self, owners: &[Members], ids: &[Id]) {
        let carries_none = |sequence: &&i32| self.model.sequence(**sequence).tree.is_empty();
        for kept in &mut self.kept {
            for (members, &id) in owners.iter().zip(ids) {
                members.iter().filter(carries_none).for_each(|&member| kept.add(member, [id]));
            }
            let all: BTreeSet<&i32> = owners.iter().flatten().filter(carries_none).collect();
            all.into_iter().for_each(|&sequence| kept.slide(&self.model, sequence));
        }
    }

    /// Returns the least position at which every window layer group has all of `range`.
    fn exact_from(&self, sequence: i32, range: &Range<i32>) -> i32 {
        let exact_from = |kept: &WindowModel| kept.exact_from(&self.model, sequence, range);
        self.kept.iter().map(exact_from).max().unwrap_or(0)
    }

    /// Returns the least position to which a sequence can be rewound: the sequence can continue there, and the query
    /// there finds all rows that it sees. Returns 0 if the sequence can be rewound to every position.
    fn least(&self, sequence: i32) -> i32 {
        let least = self.exact_from(sequence, &(0..i32::MAX));
        let positions = self.model.positions_of(sequence);
        if least == 0 && positions.first() == Some(&0) {
            return 0;
        }
        positions.into_iter().map(|at| at + 1).find(|&next| next >= least).unwrap_or(0)
    }

    /// Checks the rows that a query of a sequence at `least` sees: they must be where they were written or moved.
    fn check_held_at(&self, sequence: i32, least: i32) {
        for (&policy, slots) in self.policies.iter().zip(&self.groups) {
            for id in self.model.sequence(sequence).tokens {
                let at = self.model.position(id);
                if at < least && is_seen(policy, least, at) {
                    assert!(slots.slot_of(id).is_some(), "position {at} is missing at {least}");
                }
            }
        }
    }

    /// Checks that every sequence continues directly after its own cells, if all its tokens fit there. Otherwise the
    /// tokens that do not fit must be in one run of cells, if a free run is long enough. It must be the first such
    /// run, unless a sequence continues there.
    fn check_cells(&self, owners: &[Members], write: &Slots) {
        let live = self.model.live();
        let is_live = |id: &Option<Id>| id.is_some_and(|id| live.contains(&id));
        let taken: Vec<bool> = self.groups[0].ids().iter().map(is_live).collect();
        let is_free = |mut cells: Range<usize>| cells.all(|at| taken.get(at) == Some(&false));
        let mut shares: BTreeMap<i32, Vec<i32>> = BTreeMap::new();
        for (members, cell) in owners.iter().zip(write.iter()) {
            let &[sequence] = &members[..] else {
                return;
            };
            shares.entry(sequence).or_default().push(cell);
        }
        let cells_after = |(sequence, cells): (&i32, &Vec<i32>)| {
            let start = self.tail(*sequence)? + 1;
            Some(start..start + cells.len())
        };
        if let Some(mut wanted) = shares.iter().map(cells_after).collect::<Option<Vec<_>>>() {
            wanted.sort_unstable_by_key(|cells| cells.start);
            let apart = wanted.windows(2).all(|pair| pair[0].end <= pair[1].start);
            if apart && wanted.iter().cloned().all(is_free) {
                for share in &shares {
                    let wanted = cells_after(share).unwrap();
                    let expected = Slots::Run(wanted.start as i32..wanted.end as i32);
                    assert_eq!(
                        Slots::of(share.1),
                        expected,
                        "{share:?}, all of it fits after the sequence"
                    );
                }
            }
        }
        let (Some((&sequence, cells)), 1) = (shares.first_key_value(), shares.len()) else {
            return;
        };
        let start = self.tail(sequence).map_or(taken.len(), |tail| tail + 1);
        let fits = (0..=cells.len()).rev().find(|&n| is_free(start..start + n)).unwrap_or(0);
        let rest = cells.len() - fits;
        let fitting = start..start + fits;
        let is_run = |from: usize| {
            let run = from..from + rest;
            is_free(run.clone()) && (run.end <= fitting.start || fitting.end <= run.start)
        };
        if let Some(from) = (0..taken.len()).find(|&from| is_run(from)) {
            if start < taken.len() && rest > 0 {
                let goes_on_at = |at: usize| {
                    at == fitting.end
                        || self.model.sequences().keys().any(|&one| self.end(one) == Some(at))
                };
                let at = cells[fits] as usize;
                let begins = |at: usize| at == 0 || !is_run(at - 1) || at == fitting.end;
                if from == 0 || !goes_on_at(from) {
                    assert_eq!(at, from, "{cells:?} are not in the first run");
                } else {
                    let is_apart = at >= 16 && begins(at - 16);
                    assert!(begins(at) || is_apart, "{cells:?} begin within a run");
                }
            }
            let breaks = cells.windows(2).filter(|pair| pair[1] != pair[0] + 1).count();
            let most = usize::from(fits > 0 && rest > 0);
            assert!(breaks <= most, "{cells:?}, but {fits} fit after the sequence");
        }
    }

    /// Returns the cell after the last one of a sequence, without its tree.
    fn end(&self, sequence: i32) -> Option<usize> {
        let held = self.model.sequences().get(&sequence)?;
        let cells: Vec<usize> =
            held.tokens.iter().filter_map(|&id| self.groups[0].slot_of(id)).collect();
        let last = if self.book.is_contiguous(sequence).unwrap() {
            cells.iter().max()
        } else {
            cells.last()
        };
        last.map(|&last| last + 1)
    }

    /// Returns the cell of the last node of a sequence's tree in the first layer group. Without a tree, returns the
    /// last cell if the sequence is one run, else the cell of the sequence's last token.
    fn tail(&self, sequence: i32) -> Option<usize> {
        let held = self.model.sequences().get(&sequence)?;
        let last = *held.all().last()?;
        if held.written() > 0 || !self.book.is_contiguous(sequence).unwrap() {
            return self.groups[0].slot_of(last);
        }
        held.tokens.iter().filter_map(|&id| self.groups[0].slot_of(id)).max()
    }

    /// Checks the range of cells that a step reads: sequences of the step must have or write the range's first and
    /// last cell. Checks that a step of one sequence in one run needs no mask if the last query sees the whole run.
    fn check_read(&self, group: usize, plan: &LayerGroupPlan, owners: &[Members], ids: &[Id]) {
        let slots = self.groups[group].ids();
        let (start, end) = (plan.read.start as usize, plan.read.end as usize);
        let members: BTreeSet<i32> = owners.iter().flatten().copied().collect();
        let held = members.iter().flat_map(|&sequence| self.model.sequence(sequence).all());
        let known: Vec<Id> = held.chain(ids.iter().copied()).collect();
        for edge in [start, end - 1] {
            let is_known = slots[edge].is_some_and(|id| known.contains(&id));
            assert!(is_known, "group {group} reads slot {edge} without need: {plan:?}");
        }
        let (Some(&sequence), 1) = (members.first(), members.len()) else {
            return;
        };
        let Some(first) = end.checked_sub(known.len()) else {
            return;
        };
        let mut run: Vec<Id> = slots[first..end].iter().flatten().copied().collect();
        // The cells of nodes and of the step's tokens must be in order. The cells before them need not be in order.
        let n_tokens = self.model.sequence(sequence).tokens.len();
        let is_tail_in_order = run.get(n_tokens..) == Some(&known[n_tokens..]);
        run.sort_unstable();
        let seen = || self.model.visible(self.policies[group], owners, ids, ids.len() - 1);
        let is_known = known.iter().all(|id| run.binary_search(id).is_ok());
        if is_known && is_tail_in_order && seen() == run {
            let mask = if ids.len() == 1 { MaskPlan::None } else { MaskPlan::Causal };
            assert_eq!((&plan.mask, plan.read.len()), (&mask, run.len()), "group {group}");
        }
    }

    /// Checks that every call except commit and abort is refused while a step is open.
    fn refuses_in_step(&mut self) {
        let book = &mut self.book;
        let refused = [
            book.plan(&[0]).map(drop),
            book.begin_step(&[0]),
            book.begin_step_shared(&[&[0, 1]]),
            book.cancel_step(),
            book.seq_cp(0, 1, 0..i32::MAX),
            book.seq_rm(0, 0..i32::MAX),
            book.seq_keep(0),
            book.propose(0, &[-1]),
            book.commit_tree(0, &[]).map(drop),
            book.compact().map(drop),
        ];
        for result in refused {
            assert_eq!(result.unwrap_err().status(), Status::Step);
        }
    }

    fn check_same(&self, before: &CellsBookkeeping) {
        let answers = |book: &CellsBookkeeping| {
            let fit = (-1..=self.model.capacity + 1).filter(|&n| book.can_extend(n)).max();
            (book.length(), fit, book.sequences())
        };
        assert_eq!(answers(before), answers(&self.book));
        for sequence in before.sequences() {
            let ranges = [before, &self.book].map(|book| book.seq_positions(sequence).unwrap());
            assert_eq!(ranges[0], ranges[1]);
            assert_eq!(before.rewindable_to(sequence), self.book.rewindable_to(sequence));
            assert_eq!(before.is_contiguous(sequence), self.book.is_contiguous(sequence));
        }
        for group in 0..self.groups.len() {
            assert_eq!(before.used(group), self.book.used(group));
        }
    }

    fn relocate(&mut self, moves: &[Move]) {
        for Move { group, from, to } in moves {
            self.groups[*group].relocate(from, to);
        }
    }

    fn copy(&mut self, pair: [i32; 2], range: Range<i32>) {
        let mut refusals = unknown(&pair);
        if range.start < 0 || range.end < range.start {
            refusals.push(Status::InvalidArgument);
        }
        if refusals.is_empty() {
            let [source, target] = pair;
            let least = self.exact_from(source, &range);
            let least = least.max(self.exact_from(target, &(0..i32::MAX)));
            refusals = self.model.copy_refusals(pair, &range, least);
        }
        if agreed(self.book.seq_cp(pair[0], pair[1], range.clone()), &refusals).is_some() {
            self.model.copy(pair, &range);
            if pair[0] != pair[1] {
                self.kept.iter_mut().for_each(|kept| kept.copy(&self.model, pair, &range));
            }
        }
    }

    fn remove(&mut self, sequence: i32, range: Range<i32>) {
        let mut refusals = unknown(&[sequence]);
        if range.start < 0 || range.end < range.start {
            refusals.push(Status::InvalidArgument);
        }
        if refusals.is_empty() {
            let least = self.exact_from(sequence, &(0..i32::MAX));
            refusals = self.model.remove_refusals(sequence, &range, least);
        }
        if agreed(self.book.seq_rm(sequence, range.clone()), &refusals).is_some() {
            self.model.remove(sequence, &range);
            self.settle();
        }
    }

    fn propose(&mut self, sequence: i32, parents: &[i32]) {
        if !is_known(sequence) {
            agreed(self.book.propose(sequence, parents), &unknown(&[sequence]));
            return;
        }
        let nodes = self.model.sequence(sequence).tree.len() as i32;
        let parent = |(node, &parent): (i32, &i32)| match parent {
            i32::MAX => node - 1,
            parent => parent % (node + 2) - 1,
        };
        let parents: Vec<i32> = (nodes..).zip(parents).map(parent).collect();
        let refusals = self.model.propose_refusals(sequence, &parents);
        if agreed(self.book.propose(sequence, &parents), &refusals).is_some() {
            self.model.propose(sequence, &parents);
        }
    }

    fn accept(&mut self, sequence: i32, node: i32, chain: bool) {
        if !is_known(sequence) {
            agreed(self.book.commit_tree(sequence, &[]), &unknown(&[sequence]));
            return;
        }
        let held = self.model.sequence(sequence);
        let mut accepted: Vec<i32> = match held.tree.len() {
            0 => Vec::new(),
            n => {
                let up = held.chain_up(node as usize % n);
                up.into_iter().rev().map(|node| node as i32).collect()
            }
        };
        match node % 5 {
            _ if !chain => accepted.reverse(),
            0 => accepted.clear(),
            _ => {}
        }
        let refusals = self.model.accept_refusals(sequence, &accepted);
        let nodes: Vec<Id> = held.tree.iter().filter_map(|node| node.token).collect();
        let mut cells: Vec<_> = nodes.iter().map(|&id| self.groups[0].slot_of(id)).collect();
        cells.sort_unstable();
        if let Some(moves) = agreed(self.book.commit_tree(sequence, &accepted), &refusals) {
            self.relocate(&moves);
            self.model.accept(sequence, &accepted);
            for kept in &mut self.kept {
                kept.add(sequence, accepted.iter().map(|&node| nodes[node as usize]));
                kept.slide(&self.model, sequence);
            }
            for (&node, cell) in accepted.iter().zip(cells) {
                let now = self.groups[0].slot_of(nodes[node as usize]);
                assert_eq!(now, cell, "node {node} is not in the first of the tree's cells");
            }
        }
    }

    fn compact(&mut self) {
        let live = self.model.live().len();
        self.check_contiguous();
        let fewest: Vec<_> = (0..self.groups.len()).map(|group| self.fewest(group)).collect();
        let moves = self.book.compact().unwrap();
        for (group, fewest) in fewest.into_iter().enumerate() {
            let of_group = moves.iter().filter(|one| one.group == group);
            let moved: usize = of_group.map(|one| one.from.len()).sum();
            if let Some(range) = fewest {
                assert!(range.contains(&moved), "group {group}: {moved} of {range:?} rows move");
            }
        }
        self.relocate(&moves);
        self.check_contiguous();
        let all = self.book.sequences();
        let counted: i32 = all.iter().map(|&one| self.book.seq_len(one).unwrap()).sum();
        let nodes: usize = self.model.sequences().values().map(|held| held.written()).sum();
        if counted as usize + nodes == live {
            // If no cells are shared, every sequence is a run, and stays in place.
            for &sequence in &all {
                assert!(self.book.is_contiguous(sequence).unwrap(), "sequence {sequence}");
            }
            assert_eq!(self.book.compact().unwrap(), [], "a compact cache moves rows again");
        }
    }

    /// Returns the minimum and maximum number of rows that a compaction should move in a layer group. Returns `None`
    /// if several sequences are not runs, or if sequences share cells. The sequence that is not a run becomes a run
    /// next to the others, with some room after it. Other sequences move instead if that needs fewer moves, or leaves
    /// more room.
    fn fewest(&self, group: usize) -> Option<RangeInclusive<usize>> {
        let sequences = self.model.sequences();
        let slots: Vec<Vec<i32>> = sequences
            .iter()
            .map(|(&sequence, held)| {
                let kept = |id: &&Id| group == 0 || self.kept[group - 1].holds(sequence, **id);
                let slot = |&id: &Id| self.groups[group].slot_of(id).unwrap() as i32;
                held.tokens.iter().filter(kept).map(slot).collect()
            })
            .collect();
        let taken: BTreeSet<i32> = slots.iter().flatten().copied().collect();
        let all: usize = slots.iter().map(Vec::len).sum();
        if taken.len() < all || sequences.values().any(|held| !held.tree.is_empty()) {
            return None;
        }
        let stays = |slots: &[i32], start: i32| {
            let end = start + slots.len() as i32;
            // Windows are read without a mask only if positions are in order.
            let stays = |(slot, place): &(&i32, i32)| match group {
                0 => (start..end).contains(*slot),
                _ => *slot == place,
            };
            slots.iter().zip(start..).filter(stays).count()
        };
        let is_run = |slots: &&Vec<i32>| {
            let start = slots.iter().copied().min().unwrap_or(0);
            stays(slots, start) == slots.len()
        };
        let broken: Vec<&Vec<i32>> = slots.iter().filter(|slots| !is_run(slots)).collect();
        let &[broken] = &broken[..] else {
            return broken.is_empty().then_some(0..=0);
        };
        // A layer group with several sequences may have grown.
        if group > 0 && slots.iter().filter(|slots| !slots.is_empty()).count() > 1 {
            return None;
        }
        let (len, size) = (broken.len() as i32, self.model.capacity);
        let end = size - ROOM.min((size - all as i32) / 2);
        let foreign = |cell: i32| taken.contains(&cell) && !broken.contains(&cell);
        let starts = (0..=end - len).filter(|&start| !(start..start + len).any(foreign));
        let most = starts.map(|start| (stays(broken, start), -start)).max()?;
        let fewest = broken.len() - most.0;
        match all == broken.len() {
            true if group == 0 => Some(fewest..=fewest),
            true if len - most.1 + ROOM <= self.kept[group - 1].slots() => Some(fewest..=fewest),
            true => None,
            false => Some(1..=fewest + ROOM as usize),
        }
    }

    fn check_contiguous(&self) {
        for (&sequence, held) in self.model.sequences() {
            let is_held = |id: &Option<Id>| id.is_some_and(|id| held.tokens.contains(&id));
            let slots = self.groups[0].ids();
            let first = slots.iter().position(is_held).unwrap_or(0);
            let run = slots[first..].iter().take_while(|id| is_held(id)).count();
            let is_run = run == held.tokens.len();
            assert_eq!(self.book.is_contiguous(sequence).unwrap(), is_run, "{sequence}");
        }
    }

    /// Checks the number of used slots. It is at least the number of slots that the next query of each sequence sees,
    /// plus the nodes of trees. It is at most the window's positions of each sequence, plus the nodes.
    fn check_used(&self, group: usize) {
        let live = self.model.live().len() as i32;
        let used = self.book.used(group);
        let policy = self.policies[group];
        if policy == LayerPolicy::Full {
            return assert_eq!(used, live);
        }
        let (window, sinks) = width(policy);
        let (mut seen, mut nodes, mut most) = (BTreeSet::new(), 0, 0);
        for (&sequence, held) in self.model.sequences() {
            let at = self.model.next(sequence);
            let is_seen = |id: &Id| is_seen(policy, at, self.model.position(*id));
            seen.extend(held.tokens.iter().copied().filter(is_seen));
            nodes += held.written() as i32;
            let slides = self.windows[group - 1].slides();
            let promised = sinks + window - 1 + self.windows[group - 1].max_step_tokens();
            most += (held.tokens.len() as i32).min(if slides { promised } else { i32::MAX });
        }
        let least = seen.len() as i32 + nodes;
        let range = least..=(most + nodes).min(live);
        assert!(range.contains(&used), "group {group}: {used} of {range:?}");
    }

    fn check(&self) {
        (0..self.groups.len()).for_each(|group| self.check_used(group));
        let live: Vec<i32> = self.model.sequences().keys().copied().collect();
        assert_eq!(self.book.sequences(), live);
        assert_eq!(self.book.length(), self.model.live().len() as i32);
        let free = self.model.free();
        for n in [i32::MIN, -1, 0, 1, free, free + 1, i32::MAX] {
            assert_eq!(self.book.can_extend(n), (0..=free).contains(&n), "{n} of {free}");
        }
        for (&sequence, held) in self.model.sequences() {
            assert_eq!(self.book.seq_len(sequence).unwrap(), held.tokens.len() as i32);
            assert_eq!(self.book.seq_next(sequence).unwrap(), self.model.next(sequence));
            assert_eq!(self.book.tree_len(sequence).unwrap(), held.tree.len());
            let ranges = self.book.seq_positions(sequence).unwrap();
            assert!(ranges.windows(2).all(|pair| pair[0].end < pair[1].start), "{ranges:?}");
            let positions: Vec<i32> = ranges.into_iter().flatten().collect();
            assert_eq!(positions, self.model.positions_of(sequence));
            let least = self.least(sequence);
            assert_eq!(self.book.rewindable_to(sequence).unwrap(), least, "sequence {sequence}");
        }
    }
}

fn is_known(sequence: i32) -> bool {
    (0..256).contains(&sequence)
}

fn unknown(sequences: &[i32]) -> Vec<Status> {
    match sequences.iter().all(|&sequence| is_known(sequence)) {
        true => Vec::new(),
        false => vec![Status::InvalidArgument],
    }
}

/// Runs operations and compares the results after each.
pub fn replay(config: Config, ops: &[Op]) {
    let mut run = Run::new(&config);
    for op in ops {
        run.apply(op);
        run.check();
    }
}

#[test]
fn equals_lists_of_tokens_over_generated_operations() {
    check(3000, generate, |config, ops| replay(config.clone(), ops));
}

/// The steps of a runner with one sequence, which never needs a mask.
#[test]
fn one_sequence_is_read_without_a_mask() {
    let mut book = CellsBookkeeping::new(200, []);
    let mut next = 0;
    for n in [5, 1, 1, 7, 1] {
        let positions: Vec<i32> = (next..next + n).collect();
        let plan = &book.plan(&positions).unwrap()[0];
        assert_eq!(plan.read, 0..next + n);
        assert_eq!(plan.mask, if n == 1 { MaskPlan::None } else { MaskPlan::Causal });
        book.commit().unwrap();
        next += n;
        // A chain of a tree is accepted, and then a step is rolled back.
        book.propose(0, &[-1, 0, 0, 2, 1]).unwrap();
        book.plan(&[next, next + 1, next + 1, next + 2, next + 2]).unwrap();
        book.commit().unwrap();
        book.commit_tree(0, &[0, 2, 3]).unwrap();
        next += 2;
        book.seq_rm(0, next..i32::MAX).unwrap();
    }
}

#[test]
fn clearing_forgets_the_open_step() {
    let mut book = CellsBookkeeping::new(8, []);
    book.plan(&[0, 1]).unwrap();
    book.clear();
    book.abort();
    assert!(book.commit().is_err());
    assert_eq!((book.length(), book.plans().len()), (0, 0));
    let all: Vec<i32> = (0..8).collect();
    assert_eq!(book.plan(&all).unwrap()[0].read, 0..8);
}
