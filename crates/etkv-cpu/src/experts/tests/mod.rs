//! Experts of random sizes, formats, routings and thread counts, compared with simple loops in float64.

mod activations;
mod reference;
mod refusals;

use super::activation::{Activation, Function};
use super::run::route_with;
use super::sizes::Experts;
use super::workspace::Workspace;
use crate::attention::synthetic::{Random, Threads};
use crate::linear::tests::FORMATS;
use crate::linear::{Scales, WeightFormat};
use crate::simd::Instructions;
use reference::Layer;

const FUNCTIONS: [Function; 5] =
    [Function::Silu, Function::Gelu, Function::GeluTanh, Function::Relu, Function::Relu2];

/// Returns SwiGLU.
pub(super) fn swiglu() -> Activation {
    Activation {
        function: Function::Silu,
        gated: true,
        alpha: 1.0,
        limit: f32::INFINITY,
        offset: 0.0,
    }
}

/// Returns the outputs of a layer for tokens with `k` experts each.
fn run(layer: &Layer, x: &[f32], chosen: &[i64], factors: &[f32]) -> Vec<f32> {
    run_with(Instructions::best(), layer, x, chosen, factors, 2)
}

fn run_with(
    instructions: Instructions,
    layer: &Layer,
    x: &[f32],
    chosen: &[i64],
    factors: &[f32],
    threads: usize,
) -> Vec<f32> {
    let mut out = vec![f32::NAN; x.len()];
    let indices: Vec<u8> = chosen.iter().flat_map(|index| index.to_le_bytes()).collect();
    let k = chosen.len() / (x.len() / layer.experts.hidden);
    let inputs = layer.inputs(x, k, &indices, factors);
    let mut workspace = Workspace::default();
    route_with(instructions, &layer.experts, &inputs, &mut out, &mut workspace, &Threads(threads))
        .unwrap();
    out
}

/// Returns the largest error of an output, relative to the size of the outputs.
fn error(found: &[f32], expected: &[f64]) -> f64 {
    let size = (expected.iter().map(|x| x * x).sum::<f64>() / expected.len() as f64).sqrt();
    let errors = found.iter().zip(expected).map(|(found, x)| (f64::from(*found) - x).abs());
    errors.fold(0.0, f64::max) / size.max(1e-30)
}

#[test]
fn outputs_are_those_of_plain_loops() {
    let mut random = Random::new(1);
    for case in 0..200 {
        // A third of the layers have two formats.
        let mut weights = [FORMATS[case % FORMATS.len()]; 2];
        if random.below(3) == 0 {
            weights[1] = FORMATS[random.below(FORMATS.len())];
        }
        let [unit, second_unit] = weights.map(WeightFormat::unit);
        let gated = random.below(3) != 0;
        let limited = gated && random.below(3) == 0;
        let function = FUNCTIONS[random.below(FUNCTIONS.len())];
        let experts = Experts {
            n_experts: 1 + random.below(9),
            hidden: unit
                * (1 + random.below(if unit == 1 { 90 } else { 160_usize.div_ceil(unit) })),
            intermediate: second_unit.max(16)
                * (1 + random.below(if second_unit < 256 { 4 } else { 1 })),
            weights,
            activation: Activation {
                function,
                gated,
                alpha: if limited && function == Function::Silu { 1.702 } else { 1.0 },
                limit: if limited { 0.7 } else { f32::INFINITY },
                offset: if limited { 1.0 } else { 0.0 },
            },
        };
        let layer = Layer::new(experts, random.below(2) == 0, &mut random);
        // In some steps, few experts get most of the tokens, and a token may have an expert several times.
        let (n_tokens, k) = (1 + random.below(40), 1 + random.below(4));
        let most = 1 + random.below(experts.n_experts);
        let chosen: Vec<i64> = (0..n_tokens * k).map(|_| random.below(most) as i64).collect();
        let x = random.numbers(n_tokens * experts.hidden);
        let factors = random.numbers(n_tokens * k);
        let expected = layer.outputs(&x, k, &chosen, &factors);
        for instructions in Instructions::available() {
            let found = run_with(instructions, &layer, &x, &chosen, &factors, 1 + case % 3);
            // When inputs are rounded to 8 bits, a tie may be rounded in the other direction than in the
            // reference.
            let floats = weights.iter().all(|format| format.group().is_none());
            let most = if floats { 2e-5 } else { 0.05 };
            let error = error(&found, &expected);
            assert!(error < most, "case {case}, {instructions:?}, {experts:?}: {error}");
        }
    }
}

