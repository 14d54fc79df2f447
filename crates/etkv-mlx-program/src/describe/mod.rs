//! Describes a program: its inputs, operations and outputs, and the changes that the passes make.
//! Loads no constants and does not use MLX.

mod fields;

use std::collections::{BTreeMap, HashMap};

use serde::Serialize;

use crate::dtype;
use crate::error::{Result, Status};
use crate::fb;
use crate::frontend::decode::{self, decode, operation_name};
use crate::frontend::payload;
use crate::ir::{Chain, Graph, Value};
use crate::passes::{self, Layout, Target};
use crate::runtime::StepCompiler;
use crate::{ops, Program};

/// A description of a program. `docs/reports.md` lists the fields in JSON.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ProgramDescription {
    /// The payload's format, if it names one.
    pub format: Option<String>,
    /// The reason why this build refuses the program, if it does.
    pub refused: Option<String>,
    /// Operations of the program that this build lacks.
    pub missing: Vec<OperationCount>,
    /// The inputs, in the order of the arguments.
    pub inputs: Vec<ArgumentDescription>,
    /// The outputs, in the order of the arguments.
    pub outputs: Vec<ArgumentDescription>,
    /// The operations of a forward, as exported, the most frequent first.
    pub operations: Vec<OperationCount>,
    /// The operations that run once, when the program is loaded.
    pub operations_at_load: Vec<OperationCount>,
    /// The attention layers of the cache, in order.
    pub attention_layers: Vec<AttentionDescription>,
    /// The weights.
    pub constants: ConstantsDescription,
    /// The number of tensors that the program keeps between forwards. 0 if its KV cache is outside the program.
    pub mutable_buffers: u32,
    /// The effect of each pass on the CPU, in order; empty if the program is refused.
    pub passes: Vec<PassDescription>,
    /// The effect of each pass on a GPU, in order; empty if the program is refused.
    pub passes_on_gpu: Vec<PassDescription>,
    /// `captured` if the instructions and dtypes of the program allow steps of a few tokens to run as CUDA
    /// graphs; otherwise the reason why they do not. Absent if the program is refused, and in builds that
    /// capture no steps.
    pub steps_on_cuda: Option<String>,
    /// The layouts of constants on the CPU; absent if the program is refused.
    pub layouts: Option<LayoutsDescription>,
    /// Every instruction of a forward, as exported.
    pub instructions: Vec<InstructionDescription>,
    /// Every instruction that runs once, when the program is loaded.
    pub instructions_at_load: Vec<InstructionDescription>,
}

/// An argument: a tensor, or an integer.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ArgumentDescription {
    /// The name in the source program.
    pub name: String,
    /// The dtype; `int` for an integer.
    pub dtype: String,
    /// The shape; absent for an integer.
    pub shape: Option<Vec<DimDescription>>,
}

/// A dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum DimDescription {
    /// A fixed size.
    Static(i32),
    /// A range, with an upper limit if `most` is set.
    Range {
        /// The lower limit that the export traced. The program also runs with a size of 1.
        least: i32,
        /// The largest size.
        most: Option<i32>,
    },
}

/// The number of times that an operation occurs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
#[non_exhaustive]
pub struct OperationCount {
    pub operation: String,
    pub count: usize,
}

/// An attention layer of the cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct AttentionDescription {
    /// The layer's number; -1 if the program names none.
    pub layer: i64,
    /// The number of calls in a forward: more than 1 if layers share keys and values.
    pub calls: usize,
}

/// The weights.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ConstantsDescription {
    /// The number of constants.
    pub count: usize,
    /// The bytes of the constants whose dtype is known.
    pub bytes: u64,
    /// Each constant.
    pub tensors: Vec<ConstantDescription>,
}

/// A weight.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ConstantDescription {
    /// The key in the program's data.
    pub name: String,
    /// The dtype.
    pub dtype: String,
    /// The shape.
    pub shape: Vec<i32>,
    /// The number of bytes; absent if the dtype is unknown.
    pub bytes: Option<u64>,
}

/// The effect of a pass.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct PassDescription {
    /// The name of the pass.
    pub name: String,
    /// The number of instructions of a forward before the pass.
    pub before: usize,
    /// The number of instructions of a forward after the pass.
    pub after: usize,
    /// The operations whose number the pass changed.
    pub changed: Vec<ChangeDescription>,
}

/// An operation whose number a pass changed.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[allow(missing_docs)]
#[non_exhaustive]
pub struct ChangeDescription {
    pub operation: String,
    pub before: usize,
    pub after: usize,
}

/// The number of constants in each layout.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[non_exhaustive]
pub struct LayoutsDescription {
    /// The number of constants in the stored order.
    pub stored: usize,
    /// The number of constants that are transposed, as a matrix product reads them.
    pub transposed: usize,
    /// The number of constants in the stored order that are read through a transposed view.
    pub views: usize,
    /// The number of constants that are not loaded, because nothing uses them.
    pub absent: usize,
}

/// An instruction as exported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct InstructionDescription {
    /// The name of the operation.
    pub operation: String,
    /// The fields: `t7` is a tensor, `v2` an integer.
    pub fields: String,
}

