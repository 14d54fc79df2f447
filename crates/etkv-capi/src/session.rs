//! `etkv_session`: a cache and its key.

use std::ffi::{c_char, CString};
use std::ptr::{null, null_mut};

use etkv_core::{Result, Session};

use super::backends;
use super::boundary::{c_functions, free, put, text, value};
use super::cache::etkv_cache;
use super::config::{etkv_cache_config, read_config};
use super::handle::{self, Object};
use super::seq::etkv_seq_cache;
use super::tree::etkv_tree_cache;

/// A session; see the header.
#[allow(non_camel_case_types)]
pub struct etkv_session {
    session: Session,
    key: CString,
}

impl Object for etkv_session {
    const NAME: &'static str = "etkv_session";
}

c_functions!(
    /// Makes a cache and registers it under a new key.
    unsafe fn etkv_session_new(
        backend_id: *const c_char,
        kind: *const c_char,
        config: *const etkv_cache_config,
        session: *mut *mut etkv_session,
    ) -> Result<()> {
        put(session, "session", || {
            let backend_id = text(backend_id, "backend_id")?;
            let kind = text(kind, "kind")?;
            let config = read_config(config)?;
            let session = Session::new(backends::builders(), backend_id, kind, config)?;
            let key = CString::new(session.key()).unwrap_or_default();
            Ok(handle::give(etkv_session { session, key }))
        })
    }

    /// Makes a handle on the session's cache, as a cache of several sequences.
    unsafe fn etkv_session_seq(
        session: *const etkv_session,
        cache: *mut *mut etkv_seq_cache,
    ) -> Result<()> {
        put(cache, "cache", || {
            etkv_seq_cache::give(handle::look_up(session, "session")?.session.cache())
        })
    }

    /// Makes a handle on the session's cache, as a cache with trees.
    unsafe fn etkv_session_tree(
        session: *const etkv_session,
        cache: *mut *mut etkv_tree_cache,
    ) -> Result<()> {
        put(cache, "cache", || {
            etkv_tree_cache::give(handle::look_up(session, "session")?.session.cache())
        })
    }
);

/// Frees a session, and removes its key from the registry.
#[no_mangle]
pub extern "C" fn etkv_session_free(session: *mut etkv_session) {
    free(session);
}

/// Returns the key. Returns NULL if `session` is no live handle.
#[no_mangle]
pub extern "C" fn etkv_session_key(session: *const etkv_session) -> *const c_char {
    // The table of handles keeps the string until the handle is freed.
    value(null(), || Ok(handle::look_up(session, "session")?.key.as_ptr()))
}

/// Returns a handle on the session's cache. Returns NULL if `session` is no live handle.
#[no_mangle]
pub extern "C" fn etkv_session_cache(session: *const etkv_session) -> *mut etkv_cache {
    value(null_mut(), || {
        let cache = handle::look_up(session, "session")?.session.cache();
        Ok(handle::give(etkv_cache { cache }))
    })
}
