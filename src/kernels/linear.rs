//! Products of a few rows with a weight, fused with the operations around them in a layer, in one kernel launch.
//! Products of several rows are used to verify draft tokens, and for one token of each of several sequences.
//!
//! MLX passes products of several rows to cuBLAS. Each call costs the host 16 to 30 µs on an H200, where a launch costs
//! 6 to 10 µs. The first call with a new number of rows costs 3 ms. On the device, cuBLAS and the kernel both take the
//! time of reading the weight. For one row MLX has a kernel, but the operations around the product are further
//! launches. See `few_rows.cuh` and `one_row.cuh` of `etkv_cuda`.

use std::ffi::CStr;

use etkv_cuda::text;
use mlx_rs::ops::broadcast_to;
use mlx_rs::transforms::eval;
use mlx_rs::{Array, Dtype};
use parking_lot::Mutex;
use smallvec::SmallVec;

use super::raw::Kernel;
use super::{can_run, element, header, source, CompiledKernels};
use crate::error::{Error, Result};

#[cfg(test)]
mod tests;

/// The maximum number of rows of a call. For more rows cuBLAS is faster.
pub const MAX_ROWS: i32 = 16;

/// The number of outputs of a tile, and the number of threads of a block, as in the kernel.
const TILE: i32 = 16;
const THREADS: i32 = 256;

/// The maximum number of blocks: two on each multiprocessor of an H200. If there are more tiles, a block computes
/// several.
const MAX_BLOCKS: i32 = 264;

/// The number of elements that a thread reads at once.
const PIECE: i32 = 8;

/// Rows are normalized in shared memory, if they fit. `PAD` is the number of elements between two rows and
/// `MAX_SHARED` the maximum number of elements, as in the kernel.
const PAD: i32 = 32;
const MAX_SHARED: i32 = 33_280;
const BYTES_SHARED: i32 = 2 * MAX_SHARED;

/// The number of warps of a block, and the minimum number of elements of the inner axis for each warp that shares an
/// output of a single row.
const WARPS: i32 = THREADS / 32;
const ROW_SPAN: i32 = 2048;

/// A product, and the operations around it.
#[derive(Debug, Clone, Copy)]
pub struct Product<'a> {
    /// The rows, `[..., T, in]`.
    pub x: &'a Array,
    /// The weight. It must be evaluated. Its memory is `[out, in]`, row-major: the array has that shape or is the
    /// transposition of such an array.
    pub weight: &'a Array,
    /// Whether the array `weight` has the shape `[in, out]`.
    pub transposed: bool,
    /// `[out]`, added to each row.
    pub bias: Option<&'a Array>,
    /// The norm of `x`. [`few_rows`] refuses rows that are too long to normalize.
    pub norm: Option<RmsNorm<'a>>,
    /// The function that is applied to the first half of the outputs. The result multiplies the second half.
    pub gate: Option<Gate>,
    /// The residual: rows of the result's shape that are added to it.
    pub residual: Option<&'a Array>,
    /// The rotation of the outputs, which are heads. A product with a rotation has neither a gate nor a residual. The
    /// result is `[1, T, heads, head_dim]`.
    pub rotation: Option<Rotation<'a>>,
}

/// The rotary embedding of the first outputs of each row: element `j` of a head rotates together with
/// `head_dim / 2 + j`, by `1 / periods[j]` radians for each position.
#[derive(Debug, Clone, Copy)]
pub struct Rotation<'a> {
    /// The positions of the rows, `[T]`, int32.
    pub positions: &'a Array,
    /// `[head_dim / 2]`, float32.
    pub periods: &'a Array,
    /// The number of heads that rotate. Later heads do not.
    pub heads: i32,
}

/// An RMS norm.
#[derive(Debug, Clone, Copy)]
pub struct RmsNorm<'a> {
    /// `[in]`.
    pub weight: Option<&'a Array>,
    /// Added to the mean square.
    pub eps: f32,
    /// Whether the weight is float32, and a normalized element is rounded once, to the dtype of the rows. Otherwise the
    /// norm is that of MLX's `fast.rms_norm`.
    pub in_float32: bool,
}

/// An activation function. The kernel has the same numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Gate {
    Silu = 1,
    Gelu = 2,
    GeluTanh = 3,
}

impl<'a> Product<'a> {
    /// Returns a product without operations around it.
    pub fn plain(x: &'a Array, weight: &'a Array, transposed: bool) -> Self {
        Self {
            x,
            weight,
            transposed,
            bias: None,
            norm: None,
            gate: None,
            residual: None,
            rotation: None,
        }
    }
}

