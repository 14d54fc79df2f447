//! Codes of four and eight bits.

use crate::floats::magnitude;

/// Adding this to a float32 of at most 2^22 rounds it to an integer, ties to even. The lowest bits of the sum
/// are the integer.
const ROUNDING: f32 = 12_582_912.0;

/// Returns the integer nearest to `value`, ties to even. The magnitude of `value` must be at most 2^22.
pub(super) fn rounded(value: f32) -> f32 {
    (value + ROUNDING) - ROUNDING
}

/// Returns the integer from 0 to 255 that is nearest to `value`, ties to even.
pub(super) fn to_byte(value: f32) -> u8 {
    (value + ROUNDING).to_bits() as u8
}

/// Packs pairs of 4-bit codes to bytes, with the first in the lower bits.
pub(super) fn pack_nibbles(codes: &[u8], out: &mut [u8]) {
    for (pair, out) in codes.chunks_exact(2).zip(out) {
        *out = pair[0] | pair[1] << 4;
    }
}

/// Replaces each element by the value of its code.
pub(super) fn unpack_nibbles(bytes: &[u8], row: &mut [f32], element: impl Fn(u8) -> f32) {
    for (byte, pair) in bytes.iter().zip(row.chunks_exact_mut(2)) {
        pair[0] = element(byte & 15);
        pair[1] = element(byte >> 4);
    }
}

/// Returns the E2M1 code nearest to `value`, ties to even. Magnitudes above 6 become 6, and NaN becomes 0.
pub(super) fn to_e2m1(value: f32) -> u8 {
    let size = value.abs();
    let size = if size <= 8.0 {
        size
    } else if size > 8.0 {
        8.0
    } else {
        0.0
    };
    // The steps between numbers are 0.5 up to 2, 1 up to 4, and 2 up to 6. The smallest of the three codes is
    // the right one.
    let by_half = rounded(size * 2.0);
    let by_one = rounded(size) + 2.0;
    let by_two = rounded(size * 0.5) + 4.0;
    let code = to_byte(by_half.min(by_one).min(by_two.min(7.0)));
    code | if value < 0.0 { 8 } else { 0 }
}

/// Returns the E4M3 code nearest to `value`, ties to even. Magnitudes above 448 and NaN become 448.
pub(super) fn to_e4m3(value: f32) -> u8 {
    let size = magnitude(value);
    let sign = (value.to_bits() >> 24) as u8 & 0x80;
    // Below the smallest normal number, 2^-6, the step is 2^-9, which is also the step of float32 from 2^14
    // on.
    let base = 16384f32;
    let low = (f32::from_bits(size) + base).to_bits().wrapping_sub(base.to_bits());
    // The mantissa is rounded to three bits, and the bias of the exponent becomes 7.
    let rounding = 0x0007_ffff + (size >> 20 & 1);
    let high = size.wrapping_sub(120 << 23).wrapping_add(rounding) >> 20;
    let code = if size < 121 << 23 { low } else { high };
    sign | if size >= 448f32.to_bits() { 0x7e } else { code as u8 }
}

/// Computes the E8M0 scale of a block. It is the smallest power of two by which the block's largest
/// magnitude, whose bits are `peak`, must be divided to be at most 1.75 * 2^`top`.
///
/// Returns the code, and the inverse of the scale.
pub(super) fn e8m0(peak: u32, top: u32) -> (u8, f32) {
    // If the mantissa exceeds 1.75, the carry increases the exponent by one.
    let exponent = peak.wrapping_add(0x001f_ffff) >> 23;
    // The limit ensures that the largest element stays finite.
    let code = (exponent.max(top) - top).min(254 - top);
    (code as u8, f32::from_bits((254 - code) << 23))
}

/// Returns the value of an E8M0 code. The value of code 0 is 0.
pub(super) fn from_e8m0(code: u8) -> f32 {
    f32::from_bits(u32::from(code) << 23)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{E2M1, E4M3};

    /// Returns the code of the nearest value, ties to even.
    fn nearest(value: f32, values: &[f32]) -> u8 {
        let apart = |code: &u8| (f64::from(values[*code as usize]) - f64::from(value)).abs();
        let order = |a: &u8, b: &u8| apart(a).total_cmp(&apart(b)).then((a & 1).cmp(&(b & 1)));
        (0..values.len() as u8).min_by(order).unwrap()
    }

    #[test]
    fn codes_are_the_nearest() {
        let steps = (0..4000u32).map(|at| at as f32 / 512.0);
        let spread = (0..4000u32).map(|at| f32::from_bits(0x3a00_0000 + at * 26_003));
        let sizes: Vec<f32> = steps.chain(spread).chain([1e-30, 1e9]).collect();
        for size in sizes {
            assert_eq!(to_e2m1(size), nearest(size, &E2M1[..8]), "{size}");
            assert_eq!(to_e4m3(size), nearest(size, &E4M3[..127]), "{size}");
            if size > 0.0 {
                assert_eq!(to_e2m1(-size), to_e2m1(size) | 8);
                assert_eq!(to_e4m3(-size), to_e4m3(size) | 0x80);
            }
        }
    }

    #[test]
    fn codes_of_what_is_not_finite() {
        assert_eq!([f32::INFINITY, f32::NEG_INFINITY, f32::NAN].map(to_e2m1), [7, 15, 0]);
        assert_eq!([f32::INFINITY, -f32::NAN, f32::NAN].map(to_e4m3), [0x7e, 0xfe, 0x7e]);
        assert_eq!([0.0, -0.0].map(to_e2m1), [0, 0]);
        assert_eq!([0.0, -0.0].map(to_e4m3), [0, 0x80]);
    }

    #[test]
    fn codes_are_read_back() {
        for code in 0..16 {
            // Like MLX, the codec stores -0 as 0.
            let expected = if code == 8 { 0 } else { code };
            assert_eq!(to_e2m1(E2M1[code as usize]), expected);
        }
        for code in (0..=255u8).filter(|code| code & 127 != 127) {
            assert_eq!(to_e4m3(E4M3[code as usize]), code);
        }
        assert_eq!((E4M3[0x7e], E4M3[1], E4M3[8]), (448.0, 2f32.powi(-9), 2f32.powi(-6)));
    }

    #[test]
    fn scales_bring_the_peak_below_the_top() {
        for (top, most) in [(2, 7.0), (8, 448.0)] {
            for peak in [1e-38f32, 0.3, 1.0, 1.75, 1.7500001, 6.9, 7.1, 448.0, 1e30, 2e38] {
                let (code, inverse) = e8m0(peak.to_bits(), top);
                assert!(peak * inverse <= most, "{peak}");
                assert!(code == 0 || peak * inverse * 2.0 > most, "{peak}");
                if code > 0 {
                    assert_eq!(from_e8m0(code) * inverse, 1.0);
                }
            }
        }
        assert_eq!(e8m0(f32::NAN.to_bits(), 2).0, e8m0(f32::INFINITY.to_bits(), 2).0);
        assert_eq!(e8m0(0x7fff_ffff, 8).0, 246);
    }
}
