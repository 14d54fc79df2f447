//! Generated operations on sequences in a pool of cells, and on trees after them.

mod checks;
mod operations;

use std::collections::BTreeSet;
use std::ops::Range;

use etkv_core::bookkeeping::{CellsBookkeeping, MaskPlan, Move, Window};
use etkv_core::{LayerPolicy, Status};
use etkv_tests::kept::WindowModel;
use etkv_tests::model::{Members, Model};
use etkv_tests::shrink::check;
use etkv_tests::slots::{Id, LayerGroupSlots};

use self::operations::generate;
pub use self::operations::{Config, Op};
use super::agreed;
use super::contiguous::window;

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
    check(1500, generate, |config, ops| replay(config.clone(), ops));
}

/// The steps of a runner with one sequence. None of them needs a mask.
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
