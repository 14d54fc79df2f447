//! Views of random rows, and threads that share work, for tests and benchmarks.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use etkv_core::{KvFormat, Result};
use half::{bf16, f16};

use crate::memory::Memory;
use crate::parallel::Parallel;
use crate::store::view::{Plane, View};
use crate::store::Codec;

/// A number of threads, which are started for each call.
#[derive(Debug, Clone, Copy)]
pub struct Threads(pub usize);

impl Parallel for Threads {
    fn threads(&self) -> usize {
        self.0
    }

    fn run(&self, count: usize, call: &(dyn Fn(usize) + Sync)) {
        let begun = AtomicUsize::new(0);
        let work = || loop {
            let i = begun.fetch_add(1, Ordering::Relaxed);
            if i >= count {
                break;
            }
            call(i);
        };
        std::thread::scope(|scope| {
            for _ in 1..self.0.min(count) {
                scope.spawn(work);
            }
            work();
        });
    }
}

/// Pseudorandom numbers: SplitMix64.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// Returns the generator for a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ (x >> 31)
    }

    /// Returns a number from -1 to 1.
    pub fn number(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    /// Returns `n` numbers from -1 to 1.
    pub fn numbers(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.number()).collect()
    }

    /// Returns an integer below `n`.
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Returns an integer from `from` to `to`, inclusive.
    pub fn integer(&mut self, from: usize, to: usize) -> usize {
        from + self.below(to - from + 1)
    }
}

/// Returns every format, with every group size.
pub fn formats() -> Vec<KvFormat> {
    let mut formats = vec![KvFormat::F32, KvFormat::F16, KvFormat::Bf16];
    for bits in [2, 3, 4, 5, 6, 8] {
        formats.extend([32, 64, 128].map(|group| KvFormat::Affine { bits, group }));
    }
    formats.extend([KvFormat::Mxfp8, KvFormat::Mxfp4, KvFormat::Nvfp4]);
    formats.extend([KvFormat::RowInt4, KvFormat::RowFp4]);
    formats
}

/// Returns a view of random rows, with magnitudes up to about 2. Every code of the format occurs.
///
/// # Errors
/// [`Backend`](etkv_core::Status::Backend) if memory is lacking.
pub fn view(
    format: KvFormat,
    n_kv_heads: usize,
    head_dim: usize,
    n_slots: usize,
    random: &mut Random,
) -> Result<View> {
    let mut planes = [const { None }; 3];
    let widths = Codec::of(format).widths(head_dim);
    for (p, bytes) in widths.into_iter().enumerate().filter(|&(_, bytes)| bytes > 0) {
        // Like some views of stores, the view does not begin at the start of its memory.
        let (offset, slot_stride) = (64, bytes * n_kv_heads);
        let mut elements = vec![0; offset];
        while elements.len() < offset + n_slots * slot_stride {
            element(format, p, random, &mut elements);
        }
        let mut memory = Memory::zeroed(elements.len())?;
        memory.bytes_mut().copy_from_slice(&elements);
        let memory = Arc::new(memory);
        planes[p] = Some(Plane { memory, offset, slot_stride, head_stride: bytes });
    }
    Ok(View { format, n_kv_heads, head_dim, stored_dim: head_dim, n_slots, planes })
}

/// Appends the bytes of an element of a plane.
fn element(format: KvFormat, plane: usize, random: &mut Random, out: &mut Vec<u8>) {
    let code = random.bits() as u8;
    // The largest code then has a value of about 2.
    let scale = (1.5 + 0.5 * random.number()) / 1.5;
    let half = match (format, plane) {
        (KvFormat::F32, _) => return out.extend((2.0 * random.number()).to_le_bytes()),
        (KvFormat::F16, _) => 2.0 * random.number(),
        (KvFormat::Bf16, _) => {
            return out.extend(bf16::from_f32(2.0 * random.number()).to_le_bytes());
        }
        // E4M3 has no infinity, and clearing the lowest bit avoids its NaN.
        (KvFormat::Mxfp8, 0) => return out.push(random.bits() as u8 & 0xfe),
        (_, 0) => return out.push(code),
        (KvFormat::Affine { bits, .. }, 1) => 3.0 * scale / (1 << bits) as f32,
        (KvFormat::Affine { .. }, _) => -1.5 * scale,
        (KvFormat::Mxfp8, _) => return out.push(random.integer(117, 119) as u8),
        (KvFormat::Mxfp4, _) => return out.push(random.integer(124, 126) as u8),
        // Numbers from 0 to 0.5, including subnormals.
        (KvFormat::Nvfp4, _) => return out.push(random.integer(0, 0x30) as u8),
        (KvFormat::RowInt4, _) => 0.2 * scale,
        _ => 0.3 * scale,
    };
    out.extend(f16::from_f32(half).to_le_bytes());
}

impl View {
    /// Returns a view of a copy of the rows.
    ///
    /// # Errors
    /// [`Backend`](etkv_core::Status::Backend) if memory is lacking.
    #[doc(hidden)]
    pub fn deep_copy(&self) -> Result<Self> {
        let mut copy = self.clone();
        for plane in copy.planes.iter_mut().flatten() {
            let bytes = self.n_slots * plane.slot_stride;
            let memory = Memory::zeroed(bytes)?;
            // SAFETY: the plane has the bytes, and only this function has the new memory.
            unsafe {
                let from = plane.memory.as_ptr().add(plane.offset);
                std::ptr::copy_nonoverlapping(from, memory.as_ptr(), bytes);
            }
            (plane.memory, plane.offset) = (Arc::new(memory), 0);
        }
        Ok(copy)
    }
}
