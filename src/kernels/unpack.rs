//! Unpacks affine weights in one kernel launch on CUDA. With MLX, scales and biases would be converted to float32, and
//! the weights unpacked to float32 and rounded. That takes four launches and four times as many bytes.

use std::ffi::CStr;

use mlx_rs::{Array, Dtype};
use parking_lot::Mutex;

use super::by_text::{Template, TextKernels};
use super::{can_run, elements_of};
use crate::error::Result;

/// The number of threads of a block.
const THREADS: i32 = 256;

/// Affine weights: an element is its code times the scale of its group, plus the group's bias.
#[derive(Debug, Clone, Copy)]
pub struct AffineWeights<'a> {
    /// The codes, `[.., rows, words]`, uint32.
    pub codes: &'a Array,
    /// `[.., rows, groups]`.
    pub scales: &'a Array,
    /// Like the scales.
    pub biases: &'a Array,
    /// The bits of a code.
    pub bits: i32,
    /// The number of elements of a group.
    pub group_size: i32,
}

impl AffineWeights<'_> {
    /// The shape of the weights in `dtype`, `[.., rows, inputs]`, if the kernel supports them.
    pub fn unpacked_shape(&self, dtype: Dtype) -> Option<Vec<i32>> {
        Launch::of(self, dtype).map(|launch| launch.shape)
    }
}

static KERNELS: Mutex<TextKernels<UnpackTemplate>> = Mutex::new(TextKernels::new("unpack", &[]));

/// Returns the weights, `[.., rows, inputs]`, computed in float32 and rounded once to `dtype`, if the kernel supports
/// the call.
pub fn unpack(weights: &AffineWeights, dtype: Dtype) -> Result<Option<Array>> {
    let Some(launch) = Launch::of(weights, dtype) else {
        return Ok(None);
    };
    if !can_run()? {
        return Ok(None);
    }
    let stacked = |part: &Array| part.reshape(&[-1, part.dim(-2), part.dim(-1)]);
    let (codes, scales, biases) =
        (stacked(weights.codes)?, stacked(weights.scales)?, stacked(weights.biases)?);
    let inputs = [(c"codes", Some(&codes)), (c"scales", Some(&scales)), (c"biases", Some(&biases))];
    let outputs = [(c"out", &launch.shape[..], dtype)];
    let made =
        KERNELS.lock().launch(launch.template, &inputs, &outputs, [launch.words, 1, 1], THREADS)?;
    Ok(made.and_then(|made| made.into_iter().next()))
}

/// A call that the kernel supports.
#[derive(Debug, PartialEq)]
struct Launch {
    template: UnpackTemplate,
    /// The number of words of all weights.
    words: i32,
    /// The shape of the result.
    shape: Vec<i32>,
}

impl Launch {
    fn of(weights: &AffineWeights, dtype: Dtype) -> Option<Self> {
        let AffineWeights { codes, scales, biases, bits, group_size } = *weights;
        let (&words, leading) = codes.shape().split_last()?;
        let (&groups, of_scales) = scales.shape().split_last()?;
        let template =
            UnpackTemplate { elements: elements_of([scales.dtype(), dtype])?, bits, group_size };
        // Groups begin at the beginning of a word.
        let fits = codes.dtype() == Dtype::Uint32
            && matches!(bits, 2 | 4 | 8)
            && group_size > 0
            && group_size % template.codes_of_a_word() == 0
            && leading == of_scales
            && !leading.is_empty()
            && biases.shape() == scales.shape()
            && biases.dtype() == scales.dtype();
        let inputs = words.checked_mul(fits.then(|| template.codes_of_a_word())?)?;
        let fits = groups.checked_mul(group_size) == Some(inputs);
        let words = codes.shape().iter().try_fold(1i32, |all, &n| all.checked_mul(n))?;
        let shape = [leading, &[inputs]].concat();
        (fits && (1..=i32::MAX - THREADS).contains(&words)).then_some(Self {
            template,
            words,
            shape,
        })
    }
}

/// What the text of a kernel depends on.
#[derive(Debug, PartialEq, Eq, Hash)]
struct UnpackTemplate {
    /// The names of the dtypes of the scales and the result in CUDA.
    elements: [&'static str; 2],
    bits: i32,
    group_size: i32,
}

impl UnpackTemplate {
    fn codes_of_a_word(&self) -> i32 {
        32 / self.bits
    }
}

impl Template for UnpackTemplate {
    fn name(&self) -> &'static CStr {
        c"etkv_unpack"
    }

    /// A thread unpacks one word.
    fn text(&self) -> String {
        // The type of a scale is that of the kernel's argument.
        let Self { elements: [_, out], bits, group_size } = self;
        let per_word = self.codes_of_a_word();
        let mask = (1u32 << bits) - 1;
        let of_group = |part: &str| {
            format!(
                "static_cast<float>({part}[matrix * {part}_strides[0] + row * {part}_strides[1] + \
                 group * {part}_strides[2]])"
            )
        };
        format!(
            "using Out = {out};
             struct alignas({per_word} * sizeof(Out)) Values {{ Out at[{per_word}]; }};
             const long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
             const long long words = codes_shape[2], rows = codes_shape[1];
             if (thread >= codes_shape[0] * rows * words) return;
             const long long word = thread % words, line = thread / words;
             const long long row = line % rows, matrix = line / rows;
             const long long group = word * {per_word} / {group_size};
             const unsigned int found = codes[matrix * codes_strides[0] + row * codes_strides[1]
                 + word * codes_strides[2]];
             const float scale = {scale_of};
             const float bias = {bias_of};
             Values values;
             #pragma unroll
             for (int i = 0; i < {per_word}; ++i) {{
               const float code = static_cast<float>((found >> (i * {bits})) & {mask}u);
               values.at[i] = static_cast<Out>(scale * code + bias);
             }}
             reinterpret_cast<Values*>(out)[thread] = values;
            ",
            scale_of = of_group("scales"),
            bias_of = of_group("biases"),
        )
    }
}

