use flatbuffers::{FlatBufferBuilder, UnionWIPOffset, WIPOffset};
use mlx_rs::ops::{concatenate, zeros_dtype};
use mlx_rs::random::{normal, uniform};

use super::*;
use crate::error::Status;
use crate::tests::{literal, Parts, FLOAT32};
use crate::Program;
use etkv::mlx::{self, elements, slice_axis};

// ---- Decoding --------------------------------------------------------------

/// A kernel's node. Its tensors are numbered from 0: inputs, then outputs.
#[derive(Clone)]
struct Node {
    name: &'static str,
    inputs: Vec<&'static str>,
    outputs: Vec<&'static str>,
    shapes: Vec<i64>,
    lengths: Vec<i32>,
    dtypes: Vec<i8>,
    template: Vec<(&'static str, i8, i32)>,
    /// The maximum number of kinds of template arguments.
    kinds: usize,
    contiguous: bool,
    init: Option<f32>,
}

fn norm() -> Node {
    Node {
        name: "tq_norm",
        inputs: vec!["x"],
        outputs: vec!["norms"],
        shapes: vec![2, 1],
        lengths: vec![2],
        dtypes: vec![FLOAT32],
        template: vec![("InT", 2, 6), ("D", 0, 64)],
        kinds: usize::MAX,
        contiguous: true,
        init: None,
    }
}

fn gated_delta() -> Node {
    Node {
        name: "gated_delta_step",
        inputs: vec!["q", "k", "v", "g", "beta", "state_in", "T"],
        outputs: vec!["y", "state_out"],
        shapes: vec![1, 2, 4, 8, 1, 4, 8, 32],
        lengths: vec![4, 4],
        dtypes: vec![FLOAT32; 2],
        template: vec![("InT", 2, 6), ("Dk", 0, 32), ("Dv", 0, 8), ("Hk", 0, 2), ("Hv", 0, 4)],
        ..norm()
    }
}

fn linear() -> Node {
    Node {
        name: "gguf_q4k_matvec",
        inputs: vec!["x", "weight"],
        outputs: vec!["out"],
        shapes: vec![1, 7],
        template: vec![("InT", 2, 5), ("OutT", 2, 6), ("N", 0, 7), ("K", 0, 512), ("NSG", 0, 2)],
        ..norm()
    }
}

impl Node {
    fn write(&self, builder: &mut FlatBufferBuilder) -> WIPOffset<UnionWIPOffset> {
        let name = Some(builder.create_string(self.name));
        let source = Some(builder.create_string("kernel"));
        let tids = |from: usize, n: usize| -> Vec<fb::Tid> {
            (from as u32..).take(n).map(fb::Tid::new).collect()
        };
        let inputs = Some(builder.create_vector(&tids(0, self.inputs.len())));
        let outputs = Some(builder.create_vector(&tids(self.inputs.len(), self.outputs.len())));
        let mut strings = |names: &[&str]| {
            let names: Vec<_> = names.iter().map(|name| builder.create_string(name)).collect();
            Some(builder.create_vector(&names))
        };
        let (input_names, output_names) = (strings(&self.inputs), strings(&self.outputs));
        let template: Vec<&str> = self.template.iter().map(|(name, ..)| *name).collect();
        let template_arg_names = strings(&template);
        let sizes: Vec<_> = self.shapes.iter().map(|&size| literal(builder, size)).collect();
        let kinds: Vec<i8> = self.template.iter().map(|(_, kind, _)| *kind).collect();
        let values: Vec<i32> = self.template.iter().map(|(.., value)| *value).collect();
        let args = fb::MetalKernelNodeArgs {
            name,
            source,
            inputs,
            outputs,
            grid: Some(builder.create_vector(&sizes[..0])),
            threadgroup: Some(builder.create_vector(&sizes[..0])),
            header: None,
            input_names,
            output_names,
            ensure_row_contiguous: self.contiguous,
            atomic_outputs: false,
            output_shapes_flat: Some(builder.create_vector(&sizes)),
            output_shape_lengths: Some(builder.create_vector(&self.lengths)),
            output_dtypes: Some(builder.create_vector(&self.dtypes)),
            template_arg_names,
            template_arg_kinds: Some(builder.create_vector(&kinds[..self.kinds.min(kinds.len())])),
            template_arg_values: Some(builder.create_vector(&values)),
            init_value: self.init,
        };
        fb::MetalKernelNode::create(builder, &args).as_union_value()
    }

