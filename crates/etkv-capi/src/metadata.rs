//! `etkv_metadata`: the facts of a program's caches, read from its constant methods.

use std::ffi::{c_char, CString};
use std::sync::LazyLock;

use etkv_core::{Error, LayerMetadata, Metadata, RecurrentLayer, Result, Status};

use super::boundary::{c_functions, fill_layers, out, read_struct, room, text, value};
use super::config::{etkv_layer_config, etkv_recurrent_layer_config, DTYPES};

/// The facts of a program's caches; see the header.
#[allow(non_camel_case_types)]
#[repr(C)]
#[derive(Clone, Copy)]
pub struct etkv_metadata {
    struct_size: usize,
    layers: *mut etkv_layer_config,
    n_layers: usize,
    recurrent_layers: *mut etkv_recurrent_layer_config,
    n_recurrent_layers: usize,
    max_step_tokens: i32,
    context_length: i32,
}

/// Returns the name of a constant method, or NULL.
#[no_mangle]
pub extern "C" fn etkv_metadata_name(index: usize) -> *const c_char {
    static NAMES: LazyLock<Vec<CString>> =
        LazyLock::new(|| Metadata::names().filter_map(|name| CString::new(name).ok()).collect());
    let none = std::ptr::null();
    value(none, || Ok(NAMES.get(index).map_or(none, |name| name.as_ptr())))
}

c_functions!(
    /// Fills `metadata`, and the structs of its layers if the caller has room for them.
    unsafe fn etkv_metadata_read(
        constants: *const c_char,
        metadata: *mut etkv_metadata,
    ) -> Result<()> {
        let target = out(metadata, "metadata")?;
        let given = read_struct(target, "metadata")?;
        let constants = serde_json::from_str(text(constants, "constants")?).map_err(|error| {
            Error::new(Status::InvalidArgument, format_args!("constants: {error}"))
        })?;
        let found = Metadata::read(&constants)?;
        let dtype = DTYPES.iter().position(|dtype| *dtype == found.dtype).unwrap_or(0) as i32;
        let layer = |struct_size, layer: &LayerMetadata| etkv_layer_config {
            struct_size,
            n_kv_heads: layer.n_kv_heads,
            k_head_dim: layer.k_head_dim,
            v_head_dim: layer.v_head_dim,
            window: layer.window,
            sinks: layer.sinks,
            dtype,
            values_in_keys: i32::from(layer.values_in_keys),
            chunk: layer.chunk,
        };
        let recurrent_layer = |struct_size, layer: &RecurrentLayer| etkv_recurrent_layer_config {
            struct_size,
            fields: layer.fields(),
        };
        let (n_layers, n_recurrent_layers) = (found.layers.len(), found.recurrent_layers.len());
        let (layers, recurrent_layers) = (given.layers, given.recurrent_layers);
        // The lists of both sorts of layers are checked before either is written.
        let size = room(layers, given.n_layers, n_layers, "metadata.layers")?;
        let name = "metadata.recurrent_layers";
        let recurrent_size =
            room(recurrent_layers, given.n_recurrent_layers, n_recurrent_layers, name)?;
        fill_layers(layers, size, &found.layers, layer);
        fill_layers(recurrent_layers, recurrent_size, &found.recurrent_layers, recurrent_layer);
        target.write(etkv_metadata {
            n_layers,
            n_recurrent_layers,
            max_step_tokens: found.max_step_tokens,
            context_length: found.context_length,
            ..given
        });
        Ok(())
    }
);
