//! Tests with hand-made payloads: inconsistent payloads, payloads whose cost grows faster than their size, and rare
//! output of the exporter.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use etkv_core::Session;
use flatbuffers::{FlatBufferBuilder, UnionWIPOffset, WIPOffset};
use rustix::time::{clock_gettime, ClockId};

use super::passes::{self, Target};
use super::{fb, Argument, ConstantSource, Host, LoadOptions, Program};
use crate::error::{Result, Status};
use crate::frontend::{decode, payload};

mod allocations;
mod control;
mod functions;
mod recurrent;
mod sinks;

pub const FLOAT32: i8 = 6;
pub const INT64: i8 = 4;
/// A dimension that is known only at run time.
pub const OPEN: i32 = -1;

pub type Node = (fb::OpNode, WIPOffset<UnionWIPOffset>);
pub type Builder<'a> = FlatBufferBuilder<'a>;

/// A program without its instructions. Slots are numbered as in the payload: constants, inputs, buffers,
/// temporaries.
#[derive(Default)]
pub struct Parts {
    /// Names and shapes, in float32.
    pub constants: Vec<(String, Vec<i32>)>,
    /// Shapes and dtypes.
    pub inputs: Vec<(Vec<i32>, i8)>,
    /// The shapes of the program's buffers, in float32.
    pub buffers: Vec<Vec<i32>>,
    pub n_temporaries: u32,
    pub n_values: u32,
    /// Whether all chains except the first are nested.
    pub inner: bool,
    /// Replaces all inputs, in order.
    pub input_map: Option<Vec<(fb::SlotType, u32)>>,
    pub outputs: Vec<u32>,
    /// Whether all inputs share one table in the payload.
    pub one_meta: bool,
}

impl Parts {
    /// Returns the payload of the program. The first chain is the main chain. A second chain is the init chain,
    /// unless chains are nested.
    pub fn payload(self, chains: impl FnOnce(&mut Builder) -> Vec<Vec<Node>>) -> Vec<u8> {
        let builder = &mut FlatBufferBuilder::new();
        let chains: Vec<_> = chains(builder)
            .into_iter()
            .map(|nodes| {
                let instructions: Vec<_> = nodes
                    .into_iter()
                    .map(|(op_type, op)| {
                        let args = fb::InstructionArgs { op_type, op: Some(op) };
                        fb::Instruction::create(builder, &args)
                    })
                    .collect();
                let instructions = Some(builder.create_vector(&instructions));
                fb::InstructionChain::create(builder, &fb::InstructionChainArgs { instructions })
            })
            .collect();
        let n_constants = self.constants.len() as u32;
        let n_inputs = self.inputs.len() as u32;
        let input_names = (0..n_inputs).map(|input| format!("in{input}"));
        let names = self.constants.iter().map(|(name, _)| name.clone()).chain(input_names);
        let named: Vec<_> = (0..)
            .zip(names)
            .map(|(slot, name)| {
                let name = Some(builder.create_string(&name));
                let slot = Some(variant(builder, fb::SlotType::TensorSlot, slot));
                fb::NamedSlot::create(builder, &fb::NamedSlotArgs { name, slot })
            })
            .collect();
        let mut metas: Vec<_> =
            self.constants.iter().map(|(_, shape)| meta(builder, shape, FLOAT32)).collect();
        for (index, (shape, dtype)) in self.inputs.iter().enumerate() {
            let made = (self.one_meta && index > 0).then(|| metas[n_constants as usize]);
            metas.push(made.unwrap_or_else(|| meta(builder, shape, *dtype)));
        }
        metas.extend(self.buffers.iter().map(|shape| meta(builder, shape, FLOAT32)));
        let every_input = || {
            (n_constants..n_constants + n_inputs)
                .map(|slot| (fb::SlotType::TensorSlot, slot))
                .collect()
        };
        let input_map = variants(builder, self.input_map.unwrap_or_else(every_input));
        let outputs = self.outputs.into_iter().map(|slot| (fb::SlotType::TensorSlot, slot));
        let output_map = variants(builder, outputs.collect());
        let args = fb::MLXGraphArgs {
            num_constant_tensors: n_constants,
            num_input_tensors: n_inputs,
            num_mutable_buffer_tensors: self.buffers.len() as u32,
            num_temp_tensors: self.n_temporaries,
            num_values: self.n_values,
            // The second of two chains is the init chain.
            init_chain_idx: if chains.len() > 1 && !self.inner { 1 } else { -1 },
            instruction_chains: Some(builder.create_vector(&chains)),
            input_map: Some(input_map),
            output_map: Some(output_map),
            named_slots: Some(builder.create_vector(&named)),
            tensor_meta: Some(builder.create_vector(&metas)),
            ..Default::default()
        };
        let graph = fb::MLXGraph::create(builder, &args);
        builder.finish(graph, None);
        let mut payload = vec![0; 24];
        payload[4..8].copy_from_slice(b"MLX0");
        payload.extend_from_slice(builder.finished_data());
        payload
    }
}

