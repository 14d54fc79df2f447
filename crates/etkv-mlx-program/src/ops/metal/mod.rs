//! Metal kernels, identified by their computation.
//!
//! ExecuTorch's exporter writes some operations as the Metal source of a kernel. The source is not read: a
//! kernel is identified by its name, and its arguments and template arguments are checked. MLX operations
//! perform its computation on every device, including Metal. An unknown kernel is refused when the program is
//! loaded.

mod gated_delta;
mod gguf;
mod turboquant;

use mlx_rs::{Array, Dtype};
use smallvec::SmallVec;

use super::indexing::check_range;
use super::shape::sizes;
use super::{instruction, OpResult};
use crate::dtype::{dtype_of, is_float, name};
use crate::error::{fail, Result};
use crate::fb;
use crate::ir::{Gguf, Instruction, Int, MetalKernel, Op, Out, Value};
use crate::ops::frame::Frame;
use crate::ops::slots::Slots;
use etkv::mlx::bits::{and, or, shl, shr};

/// The maximum axes of a result.
const MAX_AXES: usize = 8;

/// The names of the kernels, for messages.
const NAMES: &str =
    "gated_delta_step, gguf_{q4k, q5k, q6k}_{matvec, matmul, embedding}, tq4_compress, \
                     tq_dequant, tq_norm";

pub fn metal_kernel(slots: &mut Slots, node: fb::MetalKernelNode) -> Result<Instruction> {
    let place = || format!("Metal kernel {}", shown(node.name()));
    let kernel = KernelDescription::read(node)
        .and_then(|described| described.kernel())
        .map_err(|error| error.at(place()))?;
    let inputs = node.inputs().iter().map(|tid| slots.read(tid)).collect::<Result<_>>()?;
    let shapes = shapes(slots, node).map_err(|error| error.at(place()))?;
    let mut outs = node.outputs().iter().map(|tid| slots.write(tid));
    // The values of several outputs are consecutive, so the first one and their number identify them.
    let out = match (outs.next().transpose()?, outs.collect::<Result<Vec<_>>>()?.len()) {
        (Some(Out::Tensor(first)), others @ 1..) => Out::Tensors(first, 1 + others as u32),
        (Some(out), _) => out,
        (None, _) => fail!(Internal, "{} has no outputs", place()),
    };
    Ok(instruction(Op::MetalKernel { kernel, inputs, shapes }, out))
}

/// A name in messages.
fn shown(name: &str) -> String {
    format!("`{}`", name.chars().take(64).flat_map(char::escape_default).collect::<String>())
}

/// Reads the shapes of the outputs, which are concatenated in the payload.
fn shapes(slots: &Slots, node: fb::MetalKernelNode) -> Result<Vec<Vec<Int>>> {
    let mut flat = node.output_shapes_flat().into_iter().flatten();
    let lengths = node.output_shape_lengths();
    let n: i64 = lengths.iter().flatten().map(i64::from).sum();
    let found = node.output_shapes_flat().map_or(0, |flat| flat.len());
    if n != found as i64 || lengths.map_or(0, |lengths| lengths.len()) != node.outputs().len() {
        let lengths: Vec<i32> = lengths.into_iter().flatten().take(MAX_AXES).collect();
        let outputs = node.outputs().len();
        fail!(
            Program,
            "expected the shapes of {outputs} outputs, got {found} sizes for shapes of {lengths:?}"
        );
    }
    lengths
        .into_iter()
        .flatten()
        .map(|length| match usize::try_from(length) {
            Ok(length) if length <= MAX_AXES => {
                flat.by_ref().take(length).map(|size| size_of(slots, size)).collect()
            }
            _ => fail!(Program, "expected outputs of 0 to {MAX_AXES} axes, got {length}"),
        })
        .collect()
}

fn size_of(slots: &Slots, size: fb::IntOrVid) -> Result<Int> {
    let size = slots.int(size)?;
    if let Int::Literal(literal) = size {
        if i32::try_from(literal).map_or(true, |literal| literal < 0) {
            fail!(Program, "expected output sizes from 0 to {}, got {literal}", i32::MAX);
        }
    }
    Ok(size)
}

/// A template argument.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Argument {
    Int(i32),
    Bool(bool),
    Dtype(Dtype),
}

/// A node's description of its kernel.
struct KernelDescription<'a> {
    name: &'a str,
    inputs: Vec<&'a str>,
    outputs: Vec<&'a str>,
    dtypes: Vec<Dtype>,
    template: Vec<(&'a str, Argument)>,
}

type Names<'a> = flatbuffers::Vector<'a, flatbuffers::ForwardsUOffset<&'a str>>;

