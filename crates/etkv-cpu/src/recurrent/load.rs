//! Converts the inputs of a scan to float32, and sums the log decays since the anchors.

use etkv_core::bookkeeping::{RowSource, BLOCK};

use super::exp::MIN_LOG_DECAY;
use super::job::Job;
use crate::tensor::Tensor;

/// Converts elements along an axis to float32, from an index on.
///
/// # Safety
/// The elements must be inside the shape.
pub(super) unsafe fn load_run(tensor: &Tensor, index: [usize; 4], axis: usize, out: &mut [f32]) {
    let (dtype, strides) = (tensor.dtype(), tensor.strides());
    let size = dtype.size() as isize;
    let along = index.iter().zip(strides);
    let offset: isize = along.map(|(&at, stride)| at as isize * stride).sum();
    // SAFETY: the constructors of the tensor ensure that the elements are initialized and not written
    // meanwhile.
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

/// Loads the inputs that the tasks of a head share: decays and write strengths, and also the keys if it is
/// the first head that uses them.
///
/// # Safety
/// The inputs must have the job's sizes, and no other thread may load the same head.
pub(super) unsafe fn load(job: &Job, head: usize) {
    let (sizes, shared, inputs) = (&job.sizes, &job.shared, job.inputs);
    let group = sizes.heads / sizes.k_heads;
    // SAFETY: the caller upholds the contract.
    unsafe {
        if head.is_multiple_of(group) {
            for token in 0..sizes.n_tokens {
                let key = shared.keys.add((head / group * sizes.n_tokens + token) * sizes.k_padded);
                let key = std::slice::from_raw_parts_mut(key, sizes.k_padded);
                let (key, rest) = key.split_at_mut(sizes.k_dim);
                load_run(inputs.k, [0, head / group, token, 0], 3, key);
                rest.fill(0.0);
            }
        }
        if let Some(beta) = inputs.beta {
            let start = shared.betas.add(head * sizes.n_tokens);
            let out = std::slice::from_raw_parts_mut(start, sizes.n_tokens);
            load_run(beta, [0, head, 0, 0], 2, out);
        }
        load_decays(job, inputs.g, head);
    }
}

/// Loads the log decays of a head. The result for a token is the sum from the last anchor up to the token.
unsafe fn load_decays(job: &Job, g: &Tensor, head: usize) {
    let (sizes, shared) = (&job.sizes, &job.shared);
    let (dim, padded) = (sizes.decay_dim(), sizes.decay_padded());
    for chain in &job.plan.chains {
        for (i, token) in chain.tokens.clone().enumerate() {
            let at = head * sizes.n_tokens + token;
            // SAFETY: the caller upholds the contract, and the plan was checked.
            unsafe {
                let decay = shared.decays.add(at * padded);
                let out = std::slice::from_raw_parts_mut(decay, padded);
                load_run(g, [0, head, token, 0], 3, &mut out[..dim]);
                out[dim..].fill(0.0);
                // The comparison keeps NaN.
                out.iter_mut().filter(|x| **x < MIN_LOG_DECAY).for_each(|x| *x = MIN_LOG_DECAY);
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
