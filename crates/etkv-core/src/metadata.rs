//! The metadata that a program has about its caches: constant methods, which are read here for every language.
//!
//! A fact of the layers that attend is one integer for all of them, or a list with one integer for each.

use serde_json::{Map, Value};

use crate::config::CacheConfig;
use crate::error::{fail, Error, Result, Status};
use crate::format::KvFormat;
use crate::recurrent_layer::RecurrentLayer;

const VERSION: &str = "kv_cache.schema_version";
const DTYPE: &str = "kv_cache.dtype";
const RECURRENT_LAYERS: &str = "kv_cache.recurrent_layers";
const VALUES_IN_KEYS: &str = "kv_cache.values_in_keys";
const V_HEAD_DIM: &str = "kv_cache.v_head_dim";
const SINKS: &str = "kv_cache.sinks";
const CHUNK: &str = "kv_cache.chunk";
/// The number of layers, and the facts that every program has.
const VERSIONED: [&str; 3] = ["kv_cache.n_layers", "kv_cache.n_kv_heads", "kv_cache.head_dim"];
const WINDOW: &str = "kv_cache.window";
/// The same facts in programs of ExecuTorch's exporter. These programs report no version, and always report windows.
const EXPORTERS: [&str; 3] = ["get_n_caches", "get_kv_heads", "get_head_dims"];
const EXPORTERS_WINDOWS: &str = "get_windows";
const STEP: &str = "get_prefill_chunk_size";
/// The names of the context length. Each exporter of ExecuTorch uses another one.
const CONTEXT: [&str; 3] = ["get_max_ctx_len", "get_max_context_len", "get_max_seq_len"];

/// The facts of a program's caches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Metadata {
    /// The layers that attend.
    pub layers: Vec<LayerMetadata>,
    /// The recurrent layers.
    pub recurrent_layers: Vec<RecurrentLayer>,
    /// The dtype that the program computes keys and values in; `None` if it is not reported.
    pub dtype: Option<KvFormat>,
    /// The maximum tokens of one step; 0 if it is not reported.
    pub max_step_tokens: i32,
    /// The context length that the program was exported for; 0 if it is not reported.
    pub context_length: i32,
}

/// The facts of one layer that attends. The config of a cache has stricter limits for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerMetadata {
    /// The number of KV heads.
    pub n_kv_heads: i32,
    /// The number of elements of one key.
    pub k_head_dim: i32,
    /// The number of elements of one value.
    pub v_head_dim: i32,
    /// The number of positions that a query sees; 0 for full history.
    pub window: i32,
    /// The number of attention sinks.
    pub sinks: i32,
    /// The number of positions of a chunk; 0 for a layer without chunks.
    pub chunk: i32,
    /// Whether a value is the first elements of its key.
    pub values_in_keys: bool,
}

impl Metadata {
    /// The names of the constant methods that [`Self::read`] uses.
    pub fn names() -> impl Iterator<Item = &'static str> {
        let others = [
            VERSION,
            DTYPE,
            RECURRENT_LAYERS,
            VALUES_IN_KEYS,
            V_HEAD_DIM,
            SINKS,
            CHUNK,
            WINDOW,
            EXPORTERS_WINDOWS,
            STEP,
        ];
        others.into_iter().chain(VERSIONED).chain(EXPORTERS).chain(CONTEXT)
    }

    /// Reads the values of constant methods by name: an integer, a string, or an array of a tensor's integers.
    ///
    /// Version 1 is for programs in which all layers attend, version 2 for those with recurrent layers, and version 3
    /// for those with layers that attend in chunks, with or without recurrent layers. Without a version, the facts are
    /// those of ExecuTorch's exporter.
    ///
    /// # Errors
    /// [`Program`](Status::Program) for another version, and for a fact that is absent or not valid. The message names
    /// the fact.
    pub fn read(constants: &Map<String, Value>) -> Result<Self> {
        let constants = Constants(constants);
        let version = constants.count(VERSION)?;
        let is_recurrent = match version {
            None | Some(1) => false,
            Some(2) => true,
            Some(3) => constants.0.contains_key(RECURRENT_LAYERS),
            Some(other) => fail!(
                Program,
                "the program's {VERSION} is {other}; this etkv reads versions 1 to 3"
            ),
        };
        Ok(Self {
            dtype: constants.dtype()?,
            layers: constants.layers(version.is_some(), i32::from(!is_recurrent))?,
            recurrent_layers: match is_recurrent {
                true => constants.recurrent_layers()?,
                false => Vec::new(),
            },
            max_step_tokens: constants.first(&[STEP])?,
            context_length: constants.first(&CONTEXT)?,
        })
    }
}

const MAX_LAYERS: i32 = CacheConfig::MAX_LAYERS;

struct Constants<'a>(&'a Map<String, Value>);

