//! Rounds the inputs of products to 8-bit integers.

use crate::floats::peak;
use crate::simd::{Kernel, Simd};

/// Groups with at most this magnitude are treated as zeros, because the inverse of a smaller scale would not
/// be finite.
const MIN_PEAK: f32 = 7.888_609e-31;

/// Rounds one group of numbers to a scale times integers from -127 to 127.
pub(crate) struct Quantize<'a> {
    pub from: &'a [f32],
    pub codes: &'a mut [i8],
    /// The scale. It is NaN if a number is not finite, so that the outputs of the token are NaN, too.
    pub scale: &'a mut f32,
    /// The sum of the integers.
    pub sum: &'a mut i32,
}

impl Kernel for Quantize<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let peak = f32::from_bits(peak(self.from));
        let (inverse, scale) = match peak {
            _ if !peak.is_finite() => (0.0, f32::NAN),
            _ if peak < MIN_PEAK => (0.0, 0.0),
            _ => (127.0 / peak, peak / 127.0),
        };
        *self.scale = scale;
        if inverse == 0.0 {
            self.codes.fill(0);
            *self.sum = 0;
            return;
        }
        let mut sum = 0;
        for (code, x) in self.codes.iter_mut().zip(self.from) {
            // SAFETY: the product is a number from -127.1 to 127.1.
            let integer = unsafe { (x * inverse).round_ties_even().to_int_unchecked::<i32>() };
            *code = integer as i8;
            sum += integer;
        }
        *self.sum = sum;
    }
}
