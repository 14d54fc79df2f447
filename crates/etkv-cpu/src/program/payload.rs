//! The exporter's description of a call: JSON, written by `python/etkv/export/cpu/calls.py`.

use etkv_core::{fail, Error, Result, Scoring, Status};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::experts::Function;
use crate::linear::{Scales, WeightFormat};
use crate::recurrent::{self, Activation};

#[cfg(test)]
mod tests;

/// The version of payloads that this build reads.
const VERSION: u32 = 1;

/// The maximum number of calls of a forward. No model has that many calls. The limit bounds the memory for
/// the flags of the calls.
const MAX_CALLS: usize = 1 << 16;

/// A payload with its version.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
    #[serde(flatten)]
    payload: Payload,
}

/// The payload of a call.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub enum Payload {
    /// Attention over a layer of the cache.
    UpdateAndAttend(Attend),
    /// The same with sinks or a softcap.
    UpdateAndAttendSinks(AttendSinks),
    /// A convolution over a recurrent layer of the cache.
    UpdateAndConvolve(Convolve),
    /// A recurrence over a recurrent layer of the cache.
    UpdateAndScan(Scan),
    /// The rows of hidden states for which the model's head computes logits.
    SelectRows,
    /// One of two tensors, chosen by the capacity of the cache.
    SelectByCapacity(SelectByCapacity),
    /// The experts that a router chose.
    RoutedExperts(RoutedExperts),
    /// Products of one input with packed weights.
    Linear(LinearCall),
    /// Rows of a packed embedding.
    Embedding(EmbeddingCall),
}

/// The fields that all calls of a forward have.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct LayerCall {
    /// A name that all calls of a program share. Programs of the same graph have the same name.
    pub program: String,
    /// The index of this call in a forward, from 0.
    pub call: usize,
    /// The number of calls of a forward.
    pub n_calls: usize,
    /// The number of attention layers that the calls use. These are the first attention layers of the cache.
    pub n_layers: usize,
    /// The number of recurrent layers that the calls use. These are the first recurrent layers of the cache.
    #[serde(default)]
    pub n_recurrent: usize,
    /// The index of the layer, among the attention layers or among the recurrent layers.
    pub layer: usize,
    /// Whether the program has a call that selects rows, computes all rows or computes the last row only.
    pub logits: Logits,
}

/// Attention over a layer of the cache.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Attend {
    #[serde(flatten)]
    pub call: LayerCall,
    /// The factor by which scores are multiplied.
    pub scale: f32,
    /// The indices of the inputs that are queries, keys, values and positions. Two may be the same.
    pub inputs: [usize; 4],
}

impl From<Attend> for AttendSinks {
    fn from(Attend { call, scale, inputs: [q, k, v, positions] }: Attend) -> Self {
        let inputs = [Some(q), Some(k), Some(v), Some(positions), None];
        Self { call, scale, softcap: None, inputs }
    }
}

/// Attention with sinks or a softcap over a layer of the cache. It is a separate op, so that an earlier build
/// refuses it instead of ignoring the sinks and the softcap.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct AttendSinks {
    #[serde(flatten)]
    pub call: LayerCall,
    /// The factor by which scores are multiplied.
    pub scale: f32,
    /// The softcap of the scaled scores.
    pub softcap: Option<f32>,
    /// The indices of the inputs that are queries, keys, values, positions and sinks. Only the sinks may be
    /// absent.
    pub inputs: [Option<usize>; 5],
}

/// A convolution over a recurrent layer of the cache.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Convolve {
    #[serde(flatten)]
    pub call: LayerCall,
    /// The activation of the sums.
    pub activation: Activation,
    pub channels: usize,
    /// The number of positions that a token reads, including its own.
    pub width: usize,
    /// The indices of the inputs that are columns, weights, bias and positions. Only the bias may be absent.
    pub inputs: [Option<usize>; 4],
}

/// A recurrence over a recurrent layer of the cache.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Scan {
    #[serde(flatten)]
    pub call: LayerCall,
    #[serde(flatten)]
    pub scan: recurrent::Scan,
    /// The indices of the inputs that are queries, keys, values, log decays, write strengths and positions.
    /// Only the write strengths may be absent.
    pub inputs: [Option<usize>; 6],
}

/// The rows of logits that a program can compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Logits {
    /// The rows that the load option selects.
    Selected,
    /// One row for each token.
    All,
    /// The row of the last token.
    Last,
}

