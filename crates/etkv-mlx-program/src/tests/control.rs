//! Nested chains, and the tensors that a program keeps between calls.

use super::*;

const INT: fb::SlotType = fb::SlotType::IntValueSlot;
const TENSOR: fb::SlotType = fb::SlotType::TensorSlot;

fn multiply(builder: &mut Builder, a: u32, b: u32, out: u32) -> Node {
    node!(builder, MultiplyNode, MultiplyNodeArgs, [a: a, b: b, out: out])
}

fn value<'a>(builder: &mut Builder<'a>, vid: u32) -> Int<'a> {
    let vid = fb::Vid::new(vid);
    let args = fb::IntOrVidArgs { is_vid: true, vid: Some(&vid), ..Default::default() };
    fb::IntOrVid::create(builder, &args)
}

fn choose(builder: &mut Builder, cond: u32, then_chain_idx: u32, else_chain_idx: u32) -> Node {
    let cond = Some(value(builder, cond));
    let args = fb::IfNodeArgs { cond, then_chain_idx, else_chain_idx };
    (fb::OpNode::IfNode, fb::IfNode::create(builder, &args).as_union_value())
}

/// The tensors of a loop: the tensors that are split, their pieces, the outputs, and the carried values.
struct Loop<'a> {
    originals: &'a [u32],
    sliced: &'a [u32],
    outputs: &'a [u32],
    carry: &'a [u32],
    axis: i32,
    body: i32,
}

impl Loop<'_> {
    fn node(&self, builder: &mut Builder) -> Node {
        let mut tids = |list: &[u32]| {
            let list: Vec<_> = list.iter().map(|&slot| fb::Tid::new(slot)).collect();
            Some(builder.create_vector(&list))
        };
        let args = fb::ScanNodeArgs {
            originals: tids(self.originals),
            sliced: tids(self.sliced),
            outputs: tids(self.outputs),
            carry: tids(self.carry),
            body_chain_idx: self.body,
            scan_axis: self.axis,
        };
        (fb::OpNode::ScanNode, fb::ScanNode::create(builder, &args).as_union_value())
    }
}

fn load(payload: &[u8]) -> Result<Program> {
    super::load(payload, Weights::of([]), None)
}

/// An input: a tensor of these sizes, or an integer.
enum Input<'a> {
    Tensor(&'a [i32], Vec<u8>),
    Int(i64),
}

fn execute(program: &Program, inputs: &[Input]) -> Result<Vec<(Vec<i32>, Vec<f32>)>> {
    let inputs: Vec<Argument> = inputs
        .iter()
        .map(|input| match input {
            Input::Tensor(shape, bytes) => Argument::tensor(FLOAT32, shape, bytes),
            Input::Int(number) => Argument::of(*number),
        })
        .collect();
    super::execute(program, &inputs)
}

// ---- Choices ----------------------------------------------------------------

/// A program in which `then` doubles the input, `otherwise` squares it, and both write slot 1. Slot 2 is a temporary
/// of one chain.
fn choice() -> Vec<u8> {
    let parts = Parts {
        inputs: vec![(vec![3], FLOAT32)],
        n_temporaries: 3,
        n_values: 1,
        inner: true,
        input_map: Some(vec![(TENSOR, 0), (INT, 0)]),
        outputs: vec![1, 3],
        ..Default::default()
    };
    parts.payload(|builder| {
        let main = vec![neg(builder, 0, 1), choose(builder, 0, 1, 2), add(builder, 0, 1, 3)];
        let then = vec![add(builder, 0, 0, 1)];
        let otherwise = vec![multiply(builder, 0, 0, 2), copy(builder, 2, 1)];
        vec![main, then, otherwise]
    })
}

#[test]
fn one_of_two_chains_runs() {
    let program = load(&choice()).unwrap();
    let x = [1.0, -2.0, 3.0];
    for (cond, expected) in
        [(1, x.map(|x| 2.0 * x)), (0, x.map(|x| x * x)), (-5, x.map(|x| 2.0 * x))]
    {
        let inputs = [Input::Tensor(&[3], bytes(&x)), Input::Int(cond)];
        let made = execute(&program, &inputs).unwrap();
        assert_eq!(made[0].1, expected, "{cond}");
        let sums: Vec<f32> = x.iter().zip(expected).map(|(a, b)| a + b).collect();
        assert_eq!(made[1].1, sums, "{cond}");
    }
}