/// The parameters that are compiled into a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Template {
    dtype: Dtype,
    /// The dtype of the norm's weight.
    norm: Dtype,
    /// The number of axes of `x`.
    rank: usize,
    /// Whether `x` is a single row.
    is_one: bool,
}

/// Parameters of the operations around the product.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Form {
    gate: i32,
    normalizes: bool,
    eps: f32,
    /// The number of outputs that rotate.
    rotated: i32,
    /// The number of warps that share an output of a single row, as the exponent of a power of two.
    team: i32,
}

const PLAIN: Form = Form { gate: 0, normalizes: false, eps: 0.0, rotated: 0, team: 0 };

/// The kernels of this process, and the arrays that describe the forms of their calls. Used only under the lock of MLX.
#[derive(Default)]
struct Kernels {
    compiled: CompiledKernels<Template>,
    forms: Vec<(Form, Dtype, Array)>,
    /// A position and a period for products without a rotation. They are not read.
    unrotated: Option<[Array; 2]>,
}

static KERNELS: Mutex<Option<Kernels>> = Mutex::new(None);

/// Returns the result in the dtype of `x`, or `None` if the kernel does not support the product. It normalizes rows
/// only if their elements, plus 32 for each row, are at most 33,280. It leaves a single row without a norm, gate,
/// residual or rotation to MLX.
pub fn few_rows(product: &Product) -> Result<Option<Array>> {
    let Some(call) = Call::of(product) else {
        return Ok(None);
    };
    if !can_run()? {
        return Ok(None);
    }
    let mut kernels = KERNELS.lock();
    let Kernels { compiled, forms, unrotated } = kernels.get_or_insert_default();
    if unrotated.is_none() {
        let arrays = [Array::zeros::<i32>(&[1])?, Array::ones::<f32>(&[1])?];
        eval(&arrays)?;
        *unrotated = Some(arrays);
    }
    let Some(unrotated) = unrotated else {
        return Ok(None);
    };
    let form = form_array(forms, call.form, call.template.dtype)?;
    let how = FormArrays { form: &form, unrotated };
    let compile = |template: &Template| {
        let plain = form_array(forms, PLAIN, template.dtype)?;
        compile_and_run(template, FormArrays { form: &plain, unrotated })
    };
    match compiled.get(call.template, compile) {
        Some(kernel) => call.launch(kernel, product, how).map(Some),
        None => Ok(None),
    }
}

/// The arrays of a call besides those of the product.
#[derive(Clone, Copy)]
struct FormArrays<'a> {
    form: &'a Array,
    unrotated: &'a [Array; 2],
}

/// A call that the kernel supports.
struct Call {
    template: Template,
    form: Form,
    /// The number of threads of all blocks.
    threads: i32,
    out: SmallVec<[i32; 4]>,
}

impl Call {
    fn of(product: &Product) -> Option<Self> {
        let Product { x, weight, bias, norm, gate, residual, rotation, .. } = *product;
        let shape = x.shape();
        let (leading, &[rows, inner]) = shape.split_last_chunk()?;
        let weights = weight_outputs(weight, inner, product.transposed)?;
        let halves = if gate.is_some() { 2 } else { 1 };
        let dtype = x.dtype();
        let is_half = matches!(dtype, Dtype::Float16 | Dtype::Bfloat16);
        let is_row = |row: &Array, size: i32| row.dtype() == dtype && row.shape() == [size];
        let norm_weight = norm.and_then(|norm| norm.weight);
        let is_wide = norm.is_some_and(|norm| norm.in_float32) && norm_weight.is_some();
        let norm_dtype = if is_wide { Dtype::Float32 } else { dtype };
        let fits = leading.iter().all(|&n| n == 1)
            && (1..=MAX_ROWS).contains(&rows)
            && inner > 0
            && inner % PIECE == 0
            && weights % halves == 0
            && is_half
            && weight.dtype() == dtype
            && bias.is_none_or(|bias| is_row(bias, weights))
            && norm_weight
                .is_none_or(|weight| weight.shape() == [inner] && weight.dtype() == norm_dtype)
            && norm.is_none_or(|norm| norm.eps >= 0.0)
            && ((norm.is_none() && rows > 1) || rows.checked_mul(inner + PAD)? <= MAX_SHARED);
        let is_alone = norm.is_none() && gate.is_none() && residual.is_none() && rotation.is_none();
        if !fits || rows == 1 && is_alone {
            return None;
        }
        let outputs = weights / halves;
        let mut out: SmallVec<[i32; 4]> = SmallVec::from_slice(shape);
        *out.last_mut()? = outputs;
        if !residual
            .is_none_or(|residual| residual.dtype() == dtype && residual.shape() == &out[..])
        {
            return None;
        }
        let mut rotated = 0;
        if let Some(rotation) = rotation {
            if gate.is_some() || residual.is_some() || leading.len() != 1 {
                return None;
            }
            let head_dim = rotation.head_dim(rows, outputs)?;
            rotated = rotation.heads * head_dim;
            out = SmallVec::from_buf([1, rows, outputs / head_dim, head_dim]);
        }
        let form = Form {
            gate: gate.map_or(0, |gate| gate as i32),
            normalizes: norm.is_some(),
            eps: norm.map_or(0.0, |norm| norm.eps),
            rotated,
            team: 0,
        };
        let template = Template { dtype, norm: norm_dtype, rank: shape.len(), is_one: rows == 1 };
        if rows > 1 {
            return Some(Self { template, form, threads: threads(outputs, TILE / halves), out });
        }
        let pairs = if gate.is_some() { outputs } else { outputs / 2 + outputs % 2 };
        let team = team_of(pairs, inner);
        let threads = threads(pairs, WARPS >> team);
        Some(Self { template, form: Form { team, ..form }, threads, out })
    }

