//! A program as a report: what it takes, computes and gives, and what the passes make of
//! it. Nothing is loaded, and MLX is not asked.

use std::collections::BTreeMap;

use serde::Serialize;

use super::constants::Layout;
use super::decode::{self, decode};
use super::dtype;
use super::fb;
use super::ir::{Chain, Graph};
use super::passes::{self, Target};
use super::{ops, payload};
use crate::error::{Error, Result, Status};

/// What a program is. `docs/reports.md` lists the fields as JSON has them.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProgramDescription {
    /// The payload's format, where it tells one.
    pub format: Option<String>,
    /// Why this build does not run the program, where it does not.
    pub refused: Option<String>,
    /// Operations of the program that this build lacks.
    pub missing: Vec<OperationCount>,
    /// In the order of the arguments.
    pub inputs: Vec<ArgumentDescription>,
    /// In the order of the arguments.
    pub outputs: Vec<ArgumentDescription>,
    /// Of a forward, as exported: the most frequent first.
    pub operations: Vec<OperationCount>,
    /// The same of what runs once, when the program is loaded.
    pub operations_at_load: Vec<OperationCount>,
    /// The attention layers of the cache, in order.
    pub attention_layers: Vec<AttentionDescription>,
    /// The weights.
    pub constants: ConstantsDescription,
    /// Tensors that the program keeps from one forward to the next: 0 where its KV cache
    /// is outside of it.
    pub mutable_buffers: u32,
    /// What each pass did, in order; none where the program is refused.
    pub passes: Vec<PassDescription>,
    /// How constants are kept on the CPU; absent where the program is refused.
    pub layouts: Option<LayoutsDescription>,
    /// Every instruction of a forward, as exported.
    pub instructions: Vec<InstructionDescription>,
    /// Every instruction that runs once.
    pub instructions_at_load: Vec<InstructionDescription>,
}

/// An argument: a tensor, or an integer.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ArgumentDescription {
    /// In the source program.
    pub name: String,
    /// `int` for an integer.
    pub dtype: String,
    /// Absent for an integer.
    pub shape: Option<Vec<DimDescription>>,
}

/// A dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum DimDescription {
    /// Always this.
    Static(i32),
    /// Between the two, where `most` is known.
    Range {
        /// When the program was traced; it may run with 1.
        least: i32,
        /// At most.
        most: Option<i32>,
    },
}

/// How often an operation comes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct OperationCount {
    pub operation: String,
    pub count: usize,
}

/// A layer of the cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AttentionDescription {
    /// Its number; -1 where the program names none.
    pub layer: i64,
    /// Calls in a forward: more than 1 where layers share keys and values.
    pub calls: usize,
}

/// The weights.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ConstantsDescription {
    /// How many there are.
    pub count: usize,
    /// Bytes of those whose dtype is known.
    pub bytes: u64,
    /// Each of them.
    pub tensors: Vec<ConstantDescription>,
}

/// A weight.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ConstantDescription {
    /// Its key in the program's data.
    pub name: String,
    /// Its dtype.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<i32>,
    /// Absent where the dtype is unknown.
    pub bytes: Option<u64>,
}

/// What a pass did.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PassDescription {
    /// The pass.
    pub name: String,
    /// Instructions of a forward before it.
    pub before: usize,
    /// And after it.
    pub after: usize,
    /// The operations that it changed the number of.
    pub changed: Vec<ChangeDescription>,
}

/// An operation that a pass changed the number of.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct ChangeDescription {
    pub operation: String,
    pub before: usize,
    pub after: usize,
}

/// How many constants are kept how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct LayoutsDescription {
    /// As they are stored.
    pub stored: usize,
    /// Transposed, as a matrix product reads them.
    pub transposed: usize,
    /// Not at all.
    pub absent: usize,
}

/// An instruction as exported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct InstructionDescription {
    /// Its operation.
    pub operation: String,
    /// Its fields: `t7` is a tensor, `v2` an integer.
    pub fields: String,
}

/// Describes a payload.
///
/// # Errors
/// [`Program`](Status::Program) for one that is damaged or foreign.
pub fn describe(payload: &[u8]) -> Result<ProgramDescription> {
    let graph = payload::read(payload)?;
    let main = instructions(graph, i64::from(graph.main_chain_idx()));
    let init = instructions(graph, i64::from(graph.init_chain_idx()));
    let missing = main.iter().chain(&init).filter(|found| !ops::is_known(found.op_type()));
    let mut described = ProgramDescription {
        format: graph.version().map(str::to_owned),
        refused: None,
        missing: counts(missing.map(|found| name(found.op_type()))),
        inputs: arguments(graph, graph.input_map()),
        outputs: arguments(graph, graph.output_map()),
        operations: counts(main.iter().map(|found| name(found.op_type()))),
        operations_at_load: counts(init.iter().map(|found| name(found.op_type()))),
        attention_layers: attention(&main),
        constants: constants(graph),
        mutable_buffers: graph.num_mutable_buffer_tensors(),
        passes: Vec::new(),
        layouts: None,
        instructions: main.iter().map(instruction).collect(),
        instructions_at_load: init.iter().map(instruction).collect(),
    };
    match decode(graph) {
        Ok(graph) => passes_of(graph, &mut described)?,
        Err(error) if error.status() == Status::Unsupported => {
            described.refused = Some(error.to_string());
        }
        Err(error) => return Err(error),
    }
    Ok(described)
}

