use std::collections::BTreeMap;

use super::cache::{by_token, in_a_row, path_to, tree, Cache};
use super::reference::Text;
use crate::attention::synthetic::{Random, Threads};
use crate::parallel::{Parallel, Serial};
use crate::recurrent::scan::scan_with;
use crate::recurrent::{Scan, ScanInputs, Workspace};
use crate::simd::Instructions;
use crate::tensor::{Dtype, Tensor};

/// The bits of outputs, of rows and of anchors.
type Bits = (Vec<Vec<u32>>, Vec<Vec<u32>>, BTreeMap<usize, Vec<u32>>);

/// A text that is run on a cache in steps.
struct Run<'a> {
    text: &'a Text,
    cache: Cache,
    workspace: Workspace,
    instructions: Instructions,
    parallel: &'a dyn Parallel,
    /// The token of the text at each position.
    tokens: Vec<usize>,
    /// The output at each position.
    outs: Vec<Vec<f32>>,
}

/// Returns a tensor `[1, heads, T, dim]` from rows `[heads, dim]`.
fn tensor(rows: &[Vec<f32>], tokens: &[usize], heads: usize) -> Tensor {
    let (n, dim) = (tokens.len(), rows[0].len() / heads);
    let mut values = Vec::<f32>::new();
    for head in 0..heads {
        tokens.iter().for_each(|&t| values.extend(&rows[t][head * dim..][..dim]));
    }
    Tensor::new([1, heads as i32, n as i32, dim as i32], values).unwrap()
}

impl<'a> Run<'a> {
    fn new(text: &'a Text, parallel: &'a dyn Parallel) -> Self {
        let Scan { k_heads, heads, k_dim, v_dim, channel_decay, .. } = text.scan;
        let row = v_dim + if channel_decay { k_dim } else { 1 };
        Self {
            text,
            cache: Cache::of_scan(k_heads, k_dim, heads, row, k_dim * v_dim),
            workspace: Workspace::new(),
            instructions: Instructions::best(),
            parallel,
            tokens: Vec::new(),
            outs: Vec::new(),
        }
    }

    /// Runs a step of tokens of the text with these parents. Keeps one path of the step. Returns the outputs
    /// of all tokens.
    fn step(
        &mut self,
        tokens: &[usize],
        parents: &[Option<usize>],
        keep: usize,
        random: &mut Random,
    ) -> Vec<Vec<f32>> {
        let Self { text, cache, workspace, .. } = self;
        let Scan { k_heads, heads, v_dim, .. } = text.scan;
        let mut planned = cache.plan(parents, random);
        let path = planned.paths[keep].clone();
        cache.store(&mut planned, &path, random);
        let [q, k] = [&text.q, &text.k].map(|rows| tensor(rows, tokens, k_heads));
        let [v, g, beta] = [&text.v, &text.g, &text.beta].map(|rows| tensor(rows, tokens, heads));
        let inputs = ScanInputs { q: &q, k: &k, v: &v, g: &g, beta: text.delta.then_some(&beta) };
        let spec = cache.spec(&planned);
        let mut out = vec![f32::NAN; heads * tokens.len() * v_dim];
        let start = out.as_mut_ptr().cast();
        // SAFETY: the vector has room for the outputs, and the rows are dropped before the next step.
        let rows = unsafe {
            let (instructions, parallel) = (self.instructions, self.parallel);
            scan_with(
                instructions,
                &text.scan,
                &inputs,
                &spec,
                start,
                Dtype::F32,
                workspace,
                parallel,
            )
        }
        .unwrap();
        cache.commit(&planned, &rows);
        let shape = [1, heads as i32, tokens.len() as i32, v_dim as i32];
        let outs = by_token(&Tensor::new(shape, out).unwrap());
        for &token in &path {
            self.tokens.push(tokens[token]);
            self.outs.push(outs[token].clone());
        }
        outs
    }

    /// Appends the next `n` tokens of the text.
    fn append(&mut self, n: usize, random: &mut Random) {
        let tokens: Vec<usize> = (self.tokens.len()..self.tokens.len() + n).collect();
        self.step(&tokens, &in_a_row(n), n - 1, random);
    }

    fn rewind(&mut self, n: usize) {
        self.cache.rewind(n);
        self.tokens.truncate(n);
        self.outs.truncate(n);
    }

