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

    /// Returns an integer from `from` to `to`, inclusive.
    pub fn integer(&mut self, from: usize, to: usize) -> usize {
        from + (self.bits() % (to - from + 1) as u64) as usize
    }
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
        let memory = Memory::zeroed(offset + n_slots * slot_stride)?;
        let mut at = offset;
        while at < offset + n_slots * slot_stride {
            let element = element(format, p, random);
            for byte in element.bytes() {
                // SAFETY: the plane has the byte, and only this function has the memory.
                unsafe { memory.as_ptr().add(at).write(byte) };
                at += 1;
            }
        }
        let memory = Arc::new(memory);
        planes[p] = Some(Plane { memory, offset, slot_stride, head_stride: bytes });
    }
    Ok(View { format, n_kv_heads, head_dim, stored_dim: head_dim, n_slots, planes })
}

/// The bytes of an element of a plane.
enum Element {
    One([u8; 1]),
    Two([u8; 2]),
    Four([u8; 4]),
}

impl Element {
    fn bytes(&self) -> impl Iterator<Item = u8> + '_ {
        match self {
            Self::One(bytes) => bytes.as_slice(),
            Self::Two(bytes) => bytes.as_slice(),
            Self::Four(bytes) => bytes.as_slice(),
        }
        .iter()
        .copied()
    }
}

fn element(format: KvFormat, plane: usize, random: &mut Random) -> Element {
    let f16_of = |x: f32| Element::Two(f16::from_f32(x).to_le_bytes());
    let code = Element::One([random.bits() as u8]);
    // The largest code then has a value of about 2.
    let scale = (1.5 + 0.5 * random.number()) / 1.5;
    match (format, plane) {
        (KvFormat::F32, _) => Element::Four((2.0 * random.number()).to_le_bytes()),
        (KvFormat::F16, _) => f16_of(2.0 * random.number()),
        (KvFormat::Bf16, _) => Element::Two(bf16::from_f32(2.0 * random.number()).to_le_bytes()),
        // E4M3 has no infinity, and clearing the lowest bit avoids its NaN.
        (KvFormat::Mxfp8, 0) => Element::One([(random.bits() as u8) & 0xfe]),
        (_, 0) => code,
        (KvFormat::Affine { bits, .. }, 1) => f16_of(3.0 * scale / (1 << bits) as f32),
        (KvFormat::Affine { .. }, _) => f16_of(-1.5 * scale),
        (KvFormat::Mxfp8, _) => Element::One([random.integer(117, 119) as u8]),
        (KvFormat::Mxfp4, _) => Element::One([random.integer(124, 126) as u8]),
        // Numbers from 0 to 0.5, including subnormals.
        (KvFormat::Nvfp4, _) => Element::One([random.integer(0, 0x30) as u8]),
        (KvFormat::RowInt4, _) => f16_of(0.2 * scale),
        _ => f16_of(0.3 * scale),
    }
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
