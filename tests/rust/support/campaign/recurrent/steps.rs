//! Steps: new tokens of sequences, and frontiers of candidates. The outputs are compared with those of each text alone.

use std::collections::BTreeMap;

use etkv_core::{AttendCache, Cache, LayerConfig, RecurrentLayer, Status};

use super::text::{Text, Tree};
use super::{Run, DIM, N_HEADS, SCALE};
use crate::backend::Backend;
use crate::model::is_seen;
use crate::oracle::{self, Row, Rows};
use crate::recurrence::{Kernels, Token};
use crate::Rng;

impl<B: Backend, K: Kernels<B>> Run<B, K> {
    pub(super) fn step(&mut self) {
        if self.texts.values().any(|text| text.tree.n_written < text.tree.parents.len()) {
            return self.frontiers();
        }
        let count = self.count();
        if self.single() {
            let mut text = self.text(0);
            let at = match self.rng.below(4) {
                // Begins another text.
                0 if self.rng.chance(if self.long { 0.05 } else { 0.3 }) => 0,
                0 => self.position(&text),
                _ => text.next(),
            };
            // If windows slide or checkpoints were dropped, only the cache knows to which position the text can be
            // rewound.
            let at = if self.exact { at } else { self.reachable(0, at) };
            if !text.reaches(at) {
                let positions: Vec<i32> = (at..at + count as i32).collect();
                assert_eq!(self.cache.begin(&positions).unwrap_err().status(), Status::Position);
                return;
            }
            if at < text.next() {
                // The marks remain, because they may belong to the new text.
                let marks = text.marks.clone();
                text.cut(at);
                text.marks = marks;
            }
            let tokens: Vec<Token> = (0..count).map(|_| self.token()).collect();
            text.tokens.extend(&tokens);
            let paths: Vec<Vec<Token>> =
                (at as usize..text.tokens.len()).map(|end| text.tokens[..=end].to_vec()).collect();
            let positions: Vec<i32> = (at..at + count as i32).collect();
            if self.forward(&paths, &positions) {
                text.committed(at, self.cache.config().anchors);
                self.texts.insert(0, text);
            }
            return;
        }
        let free: Vec<i32> = (0..self.n_sequences() as i32)
            .filter(|&one| self.text(one).tree.parents.is_empty())
            .collect();
        if free.is_empty() {
            return;
        }
        let mut texts: BTreeMap<i32, Text> = self.texts.clone();
        let mut members: Vec<Vec<i32>> = Vec::new();
        let (mut paths, mut positions) = (Vec::new(), Vec::new());
        let chosen: Vec<i32> = (0..1 + self.rng.below(3)).map(|_| self.rng.pick(&free)).collect();
        let interleaves = self.rng.chance(0.4);
        let mut current = chosen[0];
        for at in 0..count {
            if interleaves || at % 10 == 0 {
                current = self.rng.pick(&chosen);
            }
            let text = texts.get(&current).cloned().unwrap_or_default();
            // Runs a step of one token that all sequences with the same text share.
            let same: Vec<i32> = free
                .iter()
                .copied()
                .filter(|one| {
                    let other = texts.get(one).cloned().unwrap_or_default();
                    other.tokens == text.tokens && other.origin == text.origin
                })
                .collect();
            let shared = same.len() > 1 && self.rng.chance(0.5);
            let of = if shared { same } else { vec![current] };
            let token = self.token();
            for &one in &of {
                texts.entry(one).or_default().tokens.push(token);
            }
            positions.push(text.next());
            paths.push(texts[&of[0]].tokens.clone());
            members.push(of);
        }
        let all: Vec<&[i32]> = members.iter().map(|of| &of[..]).collect();
        self.cache.sequences_mut().unwrap().begin_step_shared(&all).unwrap();
        if self.forward(&paths, &positions) {
            let anchors = self.cache.config().anchors;
            for (sequence, text) in &mut texts {
                let start = self.text(*sequence).next();
                if text.next() > start {
                    text.committed(start, anchors);
                }
            }
            self.texts = texts;
        } else {
            self.cache.sequences_mut().unwrap().cancel_step().unwrap();
        }
    }

