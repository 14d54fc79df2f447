//! `etkv_cache`: a handle on a shared cache.

use parking_lot::MutexGuard;

use super::boundary::{boundary, check_struct, object, out};
use super::error::etkv_error;
use crate::cache::AttendCache;
use crate::error::{fail, Result};
use crate::registry::SharedCache;

/// A handle on a cache that others may share.
#[allow(non_camel_case_types)]
pub struct etkv_cache {
    cache: SharedCache,
}

impl etkv_cache {
    pub(crate) fn boxed(cache: SharedCache) -> *mut Self {
        Box::into_raw(Box::new(Self { cache }))
    }

    fn lock(&self) -> MutexGuard<'_, dyn AttendCache + 'static> {
        self.cache.lock()
    }
}

/// Bytes of a cache's buffers; see the header.
#[allow(non_camel_case_types)]
#[repr(C)]
pub struct etkv_memory {
    struct_size: usize,
    allocated: u64,
    used: u64,
    at_capacity: u64,
}

/// Gives back a handle.
///
/// # Safety
/// `cache` is NULL or a handle that is not freed.
#[no_mangle]
pub unsafe extern "C" fn etkv_cache_free(cache: *mut etkv_cache) {
    if !cache.is_null() {
        // SAFETY: it came from `boxed`.
        drop(unsafe { Box::from_raw(cache) });
    }
}

/// Stores whether `n` more positions fit.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_cache_can_extend(
    cache: *const etkv_cache,
    n: i32,
    fits: *mut bool,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller says so.
    unsafe {
        boundary(error, || {
            let fits = out(fits, "fits")?;
            let cache = object(cache, "cache")?;
            if n < 0 {
                fail!(InvalidArgument, "n is {n}, the least is 0");
            }
            *fits = cache.lock().can_extend(n);
            Ok(())
        })
    }
}

/// Stores the most positions that the cache holds.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_cache_capacity(
    cache: *const etkv_cache,
    capacity: *mut i32,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller says so.
    unsafe { read(cache, capacity, "capacity", error, |cache| cache.capacity()) }
}

/// Stores the positions that the cache holds.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_cache_length(
    cache: *const etkv_cache,
    length: *mut i32,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller says so.
    unsafe { read(cache, length, "length", error, |cache| cache.length()) }
}

/// Forgets every position.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_cache_clear(
    cache: *mut etkv_cache,
    release: bool,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller says so.
    unsafe { change(cache, error, |cache| cache.clear(release)) }
}

/// Forgets the positions from `length` on.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_cache_rewind(
    cache: *mut etkv_cache,
    length: i32,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller says so.
    unsafe { change(cache, error, |cache| cache.rewind(length)) }
}

/// Fills `memory`.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_cache_memory(
    cache: *const etkv_cache,
    memory: *mut etkv_memory,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller says so.
    unsafe {
        boundary(error, || {
            let memory = out(memory, "memory")?;
            let cache = object(cache, "cache")?;
            check_struct((*memory).struct_size, std::mem::size_of::<etkv_memory>(), "memory")?;
            let found = cache.lock().memory();
            (*memory).allocated = found.allocated;
            (*memory).used = found.used;
            (*memory).at_capacity = found.at_capacity;
            Ok(())
        })
    }
}

/// # Safety
/// Pointers are NULL or as the header says.
unsafe fn read<T>(
    cache: *const etkv_cache,
    value: *mut T,
    name: &str,
    error: *mut *mut etkv_error,
    ask: impl FnOnce(&dyn AttendCache) -> T,
) -> i32 {
    // SAFETY: the caller says so.
    unsafe {
        boundary(error, || {
            let value = out(value, name)?;
            *value = ask(&*object(cache, "cache")?.lock());
            Ok(())
        })
    }
}

/// # Safety
/// Pointers are NULL or as the header says.
unsafe fn change(
    cache: *const etkv_cache,
    error: *mut *mut etkv_error,
    act: impl FnOnce(&mut dyn AttendCache) -> Result<()>,
) -> i32 {
    // SAFETY: the caller says so.
    unsafe {
        boundary(error, || {
            let cache = object(cache, "cache")?;
            // Buffers may go: MLX first, then the cache, as a step takes them.
            crate::mlx::run(|| act(&mut *cache.lock()))
        })
    }
}