fn variant<'a>(
    builder: &mut Builder<'a>,
    slot_type: fb::SlotType,
    idx: u32,
) -> WIPOffset<fb::SlotVariant<'a>> {
    fb::SlotVariant::create(builder, &fb::SlotVariantArgs { idx, slot_type })
}

type Variants<'a> =
    WIPOffset<flatbuffers::Vector<'a, flatbuffers::ForwardsUOffset<fb::SlotVariant<'a>>>>;

/// Equal adjacent slots share a table.
fn variants<'a>(builder: &mut Builder<'a>, slots: Vec<(fb::SlotType, u32)>) -> Variants<'a> {
    let mut last = None;
    let made: Vec<_> = slots
        .into_iter()
        .map(|(slot_type, slot)| match last {
            Some((before, table)) if before == (slot_type, slot) => table,
            _ => {
                let table = variant(builder, slot_type, slot);
                last = Some(((slot_type, slot), table));
                table
            }
        })
        .collect();
    builder.create_vector(&made)
}

fn meta<'a>(
    builder: &mut Builder<'a>,
    shape: &[i32],
    scalar_type: i8,
) -> WIPOffset<fb::TensorMeta<'a>> {
    let dims: Vec<_> = shape
        .iter()
        .map(|&value| {
            let args = fb::ShapeDimArgs { value, min_value: -1, max_value: -1 };
            fb::ShapeDim::create(builder, &args)
        })
        .collect();
    let shape = Some(builder.create_vector(&dims));
    fb::TensorMeta::create(builder, &fb::TensorMetaArgs { shape, scalar_type, dim_order: None })
}

/// Creates a node of a kind. The arguments are the type of the node's fields, then the slots of its tensors, then the
/// other fields.
macro_rules! node {
    (
        $builder:expr, $kind:ident, $args:ident,
        [$($tensor:ident: $slot:expr),*] $(, $field:ident: $value:expr)* $(,)?
    ) => {
        (
            fb::OpNode::$kind,
            fb::$kind::create(
                $builder,
                &fb::$args {
                    $($tensor: Some(&fb::Tid::new($slot)),)*
                    $($field: $value,)*
                },
            )
            .as_union_value(),
        )
    };
}
pub(crate) use node;

pub type Int<'a> = WIPOffset<fb::IntOrVid<'a>>;
pub type Ints<'a> =
    WIPOffset<flatbuffers::Vector<'a, flatbuffers::ForwardsUOffset<fb::IntOrVid<'a>>>>;

pub fn literal<'a>(builder: &mut Builder<'a>, literal: i64) -> Int<'a> {
    fb::IntOrVid::create(builder, &fb::IntOrVidArgs { literal, ..Default::default() })
}

pub fn literals<'a>(builder: &mut Builder<'a>, numbers: &[i64]) -> Ints<'a> {
    let made: Vec<_> = numbers.iter().map(|&number| literal(builder, number)).collect();
    builder.create_vector(&made)
}

fn neg(builder: &mut Builder, x: u32, out: u32) -> Node {
    node!(builder, NegNode, NegNodeArgs, [x: x, out: out])
}

fn copy(builder: &mut Builder, x: u32, out: u32) -> Node {
    node!(builder, IdCopyNode, IdCopyNodeArgs, [x: x, out: out])
}

fn add(builder: &mut Builder, a: u32, b: u32, out: u32) -> Node {
    node!(builder, AddNode, AddNodeArgs, [a: a, b: b, out: out])
}

fn transpose(builder: &mut Builder, x: u32, perm: &[i32], out: u32) -> Node {
    let perm = Some(builder.create_vector(perm));
    node!(builder, TransposeNode, TransposeNodeArgs, [x: x, out: out], perm: perm)
}

fn product(builder: &mut Builder, a: u32, b: u32, out: u32) -> Node {
    node!(
        builder, AddmmNode, AddmmNodeArgs, [mat1: a, mat2: b, out: out],
        bias: None, alpha: 1.0, beta: 1.0
    )
}