    fn check(&self) -> Result<()> {
        let parts = Parts {
            inputs: vec![(vec![1], FLOAT32); self.inputs.len()],
            n_temporaries: self.outputs.len() as u32,
            ..Default::default()
        };
        let payload =
            parts.payload(|builder| vec![vec![(fb::OpNode::MetalKernelNode, self.write(builder))]]);
        Program::check(&payload)
    }
}

fn assert_refused(status: Status, expected: &str, of: fn() -> Node, change: &dyn Fn(&mut Node)) {
    let mut node = of();
    change(&mut node);
    let error = node.check().unwrap_err();
    assert_eq!(error.status(), status, "{error}");
    assert!(error.message().contains(expected), "{error}");
}

#[test]
fn kernels_are_known_by_name_and_arguments() {
    for node in [norm(), gated_delta(), linear()] {
        node.check().unwrap();
    }
    // Attributes that do not affect a product, and an absent attribute.
    let mut node = linear();
    node.name = "gguf_q6k_matmul";
    node.template.retain(|(name, ..)| !matches!(*name, "OutT" | "NSG"));
    node.dtypes = vec![5];
    node.check().unwrap();
    node.inputs.push("bias");
    node.check().unwrap();
}

#[test]
fn what_is_no_known_kernel_is_refused() {
    let told = |expected: &str, of: fn() -> Node, change: &dyn Fn(&mut Node)| {
        assert_refused(Status::Unsupported, expected, of, change);
    };
    told("instruction 0: Metal kernel `tq_nor`: this build has no", norm, &|node| {
        node.name = "tq_nor";
    });
    told("Metal kernel `gguf_q3k_matvec`", linear, &|node| node.name = "gguf_q3k_matvec");
    told("Metal kernel `gguf_q4k_conv`", linear, &|node| node.name = "gguf_q4k_conv");
    told(r"Metal kernel `\u{1b}[31m\n`", norm, &|node| node.name = "\u{1b}[31m\n");
    told("expected row-contiguous inputs", norm, &|node| node.contiguous = false);
    told("neither atomic nor initialized", norm, &|node| node.init = Some(0.0));
    told("expected 1 inputs, x; got 1: `y`", norm, &|node| node.inputs = vec!["y"]);
    told("expected 7 inputs", gated_delta, &|node| node.inputs.truncate(6));
    told("expected 1 outputs, norms; got 1: `out`", norm, &|node| node.outputs = vec!["out"]);
    told("expected 2 template arguments, InT, D; got 2: `InT`, `E`", norm, &|node| {
        node.template[1].0 = "E";
    });
    told("`D` to be a multiple of 32, got 48", norm, &|node| node.template[1].2 = 48);
    told("`K` to be a multiple of 256, got 511", linear, &|node| node.template[3].2 = 511);
    told("`Hv` to be a multiple of 3, got 4", gated_delta, &|node| node.template[3].2 = 3);
    told("`InT` of float16, bfloat16 or float32, got int32", norm, &|node| {
        node.template[0].2 = 3;
    });
    told("expected a dtype as template argument `InT`, got Some(Int(6))", norm, &|node| {
        node.template[0].1 = 0;
    });
    told("expected an integer as template argument `D`, got Some(Bool(true))", norm, &|node| {
        node.template[1].1 = 1;
    });
    told("dtype number 99 of ExecuTorch", norm, &|node| node.template[0].2 = 99);
    told("expected an output of float32, got float16", norm, &|node| node.dtypes = vec![5]);
}

#[test]
fn nodes_that_contradict_themselves_are_refused() {
    let told = |expected: &str, of: fn() -> Node, change: &dyn Fn(&mut Node)| {
        assert_refused(Status::Program, expected, of, change);
    };
    told("expected 2 template arguments, got 1 kinds and 2 values", norm, &|node| node.kinds = 1);
    told("template argument of kind 0, 1 or 2, got 3", norm, &|node| node.template[1].1 = 3);
    told("expected a dtype's number, got 70000", norm, &|node| node.template[0].2 = 70_000);
    told("`D` of 1 or more, got 0", norm, &|node| node.template[1].2 = 0);
    told("`D` of 1 or more, got -64", norm, &|node| node.template[1].2 = -64);
    told("expected the dtypes of 1 outputs, got 0", norm, &|node| node.dtypes.clear());
    told("expected output sizes from 0 to 2147483647, got -1", norm, &|node| node.shapes[0] = -1);
    told("got 9223372036854775807", norm, &|node| node.shapes[1] = i64::MAX);
    told("expected the shapes of 1 outputs, got 2 sizes for shapes of [1]", norm, &|node| {
        node.lengths = vec![1];
    });
    told("expected the shapes of 2 outputs", gated_delta, &|node| node.lengths = vec![8]);
    told("expected outputs of 0 to 8 axes, got -1", gated_delta, &|node| {
        node.lengths = vec![-1, 9];
    });
    told("expected outputs of 0 to 8 axes, got 9", norm, &|node| {
        (node.lengths, node.shapes) = (vec![9], vec![1; 9]);
    });
}

// ---- Inputs that do not fit ------------------------------------------------

fn zeros(shape: &[i32], dtype: Dtype) -> Array {
    zeros_dtype(shape, dtype).unwrap()
}

fn refuses(kernel: MetalKernel, inputs: &[Array], expected: &str) {
    mlx::run(|| {
        let inputs: Vec<&Array> = inputs.iter().collect();
        let error = compute(&kernel, &inputs, false).unwrap_err();
        assert_eq!(error.status(), Status::Program, "{error}");
        assert!(error.message().contains(expected), "{error}");
        Ok(())
    })
    .unwrap();
}

#[test]
fn inputs_that_do_not_fit_are_refused() {
    use Dtype::{Bfloat16, Float16, Float32, Int32, Uint8};
    let of = |shape: &[i32], dtype| mlx::run(|| Ok(zeros(shape, dtype))).unwrap();
    let compress = MetalKernel::TqCompress { dtype: Float32 };
    refuses(
        compress,
        &[of(&[2, 4], Float16), of(&[15], Float32)],
        "expected `values` of float32, got float16",
    );
    refuses(compress, &[of(&[2, 4], Float32), of(&[16], Float32)], "shape [15], got [16]");
    refuses(compress, &[of(&[2, 3], Float32), of(&[15], Float32)], "even number of elements");
    refuses(compress, &[of(&[], Float32), of(&[15], Float32)], "got []");
    let dequant = MetalKernel::TqDequant { dtype: Bfloat16, dim: 64 };
    let (codes, norms, centroids) =
        (of(&[3, 32], Uint8), of(&[3, 1], Bfloat16), of(&[16], Bfloat16));
    refuses(
        dequant,
        &[of(&[3, 31], Uint8), norms.clone(), centroids.clone()],
        "`packed` of shape [..., 32] with up to 8 axes, got [3, 31]",
    );
    refuses(
        dequant,
        &[codes.clone(), of(&[1, 1], Bfloat16), centroids.clone()],
        "`norms` of shape [3, 1], got [1, 1]",
    );
    refuses(dequant, &[codes.clone(), norms.clone(), of(&[15], Bfloat16)], "`centroids`");
    refuses(dequant, &[of(&[3, 32], Int32), norms, centroids], "`packed` of uint8, got int32");
    refuses(
        MetalKernel::TqNorm { dtype: Float32, dim: 64 },
        &[of(&[64, 3], Float32)],
        "`x` of shape [..., 64] with up to 8 axes, got [64, 3]",
    );

    let linear = MetalKernel::GgufLinear {
        format: Gguf::Q6K,
        dtype: Float32,
        out: Float32,
        outputs: 7,
        features: 512,
    };
    let (x, weight) = (of(&[1, 512], Float32), of(&[7, 420], Uint8));
    refuses(linear, &[of(&[1, 256], Float32), weight.clone()], "`x` of shape [..., 512]");
    refuses(linear, &[x.clone(), of(&[7, 288], Uint8)], "`weight` of shape [7, 420], got [7, 288]");
    refuses(linear, &[x.clone(), of(&[8, 420], Uint8)], "got [8, 420]");
    refuses(
        linear,
        &[x.clone(), weight.clone(), of(&[8], Float32)],
        "`bias` of shape [7], got [8]",
    );
    refuses(linear, &[x, weight.clone(), of(&[7], Int32)], "got int32");
    let embedding = MetalKernel::GgufEmbedding {
        format: Gguf::Q6K,
        out: Float32,
        features: 512,
        rows: Some(8),
    };
    refuses(embedding, &[weight, of(&[1], Int32)], "`weight` of shape [8, 420], got [7, 420]");
    refuses(
        embedding,
        &[of(&[8, 420], Uint8), of(&[1], Float32)],
        "`indices` of int64, got float32",
    );

    let delta =
        MetalKernel::GatedDelta { dtype: Float32, k_dim: 32, v_dim: 8, k_heads: 2, v_heads: 4 };
    let inputs = [
        of(&[1, 3, 2, 32], Float32),
        of(&[1, 3, 2, 32], Float32),
        of(&[1, 3, 4, 8], Float32),
        of(&[1, 3, 4], Float32),
        of(&[1, 3, 4], Float32),
        of(&[1, 4, 8, 32], Float32),
        of(&[], Int32),
    ];
    for (index, shape, told) in [
        (0, &[1, 0, 2, 32][..], "`q` of shape [B, T, ...], got [1, 0, 2, 32]"),
        (0, &[1, 3, 4, 32], "`q` of shape [1, 3, 2, 32], got [1, 3, 4, 32]"),
        (1, &[1, 4, 2, 32], "`k` of shape"),
        (2, &[1, 3, 4, 9], "`v` of shape"),
        (4, &[1, 3], "`beta` of shape [1, 3, 4], got [1, 3]"),
        (5, &[2, 4, 8, 32], "`state_in` of shape"),
    ] {
        let mut inputs = inputs.clone();
        inputs[index] = of(shape, Float32);
        refuses(delta, &inputs, told);
    }
    let mut wrong = inputs.clone();
    wrong[6] = of(&[1], Int32);
    refuses(delta, &wrong, "`T` of shape [], got [1]");
    wrong[6] = of(&[], Float32);
    refuses(delta, &wrong, "`T` of int32, got float32");
}

// ---- The gated delta rule --------------------------------------------------

/// Returns outputs and state, computed token by token in float64.
#[allow(clippy::many_single_char_names)]
fn by_token(sizes: [usize; 6], [q, k, v, decay, beta, state]: [&[f32]; 6]) -> (Vec<f64>, Vec<f64>) {
    let [batch, tokens, k_heads, v_heads, k_dim, v_dim] = sizes;
    let mut state: Vec<f64> = state.iter().copied().map(f64::from).collect();
    let mut y = vec![0.0; batch * tokens * v_heads * v_dim];
    for b in 0..batch {
        for t in 0..tokens {
            for head in 0..v_heads {
                let keys = ((b * tokens + t) * k_heads + head * k_heads / v_heads) * k_dim;
                let values = (b * tokens + t) * v_heads + head;
                let (decay, beta) = (f64::from(decay[values]), f64::from(beta[values]));
                for d in 0..v_dim {
                    let row = ((b * v_heads + head) * v_dim + d) * k_dim;
                    let row = &mut state[row..row + k_dim];
                    row.iter_mut().for_each(|x| *x *= decay);
                    let times = |row: &[f64], of: &[f32]| -> f64 {
                        row.iter().zip(of).map(|(x, &y)| x * f64::from(y)).sum()
                    };
                    let key = &k[keys..keys + k_dim];
                    let correction = (f64::from(v[values * v_dim + d]) - times(row, key)) * beta;
                    row.iter_mut().zip(key).for_each(|(x, &k)| *x += correction * f64::from(k));
                    y[values * v_dim + d] = times(row, &q[keys..keys + k_dim]);
                }
            }
        }
    }
    (y, state)
}

fn check_close(found: &Array, expected: &[f64], limit: f64) -> Result<()> {
    let found = elements::<f32>(&found.as_dtype(Dtype::Float32)?.contiguous()?)?;
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(1e-30, |most: f64, x| most.max(x.abs()));
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (f64::from(*found) - expected).abs() / largest;
        assert!(error <= limit, "element {index}: {found} of {expected}, error {error}");
    }
    Ok(())
}