/// One of two tensors: the second for a cache whose capacity exceeds the limit.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct SelectByCapacity {
    /// The largest capacity for which the first tensor is used.
    pub limit: i32,
}

/// The experts of a layer. A router chooses some of them for each token.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct RoutedExperts {
    pub n_experts: usize,
    /// The elements of a hidden state.
    pub hidden: usize,
    /// The elements between the two products.
    pub intermediate: usize,
    pub weights: OfProducts<Weights>,
    /// The number of weights of a row that share a scale, or 0 for floats.
    pub group_size: OfProducts<usize>,
    /// The activation between the products.
    pub activation: Function,
    pub gated: bool,
    pub alpha: f32,
    /// Absent if nothing is clamped.
    pub limit: Option<f32>,
    pub offset: f32,
    /// The indices of the inputs that are hidden states, experts of each token, factors of their outputs,
    /// weights of both products and their biases. Only the biases may be absent.
    pub inputs: [Option<usize>; 7],
}

/// Products of one input with one or more matrices.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct LinearCall {
    /// The elements of an input row.
    pub columns: usize,
    pub weights: Weights,
    /// The number of weights of a row that share a scale, or 0 for floats.
    pub group_size: usize,
    /// The number of rows of each matrix, which is the number of its outputs.
    pub rows: Vec<usize>,
    /// The indices of inputs: first the rows, then the weights and the bias of each matrix. Only biases may be
    /// absent.
    pub inputs: Vec<Option<usize>>,
}

/// Rows of an embedding.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct EmbeddingCall {
    /// The size of the vocabulary.
    pub rows: usize,
    /// The elements of a row.
    pub width: usize,
    pub weights: Weights,
    /// The number of weights of a row that share a scale, or 0 for floats.
    pub group_size: usize,
    /// The indices of the inputs that are ids and weights.
    pub inputs: [usize; 2],
}

/// Declares the names of formats.
macro_rules! weights {
    (|$group:ident| $($name:ident: $format:expr,)+) => {
        /// The storage format of packed weights. The scales of integers are bfloat16, unless the name includes
        /// another type.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
        #[serde(rename_all = "snake_case")]
        pub enum Weights {
            $($name,)+
        }

        impl Weights {
            /// Returns the format of weights in groups of `group`.
            pub fn format(self, $group: usize) -> WeightFormat {
                match self {
                    $(Self::$name => $format,)+
                }
            }
        }
    };
}

weights! {
    |group|
    Float32: WeightFormat::F32,
    Bfloat16: WeightFormat::Bf16,
    Int8: WeightFormat::Int8 { group, scales: Scales::Bf16 },
    Int8Float16: WeightFormat::Int8 { group, scales: Scales::F16 },
    Int8Float32: WeightFormat::Int8 { group, scales: Scales::F32 },
    Int8Bfloat16Biased: WeightFormat::Int8 { group, scales: Scales::Bf16Biased },
    Int8Float16Biased: WeightFormat::Int8 { group, scales: Scales::F16Biased },
    Int8Float32Biased: WeightFormat::Int8 { group, scales: Scales::F32Biased },
    Int8Nested: WeightFormat::Int8 { group, scales: Scales::Nested },
    Int4: WeightFormat::Int4 { group, scales: Scales::Bf16 },
    Int4Float16: WeightFormat::Int4 { group, scales: Scales::F16 },
    Int4Float32: WeightFormat::Int4 { group, scales: Scales::F32 },
    Int4Bfloat16Biased: WeightFormat::Int4 { group, scales: Scales::Bf16Biased },
    Int4Float16Biased: WeightFormat::Int4 { group, scales: Scales::F16Biased },
    Int4Float32Biased: WeightFormat::Int4 { group, scales: Scales::F32Biased },
    Int4Nested: WeightFormat::Int4 { group, scales: Scales::Nested },
    Fp4: WeightFormat::Fp4 { group },
}

/// A value for each of the two products of experts. In JSON, it is one value for both or a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OfProducts<T>(pub [T; 2]);

impl<'de, T: Copy + DeserializeOwned> Deserialize<'de> for OfProducts<T> {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let value = Value::deserialize(from)?;
        let pair = match value.is_array() {
            true => serde_json::from_value(value),
            false => serde_json::from_value(value).map(|both| [both; 2]),
        };
        pair.map(Self).map_err(D::Error::custom)
    }
}

