//! Bounds of elements that are known before the elements are computed: indices from a sort or an argmax lie within
//! their axis. Such indices need no check.

use mlx_rs::Dtype;

use super::shape::normalize_axis;
use crate::ir::{Function, OneAxis, Op, Value};
use crate::ops::frame::Frame;

/// Returns an exclusive upper limit of the elements of an instruction's results, if one is known and no element is
/// negative.
pub fn limit(op: &Op, frame: &Frame) -> Option<i32> {
    match op {
        Op::Call { function, tensors, .. } => limit_of_call(function, *tensors.first()?, frame),
        Op::AsType { x, dtype } if holds_indices(*dtype) => frame.limit(*x),
        Op::ExpandDims { x, .. }
        | Op::LastToken { x }
        | Op::WantedRows { x }
        | Op::Piece { x, .. }
        | Op::Reshape { x, .. }
        | Op::ReshapeTranspose { x, .. }
        | Op::Slice { x, .. }
        | Op::Split { x, .. }
        | Op::Take { x, .. }
        | Op::Transpose { x, .. }
        | Op::TransposeReshape { x, .. } => frame.limit(*x),
        _ => None,
    }
}

fn limit_of_call(function: &Function, x: Value, frame: &Frame) -> Option<i32> {
    match function {
        Function::Argsort { axis }
        | Function::ArgPartition { axis }
        | Function::Argmax(OneAxis { axis, .. })
        | Function::Argmin(OneAxis { axis, .. }) => {
            let x = frame.tensor(x).ok()?;
            let axis = normalize_axis(*axis, x.ndim()).ok()?;
            Some(x.dim(axis as i32))
        }
        Function::BroadcastTo
        | Function::Contiguous
        | Function::Flip { .. }
        | Function::Repeat { .. }
        | Function::Roll { .. }
        | Function::Squeeze { .. }
        | Function::TakeAlongAxis { .. }
        | Function::Tile => frame.limit(x),
        _ => None,
    }
}

/// Returns whether a dtype can represent every index.
fn holds_indices(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::Int32 | Dtype::Int64 | Dtype::Uint32 | Dtype::Uint64)
}

#[cfg(test)]
mod tests {
    use mlx_rs::Array;
    use smallvec::smallvec;

    use super::*;
    use crate::ir::Int;
    use crate::ops::frame::StepState;
    use etkv::mlx;

    #[test]
    fn places_in_an_axis_stay_within_it() {
        let mlx = mlx::enter().unwrap();
        mlx.run(|| {
            let mut frame = Frame::new(&mlx, 3, 0, &[], StepState::NoCache);
            let [x, places, other] = [0, 1, 2].map(Value);
            frame.set(x, Array::from_slice(&[0.5f32; 10], &[2, 5]));
            let argsort = |axis| Op::Call {
                function: Function::Argsort { axis },
                tensors: smallvec![x],
                ints: Vec::new(),
            };
            assert_eq!(limit(&argsort(-1), &frame), Some(5));
            assert_eq!(limit(&argsort(0), &frame), Some(2));
            assert_eq!(frame.limit(places), None);

            frame.set_limit(places, Some(5));
            let viewed = Op::Reshape { x: places, shape: vec![Int::Literal(-1)] };
            assert_eq!(limit(&viewed, &frame), Some(5));
            let cast = |dtype| Op::AsType { x: places, dtype };
            assert_eq!(limit(&cast(Dtype::Int32), &frame), Some(5));
            // The dtype cannot represent every index.
            assert_eq!(limit(&cast(Dtype::Int8), &frame), None);
            let rows = Op::Reshape { x: other, shape: vec![Int::Literal(-1)] };
            assert_eq!(limit(&rows, &frame), None);

            frame.set_limit(places, None);
            assert_eq!(limit(&viewed, &frame), None);
            Ok::<(), etkv::Error>(())
        })
        .unwrap();
    }
}
