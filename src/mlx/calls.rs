//! Calls of mlx-c, their errors, and the operations that mlx-rs does not offer.

use std::cell::RefCell;
use std::ffi::{c_char, c_void, CStr};

use mlx_rs::ops::concatenate;
use mlx_rs::{Array, Dtype, Stream};

use crate::error::{Error, Result, Status};

thread_local! {
    static MESSAGE: RefCell<String> = const { RefCell::new(String::new()) };
}

extern "C" {
    // The error handler of mlx-rs. The wrappers of mlx-rs read the messages that it stores.
    fn default_mlx_error_handler(message: *const c_char, data: *mut c_void);
}

/// Stores the message of the error for [`check`].
pub extern "C" fn on_error(message: *const c_char, data: *mut c_void) {
    if !message.is_null() {
        // SAFETY: mlx-c passes a string that ends in a zero byte.
        let text = unsafe { CStr::from_ptr(message) }.to_string_lossy();
        MESSAGE.with_borrow_mut(|kept| {
            kept.clear();
            kept.push_str(&text);
        });
    }
    // SAFETY: both arguments are those that mlx-c passed to its handler.
    unsafe { default_mlx_error_handler(message, data) };
}

impl From<mlx_rs::error::Exception> for Error {
    fn from(exception: mlx_rs::error::Exception) -> Self {
        error_of(exception.what()).caused_by(exception)
    }
}

#[doc(hidden)]
pub fn check(status: i32) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    Err(MESSAGE.with_borrow(|kept| error_of(kept)))
}

/// Returns MLX's message, without the source location that mlx-c adds, as an error.
fn error_of(message: &str) -> Error {
    let words = message.rsplit_once(" at ").map_or(message, |(words, place)| {
        let is_place = place.rsplit_once(':').is_some_and(|(_, line)| line.parse::<u32>().is_ok());
        if is_place {
            words
        } else {
            message
        }
    });
    Error::new(Status::Backend, words)
}

/// Calls a function of mlx-c that creates an array, on the stream of the enclosing [`run`](super::run).
pub fn call(
    function: impl FnOnce(*mut mlx_sys::mlx_array, mlx_sys::mlx_stream) -> i32,
) -> Result<Array> {
    let stream = Stream::thread_local_or_default();
    // SAFETY: creates an empty handle, which `function` sets or leaves empty.
    let mut made = unsafe { mlx_sys::mlx_array_new() };
    let status = function(&mut made, stream.as_ptr());
    // SAFETY: the handle has no other owner.
    let array = unsafe { Array::from_ptr(made) };
    check(status).map(|()| array)
}

/// Waits until all work on the stream of the enclosing [`run`](super::run) is done and MLX has released its arrays.
/// On an NVIDIA GPU a thread of MLX releases them some time after they are computed.
pub fn synchronize() -> Result<()> {
    let stream = Stream::thread_local_or_default();
    // SAFETY: the handle is live.
    check(unsafe { mlx_sys::mlx_synchronize(stream.as_ptr()) })
}

/// A list of arrays, as functions of mlx-c accept and return them.
pub struct Arrays(mlx_sys::mlx_vector_array);

impl Arrays {
    /// Returns an empty list.
    pub fn empty() -> Self {
        // SAFETY: the handle is freed when its owner is dropped.
        Self(unsafe { mlx_sys::mlx_vector_array_new() })
    }

    /// Creates a list of these arrays.
    pub fn of<'a>(arrays: impl IntoIterator<Item = &'a Array>) -> Self {
        let handles: smallvec::SmallVec<[mlx_sys::mlx_array; 8]> =
            arrays.into_iter().map(Array::as_ptr).collect();
        // SAFETY: the handles are live, and the list copies them.
        Self(unsafe { mlx_sys::mlx_vector_array_new_data(handles.as_ptr(), handles.len()) })
    }

    /// Appends an array to the list.
    pub fn push(&mut self, array: &Array) -> Result<()> {
        // SAFETY: both handles are live, and the list copies the array's handle.
        check(unsafe { mlx_sys::mlx_vector_array_append_value(self.0, array.as_ptr()) })
    }

    /// Returns the arrays stacked along a new axis.
    pub fn stack(&self, axis: i32) -> Result<Array> {
        // SAFETY: the list is live.
        call(|made, stream| unsafe { mlx_sys::mlx_stack_axis(made, self.0, axis, stream) })
    }

    /// Returns the handle, which lives as long as the list.
    pub fn as_raw(&self) -> mlx_sys::mlx_vector_array {
        self.0
    }

    /// Returns the handle, for a function that fills the list.
    pub fn as_raw_mut(&mut self) -> &mut mlx_sys::mlx_vector_array {
        &mut self.0
    }

    /// Returns the arrays, one after the other.
    pub fn iter(&self) -> impl Iterator<Item = Result<Array>> + '_ {
        // SAFETY: the list is live.
        unsafe { each(self.0) }
    }

    /// Returns the arrays.
    pub fn to_vec(&self) -> Result<Vec<Array>> {
        // SAFETY: the list is live.
        unsafe { arrays(self.0) }
    }
}

