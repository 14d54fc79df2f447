//! Products of a few rows with a weight in one launch, such as those of tokens to verify, or of a token
//! of each of several sequences.
//!
//! MLX gives them to cuBLAS: each call costs the host 16 to 30 µs on an H200, where a launch costs 6 to
//! 10, and the first call with another number of rows 3 ms. The time of the device is that of reading
//! the weight, in both. See `cuda/few_rows.cuh`.

use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::raw::Kernel;
use super::{bare, c_text, can_run, element, Compiled};
use crate::error::{Error, Result};

#[cfg(test)]
mod tests;

/// The most rows of a call. One row has MLX's own kernel; for more, cuBLAS is faster.
pub const MOST_ROWS: i32 = 16;

/// Outputs of a block, and its threads: as in the kernel.
const TILE: i32 = 16;
const THREADS: i32 = 256;

/// Elements that a thread reads at a time.
const PIECE: i32 = 8;

/// What is compiled into a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Template {
    dtype: Dtype,
    /// The axes of `x`.
    rank: usize,
}

static KERNELS: Mutex<Option<Compiled<Template>>> = Mutex::new(None);

/// Returns the product of `x`, `[..., T, in]`, and a weight, plus `bias`, `[out]`, in their dtype, if
/// the kernel takes it. The weight is evaluated, and lies in memory as `[out, in]`, row-major: it is an
/// array of that shape, or the transposition of one (`transposed`).
pub fn few_rows(
    x: &Array,
    weight: &Array,
    bias: Option<&Array>,
    transposed: bool,
) -> Result<Option<Array>> {
    let Some(call) = Call::of(x, weight, bias, transposed) else {
        return Ok(None);
    };
    if !can_run()? {
        return Ok(None);
    }
    let mut kernels = KERNELS.lock();
    match kernels.get_or_insert_default().get(call.template, tried) {
        Some(kernel) => call.launch(kernel, x, weight, bias).map(Some),
        None => Ok(None),
    }
}

/// A call that the kernel takes.
struct Call {
    template: Template,
    /// Those of all blocks.
    threads: i32,
    out: SmallVec<[i32; 4]>,
}

impl Call {
    fn of(x: &Array, weight: &Array, bias: Option<&Array>, transposed: bool) -> Option<Self> {
        let shape = x.shape();
        let (leading, &[rows, inner]) = shape.split_last_chunk()?;
        let outputs = weight_outputs(weight, inner, transposed)?;
        let dtype = x.dtype();
        let is_half = matches!(dtype, Dtype::Float16 | Dtype::Bfloat16);
        let is_bias = |bias: &Array| bias.dtype() == dtype && bias.shape() == [outputs];
        let fits = leading.iter().all(|&n| n == 1)
            && (2..=MOST_ROWS).contains(&rows)
            && inner > 0
            && inner % PIECE == 0
            && is_half
            && weight.dtype() == dtype
            && bias.is_none_or(is_bias);
        if !fits {
            return None;
        }
        let mut out: SmallVec<[i32; 4]> = SmallVec::from_slice(shape);
        *out.last_mut()? = outputs;
        let template = Template { dtype, rank: shape.len() };
        Some(Self { template, threads: threads(outputs)?, out })
    }

    fn launch(
        &self,
        kernel: &Kernel,
        x: &Array,
        weight: &Array,
        bias: Option<&Array>,
    ) -> Result<Array> {
        // Without a bias `x` fills its place.
        let inputs = [x, weight, bias.unwrap_or(x)];
        kernel.launch(&inputs, &[(&self.out, self.template.dtype)], [self.threads, 1, 1], THREADS)
    }
}

/// Returns the threads of all blocks, which is what MLX counts, if they can be counted.
fn threads(outputs: i32) -> Option<i32> {
    (outputs / TILE + i32::from(outputs % TILE != 0)).checked_mul(THREADS)
}

/// Returns the outputs of a weight for rows of `inner` elements, if it lies in memory as the kernel
/// reads it.
fn weight_outputs(weight: &Array, inner: i32, transposed: bool) -> Option<i32> {
    let (&[a, b], &[along_a, along_b]) = (weight.shape(), weight.strides()) else {
        return None;
    };
    let (outputs, found, row, column) =
        if transposed { (b, a, along_b, along_a) } else { (a, b, along_a, along_b) };
    let is_plain = found == inner && column == 1 && row as i64 == i64::from(inner);
    (is_plain && outputs > 0).then_some(outputs)
}

impl Template {
    fn compile(&self) -> Result<Option<Kernel>> {
        let Some((name, _)) = element(self.dtype) else {
            return Ok(None);
        };
        let (row, column) = (self.rank - 2, self.rank - 1);
        let source = format!(
            "__shared__ float sums[etkv::SUMS];\n\
             const int inner = x_shape[{column}];\n\
             etkv::FewRows<{name}> work{{x, x_strides[{row}], x_strides[{column}], w, bias == x ? nullptr : \
             bias, bias_strides[0], x_shape[{row}], int(1ll * w_shape[0] * w_shape[1] / inner), inner}};\n\
             work.run(out, sums);\n",
        );
        let header = bare(concat!(
            include_str!("cuda/instructions.cuh"),
            include_str!("cuda/few_rows.cuh"),
        ));
        let inputs = [c"x", c"w", c"bias"];
        let (source, header) = (c_text(source)?, c_text(header)?);
        Kernel::new(c"etkv_few_rows", &inputs, &[c"out"], &source, &header, 0).map(Some)
    }
}

/// Compiles a kernel and runs it over two rows.
fn tried(template: &Template) -> Result<Option<Kernel>> {
    let Some(kernel) = template.compile()? else {
        return Ok(None);
    };
    let ones = |shape: &[i32]| Ok::<_, Error>(Array::ones::<f32>(shape)?.as_dtype(template.dtype)?);
    let mut shape = vec![1; template.rank];
    shape[template.rank - 2..].copy_from_slice(&[2, PIECE]);
    let (x, weight) = (ones(&shape)?, ones(&[1, PIECE])?);
    shape[template.rank - 1] = 1;
    let out = SmallVec::from_slice(&shape);
    let call = Call { template: *template, threads: THREADS, out };
    eval([&call.launch(&kernel, &x, &weight, None)?])?;
    Ok(Some(kernel))
}
