//! Decodes a payload to [`ir`](crate::ir). Values are renamed, so that each value is written once.

use std::collections::{BTreeMap, BTreeSet};

use super::control;
use crate::dtype::dtype_of;
use crate::error::{fail, Result};
use crate::fb;
use crate::ir::{Buffer, Chain, Constant, Dim, Graph, InputSpec, Out, Value};
use crate::ops;
use crate::ops::limits::{bytes_of, max_bytes};
use crate::ops::slots::{Counts, Slots};

/// Decodes a program.
///
/// # Errors
/// - [`Program`](etkv::Status::Program) for an inconsistent program.
/// - [`Unsupported`](etkv::Status::Unsupported) for a program that needs operations that this build lacks;
///   the message names all of them.
pub fn decode(graph: fb::MLXGraph) -> Result<Graph> {
    let mut slots = Slots::new(Counts::read(graph)?);
    refuse_unknown_ops(graph)?;
    let names = tensor_names(graph);
    let constants = constants(&mut slots, graph, &names)?;
    let inputs = inputs(&mut slots, graph, &names)?;
    let buffers = buffers(&mut slots, graph, &names)?;
    let (init, init_targets) = init(&mut slots, graph)?;
    let mut main = main_chain(&mut slots, graph)?;
    ops::note_reduced(&mut main);
    Ok(Graph {
        constants,
        inputs,
        init,
        init_targets,
        main,
        buffers,
        n_values: slots.n_values(),
        n_ints: slots.n_ints(),
    })
}

/// Checks all operations, so that one error names every missing one.
fn refuse_unknown_ops(graph: fb::MLXGraph) -> Result<()> {
    let mut unknown = BTreeMap::<String, usize>::new();
    for chain in graph.instruction_chains() {
        for instruction in chain.instructions() {
            let kind = instruction.op_type();
            if !ops::is_known(kind) {
                *unknown.entry(operation_name(kind)).or_default() += 1;
            }
        }
    }
    if unknown.is_empty() {
        return Ok(());
    }
    let list: Vec<String> =
        unknown.iter().map(|(name, count)| format!("{name} ({count} times)")).collect();
    fail!(Unsupported, "the program needs operations that this build lacks: {}", list.join(", "))
}

/// Returns an operation's name in the schema.
pub fn operation_name(op: fb::OpNode) -> String {
    op.variant_name().map_or_else(
        || format!("operation {}", op.0),
        |name| name.trim_end_matches("Node").to_owned(),
    )
}

/// The names of the tensors' slots.
pub type Names<'a> = BTreeMap<u32, &'a str>;

/// Returns the names of tensors.
pub fn tensor_names<'a>(graph: fb::MLXGraph<'a>) -> Names<'a> {
    graph
        .named_slots()
        .into_iter()
        .flatten()
        .filter(|named| named.slot().slot_type() == fb::SlotType::TensorSlot)
        .map(|named| (named.slot().idx(), named.name()))
        .collect()
}

fn constants(slots: &mut Slots, graph: fb::MLXGraph, names: &Names) -> Result<Vec<Constant>> {
    let mut named = BTreeMap::new();
    (0..slots.counts().constants)
        .map(|slot| {
            let Some(&name) = names.get(&slot) else {
                fail!(Program, "constant {slot} has no name");
            };
            // Constants with the same name would hold the same data twice.
            if let Some(other) = named.insert(name, slot) {
                fail!(Program, "constants {other} and {slot} have the same name, `{name}`");
            }
            let meta = meta(graph, slot)?;
            slots.bind(slot);
            Ok(Constant {
                name: name.to_owned(),
                shape: fixed_shape(meta, name)?,
                dtype: dtype_of(meta.scalar_type())?,
                joined: Vec::new(),
            })
        })
        .collect()
}

fn inputs(slots: &mut Slots, graph: fb::MLXGraph, names: &Names) -> Result<Vec<InputSpec>> {
    let first = slots.counts().constants;
    let (mut tensors, mut ints) = (BTreeSet::new(), BTreeSet::new());
    graph
        .input_map()
        .into_iter()
        .flatten()
        .map(|slot| match slot.slot_type() {
            fb::SlotType::TensorSlot => {
                if slot.idx() < first || slot.idx() >= first + slots.counts().inputs {
                    fail!(Program, "tensor {} is no input", slot.idx());
                }
                if !tensors.insert(slot.idx()) {
                    fail!(Program, "tensor {} is named by two inputs", slot.idx());
                }
                let meta = meta(graph, slot.idx())?;
                // Only known dtypes pass, so a run need not check the dtypes.
                dtype_of(meta.scalar_type())?;
                let value = slots.bind(slot.idx());
                Ok(InputSpec::Tensor {
                    value,
                    name: slot_name(names, slot.idx()),
                    shape: meta.shape().iter().map(dim).collect(),
                    scalar_type: meta.scalar_type(),
                })
            }
            fb::SlotType::IntValueSlot => {
                let value = slots.input_int(slot.idx())?;
                if !ints.insert(slot.idx()) {
                    fail!(Program, "value {} is named by two inputs", slot.idx());
                }
                Ok(InputSpec::Int(value))
            }
            other => fail!(
                Unsupported,
                "expected an input that is a tensor or an integer, got {other:?}"
            ),
        })
        .collect()
}