    fn launch(&self, kernel: &Kernel, product: &Product, how: FormArrays) -> Result<Array> {
        let Product { x, weight, bias, norm, residual, rotation, .. } = *product;
        let norm = norm.and_then(|norm| norm.weight);
        // The array of the form takes the place of an absent array. The kernel does not read it in that place.
        let [bias, norm, residual] = [bias, norm, residual].map(|array| array.unwrap_or(how.form));
        let [position, period] = how.unrotated;
        let (positions, periods) =
            rotation.map_or((position, period), |rotation| (rotation.positions, rotation.periods));
        let inputs = [x, weight, bias, norm, residual, positions, periods, how.form];
        kernel.launch(&inputs, &[(&self.out, self.template.dtype)], [self.threads, 1, 1], THREADS)
    }
}

impl Rotation<'_> {
    /// Returns the size of a head, if the kernel can rotate these outputs. Each tile must have complete pairs.
    fn head_dim(&self, rows: i32, outputs: i32) -> Option<i32> {
        let &[half] = self.periods.shape() else {
            return None;
        };
        let head_dim = half.checked_mul(2)?;
        let rotated = self.heads.checked_mul(head_dim)?;
        let fits = head_dim > 0
            && head_dim % TILE == 0
            && outputs % head_dim == 0
            && (1..=outputs).contains(&rotated)
            && self.positions.shape() == [rows]
            && self.positions.dtype() == Dtype::Int32
            && self.periods.dtype() == Dtype::Float32;
        fits.then_some(head_dim)
    }
}

/// Returns the array that describes a form to the kernel. MLX passes numbers to a kernel only as shapes of arrays, so
/// the shape of this array is these numbers. The array broadcasts a single element, which the kernel does not read.
fn form_array(forms: &mut Vec<(Form, Dtype, Array)>, form: Form, dtype: Dtype) -> Result<Array> {
    let same = |(known, its, _): &&(Form, Dtype, Array)| (*known, *its) == (form, dtype);
    if let Some((.., array)) = forms.iter().find(same) {
        return Ok(array.clone());
    }
    // Adds 1, because an axis has at least one element.
    let how = 1 + form.gate + if form.normalizes { 4 } else { 0 } + 8 * form.team;
    let shape = [how, (form.eps.to_bits() as i32).max(1), 1 + form.rotated];
    let array = broadcast_to(&Array::zeros::<f32>(&[1, 1, 1])?.as_dtype(dtype)?, &shape)?;
    eval([&array])?;
    if forms.len() >= MAX_FORMS {
        forms.clear();
    }
    forms.push((form, dtype, array.clone()));
    Ok(array)
}

/// The maximum number of forms that are kept. A program has about ten forms.
const MAX_FORMS: usize = 64;

/// Returns the number of warps that share a pair of outputs of a single row, as the exponent of a power of two. Several
/// warps share a pair if there are fewer pairs than warps.
fn team_of(pairs: i32, inner: i32) -> i32 {
    let warps = MAX_BLOCKS * WARPS / pairs.max(1);
    let fits = |power: &i32| 1 << power <= warps && inner >> power >= ROW_SPAN;
    [3, 2, 1].into_iter().find(fits).unwrap_or(0)
}

/// Returns the number of threads of all blocks, as MLX counts, for tiles of `tile` outputs.
fn threads(outputs: i32, tile: i32) -> i32 {
    let tiles = outputs / tile + i32::from(outputs % tile != 0);
    tiles.min(MAX_BLOCKS) * THREADS
}

