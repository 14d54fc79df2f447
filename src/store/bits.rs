//! Codes of four and eight bits, encoded and decoded by elementwise operations. Equal rows give equal bits on every
//! device.

use mlx_rs::ops::{maximum, minimum, sum_axis};
use mlx_rs::{Array, Dtype};

use crate::error::Result;
use crate::mlx::bits::{and, or, shl, shr};
use crate::mlx::cast;

/// The number of 4-bit codes in a word of 32 bits.
const PER_WORD: i32 = 8;

fn shifts() -> Array {
    Array::from_slice(&[0u32, 4, 8, 12, 16, 20, 24, 28], &[PER_WORD])
}

/// Packs 4-bit codes, one in each element, into words of eight codes. The first code is in the lowest bits.
pub(super) fn pack_nibbles(codes: &Array) -> Result<Array> {
    let mut shape = codes.shape().to_vec();
    let width = shape.pop().unwrap_or(0);
    shape.extend([width / PER_WORD, PER_WORD]);
    let shifted = shl(&codes.reshape(&shape)?, &shifts())?;
    Ok(sum_axis(shifted, -1, false)?)
}

/// Unpacks words of eight codes to 32-bit elements of one code each.
pub(super) fn unpack_nibbles(words: &Array) -> Result<Array> {
    let mut shape = words.shape().to_vec();
    let codes = and(&shr(&words.expand_dims(-1)?, &shifts())?, &Array::from_slice(&[15u32], &[1]))?;
    if let Some(width) = shape.last_mut() {
        *width *= PER_WORD;
    }
    Ok(codes.reshape(&shape)?)
}

/// Returns the E2M1 codes nearest to `values` in float32, ties to even. Magnitudes above 6 are clamped to 6.
pub(super) fn to_e2m1(values: &Array) -> Result<Array> {
    let size = values.abs()?;
    // Steps are 0.5 for magnitudes up to 2, 1 up to 4, and 2 up to 6. The smallest of the three rounded magnitudes is
    // the right one.
    let by_half = size.multiply(Array::from_f32(2.0))?.round(None)?;
    let by_one = size.round(None)?.add(Array::from_f32(2.0))?;
    let by_two = size.multiply(Array::from_f32(0.5))?.round(None)?.add(Array::from_f32(4.0))?;
    let code = minimum(minimum(by_half, by_one)?, minimum(by_two, Array::from_f32(7.0))?)?;
    // A NaN converts to an undefined integer. It is masked, so that the other codes in the word do not change.
    let code = and(&cast(&code, Dtype::Uint32)?, &Array::from_slice(&[7u32], &[1]))?;
    let negative = cast(&values.lt(Array::from_f32(0.0))?, Dtype::Uint32)?;
    or(&code, &shl(&negative, &Array::from_slice(&[3u32], &[1]))?)
}

/// Returns E2M1 codes, one in each element, as float32.
pub(super) fn from_e2m1(codes: &Array) -> Result<Array> {
    // The bits of a float16 whose value is 2^14 times smaller, including subnormals.
    bits_to_f32(codes, [7, 9], [8, 12], 16384.0)
}

/// Returns E4M3 codes, one in each element, as float32.
pub(super) fn from_e4m3(codes: &Array) -> Result<Array> {
    // As above, with 2^8.
    bits_to_f32(codes, [0x7f, 7], [0x80, 8], 256.0)
}

/// Moves exponent and mantissa, and the sign, to their bits of a float16. `size` and `sign` are each a mask and a
/// shift.
fn bits_to_f32(codes: &Array, size: [u16; 2], sign: [u16; 2], scale: f32) -> Result<Array> {
    let codes = cast(codes, Dtype::Uint16)?;
    let moved = |[mask, by]: [u16; 2]| {
        let kept = and(&codes, &Array::from_slice(&[mask], &[1]))?;
        shl(&kept, &Array::from_slice(&[by], &[1]))
    };
    let halves = or(&moved(size)?, &moved(sign)?)?.view_dtype(Dtype::Float16)?;
    Ok(cast(&halves, Dtype::Float32)?.multiply(Array::from_f32(scale))?)
}

/// Computes the E8M0 scales of blocks whose largest magnitudes are `peaks`, in float32. Elements have magnitudes up
/// to 1.75 times 2^`top`, such as 7 and 448. The scale is the smallest power of two with which the peak is within
/// that limit. The largest E2M1 value is 6, but a scaled peak of at most 7 is still nearer to 6 than to 8, the next
/// larger value that twice the scale could represent. On normally distributed rows, the error is 3 % less than with
/// the rule of the microscaling standard, and 8 % less than with MLX's rule.
///
/// Returns the codes, and the inverses of the scales in float32.
pub(super) fn e8m0(peaks: &Array, top: u32) -> Result<[Array; 2]> {
    let word = |value: u32| Array::from_slice(&[value], &[1]);
    // The exponent is greater by one if the mantissa is above 1.75.
    let bits = peaks.view_dtype(Dtype::Uint32)?.add(word(0x001f_ffff))?;
    let exponent = shr(&bits, &word(23))?;
    // The upper bound of the scale keeps the largest element finite.
    let code = minimum(maximum(exponent, word(top))?.subtract(word(top))?, word(254 - top))?;
    let inverse = shl(&word(254).subtract(&code)?, &word(23))?.view_dtype(Dtype::Float32)?;
    Ok([cast(&code, Dtype::Uint8)?, inverse])
}

/// Returns E8M0 codes as float32.
pub(super) fn from_e8m0(codes: &Array) -> Result<Array> {
    let bits = shl(&cast(codes, Dtype::Uint32)?, &Array::from_slice(&[23u32], &[1]))?;
    Ok(bits.view_dtype(Dtype::Float32)?)
}
