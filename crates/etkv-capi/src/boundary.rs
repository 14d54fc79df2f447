//! The boundary between Rust and C. No panic crosses it. Depending on the function, a panic becomes a status with an
//! error object, the value that the function returns for a handle that is not live, or a log message.

use std::ffi::{c_char, CStr};
use std::panic::{catch_unwind, AssertUnwindSafe};

use etkv_core::{fail, Error, Result};
use tracing::debug;

use super::error::{etkv_error, OK};
use super::fork;
pub(crate) use super::lifetimes::{free, lasting, panic_error, TARGET};

/// Exports functions to C. Each function gets a last parameter, `error: *mut *mut etkv_error`, returns a status, and
/// runs in a [`boundary`]. The calls of this macro have parentheses, because rustfmt does not format functions in
/// braces.
macro_rules! c_functions {
    ($(
        $(#[$doc:meta])*
        unsafe fn $name:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty $body:block
    )*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// Pointers are NULL or as the header says.
        #[no_mangle]
        pub unsafe extern "C" fn $name(
            $($argument: $type,)*
            error: *mut *mut $crate::error::etkv_error,
        ) -> i32 {
            // SAFETY: the caller keeps the contract above.
            unsafe { $crate::boundary::boundary(error, || -> $result { $body }) }
        }
    )*};
}
pub(crate) use c_functions;

/// Runs the body of a C function. Converts an error or a panic to a status, and stores an error object if the
/// caller passed a pointer for it.
///
/// # Safety
/// `error` is NULL or points to writable memory for one pointer.
pub(crate) unsafe fn boundary<E: Into<Error>>(
    error: *mut *mut etkv_error,
    body: impl FnOnce() -> Result<(), E>,
) -> i32 {
    if fork::happened() {
        if !error.is_null() {
            // SAFETY: the caller keeps the contract above.
            unsafe { error.write(fork::error()) };
        }
        return fork::STATUS as i32;
    }
    let failure = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return OK,
        Ok(Err(failure)) => failure.into(),
        Err(panic) => panic_error(&*panic),
    };
    debug!(target: TARGET, status = ?failure.status(), error = %failure, "a call fails");
    if !error.is_null() {
        // SAFETY: the caller keeps the contract above.
        unsafe { error.write(etkv_error::give(&failure)) };
    }
    failure.status() as i32
}

/// Runs the body of a C function that returns a value. Returns `otherwise` if the handle is not
/// live, on a panic, and after a fork.
pub(crate) fn value<T>(otherwise: T, body: impl FnOnce() -> Result<T>) -> T {
    if fork::happened() {
        return otherwise;
    }
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(found)) => found,
        Ok(Err(_)) | Err(_) => otherwise,
    }
}

/// Returns the text of a C string.
///
/// # Safety
/// `pointer` is NULL or points to a string that ends in a zero byte.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, name: &str) -> Result<&'a str> {
    if pointer.is_null() {
        fail!(InvalidArgument, "{name} is NULL");
    }
    // SAFETY: the caller keeps the contract above.
    match unsafe { CStr::from_ptr(pointer) }.to_str() {
        Ok(text) => Ok(text),
        Err(_) => fail!(InvalidArgument, "{name} is not UTF-8"),
    }
}

/// Returns the elements of a C array. NULL is allowed for 0 elements.
///
/// # Safety
/// `pointer` is NULL or points to `n` elements that do not change while they are borrowed.
pub(crate) unsafe fn list<'a, T>(pointer: *const T, n: usize, name: &str) -> Result<&'a [T]> {
    if n == 0 {
        return Ok(&[]);
    }
    if pointer.is_null() {
        fail!(InvalidArgument, "{name} is NULL, with {n} elements");
    }
    if n > isize::MAX as usize / std::mem::size_of::<T>() {
        fail!(InvalidArgument, "{name} has {n} elements, which no memory can hold");
    }
    // SAFETY: the caller guarantees it, and an array of that size can exist.
    Ok(unsafe { std::slice::from_raw_parts(pointer, n) })
}

/// Copies `found` to the caller's array, which has room for `room` elements, and stores their number in `n`.
/// With a NULL array and a `room` of 0, stores the number only.
///
/// # Safety
/// `array` is NULL or has room for `room` elements. `n` is NULL or has room for one.
pub(crate) unsafe fn fill<T: Copy>(
    found: &[T],
    array: *mut T,
    room: usize,
    n: *mut usize,
    name: &str,
) -> Result<()> {
    let n = out(n, "n")?;
    if array.is_null() && room > 0 {
        fail!(InvalidArgument, "{name} is NULL, with room for {room}");
    }
    if !array.is_null() {
        if room < found.len() {
            fail!(InvalidArgument, "{name} has room for {room}, there are {}", found.len());
        }
        // SAFETY: the caller keeps the contract above.
        unsafe { array.copy_from_nonoverlapping(found.as_ptr(), found.len()) };
    }
    // SAFETY: the caller keeps the contract above.
    unsafe { n.write(found.len()) };
    Ok(())
}