/// Returns the number of outputs of a weight for rows of `inner` elements, if the kernel supports the weight's memory
/// layout.
fn weight_outputs(weight: &Array, inner: i32, transposed: bool) -> Option<i32> {
    let (&[a, b], &[along_a, along_b]) = (weight.shape(), weight.strides()) else {
        return None;
    };
    let (outputs, found, row, column) =
        if transposed { (b, a, along_b, along_a) } else { (a, b, along_a, along_b) };
    let is_plain = found == inner && column == 1 && row as i64 == i64::from(inner);
    (is_plain && outputs > 0).then_some(outputs)
}

/// The arrays that a launch reads, in order.
const INPUTS: [&CStr; 8] =
    [c"x", c"w", c"bias", c"norm", c"residual", c"positions", c"periods", c"form"];

impl Template {
    /// Returns the text of the kernel's own function, for elements and the norm's weights of these names in CUDA.
    fn call(&self, name: &str, norm: &str) -> String {
        let (row, column) = (self.rank - 2, self.rank - 1);
        let run = match self.is_one {
            true => format!(
                "__shared__ float2 left[2 * etkv::SHARES];\n\
                 etkv::OneRow<{name}, {norm}> one{{work}};\n\
                 one.run_row(out, shared, squares, 1 << (form_shape[0] - 1) / 8, left);\n",
            ),
            false => String::from(
                "__shared__ float sums[etkv::SUMS];\nwork.run(out, shared, sums, squares);\n",
            ),
        };
        format!(
            "#undef custom_kernel_etkv_few_rows\n#undef custom_kernel_etkv_one_row\n\
             extern __shared__ uint4 shared_memory[];\n\
             __shared__ float squares[etkv::SQUARES];\n\
             const int inner = x_shape[{column}], how = (form_shape[0] - 1) % 8, gate = how % 4;\n\
             const int outputs = int(1ll * w_shape[0] * w_shape[1] / inner) / (gate ? 2 : 1);\n\
             auto* shared = reinterpret_cast<{name}*>(shared_memory);\n\
             const void* none = form;\n\
             etkv::FewRows<{name}, {norm}> work{{x, x_strides[{row}], x_strides[{column}], w,\n\
             bias == none ? nullptr : bias, bias_strides[0],\n\
             how >= 4, __int_as_float(form_shape[1]), norm == none ? nullptr : norm, norm_strides[0],\n\
             residual == none ? nullptr : residual, residual_strides[{row}], residual_strides[{column}],\n\
             gate, x_shape[{row}], outputs, inner,\n\
             form_shape[2] > 1 ? 2 * periods_shape[0] : 0, form_shape[2] - 1,\n\
             positions, positions_strides[0], periods, periods_strides[0]}};\n{run}",
        )
    }

    fn compile(&self) -> Result<Option<Kernel>> {
        let (Some((name, _)), Some((norm, _))) = (element(self.dtype), element(self.norm)) else {
            return Ok(None);
        };
        let call = self.call(name, norm);
        let texts = [text::INSTRUCTIONS, text::ROTATION, text::FEW_ROWS, text::ONE_ROW];
        let kernel = if self.is_one { c"etkv_one_row" } else { c"etkv_few_rows" };
        let header = header("few_rows", &texts.concat())?;
        Kernel::new(kernel, &INPUTS, &[c"out"], &source(&call)?, &header, BYTES_SHARED).map(Some)
    }
}

/// Compiles a kernel and runs it over one or two rows.
fn compile_and_run(template: &Template, how: FormArrays) -> Result<Option<Kernel>> {
    let Some(kernel) = template.compile()? else {
        return Ok(None);
    };
    let ones = |shape: &[i32], dtype| Ok::<_, Error>(Array::ones::<f32>(shape)?.as_dtype(dtype)?);
    let mut shape = vec![1; template.rank];
    let rows = if template.is_one { 1 } else { 2 };
    shape[template.rank - 2..].copy_from_slice(&[rows, PIECE]);
    let (x, weight) = (ones(&shape, template.dtype)?, ones(&[2, PIECE], template.dtype)?);
    let of_norm = ones(&[PIECE], template.norm)?;
    shape[template.rank - 1] = 2;
    let out = SmallVec::from_slice(&shape);
    let call = Call { template: *template, form: PLAIN, threads: THREADS, out };
    let norm = Some(RmsNorm { weight: Some(&of_norm), eps: 0.0, in_float32: false });
    let product = Product { norm, ..Product::plain(&x, &weight, false) };
    eval([&call.launch(&kernel, &product, how)?])?;
    Ok(Some(kernel))
}
