//! Transfers between the host's memory and the device.

use mlx_rs::{Array, ArrayElement, Dtype};

use super::calls::{call, check};
use super::{begin_epoch, is_stream_on_gpu, on_gpu, Mlx};
use crate::error::{fail, Result};

/// Returns an array with elements from the host's memory. A small array is pinned, and a kernel on an NVIDIA GPU reads
/// it in place in a microsecond or two. MLX's own arrays move to the GPU page by page when a kernel first reads them,
/// which takes 80 to 280 µs.
///
/// # Safety
/// `bytes` must be the elements of an array of this shape and dtype.
pub unsafe fn host_array(bytes: &[u8], shape: &[i32], dtype: Dtype) -> Result<Array> {
    #[cfg(target_os = "linux")]
    // MLX stores arrays of up to 8 bytes separately.
    if bytes.len() > 8 && is_stream_on_gpu()? {
        let mut made = false;
        let (data, n) = (bytes.as_ptr().cast(), bytes.len());
        let (sizes, rank) = (shape.as_ptr(), shape.len());
        let array = call(|array, _| {
            // SAFETY: the lists have the given lengths, and outlive the call.
            unsafe {
                mlx_sys::etkv_mlx_array_pinned(array, &mut made, data, n, sizes, rank, dtype.into())
            }
        })?;
        if made {
            return Ok(array);
        }
    }
    // SAFETY: the caller guarantees that the elements match shape and dtype; MLX copies them.
    Ok(unsafe { Array::from_raw_data(bytes.as_ptr().cast(), shape, dtype) })
}

/// Returns an array with elements from the host's memory, as [`host_array`] does.
pub fn array_of<T: ArrayElement>(elements: &[T], shape: &[i32]) -> Result<Array> {
    let n: i64 = shape.iter().map(|&size| i64::from(size)).product();
    if usize::try_from(n).ok() != Some(elements.len()) {
        fail!(Internal, "{} elements for an array of shape {shape:?}", elements.len());
    }
    // SAFETY: elements of MLX's types have no padding, and their number matches the shape.
    unsafe {
        let bytes = std::slice::from_raw_parts(
            elements.as_ptr().cast::<u8>(),
            std::mem::size_of_val(elements),
        );
        host_array(bytes, shape, T::DTYPE)
    }
}

/// Copies a host array to the memory of an NVIDIA GPU, for arrays that several kernels read.
pub fn on_device(array: &Array) -> Result<Array> {
    if cfg!(target_os = "macos") || !is_stream_on_gpu()? {
        return Ok(array.clone());
    }
    // With a single operand MLX would leave the result in the operand's memory.
    Ok(match array.dtype() {
        Dtype::Bool => array.logical_or(array)?,
        _ => mlx_rs::ops::maximum(array, array)?,
    })
}

/// Copies the elements of a computed, row-contiguous array to `to`, which has the same number of bytes.
///
/// # Errors
/// [`Backend`](crate::Status::Backend).
pub fn copy_to(array: &Array, to: &mut [u8]) -> Result<()> {
    if let Some(bytes) = copied_or_in_place(array, to)? {
        to.copy_from_slice(bytes);
    }
    Ok(())
}

impl Mlx {
    /// Does the same as [`copy_to`], but without the lock of MLX if the host can read the elements in place.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    pub fn copy_to(&mut self, array: &Array, to: &mut [u8]) -> Result<()> {
        if let Some(bytes) = copied_or_in_place(array, to)? {
            self.outside(|| to.copy_from_slice(bytes));
        }
        Ok(())
    }
}

/// Copies the elements of an array on a GPU to `to`. Returns the elements of an array that the host can read
/// in place.
fn copied_or_in_place<'a>(array: &'a Array, to: &mut [u8]) -> Result<Option<&'a [u8]>> {
    let n = array.nbytes();
    if n != to.len() {
        fail!(Internal, "cannot copy an array of {n} bytes to {} bytes", to.len());
    }
    if n == 0 {
        return Ok(None);
    }
    // MLX may move the elements to the host.
    begin_epoch();
    #[cfg(target_os = "linux")]
    if on_gpu()? {
        let mut done = false;
        // SAFETY: there is room for `n` bytes.
        check(unsafe {
            mlx_sys::etkv_mlx_array_read(&mut done, to.as_mut_ptr().cast(), n, array.as_ptr())
        })?;
        if done {
            return Ok(None);
        }
    }
    // SAFETY: the accessor does not read elements; it waits for the buffer and returns its address.
    let data = unsafe { mlx_sys::mlx_array_data_uint8(array.as_ptr()) };
    if data.is_null() {
        fail!(Internal, "cannot read an array without data");
    }
    // SAFETY: an evaluated array has `n` bytes at this address, which live while the array is borrowed.
    Ok(Some(unsafe { std::slice::from_raw_parts(data, n) }))
}

/// Returns the elements of a row-contiguous array. Waits until they are computed.
pub fn elements<T: ArrayElement + Copy + Default>(array: &Array) -> Result<Vec<T>> {
    if array.dtype() != T::DTYPE {
        fail!(Internal, "cannot read elements of {:?} as {:?}", array.dtype(), T::DTYPE);
    }
    array.eval()?;
    let mut in_order = false;
    // SAFETY: the handle is live.
    check(unsafe { mlx_sys::_mlx_array_is_row_contiguous(&mut in_order, array.as_ptr()) })?;
    if !in_order {
        fail!(
            Internal,
            "cannot read elements that are not contiguous, of shape {:?}",
            array.shape()
        );
    }
    let mut elements = vec![T::default(); array.size()];
    // SAFETY: elements of a dtype have no padding, and every bit pattern is valid.
    let bytes = unsafe {
        std::slice::from_raw_parts_mut(elements.as_mut_ptr().cast(), size_of_val(&elements[..]))
    };
    copy_to(array, bytes)?;
    Ok(elements)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mlx::run;

    #[test]
    fn elements_pass_both_ways() {
        run(|| {
            // Arrays of at most 8 bytes, of a few more, and of more bytes than a pinned block has.
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
                // The array stays in the memory where kernels read it.
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
    fn arrays_that_do_not_fit_are_refused() {
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