    /// Runs the pending candidates of trees, one tree after the other or interleaved.
    fn frontiers(&mut self) {
        let mut waiting: Vec<(i32, std::ops::Range<usize>)> = self
            .texts
            .iter()
            .map(|(&one, text)| (one, text.tree.n_written..text.tree.parents.len()))
            .collect();
        let declares = self.rng.chance(0.4);
        let mut nodes: Vec<(i32, usize)> = Vec::new();
        if declares {
            let left = |waiting: &[(i32, std::ops::Range<usize>)]| -> Vec<usize> {
                (0..waiting.len()).filter(|&at| !waiting[at].1.is_empty()).collect()
            };
            while let all @ [_, ..] = &left(&waiting)[..] {
                let (one, rest) = &mut waiting[self.rng.pick(all)];
                nodes.extend(rest.next().map(|node| (*one, node)));
            }
            let members: Vec<i32> = nodes.iter().map(|&(one, _)| one).collect();
            self.cache.sequences_mut().unwrap().begin_step(&members).unwrap();
        } else {
            nodes.extend(
                waiting.into_iter().flat_map(|(one, rest)| rest.map(move |node| (one, node))),
            );
        }
        let (mut paths, mut positions) = (Vec::new(), Vec::new());
        for &(one, node) in &nodes {
            let text = &self.texts[&one];
            let path = text.tree.path(node);
            positions.push(text.next() + path.len() as i32 - 1);
            let nodes = path.iter().map(|&node| text.tree.tokens[node]);
            paths.push(text.tokens.iter().copied().chain(nodes).collect());
        }
        if self.forward(&paths, &positions) {
            for text in self.texts.values_mut() {
                text.tree.n_written = text.tree.parents.len();
            }
        } else if declares {
            self.cache.sequences_mut().unwrap().cancel_step().unwrap();
        }
    }

    /// Runs a step of tokens, where `paths` are the texts up to each token. Returns whether it was committed.
    pub(super) fn forward(&mut self, paths: &[Vec<Token>], positions: &[i32]) -> bool {
        let (layers, recurrent) =
            (self.cache.config().layers.clone(), self.cache.config().recurrent_layers.clone());
        let n = layers.len() + recurrent.len();
        let stop = (self.aborts && self.rng.chance(0.15)).then(|| self.rng.below(n + 1));
        if let Err(error) = self.cache.begin(positions) {
            assert_eq!(error.status(), Status::Capacity, "{error}");
            return false;
        }
        let tokens: Vec<Token> = paths.iter().map(|path| path[path.len() - 1]).collect();
        for (id, &layer) in recurrent.iter().enumerate().take(stop.unwrap_or(n)) {
            let mut outputs = Rows::new();
            self.cache
                .update_recurrent(id, &mut |spec| {
                    K::planned(id, layer, &tokens, spec, &mut outputs)
                })
                .unwrap();
            let found = difference::<B, K>(id, layer, paths, &outputs);
            self.difference = self.difference.take().or(found);
        }
        let left = stop.unwrap_or(n).saturating_sub(recurrent.len());
        for (id, layer) in layers.iter().enumerate().take(left) {
            self.attend(id, layer, paths);
        }
        match stop {
            None => {
                self.cache.eval(&[]).unwrap();
                self.cache.commit().unwrap();
                true
            }
            Some(_) => {
                self.cache.abort();
                false
            }
        }
    }

