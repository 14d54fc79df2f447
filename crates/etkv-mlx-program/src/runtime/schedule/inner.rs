//! Runs nested chains: one of two chains, or a loop over the elements of an axis.

use mlx_rs::Array;

use super::Schedule;
use crate::error::{fail, Result};
use crate::ir::{Int, Out, Scan, Value};
use crate::ops::frame::Frame;
use crate::ops::{normalize_axis, OpResult, Pieces};
use etkv::mlx::{slice_axis, Arrays};

/// The maximum number of runs of a loop's body.
const MAX_RUNS: i32 = 1 << 20;

/// Runs the first chain if `cond` is not 0, else the second.
pub fn run_if(frame: &mut Frame, cond: Int, chains: &[Schedule], out: Out) -> Result<OpResult> {
    let index = usize::from(frame.int(cond)? == 0);
    let Some(chain) = chains.get(index) else {
        fail!(Internal, "a choice has {} chains", chains.len());
    };
    chain.run(frame)?;
    for (value, made) in out.tensors().zip(chain.chain().tensor_outputs()) {
        frame.set_limit(value, frame.limit(made));
    }
    Ok(OpResult::Tensors(outputs(frame, chain)?.into()))
}

/// Runs the body for each element of an axis.
pub fn run_scan(frame: &mut Frame, scan: &Scan, body: &Schedule) -> Result<OpResult> {
    let (axis, n) = axis_of(frame, scan)?;
    let mut stacked: Vec<Arrays> = (0..scan.n_stacked).map(|_| Arrays::empty()).collect();
    let mut carried = arrays(frame, &scan.carried)?;
    for at in 0..n {
        for (original, sliced) in scan.originals.iter().zip(&scan.sliced) {
            let row = slice_axis(frame.tensor(*original)?, axis, at, at + 1, 1)?;
            frame.set(*sliced, row.squeeze_axes(&[axis as i32])?);
        }
        for (value, array) in scan.inside.iter().zip(carried) {
            frame.set(*value, array);
        }
        body.run(frame)?;
        let mut made = outputs(frame, body)?;
        carried = made.split_off(scan.n_stacked);
        stacked.iter_mut().zip(&made).try_for_each(|(list, array)| list.push(array))?;
    }
    let mut made = Vec::with_capacity(scan.n_stacked + carried.len());
    for list in &stacked {
        made.push(list.stack(axis as i32)?);
    }
    made.extend(carried);
    Ok(OpResult::Tensors(Pieces::from_vec(made)))
}

/// Returns the axis of a loop, and the number of its elements. All tensors must have the same number.
fn axis_of(frame: &Frame, scan: &Scan) -> Result<(usize, i32)> {
    let mut found = None;
    for original in &scan.originals {
        let x = frame.tensor(*original)?;
        let axis = normalize_axis(scan.axis, x.ndim())?;
        let size = x.dim(axis as i32);
        if *found.get_or_insert((axis, size)) != (axis, size) || !(1..=MAX_RUNS).contains(&size) {
            fail!(
                Program,
                "a loop runs along axis {} of {:?}, expected an axis of 1 to {MAX_RUNS} elements, as \
                 many in each tensor",
                scan.axis,
                x.shape()
            );
        }
    }
    found.map_or_else(|| fail!(Internal, "expected a tensor that the loop splits, got none"), Ok)
}

fn arrays(frame: &Frame, values: &[Value]) -> Result<Vec<Array>> {
    values.iter().map(|&value| frame.tensor(value).cloned()).collect()
}

fn outputs(frame: &Frame, chain: &Schedule) -> Result<Vec<Array>> {
    let values: Vec<Value> = chain.chain().tensor_outputs().collect();
    arrays(frame, &values)
}
