//! The softcap of scores: `c * tanh(x / c)`.

use crate::simd::{Kernel, Simd};

/// Applies a softcap to scores in place.
pub(super) struct Softcap {
    pub scores: *mut f32,
    /// A multiple of the vector width. The numbers of missing slots at the end of a tile are arbitrary.
    pub count: usize,
    pub softcap: f32,
}

impl Kernel for Softcap {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: there are `count` numbers.
        unsafe {
            let inverse = S::splat(1.0 / self.softcap);
            for at in (0..self.count).step_by(S::WIDTH) {
                let x = S::mul(S::load(self.scores.add(at)), inverse);
                tanh::<S>(x, self.softcap, self.scores.add(at));
            }
        }
    }
}

/// The magnitude from which the hyperbolic tangent is 1 in float32.
const SATURATED: f32 = 9.0;

/// For x up to [`SATURATED`], the hyperbolic tangent is `x * P(x^2) / Q(x^2)`, with a relative error of at
/// most 2.1e-8. These polynomials of degree 4 minimize the maximum relative error. The highest power comes
/// first.
const P: [f32; 5] = [1.335_569_7e-8, 2.061_000_5e-5, 3.495_652_3e-3, 0.133_810_83, 0.999_999_98];
const Q: [f32; 5] = [7.777_033e-7, 3.285_734e-4, 2.587_723_5e-2, 0.467_143_98, 1.0];

/// Replaces each number by `factor` times its hyperbolic tangent, with an error of at most 6 units in the
/// last place. NaN stays NaN.
#[inline(always)]
unsafe fn tanh<S: Simd>(x: S::F, factor: f32, to: *mut f32) {
    // SAFETY: the caller upholds the contract.
    unsafe {
        let zero = S::splat(0.0);
        let x = S::max(S::splat(-SATURATED), x);
        let x = S::sub(zero, S::max(S::splat(-SATURATED), S::sub(zero, x)));
        let square = S::mul(x, x);
        let (mut p, mut q) = (S::splat(P[0]), S::splat(Q[0]));
        for i in 1..P.len() {
            p = S::fma(p, square, S::splat(P[i]));
            q = S::fma(q, square, S::splat(Q[i]));
        }
        S::store(to, S::mul(S::mul(x, S::splat(factor)), p));
        let mut divisors = [0f32; 16];
        S::store(divisors.as_mut_ptr(), q);
        for (i, divisor) in divisors[..S::WIDTH].iter().enumerate() {
            *to.add(i) /= divisor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{with_simd, Instructions};

    /// Applies a softcap to numbers with every instruction set.
    fn bounded(numbers: &[f32], softcap: f32) -> Vec<Vec<f32>> {
        let run = |instructions| {
            let mut scores = numbers.to_vec();
            let (start, count) = (scores.as_mut_ptr(), scores.len());
            with_simd!(instructions, |S| {
                // SAFETY: these are the numbers, and the machine has the instructions.
                unsafe { S::enter(Softcap { scores: start, count, softcap }) }
            });
            scores
        };
        Instructions::available().map(run).collect()
    }

    #[test]
    fn it_is_the_tangent() {
        let numbers: Vec<f32> = (-48_000..48_000).map(|i| i as f32 / 4_000.0).collect();
        let small = (0..4096).map(|i| (-60.0 + i as f32 / 70.0).exp2());
        let numbers: Vec<f32> = numbers.into_iter().chain(small).collect();
        for softcap in [0.5, 1.0, 50.0, 1e4] {
            let scores: Vec<f32> = numbers.iter().map(|x| x * softcap).collect();
            for found in bounded(&scores, softcap) {
                for (x, found) in scores.iter().zip(found) {
                    let exact = f64::from(softcap) * (f64::from(*x) / f64::from(softcap)).tanh();
                    let error = (f64::from(found) - exact).abs();
                    assert!(error <= 6e-7 * exact.abs(), "{x} {softcap}: {found}, not {exact}");
                    assert!(found.abs() <= softcap * 1.000_000_2, "{x} {softcap}: {found}");
                }
            }
        }
    }

    #[test]
    fn numbers_without_end_and_nan() {
        let numbers: Vec<f32> =
            [f32::INFINITY, f32::NEG_INFINITY, f32::MAX, f32::MIN, f32::NAN, 0.0, -0.0, 1e-40]
                .repeat(4);
        for found in bounded(&numbers, 30.0) {
            for found in found.chunks(8) {
                for (found, expected) in found.iter().zip([30.0, -30.0, 30.0, -30.0]) {
                    assert!((found - expected).abs() < 1e-5, "{found}, not {expected}");
                }
                assert!(found[4].is_nan());
                assert_eq!(found[5..7], [0.0, 0.0]);
                assert!(found[7].abs() < 1e-38);
            }
        }
    }
}