fn passes_of(mut graph: Graph, described: &mut ProgramDescription) -> Result<()> {
    let mut before = kinds(&graph.main);
    let mut n_before = graph.main.instructions.len();
    let target = Target { on_gpu: false, last_token_only: false };
    let layouts = passes::run_each(&mut graph, target, |name, graph| {
        let after = kinds(&graph.main);
        let n_after = graph.main.instructions.len();
        let changed = changes(&before, &after);
        described.passes.push(PassDescription {
            name: name.to_owned(),
            before: n_before,
            after: n_after,
            changed,
        });
        (before, n_before) = (after, n_after);
    })?;
    let number = |wanted| layouts.iter().filter(|&&layout| layout == wanted).count();
    described.layouts = Some(LayoutsDescription {
        stored: number(Layout::Stored),
        transposed: number(Layout::Transposed),
        absent: number(Layout::Absent),
    });
    Ok(())
}

type Kinds = BTreeMap<String, usize>;

fn kinds(chain: &Chain) -> Kinds {
    let mut kinds = Kinds::new();
    for instruction in &chain.instructions {
        *kinds.entry(instruction.op.kind()).or_default() += 1;
    }
    kinds
}

fn changes(before: &Kinds, after: &Kinds) -> Vec<ChangeDescription> {
    let mut names: Vec<&String> = before.keys().chain(after.keys()).collect();
    names.sort_unstable();
    names.dedup();
    let of = |kinds: &Kinds, name| kinds.get(name).copied().unwrap_or(0);
    names
        .into_iter()
        .map(|name| ChangeDescription {
            operation: name.clone(),
            before: of(before, name),
            after: of(after, name),
        })
        .filter(|change| change.before != change.after)
        .collect()
}

/// The instructions of a chain; none where there is no such chain.
fn instructions(graph: fb::MLXGraph<'_>, chain: i64) -> Vec<fb::Instruction<'_>> {
    let chains = graph.instruction_chains();
    match usize::try_from(chain) {
        Ok(index) if index < chains.len() => chains.get(index).instructions().iter().collect(),
        _ => Vec::new(),
    }
}

/// An operation's name, as the schema has it.
fn name(op: fb::OpNode) -> String {
    op.variant_name().map_or_else(
        || format!("operation {}", op.0),
        |name| name.trim_end_matches("Node").to_owned(),
    )
}

fn counts(names: impl Iterator<Item = String>) -> Vec<OperationCount> {
    let mut counted = Kinds::new();
    names.for_each(|name| *counted.entry(name).or_default() += 1);
    let mut counts: Vec<OperationCount> =
        counted.into_iter().map(|(operation, count)| OperationCount { operation, count }).collect();
    counts.sort_by_key(|counted| std::cmp::Reverse(counted.count));
    counts
}

fn attention(main: &[fb::Instruction<'_>]) -> Vec<AttentionDescription> {
    let mut layers = BTreeMap::<i64, usize>::new();
    for node in main.iter().filter_map(|found| found.op_as_update_and_attend_node()) {
        *layers.entry(node.layer_id().map_or(-1, i64::from)).or_default() += 1;
    }
    layers.into_iter().map(|(layer, calls)| AttentionDescription { layer, calls }).collect()
}

type SlotList<'a> =
    Option<flatbuffers::Vector<'a, flatbuffers::ForwardsUOffset<fb::SlotVariant<'a>>>>;

fn arguments<'a>(graph: fb::MLXGraph<'a>, slots: SlotList<'a>) -> Vec<ArgumentDescription> {
    let names = decode::tensor_names(graph);
    let argument = |slot: fb::SlotVariant<'a>| {
        if slot.slot_type() != fb::SlotType::TensorSlot {
            let dtype = String::from("int");
            return ArgumentDescription { name: String::from("integer"), dtype, shape: None };
        }
        let meta = decode::meta(graph, slot.idx()).ok();
        ArgumentDescription {
            name: decode::slot_name(&names, slot.idx()),
            dtype: meta.map_or_else(|| String::from("unknown"), |meta| dtype_name(meta).0),
            shape: meta.map(|meta| meta.shape().iter().map(dim).collect()),
        }
    };
    slots.into_iter().flatten().map(argument).collect()
}

fn dim(dim: fb::ShapeDim<'_>) -> DimDescription {
    match dim.value() {
        size if size >= 0 => DimDescription::Static(size),
        _ => DimDescription::Range {
            least: dim.min_value(),
            most: (dim.max_value() >= 0).then(|| dim.max_value()),
        },
    }
}

