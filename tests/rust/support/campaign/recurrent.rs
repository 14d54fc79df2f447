//! Caches of models with recurrent layers. They are compared with each sequence run alone from its beginning. In
//! recurrent layers the results must have the same bits, whatever was forked, cut, aborted, saved, shared or proposed
//! earlier.

use std::collections::{BTreeMap, BTreeSet};
use std::marker::PhantomData;

use etkv_core::bookkeeping::BLOCK;
use etkv_core::{
    AttendCache, Cache, CacheConfig, CellsCache, Growth, KvFormat, LayerConfig, LayerPolicy,
    RecurrentLayer, SaveCache, Status,
};

use crate::backend::Backend;
use crate::model::is_seen;
use crate::oracle::{self, Row, Rows};
use crate::recurrence::{Kernels, Plain, Token};
use crate::{for_seeds, Rng};

const N_HEADS: usize = 2;
const DIM: usize = 8;
const SCALE: f32 = 0.3;

/// A tree of candidates: the parent and the token of each node.
#[derive(Debug, Clone, Default)]
struct Tree {
    parents: Vec<i32>,
    tokens: Vec<Token>,
    n_written: usize,
}

impl Tree {
    fn path(&self, node: usize) -> Vec<usize> {
        let up =
            std::iter::successors(Some(node), |&node| usize::try_from(self.parents[node]).ok());
        let mut path: Vec<usize> = up.collect();
        path.reverse();
        path
    }
}

/// The expected state of a sequence.
#[derive(Debug, Clone, Default)]
struct Text {
    tokens: Vec<Token>,
    tree: Tree,
    /// The number of the load from which the sequence's first tokens came, or 0 if they came from steps. Equal texts
    /// of two loads are in different cells.
    origin: u64,
    /// The least position from which every rewind must succeed.
    low: i32,
    /// The positions of all checkpoints that were created. The cache may have dropped some to make room for others.
    checkpoints: BTreeSet<i32>,
    marks: BTreeSet<i32>,
}

impl Text {
    fn next(&self) -> i32 {
        self.tokens.len() as i32
    }

    /// Records that the tokens at or after `start` were committed.
    fn committed(&mut self, start: i32, anchors: i32) {
        let next = self.next();
        let oldest = ((next - 1).max(0) / BLOCK - (anchors - 1)).max(0) * BLOCK;
        self.low = self.low.max(oldest);
        let due: Vec<i32> =
            self.marks.iter().copied().filter(|mark| (start..next).contains(mark)).collect();
        for mark in due {
            self.marks.remove(&mark);
            self.checkpoints.insert(mark);
        }
    }

    fn cut(&mut self, length: i32) {
        self.tokens.truncate(length as usize);
        self.checkpoints.retain(|&position| position <= length);
        self.low = self.low.min(length);
        if length == 0 {
            *self = Self::default();
        }
    }

    fn reaches(&self, position: i32) -> bool {
        (self.low..=self.next()).contains(&position)
            || position == 0
            || self.checkpoints.contains(&position)
    }
}

struct Run<B: Backend, K> {
    rng: Rng,
    cache: CellsCache<B::Store>,
    texts: BTreeMap<i32, Text>,
    fresh: Token,
    /// Whether the model knows each reachable position: no checkpoint was dropped to make room, and no window slides.
    /// Otherwise it knows positions that may be reachable.
    exact: bool,
    /// Whether windows slide.
    slides: bool,
    /// Whether there are few sequences, with long texts and many marks. Otherwise texts are mostly too short for a
    /// rewind to a checkpoint.
    long: bool,
    aborts: bool,
    /// The first output that does not have the bits of its text alone.
    difference: Option<String>,
    kernels: PhantomData<K>,
}

const SEQUENCES: usize = 4;