#[test]
fn what_one_chain_makes_is_not_there_after_a_choice() {
    let parts = || Parts {
        inputs: vec![(vec![3], FLOAT32)],
        n_temporaries: 2,
        n_values: 1,
        inner: true,
        input_map: Some(vec![(TENSOR, 0), (INT, 0)]),
        outputs: vec![1],
        ..Default::default()
    };
    let payload = parts().payload(|builder| {
        vec![vec![choose(builder, 0, 1, 2)], vec![neg(builder, 0, 1)], vec![neg(builder, 0, 2)]]
    });
    assert_eq!(refusal(&payload), "tensor 1 is read before it is written");
    let inside_itself = parts()
        .payload(|builder| vec![vec![choose(builder, 0, 1, 1)], vec![choose(builder, 0, 1, 1)]]);
    assert!(refusal(&inside_itself).contains("chain 1 is nested in itself"));
    let missing = parts().payload(|builder| vec![vec![choose(builder, 0, 7, 0)]]);
    assert!(refusal(&missing).contains("chain 7 does not exist, the program has 1"));
}

/// Nested choices expand to many more instructions than the payload has.
#[test]
fn choices_of_choices_are_refused() {
    let parts = Parts {
        inputs: vec![(vec![3], FLOAT32)],
        n_temporaries: 1,
        n_values: 1,
        inner: true,
        input_map: Some(vec![(TENSOR, 0), (INT, 0)]),
        ..Default::default()
    };
    let payload = parts.payload(|builder| {
        (0..14u32).map(|n| (0..40).map(|_| choose(builder, 0, n + 1, n + 1)).collect()).collect()
    });
    // Counting 40 to the power of 14 instructions one by one would exceed the time limit of the tests.
    assert!(Program::check(&payload).is_err());
}

// ---- Loops ------------------------------------------------------------------

/// A loop along an axis of `x`, `[2, T, 3]`. Each run computes a new carried value, the cube of the old one plus the
/// piece. The output is the new carried value times the piece. Slots: 0 `x`, 1 the initial carried value, 2 the
/// piece, 3 the carried value, 4 the output, 5 a temporary.
fn recurrence(axis: i32) -> Vec<u8> {
    let parts = Parts {
        inputs: vec![(vec![OPEN, OPEN, 3], FLOAT32), (vec![OPEN, 3], FLOAT32)],
        n_temporaries: 4,
        inner: true,
        outputs: vec![4, 3],
        ..Default::default()
    };
    parts.payload(|builder| {
        let scan =
            Loop { originals: &[0], sliced: &[2], outputs: &[4], carry: &[3], axis, body: 1 };
        let main = vec![copy(builder, 1, 3), scan.node(builder)];
        let body = vec![
            multiply(builder, 3, 3, 5),
            multiply(builder, 5, 3, 5),
            add(builder, 5, 2, 3),
            multiply(builder, 3, 2, 4),
        ];
        vec![main, body]
    })
}

#[test]
fn a_loop_carries_what_it_says_along_either_axis() {
    let [a, b, c] = [2usize, 5, 3];
    for (axis, steps, rows) in [(1, b, a), (0, a, b), (-2, b, a)] {
        let program = load(&recurrence(axis)).unwrap();
        for n in [1usize, steps] {
            let sizes = if axis == 0 { [n, b, c] } else { [a, n, c] };
            // The input and the expected results, step by step, in the order of the definition.
            let mut x = vec![0.0f32; sizes[0] * sizes[1] * c];
            let mut expected = x.clone();
            let mut carried = vec![0.25f32; rows * c];
            for step in 0..n {
                for row in 0..rows {
                    for k in 0..c {
                        let [i, j] = if axis == 0 { [step, row] } else { [row, step] };
                        let index = (i * sizes[1] + j) * c + k;
                        x[index] = ((i * 7 + j * 3 + k) as f32).sin() / 2.0;
                        let y = &mut carried[row * c + k];
                        *y = *y * *y * *y + x[index];
                        expected[index] = *y * x[index];
                    }
                }
            }
            let shape = sizes.map(|size| size as i32);
            let first = [rows as i32, c as i32];
            let inputs = [
                Input::Tensor(&shape, bytes(&x)),
                Input::Tensor(&first, bytes(&vec![0.25; rows * c])),
            ];
            let made = execute(&program, &inputs).unwrap();
            assert_eq!(made[0].0, shape);
            for (part, want) in [(&made[0].1, &expected), (&made[1].1, &carried)] {
                for (got, want) in part.iter().zip(want.iter()) {
                    assert!((got - want).abs() < 1e-6, "{got}, not {want}, axis {axis}");
                }
                assert_eq!(part.len(), want.len());
            }
        }
    }
}

