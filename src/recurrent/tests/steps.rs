//! Generated steps on a cache.

use std::collections::BTreeMap;

use etkv_core::{AttendCache, Cache, CacheConfig, RecurrentLayer, SeqCache, TreeCache};

use mlx_rs::ops::concatenate;
use mlx_rs::{Array, Dtype};

use super::{by_token, difference, Convolution, Random, Recurrence};
use crate::error::Result;
use crate::kernels::recurrent::{HeadNorm, Numbers, Operands, Rows};
use crate::kernels::{can_run, Function};
use crate::recurrent::{convolve, fused_scan, scan, Activation, RecurrentRows, RecurrentSpec};
use crate::CellsCache;

const TOLERANCE: f64 = 1e-4;
const SCALE: f32 = 0.3;

/// A sequence: its text, and the tree of candidates after it.
#[derive(Debug, Clone, Default)]
struct Text {
    tokens: Vec<u64>,
    tree: Vec<(Option<usize>, u64)>,
}

impl Text {
    /// Returns the text up to a candidate.
    fn path(&self, node: usize) -> Vec<u64> {
        let (parent, token) = self.tree[node];
        let mut path = parent.map_or_else(|| self.tokens.clone(), |parent| self.path(parent));
        path.push(token);
        path
    }
}

struct Run {
    cache: CellsCache,
    recurrence: Recurrence,
    convolution: Convolution,
    texts: BTreeMap<i32, Text>,
    random: Random,
    next: u64,
    worst: f64,
    /// The number of scans that were fused with other operations.
    fused: usize,
    functions: [Function; 2],
}

/// Computes a scan from the columns of one array. Queries and keys are normalized by the kernel. Decays and write
/// strengths are functions. With `as_heads`, values are a separate array. Returns `None` if there is no kernel.
fn scan_fused(
    recurrence: Recurrence,
    [q, k, v, g, beta]: &[Array; 5],
    functions: &[Function; 2],
    as_heads: bool,
    spec: &RecurrentSpec,
) -> Result<Option<(Array, RecurrentRows)>> {
    let n_tokens = q.dim(2);
    let columns = |x: &Array| x.transpose_axes(&[0, 2, 1, 3])?.reshape(&[1, n_tokens, -1]);
    // Queries and keys have the length 1.
    let times = |x: &Array, factor| x.multiply(Array::from_f32(factor));
    let all = [columns(v)?, columns(&times(q, 0.7)?)?, columns(&times(k, 3.0)?)?];
    let x = concatenate(&all, 2)?;
    let [k_heads, heads, k_dim, v_dim] =
        [recurrence.k_heads, recurrence.heads, recurrence.k_dim, recurrence.v_dim]
            .map(|n| n as i32);
    let norm = HeadNorm { eps: 1e-9, factor: 1.0 / (k_dim as f32).sqrt() };
    let rows = |start, norm| Rows::Columns { x: &x, start, norm };
    let queries = rows(heads * v_dim, Some(norm));
    let keys = rows(heads * v_dim + k_heads * k_dim, Some(norm));
    let values = if as_heads { Rows::Heads(v) } else { rows(0, None) };
    let half = times(g, 0.5)?.transpose_axes(&[0, 2, 1])?;
    let strengths = beta.transpose_axes(&[0, 2, 1])?;
    let (halves, strengths) = ([&half], [&strengths]);
    let [decay, strength] = functions;
    let layer = RecurrentLayer::Recurrence { k_heads, heads, k_dim, v_dim, channel_decay: false };
    let operands = Operands {
        rows: [queries, keys, values],
        decays: Numbers::Function(decay, &halves),
        strengths: recurrence.delta.then_some(Numbers::Function(strength, &strengths)),
    };
    // The kernel does not normalize values.
    let refused = Operands { rows: [queries, keys, rows(0, Some(norm))], ..operands };
    assert!(fused_scan(layer, &refused, SCALE, spec, Dtype::Float32)?.is_none());
    fused_scan(layer, &operands, SCALE, spec, Dtype::Float32)
}

