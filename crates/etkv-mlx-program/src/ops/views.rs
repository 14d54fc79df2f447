//! Views that passes merge.

use std::ops::RangeInclusive;

use mlx_rs::{Array, Stream};
use smallvec::{smallvec, SmallVec};

use super::shape::{axis_to_split, resolved, Sizes};
use crate::error::Result;
use crate::ir::{Int, Value};
use crate::ops::frame::Frame;
use etkv::mlx::{check, slice_axis, Arrays};

/// The outputs of a split.
pub type Pieces = SmallVec<[Array; 4]>;

/// Returns the pieces of an axis that is split at these indices.
pub fn run_split(x: &Array, axis: i32, at: &[i32], sizes: &RangeInclusive<i32>) -> Result<Pieces> {
    let (axis, size) = axis_to_split(x, axis, sizes)?;
    if at.last().is_none_or(|&last| last > size) {
        // Pieces past the end are short or empty, as in Python.
        let ends = at.iter().copied().chain([size]);
        return std::iter::once(0)
            .chain(at.iter().copied())
            .zip(ends)
            .map(|(start, stop)| {
                let start = start.min(size);
                slice_axis(x, axis, start, stop.clamp(start, size), 1)
            })
            .collect();
    }
    let stream = Stream::thread_local_or_default();
    let mut made = Arrays::empty();
    // SAFETY: the handles and `at` outlive the call.
    check(unsafe {
        mlx_sys::mlx_split_sections(
            made.as_raw_mut(),
            x.as_ptr(),
            at.as_ptr(),
            at.len(),
            axis as i32,
            stream.as_ptr(),
        )
    })?;
    made.iter().collect()
}

/// Reshapes, then transposes.
pub fn run_reshape_transpose(
    frame: &Frame,
    x: Value,
    shape: &[Int],
    perm: &[i32],
) -> Result<Array> {
    let x = frame.tensor(x)?;
    reshape_transpose(x, &resolved(frame, x, shape)?, perm)
}

/// Reshapes, then transposes, with a single reshape if possible.
pub fn reshape_transpose(x: &Array, shape: &[i32], perm: &[i32]) -> Result<Array> {
    if let Some(transposed) = transposed_in_order(shape, perm) {
        return Ok(x.reshape(&transposed)?);
    }
    Ok(x.reshape(shape)?.transpose_axes(perm)?)
}

/// Transposes, then reshapes.
pub fn run_transpose_reshape(
    frame: &Frame,
    x: Value,
    perm: &[i32],
    shape: &[Int],
) -> Result<Array> {
    let x = frame.tensor(x)?;
    let shape = resolved(frame, x, shape)?;
    if transposed_in_order(x.shape(), perm).is_some() {
        return Ok(x.reshape(&shape)?);
    }
    Ok(x.transpose_axes(perm)?.reshape(&shape)?)
}

/// Returns the shape after a transposition that keeps the order of the elements, because it moves only axes with one
/// element. Otherwise returns `None`.
fn transposed_in_order(shape: &[i32], perm: &[i32]) -> Option<Sizes> {
    let mut last = None;
    let mut seen: SmallVec<[bool; 8]> = smallvec![false; shape.len()];
    let mut transposed = Sizes::new();
    for &axis in perm {
        let axis = usize::try_from(axis).ok().filter(|&axis| axis < shape.len())?;
        if std::mem::replace(&mut seen[axis], true) {
            return None;
        }
        if shape[axis] != 1 {
            if last > Some(axis) {
                return None;
            }
            last = Some(axis);
        }
        transposed.push(shape[axis]);
    }
    (perm.len() == shape.len()).then_some(transposed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_of_one_element_move_freely() {
        let heads = [0, 2, 1, 3];
        assert_eq!(transposed_in_order(&[1, 1, 4, 8], &heads), Some(smallvec![1, 4, 1, 8]));
        assert_eq!(transposed_in_order(&[1, 5, 1, 8], &heads), Some(smallvec![1, 1, 5, 8]));
        assert_eq!(transposed_in_order(&[1, 5, 4, 8], &heads), None);
        assert_eq!(transposed_in_order(&[1, 1, 4, 8], &[0, 0, 1, 3]), None);
        assert_eq!(transposed_in_order(&[1, 1, 4], &heads), None);
        assert_eq!(transposed_in_order(&[1, 4], &[0, -1]), None);
    }

    #[test]
    fn pieces_are_those_of_slices() {
        etkv::mlx::run(|| {
            let x = Array::from_slice(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], &[2, 5]);
            for (at, expected) in [
                (vec![2], vec![(0, 2), (2, 5)]),
                (vec![1, 4, 9], vec![(0, 1), (1, 4), (4, 5), (5, 5)]),
            ] {
                let pieces = run_split(&x, -1, &at, &(0..=i32::MAX))?;
                assert_eq!(pieces.len(), expected.len());
                for (piece, (start, stop)) in pieces.iter().zip(expected) {
                    assert_eq!(piece.shape(), [2, stop - start]);
                    assert!(piece.eq_values(&slice_axis(&x, 1, start, stop, 1)?)?);
                }
            }
            assert!(run_split(&x, 1, &[2], &(6..=7)).is_err());
            assert!(run_split(&x, 2, &[1], &(0..=9)).is_err());
            Ok(())
        })
        .unwrap();
    }
}
