//! `etkv_cache_config`: the config of a cache, read from its C struct.

use std::ffi::c_char;

use etkv_core::{
    fail, CacheConfig, Growth, KvFormat, LayerConfig, LayerPolicy, Memory, RecurrentLayer, Result,
};

use super::boundary::{c_functions, out, put, read_grown, text};
use super::memory::{etkv_memory, fill_memory};

/// What one attention layer stores; see the header.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy)]
pub struct etkv_layer_config {
    pub(super) struct_size: usize,
    pub(super) n_kv_heads: i32,
    pub(super) k_head_dim: i32,
    pub(super) v_head_dim: i32,
    pub(super) window: i32,
    pub(super) sinks: i32,
    pub(super) dtype: i32,
    pub(super) values_in_keys: i32,
    pub(super) chunk: i32,
}

/// The size of the struct before it had `values_in_keys`.
const WITHOUT_VALUES_IN_KEYS: usize = std::mem::offset_of!(etkv_layer_config, values_in_keys);

/// The sizes of one recurrent layer; see the header.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy)]
pub struct etkv_recurrent_layer_config {
    pub(super) struct_size: usize,
    /// The fields from `kind` to `channel_decay`.
    pub(super) fields: [i32; RecurrentLayer::N_FIELDS],
}

/// The config of a cache; see the header.
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
    recurrent_layers: *const etkv_recurrent_layer_config,
    n_recurrent_layers: usize,
    anchors: i32,
    checkpoints: i32,
}

/// The size of the struct before it had `recurrent_layers`.
const WITHOUT_RECURRENT_LAYERS: usize = std::mem::offset_of!(etkv_cache_config, recurrent_layers);

/// The value of `checkpoints` in a config without checkpoints.
const NO_CHECKPOINTS: i32 = -1;

c_functions!(
    /// Stores the bytes of one row of a format.
    unsafe fn etkv_format_row_bytes(
        format: *const c_char,
        head_dim: i32,
        bytes: *mut u64,
    ) -> Result<()> {
        put(bytes, "bytes", || {
            let format: KvFormat = text(format, "format")?.parse()?;
            if head_dim < 1 {
                fail!(InvalidArgument, "head_dim is {head_dim}, the minimum is 1");
            }
            format.check(head_dim)?;
            Ok(format.row_bytes(head_dim as usize) as u64)
        })
    }

    /// Fills `memory` with the bytes that a contiguous cache would hold.
    unsafe fn etkv_cache_config_estimate(
        config: *const etkv_cache_config,
        length: i32,
        memory: *mut etkv_memory,
    ) -> Result<()> {
        estimate(config, length, memory, CacheConfig::estimate)
    }

    /// Fills `memory` with the bytes that a cache of several sequences would hold.
    unsafe fn etkv_cache_config_estimate_shared(
        config: *const etkv_cache_config,
        length: i32,
        memory: *mut etkv_memory,
    ) -> Result<()> {
        estimate(config, length, memory, CacheConfig::estimate_shared)
    }
);

/// # Safety
/// Pointers are NULL or as the header says.
unsafe fn estimate(
    config: *const etkv_cache_config,
    length: i32,
    memory: *mut etkv_memory,
    at: fn(&CacheConfig, i32) -> Memory,
) -> Result<()> {
    // SAFETY: the caller keeps the contract above.
    unsafe {
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
    }
}

/// # Safety
/// `config` is NULL or points to a struct as the header says.
pub(super) unsafe fn read_config(config: *const etkv_cache_config) -> Result<CacheConfig> {
    // SAFETY: the caller keeps the contract above.
    unsafe {
        let (config, _) = read_grown(config, WITHOUT_RECURRENT_LAYERS, "config")?;
        refuse_reserved(config.reserved, "config")?;
        if config.quantized_kv_start < 0 {
            fail!(
                InvalidArgument,
                "quantized_kv_start is {}, the minimum is 0, for quantization from the start",
                config.quantized_kv_start
            );
        }
        let raw_layers =
            raw_list(config.layers, config.n_layers, WITHOUT_VALUES_IN_KEYS, ["layers", "layer"])?;
        let recurrent_layers = raw_list(
            config.recurrent_layers,
            config.n_recurrent_layers,
            std::mem::size_of::<etkv_recurrent_layer_config>(),
            ["recurrent_layers", "recurrent layer"],
        )?;
        let format = |name, field| match format(name, field)? {
            Some(format) => Ok(format),
            None => default_format(&raw_layers, field),
        };
        let layers = read_layers(&raw_layers, "layer", read_layer)?;
        let all_in_keys = !layers.is_empty() && layers.iter().all(|layer| layer.values_in_keys);
        let k_format = format(config.k_format, "k_format")?;
        let v_format = match all_in_keys && config.v_format.is_null() {
            true => k_format,
            false => format(config.v_format, "v_format")?,
        };
        Ok(CacheConfig {
            layers,
            recurrent_layers: read_layers(&recurrent_layers, "recurrent layer", |layer| {
                RecurrentLayer::from_fields(layer.fields)
            })?,
            anchors: match config.anchors {
                0 => CacheConfig::DEFAULT_ANCHORS,
                anchors => anchors,
            },
            checkpoints: checkpoints(config.checkpoints)?,
            capacity: config.capacity,
            max_step_tokens: match config.max_step_tokens {
                0 => CacheConfig::DEFAULT_MAX_STEP_TOKENS,
                tokens => tokens,
            },
            growth: growth(config.growth, config.min_chunk)?,
            k_format,
            v_format,
            quantized_kv_start: (config.quantized_kv_start > 0)
                .then_some(config.quantized_kv_start),
            float_format: match format(config.float_format, "float_format") {
                // Without `quantized_kv_start` no row is stored in this format, so any format will do.
                Err(_) if config.float_format.is_null() && config.quantized_kv_start == 0 => {
                    KvFormat::default()
                }
                format => format?,
            },
        })
    }
}

