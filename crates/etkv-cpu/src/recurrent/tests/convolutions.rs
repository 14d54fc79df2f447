use super::cache::{by_token, in_a_row, path_to, tree, Cache};
use super::reference::convolved;
use crate::attention::synthetic::{Random, Threads};
use crate::parallel::{Parallel, Serial};
use crate::recurrent::convolve::convolve_with;
use crate::recurrent::{Activation, ConvolveInputs, Workspace};
use crate::simd::Instructions;
use crate::tensor::{Dtype, Tensor};

struct Run<'a> {
    columns: &'a [Vec<f32>],
    weight: &'a [f32],
    bias: Option<&'a [f32]>,
    activation: Activation,
    instructions: Instructions,
    parallel: &'a dyn Parallel,
    cache: Cache,
    workspace: Workspace,
    outs: Vec<Vec<f32>>,
}

impl Run<'_> {
    fn step(
        &mut self,
        tokens: &[usize],
        parents: &[Option<usize>],
        keep: usize,
        random: &mut Random,
    ) -> Vec<Vec<f32>> {
        let (channels, n) = (self.columns[0].len(), tokens.len());
        let width = self.weight.len() / channels;
        let mut planned = self.cache.plan(parents, random);
        let path = planned.paths[keep].clone();
        self.cache.store(&mut planned, &path, random);
        let columns = self.columns;
        let values: Vec<f32> =
            (0..channels).flat_map(|c| tokens.iter().map(move |&t| columns[t][c])).collect();
        let x = Tensor::new([1, channels as i32, n as i32, 1], values).unwrap();
        let shape = [1, 1, channels as i32, width as i32];
        let weight = Tensor::new(shape, self.weight.to_vec()).unwrap();
        let shape = [1, 1, 1, channels as i32];
        let bias = self.bias.map(|bias| Tensor::new(shape, bias.to_vec()).unwrap());
        let inputs = ConvolveInputs {
            x: &x,
            weight: &weight,
            bias: bias.as_ref(),
            activation: self.activation,
        };
        let spec = self.cache.spec(&planned);
        let mut out = vec![f32::NAN; channels * n];
        let start = out.as_mut_ptr().cast();
        let (set, workspace) = (self.instructions, &mut self.workspace);
        // SAFETY: the vector has room for the outputs, and the columns are dropped before the next step.
        let rows = unsafe {
            convolve_with(set, &inputs, &spec, start, Dtype::F32, workspace, self.parallel)
        }
        .unwrap();
        self.cache.commit(&planned, &rows);
        let outs = by_token(&Tensor::new([1, channels as i32, n as i32, 1], out).unwrap());
        path.iter().for_each(|&t| self.outs.push(outs[t].clone()));
        outs
    }

    fn append(&mut self, n: usize, random: &mut Random) {
        let at = self.outs.len();
        let tokens: Vec<usize> = (at..at + n).collect();
        self.step(&tokens, &in_a_row(n), n - 1, random);
    }
}

#[test]
fn bits_do_not_depend_on_steps_and_are_near_the_plain_loop() {
    const N: usize = 90;
    let mut random = Random::new(1);
    let mut worst = 0f64;
    for case in 0..24 {
        let channels = [1, 3, 16, 40, 300, 520][random.integer(0, 5)];
        let width = random.integer(1, 5);
        let columns: Vec<Vec<f32>> =
            (0..N).map(|_| (0..channels).map(|_| 3.0 * random.number()).collect()).collect();
        let (weight, bias) = (random.numbers(channels * width), random.numbers(channels));
        for instructions in Instructions::available() {
            let new = |parallel| Run {
                columns: &columns,
                weight: &weight,
                bias: (case % 3 > 0).then_some(&bias[..]),
                activation: [Activation::None, Activation::Silu][case % 2],
                instructions,
                parallel,
                cache: Cache::of_convolution(channels, width - 1),
                workspace: Workspace::new(),
                outs: Vec::new(),
            };
            let mut whole = new(&Serial);
            whole.append(N, &mut random);
            let path: Vec<usize> = (0..N).collect();
            let silu = whole.activation == Activation::Silu;
            let expected = convolved(&columns, &path, &weight, whole.bias, silu);
            for (out, expected) in whole.outs.iter().zip(&expected) {
                for (&x, y) in out.iter().zip(expected) {
                    worst = worst.max((f64::from(x) - y).abs() / y.abs().max(1.0));
                }
            }
            assert!(worst < 2e-6, "{worst}");
            for round in 0..6 {
                let mut run = new(if round % 2 == 0 { &Serial } else { &Threads(2) });
                let most = [1, 3, 40][round % 3];
                let mut rewinds = 3;
                while run.outs.len() < N {
                    let n = random.integer(1, most.min(N - run.outs.len()));
                    run.append(n, &mut random);
                    if rewinds > 0 && random.integer(0, 9) == 0 {
                        rewinds -= 1;
                        let n = random.integer(0, run.outs.len());
                        run.cache.rewind(n);
                        run.outs.truncate(n);
                    }
                }
                assert!(run.outs == whole.outs && run.cache.bits() == whole.cache.bits());
            }
        }
    }
    assert!(worst > 1e-8, "{worst}");
}

#[test]
fn trees_have_the_bits_of_their_paths() {
    let mut random = Random::new(2);
    let (channels, width) = (35, 4);
    let columns: Vec<Vec<f32>> = (0..60).map(|_| random.numbers(channels)).collect();
    let weight = random.numbers(channels * width);
    for case in 0..30 {
        let mut run = Run {
            columns: &columns,
            weight: &weight,
            bias: None,
            activation: Activation::Silu,
            instructions: Instructions::best(),
            parallel: &Serial,
            cache: Cache::of_convolution(channels, width - 1),
            workspace: Workspace::new(),
            outs: Vec::new(),
        };
        let (before, n) = ([0, 1, 2, 5][case % 4], [5, 30][case % 2]);
        if before > 0 {
            run.append(before, &mut random);
        }
        let parents = tree(n, 4, &mut random);
        let tokens: Vec<usize> = (before..before + n).collect();
        let outs = run.step(&tokens, &parents, n - 1, &mut random);
        for (node, out) in outs.iter().enumerate() {
            let path = path_to(node, &parents).into_iter().map(|t| before + t);
            let path: Vec<usize> = (0..before).chain(path).collect();
            let expected = convolved(&columns, &path, &weight, None, true);
            for (&x, y) in out.iter().zip(&expected[path.len() - 1]) {
                assert!((f64::from(x) - y).abs() < 1e-6, "case {case}, node {node}");
            }
        }
    }
}
