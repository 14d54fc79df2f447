//! Calls of attention.

use std::sync::Arc;

use etkv_core::{fail, Result, Scoring};

use super::argument::{self, pick};
use super::forward::{output, Forward, Run, State};
use super::payload::AttendSinks;
use crate::attend::attend_into;
use crate::tensor::Tensor;

/// Runs a call of attention. An error rolls the step back.
///
/// # Errors
/// The errors of [`begin`](etkv_core::AttendCache::begin),
/// [`update_and_fetch`](etkv_core::AttendCache::update_and_fetch) and
/// [`commit`](etkv_core::AttendCache::commit), the errors of the host, and [`Step`](etkv_core::Status::Step)
/// for a call out of order.
pub fn attend(forward: &Arc<Forward>, attend: &AttendSinks, run: Run) -> Result<()> {
    let Run { inputs, output_type, host, parallel } = run;
    let [Some(queries), Some(k), Some(v), Some(positions), sinks] = pick(inputs, &attend.inputs)
    else {
        fail!(Internal, "a call of attention lacks inputs");
    };
    let call = (attend.call.call, attend.call.layer);
    forward.run(&attend.call, positions, |state| {
        let State { forwards, positions, attention, .. } = state;
        let q = argument::rows(queries, "queries")?;
        let (k, v) = (argument::rows(k, "keys")?, argument::rows(v, "values")?);
        let &[_, heads, n, _] = q.shape();
        let sinks = sinks.map(|sinks| {
            argument::tensor(sinks, "sinks", &[heads], [1, 1, 1, heads])
                .map(|sinks| Tensor::to_f32(&sinks))
        });
        let sinks = sinks.transpose()?;
        let AttendSinks { scale, softcap, .. } = *attend;
        let scoring = Scoring { scale, softcap, sinks: sinks.as_deref() };
        forwards.call(call, positions, &k, &v, |spec| {
            let shape = [1, heads, n, spec.v.head_dim() as i32];
            let out = output(host, &shape, output_type, &[(queries, "queries")])?;
            // SAFETY: the host's memory has room for the shape and is aligned, and only this call borrows it.
            unsafe { attend_into(&q, spec, scoring, out.start, out.dtype, attention, parallel) }
        })
    })
}