impl Constants<'_> {
    /// Returns the count of this name, or `None` if it is absent.
    fn count(&self, name: &str) -> Result<Option<i32>> {
        self.0.get(name).map(|value| count(name, value)).transpose()
    }

    /// Returns the first of these counts that the program has, or 0.
    fn first(&self, names: &[&str]) -> Result<i32> {
        names.iter().find_map(|name| self.count(name).transpose()).unwrap_or(Ok(0))
    }

    /// Returns `n` counts of this name, or `None` if it is absent.
    fn each(&self, name: &str, n: usize) -> Result<Option<Vec<i32>>> {
        match self.0.get(name) {
            None => Ok(None),
            Some(Value::Array(values)) => counts(name, values, n).map(Some),
            Some(Value::Number(number)) if number.is_i64() || number.is_u64() => {
                Ok(self.count(name)?.map(|count| vec![count; n]))
            }
            Some(_) => counts(name, &[], n).map(Some),
        }
    }

    /// Returns the layers that attend. There must be at least `least` of them.
    fn layers(&self, is_versioned: bool, least: i32) -> Result<Vec<LayerMetadata>> {
        let [n_layers, kv_heads, head_dim] = if is_versioned { VERSIONED } else { EXPORTERS };
        let found = self.count(n_layers)?.ok_or_else(|| absent(n_layers))?;
        if !(least..=MAX_LAYERS).contains(&found) {
            fail!(Program, "`{n_layers}` is {found}, expected {least} to {MAX_LAYERS}");
        }
        let n = found as usize;
        let needed = |name| self.each(name, n)?.ok_or_else(|| absent(name));
        let optional = |name| match is_versioned {
            true => self.each(name, n),
            false => Ok(None),
        };
        let or_zeros = |name| Ok(optional(name)?.unwrap_or_else(|| vec![0; n]));
        let kv_heads = needed(kv_heads)?;
        let k_head_dims = needed(head_dim)?;
        let v_head_dims = optional(V_HEAD_DIM)?.unwrap_or_else(|| k_head_dims.clone());
        let windows = if is_versioned { or_zeros(WINDOW)? } else { needed(EXPORTERS_WINDOWS)? };
        let (sinks, chunks) = (or_zeros(SINKS)?, or_zeros(CHUNK)?);
        let in_keys = or_zeros(VALUES_IN_KEYS)?;
        let layer = |i: usize| {
            Ok(LayerMetadata {
                n_kv_heads: kv_heads[i],
                k_head_dim: k_head_dims[i],
                v_head_dim: v_head_dims[i],
                window: windows[i],
                sinks: sinks[i],
                chunk: chunks[i],
                values_in_keys: match in_keys[i] {
                    0 => false,
                    1 => true,
                    other => fail!(Program, "`{VALUES_IN_KEYS}` has {other}, expected 0 or 1"),
                },
            })
        };
        (0..n).map(layer).collect()
    }

    /// Returns the recurrent layers. The program lists the fields of one layer after the other, in the order of
    /// [`RecurrentLayer::from_fields`].
    fn recurrent_layers(&self) -> Result<Vec<RecurrentLayer>> {
        const NAME: &str = RECURRENT_LAYERS;
        let value = self.0.get(NAME).ok_or_else(|| absent(NAME))?;
        let values = value.as_array().map_or(&[][..], Vec::as_slice);
        let n = values.len();
        if n == 0
            || n % RecurrentLayer::N_FIELDS != 0
            || n / RecurrentLayer::N_FIELDS > MAX_LAYERS as usize
        {
            fail!(
                Program,
                "`{NAME}` has {n} integers, expected {} for each of 1 to {MAX_LAYERS} layers",
                RecurrentLayer::N_FIELDS
            );
        }
        let fields = counts(NAME, values, n)?;
        let layer = |(id, fields): (usize, &[i32])| {
            RecurrentLayer::from_fields(std::array::from_fn(|at| fields[at]))
                .and_then(|layer| layer.validate().map(|()| layer))
                .map_err(|error| {
                    Error::new(Status::Program, format_args!("layer {id} of `{NAME}`: {error}"))
                })
        };
        fields.chunks_exact(RecurrentLayer::N_FIELDS).enumerate().map(layer).collect()
    }

    fn dtype(&self) -> Result<Option<KvFormat>> {
        let Some(value) = self.0.get(DTYPE) else { return Ok(None) };
        let format = value.as_str().and_then(|name| name.parse().ok());
        match format.filter(|format: &KvFormat| format.is_float()) {
            Some(dtype) => Ok(Some(dtype)),
            None => fail!(Program, "`{DTYPE}` is {}, expected f32, f16 or bf16", shown(value)),
        }
    }
}