    fn attend(&mut self, id: usize, layer: &LayerConfig, paths: &[Vec<Token>]) {
        let row = |token: Token, part: u64| -> Row {
            let mut rng = Rng::new(token * 3 + part + 1000 * id as u64);
            oracle::random_rows(&mut rng, 1, if part == 0 { N_HEADS } else { 1 }, DIM).remove(0)
        };
        let last: Vec<Token> = paths.iter().map(|path| path[path.len() - 1]).collect();
        let part = |part: u64| -> Rows { last.iter().map(|&token| row(token, part)).collect() };
        let (q, k, v) = (part(0), B::tensor(&part(1)), B::tensor(&part(2)));
        let spec = self.cache.update_and_fetch(id, &k, &v).unwrap();
        let out = B::attend(&B::tensor(&q), &spec, SCALE).unwrap();
        drop(spec);
        self.cache.eval(&[&out]).unwrap();
        for ((found, query), path) in B::rows(&out).iter().zip(&q).zip(paths) {
            let last = path.len() as i32 - 1;
            let seen = |at: &usize| is_seen(layer.policy, last, *at as i32);
            let rows = |part: u64| -> Rows {
                (0..path.len()).filter(seen).map(|at| row(path[at], part)).collect()
            };
            let expected = oracle::attention(query, &rows(1), &rows(2), SCALE);
            oracle::assert_close(found, &expected, 5e-5);
        }
    }

    pub(super) fn tree(&mut self) {
        if self.cache.trees().is_none() {
            return;
        }
        let sequence = self.sequence();
        let mut text = self.text(sequence);
        let n = text.tree.parents.len();
        if n == text.tree.n_written && (n == 0 || self.rng.chance(0.4)) {
            let chain = self.rng.chance(0.5);
            let parents: Vec<i32> = (0..1 + self.rng.below(12))
                .map(|new| {
                    let node = (n + new) as i32;
                    if chain {
                        node - 1
                    } else {
                        self.rng.below(node as usize + 1) as i32 - 1
                    }
                })
                .collect();
            let trees = self.cache.trees_mut().unwrap();
            if trees.propose(sequence, &parents).is_ok() {
                text.tree.tokens.extend((0..parents.len()).map(|_| self.token()));
                text.tree.parents.extend(parents);
            }
        } else if n > 0 {
            let mut accepted = Vec::new();
            if text.tree.n_written > 0 && self.rng.chance(0.8) {
                let node = self.rng.below(text.tree.n_written);
                accepted = text.tree.path(node);
            }
            let nodes: Vec<i32> = accepted.iter().map(|&node| node as i32).collect();
            self.cache.trees_mut().unwrap().commit_tree(sequence, &nodes).unwrap();
            let start = text.next();
            let tokens: Vec<Token> = accepted.iter().map(|&node| text.tree.tokens[node]).collect();
            text.tokens.extend(tokens);
            text.tree = Tree::default();
            if text.next() > start {
                text.committed(start, self.cache.config().anchors);
            }
        }
        self.texts.insert(sequence, text);
    }
}

/// Returns the last output that does not have the bits of its text alone.
fn difference<B: Backend, K: Kernels<B>>(
    id: usize,
    layer: RecurrentLayer,
    paths: &[Vec<Token>],
    outputs: &Rows,
) -> Option<String> {
    assert_eq!(outputs.len(), paths.len());
    // The outputs of a text are also those of its prefixes, so only the longest texts run.
    let mut runs: Vec<(&[Token], Rows)> = Vec::new();
    let bits = |row: &Row| -> Vec<u32> { row.iter().flatten().map(|x| x.to_bits()).collect() };
    for (at, path) in paths.iter().enumerate().rev() {
        let known = runs.iter().position(|(text, _)| text.starts_with(path));
        let known = known.unwrap_or_else(|| {
            runs.push((path, K::alone(id, layer, path)));
            runs.len() - 1
        });
        let (found, alone) = (&outputs[at], &runs[known].1[path.len() - 1]);
        if bits(found) != bits(alone) {
            let position = path.len() - 1;
            return Some(format!(
                "layer {id}, token {at} at position {position}: {found:?}, not {alone:?}"
            ));
        }
    }
    None
}
