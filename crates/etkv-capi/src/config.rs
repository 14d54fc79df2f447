//! `etkv_cache_config`: the config of a cache, read from its C struct.

use std::ffi::c_char;

use etkv_core::{fail, CacheConfig, Growth, KvFormat, LayerConfig, LayerPolicy, Memory, Result};

use super::boundary::{boundary, out, read_struct, text};
use super::error::etkv_error;
use super::memory::{etkv_memory, fill_memory};

/// What one attention layer stores; see the header.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy)]
pub struct etkv_layer_config {
    struct_size: usize,
    n_kv_heads: i32,
    k_head_dim: i32,
    v_head_dim: i32,
    window: i32,
    sinks: i32,
    dtype: i32,
}

/// What is stored of one attention layer; see the header.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy)]
pub struct etkv_cache_config {
    struct_size: usize,
    layers: *const etkv_layer_config,
    n_layers: usize,
    k_format: *const c_char,
    v_format: *const c_char,
    float_format: *const c_char,
    capacity: i32,
    max_step_tokens: i32,
    growth: i32,
    min_chunk: i32,
    quantized_kv_start: i32,
    reserved: i32,
}

/// Stores the bytes of one row of a format.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_format_row_bytes(
    format: *const c_char,
    head_dim: i32,
    bytes: *mut u64,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller says so.
    unsafe {
        boundary(error, || {
            let bytes = out(bytes, "bytes")?;
            let format: KvFormat = text(format, "format")?.parse()?;
            if head_dim < 1 {
                fail!(InvalidArgument, "head_dim is {head_dim}, the least is 1");
            }
            format.check(head_dim)?;
            bytes.write(format.row_bytes(head_dim as usize) as u64);
            Ok(())
        })
    }
}

/// Fills `memory` with the bytes that a contiguous cache would hold.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_cache_config_estimate(
    config: *const etkv_cache_config,
    length: i32,
    memory: *mut etkv_memory,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller says so.
    unsafe { estimate(config, length, memory, error, CacheConfig::estimate) }
}

/// Fills `memory` with the bytes that a cache of several sequences would hold.
///
/// # Safety
/// Pointers are NULL or as the header says.
#[no_mangle]
pub unsafe extern "C" fn etkv_cache_config_estimate_shared(
    config: *const etkv_cache_config,
    length: i32,
    memory: *mut etkv_memory,
    error: *mut *mut etkv_error,
) -> i32 {
    // SAFETY: the caller says so.
    unsafe { estimate(config, length, memory, error, CacheConfig::estimate_shared) }
}

/// # Safety
/// Pointers are NULL or as the header says.
unsafe fn estimate(
    config: *const etkv_cache_config,
    length: i32,
    memory: *mut etkv_memory,
    error: *mut *mut etkv_error,
    at: fn(&CacheConfig, i32) -> Memory,
) -> i32 {
    // SAFETY: the caller says so.
    unsafe {
        boundary(error, || {
            let memory = out(memory, "memory")?;
            let config = read_config(config)?;
            config.validate()?;
            if !(0..=config.capacity).contains(&length) {
                fail!(
                    InvalidArgument,
                    "length is {length}, expected 0 to the capacity of {}",
                    config.capacity
                );
            }
            fill_memory(memory, || Ok(at(&config, length)))
        })
    }
}

/// # Safety
/// `config` is NULL or points to a struct as the header says.
pub(super) unsafe fn read_config(config: *const etkv_cache_config) -> Result<CacheConfig> {
    // SAFETY: the caller says so.
    unsafe {
        let config = read_struct(config, "config")?;
        refuse_reserved(config.reserved, "config")?;
        if config.quantized_kv_start < 0 {
            fail!(
                InvalidArgument,
                "quantized_kv_start is {}, the least is 0, for never",
                config.quantized_kv_start
            );
        }
        let raw_layers = raw_layers(&config)?;
        let format = |name, field| match format(name, field)? {
            Some(format) => Ok(format),
            None => default_format(&raw_layers, field),
        };
        Ok(CacheConfig {
            recurrent_layers: Vec::new(),
            anchors: CacheConfig::DEFAULT_ANCHORS,
            checkpoints: CacheConfig::DEFAULT_CHECKPOINTS,
            layers: read_layers(&raw_layers)?,
            capacity: config.capacity,
            max_step_tokens: match config.max_step_tokens {
                0 => CacheConfig::DEFAULT_MAX_STEP_TOKENS,
                tokens => tokens,
            },
            growth: growth(config.growth, config.min_chunk)?,
            k_format: format(config.k_format, "k_format")?,
            v_format: format(config.v_format, "v_format")?,
            quantized_kv_start: (config.quantized_kv_start > 0)
                .then_some(config.quantized_kv_start),
            float_format: match format(config.float_format, "float_format") {
                // Nothing is stored in that dtype.
                Err(_) if config.float_format.is_null() && config.quantized_kv_start == 0 => {
                    KvFormat::default()
                }
                format => format?,
            },
        })
    }
}

