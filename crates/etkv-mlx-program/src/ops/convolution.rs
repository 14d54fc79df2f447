//! Convolutions of one, two and three dimensions.

use mlx_rs::Array;

use super::calls::{check_size, decode, Arguments};
use crate::error::{fail, Result};
use crate::fb;
use crate::ir::{Convolution, Function, Instruction};
use crate::ops::limits::{bytes_of, max_bytes};
use crate::ops::slots::Slots;
use etkv::mlx::call;

/// The maximum stride, padding and so on: more than any model has, and small enough that sizes do not overflow.
const MAX: i32 = 1 << 20;

macro_rules! convolution {
    ($(
        $name:ident: $node:ident, [$($stride:ident),+], [$($padding:ident),+], [$($dilation:ident),+]
        $(, [$($output_padding:ident),+])?;
    )+) => {$(
        pub fn $name(slots: &mut Slots, node: fb::$node) -> Result<Instruction> {
            let output_padding = None;
            $(let output_padding = output_padding.or(Some(vec![$(node.$output_padding()),+]));)?
            let convolution = Convolution {
                stride: vec![$(node.$stride()),+],
                padding: vec![$(node.$padding()),+],
                dilation: vec![$(node.$dilation()),+],
                output_padding,
                groups: node.groups(),
            };
            check(&convolution)?;
            let function = Function::Conv(convolution);
            decode(slots, function, &[node.x(), node.w()], Vec::new(), node.out())
        }
    )+};
}

convolution! {
    conv1d: Conv1DNode, [stride], [padding], [dilation];
    conv2d: Conv2DNode,
        [stride_h, stride_w], [padding_h, padding_w], [dilation_h, dilation_w];
    conv3d: Conv3DNode,
        [stride_d, stride_h, stride_w],
        [padding_d, padding_h, padding_w],
        [dilation_d, dilation_h, dilation_w];
    conv_transpose1d: ConvTranspose1DNode, [stride], [padding], [dilation], [output_padding];
    conv_transpose2d: ConvTranspose2DNode,
        [stride_h, stride_w],
        [padding_h, padding_w],
        [dilation_h, dilation_w],
        [output_padding_h, output_padding_w];
    conv_transpose3d: ConvTranspose3DNode,
        [stride_d, stride_h, stride_w],
        [padding_d, padding_h, padding_w],
        [dilation_d, dilation_h, dilation_w],
        [output_padding_d, output_padding_h, output_padding_w];
}

/// Checks strides, paddings, dilations and groups, because MLX divides by some of them.
fn check(convolution: &Convolution) -> Result<()> {
    let Convolution { stride, padding, dilation, output_padding, groups } = convolution;
    let from_one = stride.iter().chain(dilation).chain(std::iter::once(groups));
    let from_zero = padding.iter().chain(output_padding.iter().flatten());
    let fits = from_one.clone().all(|n| (1..=MAX).contains(n))
        && from_zero.clone().all(|n| (0..=MAX).contains(n));
    if !fits {
        fail!(
            Program,
            "expected strides, dilations and groups from 1 and paddings from 0, up to {MAX}, got \
             {convolution:?}"
        );
    }
    Ok(())
}

