//! Products that several CPU threads share.
//!
//! MLX's CPU build computes an operation on a single thread, which belongs to the stream of the operation. Only
//! products in float32 use a BLAS, which has its own threads. Other products are split by outputs, and each part is
//! computed on a different stream.

use std::ops::Range;
use std::sync::OnceLock;

use mlx_rs::ops::concatenate;
use mlx_rs::{Array, Device, Stream};

use super::is_stream_on_gpu;
use super::start::unowned_stream;
use crate::error::Result;

/// The maximum number of parts. Products are limited by memory bandwidth, and a few cores saturate it.
const MAX: usize = 8;

/// The minimum number of multiplications of a part. With fewer multiplications, waiting for another thread takes as
/// long as multiplying.
const MIN: i64 = 1 << 17;

/// Parts start at multiples of this number of outputs, like the iterations of MLX's loops over outputs.
const STEP: i32 = 16;

/// Streams that belong to no thread, one for each part except the first.
struct Streams(Vec<Stream>);

// SAFETY: the streams are used only under the lock of MLX, by one thread at a time.
unsafe impl Send for Streams {}
// SAFETY: as above.
unsafe impl Sync for Streams {}

static STREAMS: OnceLock<Result<Streams>> = OnceLock::new();

fn streams() -> Result<&'static [Stream]> {
    let made = STREAMS.get_or_init(|| {
        let made = (1..threads()).map(|_| unowned_stream(&Device::cpu()));
        made.collect::<Result<_>>().map(Streams)
    });
    match made {
        Ok(streams) => Ok(&streams.0),
        Err(error) => Err(error.clone()),
    }
}

/// Returns the number of threads that a product may use: as many as OpenBLAS uses.
fn threads() -> usize {
    let asked = std::env::var("OPENBLAS_NUM_THREADS").ok().and_then(|n| n.parse().ok());
    let cores = || std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    asked.unwrap_or_else(cores).clamp(1, MAX)
}

/// Computes a product on several threads of a CPU. Returns `None` if the product is too small, or runs on a GPU. The
/// product's last axis has `outputs` elements, each of `multiplications` multiplications. `part` computes a range of
/// the outputs, on the stream that is current when it is called.
pub fn shared(
    outputs: i32,
    multiplications: i64,
    part: impl Fn(Range<i32>) -> Result<Array>,
) -> Result<Option<Array>> {
    if cfg!(target_os = "macos") || is_stream_on_gpu()? {
        return Ok(None);
    }
    on(streams()?, outputs, multiplications, part)
}

fn on(
    streams: &[Stream],
    outputs: i32,
    multiplications: i64,
    part: impl Fn(Range<i32>) -> Result<Array>,
) -> Result<Option<Array>> {
    let ranges = cut(outputs, multiplications, streams.len() + 1);
    let Some((first, others)) = ranges.split_first().filter(|(_, others)| !others.is_empty())
    else {
        return Ok(None);
    };
    let mut parts = vec![part(first.clone())?];
    for (range, stream) in others.iter().zip(streams) {
        parts.push(mlx_rs::with_stream(stream, || part(range.clone()))?);
    }
    Ok(Some(concatenate(&parts, -1)?))
}

/// Splits outputs into at most `most` ranges of about the same size.
fn cut(outputs: i32, multiplications: i64, most: usize) -> Vec<Range<i32>> {
    let affordable = i64::from(outputs).saturating_mul(multiplications) / MIN;
    let n = most.min(usize::try_from(affordable).unwrap_or(1)).max(1) as i32;
    let size = (outputs / n + STEP) / STEP * STEP;
    let starts = (0..outputs).step_by(size.max(STEP) as usize);
    starts.map(|start| start..outputs.min(start.saturating_add(size))).collect()
}

#[cfg(test)]
mod tests {
    use mlx_rs::ops::matmul;
    use mlx_rs::Dtype;

    use super::*;
    use crate::mlx::{run, slice_axis};

    #[test]
    fn ranges_make_up_the_outputs() {
        for outputs in [1, 15, 16, 17, 576, 1000, 49_152] {
            for most in [1, 2, 3, 8] {
                let ranges = cut(outputs, MIN, most);
                assert!(ranges.len() <= most.max(1), "{ranges:?}");
                assert_eq!(ranges.first().map(|range| range.start), Some(0));
                assert_eq!(ranges.last().map(|range| range.end), Some(outputs));
                assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
                assert!(ranges.iter().all(|range| range.start % STEP == 0 && !range.is_empty()));
            }
        }
        // Small products are not split.
        assert_eq!(cut(64, MIN / 64, 8).len(), 1);
        assert_eq!(cut(64, MIN / 16, 2).len(), 2);
    }

    #[test]
    fn parts_of_several_streams_are_the_whole() {
        run(|| {
            let streams = [unowned_stream(&Device::cpu())?, unowned_stream(&Device::cpu())?];
            let numbers = |shape: &[i32]| -> Result<Array> {
                let numbers = mlx_rs::random::normal::<f32>(shape, None, None, None)?;
                Ok(numbers.as_dtype(Dtype::Bfloat16)?)
            };
            let (mut x, weight) = (numbers(&[1, 3, 96])?, numbers(&[96, 96])?);
            let part = |x: &Array, range: Range<i32>| -> Result<Array> {
                Ok(matmul(x, slice_axis(&weight, 1, range.start, range.end, 1)?)?)
            };
            // A chain of products, each computed from all parts of the previous one.
            for _ in 0..20 {
                let whole = part(&x, 0..96)?;
                let made = on(&streams, 96, MIN, |range| part(&x, range))?.expect("it is cut");
                assert_eq!(made.shape(), [1, 3, 96]);
                assert!(made.eq_values(&whole)?);
                x = made.multiply(Array::from_f32(0.1).as_dtype(Dtype::Bfloat16)?)?;
            }
            let failed = on(&streams, 96, MIN, |range| part(&weight.reshape(&[1, 4, -1])?, range));
            assert!(failed.is_err());
            assert!(on(&streams, 96, 1, |range| part(&x, range))?.is_none());
            Ok(())
        })
        .unwrap();
    }
}