    fn bits(&self) -> Bits {
        let outs = self.outs.iter().map(|row| row.iter().map(|x| x.to_bits()).collect());
        let (rows, anchors) = self.cache.bits();
        (outs.collect(), rows, anchors)
    }
}

fn scan(heads: [usize; 2], dims: [usize; 2], channel_decay: bool) -> Scan {
    let [k_heads, heads] = heads;
    let [k_dim, v_dim] = dims;
    Scan { k_heads, heads, k_dim, v_dim, channel_decay, scale: 1.0 / (k_dim as f32).sqrt() }
}

/// Returns the largest difference, relative to the largest number.
fn difference(outs: &[f32], expected: &[f64]) -> f64 {
    let scale = expected.iter().fold(1e-3f64, |most, x| most.max(x.abs()));
    let pairs = outs.iter().zip(expected);
    let worst = pairs.fold(0f64, |most, (&x, y)| {
        let difference = (f64::from(x) - y).abs();
        if difference.is_nan() {
            f64::INFINITY
        } else {
            most.max(difference)
        }
    });
    assert_eq!(outs.len(), expected.len());
    worst / scale
}

#[test]
fn every_shape_is_near_the_plain_loop() {
    let mut random = Random::new(1);
    let mut worst = 0f64;
    for case in 0..40 {
        let dims = [4, 6, 8, 16, 20, 64, 128];
        let mut dim = || dims[random.integer(0, 6)];
        let dims = [dim(), dim()];
        let k_heads = random.integer(1, 3);
        let heads = [k_heads, k_heads * random.integer(1, 3)];
        let n = [1, 2, 7, 63, 64, 65, 128, 129, 200, 300][random.integer(0, 9)];
        let scan = scan(heads, dims, case % 3 == 0);
        let text = Text::new(scan, case % 4 < 2, n, &mut random);
        let (outs, states) = text.expected(&(0..n).collect::<Vec<_>>());
        for instructions in Instructions::available() {
            let mut run = Run::new(&text, &Serial);
            run.instructions = instructions;
            while run.tokens.len() < n {
                let left = n - run.tokens.len();
                run.append(random.integer(1, left), &mut random);
            }
            for (out, expected) in run.outs.iter().zip(&outs) {
                worst = worst.max(difference(out, expected));
            }
            let (_, _, anchors) = run.bits();
            assert_eq!(anchors.len(), (n - 1) / 64, "{scan:?} {n}");
            for (&at, anchor) in &anchors {
                let anchor: Vec<f32> = anchor.iter().map(|&x| f32::from_bits(x)).collect();
                worst = worst.max(difference(&anchor, &states[at / 64]));
            }
            assert!(worst < 2e-5, "{scan:?} {n} {instructions:?}: {worst}");
        }
    }
    // A bound that is much larger than all errors would not detect anything.
    assert!(worst > 5e-7, "{worst}");
}

/// The results of a text have the same bits for any division into steps.
fn same_bits(scan: Scan, delta: bool, instructions: Instructions, rounds: usize, seed: u64) {
    const N: usize = 300;
    let mut random = Random::new(seed);
    let text = Text::new(scan, delta, N, &mut random);
    let mut whole = Run::new(&text, &Serial);
    whole.instructions = instructions;
    whole.append(N, &mut random);
    let whole = whole.bits();
    for round in 0..rounds {
        let mut run = Run::new(&text, if round % 8 == 7 { &Threads(2) } else { &Serial });
        run.instructions = instructions;
        let most = [1, 2, 5, 20, 70, 300][round % 6];
        let rewinds = if round % 2 == 1 { random.integer(1, 4) } else { 0 };
        for left in (0..=rewinds).rev() {
            while run.tokens.len() < N {
                let n = random.integer(1, most.min(N - run.tokens.len()));
                run.append(n, &mut random);
                if left > 0 && random.integer(0, N / most) == 0 {
                    break;
                }
            }
            if left > 0 {
                // Often rewinds to a boundary of blocks.
                let n = random.integer(0, run.tokens.len());
                run.rewind(if random.integer(0, 2) == 0 { n / 64 * 64 } else { n });
            }
        }
        let (outs, rows, anchors) = run.bits();
        let wrong = (0..N).find(|&at| outs[at] != whole.0[at] || rows[at] != whole.1[at]);
        assert_eq!(wrong, None, "{scan:?} {delta} {instructions:?}, round {round}");
        assert!(anchors == whole.2, "{scan:?} {delta} {instructions:?}, round {round}");
    }
}

