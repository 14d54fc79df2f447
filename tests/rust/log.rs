//! The log callback in a process whose Rust code has its own subscriber. A process can have only one, so this is a
//! separate program.

use std::ffi::{c_char, c_void, CStr};
use std::ptr::null_mut;

use tracing_subscriber::layer::SubscriberExt;

// Links the C interface.
use etkv_capi as _;

extern "C" {
    fn etkv_set_log_callback(
        filter: *const c_char,
        callback: Option<unsafe extern "C" fn(i32, *const c_char, *const c_char, *mut c_void)>,
        user: *mut c_void,
        error: *mut *mut c_void,
    ) -> i32;
    fn etkv_error_message(error: *const c_void) -> *const c_char;
    fn etkv_error_free(error: *mut c_void);
}

unsafe extern "C" fn ignore(_: i32, _: *const c_char, _: *const c_char, _: *mut c_void) {}

#[test]
fn a_subscriber_of_the_application_stays_the_one() {
    let own = tracing_subscriber::registry().with(None::<tracing_subscriber::layer::Identity>);
    tracing::subscriber::set_global_default(own).unwrap();
    for _ in 0..2 {
        let mut error = null_mut();
        // SAFETY: the strings end in zero bytes, and the error is freed once.
        unsafe {
            let status =
                etkv_set_log_callback(c"debug".as_ptr(), Some(ignore), null_mut(), &mut error);
            assert_eq!(status, 9);
            let message = CStr::from_ptr(etkv_error_message(error)).to_str().unwrap();
            assert!(message.contains("already has a `tracing` subscriber"), "{message}");
            etkv_error_free(error);
        }
    }
    // Removing an absent callback is not an error. SAFETY: no pointers are passed.
    let status = unsafe { etkv_set_log_callback(std::ptr::null(), None, null_mut(), null_mut()) };
    assert_eq!(status, 0);
}
