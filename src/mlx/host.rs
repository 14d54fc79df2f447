//! What passes between the host's memory and the device.

use std::cell::RefCell;
use std::ops::Deref;

use mlx_rs::{Array, ArrayElement, Dtype};

use super::calls::{call, check};
use super::{is_stream_on_gpu, on_gpu};
use crate::error::{fail, Result};

/// Returns an array of elements of the host. MLX's own would move to an NVIDIA GPU page by page when a
/// kernel reads it first, in 80 to 280 µs. Small ones are read where they are, in a microsecond or two.
///
/// # Safety
/// `bytes` are the elements of an array of this shape and dtype.
pub unsafe fn host_array(bytes: &[u8], shape: &[i32], dtype: Dtype) -> Result<Array> {
    #[cfg(target_os = "linux")]
    // MLX has a place of its own for up to 8 bytes.
    if bytes.len() > 8 && is_stream_on_gpu()? {
        let mut made = false;
        let (data, n) = (bytes.as_ptr().cast(), bytes.len());
        let (sizes, rank) = (shape.as_ptr(), shape.len());
        let array = call(|array, _| {
            // SAFETY: the lists have as many elements as is said, and outlive the call.
            unsafe {
                mlx_sys::etkv_mlx_array_pinned(array, &mut made, data, n, sizes, rank, dtype.into())
            }
        })?;
        if made {
            return Ok(array);
        }
    }
    // SAFETY: the caller says that the elements are as many as shape and dtype say; MLX copies them.
    Ok(unsafe { Array::from_raw_data(bytes.as_ptr().cast(), shape, dtype) })
}

/// Returns an array of elements of the host, as [`host_array`] does.
pub fn array_of<T: ArrayElement>(elements: &[T], shape: &[i32]) -> Result<Array> {
    let n: i64 = shape.iter().map(|&size| i64::from(size)).product();
    if usize::try_from(n).ok() != Some(elements.len()) {
        fail!(Internal, "{} elements for an array of shape {shape:?}", elements.len());
    }
    // SAFETY: elements of MLX's types have no padding, and are as many as the shape says.
    unsafe {
        let bytes = std::slice::from_raw_parts(
            elements.as_ptr().cast::<u8>(),
            std::mem::size_of_val(elements),
        );
        host_array(bytes, shape, T::DTYPE)
    }
}

/// Returns an array of the host's that several kernels read, copied to the memory of an NVIDIA GPU.
pub fn on_device(array: &Array) -> Result<Array> {
    if cfg!(target_os = "macos") || !is_stream_on_gpu()? {
        return Ok(array.clone());
    }
    // MLX would leave the result in the memory of an array that is named once.
    Ok(match array.dtype() {
        Dtype::Bool => array.logical_or(array)?,
        _ => mlx_rs::ops::maximum(array, array)?,
    })
}

/// The elements of an array, where the host can read them.
pub enum HostBytes<'a> {
    /// In the array's own memory.
    InPlace(&'a [u8]),
    /// In a copy.
    Copy(Vec<u8>),
}

/// The most bytes that are kept between copies: the logits of a step of one token.
const MAX_SPARE: usize = 1 << 20;

thread_local! {
    /// The memory of the last copy, for the next one.
    static SPARE: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

impl Deref for HostBytes<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Self::InPlace(bytes) => bytes,
            Self::Copy(bytes) => bytes,
        }
    }
}

impl Drop for HostBytes<'_> {
    fn drop(&mut self) {
        if let Self::Copy(bytes) = self {
            let bytes = std::mem::take(bytes);
            SPARE.with_borrow_mut(|spare| {
                if (spare.capacity()..=MAX_SPARE).contains(&bytes.capacity()) {
                    *spare = bytes;
                }
            });
        }
    }
}