impl Run {
    fn new(recurrence: Recurrence, convolution: Convolution, seed: u64) -> Self {
        let Recurrence { k_heads, heads, k_dim, v_dim, channel_decay, .. } = recurrence;
        let [k_heads, heads, k_dim, v_dim] = [k_heads, heads, k_dim, v_dim].map(|size| size as i32);
        let mut config = CacheConfig::uniform(0, 1, 1, 2048);
        config.recurrent_layers = vec![
            RecurrentLayer::Recurrence { k_heads, heads, k_dim, v_dim, channel_decay },
            RecurrentLayer::Convolution {
                channels: convolution.channels as i32,
                width: convolution.width as i32,
            },
        ];
        Self {
            cache: CellsCache::new(config).unwrap(),
            recurrence,
            convolution,
            texts: BTreeMap::new(),
            random: Random::new(seed),
            next: seed << 32,
            worst: 0.0,
            fused: 0,
            functions: ["g", "b"].map(|name| {
                let factor = if name == "g" { 2 } else { 1 };
                Function::new(&format!(
                    "return {factor} * static_cast<float>({name}0[token * {name}0_strides[1] + head * {name}0_strides[2]]);\n"
                ))
            }),
        }
    }

    fn token(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Runs a step with the last token of each of these texts, and compares its outputs.
    fn forward(&mut self, paths: &[Vec<u64>]) -> Result<()> {
        let positions: Vec<i32> = paths.iter().map(|path| path.len() as i32 - 1).collect();
        let tokens: Vec<u64> = paths.iter().map(|path| path[path.len() - 1]).collect();
        let arrays = self.recurrence.arrays(&tokens)?;
        let columns = self.convolution.arrays(&tokens);
        self.cache.begin(&positions)?;
        let mut outs = Vec::new();
        let inputs = self.recurrence.scan_inputs(&arrays);
        let fuses = self.random.below(2) == 0 && !self.recurrence.channel_decay;
        let as_heads = self.random.below(2) == 0;
        let (recurrence, functions, fused) = (self.recurrence, &self.functions, &mut self.fused);
        self.cache.update_recurrent(0, &mut |spec| {
            let made = match fuses {
                true => scan_fused(recurrence, &arrays, functions, as_heads, spec)?,
                false => None,
            };
            *fused += usize::from(made.is_some());
            let (out, rows) = match made {
                Some(made) => made,
                None => scan(&inputs, SCALE, spec, None)?,
            };
            outs.push(out);
            Ok(rows)
        })?;
        let inputs = self.convolution.convolve_inputs(&columns);
        self.cache.update_recurrent(1, &mut |spec| {
            let (out, rows) = convolve(&inputs, spec, None)?;
            outs.push(out);
            Ok(rows)
        })?;
        self.cache.eval(&outs.iter().collect::<Vec<_>>())?;
        self.cache.commit()?;
        let found = [by_token(&outs[0])?, by_token(&outs[1])?];
        for (at, path) in paths.iter().enumerate() {
            // The simple loop runs over the whole text for each token, so only some tokens of a long step are
            // compared.
            if paths.len() > 20 && at % 16 != 0 && at + 3 < paths.len() {
                continue;
            }
            let expected = self.recurrence.expected(path, f64::from(SCALE));
            let of_scan = difference(&found[0][at], &expected);
            let of_convolution = difference(&found[1][at], &self.convolution.expected(path));
            assert!(of_scan < TOLERANCE, "{of_scan} at token {at} of {positions:?}");
            assert!(of_convolution < 1e-5, "{of_convolution} at token {at} of {positions:?}");
            self.worst = self.worst.max(of_scan);
        }
        Ok(())
    }

    /// Appends to one or several sequences.
    fn append(&mut self) -> Result<()> {
        let n_sequences = 1 + self.random.below(3) * self.random.below(2);
        let lengths = [1, 1, 1, 2, 7, 40, 64, 65, 130, 200];
        let mut texts = self.texts.clone();
        let (mut paths, mut members) = (Vec::new(), Vec::new());
        for _ in 0..n_sequences {
            let sequence = self.random.below(4) as i32;
            let mut n = lengths[self.random.below(lengths.len())];
            if n_sequences > 1 {
                n = n.min(70);
            }
            let text = texts.entry(sequence).or_default();
            for _ in 0..n {
                self.next += 1;
                text.tokens.push(self.next);
                paths.push(text.tokens.clone());
                members.push(sequence);
            }
        }
        self.cache.begin_step(&members)?;
        self.forward(&paths)?;
        self.texts = texts;
        Ok(())
    }

    /// Runs a tree after a sequence, and commits a chain of it.
    fn tree(&mut self) -> Result<()> {
        let sequence = self.random.below(4) as i32;
        let mut text = self.texts.get(&sequence).cloned().unwrap_or_default();
        for _ in 0..1 + self.random.below(2) {
            let n = 1 + self.random.below(9);
            let (first, mut parents) = (text.tree.len(), Vec::new());
            for node in first..first + n {
                let parent = self.random.below(node + 1).checked_sub(1);
                text.tree.push((parent, self.token()));
                parents.push(parent.map_or(-1, |parent| parent as i32));
            }
            self.cache.propose(sequence, &parents)?;
            let paths: Vec<Vec<u64>> = (first..first + n).map(|node| text.path(node)).collect();
            self.forward(&paths)?;
        }
        let mut accepted = Vec::new();
        let mut parent = None;
        for node in 0..text.tree.len() {
            if text.tree[node].0 == parent && self.random.below(3) > 0 {
                accepted.push(node as i32);
                text.tokens.push(text.tree[node].1);
                parent = Some(node);
            }
        }
        text.tree.clear();
        self.cache.commit_tree(sequence, &accepted)?;
        self.texts.insert(sequence, text);
        Ok(())
    }

    /// Cuts a sequence, or replaces one by a fork of another.
    fn cut_or_fork(&mut self) -> Result<()> {
        let (source, target) = (self.random.below(4) as i32, self.random.below(4) as i32);
        let text = self.texts.get(&source).cloned().unwrap_or_default();
        let length = text.tokens.len() as i32;
        if source == target {
            let ask = length - self.random.below(70) as i32;
            let at = self.cache.seq_reachable(source, ask.max(0))?;
            self.cache.seq_rm(source, at..i32::MAX)?;
            self.texts.entry(source).or_default().tokens.truncate(at as usize);
        } else {
            self.cache.seq_rm(target, 0..i32::MAX)?;
            self.cache.seq_cp(source, target, 0..i32::MAX)?;
            self.texts.insert(target, text);
        }
        Ok(())
    }
}

fn generated(recurrence: Recurrence, convolution: Convolution, seed: u64) -> f64 {
    crate::mlx::run(|| {
        let mut run = Run::new(recurrence, convolution, seed);
        for _ in 0..14 {
            if run.texts.values().any(|text| text.tokens.len() > 420) {
                run.cache.clear(false)?;
                run.texts.clear();
            }
            match run.random.below(4) {
                0 => run.cut_or_fork()?,
                1 => run.tree()?,
                _ => run.append()?,
            }
        }
        let supported = can_run()? && recurrence.k_dim % 8 == 0 && !recurrence.channel_decay;
        assert_eq!(run.fused > 0, supported, "{recurrence:?}");
        Ok(run.worst)
    })
    .unwrap()
}

/// The largest difference is 5e-5. It occurs at log decays down to -88, because their sums in a block have few bits
/// after the point.
#[test]
fn generated_steps_are_near_the_plain_loop() {
    let mut random = Random::new(3);
    for case in 0..24 {
        let mut dim = || [4, 6, 16, 20, 32, 40][random.below(6)];
        let dims = [dim(), dim()];
        let k_heads = 1 + random.below(2);
        let recurrence = Recurrence {
            k_heads,
            heads: k_heads * (1 + random.below(3)),
            k_dim: dims[0],
            v_dim: dims[1],
            channel_decay: case % 3 == 0,
            delta: case % 4 != 1,
            repeats: false,
            decay: [0.3, 0.05, 3.0, 100.0][case % 4],
        };
        let convolution = Convolution {
            channels: 1 + random.below(40),
            width: 1 + random.below(6),
            bias: case % 2 == 0,
            activation: [Activation::None, Activation::Silu][random.below(2)],
        };
        let worst = generated(recurrence, convolution, case as u64 + 1);
        eprintln!("case {case}: {worst:.1e}");
    }
}

/// Powers of the system's matrix would exceed the precision of float32.
#[test]
fn repeated_keys_stay_precise() {
    let recurrence = Recurrence {
        k_heads: 2,
        heads: 2,
        k_dim: 16,
        v_dim: 8,
        channel_decay: false,
        delta: true,
        repeats: true,
        decay: 1e-3,
    };
    let convolution =
        Convolution { channels: 3, width: 4, bias: false, activation: Activation::None };
    for seed in 50..54 {
        generated(recurrence, convolution, seed);
        generated(Recurrence { channel_decay: true, ..recurrence }, convolution, seed);
    }
}