impl<'a> KernelDescription<'a> {
    /// Reads a node. Refuses options that no known kernel uses.
    fn read(node: fb::MetalKernelNode<'a>) -> Result<Self> {
        if node.atomic_outputs() || !node.ensure_row_contiguous() || node.init_value().is_some() {
            fail!(
                Unsupported,
                "expected row-contiguous inputs and outputs that are neither atomic nor initialized"
            );
        }
        let described = Self {
            name: node.name(),
            inputs: names("inputs", node.inputs().len(), node.input_names())?,
            outputs: names("outputs", node.outputs().len(), node.output_names())?,
            dtypes: node
                .output_dtypes()
                .into_iter()
                .flatten()
                .map(dtype_of)
                .collect::<Result<_>>()?,
            template: template(node)?,
        };
        if described.dtypes.len() != described.outputs.len() {
            let (dtypes, outputs) = (described.dtypes.len(), described.outputs.len());
            fail!(Program, "expected the dtypes of {outputs} outputs, got {dtypes}");
        }
        Ok(described)
    }

    /// Returns the kernel with this name, after checks of its arguments.
    fn kernel(&self) -> Result<MetalKernel> {
        let gguf = self.name.strip_prefix("gguf_").and_then(|rest| rest.split_once('_'));
        let kernel = match (self.name, gguf) {
            ("tq4_compress", _) => self.tq_compress()?,
            ("tq_dequant", _) => self.tq_dequant()?,
            ("tq_norm", _) => self.tq_norm()?,
            ("gated_delta_step", _) => self.gated_delta()?,
            (_, Some((format, form))) => match (gguf_format(format), form) {
                (Some(format), "matvec" | "matmul") => self.gguf_linear(format)?,
                (Some(format), "embedding") => self.gguf_embedding(format)?,
                _ => return self.unknown(),
            },
            _ => return self.unknown(),
        };
        if let Some(dtype) = self.dtypes.iter().find(|&&dtype| dtype != kernel.dtype()) {
            let (expected, found) = (name(kernel.dtype()), name(*dtype));
            fail!(Unsupported, "expected an output of {expected}, got {found}");
        }
        Ok(kernel)
    }

    fn unknown(&self) -> Result<MetalKernel> {
        fail!(Unsupported, "this build has no implementation of it; available: {NAMES}")
    }

    fn tq_compress(&self) -> Result<MetalKernel> {
        self.has(&["values", "boundaries"], &["out"], &["InT", "B"])?;
        let boundaries = self.size("B")?;
        if boundaries != turboquant::BOUNDARIES {
            let expected = turboquant::BOUNDARIES;
            fail!(Unsupported, "expected template argument `B` of {expected}, got {boundaries}");
        }
        Ok(MetalKernel::TqCompress { dtype: self.float("InT")? })
    }

    fn tq_dequant(&self) -> Result<MetalKernel> {
        self.has(&["packed", "norms", "centroids"], &["out"], &["InT", "D"])?;
        Ok(MetalKernel::TqDequant { dtype: self.float("InT")?, dim: self.multiple("D", 64)? })
    }

    fn tq_norm(&self) -> Result<MetalKernel> {
        self.has(&["x"], &["norms"], &["InT", "D"])?;
        Ok(MetalKernel::TqNorm { dtype: self.float("InT")?, dim: self.multiple("D", 32)? })
    }

    fn gguf_linear(&self, format: Gguf) -> Result<MetalKernel> {
        let inputs: &[&str] = match self.inputs.len() {
            3 => &["x", "weight", "bias"],
            _ => &["x", "weight"],
        };
        // NSG is how the kernel splits its work. Without OutT the result has the dtype of `x`.
        let mut template = vec!["InT", "OutT", "N", "K", "NSG"];
        template.retain(|name| !matches!(*name, "NSG" | "OutT") || self.argument(name).is_some());
        self.has(inputs, &["out"], &template)?;
        let dtype = self.float("InT")?;
        let out = if template.contains(&"OutT") { self.float("OutT")? } else { dtype };
        let features = self.multiple("K", gguf::BLOCK)?;
        Ok(MetalKernel::GgufLinear { format, dtype, out, outputs: self.size("N")?, features })
    }

    fn gguf_embedding(&self, format: Gguf) -> Result<MetalKernel> {
        let has_rows = self.argument("V").is_some();
        let template = if has_rows { &["OutT", "K", "V"][..] } else { &["OutT", "K"] };
        self.has(&["weight", "indices"], &["out"], template)?;
        let rows = has_rows.then(|| self.size("V")).transpose()?;
        let features = self.multiple("K", gguf::BLOCK)?;
        Ok(MetalKernel::GgufEmbedding { format, out: self.float("OutT")?, features, rows })
    }