/// # Safety
/// `config.layers` points to `config.n_layers` structs, `layers->struct_size`
/// bytes apart.
unsafe fn raw_layers(config: &etkv_cache_config) -> Result<Vec<etkv_layer_config>> {
    const MAX_LAYERS: usize = 65_536;
    if config.n_layers > MAX_LAYERS {
        fail!(InvalidArgument, "n_layers is {}, the most is {MAX_LAYERS}", config.n_layers);
    }
    if config.n_layers == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: the caller says so.
    let first = unsafe { read_struct(config.layers, "layers")? };
    (0..config.n_layers)
        .map(|id| {
            // SAFETY: within the caller's list, whose structs have the size of the
            // first: callers of another version have structs of another size.
            unsafe {
                let at = config.layers.byte_add(id * first.struct_size);
                if at.cast::<usize>().read() != first.struct_size {
                    fail!(
                        InvalidArgument,
                        "layer {id}: struct_size is {}, that of layer 0 is {}",
                        at.cast::<usize>().read(),
                        first.struct_size
                    );
                }
                Ok(at.read())
            }
        })
        .collect()
}

fn read_layers(layers: &[etkv_layer_config]) -> Result<Vec<LayerConfig>> {
    let read =
        |(id, layer)| read_layer(layer).map_err(|error| error.at(format_args!("layer {id}")));
    layers.iter().enumerate().map(read).collect()
}

fn read_layer(layer: &etkv_layer_config) -> Result<LayerConfig> {
    let policy = match (layer.window, layer.sinks) {
        (0, 0) => LayerPolicy::Full,
        (0, sinks) => fail!(InvalidArgument, "sinks is {sinks}, for a layer without a window"),
        (window, _) if window < 0 => fail!(InvalidArgument, "window is {window}, the least is 0"),
        (window, sinks) => LayerPolicy::Window { window, sinks },
    };
    dtype(layer)?;
    Ok(LayerConfig {
        n_kv_heads: layer.n_kv_heads,
        k_head_dim: layer.k_head_dim,
        v_head_dim: if layer.v_head_dim == 0 { layer.k_head_dim } else { layer.v_head_dim },
        policy,
    })
}

/// Returns the format of the dtype that a layer's keys and values are computed in; `None` if it is unknown.
fn dtype(layer: &etkv_layer_config) -> Result<Option<KvFormat>> {
    match layer.dtype {
        0 => Ok(None),
        1 => Ok(Some(KvFormat::F32)),
        2 => Ok(Some(KvFormat::F16)),
        3 => Ok(Some(KvFormat::Bf16)),
        other => fail!(InvalidArgument, "dtype is {other}, expected 0 to 3"),
    }
}

/// Returns the format of `field` in a config that names none: what the layers are computed in.
fn default_format(layers: &[etkv_layer_config], field: &str) -> Result<KvFormat> {
    let name = |dtype: Option<KvFormat>| dtype.map_or("unknown".into(), String::from);
    let Some(first) = layers.first() else {
        return Ok(KvFormat::default());
    };
    let dtype_of_first = dtype(first).map_err(|error| error.at("layer 0"))?;
    for (id, layer) in layers.iter().enumerate() {
        let other = dtype(layer).map_err(|error| error.at(format_args!("layer {id}")))?;
        if other != dtype_of_first {
            fail!(
                InvalidArgument,
                "{field} is not set, and the dtype of layer {id} is {}, that of layer 0 {}; set {field}",
                name(other),
                name(dtype_of_first)
            );
        }
    }
    Ok(dtype_of_first.unwrap_or_default())
}

/// Refuses a reserved field that is not 0: a later version may give it a meaning.
fn refuse_reserved(reserved: i32, name: &str) -> Result<()> {
    if reserved != 0 {
        fail!(InvalidArgument, "{name}.reserved is {reserved}, expected 0 in this version");
    }
    Ok(())
}

fn growth(growth: i32, min_chunk: i32) -> Result<Growth> {
    let slots = if min_chunk == 0 { Growth::DEFAULT_CHUNK } else { min_chunk };
    let growth = match growth {
        0 => return Ok(Growth::Doubling { first: slots }),
        1 => return Ok(Growth::Step { step: slots }),
        2 => Growth::Exact,
        3 => Growth::Upfront,
        _ => fail!(InvalidArgument, "growth is {growth}, expected 0 to 3"),
    };
    if min_chunk != 0 {
        fail!(InvalidArgument, "min_chunk is {min_chunk}, expected 0 for a growth without chunks");
    }
    Ok(growth)
}

/// Returns the format of that name, or `None` for NULL.
///
/// # Safety
/// `name` is NULL or points to a string that ends in a zero byte.
unsafe fn format(name: *const c_char, field: &str) -> Result<Option<KvFormat>> {
    if name.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller says so.
    unsafe { given_format(name, field).map(Some) }
}

/// Returns the format of that name. NULL is an error.
///
/// # Safety
/// As for [`format`](fn@format).
pub(super) unsafe fn given_format(name: *const c_char, field: &str) -> Result<KvFormat> {
    // SAFETY: the caller says so.
    unsafe { text(name, field)? }.parse().map_err(|error: etkv_core::Error| error.at(field))
}
