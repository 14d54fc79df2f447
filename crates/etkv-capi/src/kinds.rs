//! Which kinds of caches there are.

use std::ffi::{c_char, c_void, CString};

use etkv_core::{fail, Result};

use super::boundary::boundary;
use super::error::etkv_error;

/// Calls `visit` for each kind that caches can be made of.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_kinds(
    visit: Option<extern "C" fn(*mut c_void, *const c_char, *const c_char)>,
    context: *mut c_void,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller says so.
    unsafe {
        boundary(error, || {
            let Some(visit) = visit else {
                fail!(InvalidArgument, "visit is NULL");
            };
            let as_c = |name: String| CString::new(name).unwrap_or_default();
            let kinds: Vec<(CString, CString)> = etkv::builders()
                .kinds()
                .into_iter()
                .map(|(backend_id, kind)| (as_c(backend_id), as_c(kind)))
                .collect();
            for (backend_id, kind) in &kinds {
                visit(context, backend_id.as_ptr(), kind.as_ptr());
            }
            Result::Ok(())
        })
    }
}