    fn gated_delta(&self) -> Result<MetalKernel> {
        self.has(
            &["q", "k", "v", "g", "beta", "state_in", "T"],
            &["y", "state_out"],
            &["InT", "Dk", "Dv", "Hk", "Hv"],
        )?;
        let (k_heads, v_heads) = (self.size("Hk")?, self.size("Hv")?);
        if v_heads % k_heads != 0 {
            fail!(
                Unsupported,
                "expected template argument `Hv` to be a multiple of {k_heads}, got {v_heads}"
            );
        }
        let (k_dim, v_dim) = (self.multiple("Dk", 32)?, self.size("Dv")?);
        Ok(MetalKernel::GatedDelta { dtype: self.float("InT")?, k_dim, v_dim, k_heads, v_heads })
    }

    /// Checks the names of inputs, outputs and template arguments.
    fn has(&self, inputs: &[&str], outputs: &[&str], template: &[&str]) -> Result<()> {
        let found: Vec<&str> = self.template.iter().map(|(name, _)| *name).collect();
        for (of, expected, found) in [
            ("inputs", inputs, &self.inputs),
            ("outputs", outputs, &self.outputs),
            ("template arguments", template, &found),
        ] {
            if expected != &found[..] {
                let shown: Vec<String> = found.iter().take(8).map(|name| shown(name)).collect();
                let (n, found) = (expected.len(), found.len());
                fail!(
                    Unsupported,
                    "expected {n} {of}, {}; got {found}: {}",
                    expected.join(", "),
                    shown.join(", ")
                );
            }
        }
        Ok(())
    }

    fn argument(&self, name: &str) -> Option<Argument> {
        self.template.iter().find(|(found, _)| *found == name).map(|(_, argument)| *argument)
    }

    /// Returns a template argument that is a float dtype.
    fn float(&self, argument: &str) -> Result<Dtype> {
        match self.argument(argument) {
            Some(Argument::Dtype(dtype)) if is_float(dtype) => Ok(dtype),
            Some(Argument::Dtype(dtype)) => fail!(
                Unsupported,
                "expected template argument `{argument}` of float16, bfloat16 or float32, got {}",
                name(dtype)
            ),
            other => {
                fail!(
                    Unsupported,
                    "expected a dtype as template argument `{argument}`, got {other:?}"
                )
            }
        }
    }

    /// Returns a template argument that is an integer of 1 or more.
    fn size(&self, argument: &str) -> Result<i32> {
        match self.argument(argument) {
            Some(Argument::Int(size)) if size > 0 => Ok(size),
            Some(Argument::Int(size)) => {
                fail!(Program, "expected template argument `{argument}` of 1 or more, got {size}")
            }
            other => {
                fail!(
                    Unsupported,
                    "expected an integer as template argument `{argument}`, got {other:?}"
                )
            }
        }
    }

    /// Returns a template argument that is an integer and a multiple of `of`.
    fn multiple(&self, argument: &str, of: i32) -> Result<i32> {
        let size = self.size(argument)?;
        if size % of != 0 {
            fail!(
                Unsupported,
                "expected template argument `{argument}` to be a multiple of {of}, got {size}"
            );
        }
        Ok(size)
    }
}

fn gguf_format(name: &str) -> Option<Gguf> {
    [Gguf::Q4K, Gguf::Q5K, Gguf::Q6K].into_iter().find(|format| format.to_string() == name)
}

/// Returns the names of `n` arguments.
fn names<'a>(of: &str, n: usize, names: Option<Names<'a>>) -> Result<Vec<&'a str>> {
    let names: Vec<&str> = names.into_iter().flatten().collect();
    if names.len() != n {
        fail!(Program, "expected a name for each of {n} {of}, got {}", names.len());
    }
    Ok(names)
}

fn template(node: fb::MetalKernelNode<'_>) -> Result<Vec<(&str, Argument)>> {
    let names = node.template_arg_names().into_iter().flatten();
    let kinds: Vec<i8> = node.template_arg_kinds().into_iter().flatten().collect();
    let values: Vec<i32> = node.template_arg_values().into_iter().flatten().collect();
    let n = node.template_arg_names().map_or(0, |names| names.len());
    if kinds.len() != n || values.len() != n {
        let (kinds, values) = (kinds.len(), values.len());
        fail!(Program, "expected {n} template arguments, got {kinds} kinds and {values} values");
    }
    names
        .zip(kinds.into_iter().zip(values))
        .map(|(name, (kind, value))| {
            let argument = match (kind, i8::try_from(value)) {
                (0, _) => Argument::Int(value),
                (1, _) => Argument::Bool(value != 0),
                (2, Ok(number)) => Argument::Dtype(dtype_of(number)?),
                (2, Err(_)) => fail!(Program, "expected a dtype's number, got {value}"),
                _ => fail!(Program, "expected a template argument of kind 0, 1 or 2, got {kind}"),
            };
            Ok((name, argument))
        })
        .collect()
}