pub fn expand(builder: &mut Builder, x: u32, out: u32) -> Node {
    node!(builder, ExpandDimsNode, ExpandDimsNodeArgs, [x: x, out: out], axis: 0)
}

/// Gathers rows of `x` at the indices in `index`.
pub fn take(builder: &mut Builder, x: u32, index: u32, out: u32) -> Node {
    let index = fb::Tid::new(index);
    let args = fb::IntOrVidOrTidArgs { kind: 2, tid: Some(&index), ..Default::default() };
    let index = Some(fb::IntOrVidOrTid::create(builder, &args));
    node!(builder, TakeNode, TakeNodeArgs, [x: x, out: out], index: index, axis: 0)
}

fn size(builder: &mut Builder, x: u32, out: u32) -> Node {
    let out = fb::Vid::new(out);
    node!(builder, SymSizeNode, SymSizeNodeArgs, [a: x], dim: 1, out: Some(&out))
}

pub fn attend(builder: &mut Builder, rows: u32, position: u32, out: u32) -> Node {
    node!(
        builder, UpdateAndAttendNode, UpdateAndAttendNodeArgs,
        [q: rows, k: rows, v: rows, position: position, out: out],
        layer_id: Some(0), scale: Some(1.0), out_dtype: None
    )
}

// ---- Inconsistent payloads -------------------------------------------------

fn refusal(payload: &[u8]) -> String {
    let error = Program::check(payload).unwrap_err();
    assert_eq!(error.status(), Status::Program);
    error.message().to_owned()
}

#[test]
fn a_slot_is_one_input() {
    let program = |input_map| {
        let inputs = vec![(vec![1], INT64); 2];
        let parts = Parts { inputs, n_values: 2, input_map: Some(input_map), ..Default::default() };
        parts.payload(|_| vec![vec![]])
    };
    const TENSOR: fb::SlotType = fb::SlotType::TensorSlot;
    const INT: fb::SlotType = fb::SlotType::IntValueSlot;
    Program::check(&program(vec![(TENSOR, 1), (INT, 1), (TENSOR, 0)])).unwrap();
    let twice = program(vec![(TENSOR, 1), (TENSOR, 0), (TENSOR, 1)]);
    assert_eq!(refusal(&twice), "tensor 1 is named by two inputs");
    let twice = program(vec![(INT, 0), (INT, 0)]);
    assert_eq!(refusal(&twice), "value 0 is named by two inputs");
    let past = program(vec![(INT, 2)]);
    assert_eq!(refusal(&past), "value 2 is an input, and the program has 2");
}

#[test]
fn constants_have_names_of_their_own() {
    let constants = ["w", "v", "w"].map(|name| (name.to_owned(), vec![1]));
    let payload =
        Parts { constants: constants.to_vec(), ..Default::default() }.payload(|_| vec![vec![]]);
    assert_eq!(refusal(&payload), "constants 0 and 2 have the same name, `w`");
}

#[test]
fn an_init_chain_reads_no_input() {
    let parts = || Parts {
        constants: vec![("w".to_owned(), vec![1])],
        inputs: vec![(vec![1], FLOAT32)],
        outputs: vec![0],
        ..Default::default()
    };
    let payload = parts().payload(|builder| vec![vec![], vec![neg(builder, 1, 0)]]);
    assert_eq!(refusal(&payload), "the init chain reads value 1, which is an input or a buffer");
    // Values that the init chain writes over an input are dropped after the chain.
    let chains = |builder: &mut Builder| vec![vec![neg(builder, 1, 0)], vec![neg(builder, 0, 1)]];
    Program::check(&parts().payload(chains)).unwrap();
}

// ---- Cost grows with the size ----------------------------------------------

const MEGABYTE: usize = 1 << 20;

/// Decodes a payload and runs the passes of both devices.
fn read_whole(payload: &[u8]) -> Result<()> {
    payload::read(payload).and_then(decode::decode).and_then(|graph| {
        [true, false].into_iter().try_for_each(|on_gpu| {
            let target = Target { on_gpu, ..Target::default() };
            passes::run(&mut graph.clone(), target, &HashMap::new()).map(drop)
        })
    })
}

