//! Handles: numbers that look like pointers.
//!
//! A handle is looked up in a table, and never dereferenced. So a freed handle, a handle of another type or a foreign
//! pointer is refused, and no freed memory is read. No number is used twice.

use std::any::Any;
use std::ptr::without_provenance_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};

use dashmap::DashMap;
use etkv_core::{fail, Result};

use super::fork;

/// A type of objects that have handles. The C type has the same name as the Rust type.
pub(crate) trait Object: Any + Send + Sync {
    /// The name of the type in the header.
    const NAME: &'static str;

    /// Whether etkv counts as in use once there is such an object.
    const IN_USE: bool = true;
}

struct Entry {
    name: &'static str,
    object: Arc<dyn Any + Send + Sync>,
}

/// The live handles. No object is dropped while a part of the table is locked, because a drop may take long and may
/// wait for locks.
static LIVE: LazyLock<DashMap<usize, Entry>> = LazyLock::new(DashMap::new);

/// Bits that are set in every handle. On 64-bit machines no address of an object has them.
const MARK: usize = if usize::BITS == 64 { 0xE74B << (usize::BITS - 16) } else { 0 };

/// Returns a new handle on an object, which the caller frees.
pub(crate) fn give<T: Object>(object: T) -> *mut T {
    static NEXT: AtomicUsize = AtomicUsize::new(1);
    if T::IN_USE {
        fork::watch();
    }
    let number = MARK | NEXT.fetch_add(1, Ordering::Relaxed);
    LIVE.insert(number, Entry { name: T::NAME, object: Arc::new(object) });
    fork::HANDLES.fetch_add(1, Ordering::Relaxed);
    without_provenance_mut(number)
}

/// Returns the object of a handle. The object lives while the caller holds it, even if the handle is freed
/// meanwhile.
pub(crate) fn look_up<T: Object>(handle: *const T, name: &str) -> Result<Arc<T>> {
    if handle.is_null() {
        fail!(InvalidArgument, "{name} is NULL");
    }
    let found = LIVE.get(&handle.addr()).map(|entry| (entry.object.clone(), entry.name));
    let (object, found) = match found {
        Some(found) => found,
        None => fail!(
            InvalidArgument,
            "{name} is no live handle: it was freed, or is not from \
         etkv"
        ),
    };
    match object.downcast() {
        Ok(object) => Ok(object),
        Err(_) => fail!(InvalidArgument, "{name} is an {found}, not an {}", T::NAME),
    }
}

/// Frees a handle. Does nothing for a pointer that is no handle of this type.
pub(crate) fn reclaim<T: Object>(handle: *mut T) {
    let taken = LIVE.remove_if(&handle.addr(), |_, entry| entry.name == T::NAME);
    if taken.is_some() {
        fork::HANDLES.fetch_sub(1, Ordering::Relaxed);
    }
    // The last owner of a cache frees its buffers.
    drop(taken);
}

/// Returns the number of handles that were made and not freed.
pub(crate) fn count() -> usize {
    fork::HANDLES.load(Ordering::Relaxed)
}