impl Drop for Arrays {
    fn drop(&mut self) {
        // SAFETY: the handle has no other owner.
        unsafe { mlx_sys::mlx_vector_array_free(self.0) };
    }
}

/// Returns the arrays of a list.
///
/// # Safety
/// `list` must be live.
pub unsafe fn arrays(list: mlx_sys::mlx_vector_array) -> Result<Vec<Array>> {
    // SAFETY: as required of the caller.
    unsafe { each(list) }.collect()
}

/// Returns the arrays of a list, one after the other.
///
/// # Safety
/// `list` must outlive the iterator.
unsafe fn each(list: mlx_sys::mlx_vector_array) -> impl Iterator<Item = Result<Array>> {
    // SAFETY: the caller guarantees that the list is live.
    let n = unsafe { mlx_sys::mlx_vector_array_size(list) };
    (0..n).map(move |index| {
        // SAFETY: as above; each handle gets an owner.
        let (status, array) = unsafe {
            let mut one = mlx_sys::mlx_array_new();
            let status = mlx_sys::mlx_vector_array_get(&mut one, list, index);
            (status, Array::from_ptr(one))
        };
        check(status).map(|()| array)
    })
}

/// Returns a view of `array` from `start` to `stop` along `axis`, by `step`.
pub fn slice_axis(array: &Array, axis: usize, start: i32, stop: i32, step: i32) -> Result<Array> {
    let [from, to, by] = corners(array, axis, start, stop, step);
    let (from, to, by, n) = (from.as_ptr(), to.as_ptr(), by.as_ptr(), from.len());
    // SAFETY: the three lists have `n` elements each, and outlive the call.
    call(|made, stream| unsafe {
        mlx_sys::mlx_slice(made, array.as_ptr(), from, n, to, n, by, n, stream)
    })
}

/// Returns `array` with the rows from `start` to `stop` along `axis` replaced by `update`. Writes in place if the
/// buffer has no other owner when the result is evaluated.
pub fn update_axis(
    array: &Array,
    update: &Array,
    axis: usize,
    start: i32,
    stop: i32,
) -> Result<Array> {
    let [from, to, by] = corners(array, axis, start, stop, 1);
    let (from, to, by, n) = (from.as_ptr(), to.as_ptr(), by.as_ptr(), from.len());
    let (array, update) = (array.as_ptr(), update.as_ptr());
    // SAFETY: the three lists have `n` elements each, and outlive the call.
    call(|made, stream| unsafe {
        mlx_sys::mlx_slice_update(made, array, update, from, n, to, n, by, n, stream)
    })
}

/// Wraps a value for an optional argument of MLX.
pub fn optional_int(value: i32) -> mlx_sys::mlx_optional_int {
    mlx_sys::mlx_optional_int { value, has_value: true }
}

/// Waits until an array is computed. Its computation must have started.
pub fn wait(array: &Array) -> Result<()> {
    // SAFETY: the handle is live.
    check(unsafe { mlx_sys::_mlx_array_wait(array.as_ptr()) })
}

/// Returns `array` without its pending writes, or `None` if it is the result of another pending operation.
pub fn before_writes(array: &Array) -> Result<Option<Array>> {
    let mut found = false;
    let before = call(|before, _| {
        // SAFETY: the handles are live; `found` outlives the call.
        unsafe { mlx_sys::etkv_mlx_array_before_writes(before, &mut found, array.as_ptr()) }
    })?;
    Ok(found.then_some(before))
}

type Corner = smallvec::SmallVec<[i32; 8]>;

/// Returns the first and the last corner of a part of `array`, and the steps along its axes.
fn corners(array: &Array, axis: usize, start: i32, stop: i32, step: i32) -> [Corner; 3] {
    let mut to = Corner::from_slice(array.shape());
    let mut from: Corner = smallvec::smallvec![0; to.len()];
    let mut by: Corner = smallvec::smallvec![1; to.len()];
    if axis < to.len() {
        (from[axis], to[axis], by[axis]) = (start, stop, step);
    }
    [from, to, by]
}

/// Returns `array` as `dtype`, or the same array if it has that dtype.
pub fn cast(array: &Array, dtype: Dtype) -> Result<Array> {
    if array.dtype() == dtype {
        Ok(array.clone())
    } else {
        Ok(array.as_dtype(dtype)?)
    }
}

/// Concatenates arrays along `axis`. Returns a single array itself.
pub fn joined(parts: &[Array], axis: i32) -> Result<Array> {
    match parts {
        [one] => Ok(one.clone()),
        parts => Ok(concatenate(parts, axis)?),
    }
}

#[cfg(test)]
mod tests {
    use super::super::run;
    use super::*;

    #[test]
    fn errors_of_raw_calls_carry_mlx_words() {
        let error = run(|| {
            let array = Array::from_slice(&[0.0f32; 4], &[4]);
            update_axis(&array, &Array::from_slice(&[0.0f32; 3], &[3]), 0, 0, 2)
        })
        .unwrap_err();
        assert_eq!(error.status(), Status::Backend);
        assert_eq!(error.message(), "[broadcast_shapes] Shapes (3) and (2) cannot be broadcast.");
    }
}