/// Decodes a payload of about a megabyte (`scale` 4), and one of a quarter of that size (`scale` 1). The large
/// payload must not take much more than four times as long. With quadratic cost it would take sixteen times as long.
/// Compares the minimum CPU time of this thread over a few tries, so that other load on the machine does not matter.
fn grows_with_its_size(make: impl Fn(usize) -> Vec<u8>) -> Result<()> {
    let cost = |payload: &[u8]| {
        let spent = || {
            let now = clock_gettime(ClockId::ThreadCPUTime);
            Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
        };
        let begin = spent();
        let result = read_whole(payload);
        (spent() - begin, result)
    };
    let [small, large] = [1, 4].map(make);
    assert!((MEGABYTE / 2..MEGABYTE * 2).contains(&large.len()), "{} bytes", large.len());
    assert!(small.len() < large.len() / 3, "{} and {} bytes", small.len(), large.len());
    let mut least = [Duration::MAX; 2];
    for _ in 0..5 {
        let (one, _) = cost(&small);
        let (four, result) = cost(&large);
        least = [one.min(least[0]), four.min(least[1])];
        // An immediate refusal takes too little time to measure.
        if least[1] < least[0] * 9 + Duration::from_millis(2) {
            return result;
        }
    }
    panic!("{} bytes cost {:?}, and {} bytes {:?}", small.len(), least[0], large.len(), least[1]);
}

fn tokens(n: usize) -> Vec<(Vec<i32>, i8)> {
    vec![(vec![1, OPEN], INT64); n]
}

#[test]
fn reading_many_inputs_grows_with_their_number() {
    let made =
        |scale| Parts { inputs: tokens(3_500 * scale), one_meta: true, ..Default::default() };
    grows_with_its_size(|scale| made(scale).payload(|_| vec![vec![]])).unwrap();
}

#[test]
fn refusing_one_input_many_times_grows_with_its_number() {
    let made = |scale: usize| {
        let n = 1_750 * scale;
        let again = (fb::SlotType::TensorSlot, n as u32 - 1);
        Parts {
            inputs: tokens(n),
            one_meta: true,
            input_map: Some(vec![again; 37_500 * scale]),
            ..Default::default()
        }
    };
    assert!(grows_with_its_size(|scale| made(scale).payload(|_| vec![vec![]])).is_err());
}

#[test]
fn looking_sizes_of_inputs_up_grows_with_their_number() {
    let made = |scale| {
        let n = 2_250 * scale;
        let parts = Parts { inputs: tokens(n), one_meta: true, n_values: 1, ..Default::default() };
        let last = n as u32 - 1;
        parts.payload(|builder| vec![(0..2 * n).map(|_| size(builder, last, 0)).collect()])
    };
    grows_with_its_size(made).unwrap();
}

#[test]
fn counting_outputs_of_instructions_grows_with_their_number() {
    let made = |scale| {
        let parts = Parts {
            inputs: vec![(vec![1], FLOAT32)],
            n_temporaries: 1,
            outputs: vec![1; 25_000 * scale],
            ..Default::default()
        };
        let n = 3_500 * scale;
        parts.payload(|builder| vec![(0..n).map(|_| neg(builder, 0, 1)).collect()])
    };
    grows_with_its_size(made).unwrap();
}

#[test]
fn tracing_positions_through_views_grows_with_their_number() {
    let made = |scale: usize| {
        let parts = Parts {
            inputs: vec![(vec![OPEN], INT64), (vec![1, 1, OPEN, 8], FLOAT32)],
            n_temporaries: 2,
            ..Default::default()
        };
        parts.payload(|builder| {
            let mut nodes = vec![expand(builder, 0, 2)];
            nodes.extend((0..5_000 * scale).map(|_| expand(builder, 2, 2)));
            nodes.extend((0..3_500 * scale).map(|_| attend(builder, 1, 2, 3)));
            vec![nodes]
        })
    };
    grows_with_its_size(made).unwrap();
}

/// A small payload that would expand to a large one, because many references point to the same bytes.
#[test]
fn what_many_places_share_is_refused() {
    // A shape of many dimensions that many inputs share.
    let inputs = vec![(vec![1; 20_000], INT64); 8_000];
    let parts = Parts { inputs, one_meta: true, ..Default::default() };
    let error = read_whole(&parts.payload(|_| vec![vec![]])).unwrap_err();
    assert_eq!(error.status(), Status::Program);
    assert!(error.message().contains("the payload is damaged"), "{error}");
}

// ---- Rare output of the exporter -------------------------------------------

