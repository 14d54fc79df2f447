//! `etkv_session`: a cache of the caller's own, and its key.

use std::ffi::{c_char, CString};

use super::boundary::{boundary, check_struct, object, out, text};
use super::cache::etkv_cache;
use super::error::etkv_error;
use crate::config::{CacheConfig, Growth, LayerConfig, LayerPolicy};
use crate::error::{fail, Result};
use crate::format::KvFormat;
use crate::session::Session;

/// A session; see the header.
#[allow(non_camel_case_types)]
pub struct etkv_session {
    session: Session,
    key: CString,
}

/// What one layer stores; see the header.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy)]
pub struct etkv_layer_config {
    struct_size: usize,
    n_kv_heads: i32,
    k_head_dim: i32,
    v_head_dim: i32,
    window: i32,
}

/// What a cache is to be; see the header.
#[allow(non_camel_case_types)]
#[repr(C)]
pub struct etkv_cache_config {
    struct_size: usize,
    layers: *const etkv_layer_config,
    n_layers: usize,
    capacity: i32,
    min_chunk: i32,
    k_format: i32,
    v_format: i32,
}

/// Makes a cache and registers it under a new key.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_session_new(
    backend_id: *const c_char,
    kind: *const c_char,
    config: *const etkv_cache_config,
    session: *mut *mut etkv_session,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller says so.
    unsafe {
        boundary(error, || {
            let session = out(session, "session")?;
            let backend_id = text(backend_id, "backend_id")?;
            let kind = text(kind, "kind")?;
            let made = Session::new(backend_id, kind, read_config(object(config, "config")?)?)?;
            let key = CString::new(made.key()).unwrap_or_default();
            *session = Box::into_raw(Box::new(etkv_session { session: made, key }));
            Ok(())
        })
    }
}

/// Takes the key out of the registry.
///
/// # Safety
/// `session` is NULL or a session that is not freed.
#[no_mangle]
pub unsafe extern "C" fn etkv_session_free(session: *mut etkv_session) {
    if !session.is_null() {
        // SAFETY: it came from `etkv_session_new`.
        drop(unsafe { Box::from_raw(session) });
    }
}

/// The key; NULL if `session` is NULL.
///
/// # Safety
/// `session` is NULL or a session that is not freed.
#[no_mangle]
pub unsafe extern "C" fn etkv_session_key(session: *const etkv_session) -> *const c_char {
    // SAFETY: the caller says so.
    unsafe { session.as_ref() }.map_or(std::ptr::null(), |session| session.key.as_ptr())
}

/// A new handle on the session's cache; NULL if `session` is NULL.
///
/// # Safety
/// `session` is NULL or a session that is not freed.
#[no_mangle]
pub unsafe extern "C" fn etkv_session_cache(session: *const etkv_session) -> *mut etkv_cache {
    // SAFETY: the caller says so.
    unsafe { session.as_ref() }
        .map_or(std::ptr::null_mut(), |session| etkv_cache::boxed(session.session.cache()))
}

/// # Safety
/// `config.layers` points to `config.n_layers` structs, `layers->struct_size`
/// bytes apart.
unsafe fn read_config(config: &etkv_cache_config) -> Result<CacheConfig> {
    check_struct(config.struct_size, std::mem::size_of::<etkv_cache_config>(), "config")?;
    Ok(CacheConfig {
        // SAFETY: the caller says so.
        layers: unsafe { read_layers(config)? },
        capacity: config.capacity,
        growth: Growth::Doubling {
            first: match config.min_chunk {
                0 => Growth::DEFAULT_CHUNK,
                slots => slots,
            },
        },
        max_step: CacheConfig::DEFAULT_MAX_STEP,
        k_format: format(config.k_format, "k_format")?,
        v_format: format(config.v_format, "v_format")?,
        quantize_after: None,
        float_format: KvFormat::default(),
    })
}

/// # Safety
/// As [`read_config`].
unsafe fn read_layers(config: &etkv_cache_config) -> Result<Vec<LayerConfig>> {
    const MAX_LAYERS: usize = 65_536;
    if config.n_layers > MAX_LAYERS {
        fail!(InvalidArgument, "n_layers is {}, the most is {MAX_LAYERS}", config.n_layers);
    }
    if config.n_layers == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: the caller says so.
    let first = unsafe { object(config.layers, "config.layers")? };
    // Callers of another version have structs of another size.
    let stride = first.struct_size;
    check_struct(stride, std::mem::size_of::<etkv_layer_config>(), "layers")?;
    (0..config.n_layers)
        .map(|id| {
            // SAFETY: within the caller's list.
            let layer = unsafe {
                config
                    .layers
                    .cast::<u8>()
                    .add(id * stride)
                    .cast::<etkv_layer_config>()
                    .read_unaligned()
            };
            if layer.struct_size != stride {
                fail!(
                    InvalidArgument,
                    "layer {id}: struct_size is {}, that of layer 0 is {stride}",
                    layer.struct_size
                );
            }
            if layer.window < 0 {
                fail!(InvalidArgument, "layer {id}: window is {}, the least is 0", layer.window);
            }
            Ok(LayerConfig {
                n_kv_heads: layer.n_kv_heads,
                k_head_dim: layer.k_head_dim,
                v_head_dim: if layer.v_head_dim == 0 { layer.k_head_dim } else { layer.v_head_dim },
                policy: match layer.window {
                    0 => LayerPolicy::Full,
                    window => LayerPolicy::Window { window, sinks: 0 },
                },
            })
        })
        .collect()
}

fn format(number: i32, name: &str) -> Result<KvFormat> {
    match number {
        0 => Ok(KvFormat::default()),
        1 => Ok(KvFormat::F32),
        2 => Ok(KvFormat::F16),
        3 => Ok(KvFormat::Bf16),
        _ => fail!(InvalidArgument, "{name} is {number}, formats are 0 to 3"),
    }
}