#[test]
fn loops_that_contradict_themselves_are_refused() {
    let program = |scan: Loop, body: fn(&mut Builder) -> Vec<Node>| {
        let parts = Parts {
            inputs: vec![(vec![2, OPEN], FLOAT32), (vec![2], FLOAT32)],
            n_temporaries: 4,
            inner: true,
            outputs: vec![3],
            ..Default::default()
        };
        parts.payload(|builder| vec![vec![copy(builder, 1, 4), scan.node(builder)], body(builder)])
    };
    let scan = |carry: &'static [u32], axis: i32| Loop {
        originals: &[0],
        sliced: &[2],
        outputs: &[3],
        carry,
        axis,
        body: 1,
    };
    // A run would read slot 4 as the previous run wrote it.
    let body = |builder: &mut Builder| vec![add(builder, 2, 4, 3), add(builder, 4, 2, 4)];
    Program::check(&program(scan(&[4], 1), body)).unwrap();
    let hidden = refusal(&program(scan(&[], 1), body));
    assert_eq!(
        hidden,
        "instruction 1: a loop changes tensor 4, which it reads, and does not carry it"
    );
    let unwritten = refusal(&program(scan(&[4], 1), |_| vec![]));
    assert!(unwritten.contains("tensor 3 is read before it is written"), "{unwritten}");
    let none = Loop { originals: &[], sliced: &[], ..scan(&[], 1) };
    assert!(refusal(&program(none, |_| vec![])).contains("one slice for each tensor"));
    let uneven = Loop { sliced: &[2, 4], ..scan(&[], 1) };
    assert!(refusal(&program(uneven, body)).contains("got 2 for 1"));
    let past = load(&program(scan(&[4], 3), body)).unwrap();
    let inputs = [Input::Tensor(&[2, 2], bytes(&[0.0; 4])), Input::Tensor(&[2], bytes(&[0.0; 2]))];
    assert_eq!(execute(&past, &inputs).unwrap_err().status(), Status::Program);
}

// ---- Buffers ----------------------------------------------------------------

/// A program that adds its input to a buffer, and writes the first column of the sum to a position in another buffer.
/// Slots: 0 the input, 1 and 2 the buffers, 3 a temporary.
fn keeping() -> Vec<u8> {
    let parts = Parts {
        inputs: vec![(vec![OPEN], FLOAT32)],
        buffers: vec![vec![3], vec![100]],
        n_temporaries: 1,
        n_values: 1,
        input_map: Some(vec![(TENSOR, 0), (INT, 0)]),
        outputs: vec![1, 2],
        ..Default::default()
    };
    parts.payload(|builder| {
        let sum = add(builder, 1, 0, 1);
        let [zero, one, end] = [0, 1, i64::MAX].map(|number| Some(literal(builder, number)));
        let first = node!(
            builder, SliceNode, SliceNodeArgs, [x: 1, out: 3],
            axis: zero, start: zero, stop: one, step: 1
        );
        let start = Some(value(builder, 0));
        // The update fills the axis to its end: its single element is repeated.
        let update = node!(
            builder, SliceUpdateNode, SliceUpdateNodeArgs, [dst: 2, update: 3, out: 2],
            axis: zero, start: start, stop: end, step: 1
        );
        vec![vec![sum, first, update]]
    })
}

#[test]
fn buffers_are_kept_over_a_hundred_calls() {
    let payload = keeping();
    let (program, other) = (load(&payload).unwrap(), load(&payload).unwrap());
    assert_eq!(program.n_outputs(), 2);
    let mut sum = [0.0f32; 3];
    let mut row = vec![0.0f32; 100];
    for step in 0..100usize {
        let x = [step as f32, 1.0, -0.5];
        let inputs = [Input::Tensor(&[3], bytes(&x)), Input::Int(step as i64)];
        let made = execute(&program, &inputs).unwrap();
        sum.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
        row[step..].fill(sum[0]);
        assert_eq!(made, [(vec![3], sum.to_vec()), (vec![100], row.clone())], "{step}");
        if step % 10 == 0 {
            // Too long: nothing changes.
            let bad = [Input::Tensor(&[4], bytes(&[9.0; 4])), Input::Int(0)];
            assert!(execute(&program, &bad).is_err());
        }
    }
    // Another handle has other buffers, and reset buffers start again from zero.
    let inputs = || [Input::Tensor(&[3], bytes(&[1.0; 3])), Input::Int(99)];
    let fresh = execute(&other, &inputs()).unwrap();
    assert_eq!(fresh[0].1, [1.0; 3]);
    program.reset().unwrap();
    assert_eq!(execute(&program, &inputs()).unwrap(), fresh);
}

#[test]
fn buffers_without_bound_are_refused() {
    let parts = Parts { buffers: vec![vec![1 << 20, 1 << 10], vec![1]], ..Default::default() };
    let message = refusal(&parts.payload(|_| vec![vec![]]));
    assert!(message.contains("keeps more than 4294967296 bytes"), "{message}");
    let parts = Parts { buffers: vec![vec![OPEN]], ..Default::default() };
    assert!(refusal(&parts.payload(|_| vec![vec![]])).contains("expected a fixed shape of `"));
}
