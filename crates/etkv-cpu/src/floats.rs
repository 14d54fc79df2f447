//! Conversions of half-precision rows, with the same results as MLX on x86-64. Rows are byte slices, like
//! planes.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

/// The number of elements that are converted at a time.
const BLOCK: usize = 64;

/// Returns the bits of a float32 without its sign. Their order is that of magnitudes, and NaN is above
/// infinity.
pub(crate) fn magnitude(value: f32) -> u32 {
    value.to_bits() & 0x7fff_ffff
}

/// Returns the largest [`magnitude`] of the values.
pub(crate) fn peak(values: &[f32]) -> u32 {
    values.iter().fold(0, |most, &value| most.max(magnitude(value)))
}

pub(crate) fn store_f32(values: &[f32], out: &mut [u8]) {
    for (value, out) in values.iter().zip(out.chunks_exact_mut(4)) {
        out.copy_from_slice(&value.to_le_bytes());
    }
}

pub(crate) fn load_f32(bytes: &[u8], out: &mut [f32]) {
    for (bytes, out) in bytes.chunks_exact(4).zip(out) {
        *out = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    }
}

/// Rounds to nearest, ties to even. Every NaN becomes the same NaN, and keeps its sign.
pub(crate) fn store_f16(values: &[f32], out: &mut [u8]) {
    let mut halves = [f16::ZERO; BLOCK];
    for (values, out) in values.chunks(BLOCK).zip(out.chunks_mut(2 * BLOCK)) {
        let halves = &mut halves[..values.len()];
        halves.convert_from_f32_slice(values);
        for ((half, &value), out) in halves.iter().zip(values).zip(out.chunks_exact_mut(2)) {
            out.copy_from_slice(&without_payload(*half, value).to_le_bytes());
        }
    }
}

pub(crate) fn load_f16(bytes: &[u8], out: &mut [f32]) {
    let mut halves = [f16::ZERO; BLOCK];
    for (bytes, out) in bytes.chunks(2 * BLOCK).zip(out.chunks_mut(BLOCK)) {
        let halves = &mut halves[..out.len()];
        for (half, bytes) in halves.iter_mut().zip(bytes.chunks_exact(2)) {
            *half = f16::from_le_bytes([bytes[0], bytes[1]]);
        }
        halves.convert_to_f32_slice(out);
    }
}

/// Converts to float16, with the rounding of [`store_f16`].
pub(crate) fn to_f16(value: f32) -> f16 {
    without_payload(f16::from_f32(value), value)
}

fn without_payload(half: f16, value: f32) -> f16 {
    let sign = (value.to_bits() >> 16) as u16 & 0x8000;
    f16::from_bits(if value.is_nan() { sign | 0x7d00 } else { half.to_bits() })
}

/// Rounds to nearest, ties to even. Every NaN becomes the same one.
pub(crate) fn store_bf16(values: &[f32], out: &mut [u8]) {
    for (&value, out) in values.iter().zip(out.chunks_exact_mut(2)) {
        let bits = value.to_bits();
        // Only NaN can overflow here, and its result is not used.
        let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
        let stored = if value.is_nan() { bf16::NAN.to_bits() } else { rounded as u16 };
        out.copy_from_slice(&stored.to_le_bytes());
    }
}

pub(crate) fn load_bf16(bytes: &[u8], out: &mut [f32]) {
    for (bytes, out) in bytes.chunks_exact(2).zip(out) {
        *out = f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_read_back() {
        let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
        let mut values = vec![0.0; 1 << 16];
        let mut back = vec![0; all.len()];
        load_f16(&all, &mut values);
        store_f16(&values, &mut back);
        for (at, bits) in (0..=u16::MAX).enumerate() {
            let half = f16::from_bits(bits);
            let expected = if half.is_nan() { bits & 0x8000 | 0x7d00 } else { bits };
            assert_eq!(back[2 * at..2 * at + 2], expected.to_le_bytes(), "{half}");
        }
        load_bf16(&all, &mut values);
        store_bf16(&values, &mut back);
        for (at, bits) in (0..=u16::MAX).enumerate() {
            let expected = if bf16::from_bits(bits).is_nan() { 0x7fc0 } else { bits };
            assert_eq!(back[2 * at..2 * at + 2], expected.to_le_bytes(), "{bits:x}");
        }
    }

    #[test]
    fn ties_are_rounded_to_even() {
        let values = [2049.0, 2051.0, 65519.0, 65520.0, -65520.0, 2f32.powi(-25), 3e-8];
        let expected = [0x6800, 0x6802, 0x7bff, 0x7c00, 0xfc00, 0, 1].map(u16::to_le_bytes);
        let mut out = [0; 14];
        store_f16(&values, &mut out);
        assert_eq!(out, *expected.as_flattened());
        let values = [0x3f80_8000, 0x3f81_8000, 0x7f7f_7fff, 0x7f7f_8000, 0xffff_ffff];
        let expected = [0x3f80, 0x3f82, 0x7f7f, 0x7f80, 0x7fc0].map(u16::to_le_bytes);
        let mut out = [0; 10];
        store_bf16(&values.map(f32::from_bits), &mut out);
        assert_eq!(out, *expected.as_flattened());
    }
}
