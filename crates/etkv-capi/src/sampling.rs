//! `etkv_sampling`: sampling parameters, and sampling on the host.

use etkv_core::{fail, Result};
use etkv_delegate::Sampling;

use super::boundary::{c_functions, list, put, read_struct};

/// A number that is added to a logit.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct etkv_logit_bias {
    pub token: i64,
    pub bias: f32,
    pub reserved: i32,
}

/// Sampling parameters, as C passes them.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct etkv_sampling {
    pub struct_size: usize,
    pub temperature: f32,
    pub top_p: f32,
    pub min_p: f32,
    pub repetition_penalty: f32,
    pub top_k: i32,
    pub repetition_context: i32,
    pub seed: u64,
    pub logit_bias: *const etkv_logit_bias,
    pub n_logit_bias: usize,
}

/// Reads sampling parameters. NULL means greedy.
///
/// # Safety
/// `sampling` is NULL or as the header says.
pub(crate) unsafe fn read_sampling(sampling: *const etkv_sampling) -> Result<Sampling> {
    if sampling.is_null() {
        return Ok(Sampling::default());
    }
    // SAFETY: the caller keeps the contract above.
    let (raw, biases) = unsafe {
        let raw = read_struct(sampling, "sampling")?;
        (raw, list(raw.logit_bias, raw.n_logit_bias, "sampling.logit_bias")?)
    };
    let defaults = Sampling::default();
    let or = |given: f32, default| if given == 0.0 { default } else { given };
    let count = |given: i32, name: &str| -> Result<usize> {
        match usize::try_from(given) {
            Ok(count) => Ok(count),
            Err(_) => fail!(InvalidArgument, "{name} is {given}, the minimum is 0"),
        }
    };
    let sampling = Sampling {
        logit_bias: biases.iter().map(|one| (one.token, one.bias)).collect(),
        repetition_penalty: or(raw.repetition_penalty, defaults.repetition_penalty),
        repetition_context: match count(raw.repetition_context, "repetition_context")? {
            0 => defaults.repetition_context,
            given => given,
        },
        temperature: raw.temperature,
        top_k: count(raw.top_k, "top_k")?,
        top_p: or(raw.top_p, defaults.top_p),
        min_p: raw.min_p,
        seed: raw.seed,
    };
    sampling.check()?;
    Ok(sampling)
}

c_functions!(
    /// Samples a token from the logits of a step that the host ran.
    unsafe fn etkv_sampling_choose(
        sampling: *const etkv_sampling,
        logits: *const f32,
        n_logits: usize,
        text: *const i64,
        n_text: usize,
        answer: usize,
        n: u64,
        token: *mut i64,
    ) -> Result<()> {
        put(token, "token", || {
            let sampling = read_sampling(sampling)?;
            let text = list(text, n_text, "text")?;
            let logits = list(logits, n_logits, "logits")?;
            let draw = sampling.draw(answer, n);
            Ok(sampling.choose(logits, sampling.recent(text), draw)? as i64)
        })
    }
);