/// Runs a kernel.
pub fn run(
    frame: &Frame,
    kernel: &MetalKernel,
    inputs: &[Value],
    shapes: &[Vec<Int>],
) -> Result<OpResult> {
    if let (MetalKernel::GgufEmbedding { .. }, [weight, indices]) = (kernel, inputs) {
        let weight = frame.tensor(*weight)?;
        check_range(frame, *indices, weight.shape().first().copied().unwrap_or(0))?;
    }
    let made = compute(kernel, &frame.tensors(inputs)?, frame.on_gpu())?;
    if made.len() != shapes.len() {
        fail!(Internal, "a kernel has {} results for {} outputs", made.len(), shapes.len());
    }
    for (array, shape) in made.iter().zip(shapes) {
        let shape = sizes(frame, shape)?;
        if array.shape() != &shape[..] {
            fail!(Program, "expected an output of shape {:?}, got {shape:?}", array.shape());
        }
    }
    let mut made = made.into_iter();
    Ok(match (made.next(), made.len()) {
        (Some(one), 0) => OpResult::Tensor(one),
        (first, _) => OpResult::Tensors(first.into_iter().chain(made).collect()),
    })
}

/// Computes a kernel from its inputs.
fn compute(kernel: &MetalKernel, inputs: &[&Array], on_gpu: bool) -> Result<Vec<Array>> {
    let one = |made: Result<Array>| made.map(|array| vec![array]);
    match (*kernel, inputs) {
        (MetalKernel::TqCompress { dtype }, [values, boundaries]) => {
            one(turboquant::compress(values, boundaries, dtype))
        }
        (MetalKernel::TqDequant { dtype, dim }, [codes, norms, centroids]) => {
            one(turboquant::dequantize(codes, norms, centroids, dtype, dim))
        }
        (MetalKernel::TqNorm { dtype, dim }, [x]) => one(turboquant::norm(x, dtype, dim)),
        (MetalKernel::GgufLinear { format, dtype, out, outputs, features }, [x, weight, ..]) => {
            let layer = gguf::Linear { format, dtype, out, outputs, features };
            one(layer.run(x, weight, inputs.get(2).copied(), on_gpu))
        }
        (MetalKernel::GgufEmbedding { format, out, features, rows }, [weight, indices]) => {
            one(gguf::embedding(weight, indices, format, out, features, rows))
        }
        (MetalKernel::GatedDelta { dtype, k_dim, v_dim, k_heads, v_heads }, inputs) => {
            gated_delta::Rule { dtype, k_dim, v_dim, k_heads, v_heads }.run(inputs)
        }
        (kernel, inputs) => fail!(Internal, "cannot run {kernel} with {} inputs", inputs.len()),
    }
}

/// Refuses an input of another dtype.
fn expect_dtype(input: &str, array: &Array, expected: Dtype) -> Result<()> {
    if array.dtype() != expected {
        let (expected, found) = (name(expected), name(array.dtype()));
        fail!(Program, "expected `{input}` of {expected}, got {found}");
    }
    Ok(())
}

/// Refuses an input that is not a float.
fn expect_float(input: &str, array: &Array) -> Result<()> {
    if !is_float(array.dtype()) {
        let found = name(array.dtype());
        fail!(Program, "expected `{input}` of float16, bfloat16 or float32, got {found}");
    }
    Ok(())
}

/// Refuses an input of another shape.
fn expect_shape(input: &str, array: &Array, expected: &[i32]) -> Result<()> {
    if array.shape() != expected {
        fail!(Program, "expected `{input}` of shape {expected:?}, got {:?}", array.shape());
    }
    Ok(())
}

/// Returns all axes except the last of an input whose last axis has `size` elements.
fn leading<'a>(input: &str, array: &'a Array, size: i32) -> Result<&'a [i32]> {
    match array.shape().split_last() {
        Some((&last, leading)) if last == size && leading.len() < MAX_AXES => Ok(leading),
        _ => fail!(
            Program,
            "expected `{input}` of shape [..., {size}] with up to {MAX_AXES} axes, got {:?}",
            array.shape()
        ),
    }
}

/// Appends axes to a shape.
fn with(leading: &[i32], axes: &[i32]) -> SmallVec<[i32; 8]> {
    leading.iter().chain(axes).copied().collect()
}

/// Reshapes bytes to one axis, or to a scalar if there is only one byte.
fn bytes(numbers: &[u8]) -> Array {
    Array::from_slice(numbers, &[numbers.len() as i32])
}

#[cfg(test)]
mod tests;