/// Compares the rule with a computation token by token. With `alike` all keys are nearly the same, so that powers of
/// their products grow.
fn compare(sizes: [i32; 6], dtype: Dtype, alike: bool, limit: f64) -> Result<()> {
    let [batch, tokens, k_heads, v_heads, k_dim, v_dim] = sizes;
    let numbers = |shape: &[i32]| normal::<f32>(shape, None, None, None);
    let gates = |low| uniform::<_, f32>(low, 1.0, &[batch, tokens, v_heads], None);
    let q = numbers(&[batch, tokens, k_heads, k_dim])?;
    let mut k = numbers(&[batch, tokens, k_heads, k_dim])?;
    if alike {
        k = slice_axis(&k, 1, 0, 1, 1)?.add(k.multiply(Array::from_f32(0.01))?)?;
    }
    let k = k.divide(k.square()?.sum_axis(-1, true)?.sqrt()?)?;
    let v = numbers(&[batch, tokens, v_heads, v_dim])?;
    let mut decay = gates(if alike { 0.999 } else { 0.5 })?;
    if tokens > 3 && !alike {
        // A token that erases the state.
        let rest = slice_axis(&decay, 1, 1, tokens, 1)?;
        decay = concatenate(&[rest, zeros(&[batch, 1, v_heads], Dtype::Float32)], 1)?;
    }
    let beta = gates(if alike { 0.99 } else { 0.1 })?;
    let state = numbers(&[batch, v_heads, v_dim, k_dim])?;
    let inputs = [q, k, v, decay, beta, state];
    let inputs = inputs.map(|array| array.as_dtype(dtype).unwrap());
    let wide = inputs.each_ref().map(|array| {
        elements::<f32>(&array.as_dtype(Dtype::Float32).unwrap().contiguous().unwrap()).unwrap()
    });
    let sizes = sizes.map(|size| size as usize);
    let (y, after) = by_token(sizes, wide.each_ref().map(|numbers| &numbers[..]));
    let count = Array::from_int(tokens);
    let arrays: Vec<&Array> = inputs.iter().chain([&count]).collect();
    let kernel = MetalKernel::GatedDelta { dtype, k_dim, v_dim, k_heads, v_heads };
    let made = compute(&kernel, &arrays, false)?;
    assert_eq!(made[0].shape(), [batch, tokens, v_heads, v_dim]);
    assert_eq!(made[1].shape(), [batch, v_heads, v_dim, k_dim]);
    assert!(made.iter().all(|array| array.dtype() == dtype));
    check_close(&made[0], &y, limit)?;
    check_close(&made[1], &after, limit)
}

#[test]
fn chunks_of_tokens_are_tokens_one_by_one() {
    mlx::run(|| {
        for tokens in [1, 2, 3, 4, 31, 32, 33, 64, 100] {
            compare([1, tokens, 2, 4, 32, 8], Dtype::Float32, false, 2e-6)?;
            compare([2, tokens, 1, 3, 64, 5], Dtype::Float32, false, 2e-6)?;
        }
        compare([1, 50, 4, 4, 128, 128], Dtype::Float32, false, 2e-6)?;
        compare([1, 300, 1, 2, 32, 16], Dtype::Float32, true, 2e-5)?;
        compare([1, 37, 2, 4, 32, 8], Dtype::Float16, false, 1e-3)?;
        compare([1, 37, 2, 4, 32, 8], Dtype::Bfloat16, false, 8e-3)
    })
    .unwrap();
}
