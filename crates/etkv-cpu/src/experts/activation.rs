//! The activation of experts, between their two products.

use std::f32::consts::{FRAC_1_SQRT_2, PI};

use etkv_core::{fail, Result};
use serde::Deserialize;

use crate::linear::weights::ROWS;
use crate::recurrent::exp;
use crate::simd::{Kernel, Simd};

/// A function of one number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Function {
    /// `x / (1 + exp(-alpha x))`.
    Silu,
    /// GELU with the error function.
    Gelu,
    /// GELU with the hyperbolic tangent.
    GeluTanh,
    /// The larger of `x` and 0.
    Relu,
    /// The square of [`Relu`](Self::Relu).
    Relu2,
}

/// The activation between the two products: a function of each element, or with a gate
///
/// ```text
/// gate = min(gate, limit)
/// up = min(max(up, -limit), limit)
/// function(gate) * (up + offset)
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Activation {
    /// The function of each element, or of the gate.
    pub function: Function,
    /// Whether there is a gate.
    pub gated: bool,
    /// The factor `alpha` of `Silu`.
    pub alpha: f32,
    /// The limit of gates and of the elements that they multiply, or infinity.
    pub limit: f32,
    /// The number that is added to the elements that gates multiply.
    pub offset: f32,
}

impl Activation {
    /// Checks the constants.
    ///
    /// # Errors
    /// [`Program`](etkv_core::Status::Program) for invalid constants.
    pub fn check(&self) -> Result<()> {
        let Self { function, alpha, limit, offset, gated } = *self;
        if !alpha.is_finite() || !offset.is_finite() || limit.is_nan() || limit <= 0.0 {
            fail!(
                Program,
                "expected a finite alpha and offset and a limit above 0, got {alpha}, {offset} and {limit}"
            );
        }
        if alpha != 1.0 && !(gated && function == Function::Silu) {
            fail!(
                Program,
                "alpha is {alpha}, and only gated experts with SiLU have one other than 1"
            );
        }
        if !gated && (limit != f32::INFINITY || offset != 0.0) {
            fail!(
                Program,
                "experts without a gate have a limit of {limit} and an offset of {offset}"
            );
        }
        Ok(())
    }
}

/// Applies an activation to the rows of a tile.
pub(super) struct Activate {
    pub activation: Activation,
    /// `n` times [`ROWS`] numbers, which are replaced by the results.
    pub gates: *mut f32,
    /// The elements that the gates multiply, in the same layout.
    pub ups: *const f32,
    pub n: usize,
}

impl Kernel for Activate {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        for at in 0..self.n {
            // SAFETY: there are `n` times [`ROWS`] numbers.
            unsafe {
                let gates = &mut *self.gates.add(at * ROWS).cast::<[f32; ROWS]>();
                if self.activation.gated {
                    let ups = &*self.ups.add(at * ROWS).cast::<[f32; ROWS]>();
                    gated::<S>(&self.activation, gates, ups);
                } else {
                    function::<S>(&self.activation, gates);
                }
            }
        }
    }
}

#[inline(always)]
unsafe fn gated<S: Simd>(activation: &Activation, gates: &mut [f32; ROWS], ups: &[f32; ROWS]) {
    let limit = activation.limit;
    // In contrast to `f32::min`, this keeps NaN.
    gates.iter_mut().for_each(|gate| *gate = if *gate > limit { limit } else { *gate });
    // SAFETY: the caller upholds the contract.
    unsafe { function::<S>(activation, gates) };
    for (gate, &up) in gates.iter_mut().zip(ups) {
        let up = if up > limit { limit } else { up };
        let up = if up < -limit { -limit } else { up };
        *gate *= up + activation.offset;
    }
}

/// Applies a function to numbers in place.
#[inline(always)]
unsafe fn function<S: Simd>(activation: &Activation, x: &mut [f32; ROWS]) {
    let mut e = *x;
    match activation.function {
        Function::Silu => {
            e.iter_mut().for_each(|e| *e *= -activation.alpha);
            // SAFETY: the caller upholds the contract.
            unsafe { exp_of::<S>(&mut e) };
            x.iter_mut().zip(&e).for_each(|(x, e)| *x /= 1.0 + e);
        }
        Function::GeluTanh => {
            // x (1 + tanh(y)) / 2 is x / (1 + exp(-2 y)).
            let factor = -2.0 * (2.0 / PI).sqrt();
            e.iter_mut().for_each(|e| *e = factor * (*e + 0.044_715 * (*e * *e * *e)));
            // SAFETY: the caller upholds the contract.
            unsafe { exp_of::<S>(&mut e) };
            x.iter_mut().zip(&e).for_each(|(x, e)| *x /= 1.0 + e);
        }
        Function::Gelu => {
            e.iter_mut().for_each(|e| *e = -0.5 * (*e * *e));
            // SAFETY: the caller upholds the contract.
            unsafe { exp_of::<S>(&mut e) };
            x.iter_mut().zip(&e).for_each(|(x, e)| *x *= 0.5 * erfc(-*x * FRAC_1_SQRT_2, *e));
        }
        Function::Relu => x.iter_mut().for_each(|x| *x = if *x < 0.0 { 0.0 } else { *x }),
        Function::Relu2 => x.iter_mut().for_each(|x| {
            *x = if *x < 0.0 { 0.0 } else { *x };
            *x *= *x;
        }),
    }
}

#[inline(always)]
unsafe fn exp_of<S: Simd>(x: &mut [f32; ROWS]) {
    for x in x.chunks_exact_mut(S::WIDTH) {
        // SAFETY: the chunk is one vector.
        unsafe { S::store(x.as_mut_ptr(), exp::<S>(S::load(x.as_ptr()))) };
    }
}

/// Returns the complementary error function of `x`, with `e` the exponential of `-x^2`. The error is below 2e-7
/// (Abramowitz and Stegun, 7.1.26).
#[inline(always)]
fn erfc(x: f32, e: f32) -> f32 {
    const TERMS: [f32; 5] = [1.061_405_4, -1.453_152, 1.421_413_7, -0.284_496_74, 0.254_829_6];
    let t = 1.0 / (1.0 + 0.327_591_1 * x.abs());
    let sum = TERMS.iter().fold(0.0, |sum, term| (sum + term) * t);
    // For positive numbers, the small result is returned without a subtraction, which would lose bits.
    if x < 0.0 {
        2.0 - sum * e
    } else {
        sum * e
    }
}