impl Payload {
    /// Reads a payload.
    ///
    /// # Errors
    /// [`Program`](Status::Program) for bytes that are not a payload, and [`Version`](Status::Version) for a
    /// payload of another version.
    pub fn read(bytes: &[u8]) -> Result<Self> {
        let Versioned { version, payload } = serde_json::from_slice(bytes).map_err(|error| {
            Error::new(Status::Program, format!("the payload of a CPU call is damaged: {error}"))
        })?;
        if version != VERSION {
            fail!(
                Version,
                "expected a CPU program of version {VERSION}, got {version}; export it again"
            );
        }
        match &payload {
            Self::UpdateAndAttend(attend) => {
                attend.call.check(attend.call.n_layers)?;
                check_inputs(&attend.inputs.map(Some), &[])?;
                check_scale(attend.scale)?;
            }
            Self::UpdateAndAttendSinks(attend) => {
                attend.call.check(attend.call.n_layers)?;
                check_inputs(&attend.inputs, &[4])?;
                check_scale(attend.scale)?;
                let softcap = attend.softcap;
                let scoring = Scoring::<[f32]> { softcap, ..attend.scale.into() };
                scoring.check().map_err(|error| Error::new(Status::Program, error.message()))?;
            }
            Self::UpdateAndConvolve(convolve) => {
                convolve.call.check(convolve.call.n_recurrent)?;
                check_inputs(&convolve.inputs, &[2])?;
            }
            Self::UpdateAndScan(scan) => {
                scan.call.check(scan.call.n_recurrent)?;
                check_inputs(&scan.inputs, &[4])?;
                check_scale(scan.scan.scale)?;
            }
            Self::RoutedExperts(call) => {
                for (weights, group) in call.weights.0.into_iter().zip(call.group_size.0) {
                    weights.check_group(group)?;
                }
                check_inputs(&call.inputs, &[5, 6])?;
                call.experts().check()?;
            }
            Self::Linear(call) => {
                call.weights.check_group(call.group_size)?;
                call.linear().check()?;
                if call.inputs.len() != 1 + 2 * call.rows.len() {
                    fail!(
                        Program,
                        "expected {} inputs of {} products, got {}",
                        1 + 2 * call.rows.len(),
                        call.rows.len(),
                        call.inputs.len()
                    );
                }
                let biases: Vec<usize> = (2..call.inputs.len()).step_by(2).collect();
                check_inputs(&call.inputs, &biases)?;
            }
            Self::Embedding(call) => {
                call.weights.check_group(call.group_size)?;
                call.embedding().check()?;
                check_inputs(&call.inputs.map(Some), &[])?;
            }
            Self::SelectRows | Self::SelectByCapacity(_) => {}
        }
        Ok(payload)
    }
}

impl Weights {
    /// Refuses a group size for weights that have no scales.
    fn check_group(self, group: usize) -> Result<()> {
        if matches!(self, Self::Float32 | Self::Bfloat16) && group != 0 {
            fail!(Program, "group size: expected 0 for weights in floats, got {group}");
        }
        Ok(())
    }
}

impl LayerCall {
    fn check(&self, n_layers: usize) -> Result<()> {
        if self.n_calls > MAX_CALLS {
            fail!(Program, "expected at most {MAX_CALLS} calls of a forward, got {}", self.n_calls);
        }
        if self.call >= self.n_calls {
            fail!(Program, "expected a call below {}, got {}", self.n_calls, self.call);
        }
        if self.layer >= n_layers {
            fail!(Program, "expected a layer below {n_layers}, got {}", self.layer);
        }
        Ok(())
    }
}

/// Returns the number of tensors of a call with these inputs.
pub fn n_inputs(inputs: &[Option<usize>]) -> usize {
    inputs.iter().flatten().max().map_or(0, |last| last + 1)
}

/// Refuses invalid inputs. Only those at `optional` may be absent.
fn check_inputs(inputs: &[Option<usize>], optional: &[usize]) -> Result<()> {
    let named: Vec<usize> = inputs.iter().flatten().copied().collect();
    if named.iter().any(|&input| input >= inputs.len()) {
        fail!(Program, "expected inputs from 0 to {}, got {named:?}", inputs.len() - 1);
    }
    if let Some(absent) =
        (0..inputs.len()).find(|&at| inputs[at].is_none() && !optional.contains(&at))
    {
        fail!(Program, "input {absent} of a call is absent");
    }
    Ok(())
}

fn check_scale(scale: f32) -> Result<()> {
    if !scale.is_finite() {
        fail!(Program, "expected a finite scale, got {scale}");
    }
    Ok(())
}