fn counts(name: &str, values: &[Value], n: usize) -> Result<Vec<i32>> {
    if values.len() != n || !values.iter().all(|value| value.is_i64() || value.is_u64()) {
        fail!(Program, "`{name}` is not one integer for each of {n} layers");
    }
    let one = |value: &Value| match to_count(value) {
        Some(count) => Ok(count),
        None => fail!(Program, "`{name}` has {value}, which is not a 32-bit count"),
    };
    values.iter().map(one).collect()
}

fn count(name: &str, value: &Value) -> Result<i32> {
    match to_count(value) {
        Some(count) => Ok(count),
        None => fail!(Program, "`{name}` is {}, which is not a 32-bit count", shown(value)),
    }
}

fn to_count(value: &Value) -> Option<i32> {
    value.as_i64().and_then(|number| i32::try_from(number).ok()).filter(|count| *count >= 0)
}

/// Returns the beginning of a value, which may be a long list.
fn shown(value: &Value) -> String {
    value.to_string().chars().take(34).collect()
}

fn absent(name: &str) -> Error {
    let message =
        format!("the program does not report `{name}`; export it with an off-graph KV cache");
    Error::new(Status::Program, message)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(constants: &Value) -> Result<Metadata> {
        Metadata::read(constants.as_object().unwrap())
    }

    fn versioned() -> Value {
        json!({"kv_cache.schema_version": 1, "kv_cache.n_layers": 2, "kv_cache.n_kv_heads": 8, "kv_cache.head_dim": 64})
    }

    fn exporters() -> Value {
        json!({
            "get_n_caches": 2, "get_kv_heads": [4, 2], "get_head_dims": [64, 128], "get_windows": [0, 512],
            "get_prefill_chunk_size": 256, "get_max_seq_len": 128, "get_max_context_len": 4096,
        })
    }

    /// Returns the constants with other values; null removes one.
    fn with(mut constants: Value, changes: &Value) -> Value {
        for (name, value) in changes.as_object().unwrap() {
            constants[name] = value.clone();
        }
        constants.as_object_mut().unwrap().retain(|_, value| !value.is_null());
        constants
    }

    #[track_caller]
    fn assert_refused(constants: Value, changes: Value, message: &str) {
        let refused = read(&with(constants, &changes)).unwrap_err();
        assert_eq!((refused.status(), refused.message()), (Status::Program, message));
    }

    #[test]
    fn facts_are_for_all_layers_or_for_each() {
        let layer = LayerMetadata {
            n_kv_heads: 8,
            k_head_dim: 64,
            v_head_dim: 64,
            window: 0,
            sinks: 0,
            chunk: 0,
            values_in_keys: false,
        };
        let found = read(&versioned()).unwrap();
        assert_eq!(found.layers, [layer; 2]);
        assert_eq!((found.dtype, found.max_step_tokens, found.context_length), (None, 0, 0));
        let changes = json!({
            "kv_cache.schema_version": 3, "kv_cache.dtype": "bf16", "kv_cache.v_head_dim": [32, 48],
            "kv_cache.window": [0, 1024], "kv_cache.sinks": 4, "kv_cache.chunk": [8192, 0],
            "kv_cache.values_in_keys": [1, 0],
        });
        let found = read(&with(versioned(), &changes)).unwrap();
        let first =
            LayerMetadata { v_head_dim: 32, sinks: 4, chunk: 8192, values_in_keys: true, ..layer };
        let second = LayerMetadata { v_head_dim: 48, sinks: 4, window: 1024, ..layer };
        assert_eq!((found.layers, found.dtype), (vec![first, second], Some(KvFormat::Bf16)));
    }

    #[test]
    fn programs_of_executorchs_exporter_have_no_version() {
        let found = read(&with(exporters(), &json!({"kv_cache.sinks": 7}))).unwrap();
        let of =
            |layer: &LayerMetadata| (layer.n_kv_heads, layer.v_head_dim, layer.window, layer.sinks);
        assert_eq!(
            found.layers.iter().map(of).collect::<Vec<_>>(),
            [(4, 64, 0, 0), (2, 128, 512, 0)]
        );
        assert_eq!((found.max_step_tokens, found.context_length), (256, 4096));
        for name in EXPORTERS.into_iter().chain([EXPORTERS_WINDOWS]) {
            let message = format!(
                "the program does not report `{name}`; export it with an off-graph KV cache"
            );
            assert_refused(exporters(), json!({name: null}), &message);
        }
    }

    #[test]
    fn every_name_that_is_read_is_listed() {
        let names: Vec<_> = Metadata::names().collect();
        let recurrent =
            json!({"kv_cache.recurrent_layers": [1, 8, 4, 0, 0, 0, 0, 0], "kv_cache.window": 0});
        let all = with(with(versioned(), &exporters()), &recurrent);
        assert!(all.as_object().unwrap().keys().all(|name| names.contains(&name.as_str())));
    }

    #[test]
    fn other_versions_are_refused() {
        for version in [0, 4, 1000] {
            let message = format!("the program's kv_cache.schema_version is {version}; this etkv reads versions 1 to 3");
            assert_refused(exporters(), json!({"kv_cache.schema_version": version}), &message);
        }
        for version in [json!(-1), json!([1]), json!(true), json!("1"), json!(1.0)] {
            let message =
                format!("`kv_cache.schema_version` is {version}, which is not a 32-bit count");
            assert_refused(exporters(), json!({"kv_cache.schema_version": version}), &message);
        }
    }

    #[test]
    fn values_that_are_not_valid_are_named() {
        for (name, value, message) in [
            ("n_layers", json!(0), "is 0, expected 1 to 65536"),
            ("n_layers", json!(65537), "is 65537, expected 1 to 65536"),
            (
                "n_layers",
                json!(vec![0; 99]),
                "is [0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0, which is not a 32-bit count",
            ),
            ("n_kv_heads", json!(-3), "is -3, which is not a 32-bit count"),
            ("n_kv_heads", json!(1_i64 << 40), "is 1099511627776, which is not a 32-bit count"),
            ("n_kv_heads", json!(u64::MAX), "is 18446744073709551615, which is not a 32-bit count"),
            ("head_dim", json!([64]), "is not one integer for each of 2 layers"),
            ("head_dim", json!([64, 64.0]), "is not one integer for each of 2 layers"),
            ("head_dim", json!("64"), "is not one integer for each of 2 layers"),
            ("window", json!([0, -5]), "has -5, which is not a 32-bit count"),
            ("values_in_keys", json!([0, 2]), "has 2, expected 0 or 1"),
            ("dtype", json!("affine8"), "is \"affine8\", expected f32, f16 or bf16"),
            ("dtype", json!(1), "is 1, expected f32, f16 or bf16"),
        ] {
            let name = format!("kv_cache.{name}");
            assert_refused(
                versioned(),
                json!({name.as_str(): value}),
                &format!("`{name}` {message}"),
            );
        }
        let message = "`get_prefill_chunk_size` is -1, which is not a 32-bit count";
        assert_refused(exporters(), json!({STEP: -1}), message);
    }

    #[test]
    fn recurrent_layers_have_8_fields_each() {
        let fields = [1, 160, 4, 0, 0, 0, 0, 0, 2, 0, 0, 2, 4, 16, 24, 1];
        let constants = |version| {
            let changes = json!({"kv_cache.schema_version": version, "kv_cache.n_layers": 0, RECURRENT_LAYERS: fields});
            with(versioned(), &changes)
        };
        let found = read(&constants(2)).unwrap();
        assert_eq!(found, read(&constants(3)).unwrap());
        assert!(found.layers.is_empty());
        let read_fields: Vec<_> =
            found.recurrent_layers.iter().flat_map(RecurrentLayer::fields).collect();
        assert_eq!(read_fields, fields);
        // A program of version 1 has no recurrent layers, so it needs layers that attend.
        assert_refused(constants(1), json!({}), "`kv_cache.n_layers` is 0, expected 1 to 65536");
        let absent = "the program does not report `kv_cache.recurrent_layers`; export it with an off-graph KV cache";
        assert_refused(constants(2), json!({RECURRENT_LAYERS: null}), absent);
        for (value, message) in [
            (json!(8), "has 0 integers, expected 8 for each of 1 to 65536 layers"),
            (json!([1, 160, 4]), "has 3 integers, expected 8 for each of 1 to 65536 layers"),
            (json!([2, 0, 0, 2, 4, 16, -24, 0]), "has -24, which is not a 32-bit count"),
        ] {
            assert_refused(
                constants(2),
                json!({RECURRENT_LAYERS: value}),
                &format!("`{RECURRENT_LAYERS}` {message}"),
            );
        }
        for (value, message) in [
            ([3, 160, 4, 0, 0, 0, 0, 0], "kind is 3, expected 1 or 2"),
            ([1, 160, 4, 0, 0, 0, 0, 1], "channel_decay is 1, expected 0 for a convolution"),
            ([1, 160, 65, 0, 0, 0, 0, 0], "width is 65, the maximum is 64"),
            ([2, 0, 1, 2, 4, 16, 24, 0], "width is 1, expected 0 for a recurrence"),
            ([2, 0, 0, 2, 4, 16, 24, 2], "channel_decay is 2, expected 0 or 1"),
            ([2, 0, 0, 3, 4, 16, 24, 0], "expected heads to be a multiple of k_heads, got 4 and 3"),
        ] {
            let message = format!("layer 0 of `{RECURRENT_LAYERS}`: {message}");
            assert_refused(constants(2), json!({RECURRENT_LAYERS: value}), &message);
        }
    }
}
