//! Calls of attention.

use std::sync::Arc;

use etkv_core::Result;

use super::argument;
use super::forward::{output, Forward, Run, State};
use super::payload::Attend;
use crate::attend::attend_into;

/// Runs a call of attention. An error rolls the step back.
///
/// # Errors
/// Those of [`begin`](etkv_core::AttendCache::begin),
/// [`update_and_fetch`](etkv_core::AttendCache::update_and_fetch) and
/// [`commit`](etkv_core::AttendCache::commit), those of the host, and
/// [`Step`](etkv_core::Status::Step) for a call out of order.
pub fn attend(forward: &Arc<Forward>, attend: &Attend, run: Run) -> Result<()> {
    let Run { inputs, output_type, host, parallel } = run;
    let [queries, k, v, positions] = attend.inputs.map(|input| &inputs[input]);
    forward.run(&attend.call, positions, |state| {
        let State { forwards, positions, attention, .. } = state;
        let q = argument::rows(queries, "queries")?;
        let (k, v) = (argument::rows(k, "keys")?, argument::rows(v, "values")?);
        forwards.call((attend.call.call, attend.call.layer), positions, &k, &v, |spec| {
            let &[_, heads, n, _] = q.shape();
            let shape = [1, heads, n, spec.v.head_dim() as i32];
            let out = output(host, &shape, output_type, &[(queries, "queries")])?;
            // SAFETY: the host's memory has the elements of the shape and is aligned, and only this call borrows
            // it.
            unsafe {
                attend_into(&q, spec, attend.scale, out.start, out.dtype, attention, parallel)
            }
        })
    })
}