/// The name of a tensor's dtype, and the bytes of an element.
fn dtype_name(meta: fb::TensorMeta<'_>) -> (String, Option<u64>) {
    match dtype::dtype_of(meta.scalar_type()) {
        Ok(found) => (dtype::name(found).to_owned(), Some(dtype::item_size(found) as u64)),
        Err(_) => (format!("dtype {}", meta.scalar_type()), None),
    }
}

fn constants(graph: fb::MLXGraph<'_>) -> ConstantsDescription {
    let names = decode::tensor_names(graph);
    let n_described = graph.tensor_meta().map_or(0, |metas| metas.len());
    // No more than are described, however many the program says that it has.
    let n = (graph.num_constant_tensors() as usize).min(n_described) as u32;
    let tensors: Vec<ConstantDescription> = (0..n)
        .filter_map(|slot| {
            let meta = decode::meta(graph, slot).ok()?;
            let shape: Vec<i32> = meta.shape().iter().map(|dim| dim.value()).collect();
            let (dtype, item) = dtype_name(meta);
            let elements = shape.iter().try_fold(1u64, |product, &dim| {
                u64::try_from(dim).ok().and_then(|dim| product.checked_mul(dim))
            });
            let bytes = elements.zip(item).and_then(|(n, item)| n.checked_mul(item));
            let name = names.get(&slot).copied().unwrap_or_default().to_owned();
            Some(ConstantDescription { name, dtype, shape, bytes })
        })
        .collect();
    ConstantsDescription {
        count: tensors.len(),
        bytes: tensors.iter().filter_map(|tensor| tensor.bytes).fold(0, u64::saturating_add),
        tensors,
    }
}

fn instruction(found: &fb::Instruction<'_>) -> InstructionDescription {
    InstructionDescription { operation: name(found.op_type()), fields: fields(found) }
}

/// The fields of an instruction in the words of the schema's reader, with what stands for
/// a number or a tensor as such.
fn fields(found: &fb::Instruction<'_>) -> String {
    let text = format!("{found:?}");
    // `Instruction { op_type: X, op: X { fields } }`
    let inner = text.split_once(" op: ").map_or("", |(_, op)| op);
    let inner = inner.split_once('{').map_or("", |(_, fields)| fields);
    let mut text = inner.trim().strip_suffix("} }").unwrap_or_default().trim().to_owned();
    for (reference, short) in [("Tid", 't'), ("Vid", 'v')] {
        text = replaced(&text, &format!("{reference} {{ idx: "), |index| format!("{short}{index}"));
    }
    for choice in ["IntOrVidOrTid", "IntOrVid", "FloatOrVid", "VidOrTid"] {
        text = replaced(&text, &format!("{choice} {{ "), chosen);
    }
    replaced_some(&text)
}

/// `text` with each `start...` up to the next ` }` replaced by what `of` makes of the
/// part between.
fn replaced(text: &str, start: &str, of: impl Fn(&str) -> String) -> String {
    let mut made = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, found)) = rest.split_once(start) {
        let Some((inner, after)) = found.split_once(" }") else { break };
        made.push_str(before);
        made.push_str(&of(inner));
        rest = after;
    }
    made.push_str(rest);
    made
}

/// The one of a choice's fields that counts.
fn chosen(fields: &str) -> String {
    let field = |name: &str| {
        let found =
            fields.split(", ").find_map(|field| field.strip_prefix(name)?.strip_prefix(": "));
        found.unwrap_or_default()
    };
    let first = fields.split_once(": ").map_or("", |(name, _)| name);
    let name = match (field("is_vid"), field("kind")) {
        ("true", _) | (_, "1") => "vid",
        (_, "2") => "tid",
        _ if first == "literal" => "literal",
        _ => "tid",
    };
    field(name).to_owned()
}

/// `Some(x)` as `x`.
fn replaced_some(text: &str) -> String {
    const SOME: &str = "Some(";
    let mut made = String::with_capacity(text.len());
    // Of each bracket that is open, whether it is one that goes.
    let mut open = Vec::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        if let Some(inner) = rest.strip_prefix(SOME) {
            open.push(true);
            rest = inner;
            continue;
        }
        let goes = match c {
            '(' => {
                open.push(false);
                false
            }
            ')' => open.pop().unwrap_or(false),
            _ => false,
        };
        if !goes {
            made.push(c);
        }
        rest = &rest[c.len_utf8()..];
    }
    made
}

impl super::Program {
    /// Describes a payload, whether or not this build runs it. No constant is read, and
    /// MLX is not asked.
    ///
    /// # Errors
    /// [`Program`](Status::Program) for one that is damaged or foreign.
    pub fn describe(payload: &[u8]) -> Result<ProgramDescription, Error> {
        describe(payload)
    }
}
