//! Programs with recurrent layers.

use etkv::{builders, MLX_BACKEND};
use etkv_core::{CacheConfig, RecurrentLayer};

use super::*;
use crate::generation::{Generation, GenerationOptions, Prompt, RunAhead};

/// The fields of a convolution's node.
#[derive(Clone, Copy)]
struct Convolution {
    layer: Option<i32>,
    activation: &'static str,
    channels: Option<i32>,
    width: Option<i32>,
}

const GOOD: Convolution =
    Convolution { layer: Some(0), activation: "none", channels: Some(2), width: Some(3) };

/// Returns a program of one convolution. 0: weight, 1: columns, 2: positions, 3: result.
fn payload(of: Convolution) -> Vec<u8> {
    let parts = Parts {
        constants: vec![(String::from("weight"), vec![2, 3])],
        inputs: vec![(vec![1, 2, OPEN], FLOAT32), (vec![OPEN], INT64)],
        n_temporaries: 1,
        outputs: vec![3],
        ..Default::default()
    };
    parts.payload(|builder| vec![vec![convolve(builder, of)]])
}

fn convolve(builder: &mut Builder, of: Convolution) -> Node {
    let activation = Some(builder.create_string(of.activation));
    node!(
        builder, UpdateAndConvolveNode, UpdateAndConvolveNodeArgs,
        [x: 1, weight: 0, position: 2, out: 3],
        bias: None, activation: activation, layer_id: of.layer, out_dtype: None,
        channels: of.channels, width: of.width
    )
}

fn session(layer: RecurrentLayer) -> Session {
    let mut config = CacheConfig::uniform(0, 1, 1, 64);
    config.recurrent_layers = vec![layer];
    Session::new(builders(), MLX_BACKEND, "contiguous", config).unwrap()
}

fn load(of: Convolution, session: &Session) -> Result<Program> {
    let weights = Weights::of([("weight", &[1.0, 10.0, 100.0, 2.0, 20.0, 200.0])]);
    super::load(&payload(of), weights, Some(session))
}

/// Returns the convolution of columns `[1, 2, T]` at consecutive positions, the first at `first`.
fn step(program: &Program, columns: &[f32], first: i64) -> Vec<f32> {
    let n = columns.len() as i32 / 2;
    let positions = positions(first..first + i64::from(n));
    let (columns, shape) = (bytes(columns), [1, 2, n]);
    let arguments = [
        Argument::tensor(FLOAT32, &shape, &columns),
        Argument::tensor(INT64, &shape[2..], &positions),
    ];
    let (made_shape, made) = execute(program, &arguments).unwrap().remove(0);
    assert_eq!(made_shape, shape);
    made
}

#[test]
fn a_convolution_goes_on_in_the_next_step() {
    let session = session(RecurrentLayer::Convolution { channels: 2, width: 3 });
    let program = load(GOOD, &session).unwrap();
    let made = step(&program, &[1.0, 2.0, 3.0, 0.0, 0.0, 1.0], 0);
    assert_eq!(made, [100.0, 210.0, 321.0, 0.0, 0.0, 200.0]);
    assert_eq!(step(&program, &[4.0, 1.0], 3), [432.0, 220.0]);
    // A step at a position below the length rewinds.
    assert_eq!(step(&program, &[5.0, 0.0], 2), [521.0, 0.0]);
}

#[test]
fn caches_of_other_layers_are_refused() {
    let other = session(RecurrentLayer::Convolution { channels: 2, width: 4 });
    let error = load(GOOD, &other).err().unwrap();
    assert_eq!(error.status(), Status::Shape);
    assert!(error.message().contains("recurrent layer 0 is a convolution of"), "{error}");
    let config = CacheConfig::uniform(1, 1, 4, 64);
    let without = Session::new(builders(), MLX_BACKEND, "contiguous", config).unwrap();
    let error = load(Convolution { layer: Some(1), ..GOOD }, &without).err().unwrap();
    assert_eq!(error.status(), Status::Shape);
}

#[test]
fn nodes_that_lack_what_they_need_are_refused() {
    let cases = [
        (Convolution { layer: None, ..GOOD }, "expected a layer_id of UpdateAndConvolve, got none"),
        (Convolution { layer: Some(-1), ..GOOD }, "layer_id of UpdateAndConvolve of at least 0"),
        (Convolution { channels: None, ..GOOD }, "expected a channels of UpdateAndConvolve"),
        (Convolution { width: Some(65), ..GOOD }, "width is 65, the maximum is 64"),
        (Convolution { channels: Some(0), ..GOOD }, "channels is 0, the minimum is 1"),
    ];
    for (of, words) in cases {
        let message = refusal(&payload(of));
        assert!(message.contains(words), "{message}");
    }
    let error = Program::check(&payload(Convolution { activation: "gelu", ..GOOD })).unwrap_err();
    assert_eq!(error.status(), Status::Unsupported);
}

