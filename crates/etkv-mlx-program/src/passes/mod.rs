//! Passes that improve a program before it runs.

mod activation;
mod blocks;
pub mod by_capacity;
mod common;
mod dead;
mod dtypes;
mod elementwise;
#[cfg(test)]
mod fixture;
mod fold;
mod heads;
mod joined;
mod last_token;
mod linear;
mod norms;
mod positions;
mod rotary;
mod rotated;
mod rows;
mod scans;
mod views;
mod wanted;

pub use self::last_token::logits_output;
pub use self::linear::Layout;
pub use self::wanted::leave_out_unwanted_rows;
use crate::error::Result;
use crate::ir::{Graph, Instruction, Int, Op, Out, Value};
use crate::TARGET;
use std::collections::HashMap;

use mlx_rs::Array;
use tracing::{debug, debug_span};

/// The target that the passes prepare a program for.
#[derive(Debug, Clone, Copy, Default)]
pub struct Target {
    /// Whether the program runs on a GPU.
    pub on_gpu: bool,
    /// Whether the host needs only the last token's row of the output.
    pub last_token_only: bool,
    /// Whether to run only the passes that the other fields need.
    pub only_needed: bool,
}

/// Improves a program for a target, and returns the layout of each constant. `scalars` are the values of
/// constants with one float32 element, if they are known.
///
/// # Errors
/// [`Unsupported`](etkv::Status::Unsupported) if the program does not support the target.
pub fn run(
    graph: &mut Graph,
    target: Target,
    scalars: &HashMap<Value, f32>,
) -> Result<Vec<Layout>> {
    run_each(graph, target, scalars, |_, _| {})
}

/// [`run`], which also reports the name and the result of each pass that changes instructions.
///
/// # Errors
/// As [`run`].
pub fn run_each(
    graph: &mut Graph,
    target: Target,
    scalars: &HashMap<Value, f32>,
    mut after: impl FnMut(&'static str, &Graph),
) -> Result<Vec<Layout>> {
    let faster = !target.only_needed;
    let mut pass = |name, runs: bool, work: &dyn Fn(&mut Graph) -> Result<()>| -> Result<()> {
        if !runs {
            return Ok(());
        }
        let _span = debug_span!(target: TARGET, "pass", name).entered();
        let before = graph.main.instructions.len();
        work(graph)?;
        debug!(target: TARGET, before, after = graph.main.instructions.len(), "instructions");
        after(name, graph);
        Ok(())
    };
    let plain = |work: fn(&mut Graph)| {
        move |graph: &mut Graph| {
            work(graph);
            Ok(())
        }
    };
    pass("trace_positions", true, &plain(positions::trace))?;
    // Linear layers must be recognised to find the last row.
    pass("fuse_linear", faster || target.last_token_only, &plain(linear::fuse))?;
    // On the CPU, MLX's function takes 2.5 times as long as the instructions.
    pass("fuse_rotary", faster && target.on_gpu, &|graph| {
        rotary::fuse(graph, scalars);
        Ok(())
    })?;
    pass("last_token", faster || target.last_token_only, &|graph| {
        last_token::narrow(graph, target.last_token_only)
    })?;
    pass("eliminate_dead", faster, &plain(dead::eliminate))?;
    pass("share_common", faster, &plain(common::share))?;
    pass("merge_views", faster, &plain(views::merge))?;
    pass("fuse_activations", faster && target.on_gpu, &|graph| {
        activation::fuse(graph, scalars);
        Ok(())
    })?;
    pass("join_products", faster && target.on_gpu, &plain(joined::join))?;
    pass("join_heads", faster && target.on_gpu, &plain(heads::join))?;
    pass("join_blocks", faster && target.on_gpu, &plain(blocks::join))?;
    pass("join_rotary", faster && target.on_gpu, &plain(rotated::join))?;
    // This pass is the last one, because it renumbers values, and `scalars` has the old numbers.
    pass("fold_constants", faster, &plain(fold::fold))?;
    Ok(linear::choose_layouts(graph, target))
}

/// Fuses the products of the main chain with the operations around them in a layer, and removes unused
/// instructions.
pub fn join_layers(graph: &mut Graph) {
    dead::eliminate(graph);
    blocks::join(graph);
    rotated::join(graph);
}

/// Fuses the remaining small operations of a program that the interpreter runs on a GPU. `constants` are the loaded
/// constants. Executors of steps do not support the resulting instructions.
pub fn fuse_launches(graph: &mut Graph, constants: &[Option<Array>]) {
    let before = graph.main.instructions.len();
    norms::fuse(graph, constants);
    // The dtypes are computed here, because the passes below create instructions whose dtypes are unknown.
    // These passes do not change the dtype of any value.
    let dtypes = dtypes::with_constants(graph, constants);
    blocks::join_norms(graph, &dtypes);
    elementwise::fuse(graph, &dtypes);
    if !cfg!(target_os = "macos") {
        scans::fuse(graph, constants, &dtypes);
    }
    debug!(target: TARGET, before, after = graph.main.instructions.len(), "launches are fused");
}

/// Returns the instruction of the main chain that computes each value.
fn makers(graph: &Graph) -> HashMap<Value, usize> {
    graph
        .main
        .instructions
        .iter()
        .enumerate()
        .filter_map(|(index, instruction)| match instruction.out {
            Out::Tensor(value) => Some((value, index)),
            Out::Tensors(..) | Out::Int(_) => None,
        })
        .collect()
}

/// Returns the instructions of the main chain that read each value, once for each read.
fn readers(graph: &Graph) -> HashMap<Value, Vec<usize>> {
    let mut readers = HashMap::<Value, Vec<usize>>::new();
    for (index, instruction) in graph.main.instructions.iter().enumerate() {
        for value in instruction.op.reads() {
            readers.entry(value).or_default().push(index);
        }
    }
    readers
}

/// A program, and the only instruction that reads each value.
struct Readers<'a> {
    graph: &'a Graph,
    only: HashMap<Value, usize>,
}

