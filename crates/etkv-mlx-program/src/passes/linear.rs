//! Recognises linear layers, and chooses the layout of their weights for the device.

use std::collections::{HashMap, HashSet};

use mlx_rs::Dtype;

use super::{maker, makers, Target};
use crate::ir::{Graph, Index, Op, Value};

/// The layout of a constant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// In the stored order.
    Stored,
    /// Transposed, as a matrix product reads it.
    Transposed,
    /// In the stored order, read through a transposed view.
    View,
    /// Not loaded, because nothing uses it.
    Absent,
}

/// Replaces a product with a transposed constant by one `Linear`.
pub fn fuse(graph: &mut Graph) {
    let makers = makers(graph);
    for index in 0..graph.main.instructions.len() {
        let Op::Addmm { mat1: x, mat2, bias, alpha, beta } = graph.main.instructions[index].op
        else {
            continue;
        };
        let Some(&Op::Transpose { x: weight, ref perm }) = maker(graph, &makers, mat2) else {
            continue;
        };
        let plain = bias.is_none() || (alpha == 1.0 && beta == 1.0);
        if plain && graph.is_constant(weight) && perm[..] == [1, 0] {
            graph.main.instructions[index].op = Op::Linear { x, weight, bias, transposed: false };
        }
    }
}

/// Chooses the layout of each constant, and changes the instructions accordingly.
pub fn choose_layouts(graph: &mut Graph, target: Target) -> Vec<Layout> {
    let mut layouts = vec![Layout::Absent; graph.constants.len()];
    let mut transposable = HashMap::<Value, bool>::new();
    let (mut linear, mut taken) = (HashSet::<Value>::new(), HashSet::<Value>::new());
    let init = graph.init.instructions.iter();
    for read in init.flat_map(|instruction| instruction.op.reads()) {
        if graph.is_constant(read) {
            layouts[read.0 as usize] = Layout::Stored;
            transposable.insert(read, false);
        }
    }
    // Constants that the init chain writes keep their layout.
    transposable.extend(graph.init_targets.iter().map(|&value| (value, false)));
    // Constants that are outputs of a chain keep their layout too.
    for value in graph.init.tensor_outputs().chain(graph.main.tensor_outputs()) {
        if graph.is_constant(value) {
            layouts[value.0 as usize] = Layout::Stored;
            transposable.insert(value, false);
        }
    }
    for instruction in &graph.main.instructions {
        for read in instruction.op.reads() {
            if !graph.is_constant(read) {
                continue;
            }
            layouts[read.0 as usize] = Layout::Stored;
            let fits = match &instruction.op {
                op @ (Op::Linear { weight, .. }
                | Op::LinearBlock { weight, .. }
                | Op::LinearHeads { weight, .. }) => {
                    linear.insert(*weight);
                    *weight == read
                        && op.reads().iter().filter(|&&other| other == read).count() == 1
                }
                Op::Take { x, index: Index::Many(index), axis: 0 } => {
                    taken.insert(*x);
                    *x == read && *index != read
                }
                _ => false,
            };
            *transposable.entry(read).or_insert(true) &= fits;
        }
    }
    // MLX's CPU build passes float32 products to a BLAS. A BLAS streams through the rows of [in, out]. For [out, in],
    // the reference BLAS uses dot products, and a compiler may not reorder their sums. Measured on x86-64 with the
    // reference BLAS: [in, out] is 1.5 times as fast for the rows of a prompt. With OpenBLAS, SmolLM2 decodes 1.02 to
    // 1.08 times as fast, and its prompts take the same time. Other weights are read through a transposed view, which
    // is created once. A weight that is also looked up by rows keeps its layout, because a lookup reads whole rows.
    for constant in linear {
        let kept = &graph.constants[constant.0 as usize];
        if target.only_needed || !transposable[&constant] || kept.shape.len() != 2 {
            continue;
        }
        layouts[constant.0 as usize] = match kept.dtype {
            Dtype::Float32 if !target.on_gpu => Layout::Transposed,
            _ if !taken.contains(&constant) => Layout::View,
            _ => Layout::Stored,
        };
    }
    for instruction in &mut graph.main.instructions {
        match &mut instruction.op {
            Op::Linear { weight, transposed, .. }
            | Op::LinearBlock { weight, transposed, .. }
            | Op::LinearHeads { weight, transposed, .. } => {
                let layout = layouts.get(weight.0 as usize);
                *transposed = matches!(layout, Some(Layout::Transposed | Layout::View));
            }
            Op::Take { x, index: Index::Many(index), axis: 0 }
                if layouts.get(x.0 as usize) == Some(&Layout::Transposed) =>
            {
                instruction.op = Op::TakeTransposed { x: *x, index: *index };
            }
            _ => {}
        }
    }
    layouts
}
