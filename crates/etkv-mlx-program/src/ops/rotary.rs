//! Rotary embedding with MLX's own function.

use mlx_rs::fast::rope_dynamic;
use mlx_rs::{Array, Dtype};

use super::calls::{decode, none, Arguments};
use crate::error::{fail, Result};
use crate::fb;
use crate::ir::{Function, Instruction, Int, Value};
use crate::ops::frame::Frame;
use crate::ops::slots::Slots;
use etkv::kernels;
use etkv::mlx::{call, cast};

pub fn rope(slots: &mut Slots, node: fb::RopeNode) -> Result<Instruction> {
    let offset = node.offset();
    let (mut tensors, mut ints) = (vec![node.x()], Vec::new());
    match (offset.is_vid(), offset.vid(), offset.tid()) {
        (true, Some(vid), _) => ints.push(Int::Value(slots.read_int(vid)?)),
        (false, _, Some(tid)) => tensors.push(tid),
        _ => fail!(Program, "expected an offset of a rotary embedding, got none"),
    }
    tensors.extend(node.freqs());
    let function = Function::Rope {
        dims: node.dims(),
        traditional: node.traditional(),
        base: node.base(),
        scale: node.scale(),
        offsets: !offset.is_vid(),
        freqs: node.freqs().is_some(),
    };
    decode(slots, function, &tensors, ints, node.out())
}

/// The parameters of a rotary embedding.
pub struct Rotation {
    /// The number of elements at the start of a row that rotate.
    pub dims: i32,
    /// Whether adjacent elements rotate together, instead of the two halves.
    pub traditional: bool,
    /// The factor of positions.
    pub scale: f32,
}

pub fn run_rope(
    arguments: &Arguments,
    rotation: Rotation,
    base: f32,
    [offsets, freqs]: [bool; 2],
) -> Result<Array> {
    let Rotation { dims, traditional, scale } = rotation;
    // On CUDA, MLX's function writes past the end of its result if there are gaps between tokens.
    let x = arguments.tensor(0)?.contiguous()?;
    let features = if x.ndim() < 3 { 0 } else { x.dim(-1) };
    if dims % 2 != 0 || !(1..=features).contains(&dims) {
        fail!(Program, "cannot rotate {dims} elements of each row of {:?}", x.shape());
    }
    let periods = match freqs {
        true => {
            let periods = arguments.tensor(1 + usize::from(offsets))?;
            if periods.shape() != [dims / 2] {
                fail!(Program, "expected {} periods, got shape {:?}", dims / 2, periods.shape());
            }
            periods.as_ptr()
        }
        false => none(),
    };
    let base = mlx_sys::mlx_optional_float { value: base, has_value: !freqs };
    let (x, at) = (x.as_ptr(), arguments.ints.first().copied());
    // SAFETY: the arrays are live, or empty handles.
    call(|made, stream| unsafe {
        match (at, arguments.tensors.get(1)) {
            (Some(at), _) => {
                mlx_sys::mlx_fast_rope(made, x, dims, traditional, base, scale, at, periods, stream)
            }
            (None, Some(offsets)) => {
                let offsets = offsets.as_ptr();
                mlx_sys::mlx_fast_rope_dynamic(
                    made,
                    x,
                    dims,
                    traditional,
                    base,
                    scale,
                    offsets,
                    periods,
                    stream,
                )
            }
            (None, None) => 1,
        }
    })
}

pub fn run(frame: &Frame, x: Value, [offsets, periods]: [Value; 2], dtype: Dtype) -> Result<Array> {
    let (offsets, periods) = (frame.tensor(offsets)?, frame.tensor(periods)?);
    cast(&rotary(frame.tensor(x)?, offsets, periods)?, dtype)
}

/// Rotates `x`, `[1, heads, T, head_dim]`. MLX's function has one offset for each batch entry. The tokens of an entry
/// have consecutive positions, the first at the offset. So each token is passed as an entry.
pub fn rotary(x: &Array, offsets: &Array, periods: &Array) -> Result<Array> {
    if x.ndim() != 4 || x.dim(0) != 1 || offsets.shape() != [x.dim(2)] {
        let (x, offsets) = (x.shape(), offsets.shape());
        fail!(Shape, "expected one position for each token of {x:?}, got positions {offsets:?}");
    }
    let embed = |x: &Array| rope_dynamic(x, x.dim(3), false, None, 1.0, offsets, periods);
    if x.dim(2) == 1 {
        return Ok(embed(x)?);
    }
    if let Some(rotated) = kernels::rotary(x, offsets, periods)? {
        return Ok(rotated);
    }
    let tokens_first = [2, 1, 0, 3];
    // A piece of a joined product has gaps between its tokens. On CUDA, MLX's function allocates a result without
    // gaps, but writes it with the gaps of its input, past the end (MLX 0.32.2).
    let dense = x.transpose_axes(&tokens_first)?.contiguous()?;
    Ok(embed(&dense)?.transpose_axes(&tokens_first)?)
}

#[cfg(test)]
mod tests {
    use mlx_rs::ops::concatenate;
    use mlx_rs::random::normal;

    use super::*;
    use etkv::mlx::{self, slice_axis};

    /// The formula that exporters write.
    fn written(x: &Array, offsets: &Array, inverse: &Array) -> Result<Array> {
        let half = x.dim(3) / 2;
        let angles = offsets.as_dtype(Dtype::Float32)?.reshape(&[-1, 1])?.multiply(inverse)?;
        let angles = concatenate(&[&angles, &angles], -1)?;
        let back = slice_axis(x, 3, half, 2 * half, 1)?.negative()?;
        let rotated = concatenate(&[&back, &slice_axis(x, 3, 0, half, 1)?], -1)?;
        Ok(x.multiply(angles.cos()?)?.add(rotated.multiply(angles.sin()?)?)?)
    }

    #[test]
    fn tokens_turn_by_their_own_positions() {
        mlx::run(|| {
            let inverse = Array::from_slice(&[1.0f32, 0.3, 0.07, 0.0], &[4]);
            for positions in [&[0][..], &[5], &[0, 1, 2, 3], &[9, 9, 2, 700, 11]] {
                let n = positions.len() as i32;
                let offsets = Array::from_slice(positions, &[n]);
                // In the layout of a projection's result.
                let x = normal::<f32>(&[1, n, 3, 8], None, None, None)?
                    .transpose_axes(&[0, 2, 1, 3])?;
                let found = rotary(&x, &offsets, &inverse.reciprocal()?)?;
                let expected = written(&x, &offsets, &inverse)?;
                assert_eq!(found.shape(), expected.shape());
                assert!(found.all_close(&expected, 1e-4, 1e-4, None)?);
            }
            // A piece of a wider product.
            let wide = normal::<f32>(&[1, 5, 48], None, None, None)?;
            let piece = slice_axis(&wide, 2, 8, 32, 1)?.reshape(&[1, 5, 3, 8])?;
            let x = piece.transpose_axes(&[0, 2, 1, 3])?;
            let offsets = Array::from_slice(&[4, 5, 6, 7, 8], &[5]);
            let found = rotary(&x, &offsets, &inverse.reciprocal()?)?;
            assert!(found.all_close(written(&x, &offsets, &inverse)?, 1e-4, 1e-4, None)?);
            let x = normal::<f32>(&[1, 1, 2, 8], None, None, None)?;
            assert!(rotary(&x, &Array::from_slice(&[1], &[1]), &inverse).is_err());
            Ok(())
        })
        .unwrap();
    }
}
