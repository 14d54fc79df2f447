//! Reference implementations of the packed formats of keys and values, one element at a time.

use std::sync::LazyLock;

use etkv_core::{KvFormat, Packing, PlaneFormat};
use etkv_cuda::{Device, Memory, PackedRows, Pool, PoolRows, Result};
use half::f16;

const F16_MAX: f32 = 65504.0;

/// The planes of some rows.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Planes {
    pub codes: Vec<u8>,
    pub scales: Vec<u8>,
    pub offsets: Vec<u8>,
}

/// Returns the first `count` numbers of E2M1 or E4M3 without a sign. The index is the code.
fn minifloats(mantissa: i32, bias: i32, count: i32) -> Vec<f64> {
    let of = |code: i32| {
        let (exponent, rest) = (code >> mantissa, code & ((1 << mantissa) - 1));
        let part = f64::from(rest) / f64::from(1 << mantissa);
        match exponent {
            0 => part * 2f64.powi(1 - bias),
            _ => (1.0 + part) * 2f64.powi(exponent - bias),
        }
    };
    (0..count).map(of).collect()
}

static E2M1: LazyLock<Vec<f64>> = LazyLock::new(|| minifloats(1, 1, 8));
/// All E4M3 numbers except NaN.
static E4M3: LazyLock<Vec<f64>> = LazyLock::new(|| minifloats(3, 7, 127));

/// Returns the code of the nearest number, ties to even.
fn nearest(numbers: &[f64], size: f64) -> u8 {
    let above = numbers.partition_point(|&number| number < size).min(numbers.len() - 1);
    if above == 0 {
        return 0;
    }
    let (low, high) = (size - numbers[above - 1], numbers[above] - size);
    let even = if above % 2 == 0 { above } else { above - 1 };
    (if low < high {
        above - 1
    } else if high < low {
        above
    } else {
        even
    }) as u8
}

/// Returns the layout of rows of a packed format.
pub fn packing(format: KvFormat) -> Packing {
    format.packing().unwrap_or_else(|| unreachable!("{format} is not packed"))
}

/// Returns the bytes of a row's codes, scales and offsets.
pub fn row_bytes(format: KvFormat, dim: usize) -> [usize; 3] {
    let planes = format.planes(dim);
    [0, 1, 2].map(|plane| planes.get(plane).map_or(0, PlaneFormat::row_bytes))
}

/// Appends a row to planes.
pub fn encode(format: KvFormat, row: &[f32], to: &mut Planes) {
    let mut codes = Vec::new();
    for group in row.chunks_exact(packing(format).group_of(row.len())) {
        match format {
            KvFormat::Affine { bits, .. } => {
                let (scale, offset) = affine(bits, group, &mut codes);
                to.scales.extend(f16::from_f32(scale).to_le_bytes());
                to.offsets.extend(f16::from_f32(offset).to_le_bytes());
            }
            KvFormat::RowInt4 | KvFormat::RowFp4 => {
                let most = if format == KvFormat::RowInt4 { 7.0 } else { 6.0 };
                let stored = f16::from_f32((peak(group) / most).min(F16_MAX));
                let scale = if stored == f16::ZERO { 1.0 } else { stored.to_f32() };
                codes.extend(group.iter().map(|x| match format {
                    KvFormat::RowInt4 => {
                        ((x / scale).round_ties_even().clamp(-8.0, 7.0) + 8.0) as u8
                    }
                    _ => signed(&E2M1, x / scale, 8, (x / scale) < 0.0),
                }));
                to.scales.extend(stored.to_le_bytes());
            }
            KvFormat::Mxfp8 | KvFormat::Mxfp4 | KvFormat::Nvfp4 => {
                let (code, inverse) = block_scale(format, peak(group));
                to.scales.push(code);
                codes.extend(group.iter().map(|x| match format {
                    KvFormat::Mxfp8 => {
                        signed(&E4M3, x * inverse, 128, (x * inverse).is_sign_negative())
                    }
                    _ => signed(&E2M1, x * inverse, 8, x * inverse < 0.0),
                }));
            }
            KvFormat::F32 | KvFormat::F16 | KvFormat::Bf16 => {
                unreachable!("{format} is not packed")
            }
        }
    }
    let mut packed = vec![0u8; row.len() * packing(format).bits / 8];
    for (i, code) in codes.iter().enumerate() {
        for bit in 0..packing(format).bits {
            let at = i * packing(format).bits + bit;
            packed[at / 8] |= (code >> bit & 1) << (at % 8);
        }
    }
    to.codes.extend(packed);
}

fn peak(group: &[f32]) -> f32 {
    group.iter().fold(0.0, |peak, x| x.abs().max(peak))
}

fn signed(numbers: &[f64], x: f32, sign: u8, is_negative: bool) -> u8 {
    nearest(numbers, f64::from(x.abs())) | if is_negative { sign } else { 0 }
}

/// Returns the code of a block's scale, and the inverse of the scale.
fn block_scale(format: KvFormat, peak: f32) -> (u8, f32) {
    if format == KvFormat::Nvfp4 {
        let code = nearest(&E4M3, f64::from(peak / 6.0));
        let scale = E4M3[usize::from(code)] as f32;
        return (code, if code == 0 { 0.0 } else { 1.0 / scale });
    }
    // The smallest power of two that scales the peak to at most 448, or 7.
    let most = if format == KvFormat::Mxfp8 { 448.0 } else { 7.0 };
    let fits = |code: &i32| f64::from(peak) <= most * 2f64.powi(code - 127);
    let code = (0..=254).find(fits).unwrap_or(254);
    (code as u8, 2f64.powi(127 - code) as f32)
}