fn buffers(slots: &mut Slots, graph: fb::MLXGraph, names: &Names) -> Result<Vec<Buffer>> {
    let (first, n) = slots.counts().buffers;
    let mut bytes = 0usize;
    (first..first + n)
        .map(|slot| {
            let name = slot_name(names, slot);
            let meta = meta(graph, slot)?;
            let (shape, dtype) = (fixed_shape(meta, &name)?, dtype_of(meta.scalar_type())?);
            let size = bytes_of(&shape, dtype)
                .and_then(|size| bytes.checked_add(size))
                .filter(|&all| all <= max_bytes());
            let Some(all) = size else {
                fail!(
                    Program,
                    "with buffer `{name}`, of shape {shape:?}, the program keeps more than {} bytes",
                    max_bytes()
                );
            };
            bytes = all;
            Ok(Buffer { name, shape, dtype, value: slots.bind(slot) })
        })
        .collect()
}

fn fixed_shape(meta: fb::TensorMeta, name: &str) -> Result<Vec<i32>> {
    let sizes = meta.shape().iter().map(|dim| match dim.value() {
        size if size >= 0 => Ok(size),
        _ => fail!(Program, "expected a fixed shape of `{name}`, got another one"),
    });
    sizes.collect()
}

fn init(slots: &mut Slots, graph: fb::MLXGraph) -> Result<(Chain, Vec<Value>)> {
    let Ok(index) = usize::try_from(graph.init_chain_idx()) else {
        return Ok((Chain::default(), Vec::new()));
    };
    // Inputs and buffers have no values yet. If the init chain writes values to their slots, the values are dropped
    // after the chain.
    let before = slots.held().clone();
    let (tensors, ints) = (slots.counts().constants..slots.n_values(), 0..slots.n_ints());
    let mut chain = chain(slots, graph, index, &mut ChainPosition::default())?;
    let (first, n) = slots.counts().buffers;
    let after = slots.held();
    if (first..first + n).any(|slot| after.tensors.get(&slot) != before.tensors.get(&slot)) {
        fail!(Unsupported, "the init chain writes a buffer, and buffers begin as zeros");
    }
    let (targets, values): (Vec<Value>, Vec<Value>) = slots.end_init(before).into_iter().unzip();
    chain.outputs.extend(values.into_iter().map(Out::Tensor));
    if let Some(value) = chain.uses().find(|value| tensors.contains(&value.0)) {
        fail!(Program, "the init chain reads value {}, which is an input or a buffer", value.0);
    }
    let read = chain.instructions.iter().flat_map(|instruction| instruction.op.int_reads());
    if let Some(value) = read.into_iter().find(|value| ints.contains(&value.0)) {
        fail!(Program, "the init chain reads integer {}, which is an input", value.0);
    }
    Ok((chain, targets))
}

fn main_chain(slots: &mut Slots, graph: fb::MLXGraph) -> Result<Chain> {
    let mut chain =
        chain(slots, graph, graph.main_chain_idx() as usize, &mut ChainPosition::default())?;
    for slot in graph.output_map().into_iter().flatten() {
        chain.outputs.push(match slot.slot_type() {
            fb::SlotType::TensorSlot => Out::Tensor(slots.read(&fb::Tid::new(slot.idx()))?),
            fb::SlotType::IntValueSlot => Out::Int(slots.read_int(&fb::Vid::new(slot.idx()))?),
            other => fail!(
                Unsupported,
                "expected an output that is a tensor or an integer, got {other:?}"
            ),
        });
    }
    let (first, n) = slots.counts().buffers;
    for slot in first..first + n {
        chain.outputs.push(Out::Tensor(slots.read(&fb::Tid::new(slot))?));
    }
    Ok(chain)
}

/// The maximum depth of nested chains.
const MAX_INSIDE: usize = 16;

/// The maximum number of instructions of a program. The instructions of a chain count each time the chain is used.
const MAX_INSTRUCTIONS: usize = 1 << 20;

/// The maximum number of slots that are copied for nested chains.
const MAX_COPIED: usize = 1 << 24;

/// The enclosing chains at the current position, and the totals so far.
#[derive(Default)]
struct ChainPosition {
    /// The enclosing chains.
    around: Vec<usize>,
    /// The number of instructions so far, in all chains.
    n_instructions: usize,
    /// The number of slots that were copied so far, for all nested chains.
    n_copied: usize,
}