/// Returns the elements of a computed, row-contiguous array.
pub fn bytes(array: &Array) -> Result<HostBytes<'_>> {
    let n = array.nbytes();
    if n == 0 {
        return Ok(HostBytes::InPlace(&[]));
    }
    #[cfg(target_os = "linux")]
    if on_gpu()? {
        let mut copy = SPARE.take();
        copy.clear();
        copy.reserve(n);
        let mut done = false;
        // SAFETY: there is room for `n` bytes.
        check(unsafe {
            mlx_sys::etkv_mlx_array_read(&mut done, copy.as_mut_ptr().cast(), n, array.as_ptr())
        })?;
        if done {
            // SAFETY: so many were copied.
            unsafe { copy.set_len(n) };
            return Ok(HostBytes::Copy(copy));
        }
        SPARE.set(copy);
    }
    // SAFETY: the accessor reads nothing; it waits for the buffer and points to it.
    let data = unsafe { mlx_sys::mlx_array_data_uint8(array.as_ptr()) };
    if data.is_null() {
        fail!(Internal, "an array has no data");
    }
    // SAFETY: an evaluated array has `n` bytes there, and keeps them while it is
    // borrowed.
    Ok(HostBytes::InPlace(unsafe { std::slice::from_raw_parts(data, n) }))
}

/// Returns the elements of a row-contiguous array. Waits until it is computed.
pub fn elements<T: ArrayElement + Copy>(array: &Array) -> Result<Vec<T>> {
    if array.dtype() != T::DTYPE {
        fail!(Internal, "elements of {:?} are read as {:?}", array.dtype(), T::DTYPE);
    }
    array.eval()?;
    let mut in_order = false;
    // SAFETY: the handle is live.
    check(unsafe { mlx_sys::_mlx_array_is_row_contiguous(&mut in_order, array.as_ptr()) })?;
    if !in_order {
        fail!(Internal, "elements that lie apart are read, of shape {:?}", array.shape());
    }
    let bytes = bytes(array)?;
    let mut elements = Vec::with_capacity(array.size());
    // SAFETY: the bytes are those of so many elements of this type, and there is room for them.
    unsafe {
        let to: *mut T = elements.as_mut_ptr();
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast(), bytes.len());
        elements.set_len(array.size());
    }
    Ok(elements)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mlx::run;

    #[test]
    fn elements_pass_both_ways() {
        run(|| {
            // Up to 8 bytes, some, and more than a pinned block.
            for n in [1, 2, 100, 40_000] {
                let numbers: Vec<i32> = (0..n).map(|i| i * 7 - 50).collect();
                let array = array_of(&numbers, &[1, n])?;
                assert_eq!((array.shape(), array.dtype()), (&[1, n][..], Dtype::Int32));
                assert_eq!(elements::<i32>(&on_device(&array)?)?, numbers);
                let sum = array.add(&array)?;
                assert_eq!(
                    elements::<i32>(&sum)?,
                    numbers.iter().map(|i| 2 * i).collect::<Vec<_>>()
                );
                assert_eq!(elements::<i32>(&array)?, numbers);
                // The array stays where kernels read it.
                assert_eq!(elements::<i32>(&sum.subtract(&array)?)?, numbers);
            }
            let marks = [true, false, true];
            assert_eq!(elements::<bool>(&on_device(&array_of(&marks, &[3])?)?)?, marks);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn many_arrays_at_a_time_keep_their_elements() {
        run(|| {
            let made: Vec<Array> =
                (0..200).map(|i| array_of(&[i, i + 1, i + 2], &[3])).collect::<Result<_>>()?;
            let sums: Vec<Array> =
                made.iter().map(|array| Ok(array.add(array)?)).collect::<Result<_>>()?;
            for (i, sum) in (0..).zip(&sums) {
                assert_eq!(elements::<i32>(sum)?, [2 * i, 2 * i + 2, 2 * i + 4]);
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        run(|| {
            assert!(array_of(&[1i32, 2], &[3]).is_err());
            assert!(array_of(&[1i32, 2], &[-2]).is_err());
            let array = array_of(&[1i32, 2, 3, 4], &[2, 2])?;
            assert!(elements::<f32>(&array).is_err());
            let rotated = array.transpose_axes(&[1, 0])?;
            assert_eq!(elements::<i32>(&rotated).unwrap_err().status(), crate::Status::Internal);
            Ok(())
        })
        .unwrap();
    }
}
