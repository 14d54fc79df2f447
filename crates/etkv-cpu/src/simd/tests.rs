//! Each operation of every instruction set, at addresses that are not aligned, against numbers one by one.

use half::{bf16, f16};

use super::{with_simd, Instructions, Kernel, Simd, E2M1, E4M3};
use crate::attention::synthetic::Random;

/// Room for a vector of any instruction set.
const ROOM: usize = 16;

/// Unpacks codes that begin at any address.
struct Unpack<'a> {
    bytes: &'a [u8],
    what: What,
    out: &'a mut [f32; ROOM],
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum What {
    F16,
    Bf16,
    OneF16,
    Integers(usize),
    Int4,
    E2m1,
    E4m3,
}

const SCALE: f32 = 0.75;
const OFFSET: f32 = -3.5;

impl Kernel for Unpack<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        let from = self.bytes.as_ptr();
        // SAFETY: there are the bytes of a vector of any kind, and room for it.
        unsafe {
            let (scale, offset) = (S::splat(SCALE), S::splat(OFFSET));
            let numbers = match self.what {
                What::F16 => S::f16(from),
                What::Bf16 => S::bf16(from),
                What::OneF16 => S::splat_f16(from),
                What::Integers(2) => S::integers::<2>(from),
                What::Integers(3) => S::integers::<3>(from),
                What::Integers(4) => S::integers::<4>(from),
                What::Integers(5) => S::integers::<5>(from),
                What::Integers(6) => S::integers::<6>(from),
                What::Integers(_) => S::integers::<8>(from),
                What::Int4 => S::int4(from, S::int4_table(scale, offset)),
                What::E2m1 => S::e2m1(from, S::e2m1_table(scale)),
                What::E4m3 => S::e4m3(from),
            };
            S::store(self.out.as_mut_ptr(), numbers);
        }
    }
}

/// Returns element `i` of packed bytes.
fn element(bytes: &[u8], what: What, i: usize) -> f32 {
    let half = |i: usize| [bytes[2 * i], bytes[2 * i + 1]];
    let code = |bits: usize| {
        let bit = |at: usize| usize::from(bytes[at / 8] >> (at % 8) & 1);
        (0..bits).map(|b| bit(i * bits + b) << b).sum::<usize>()
    };
    match what {
        What::F16 => f16::from_le_bytes(half(i)).to_f32(),
        What::Bf16 => bf16::from_le_bytes(half(i)).to_f32(),
        What::OneF16 => f16::from_le_bytes(half(0)).to_f32(),
        What::Integers(bits) => code(bits) as f32,
        What::Int4 => code(4) as f32 * SCALE + OFFSET,
        What::E2m1 => E2M1[code(4)] * SCALE,
        What::E4m3 => E4M3[code(8)],
    }
}

#[test]
fn codes_are_unpacked_at_any_address() {
    let mut random = Random::new(1);
    // All numbers of 16 bits, and random codes.
    let halves: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    let codes: Vec<u8> = (0..4096).map(|_| random.bits() as u8).collect();
    let kinds = [What::F16, What::Bf16, What::OneF16, What::Int4, What::E2m1, What::E4m3];
    let integers = [2, 3, 4, 5, 6, 8].map(What::Integers);
    for instructions in Instructions::available() {
        let width = with_simd!(instructions, |S| S::WIDTH);
        for what in kinds.into_iter().chain(integers) {
            let is_half = matches!(what, What::F16 | What::Bf16 | What::OneF16);
            let (all, step) = if is_half { (&halves, 2 * width) } else { (&codes, 1) };
            for first in (0..all.len() - 2 * width + 1).step_by(step) {
                // A copy whose address has every distance to a multiple of 16.
                let mut place = [0u8; 2 * ROOM + 16];
                let at = (first / step) % 16;
                place[at..at + 2 * width].copy_from_slice(&all[first..first + 2 * width]);
                let (bytes, mut out) = (&place[at..at + 2 * width], [f32::NAN; ROOM]);
                let unpack = Unpack { bytes, what, out: &mut out };
                // SAFETY: the machine has the instructions.
                with_simd!(instructions, |S| unsafe { S::enter(unpack) });
                for (i, found) in out[..width].iter().enumerate() {
                    let expected = element(bytes, what, i);
                    // The sign of a zero of E2M1 may be lost, because sums begin with +0.
                    let zeros = what == What::E2m1 && *found == 0.0 && expected == 0.0;
                    let same = found.to_bits() == expected.to_bits() || zeros;
                    // A NaN may become a quiet one. Code 127 of E4M3 is never stored.
                    let nan = found.is_nan() && expected.is_nan();
                    let never = what == What::E4m3 && bytes[i] & 127 == 127;
                    assert!(
                        same || nan || never,
                        "{instructions:?} {what:?} {at} {i}: {found}, not {expected}"
                    );
                }
            }
        }
    }
}

/// Reduces and transposes vectors.
struct Reduce<'a> {
    rows: &'a [f32],
    sums: &'a mut [f32; 4],
    one: &'a mut [f32; 2],
    columns: &'a mut [f32],
}

/// The distance between rows. It is not a multiple of the vector width.
const STRIDE: usize = ROOM + 3;

impl Kernel for Reduce<'_> {
    #[inline(always)]
    unsafe fn run<S: Simd>(self) {
        // SAFETY: there are `ROOM` rows of `STRIDE` numbers, and room for as many columns.
        unsafe {
            let mut rows = [S::splat(0.0); 4];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = S::load(self.rows.as_ptr().add(i * STRIDE));
            }
            *self.one = [S::sum(rows[0]), S::largest(rows[0])];
            S::sums(rows, self.sums.as_mut_ptr());
            S::transpose(self.rows.as_ptr(), STRIDE, self.columns.as_mut_ptr(), STRIDE);
        }
    }
}

#[test]
fn vectors_are_summed_and_transposed() {
    let mut random = Random::new(2);
    for instructions in Instructions::available() {
        let width = with_simd!(instructions, |S| S::WIDTH);
        for shift in 0..4 {
            // Sums of these integers are exact in any order.
            let all: Vec<f32> = (0..shift + ROOM * STRIDE)
                .map(|_| random.integer(0, 2000) as f32 - 1000.0)
                .collect();
            let rows = &all[shift..];
            let (mut sums, mut one) = ([f32::NAN; 4], [f32::NAN; 2]);
            let mut columns = vec![f32::NAN; ROOM * STRIDE];
            let reduce = Reduce { rows, sums: &mut sums, one: &mut one, columns: &mut columns };
            // SAFETY: the machine has the instructions.
            with_simd!(instructions, |S| unsafe { S::enter(reduce) });
            let row = |i: usize| &rows[i * STRIDE..i * STRIDE + width];
            let expected = [0, 1, 2, 3].map(|i| row(i).iter().sum::<f32>());
            assert_eq!(sums, expected, "{instructions:?}");
            let largest = row(0).iter().copied().fold(f32::MIN, f32::max);
            assert_eq!(one, [expected[0], largest], "{instructions:?}");
            for (i, column) in columns.chunks(STRIDE).enumerate() {
                for (j, found) in column.iter().enumerate() {
                    match i < width && j < width {
                        true => assert_eq!(*found, row(j)[i], "{instructions:?} {i} {j}"),
                        false => assert!(found.is_nan(), "{instructions:?} {i} {j}"),
                    }
                }
            }
        }
    }
}