fn describe(payload: &[u8], steps: Option<&dyn StepCompiler>) -> Result<ProgramDescription> {
    let graph = payload::read(payload)?;
    let main = instructions(graph, i64::from(graph.main_chain_idx()));
    let init = instructions(graph, i64::from(graph.init_chain_idx()));
    let missing = main.iter().chain(&init).filter(|found| !ops::is_known(found.op_type()));
    let mut described = ProgramDescription {
        format: graph.version().map(str::to_owned),
        refused: None,
        missing: counts(missing),
        inputs: arguments(graph, graph.input_map()),
        outputs: arguments(graph, graph.output_map()),
        operations: counts(&main),
        operations_at_load: counts(&init),
        attention_layers: attention(&main),
        constants: constants(graph),
        mutable_buffers: graph.num_mutable_buffer_tensors(),
        passes: Vec::new(),
        passes_on_gpu: Vec::new(),
        steps_on_cuda: None,
        layouts: None,
        instructions: main.iter().map(instruction).collect(),
        instructions_at_load: init.iter().map(instruction).collect(),
    };
    match decode(graph) {
        Ok(graph) => {
            let mut on_gpu = graph.clone();
            (described.passes_on_gpu, _) = passes_of(&mut on_gpu, true)?;
            described.steps_on_cuda = steps
                .map(|steps| steps.why_not(&on_gpu).unwrap_or_else(|| String::from("captured")));
            let mut graph = graph;
            let (passes, layouts) = passes_of(&mut graph, false)?;
            (described.passes, described.layouts) = (passes, Some(layouts));
        }
        Err(error) if error.status() == Status::Unsupported => {
            described.refused = Some(error.to_string());
        }
        Err(error) => return Err(error),
    }
    Ok(described)
}

/// Returns the effects of the passes for a device, and the layouts of constants there.
///
/// Constants are not read. Constants of one element are assumed to be 1, the usual scale of rotary tables.
fn passes_of(
    graph: &mut Graph,
    on_gpu: bool,
) -> Result<(Vec<PassDescription>, LayoutsDescription)> {
    let mut before = kinds(&graph.main);
    let mut n_before = graph.main.instructions.len();
    let mut passes = Vec::new();
    let target = Target { on_gpu, ..Target::default() };
    let constants = (0..).map(Value).zip(&graph.constants);
    let scalars: HashMap<Value, f32> = constants
        .filter(|(_, constant)| constant.shape.iter().all(|&size| size == 1))
        .map(|(value, _)| (value, 1.0))
        .collect();
    let layouts = passes::run_each(graph, target, &scalars, |name, graph| {
        let after = kinds(&graph.main);
        let n_after = graph.main.instructions.len();
        let changed = changes(&before, &after);
        passes.push(PassDescription {
            name: name.to_owned(),
            before: n_before,
            after: n_after,
            changed,
        });
        (before, n_before) = (after, n_after);
    })?;
    let number = |wanted| layouts.iter().filter(|&&layout| layout == wanted).count();
    let layouts = LayoutsDescription {
        stored: number(Layout::Stored),
        transposed: number(Layout::Transposed),
        views: number(Layout::View),
        absent: number(Layout::Absent),
    };
    Ok((passes, layouts))
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

/// Returns the instructions of a chain, or none if the chain does not exist.
fn instructions(graph: fb::MLXGraph<'_>, chain: i64) -> Vec<fb::Instruction<'_>> {
    let chains = graph.instruction_chains();
    match usize::try_from(chain) {
        Ok(index) if index < chains.len() => chains.get(index).instructions().iter().collect(),
        _ => Vec::new(),
    }
}

/// Returns how often each operation occurs, the most frequent first.
fn counts<'a>(found: impl IntoIterator<Item = &'a fb::Instruction<'a>>) -> Vec<OperationCount> {
    let mut counted = Kinds::new();
    for one in found {
        *counted.entry(operation_name(one.op_type())).or_default() += 1;
    }
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

/// Returns the name of a tensor's dtype, and the bytes of an element.
fn dtype_name(meta: fb::TensorMeta<'_>) -> (String, Option<u64>) {
    match dtype::dtype_of(meta.scalar_type()) {
        Ok(found) => (dtype::name(found).to_owned(), Some(dtype::item_size(found) as u64)),
        Err(_) => (format!("dtype {}", meta.scalar_type()), None),
    }
}

fn constants(graph: fb::MLXGraph<'_>) -> ConstantsDescription {
    let names = decode::tensor_names(graph);
    let n_described = graph.tensor_meta().map_or(0, |metas| metas.len());
    // The program may claim any number of constants. Only constants with a description count.
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
    InstructionDescription { operation: operation_name(found.op_type()), fields: fields::of(found) }
}

impl Program {
    /// Describes a payload, even one that this build does not run. `steps` returns whether steps of the program can
    /// be captured. Reads no constants and does not use MLX.
    ///
    /// # Errors
    /// [`Program`](Status::Program) for a payload that is damaged or foreign.
    pub fn describe(
        payload: &[u8],
        steps: Option<&dyn StepCompiler>,
    ) -> Result<ProgramDescription> {
        describe(payload, steps)
    }
}
