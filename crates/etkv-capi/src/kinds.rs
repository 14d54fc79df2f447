//! The kinds of caches.

use std::ffi::{c_char, c_void, CString};

use super::backends;
use super::boundary::value;

/// Calls `visit` for each kind of cache.
#[no_mangle]
pub extern "C" fn etkv_kinds(
    visit: Option<extern "C" fn(*mut c_void, *const c_char, *const c_char)>,
    context: *mut c_void,
) {
    let Some(visit) = visit else { return };
    value((), || {
        let as_c = |name: String| CString::new(name).unwrap_or_default();
        for (backend_id, kind) in backends::builders().kinds() {
            let (backend_id, kind) = (as_c(backend_id), as_c(kind));
            visit(context, backend_id.as_ptr(), kind.as_ptr());
        }
        Ok(())
    });
}
