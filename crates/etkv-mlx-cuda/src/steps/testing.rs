//! Programs for the tests of recipes.

use mlx_rs::Dtype;

use super::recipe::Recipe;
use etkv_mlx_program::ir::{Chain, Constant, Dim, Graph, InputSpec, Instruction, Op, Out, Value};

const INT64: i8 = 4;

/// A change of a program, and its description.
pub type Change = (&'static str, fn(&mut Graph));

/// Returns a function that changes all operations of a program that match a pattern. There must be one.
macro_rules! change_ops {
    ($op:pat => $change:expr) => {
        |graph: &mut Graph| {
            let mut found = false;
            for made in &mut graph.main.instructions {
                if let $op = &mut made.op {
                    $change;
                    found = true;
                }
            }
            assert!(found, "no operation matches");
        }
    };
}
pub(super) use change_ops;

/// Checks that a program is known, but not after any of these changes.
pub fn is_known_only_without(program: fn() -> Graph, changes: &[Change]) {
    assert!(Recipe::of(&program()).is_ok());
    for (what, change) in changes {
        let mut graph = program();
        change(&mut graph);
        assert!(Recipe::of(&graph).is_err(), "{what}");
    }
}

/// The inputs of a program: token ids and positions.
pub fn token_inputs(ids: Value, positions: Value) -> Vec<InputSpec> {
    let input = |value, name: &str, shape| InputSpec::Tensor {
        value,
        name: name.to_owned(),
        shape,
        scalar_type: INT64,
    };
    vec![
        input(ids, "ids", vec![Dim::Static(1), Dim::UpTo(None)]),
        input(positions, "positions", vec![Dim::UpTo(None)]),
    ]
}

/// A program whose first values are constants of these shapes, followed by the ids and positions. The value `out` is
/// its output and its last value.
pub fn program(shapes: Vec<Vec<i32>>, made: Vec<(Op, Out)>, out: u32) -> Graph {
    let ids = shapes.len() as u32;
    let constant = |(index, shape): (usize, Vec<i32>)| Constant {
        name: index.to_string(),
        shape,
        dtype: Dtype::Bfloat16,
        joined: Vec::new(),
    };
    Graph {
        constants: shapes.into_iter().enumerate().map(constant).collect(),
        inputs: token_inputs(Value(ids), Value(ids + 1)),
        main: Chain {
            instructions: made.into_iter().map(|(op, out)| Instruction { op, out }).collect(),
            outputs: vec![Out::Tensor(Value(out))],
        },
        n_values: out + 1,
        n_ints: 1,
        ..Graph::default()
    }
}

/// The attention of layer 0.
pub fn attend(q: u32, k: u32, v: u32, position: Value) -> Op {
    Op::UpdateAndAttend {
        q: Value(q),
        k: Value(k),
        v: Value(v),
        position,
        layer: 0,
        scale: 0.25,
        softcap: None,
        sinks: None,
        out_dtype: Some(Dtype::Bfloat16),
        last_query: false,
    }
}

/// An operation with one result.
pub fn tensor(op: Op, out: u32) -> (Op, Out) {
    (op, Out::Tensor(Value(out)))
}

/// An instruction with one result.
pub fn made(op: Op, out: u32) -> Instruction {
    Instruction { op, out: Out::Tensor(Value(out)) }
}