#[test]
fn operands_of_other_sizes_are_refused() {
    let session = session(RecurrentLayer::Convolution { channels: 3, width: 3 });
    let program = load(Convolution { channels: Some(3), ..GOOD }, &session).unwrap();
    let (columns, positions) = (bytes(&[0.0, 0.0]), positions(0..1));
    let arguments = [
        Argument::tensor(FLOAT32, &[1, 2, 1], &columns),
        Argument::tensor(INT64, &[1], &positions),
    ];
    let error = execute(&program, &arguments).unwrap_err();
    assert_eq!(error.status(), Status::Shape);
    assert_eq!(session.cache().lock().unwrap().length(), 0);
}

/// Returns a language model of one recurrence, with these constants: rows of tokens, log decays, write
/// strengths, and the weights of the logits.
fn language_model() -> (Vec<u8>, Weights) {
    let shapes = [
        ("rows", vec![VOCABULARY, DIM]),
        ("decays", vec![VOCABULARY]),
        ("strengths", vec![VOCABULARY]),
        ("head", vec![DIM, VOCABULARY]),
    ];
    let parts = Parts {
        constants: shapes.iter().map(|(name, shape)| ((*name).to_owned(), shape.clone())).collect(),
        // 4: tokens, 5: positions.
        inputs: vec![(vec![1, OPEN], INT64), (vec![OPEN], INT64)],
        n_temporaries: 10,
        outputs: vec![15],
        ..Default::default()
    };
    let payload = parts.payload(|builder| {
        vec![vec![
            take(builder, 0, 4, 6),
            expand(builder, 6, 7),
            take(builder, 1, 4, 8),
            expand(builder, 8, 9),
            take(builder, 2, 4, 10),
            expand(builder, 10, 11),
            scan(builder, [7, 9, 11, 5, 12]),
            squeeze(builder, 12, 13),
            product(builder, 13, 3, 15),
        ]]
    });
    let numbers = |n: i32, scale: f32, shift: f32| {
        let number = |at: i32| ((at * 37 + n) % 29) as f32 / 29.0 * scale + shift;
        (0..n).map(number).collect::<Vec<_>>()
    };
    let weights = Weights::of([
        ("rows", &numbers(VOCABULARY * DIM, 1.0, -0.5)),
        ("decays", &numbers(VOCABULARY, -0.2, 0.0)),
        ("strengths", &numbers(VOCABULARY, 1.0, 0.0)),
        ("head", &numbers(VOCABULARY * DIM, 2.0, -1.0)),
    ]);
    (payload, weights)
}

const VOCABULARY: i32 = 23;
const DIM: i32 = 4;

/// The rows are queries, keys and values.
fn scan(builder: &mut Builder, slots: [u32; 5]) -> Node {
    let [rows, g, beta, position, out] = slots;
    node!(
        builder, UpdateAndScanNode, UpdateAndScanNodeArgs,
        [q: rows, k: rows, v: rows, g: g, beta: beta, position: position, out: out],
        layer_id: Some(0), scale: Some(1.0), out_dtype: None, k_heads: Some(1), heads: Some(1),
        k_dim: Some(DIM), v_dim: Some(DIM), channel_decay: false
    )
}

fn squeeze(builder: &mut Builder, x: u32, out: u32) -> Node {
    let dims = Some(builder.create_vector(&[1]));
    node!(builder, SqueezeNode, SqueezeNodeArgs, [x: x, out: out], dims: dims)
}

/// Returns the tokens of answers to two prompts.
fn answers(kind: &str, run_ahead: RunAhead) -> Vec<(usize, i64)> {
    let mut config = CacheConfig::uniform(0, 1, 1, 400);
    let [k_heads, heads, k_dim, v_dim] = [1, 1, DIM, DIM];
    let channel_decay = false;
    config.recurrent_layers =
        vec![RecurrentLayer::Recurrence { k_heads, heads, k_dim, v_dim, channel_decay }];
    let session = Session::new(builders(), MLX_BACKEND, kind, config).unwrap();
    let (payload, weights) = language_model();
    let program = super::load(&payload, weights, Some(&session)).unwrap();
    let n = if kind == "contiguous" { 1 } else { 2 };
    let prompts = (0..n).map(|n| Prompt::new(n, vec![3 + i64::from(n), 7, 11])).collect();
    let options = GenerationOptions { run_ahead, max_tokens: 140, ..GenerationOptions::default() };
    let mut generation = Generation::new(&program, prompts, options).unwrap();
    let mut all = Vec::new();
    loop {
        let next = generation.next_tokens().unwrap();
        if next.is_empty() {
            return all;
        }
        all.extend(next.iter().map(|one| (one.prompt, one.token)));
    }
}

#[test]
fn steps_may_start_before_their_tokens_are_read() {
    for kind in ["contiguous", "seq", "tree"] {
        let expected = answers(kind, RunAhead::Never);
        assert!(expected.len() >= 140, "{kind}: {}", expected.len());
        assert_eq!(answers(kind, RunAhead::Always), expected, "{kind}");
    }
}