#[test]
fn bits_do_not_depend_on_steps() {
    same_bits(scan([1, 2], [16, 32], false), true, Instructions::best(), 200, 2);
}

#[test]
fn bits_do_not_depend_on_steps_in_any_form() {
    let mut seed = 3;
    for instructions in Instructions::available() {
        for (dims, channel_decay, delta) in [
            ([16, 32], true, true),
            ([16, 16], false, false),
            ([6, 20], false, true),
            ([20, 6], true, false),
            ([32, 128], false, true),
            ([128, 64], false, false),
            ([64, 208], true, true),
        ] {
            same_bits(scan([1, 2], dims, channel_decay), delta, instructions, 8, seed);
            seed += 1;
        }
    }
}

#[test]
fn threads_and_their_parts_give_the_same_bits() {
    let mut random = Random::new(40);
    for (heads, dims) in [([1, 1], [128, 128]), ([2, 6], [64, 128]), ([1, 3], [128, 80])] {
        let text = Text::new(scan(heads, dims, false), true, 150, &mut random);
        let mut bits = Vec::new();
        for threads in [&Serial as &dyn Parallel, &Threads(2), &Threads(5)] {
            let mut run = Run::new(&text, threads);
            for n in [70, 1, 1, 40, 1, 37] {
                run.append(n, &mut random);
            }
            bits.push(run.bits());
        }
        assert!(bits[1] == bits[0] && bits[2] == bits[0], "{heads:?} {dims:?}");
    }
}

/// The results of each node of a tree have the same bits as those of its path alone.
#[test]
fn trees_have_the_bits_of_their_paths() {
    let mut random = Random::new(5);
    for case in 0..40 {
        let scan = scan([1, 2], [16, 32], case % 4 == 3);
        let text = Text::new(scan, case % 3 > 0, 260, &mut random);
        let before = [0, 1, 40, 62, 63, 64, 65, 100, 126, 128][case % 10];
        let mut run = Run::new(&text, &Serial);
        if before > 0 {
            run.append(before, &mut random);
        }
        let n = [6, 30, 130][case % 3];
        let parents = tree(n, 6, &mut random);
        let tokens: Vec<usize> = (0..n).map(|t| before + t).collect();
        let keep = random.integer(0, n - 1);
        let start = run.cache.clone();
        let outs = run.step(&tokens, &parents, keep, &mut random);
        for _ in 0..6 {
            let node = random.integer(0, n - 1);
            let path = path_to(node, &parents);
            let mut alone = Run::new(&text, &Serial);
            alone.cache = start.clone();
            for &t in &path {
                let out = alone.step(&[before + t], &[None], 0, &mut random);
                let same = out[0].iter().zip(&outs[t]).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "case {case}, node {t}");
            }
        }
        // The text after the kept path continues like the path alone.
        let mut alone = Run::new(&text, &Serial);
        alone.cache = start;
        let path = run.tokens[before..].to_vec();
        path.iter().for_each(|&t| drop(alone.step(&[t], &[None], 0, &mut random)));
        let more: Vec<usize> = (0..100).collect();
        run.step(&more, &in_a_row(100), 99, &mut random);
        alone.step(&more, &in_a_row(100), 99, &mut random);
        assert!(run.cache.bits() == alone.cache.bits(), "case {case}");
    }
}

/// A decay to zero clears the state, and later results are exact.
#[test]
fn decays_to_zero_forget() {
    let mut random = Random::new(6);
    for channel_decay in [false, true] {
        let mut text = Text::new(scan([1, 2], [16, 16], channel_decay), true, 100, &mut random);
        for (t, x) in [(5, f32::NEG_INFINITY), (50, -1e30), (64, f32::NEG_INFINITY), (80, -90.0)] {
            text.g[t].fill(x);
        }
        let mut run = Run::new(&text, &Serial);
        run.append(100, &mut random);
        let path: Vec<usize> = (0..100).collect();
        for (out, expected) in run.outs.iter().zip(text.expected(&path).0) {
            let difference = difference(out, &expected);
            assert!(difference < 1e-4, "{difference}");
        }
    }
}