/// Copies `n` structs of the caller. The structs of older callers have at least `least` bytes; missing fields become
/// zero. `names` are the names of the list and of one element, for messages.
///
/// # Safety
/// `first` points to `n` structs that begin with their size. The structs are that many bytes apart.
unsafe fn raw_list<T: Copy>(
    first: *const T,
    n: usize,
    least: usize,
    names: [&str; 2],
) -> Result<Vec<T>> {
    const MAX_LAYERS: usize = CacheConfig::MAX_LAYERS as usize;
    let [list, one] = names;
    if n > MAX_LAYERS {
        fail!(InvalidArgument, "n_{list} is {n}, the maximum is {MAX_LAYERS}");
    }
    if n == 0 {
        return Ok(Vec::new());
    }
    // SAFETY: the caller keeps the contract above.
    unsafe { read_grown(first, least, list)? };
    // SAFETY: it begins with its size.
    let size = unsafe { first.cast::<usize>().read() };
    (0..n)
        .map(|id| {
            // SAFETY: within the caller's list. All its structs have the size of the first, which depends on the
            // caller's version.
            unsafe {
                let at = first.byte_add(id * size);
                let own_size = at.cast::<usize>().read();
                if own_size != size {
                    fail!(
                        InvalidArgument,
                        "{one} {id}: struct_size is {own_size}, expected {size} as for {one} 0"
                    );
                }
                Ok(read_grown(at, least, list)?.0)
            }
        })
        .collect()
}

fn read_layers<Raw, Layer>(
    layers: &[Raw],
    name: &str,
    read: impl Fn(&Raw) -> Result<Layer>,
) -> Result<Vec<Layer>> {
    let read_one = |(id, layer)| read(layer).map_err(|error| error.at(format_args!("{name} {id}")));
    layers.iter().enumerate().map(read_one).collect()
}

fn checkpoints(checkpoints: i32) -> Result<i32> {
    match checkpoints {
        0 => Ok(CacheConfig::DEFAULT_CHECKPOINTS),
        NO_CHECKPOINTS => Ok(0),
        1.. => Ok(checkpoints),
        _ => fail!(
            InvalidArgument,
            "checkpoints is {checkpoints}, the minimum is {NO_CHECKPOINTS}, for none"
        ),
    }
}

fn read_layer(layer: &etkv_layer_config) -> Result<LayerConfig> {
    let policy = match (layer.window, layer.sinks) {
        (0, 0) if layer.chunk == 0 => LayerPolicy::Full,
        (0, 0) => LayerPolicy::Chunk { chunk: layer.chunk },
        (window, sinks) if layer.chunk != 0 => fail!(
            InvalidArgument,
            "chunk is {}, expected 0 for a layer with a window of {window} and {sinks} sinks",
            layer.chunk
        ),
        (0, sinks) => {
            fail!(InvalidArgument, "sinks is {sinks}, expected 0 for a layer without a window")
        }
        (window, _) if window < 0 => fail!(InvalidArgument, "window is {window}, the minimum is 0"),
        (window, sinks) => LayerPolicy::Window { window, sinks },
    };
    dtype(layer)?;
    let values_in_keys = match layer.values_in_keys {
        0 => false,
        1 => true,
        other => fail!(InvalidArgument, "values_in_keys is {other}, expected 0 or 1"),
    };
    Ok(LayerConfig {
        n_kv_heads: layer.n_kv_heads,
        k_head_dim: layer.k_head_dim,
        v_head_dim: if layer.v_head_dim == 0 { layer.k_head_dim } else { layer.v_head_dim },
        policy,
        values_in_keys,
    })
}

/// The dtypes in the order of `etkv_dtype`.
pub(super) const DTYPES: [Option<KvFormat>; 4] =
    [None, Some(KvFormat::F32), Some(KvFormat::F16), Some(KvFormat::Bf16)];

/// Returns the dtype that a layer computes keys and values in, as a format; `None` if it is unknown.
fn dtype(layer: &etkv_layer_config) -> Result<Option<KvFormat>> {
    match usize::try_from(layer.dtype).ok().and_then(|at| DTYPES.get(at)) {
        Some(&dtype) => Ok(dtype),
        None => fail!(InvalidArgument, "dtype is {}, expected 0 to 3", layer.dtype),
    }
}

/// Returns the default format of `field`: the dtype that the layers compute in.
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
    // SAFETY: the caller keeps the contract above.
    unsafe { given_format(name, field).map(Some) }
}

/// Returns the format of that name. NULL is an error.
///
/// # Safety
/// As for [`format`](fn@format).
pub(super) unsafe fn given_format(name: *const c_char, field: &str) -> Result<KvFormat> {
    // SAFETY: the caller keeps the contract above.
    unsafe { text(name, field)? }.parse().map_err(|error: etkv_core::Error| error.at(field))
}