#[test]
fn an_output_depends_on_its_token_alone() {
    let mut random = Random::new(2);
    for format in FORMATS {
        let (weights, unit) = ([format; 2], format.unit());
        let experts = Experts {
            n_experts: 6,
            hidden: 128.max(unit),
            intermediate: 192.max(unit),
            weights,
            activation: swiglu(),
        };
        let layer = Layer::new(experts, true, &mut random);
        let (n_tokens, k) = (70, 3);
        let chosen: Vec<i64> = (0..n_tokens * k).map(|_| random.below(6) as i64).collect();
        let (x, factors) =
            (random.numbers(n_tokens * experts.hidden), random.numbers(n_tokens * k));
        for instructions in Instructions::available() {
            let all = run_with(instructions, &layer, &x, &chosen, &factors, 4);
            for cut in [1, 3, 64] {
                let mut cuts = Vec::new();
                for begin in (0..n_tokens).step_by(cut) {
                    let end = n_tokens.min(begin + cut);
                    let rows = &x[begin * experts.hidden..end * experts.hidden];
                    let (chosen, factors) =
                        (&chosen[begin * k..end * k], &factors[begin * k..end * k]);
                    cuts.extend(run_with(instructions, &layer, rows, chosen, factors, 1 + cut % 3));
                }
                assert!(bits(&cuts) == bits(&all), "{weights:?}, {instructions:?}, steps of {cut}");
            }
        }
    }
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn what_is_not_finite_stays_so_and_touches_no_other_token() {
    let mut random = Random::new(3);
    for format in FORMATS {
        let (weights, width) = ([format; 2], 64.max(format.unit()));
        for function in FUNCTIONS {
            let activation = Activation { function, ..swiglu() };
            let experts =
                Experts { n_experts: 3, hidden: width, intermediate: width, weights, activation };
            let layer = Layer::new(experts, false, &mut random);
            let (n_tokens, k) = (20, 2);
            let chosen: Vec<i64> = (0..n_tokens * k).map(|_| random.below(3) as i64).collect();
            let factors = random.numbers(n_tokens * k);
            let good = random.numbers(n_tokens * experts.hidden);
            let expected = run(&layer, &good, &chosen, &factors);
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = good.clone();
                x[7 * experts.hidden + 13] = bad;
                let found = run(&layer, &x, &chosen, &factors);
                let rows = found.chunks(width).zip(expected.chunks(width));
                for (token, (found, expected)) in rows.enumerate() {
                    let what = format!("{weights:?}, {function:?}, token {token}");
                    match token {
                        7 => assert!(found.iter().any(|x| !x.is_finite()), "{what}"),
                        _ => assert!(bits(found) == bits(expected), "{what}"),
                    }
                }
            }
        }
    }
}

#[test]
fn a_step_of_one_shape_allocates_nothing() {
    let mut random = Random::new(4);
    let experts = Experts {
        n_experts: 4,
        hidden: 64,
        intermediate: 32,
        weights: [WeightFormat::Int4 { group: 32, scales: Scales::Bf16 }; 2],
        activation: swiglu(),
    };
    let layer = Layer::new(experts, false, &mut random);
    let x = random.numbers(9 * 64);
    let indices: Vec<u8> = (0..18i64).flat_map(|at| (at % 4).to_le_bytes()).collect();
    let factors = random.numbers(18);
    let (mut workspace, mut out) = (Workspace::default(), vec![0.0; x.len()]);
    let mut places = Vec::new();
    for _ in 0..3 {
        let inputs = layer.inputs(&x, 2, &indices, &factors);
        let parallel = crate::parallel::Serial;
        route_with(Instructions::best(), &experts, &inputs, &mut out, &mut workspace, &parallel)
            .unwrap();
        places.push((workspace.routing.pairs.as_ptr(), workspace.size()));
    }
    assert!(places[0] == places[1] && places[1] == places[2]);
    assert!(workspace.size() > 0);
}