/// Decodes a chain and its nested chains.
fn chain(
    slots: &mut Slots,
    graph: fb::MLXGraph,
    index: usize,
    place: &mut ChainPosition,
) -> Result<Chain> {
    let chains = graph.instruction_chains();
    if index >= chains.len() {
        fail!(Program, "chain {index} does not exist, the program has {}", chains.len());
    }
    if place.around.contains(&index) || place.around.len() >= MAX_INSIDE {
        fail!(Program, "chain {index} is nested in itself, or deeper than {MAX_INSIDE} chains");
    }
    place.around.push(index);
    let mut chain = Chain::default();
    for (number, instruction) in chains.get(index).instructions().iter().enumerate() {
        place.n_instructions += 1;
        if place.n_instructions > MAX_INSTRUCTIONS {
            fail!(Program, "the program has more than {MAX_INSTRUCTIONS} instructions");
        }
        if matches!(instruction.op_type(), fb::OpNode::IfNode | fb::OpNode::ScanNode) {
            // The decoder copies the values of all slots.
            place.n_copied += slots.held().tensors.len() + slots.held().ints.len();
            if place.n_copied > MAX_COPIED {
                fail!(Program, "the program has too many nested chains for its tensors");
            }
        }
        let mut inner = |slots: &mut Slots, index| self::chain(slots, graph, index, place);
        let decoded = match instruction.op_type() {
            fb::OpNode::IfNode => control::decode_if(slots, instruction, &mut inner),
            fb::OpNode::ScanNode => control::decode_scan(slots, instruction, &mut inner),
            _ => ops::decode(slots, instruction),
        };
        let decoded = decoded.map_err(|error| error.at(format_args!("instruction {number}")))?;
        chain.instructions.extend(decoded);
    }
    place.around.pop();
    Ok(chain)
}

/// Returns the payload's description of a tensor.
pub fn meta<'a>(graph: fb::MLXGraph<'a>, slot: u32) -> Result<fb::TensorMeta<'a>> {
    match graph.tensor_meta() {
        Some(metas) if (slot as usize) < metas.len() => Ok(metas.get(slot as usize)),
        _ => fail!(Program, "tensor {slot} is not described"),
    }
}

fn dim(dim: fb::ShapeDim) -> Dim {
    match dim.value() {
        size if size >= 0 => Dim::Static(size),
        _ => Dim::UpTo((dim.max_value() >= 0).then(|| dim.max_value())),
    }
}

/// Returns the name without the prefix that distinguishes the names of several methods.
pub fn slot_name(names: &Names, slot: u32) -> String {
    names.get(&slot).map_or_else(
        || format!("tensor {slot}"),
        |name| name.rsplit('/').next().unwrap_or_default().to_owned(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::{literals, node, Builder, Node, Parts};
    use etkv::Status;

    /// Returns a program of one chain with these instructions.
    fn program(n_temporaries: u32, build: impl FnOnce(&mut Builder) -> Vec<Node>) -> Vec<u8> {
        Parts { n_temporaries, ..Default::default() }.payload(|builder| vec![build(builder)])
    }

    fn error(payload: &[u8]) -> etkv::Error {
        decode(crate::frontend::payload::read(payload).unwrap()).unwrap_err()
    }

    #[test]
    fn every_operation_that_is_missing_is_named_at_once() {
        let payload = program(1, |builder| {
            // Numbers that a future schema may use for operations.
            [251, 250, 251]
                .map(|number| {
                    let (_, op) = node!(builder, TanNode, TanNodeArgs, [x: 0, out: 0]);
                    (fb::OpNode(number), op)
                })
                .to_vec()
        });
        let error = error(&payload);
        assert_eq!(error.status(), Status::Unsupported);
        assert!(
            error.message().contains("operation 250 (1 times), operation 251 (2 times)"),
            "{error}"
        );
    }

    #[test]
    fn slots_are_read_after_they_are_written() {
        let payload =
            program(2, |builder| vec![node!(builder, CosNode, CosNodeArgs, [x: 1, out: 0])]);
        let error = error(&payload);
        assert_eq!(error.status(), Status::Program);
        assert_eq!(error.message(), "instruction 0: tensor 1 is read before it is written");
    }

    fn split(n_sizes: usize, n_outs: u32) -> etkv::Error {
        let payload = program(3, |builder| {
            let sizes = Some(literals(builder, &vec![2; n_sizes]));
            let outs: Vec<_> = (0..n_outs).map(fb::Tid::new).collect();
            let outs = Some(builder.create_vector(&outs));
            vec![node!(
                builder, SplitNode, SplitNodeArgs, [x: 0], outs: outs, sizes: sizes, axis: -1
            )]
        });
        error(&payload)
    }

    #[test]
    fn splits_that_contradict_themselves_are_refused() {
        let error = split(2, 3);
        assert_eq!(error.status(), Status::Program);
        assert_eq!(error.message(), "instruction 0: expected 2 outputs of a split, got 3");
        assert!(split(2, 2).message().contains("tensor 0 is read before it is written"));
    }

    #[test]
    fn a_gelu_of_another_kind_is_refused() {
        let payload = program(1, |builder| {
            let approximate = Some(builder.create_string("quick"));
            vec![node!(builder, GeluNode, GeluNodeArgs, [x: 0, out: 0], approximate: approximate)]
        });
        let error = error(&payload);
        assert_eq!(error.status(), Status::Unsupported);
        assert!(error.message().contains("unknown Gelu `quick`"), "{error}");
    }
}