/// The constants of a program, by name.
pub struct Weights(BTreeMap<&'static str, Vec<u8>>);

impl Weights {
    pub fn of<const N: usize>(constants: [(&'static str, &[f32]); N]) -> Self {
        Self(constants.map(|(name, numbers)| (name, bytes(numbers))).into())
    }
}

impl ConstantSource for Weights {
    fn find(&mut self, name: &str) -> Option<&[u8]> {
        self.0.get(name).map(|bytes| &bytes[..])
    }
}

/// The shape and the bytes of each output.
#[derive(Default)]
struct Outputs(Vec<(Vec<i32>, Vec<u8>)>);

impl Host for Outputs {
    fn place(
        &mut self,
        index: usize,
        shape: &[i32],
        n_bytes: usize,
    ) -> etkv_core::Result<&mut [u8]> {
        assert_eq!(index, self.0.len());
        self.0.push((shape.to_vec(), vec![0; n_bytes]));
        Ok(&mut self.0[index].1)
    }

    fn set_integer(&mut self, _: usize, _: i64) -> etkv_core::Result<()> {
        panic!("an output is an integer");
    }
}

pub fn bytes(numbers: &[f32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_ne_bytes()).collect()
}

/// Loads a program with these constants, for the cache of a session if there is one.
pub fn load(payload: &[u8], mut weights: Weights, session: Option<&Session>) -> Result<Program> {
    let mut options = LoadOptions::default();
    options.cache_key = session.map(|session| session.key().to_owned());
    Program::load(payload, &mut weights, &options, None)
}

/// Runs a program. Returns the shape and the elements of each output.
fn execute(program: &Program, inputs: &[Argument]) -> Result<Vec<(Vec<i32>, Vec<f32>)>> {
    let mut made = Outputs::default();
    program.execute(inputs, &vec![FLOAT32; program.n_outputs()], &mut made)?;
    Ok(made.0.into_iter().map(|(shape, bytes)| (shape, floats(&bytes))).collect())
}

/// Returns positions as an input.
fn positions(range: std::ops::Range<i64>) -> Vec<u8> {
    range.flat_map(i64::to_ne_bytes).collect()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|chunk| f32::from_ne_bytes(chunk.try_into().unwrap())).collect()
}

const W: [f32; 6] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
const V: [f32; 6] = [-1.0, 0.0, 1.0, 0.0, 2.0, 0.0];

/// Loads a program with the weights `w` and `v`, both `[2, 3]`, and an input `[1, 3]`. Returns its result for ones.
fn run(
    n_temporaries: u32,
    outputs: Vec<u32>,
    chains: impl FnOnce(&mut Builder) -> Vec<Vec<Node>>,
) -> Vec<(Vec<i32>, Vec<f32>)> {
    let parts = Parts {
        constants: ["w", "v"].map(|name| (name.to_owned(), vec![2, 3])).to_vec(),
        inputs: vec![(vec![1, 3], FLOAT32)],
        n_temporaries,
        outputs,
        ..Default::default()
    };
    let weights = Weights::of([("w", &W), ("v", &V)]);
    let program = load(&parts.payload(chains), weights, None).unwrap();
    let ones = bytes(&[1.0; 3]);
    execute(&program, &[Argument::tensor(FLOAT32, &[1, 3], &ones)]).unwrap()
}

#[test]
fn a_constant_may_be_an_output() {
    // 3: the transpose of w, 4: the input times it.
    let made = run(2, vec![4, 0, 1], |builder| {
        vec![vec![transpose(builder, 0, &[1, 0], 3), product(builder, 2, 3, 4)]]
    });
    let expected =
        [(vec![1, 2], vec![6.0, 15.0]), (vec![2, 3], W.to_vec()), (vec![2, 3], V.to_vec())];
    assert_eq!(made, expected);
}

#[test]
fn a_constant_that_init_makes_may_be_an_output() {
    let made = run(0, vec![0, 1], |builder| vec![vec![], vec![neg(builder, 1, 0)]]);
    assert_eq!(made, [(vec![2, 3], V.map(|x| -x).to_vec()), (vec![2, 3], V.to_vec())]);
}

#[test]
fn init_may_exchange_constants() {
    // Slot 3 is the temporary of the exchange.
    let made = run(1, vec![0, 1], |builder| {
        vec![vec![], vec![copy(builder, 0, 3), copy(builder, 1, 0), copy(builder, 3, 1)]]
    });
    assert_eq!(made, [(vec![2, 3], V.to_vec()), (vec![2, 3], W.to_vec())]);
}
