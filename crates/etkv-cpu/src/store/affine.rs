//! MLX's affine quantization: integers with a float16 scale and offset for each group.

use half::f16;

use super::bits::to_byte;
use super::row_codec::{RowCodec, Widths};
use crate::floats::to_f16;

/// The codec of affine groups. Codes, scales and offsets are those that MLX computes from float32 rows.
/// Scales and offsets are then rounded to float16.
///
/// MLX chooses the scale so that zero and the end of the group's range with the larger magnitude are exact.
/// Elements outside the range of float16 are clipped to it, so no group contains an infinity.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Affine {
    bits: u8,
    group: u8,
}

/// The maximum number of elements of a group.
const MAX: usize = 128;

/// The largest float16.
const F16_MAX: f32 = 65504.0;

/// The minimum step between codes.
const MIN_SCALE: f32 = 1e-7;

impl Affine {
    /// Returns the codec. A format with these bits and this group size must exist.
    pub fn new(bits: u8, group: u8) -> Self {
        Self { bits, group }
    }

    /// Returns the codes of a group, its scale and its offset.
    fn fit(&self, group: &[f32], codes: &mut [u8]) -> (f32, f32) {
        let top = ((1u32 << self.bits) - 1) as f32;
        let (least, most) = range(group);
        let reaches_down = least.abs() > most.abs();
        let step = (most - least) / top;
        let step = if step < MIN_SCALE { MIN_SCALE } else { step };
        let (edge, step) = if reaches_down { (least, step) } else { (most, -step) };
        // The number of steps from zero to the edge of the range.
        let to_edge = (edge / step).round_ties_even();
        let (scale, offset) = if to_edge == 0.0 { (step, 0.0) } else { (edge / to_edge, edge) };
        for (code, &value) in codes.iter_mut().zip(group) {
            // NaN gets code 0.
            *code = to_byte(((clipped(value) - offset) / scale).max(0.0).min(top));
        }
        (scale, offset)
    }
}

fn clipped(value: f32) -> f32 {
    value.clamp(-F16_MAX, F16_MAX)
}

/// Returns the minimum and maximum of the values, ignoring NaN.
fn range(group: &[f32]) -> (f32, f32) {
    const WIDTH: usize = 8;
    let (mut least, mut most) = ([f32::INFINITY; WIDTH], [f32::NEG_INFINITY; WIDTH]);
    // The size of groups is a multiple of 32.
    for values in group.chunks_exact(WIDTH) {
        for ((least, most), &value) in least.iter_mut().zip(&mut most).zip(values) {
            let value = clipped(value);
            *least = if value < *least { value } else { *least };
            *most = if value > *most { value } else { *most };
        }
    }
    let smaller = |a: f32, &b: &f32| if b < a { b } else { a };
    let larger = |a: f32, &b: &f32| if b > a { b } else { a };
    (least.iter().fold(f32::INFINITY, smaller), most.iter().fold(f32::NEG_INFINITY, larger))
}

/// Packs codes, with the first in the lowest bits. Eight codes of `bits` bits fill `bits` bytes.
fn pack(bits: usize, codes: &[u8], out: &mut [u8]) {
    for (codes, out) in codes.chunks_exact(8).zip(out.chunks_exact_mut(bits)) {
        let along = codes.iter().zip((0..).step_by(bits));
        let word = along.fold(0u64, |word, (&code, shift)| word | u64::from(code) << shift);
        out.copy_from_slice(&word.to_le_bytes()[..bits]);
    }
}

/// Replaces each element by the value of its code, eight at a time.
fn unpack(bits: usize, bytes: &[u8], row: &mut [f32], element: impl Fn(u8) -> f32) {
    let mask = (1u64 << bits) - 1;
    for (bytes, out) in bytes.chunks_exact(bits).zip(row.chunks_exact_mut(8)) {
        let mut word = [0; 8];
        word[..bits].copy_from_slice(bytes);
        let mut word = u64::from_le_bytes(word);
        for out in out {
            *out = element((word & mask) as u8);
            word >>= bits;
        }
    }
}

impl RowCodec for Affine {
    fn widths(&self, head_dim: usize) -> Widths {
        let groups = head_dim / usize::from(self.group);
        [head_dim / 8 * usize::from(self.bits), 2 * groups, 2 * groups]
    }

    fn encode(&self, row: &[f32], [codes, scales, offsets]: [&mut [u8]; 3]) {
        let (bits, group) = (usize::from(self.bits), usize::from(self.group));
        let mut fitted = [0; MAX];
        let fitted = &mut fitted[..group];
        let pairs = scales.chunks_exact_mut(2).zip(offsets.chunks_exact_mut(2));
        let groups = row.chunks_exact(group).zip(codes.chunks_exact_mut(group / 8 * bits));
        for ((values, codes), (scale_out, offset_out)) in groups.zip(pairs) {
            let (scale, offset) = self.fit(values, fitted);
            // With a constant number of bits, the compiler unrolls the loops.
            match bits {
                2 => pack(2, fitted, codes),
                3 => pack(3, fitted, codes),
                4 => pack(4, fitted, codes),
                5 => pack(5, fitted, codes),
                6 => pack(6, fitted, codes),
                _ => codes.copy_from_slice(fitted),
            }
            scale_out.copy_from_slice(&to_f16(scale).to_le_bytes());
            offset_out.copy_from_slice(&to_f16(offset).to_le_bytes());
        }
    }

    fn decode(&self, [codes, scales, offsets]: [&[u8]; 3], row: &mut [f32]) {
        let (bits, group) = (usize::from(self.bits), usize::from(self.group));
        let value = |half: &[u8]| f16::from_le_bytes([half[0], half[1]]).to_f32();
        let pairs = scales.chunks_exact(2).zip(offsets.chunks_exact(2));
        let groups = row.chunks_exact_mut(group).zip(codes.chunks_exact(group / 8 * bits));
        for ((row, codes), (scale, offset)) in groups.zip(pairs) {
            let (scale, offset) = (value(scale), value(offset));
            let element = |code: u8| f32::from(code) * scale + offset;
            match bits {
                2 => unpack(2, codes, row, element),
                3 => unpack(3, codes, row, element),
                4 => unpack(4, codes, row, element),
                5 => unpack(5, codes, row, element),
                6 => unpack(6, codes, row, element),
                _ => row.iter_mut().zip(codes).for_each(|(out, &code)| *out = element(code)),
            }
        }
    }
}