/// Like MLX on CUDA: the maximum is at least 0, and ties round away from zero.
fn affine(bits: u8, group: &[f32], codes: &mut Vec<u8>) -> (f32, f32) {
    let top = ((1 << bits) - 1) as f32;
    let group: Vec<f32> = group.iter().map(|x| x.clamp(-F16_MAX, F16_MAX)).collect();
    let least = group.iter().fold(f32::MAX, |least, &x| least.min(x));
    let most = group.iter().fold(0f32, |most, &x| most.max(x));
    let step = ((most - least) / top).max(1e-7);
    let (edge, step) = if least.abs() > most.abs() { (least, step) } else { (most, -step) };
    let to_edge = (edge / step).round();
    let (scale, offset) = if to_edge == 0.0 { (step, 0.0) } else { (edge / to_edge, edge) };
    codes.extend(group.iter().map(|x| ((x - offset) / scale).round().min(top) as u8));
    (scale, offset)
}

/// Returns the decoded rows of planes.
pub fn decode(format: KvFormat, dim: usize, planes: &Planes) -> Vec<f64> {
    let (bits, group) = (packing(format).bits, packing(format).group_of(dim));
    let half = |bytes: &[u8], at: usize| {
        f64::from(f16::from_le_bytes([bytes[2 * at], bytes[2 * at + 1]]).to_f32())
    };
    let (small, large) = (&*E2M1, &*E4M3);
    let number = |numbers: &[f64], code: usize, sign: usize| {
        let number = numbers[code % sign];
        if code >= sign {
            -number
        } else {
            number
        }
    };
    let count = planes.codes.len() * 8 / bits;
    let element = |i: usize| {
        let bit = |bit: usize| {
            let at = i * bits + bit;
            usize::from(planes.codes[at / 8] >> (at % 8) & 1) << bit
        };
        let code: usize = (0..bits).map(bit).sum();
        let of = i / group;
        match format {
            KvFormat::Affine { .. } => {
                code as f64 * half(&planes.scales, of) + half(&planes.offsets, of)
            }
            KvFormat::RowInt4 => (code as f64 - 8.0) * half(&planes.scales, of),
            KvFormat::RowFp4 => number(small, code, 8) * half(&planes.scales, of),
            KvFormat::Nvfp4 => number(small, code, 8) * large[usize::from(planes.scales[of])],
            KvFormat::Mxfp4 => {
                number(small, code, 8) * 2f64.powi(i32::from(planes.scales[of]) - 127)
            }
            KvFormat::Mxfp8 => {
                number(large, code, 128) * 2f64.powi(i32::from(planes.scales[of]) - 127)
            }
            KvFormat::F32 | KvFormat::F16 | KvFormat::Bf16 => {
                unreachable!("{format} is not packed")
            }
        }
    };
    (0..count).map(element).collect()
}

/// A pool on the device, with its planes.
pub struct DevicePool {
    pub format: Option<KvFormat>,
    capacity: usize,
    /// Codes or plain rows, scales, and offsets.
    pub planes: [Memory; 3],
}

impl DevicePool {
    /// Allocates a pool of zeros. Plain rows have 2 bytes an element.
    pub fn new(
        device: &Device,
        format: Option<KvFormat>,
        n_kv: usize,
        capacity: usize,
        dim: usize,
    ) -> Result<Self> {
        let rows = n_kv * capacity;
        let bytes = format.map_or([2 * dim, 0, 0], |format| row_bytes(format, dim));
        let [codes, scales, offsets] = bytes.map(|bytes| device.allocate(rows * bytes));
        Ok(Self { format, capacity, planes: [codes?, scales?, offsets?] })
    }

    pub fn pool(&self) -> Pool {
        let [codes, scales, offsets] = &self.planes;
        let rows = match self.format {
            None => PoolRows::Plain(codes.address()),
            Some(format) => PoolRows::Packed(PackedRows {
                format,
                codes: codes.address(),
                scales: scales.address(),
                offsets: matches!(format, KvFormat::Affine { .. }).then(|| offsets.address()),
            }),
        };
        Pool { rows, capacity: self.capacity }
    }

    /// Writes all rows, in order.
    pub fn write(&mut self, planes: &Planes) -> Result<()> {
        self.planes[0].write(0, &planes.codes)?;
        self.planes[1].write(0, &planes.scales)?;
        self.planes[2].write(0, &planes.offsets)
    }

    /// Reads a plane's row.
    pub fn row(&self, plane: usize, row: usize, bytes: usize) -> Result<Vec<u8>> {
        let mut to = vec![0; bytes];
        self.planes[plane].read(row * bytes, &mut to)?;
        Ok(to)
    }
}

/// All formats, with every number of bits and every group.
pub const FORMATS: [KvFormat; 13] = [
    KvFormat::Affine { bits: 4, group: 64 },
    KvFormat::Affine { bits: 8, group: 64 },
    KvFormat::Mxfp8,
    KvFormat::Mxfp4,
    KvFormat::Nvfp4,
    KvFormat::RowInt4,
    KvFormat::RowFp4,
    KvFormat::Affine { bits: 2, group: 32 },
    KvFormat::Affine { bits: 3, group: 64 },
    KvFormat::Affine { bits: 5, group: 32 },
    KvFormat::Affine { bits: 6, group: 64 },
    KvFormat::Affine { bits: 4, group: 32 },
    KvFormat::Affine { bits: 8, group: 32 },
];