impl<'a> Readers<'a> {
    fn of(graph: &'a Graph) -> Self {
        Self { graph, only: only_readers(graph) }
    }

    /// Returns the only instruction that reads a value.
    fn reader(&self, value: Value) -> Option<(usize, &'a Op, Out)> {
        let &index = self.only.get(&value)?;
        let Instruction { op, out } = &self.graph.main.instructions[index];
        Some((index, op, *out))
    }
}

/// Returns the only reader of each value in the main chain. Values that are read more than once, and outputs, are
/// absent.
pub fn only_readers(graph: &Graph) -> HashMap<Value, usize> {
    let n_uses = graph.main.n_uses();
    let reads = (0..)
        .zip(&graph.main.instructions)
        .flat_map(|(index, made)| made.op.reads().into_iter().map(move |value| (value, index)));
    reads.filter(|(value, _)| n_uses[value] == 1).collect()
}

fn maker<'a>(graph: &'a Graph, makers: &HashMap<Value, usize>, value: Value) -> Option<&'a Op> {
    makers.get(&value).map(|&index| &graph.main.instructions[index].op)
}

/// Returns the number of tokens and the head size of a view of features as heads, `[1, heads, T, head_dim]`, that
/// infers the number of heads.
fn view_of_heads(op: &Op) -> Option<(Int, i32)> {
    let Op::ReshapeTranspose { shape, perm, .. } = op else { return None };
    let &[Int::Literal(1), tokens, Int::Literal(-1), Int::Literal(head_dim)] = &shape[..] else {
        return None;
    };
    let head_dim = i32::try_from(head_dim).ok().filter(|&size| size > 0)?;
    (perm[..] == [0, 2, 1, 3]).then_some((tokens, head_dim))
}

/// Replaces the instructions at these indices.
fn replace(graph: &mut Graph, mut new: HashMap<usize, Vec<Instruction>>) {
    let old = std::mem::take(&mut graph.main.instructions);
    for (index, instruction) in old.into_iter().enumerate() {
        match new.remove(&index) {
            Some(made) => graph.main.instructions.extend(made),
            None => graph.main.instructions.push(instruction),
        }
    }
}

/// Inserts instructions, each before the one at its index. Indices ascend.
fn insert(graph: &mut Graph, new: Vec<(usize, Instruction)>) {
    let old = std::mem::take(&mut graph.main.instructions);
    let mut new = new.into_iter().peekable();
    for (index, instruction) in old.into_iter().enumerate() {
        while let Some((_, inserted)) = new.next_if(|(at, _)| *at <= index) {
            graph.main.instructions.push(inserted);
        }
        graph.main.instructions.push(instruction);
    }
    graph.main.instructions.extend(new.map(|(_, inserted)| inserted));
}
