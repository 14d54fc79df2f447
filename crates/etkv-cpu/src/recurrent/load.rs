//! The inputs of a scan in float32, and the decays since the anchors.

use etkv_core::bookkeeping::{RowSource, BLOCK};

use super::exp::LEAST;
use super::task::Job;
use crate::tensor::Tensor;

/// Converts elements along an axis to float32, from an index on.
///
/// # Safety
/// The elements are inside the shape.
pub(super) unsafe fn load_run(tensor: &Tensor, index: [usize; 4], axis: usize, out: &mut [f32]) {
    let (dtype, strides) = (tensor.dtype(), tensor.strides());
    let size = dtype.size() as isize;
    let along = index.iter().zip(strides);
    let offset: isize = along.map(|(&at, stride)| at as isize * stride).sum();
    // SAFETY: the elements are initialized and not written meanwhile, by the contracts of the tensor's
    // constructors.
    unsafe {
        let start = tensor.start().offset(offset * size);
        if strides[axis] == 1 || out.len() <= 1 {
            let bytes = std::slice::from_raw_parts(start, out.len() * dtype.size());
            return dtype.load(bytes, out);
        }
        for (i, out) in (0..).zip(out) {
            let element = start.offset(i * strides[axis] * size);
            let bytes = std::slice::from_raw_parts(element, dtype.size());
            dtype.load(bytes, std::slice::from_mut(out));
        }
    }
}

/// Converts a row of a tensor's first batch to float32.
///
/// # Safety
/// The row is inside the shape, and `out` is not longer.
unsafe fn load_row(tensor: &Tensor, head: usize, at: usize, out: &mut [f32]) {
    // SAFETY: the caller's.
    unsafe { load_run(tensor, [0, head, at, 0], 3, out) }
}

/// Loads the inputs of a head, and with the first of its group those of their key.
///
/// # Safety
/// The inputs have the job's sizes, and no other thread loads the same head.
pub(super) unsafe fn load(job: &Job, head: usize) {
    let (sizes, shared, inputs) = (&job.sizes, &job.shared, job.inputs);
    let group = sizes.heads / sizes.k_heads;
    // SAFETY: the caller's.
    unsafe {
        let row = |start: *mut f32, len: usize| std::slice::from_raw_parts_mut(start, len);
        for token in 0..sizes.n_tokens {
            if head % group == 0 {
                let at = (head / group * sizes.n_tokens + token) * 2;
                let rows = row(shared.keys.add(at * sizes.k_padded), 2 * sizes.k_padded);
                let (key, query) = rows.split_at_mut(sizes.k_padded);
                for (tensor, row) in [(inputs.k, key), (inputs.q, &mut *query)] {
                    let (row, rest) = row.split_at_mut(sizes.k_dim);
                    load_row(tensor, head / group, token, row);
                    rest.fill(0.0);
                }
                query.iter_mut().for_each(|x| *x *= job.scale);
            }
            let at = head * sizes.n_tokens + token;
            let value = row(shared.updates.add(at * sizes.update_stride()), sizes.v_dim);
            load_row(inputs.v, head, token, value);
            if let Some(beta) = inputs.beta {
                load_row(beta, head, token, row(shared.betas.add(at), 1));
            }
        }
        load_decays(job, inputs.g, head);
    }
}

/// Loads the log decays of a head, and sums them from the anchor below each token up to the token.
unsafe fn load_decays(job: &Job, g: &Tensor, head: usize) {
    let (sizes, shared) = (&job.sizes, &job.shared);
    let (dim, padded) = (sizes.decay_dim(), sizes.decay_padded());
    for chain in &job.plan.chains {
        for (i, token) in chain.tokens.clone().enumerate() {
            let at = head * sizes.n_tokens + token;
            // SAFETY: the caller's; the plan was checked.
            unsafe {
                let decay = shared.decays.add(at * padded);
                let out = std::slice::from_raw_parts_mut(decay, padded);
                load_row(g, head, token, &mut out[..dim]);
                out[dim..].fill(0.0);
                // This keeps NaN.
                out.iter_mut().filter(|x| **x < LEAST).for_each(|x| *x = LEAST);
                let position = chain.position as usize + i;
                if position.is_multiple_of(BLOCK as usize) {
                    continue;
                }
                let before = match chain.rows.last() {
                    _ if i > 0 => decay.sub(padded).cast_const(),
                    Some(&RowSource::Token(before)) => {
                        shared.decays.add((head * sizes.n_tokens + before) * padded).cast_const()
                    }
                    Some(&RowSource::Slot(slot)) => job.updates.row(slot, head).add(sizes.v_dim),
                    None => continue,
                };
                let before = std::slice::from_raw_parts(before, dim);
                out.iter_mut().zip(before).for_each(|(x, before)| *x += before);
            }
        }
    }
}