/// Checks the sizes of MLX's intermediates, because MLX computes sizes in 32 bits. These are the padded input (a
/// transposed convolution also spreads it by its strides), the result, and on a CPU the copied input, with a row for
/// each element of the result.
fn check_sizes(x: &Array, w: &Array, convolution: &Convolution, on_gpu: bool) -> Result<()> {
    let Convolution { stride, padding, dilation, output_padding, .. } = convolution;
    let (rank, channels) = (stride.len(), x.dim(-1));
    let (mut padded, mut made) = (vec![x.dim(0)], vec![x.dim(0)]);
    for axis in 0..rank {
        let [size, kernel] = [x, w].map(|array| i64::from(array.shape()[axis + 1]));
        let [stride, padding, dilation] =
            [stride, padding, dilation].map(|list| i64::from(list[axis]));
        let kernel = dilation * (kernel - 1) + 1;
        let (padded_size, made_size) = match output_padding {
            None => {
                let padded = size + 2 * padding;
                (padded, (padded - kernel).div_euclid(stride) + 1)
            }
            Some(output_padding) => {
                let more = 2 * (kernel - 1 - padding) + i64::from(output_padding[axis]);
                let padded = (size - 1) * stride + 1 + more;
                (padded.max((size - 1) * stride + 1), padded - kernel + 1)
            }
        };
        if made_size < 1 {
            fail!(
                Program,
                "expected a convolution with at least one element, got {:?} with {:?}: {convolution:?}",
                x.shape(),
                w.shape()
            );
        }
        for (list, size) in [(&mut padded, padded_size), (&mut made, made_size)] {
            list.push(i32::try_from(size).unwrap_or(-1));
        }
    }
    padded.push(channels);
    check_size(&padded, x.dtype())?;
    let elements = w.size() / w.dim(0) as usize * convolution.groups as usize;
    let rows = bytes_of(&made, x.dtype()).and_then(|bytes| bytes.checked_mul(elements));
    made.push(w.dim(0));
    check_size(&made, x.dtype())?;
    let most = max_bytes().saturating_mul(ROWS);
    match rows {
        Some(rows) if on_gpu || rows <= most => Ok(()),
        _ => fail!(
            Program,
            "expected a convolution of at most {most} bytes, got {:?} with {:?}: {convolution:?}",
            x.shape(),
            w.shape()
        ),
    }
}

/// The maximum bytes of the copied input rows of a convolution on a CPU, divided by the maximum bytes of a tensor.
const ROWS: usize = 4;

/// Runs a convolution of `x`, `[N, ..., C]`, with `w`, `[O, ..., C / groups]`.
pub fn run(arguments: &Arguments, convolution: &Convolution) -> Result<Array> {
    let (x, w) = (arguments.tensor(0)?, arguments.tensor(1)?);
    let Convolution { stride, padding, dilation, output_padding, groups } = convolution;
    let rank = stride.len() + 2;
    if x.ndim() != rank || w.ndim() != rank || x.size() == 0 || w.size() == 0 {
        fail!(
            Program,
            "expected tensors of {rank} axes with elements for a convolution, got {:?} and {:?}",
            x.shape(),
            w.shape()
        );
    }
    check_sizes(x, w, convolution, arguments.frame.on_gpu())?;
    let (x, w, groups) = (x.as_ptr(), w.as_ptr(), *groups);
    let (s, p, d) = (&stride[..], &padding[..], &dilation[..]);
    // SAFETY: the arrays are live.
    call(|made, stream| unsafe {
        match (s, p, d, output_padding.as_deref()) {
            (&[s], &[p], &[d], None) => mlx_sys::mlx_conv1d(made, x, w, s, p, d, groups, stream),
            (&[s0, s1], &[p0, p1], &[d0, d1], None) => {
                mlx_sys::mlx_conv2d(made, x, w, s0, s1, p0, p1, d0, d1, groups, stream)
            }
            (&[s0, s1, s2], &[p0, p1, p2], &[d0, d1, d2], None) => {
                mlx_sys::mlx_conv3d(made, x, w, s0, s1, s2, p0, p1, p2, d0, d1, d2, groups, stream)
            }
            (&[s], &[p], &[d], Some(&[o])) => {
                mlx_sys::mlx_conv_transpose1d(made, x, w, s, p, d, o, groups, stream)
            }
            (&[s0, s1], &[p0, p1], &[d0, d1], Some(&[o0, o1])) => mlx_sys::mlx_conv_transpose2d(
                made, x, w, s0, s1, p0, p1, d0, d1, o0, o1, groups, stream,
            ),
            (&[s0, s1, s2], &[p0, p1, p2], &[d0, d1, d2], Some(&[o0, o1, o2])) => {
                mlx_sys::mlx_conv_transpose3d(
                    made, x, w, s0, s1, s2, p0, p1, p2, d0, d1, d2, o0, o1, o2, groups, stream,
                )
            }
            _ => 1,
        }
    })
}
