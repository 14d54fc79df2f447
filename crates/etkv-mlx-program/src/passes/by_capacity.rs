//! Some rotary embeddings have a separate set of frequencies for long texts. Chooses the set by the capacity of the
//! cache.
//!
//! The exporter writes `where(flag, beyond, within)`. The flag is a constant whose name contains the limit. Its value
//! is false, so a runtime that ignores the name computes with the frequencies of short texts.

use std::collections::{BTreeSet, HashMap};

use crate::ir::{Function, Graph, Op, Out, Value};

/// The prefix of a flag's name, after the program's own prefix. The limit follows.
const FLAG: &str = "etkv_capacity_over_";

/// Replaces each choice by the operand for a cache of `capacity` positions. Returns the limits that the capacity
/// exceeds.
pub fn choose(graph: &mut Graph, capacity: i32) -> BTreeSet<i32> {
    let mut passed = BTreeSet::new();
    let mut chosen = HashMap::new();
    let limits: HashMap<Value, i32> = (0..)
        .map(Value)
        .zip(&graph.constants)
        .filter_map(|(value, constant)| Some((value, limit_of(&constant.name)?)))
        .collect();
    graph.main.instructions.retain(|instruction| {
        let (Op::Call { function: Function::Where, tensors, .. }, Out::Tensor(made)) =
            (&instruction.op, instruction.out)
        else {
            return true;
        };
        let [flag, beyond, within] = tensors[..] else {
            return true;
        };
        let Some(&limit) = limits.get(&flag) else {
            return true;
        };
        let passes = capacity > limit;
        if passes {
            passed.insert(limit);
        }
        chosen.insert(made, if passes { beyond } else { within });
        false
    });
    graph.rename(&chosen);
    passed
}

fn limit_of(name: &str) -> Option<i32> {
    let name = name.rsplit('/').next()?;
    name.strip_prefix(FLAG)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::super::fixture;
    use super::*;
    use crate::ir::{Instruction, Unary};

    /// Constant 0 is a flag; 1 and 2 are the frequencies beyond and within the limit. The cosine of the choice is the
    /// output.
    fn graph(flag: &str) -> Graph {
        let choice = fixture::call(Function::Where, &[0, 1, 2]);
        let made = fixture::numbered(3, [choice, fixture::unary(Unary::Cos, 3)]);
        let constants =
            [flag, "beyond", "within"].map(|name| fixture::constant(name, &[4])).to_vec();
        Graph { constants, ..fixture::graph(made) }
    }

    fn chosen(flag: &str, capacity: i32) -> (Option<Value>, Vec<i32>) {
        let mut graph = graph(flag);
        let passed = choose(&mut graph, capacity).into_iter().collect();
        match &graph.main.instructions[..] {
            [Instruction { op: Op::Unary { x, .. }, .. }] => (Some(*x), passed),
            _ => (None, passed),
        }
    }

    #[test]
    fn the_capacity_chooses() {
        let flag = "3ac5/etkv_capacity_over_4096";
        assert_eq!(chosen(flag, 4095), (Some(Value(2)), vec![]));
        assert_eq!(chosen(flag, 4096), (Some(Value(2)), vec![]));
        assert_eq!(chosen(flag, 4097), (Some(Value(1)), vec![4096]));
    }

    #[test]
    fn other_choices_stay() {
        for flag in ["mask", "etkv_capacity_over_", "etkv_capacity_over_many"] {
            assert_eq!(chosen(flag, 4097), (None, vec![]), "{flag}");
        }
    }
}