/// Refuses an out-parameter that is NULL. Called before any work.
pub(crate) fn out<T>(pointer: *mut T, name: &str) -> Result<*mut T> {
    if pointer.is_null() {
        fail!(InvalidArgument, "{name} is NULL");
    }
    Ok(pointer)
}

/// Stores a value in an out-parameter, which is checked before the value is made.
///
/// # Safety
/// `pointer` is NULL or points to writable memory for a value.
pub(crate) unsafe fn put<T>(
    pointer: *mut T,
    name: &str,
    make: impl FnOnce() -> Result<T>,
) -> Result<()> {
    let target = out(pointer, name)?;
    // SAFETY: the caller keeps the contract above.
    unsafe { target.write(make()?) };
    Ok(())
}

/// Copies the caller's struct. The caller may be compiled with a newer version of the struct.
///
/// # Safety
/// `pointer` is NULL or points to a struct that begins with its size, and has that size.
pub(crate) unsafe fn read_struct<T: Copy>(pointer: *const T, name: &str) -> Result<T> {
    if pointer.is_null() {
        fail!(InvalidArgument, "{name} is NULL");
    }
    // SAFETY: it begins with its size.
    let size = unsafe { pointer.cast::<usize>().read() };
    let (needed, step) = (std::mem::size_of::<T>(), std::mem::align_of::<T>());
    // Nothing is read if the size is larger than that of any version.
    let possible = size >= needed && size <= needed + 4096 && size % step == 0;
    if !possible {
        fail!(
            InvalidArgument,
            "{name}.struct_size is {size}, expected {needed}, or the larger size of a newer version; \
             set it to sizeof the struct"
        );
    }
    // SAFETY: the struct has that size.
    Ok(unsafe { pointer.read() })
}

/// Copies the caller's struct, which had `least` bytes in its first version. Fields that the caller's version lacks
/// become zero. Returns the struct and the caller's size.
///
/// # Safety
/// As [`read_struct`]; zero is a valid value of every field after the first `least` bytes.
pub(crate) unsafe fn read_grown<T: Copy>(
    pointer: *const T,
    least: usize,
    name: &str,
) -> Result<(T, usize)> {
    if pointer.is_null() {
        fail!(InvalidArgument, "{name} is NULL");
    }
    // SAFETY: it begins with its size.
    let size = unsafe { pointer.cast::<usize>().read() };
    let (whole, step) = (std::mem::size_of::<T>(), std::mem::align_of::<T>());
    let older = size >= least && size < whole && size % step == 0;
    if !older {
        // SAFETY: the caller keeps the contract above.
        return Ok((unsafe { read_struct(pointer, name) }?, whole));
    }
    let mut copy = std::mem::MaybeUninit::<T>::zeroed();
    // SAFETY: the caller's struct has that size, which is at most the size of the copy; the other bytes are
    // zero.
    let copy = unsafe {
        copy.as_mut_ptr().cast::<u8>().copy_from_nonoverlapping(pointer.cast(), size);
        copy.assume_init()
    };
    Ok((copy, size))
}

/// Returns the size of the caller's structs for the layers of a cache, or `None` if the caller passes none.
///
/// # Safety
/// `layers` is NULL or points to `room` structs as the header says.
pub(crate) unsafe fn room<T: Copy>(
    layers: *mut T,
    room: usize,
    n: usize,
    name: &str,
) -> Result<Option<usize>> {
    if room == 0 {
        if !layers.is_null() && n > 0 {
            fail!(InvalidArgument, "{name} has room for 0, there are {n}");
        }
        return Ok(None);
    }
    out(layers, name)?;
    if room != n {
        fail!(InvalidArgument, "{name} has room for {room}, there are {n}");
    }
    // SAFETY: the caller guarantees that the struct begins with its size.
    unsafe {
        read_struct(layers, name)?;
        Ok(Some(layers.cast::<usize>().read()))
    }
}

/// Fills the caller's structs, `size` bytes apart, if the caller passed any.
///
/// # Safety
/// If `size` is not `None`, `layers` points to a struct for each element of `found`.
pub(crate) unsafe fn fill_layers<T, Layer>(
    layers: *mut T,
    size: Option<usize>,
    found: &[Layer],
    fill: impl Fn(usize, &Layer) -> T,
) {
    let Some(size) = size else { return };
    for (id, layer) in found.iter().enumerate() {
        // SAFETY: within the caller's list, whose structs have the size of the first.
        unsafe { layers.byte_add(id * size).write(fill(size, layer)) };
    }
}