impl<B: Backend, K: Kernels<B>> Run<B, K> {
    fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let long = rng.chance(0.3);
        let convolution = |rng: &mut Rng| RecurrentLayer::Convolution {
            channels: rng.pick(&[1, 5]),
            width: rng.pick(&[1, 2, 4, 9]),
        };
        let recurrence = |rng: &mut Rng| {
            let k_heads = rng.pick(&[1, 2]);
            RecurrentLayer::Recurrence {
                k_heads,
                heads: k_heads * rng.pick(&[1, 2]),
                k_dim: rng.pick(&[2, 3]),
                v_dim: rng.pick(&[2, 4]),
                channel_decay: rng.chance(0.3),
            }
        };
        let recurrent_layers = (0..1 + rng.below(3)).map(|_| match rng.below(2) {
            0 => convolution(&mut rng),
            _ => recurrence(&mut rng),
        });
        let recurrent_layers: Vec<_> = recurrent_layers.collect();
        let layers: Vec<LayerConfig> = (0..rng.below(3).max(usize::from(long)))
            .map(|_| LayerConfig {
                n_kv_heads: 1,
                k_head_dim: DIM as i32,
                v_head_dim: DIM as i32,
                policy: match rng.below(if long { 4 } else { 6 }) {
                    0 | 1 => {
                        LayerPolicy::Window { window: rng.pick(&[2, 30]), sinks: rng.pick(&[0, 3]) }
                    }
                    2 => LayerPolicy::Chunk { chunk: rng.pick(&[2, 30]) },
                    _ => LayerPolicy::Full,
                },
                values_in_keys: false,
            })
            .collect();
        let capacity = if long { 900 } else { rng.pick(&[150, 400, 900]) };
        let config = CacheConfig {
            layers,
            recurrent_layers,
            anchors: if long { 1 } else { rng.pick(&[1, 2, 2, 3]) },
            checkpoints: rng.pick(if long { &[1, 2, 256] } else { &[0, 2, 256] }),
            capacity,
            max_step_tokens: if long { 80 } else { rng.pick(&[20, 150]) },
            growth: rng.pick(&[
                Growth::Doubling { first: 8 },
                Growth::Step { step: 16 },
                Growth::Exact,
                Growth::Upfront,
            ]),
            ..CacheConfig::uniform(0, 1, 1, 1).stored_as(KvFormat::F32)
        };
        let slides = config.step_limit() < capacity;
        let exact = config.checkpoints == 256 && !slides;
        let cache = match rng.below(3) {
            0 => CellsCache::contiguous(config),
            1 => CellsCache::new(config),
            _ => CellsCache::with_trees(config),
        };
        Self {
            rng,
            cache: cache.unwrap(),
            texts: BTreeMap::new(),
            fresh: 1,
            exact,
            slides,
            long,
            aborts: true,
            difference: None,
            kernels: PhantomData,
        }
    }

    fn single(&self) -> bool {
        self.cache.sequences().is_none()
    }

    fn text(&self, sequence: i32) -> Text {
        self.texts.get(&sequence).cloned().unwrap_or_default()
    }

    /// Returns whether a rewind of a text to this position must succeed.
    fn must_reach(&self, text: &Text, position: i32) -> bool {
        if self.exact {
            return text.reaches(position);
        }
        let least = if self.slides { text.next() } else { text.low };
        position == 0 || (least..=text.next()).contains(&position)
    }

    /// Returns the greatest position at or before `position` to which the sequence can be rewound.
    fn reachable(&self, sequence: i32, position: i32) -> i32 {
        let reachable = match self.cache.sequences() {
            None => self.cache.reachable(position),
            Some(all) => all.seq_reachable(sequence, position),
        };
        let (reachable, text) = (reachable.unwrap(), self.text(sequence));
        assert!(reachable <= position && text.reaches(reachable), "{reachable} of {text:?}");
        let must = (0..=position.min(text.next())).rev().find(|&at| self.must_reach(&text, at));
        assert!(reachable >= must.unwrap_or(0), "{reachable}, not {must:?}, of {text:?}");
        reachable
    }

    fn n_sequences(&self) -> usize {
        if self.long {
            2
        } else {
            SEQUENCES
        }
    }

    fn sequence(&mut self) -> i32 {
        if self.single() {
            0
        } else {
            self.rng.below(self.n_sequences()) as i32
        }
    }

    /// Returns a position to which a text may be cut. Long texts are cut near their end or at a checkpoint.
    fn position(&mut self, text: &Text) -> i32 {
        let checkpoints: Vec<i32> = text.checkpoints.iter().copied().collect();
        match self.rng.below(4) {
            0 | 1 if self.long && !checkpoints.is_empty() => self.rng.pick(&checkpoints),
            0..=2 if self.long => {
                text.next() - self.rng.below(text.tokens.len().min(80) + 1) as i32
            }
            _ => self.rng.below(text.tokens.len() + 1) as i32,
        }
    }

    fn token(&mut self) -> Token {
        self.fresh += 1;
        self.fresh
    }

    /// Returns the number of tokens of the next step: small or large.
    fn count(&mut self) -> usize {
        let most = (self.cache.config().step_limit() as usize).min(200);
        match self.rng.below(3) {
            0 => 1,
            1 if !self.long => 1 + self.rng.below(most.min(8)),
            _ => 1 + self.rng.below(most),
        }
    }

    fn step(&mut self) {
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
    fn forward(&mut self, paths: &[Vec<Token>], positions: &[i32]) -> bool {
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

    fn mark_or_ask(&mut self) {
        let sequence = self.sequence();
        let text = self.text(sequence);
        let first = if self.long { text.tokens.len().saturating_sub(100) } else { 0 };
        let at = (first + self.rng.below(text.tokens.len() + 150 - first)) as i32;
        self.reachable(sequence, at);
        let boundary = at / BLOCK * BLOCK;
        // Whether there is an anchor at the very end of a text depends on the steps that reached the end.
        if boundary == text.next() || self.cache.config().checkpoints == 0 {
            return;
        }
        let marked = match self.single() {
            true => self.cache.mark(at),
            false => self.cache.sequences_mut().unwrap().seq_mark(sequence, at),
        };
        let mut text = text;
        if boundary > text.next() {
            assert_eq!(marked.unwrap(), boundary);
            text.marks.insert(boundary);
            self.texts.insert(sequence, text);
            return;
        }
        match marked {
            Ok(at) => {
                assert_eq!(at, boundary);
                assert!(text.reaches(boundary), "{boundary} of {text:?}");
                if boundary > 0 {
                    text.checkpoints.insert(boundary);
                }
                self.texts.insert(sequence, text);
                // The newest checkpoint is not the one that gives way.
                assert_eq!(self.reachable(sequence, boundary), boundary);
            }
            Err(error) => {
                assert_eq!(error.status(), Status::Position);
                assert!(!self.must_reach(&text, boundary), "{error}: {boundary} of {text:?}");
            }
        }
    }

    fn cut_or_fork(&mut self) {
        let (source, target) = (self.sequence(), self.sequence());
        let mut text = self.text(source);
        let mut at = self.position(&text);
        if self.rng.chance(0.3) {
            // Rounds a position down to the position of an anchor.
            at = at / BLOCK * BLOCK;
        }
        if self.rng.chance(0.3) {
            at = self.reachable(source, at);
        }
        let must_reach = at == self.reachable(source, at);
        if self.single() && self.rng.chance(0.3) {
            let reachable = self.reachable(0, at);
            let reached = self.cache.rewind_to_reachable(at).unwrap();
            assert_eq!(reached, reachable);
            // A rewind to 0 also withdraws the marks.
            if reached < text.next() || reached == 0 {
                text.cut(reached);
            }
            let boundary = at / BLOCK * BLOCK;
            if boundary > reached && reached < at && self.cache.config().checkpoints > 0 {
                text.marks.insert(boundary);
            }
            self.texts.insert(0, text);
            return;
        }
        if self.single() {
            match self.cache.rewind(at) {
                Ok(()) => text.cut(at),
                Err(error) => {
                    assert_eq!(error.status(), Status::Position);
                    assert!(!must_reach, "{error}: {at} of {text:?}");
                }
            }
            self.texts.insert(0, text);
            return;
        }
        let all = self.cache.sequences_mut().unwrap();
        match self.rng.below(5) {
            0 | 1 => {
                let carries = !text.tree.parents.is_empty();
                match all.seq_rm(source, at..i32::MAX) {
                    Ok(()) => text.cut(at),
                    Err(error) => {
                        assert!(carries || !must_reach, "{error}: {at} {text:?}")
                    }
                }
                self.texts.insert(source, text);
            }
            2 if at > 0 => {
                // The middle of a text cannot be removed, and the refusal changes nothing.
                if at < text.next() {
                    assert!(all.seq_rm(source, 0..at).is_err());
                }
            }
            3 if !self.long => {
                all.seq_rm(source, 0..i32::MAX).unwrap();
                self.texts.remove(&source);
            }
            _ => {
                let end = if self.rng.chance(0.5) { i32::MAX } else { at };
                let copied = all.seq_cp(source, target, 0..end);
                let held = self.text(target);
                let at = end.min(text.next());
                if source == target || at == 0 {
                    return;
                }
                let fits = held.tokens.is_empty() && held.tree.parents.is_empty();
                match copied {
                    Ok(()) => {
                        assert!(fits);
                        let low = text.low;
                        text.cut(at);
                        text.low = if at >= low { low } else { at };
                        text.tree = Tree::default();
                        text.marks = held.marks;
                        self.texts.insert(target, text);
                    }
                    Err(error) => {
                        assert!(!fits || !must_reach, "{error}: {at} {text:?}")
                    }
                }
            }
        }
    }

    fn tree(&mut self) {
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

    /// Saves the cache and loads it into a new cache, or saves one sequence and loads it into another cache.
    fn save_and_load(&mut self) {
        if !B::SAVES {
            return;
        }
        if self.single() || self.rng.chance(0.5) {
            let mut rows = Vec::new();
            let snapshot = saved(&mut self.cache, &mut rows);
            let config = self.cache.config().clone();
            let mut cache = match self.cache.kind() {
                "contiguous" => CellsCache::contiguous(config),
                "seq" => CellsCache::new(config),
                _ => CellsCache::with_trees(config),
            }
            .unwrap();
            load(&mut cache, &snapshot, &rows).unwrap();
            let [loaded, saved] = [cache.memory(), self.cache.memory()];
            assert!(saved.shared > 0 || loaded.used == saved.used, "{loaded:?}, not {saved:?}");
            self.cache = cache;
            // Marks of future positions are not saved.
            self.texts.values_mut().for_each(|text| text.marks.clear());
            return;
        }
        let (source, target) = (self.sequence(), self.sequence());
        let (mut text, held) = (self.text(source), self.text(target));
        if text.tokens.is_empty() || !text.tree.parents.is_empty() {
            return;
        }
        if !held.tokens.is_empty() || !held.tree.parents.is_empty() {
            return;
        }
        let mut rows = Vec::new();
        let alone = self.texts.iter().all(|(&one, text)| {
            one == source || (text.tokens.is_empty() && text.tree.parents.is_empty())
        });
        let whole = alone && self.rng.chance(0.5);
        let snapshot = if whole {
            // A file of a whole cache with one sequence.
            saved(&mut self.cache, &mut rows)
        } else {
            let mut one = self.cache.saving_sequence(source).unwrap();
            let snapshot = one.snapshot().unwrap();
            one.read_rows(&snapshot, &mut |_, bytes| {
                rows.extend_from_slice(bytes);
                Ok(())
            })
            .unwrap();
            snapshot
        };
        let mut one = self.cache.saving_sequence(target).unwrap();
        match load(&mut *one, &snapshot, &rows) {
            Ok(()) => {
                text.marks = held.marks;
                drop(one);
                text.origin = self.token();
                self.texts.insert(target, text);
            }
            Err(error) => assert_eq!(error.status(), Status::Capacity, "{error}"),
        }
    }

    /// Freezes the cache, and continues in a cache that is attached to the prefix.
    fn freeze_and_attach(&mut self) {
        let texts: Vec<(&i32, &Text)> = self
            .texts
            .iter()
            .filter(|(_, text)| text.next() > 0 || !text.tree.parents.is_empty())
            .collect();
        let [(0, text)] = texts[..] else {
            return;
        };
        if !text.tree.parents.is_empty() {
            return;
        }
        let mut text = text.clone();
        let prefix = self.cache.sharing().unwrap().freeze().unwrap();
        if self.rng.chance(0.3) {
            return;
        }
        let config = self.cache.config().clone();
        let mut at = self.position(&text);
        if self.rng.chance(0.3) {
            at = self.reachable(0, at);
        }
        let must_reach = at > 0 && at == self.reachable(0, at);
        let mut cache = match self.rng.below(3) {
            0 => CellsCache::contiguous(config),
            1 => CellsCache::new(config),
            _ => CellsCache::with_trees(config),
        }
        .unwrap();
        match cache.sharing().unwrap().attach(&prefix, at) {
            Ok(()) => {
                assert!(at > 0);
                text.cut(at);
                text.marks.clear();
                self.cache = cache;
                self.texts = BTreeMap::from([(0, text)]);
            }
            Err(error) => {
                assert_eq!(error.status(), Status::InvalidArgument, "{error}");
                assert!(!must_reach, "{error}: {at} of {text:?}");
            }
        }
    }

    fn check(&self) {
        let live: Vec<&Text> = self.texts.values().filter(|text| text.next() > 0).collect();
        if let Some(all) = self.cache.sequences() {
            for sequence in 0..SEQUENCES as i32 {
                let text = self.text(sequence);
                assert_eq!(all.seq_next(sequence).unwrap(), text.next());
                let least = all.seq_rewindable_to(sequence).unwrap();
                let is_low = if self.slides { least >= text.low } else { least == text.low };
                assert!(is_low, "{least}: {text:?}");
                self.check_checkpoints(&text, &all.seq_checkpoints(sequence).unwrap());
            }
        } else if let Some(text) = live.first() {
            assert_eq!(self.cache.next_position().unwrap(), text.next());
            self.check_checkpoints(text, &self.cache.checkpoints().unwrap());
        }
        if live.is_empty() && self.texts.values().all(|text| text.tree.parents.is_empty()) {
            assert_eq!(self.cache.memory().used, 0, "nothing stays of removed sequences");
        }
    }

    fn check_checkpoints(&self, text: &Text, found: &[i32]) {
        let known = |position: &i32| text.checkpoints.contains(position);
        assert!(found.iter().all(known), "{found:?}: {text:?}");
        assert!(!self.exact || found.len() == text.checkpoints.len(), "{found:?}: {text:?}");
    }
}

fn saved(cache: &mut dyn Cache, rows: &mut Vec<u8>) -> etkv_core::Snapshot {
    let saving = cache.saving().unwrap();
    let snapshot = saving.snapshot().unwrap();
    saving
        .read_rows(&snapshot, &mut |_, bytes| {
            rows.extend_from_slice(bytes);
            Ok(())
        })
        .unwrap();
    snapshot
}

trait Load {
    fn restore_from(
        &mut self,
        snapshot: &etkv_core::Snapshot,
        rows: &[u8],
    ) -> etkv_core::Result<()>;
}

impl<S: SaveCache + ?Sized> Load for S {
    fn restore_from(
        &mut self,
        snapshot: &etkv_core::Snapshot,
        rows: &[u8],
    ) -> etkv_core::Result<()> {
        let mut at = 0;
        self.restore(snapshot, &mut |_, bytes| {
            bytes.copy_from_slice(&rows[at..at + bytes.len()]);
            at += bytes.len();
            Ok(())
        })
    }
}

fn load(
    cache: &mut (impl SaveCache + ?Sized),
    snapshot: &etkv_core::Snapshot,
    rows: &[u8],
) -> etkv_core::Result<()> {
    let text = serde_json::to_string(snapshot).unwrap();
    let read: etkv_core::Snapshot = serde_json::from_str(&text).unwrap();
    assert_eq!(&read, snapshot);
    cache.restore_from(&read, rows)
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

pub fn recurrent_layers_answer_as_if_each_text_ran_alone<B: Backend>() {
    texts_run_as_if_alone::<B, Plain>(120);
}

/// Runs generated operations of this many seeds, with the layers computed by `K`.
pub fn texts_run_as_if_alone<B: Backend, K: Kernels<B>>(seeds: u64) {
    for_seeds(seeds, |seed| assert_eq!(first_difference::<B, K>(seed), None));
}

/// Runs generated operations of a seed, with the layers computed by `K`, until an output does not have the bits of its
/// text alone. Returns that output, if there is one.
pub fn first_difference<B: Backend, K: Kernels<B>>(seed: u64) -> Option<String> {
    B::run(|| {
        let mut run = Run::<B, K>::new(seed);
        for _ in 0..if run.long { 60 } else { 40 } {
            let operation = match run.long && run.rng.chance(0.5) {
                true => run.rng.pick(&[3, 9, 19, 19]),
                false => run.rng.below(20),
            };
            match operation {
                0 | 1 => run.save_and_load(),
                2 => run.freeze_and_attach(),
                3..=5 => run.cut_or_fork(),
                6..=8 => run.tree(),
                9 | 10 => run.mark_or_ask(),
                11 if run.rng.chance(0.2) => {
                    run.cache.clear(run.rng.chance(0.5)).unwrap();
                    run.texts.clear();
                }
                12 if !run.single() => run.cache.sequences_mut().unwrap().compact().unwrap(),
                _ => run.step(),
            }
            run.check();
            if run.difference.is_some() {
                break;
            }
        }
        run.difference
    })
}

/// A mark that was set before the first step of a text applies to that text, even if the step replaces another text.
pub fn marks_hold_for_the_text_that_begins_next<B: Backend>() {
    B::run(|| {
        let fits = |run: &Run<B, Plain>| run.single() && run.exact;
        let mut run = (0..).map(Run::<B, Plain>::new).find(fits).unwrap();
        run.aborts = false;
        let read = |run: &mut Run<B, Plain>, first: Token, n: i32| {
            let text: Vec<Token> = (first..).take(n as usize).collect();
            let paths: Vec<Vec<Token>> = (1..=text.len()).map(|end| text[..end].to_vec()).collect();
            assert!(run.forward(&paths, &(0..n).collect::<Vec<_>>()));
        };
        read(&mut run, 1000, 20);
        assert_eq!(run.cache.mark(BLOCK + 10).unwrap(), BLOCK);
        read(&mut run, 2000, BLOCK + 20);
        assert_eq!(run.cache.checkpoints().unwrap(), [BLOCK]);
        assert_eq!(run.difference, None);
    });
}

pub fn memory_of_recurrent_layers_matches_estimates<B: Backend>() {
    for_seeds(20, |seed| {
        B::run(|| {
            let mut run = Run::<B, Plain>::new(seed);
            // A step that is rolled back keeps the buffers that it allocated.
            run.aborts = false;
            if run.cache.trees().is_some() {
                return;
            }
            let estimate = |run: &Run<B, Plain>, length: i32| match run.single() {
                true => run.cache.config().estimate(length),
                false => run.cache.config().estimate_shared(length),
            };
            let mut text = Vec::new();
            loop {
                let n = run.count().min(run.cache.config().capacity as usize - text.len());
                if n == 0 {
                    break;
                }
                let start = text.len() as i32;
                text.extend((0..n).map(|_| run.token()));
                let paths: Vec<Vec<Token>> =
                    (start as usize..text.len()).map(|end| text[..=end].to_vec()).collect();
                let positions: Vec<i32> = (start..text.len() as i32).collect();
                let committed = run.forward(&paths, &positions);
                assert_eq!(run.difference, None);
                if !committed {
                    text.truncate(start as usize);
                    continue;
                }
                let (found, length) = (run.cache.memory(), text.len() as i32);
                assert_eq!(
                    found.recurrent_layers,
                    estimate(&run, length).recurrent_layers,
                    "{length}"
                );
                assert!(found.allocated <= found.at_capacity);
            }
        });
    });
}
