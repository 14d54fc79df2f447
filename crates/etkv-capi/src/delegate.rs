//! `etkv_delegate`: load options, checks and errors of the delegate.

use std::cell::RefCell;
use std::ffi::c_char;

use etkv_core::{Result, Status};

use super::boundary::{c_functions, list, text};
use super::error::etkv_error;
use super::handle;

/// The load options that are text. An empty string is an absent option.
#[derive(Debug, Clone, Default)]
pub(crate) struct LoadTexts {
    /// The key of the cache to bind.
    pub cache_key: String,
    /// Which rows of logits to return.
    pub logits: String,
    /// The passes that change the program.
    pub passes: String,
    /// The name of the buffers that the program keeps.
    pub buffers: String,
}

thread_local! {
    static REPORTED: RefCell<Option<etkv_error>> = const { RefCell::new(None) };
    static LOAD_OPTIONS: RefCell<LoadTexts> = RefCell::default();
}

/// Keeps the delegate's error for [`etkv_delegate_take_error`] on this thread.
#[cfg_attr(not(feature = "delegate"), allow(dead_code))]
pub(crate) fn report(status: i32, message: &str) {
    let status = if status == 0 { Status::Internal as i32 } else { status };
    // If the thread is ending and its storage is gone, the error is dropped.
    let _ = REPORTED.try_with(|kept| kept.replace(Some(etkv_error::new(status, message))));
}

/// Returns the load options that ExecuTorch passed. Absent options are read from this thread's options.
#[cfg_attr(not(feature = "delegate"), allow(dead_code))]
pub(crate) fn or_of_thread(given: [&str; 4]) -> LoadTexts {
    let [cache_key, logits, passes, buffers] = given;
    let set = LOAD_OPTIONS.try_with(|set| set.borrow().clone()).unwrap_or_default();
    let or = |given: &str, set: String| if given.is_empty() { set } else { given.to_owned() };
    LoadTexts {
        cache_key: or(cache_key, set.cache_key),
        logits: or(logits, set.logits),
        passes: or(passes, set.passes),
        buffers: or(buffers, set.buffers),
    }
}

/// Returns the error that the delegate last reported on the calling thread, and forgets it.
#[no_mangle]
pub extern "C" fn etkv_delegate_take_error() -> *mut etkv_error {
    let taken = REPORTED.try_with(RefCell::take).ok().flatten();
    taken.map_or(std::ptr::null_mut(), handle::give)
}

/// Rolls back the unfinished step of a CPU program that the calling thread began.
#[no_mangle]
pub extern "C" fn etkv_delegate_abort_forward() {
    etkv_cpu::program::abort_forward();
}

c_functions!(
    /// Sets the options with which the calling thread loads later programs.
    unsafe fn etkv_delegate_set_load_options(
        cache_key: *const c_char,
        logits: *const c_char,
        passes: *const c_char,
        buffers: *const c_char,
    ) -> Result<()> {
        let optional = |pointer: *const c_char, name| -> Result<String> {
            Ok(if pointer.is_null() { String::new() } else { text(pointer, name)?.to_owned() })
        };
        let texts = LoadTexts {
            cache_key: optional(cache_key, "cache_key")?,
            logits: optional(logits, "logits")?,
            passes: optional(passes, "passes")?,
            buffers: optional(buffers, "buffers")?,
        };
        program::check_options(&texts)?;
        LOAD_OPTIONS.with(|set| set.replace(texts));
        Ok(())
    }

    /// Sets to zero the buffers of the programs that were loaded with this name.
    unsafe fn etkv_delegate_reset_buffers(buffers: *const c_char) -> Result<()> {
        program::reset_buffers(text(buffers, "buffers")?)
    }

    /// Checks whether this build can run a program.
    unsafe fn etkv_delegate_check(payload: *const u8, n_bytes: usize) -> Result<()> {
        program::check(list(payload, n_bytes, "payload")?)
    }
);

#[cfg(feature = "delegate")]
mod program {
    use etkv_core::Result;
    use etkv_cpu::program::Call;
    use etkv_delegate::LoadOptions;

    use super::LoadTexts;

    pub fn check_options(texts: &LoadTexts) -> Result<()> {
        LoadOptions::parse(&texts.cache_key, &texts.logits, &texts.passes, &texts.buffers)?;
        Ok(())
    }

    #[cfg(feature = "mlx-programs")]
    pub fn reset_buffers(name: &str) -> Result<()> {
        Ok(etkv_mlx_program::Program::reset_buffers(name)?)
    }

    #[cfg(not(feature = "mlx-programs"))]
    pub fn reset_buffers(name: &str) -> Result<()> {
        etkv_core::fail!(InvalidArgument, "no loaded program keeps buffers named `{name}`");
    }

    /// Distinguishes payloads by their first byte: the payload of a CPU program's call is JSON.
    pub fn check(payload: &[u8]) -> Result<()> {
        if payload.starts_with(b"{") {
            return Call::check(payload);
        }
        check_mlx(payload)
    }

    #[cfg(feature = "mlx-programs")]
    fn check_mlx(payload: &[u8]) -> Result<()> {
        Ok(etkv_mlx_program::Program::check(payload)?)
    }

    #[cfg(not(feature = "mlx-programs"))]
    fn check_mlx(_: &[u8]) -> Result<()> {
        etkv_core::fail!(
            Unsupported,
            "this libetkv was built without MLX, which the program needs"
        );
    }
}

#[cfg(not(feature = "delegate"))]
mod program {
    use etkv_core::{fail, Result};

    use super::LoadTexts;

    pub fn check_options(_: &LoadTexts) -> Result<()> {
        fail!(Unsupported, "this libetkv was built without the interpreter of programs");
    }

    pub fn reset_buffers(_: &str) -> Result<()> {
        fail!(Unsupported, "this libetkv was built without the interpreter of programs");
    }

    pub fn check(_: &[u8]) -> Result<()> {
        fail!(Unsupported, "this libetkv was built without the interpreter of programs");
    }
}
