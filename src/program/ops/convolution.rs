//! Convolutions of one, two and three dimensions.

use mlx_rs::Array;

use super::calls::{decode, Arguments};
use crate::error::{fail, Result};
use crate::mlx::call;
use crate::program::fb;
use crate::program::ir::{Convolution, Function, Instruction};
use crate::program::slots::Slots;

/// The most of a stride, a padding and so on: more than any model has, and few enough that sizes do not
/// overflow.
const MOST: i32 = 1 << 20;

macro_rules! convolution {
    ($($name:ident: $node:ident, $stride:expr, $padding:expr, $dilation:expr, $output_padding:expr;)+) => {$(
        pub fn $name(slots: &mut Slots, node: fb::$node) -> Result<Instruction> {
            let convolution = Convolution {
                stride: $stride(&node).to_vec(),
                padding: $padding(&node).to_vec(),
                dilation: $dilation(&node).to_vec(),
                output_padding: $output_padding(&node),
                groups: node.groups(),
            };
            check(&convolution)?;
            let function = Function::Conv(convolution);
            decode(slots, function, &[node.x(), node.w()], Vec::new(), node.out())
        }
    )+};
}

convolution! {
    conv1d: Conv1DNode,
        |n: &fb::Conv1DNode<'_>| [n.stride()],
        |n: &fb::Conv1DNode<'_>| [n.padding()],
        |n: &fb::Conv1DNode<'_>| [n.dilation()],
        |_: &fb::Conv1DNode<'_>| None;
    conv2d: Conv2DNode,
        |n: &fb::Conv2DNode<'_>| [n.stride_h(), n.stride_w()],
        |n: &fb::Conv2DNode<'_>| [n.padding_h(), n.padding_w()],
        |n: &fb::Conv2DNode<'_>| [n.dilation_h(), n.dilation_w()],
        |_: &fb::Conv2DNode<'_>| None;
    conv3d: Conv3DNode,
        |n: &fb::Conv3DNode<'_>| [n.stride_d(), n.stride_h(), n.stride_w()],
        |n: &fb::Conv3DNode<'_>| [n.padding_d(), n.padding_h(), n.padding_w()],
        |n: &fb::Conv3DNode<'_>| [n.dilation_d(), n.dilation_h(), n.dilation_w()],
        |_: &fb::Conv3DNode<'_>| None;
    conv_transpose1d: ConvTranspose1DNode,
        |n: &fb::ConvTranspose1DNode<'_>| [n.stride()],
        |n: &fb::ConvTranspose1DNode<'_>| [n.padding()],
        |n: &fb::ConvTranspose1DNode<'_>| [n.dilation()],
        |n: &fb::ConvTranspose1DNode<'_>| Some(vec![n.output_padding()]);
    conv_transpose2d: ConvTranspose2DNode,
        |n: &fb::ConvTranspose2DNode<'_>| [n.stride_h(), n.stride_w()],
        |n: &fb::ConvTranspose2DNode<'_>| [n.padding_h(), n.padding_w()],
        |n: &fb::ConvTranspose2DNode<'_>| [n.dilation_h(), n.dilation_w()],
        |n: &fb::ConvTranspose2DNode<'_>| Some(vec![n.output_padding_h(), n.output_padding_w()]);
    conv_transpose3d: ConvTranspose3DNode,
        |n: &fb::ConvTranspose3DNode<'_>| [n.stride_d(), n.stride_h(), n.stride_w()],
        |n: &fb::ConvTranspose3DNode<'_>| [n.padding_d(), n.padding_h(), n.padding_w()],
        |n: &fb::ConvTranspose3DNode<'_>| [n.dilation_d(), n.dilation_h(), n.dilation_w()],
        |n: &fb::ConvTranspose3DNode<'_>| {
            Some(vec![n.output_padding_d(), n.output_padding_h(), n.output_padding_w()])
        };
}

/// Checks numbers: MLX divides by some of them.
fn check(convolution: &Convolution) -> Result<()> {
    let Convolution { stride, padding, dilation, output_padding, groups } = convolution;
    let from_one = stride.iter().chain(dilation).chain(std::iter::once(groups));
    let from_zero = padding.iter().chain(output_padding.iter().flatten());
    let fits = from_one.clone().all(|n| (1..=MOST).contains(n))
        && from_zero.clone().all(|n| (0..=MOST).contains(n));
    if !fits {
        fail!(
            Program,
            "expected strides, dilations and groups from 1 and paddings from 0, up to {MOST}, got \
             {convolution:?}"
        );
    }
    Ok(())
}

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