#[cfg(test)]
mod tests {
    use mlx_rs::ops::broadcast_to;

    use super::*;
    use crate::kernels::testing::{array, on_cuda, units, values};
    use crate::mlx::slice_axis;

    /// Returns codes, scales and biases of `[matrices, rows, inputs]`.
    fn parts(shape: [i32; 3], bits: i32, group_size: i32, dtype: Dtype) -> (Array, Array, Array) {
        let [matrices, rows, inputs] = shape;
        let mut unit = units(bits as u64);
        let words = inputs * bits / 32;
        let codes: Vec<u32> = (0..matrices * rows * words)
            .map(|_| {
                (f64::from(unit()) * 65536.0) as u32 | ((f64::from(unit()) * 65536.0) as u32) << 16
            })
            .collect();
        let of_groups = [matrices, rows, inputs / group_size];
        (
            Array::from_slice(&codes, &[matrices, rows, words]),
            array(1, &of_groups, dtype),
            array(2, &of_groups, dtype),
        )
    }

    #[test]
    fn each_element_is_its_code_times_the_scale_plus_the_bias() {
        on_cuda(|| {
            for (bits, group_size) in [(2, 32), (4, 32), (4, 64), (8, 128)] {
                for (dtype, out) in [
                    (Dtype::Bfloat16, Dtype::Bfloat16),
                    (Dtype::Float32, Dtype::Float16),
                    (Dtype::Float16, Dtype::Float32),
                ] {
                    let (codes, scales, biases) = parts([3, 5, 384], bits, group_size, dtype);
                    // Some rows of all matrices, which are not contiguous, and biases without strides.
                    let rows = |part: &Array| slice_axis(part, 1, 1, 4, 1);
                    let bias = slice_axis(&biases, 1, 0, 1, 1)?;
                    let biases = broadcast_to(bias, &[3, 3, 384 / group_size])?;
                    let (codes, scales) = (rows(&codes)?, rows(&scales)?);
                    let weights = AffineWeights {
                        codes: &codes,
                        scales: &scales,
                        biases: &biases,
                        bits,
                        group_size,
                    };
                    let made = unpack(&weights, out)?.expect("the kernel supports them");
                    assert_eq!((made.shape(), made.dtype()), (&[3, 3, 384][..], out));
                    let codes = crate::mlx::elements::<u32>(&codes.contiguous()?)?;
                    let (scales, biases) = (values(&scales), values(&biases));
                    let limit = match out {
                        Dtype::Float32 => 1e-6,
                        Dtype::Float16 => 1e-3,
                        _ => 8e-3,
                    };
                    for (i, found) in values(&made).into_iter().enumerate() {
                        let bit = i * bits as usize;
                        let code = codes[bit / 32] >> (bit % 32) & ((1 << bits) - 1);
                        let group = i / group_size as usize;
                        let wanted = f64::from(code) * scales[group] + biases[group];
                        let scale = (f64::from(code) * scales[group]).abs().max(1.0);
                        assert!((found - wanted).abs() <= limit * scale, "{i}: {found}, {wanted}");
                    }
                }
            }
            Ok(())
        });
    }

    #[test]
    fn only_supported_calls_are_accepted() {
        let (codes, scales, biases) = parts([1, 4, 128], 4, 32, Dtype::Float16);
        let weights = AffineWeights {
            codes: &codes,
            scales: &scales,
            biases: &biases,
            bits: 4,
            group_size: 32,
        };
        let launch = Launch::of(&weights, Dtype::Bfloat16).unwrap();
        assert_eq!((launch.words, launch.template.elements), (64, ["__half", "__nv_bfloat16"]));
        assert_eq!(weights.unpacked_shape(Dtype::Bfloat16), Some(vec![1, 4, 128]));
        assert_eq!(Launch::of(&weights, Dtype::Int32), None);
        for bits in [0, 3, 5, 6] {
            assert_eq!(Launch::of(&AffineWeights { bits, ..weights }, Dtype::Float16), None);
        }
        for group_size in [-32, 0, 12, 64] {
            assert_eq!(Launch::of(&AffineWeights { group_size, ..weights }, Dtype::Float16), None);
        }
        let wide = biases.as_dtype(Dtype::Float32).unwrap();
        assert_eq!(Launch::of(&AffineWeights { biases: &wide, ..weights }, Dtype::Float16), None);
        let signed = codes.as_dtype(Dtype::Int32).unwrap();
        assert_eq!(Launch::of(&AffineWeights { codes: &signed, ..weights }, Dtype::Float16), None);
        // Sizes that overflow, of arrays that take no memory.
        let expanded = |array: &Array, n| {
            broadcast_to(slice_axis(array, 2, 0, 1, 1).unwrap(), &[1, 4, n]).unwrap()
        };
        let (long, groups) = (expanded(&codes, (1 << 29) + 4), expanded(&scales, 1 << 27));
        let weights_of =
            |codes, groups| AffineWeights { codes, scales: groups, biases: groups, ..weights };
        assert_eq!(Launch::of(&weights_of(&long, &groups), Dtype::Float16), None);
        assert_eq!(Launch::of(&weights_of(&long, &scales), Dtype::Float16), None);
        let fewer = slice_axis(&codes, 1, 0, 3, 1).unwrap();
        assert_eq!(Launch::of(&AffineWeights { codes: &fewer, ..weights }, Dtype::Float16), None);
    }
}
