//! Calls of recurrent layers.

use std::sync::Arc;

use etkv_core::{fail, Result};

use super::argument::{pick, tensor};
use super::forward::{output, Forward, Run, State};
use super::payload::{Convolve, Scan};
use crate::recurrent::{convolve_into, scan_into, ConvolveInputs, ScanInputs};

/// Runs a call of a convolution. An error rolls the step back.
///
/// # Errors
/// The errors of [`begin`](etkv_core::AttendCache::begin),
/// [`update_recurrent`](etkv_core::AttendCache::update_recurrent) and
/// [`commit`](etkv_core::AttendCache::commit), the errors of the host, and [`Step`](etkv_core::Status::Step)
/// for a call out of order.
pub fn convolve(forward: &Arc<Forward>, convolve: &Convolve, run: Run) -> Result<()> {
    let Run { inputs, output_type, host, parallel } = run;
    let [Some(x), Some(weight), bias, Some(positions)] = pick(inputs, &convolve.inputs) else {
        fail!(Internal, "a call of a convolution lacks inputs");
    };
    let (channels, width) = (convolve.channels as i32, convolve.width as i32);
    forward.run(&convolve.call, positions, |state| {
        let State { forwards, positions, recurrent, .. } = state;
        let n = positions.len() as i32;
        let bias =
            bias.map(|bias| tensor(bias, "bias", &[channels], [1, 1, 1, channels])).transpose()?;
        let inputs = ConvolveInputs {
            x: &tensor(x, "columns", &[1, channels, n], [1, channels, n, 1])?,
            weight: &tensor(weight, "weights", &[channels, width], [1, 1, channels, width])?,
            bias: bias.as_ref(),
            activation: convolve.activation,
        };
        let call = (convolve.call.call, convolve.call.layer);
        forwards.call_recurrent(call, positions, &mut |spec| {
            let shape = [1, channels, n];
            let out = output(host, &shape, output_type, &[(x, "columns"), (weight, "weights")])?;
            // SAFETY: the host's memory has room for the shape and is aligned, and only this call borrows it.
            // The cache copies the columns before the next call.
            unsafe { convolve_into(&inputs, spec, out.start, out.dtype, recurrent, parallel) }
        })
    })
}

/// Runs a call of a recurrence. An error rolls the step back.
///
/// # Errors
/// As [`convolve`].
pub fn scan(forward: &Arc<Forward>, scan: &Scan, run: Run) -> Result<()> {
    let Run { inputs, output_type, host, parallel } = run;
    let [Some(q), Some(k), Some(v), Some(g), beta, Some(positions)] = pick(inputs, &scan.inputs)
    else {
        fail!(Internal, "a call of a recurrence lacks inputs");
    };
    let sizes = scan.scan;
    let [k_heads, heads, k_dim, v_dim] =
        [sizes.k_heads, sizes.heads, sizes.k_dim, sizes.v_dim].map(|size| size as i32);
    let (decays, strengths) = (g, beta);
    forward.run(&scan.call, positions, |state| {
        let State { forwards, positions, recurrent, .. } = state;
        let n = positions.len() as i32;
        let keys = [1, k_heads, n, k_dim];
        let values = [1, heads, n, v_dim];
        let g = match sizes.channel_decay {
            true => tensor(g, "decays", &[1, heads, n, k_dim], [1, heads, n, k_dim])?,
            false => tensor(g, "decays", &[1, heads, n], [1, heads, n, 1])?,
        };
        let beta = beta
            .map(|beta| tensor(beta, "write strengths", &[1, heads, n], [1, heads, n, 1]))
            .transpose()?;
        let inputs = ScanInputs {
            q: &tensor(q, "queries", &keys, keys)?,
            k: &tensor(k, "keys", &keys, keys)?,
            v: &tensor(v, "values", &values, values)?,
            g: &g,
            beta: beta.as_ref(),
        };
        let mut read = vec![(q, "queries"), (k, "keys"), (v, "values"), (decays, "decays")];
        read.extend(strengths.map(|strengths| (strengths, "write strengths")));
        let call = (scan.call.call, scan.call.layer);
        forwards.call_recurrent(call, positions, &mut |spec| {
            let out = output(host, &values, output_type, &read)?;
            // SAFETY: the same as in `convolve`. The cache copies rows and anchors before the next call.
            unsafe { scan_into(&sizes, &inputs, spec, out.start, out.dtype, recurrent, parallel) }
        })
    })
}
