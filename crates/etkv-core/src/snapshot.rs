//! The contents of a cache in a file: its integers, and its rows plane by plane.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::config::{CacheConfig, LayerConfig, LayerPolicy};
use crate::error::{fail, Error, Result, Status};
use crate::format::KvFormat;
use crate::format::PlaneFormat;
use crate::recurrent_layer::RecurrentLayer;

/// The integers of a cache: its positions and their slots, and the parts of the config on which positions and slots
/// depend.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Snapshot {
    /// The kind's name.
    pub kind: String,
    /// The sizes of each layer.
    pub layers: Vec<SavedLayer>,
    /// The sizes of each recurrent layer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub recurrent_layers: Vec<RecurrentLayer>,
    /// The number of anchors that a sequence keeps; 0 without recurrent layers.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub anchors: i32,
    /// The config's capacity.
    pub capacity: i32,
    /// The config's `max_step_tokens`.
    pub max_step_tokens: i32,
    /// The formats of the config.
    pub storage: SavedFormats,
    /// The current formats of keys and values.
    pub formats: [KvFormat; 2],
    /// Whether rows still wait for their conversion at `quantized_kv_start`.
    pub awaits: bool,
    /// The positions and their slots.
    pub book: Book,
}

/// One layer of a [`LayerConfig`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedLayer {
    /// The number of KV heads.
    pub n_kv_heads: i32,
    /// The number of elements of one key.
    pub k_head_dim: i32,
    /// The number of elements of one value.
    pub v_head_dim: i32,
    /// The window and the sinks, or `None` for full history.
    pub window: Option<[i32; 2]>,
    /// The length of chunks, or `None` if the layer has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chunk: Option<i32>,
    /// Whether the values are in the keys.
    #[serde(default, skip_serializing_if = "is_false")]
    pub values_in_keys: bool,
}

/// The formats of a [`CacheConfig`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedFormats {
    /// The format of keys.
    pub k_format: KvFormat,
    /// The format of values.
    pub v_format: KvFormat,
    /// The number of positions at which rows in `float_format` are converted.
    pub quantized_kv_start: Option<i32>,
    /// The format before `quantized_kv_start`.
    pub float_format: KvFormat,
}

/// The state of the bookkeeping.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub enum Book {
    /// One growing sequence.
    #[serde(rename = "contiguous")]
    Contiguous(ContiguousState),
    /// Sequences in cells, and trees after them.
    #[serde(rename = "cells")]
    Cells(CellsState),
}

/// The state of one growing sequence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ContiguousState {
    /// The number of positions.
    pub length: i32,
    /// The number of positions that each layer group has dropped after its sinks.
    pub dropped: Vec<i32>,
}

/// The state of sequences in cells.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CellsState {
    /// The layer groups.
    pub groups: Vec<GroupState>,
    /// The trees, in the order of their sequences.
    pub trees: Vec<TreeState>,
    /// The cells of recurrent layers, if the model has any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub recurrent: Option<RecurrentState>,
    /// The checkpoints. The layer groups list the cells of a checkpoint under its `owner`, like the cells of a
    /// sequence.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub checkpoints: Vec<CheckpointState>,
}

/// The cells of recurrent layers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecurrentState {
    /// The rows.
    pub rows: GroupState,
    /// The anchors. Their positions are counted in blocks.
    pub anchors: GroupState,
}

/// A checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CheckpointState {
    /// The number under which the checkpoint owns cells.
    pub owner: i32,
    /// Its position.
    pub position: i32,
    /// The sequences that can be rewound to the checkpoint.
    pub sequences: Vec<i32>,
}

/// The cells of a layer group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupState {
    /// The number of allocated cells.
    pub size: i32,
    /// The sequences that own cells, in order.
    pub sequences: Vec<SequenceState>,
}

/// The cells of a sequence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SequenceState {
    /// The number of the sequence.
    pub sequence: i32,
    /// For each run, in the order of positions: the first position, its cell, and the number of positions.
    pub runs: Vec<[i32; 3]>,
}

/// The tree of candidates after a sequence.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TreeState {
    /// The number of the sequence.
    pub sequence: i32,
    /// The parent of each node; -1 for the sequence itself.
    pub parents: Vec<i32>,
    /// The number of nodes whose rows are written.
    pub n_written: usize,
    /// The cells of the written nodes, for each layer group.
    pub cells: Vec<Vec<i32>>,
    /// The cells of the written nodes in recurrent layers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rows: Vec<i32>,
    /// The nodes that have an anchor after them, each with the anchor's slot.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub anchors: Vec<(usize, i32)>,
}

/// A plane of a layer's keys, or of its values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlaneId {
    /// The layer.
    pub layer: usize,
    /// Whether the plane belongs to the values.
    pub values: bool,
    /// The index of the plane in [`KvFormat::planes`].
    pub plane: usize,
}

/// The rows of one plane that belong to a snapshot: `[n_slots, n_kv_heads, width]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlaneRows {
    /// The plane of the rows.
    pub id: PlaneId,
    /// The element type and width of a row.
    pub format: PlaneFormat,
    /// The number of KV heads.
    pub n_kv_heads: usize,
    /// The number of slots that have rows.
    pub n_slots: usize,
}

impl PlaneRows {
    /// Returns the bytes of one slot, with all of its heads.
    pub const fn slot_bytes(&self) -> usize {
        self.format.row_bytes().saturating_mul(self.n_kv_heads)
    }

    /// Returns the bytes of all slots.
    pub const fn bytes(&self) -> usize {
        self.slot_bytes().saturating_mul(self.n_slots)
    }
}

/// Receives the bytes of a plane. Each call passes whole slots.
pub type TakeRows<'a> = dyn FnMut(&PlaneRows, &[u8]) -> Result<()> + 'a;

/// Provides the bytes of a plane. Each call requests whole slots.
pub type GiveRows<'a> = dyn FnMut(&PlaneRows, &mut [u8]) -> Result<()> + 'a;

/// The face of a cache whose contents can be saved to a file and loaded. The face of
/// [one sequence](crate::Cache::saving_sequence) covers only that sequence.
///
/// A declaration for the next step is not part of the contents.
pub trait SaveCache {
    /// Returns the integers. First rolls back a step that was set aside, and reads the values of a step that was
    /// committed unread.
    ///
    /// # Errors
    /// [`Step`](Status::Step) while a step is open, [`Backend`](Status::Backend) if the cache is
    /// poisoned, and the error of an unread step.
    fn snapshot(&mut self) -> Result<Snapshot>;

    /// Returns the planes of a snapshot, in the order of [`read_rows`](Self::read_rows) and
    /// [`restore`](Self::restore). Checks that the snapshot is complete and fits the cache.
    ///
    /// # Errors
    /// [`File`](Status::File), with the difference in the message.
    fn planes(&self, snapshot: &Snapshot) -> Result<Vec<PlaneRows>>;

    /// Passes the rows of a snapshot of this cache to `take`. The cache must not have changed since the snapshot.
    ///
    /// # Errors
    /// Errors of `take`; [`Backend`](Status::Backend).
    fn read_rows(&self, snapshot: &Snapshot, take: &mut TakeRows) -> Result<()>;

    /// Replaces the contents by those of a snapshot and its rows. The old contents are freed when the new ones are
    /// complete, so both need memory until then.
    ///
    /// # Errors
    /// Errors of [`planes`](Self::planes) and of `give`, [`Step`](Status::Step) while a step is open, and
    /// [`Backend`](Status::Backend) if there is too little memory. After an error the contents are unchanged.
    fn restore(&mut self, snapshot: &Snapshot, give: &mut GiveRows) -> Result<()>;
}

impl From<&LayerConfig> for SavedLayer {
    fn from(layer: &LayerConfig) -> Self {
        let (window, chunk) = match layer.policy {
            LayerPolicy::Full => (None, None),
            LayerPolicy::Window { window, sinks } => (Some([window, sinks]), None),
            LayerPolicy::Chunk { chunk } => (None, Some(chunk)),
        };
        let LayerConfig { n_kv_heads, k_head_dim, v_head_dim, values_in_keys, .. } = *layer;
        Self { n_kv_heads, k_head_dim, v_head_dim, window, chunk, values_in_keys }
    }
}

impl SavedLayer {
    fn policy(&self) -> LayerPolicy {
        match (self.window, self.chunk) {
            (None, None) => LayerPolicy::Full,
            (Some([window, sinks]), _) => LayerPolicy::Window { window, sinks },
            (None, Some(chunk)) => LayerPolicy::Chunk { chunk },
        }
    }
}

impl From<&CacheConfig> for SavedFormats {
    fn from(config: &CacheConfig) -> Self {
        Self {
            k_format: config.k_format,
            v_format: config.v_format,
            quantized_kv_start: config.quantized_kv_start,
            // Without `quantized_kv_start` this field has no meaning.
            float_format: config.quantized_kv_start.map_or(KvFormat::F32, |_| config.float_format),
        }
    }
}

impl fmt::Display for SavedLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { n_kv_heads, k_head_dim, v_head_dim, values_in_keys, .. } = self;
        let place = if *values_in_keys { " of them" } else { "" };
        let policy = self.policy();
        write!(f, "{n_kv_heads} KV heads of {k_head_dim} and {v_head_dim}{place} with {policy}")
    }
}

impl fmt::Display for SavedFormats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { k_format, v_format, quantized_kv_start, float_format } = self;
        write!(f, "{k_format} keys and {v_format} values")?;
        match quantized_kv_start {
            None => Ok(()),
            Some(start) => write!(f, " from position {start} on, {float_format} before"),
        }
    }
}

impl Snapshot {
    pub(crate) fn new(
        kind: &str,
        config: &CacheConfig,
        (formats, awaits): ([KvFormat; 2], bool),
        book: Book,
    ) -> Self {
        Self {
            kind: kind.to_owned(),
            layers: config.layers.iter().map(SavedLayer::from).collect(),
            recurrent_layers: config.recurrent_layers.clone(),
            anchors: config.recurrent_window().map_or(0, |window| window.anchors),
            capacity: config.capacity,
            max_step_tokens: config.max_step_tokens,
            storage: config.into(),
            formats,
            awaits,
            book,
        }
    }

    /// Returns the positions of the checkpoints of sequence 0, ascending.
    pub fn checkpoints(&self) -> Vec<i32> {
        let Book::Cells(state) = &self.book else {
            return Vec::new();
        };
        let of_text = state.checkpoints.iter().filter(|kept| kept.sequences.contains(&0));
        let mut positions: Vec<i32> = of_text.map(|kept| kept.position).collect();
        positions.sort_unstable();
        positions
    }

    /// Refuses a snapshot of another kind, or of layers with other sizes.
    pub(crate) fn check(&self, kind: &str, config: &CacheConfig) -> Result<()> {
        if self.kind != kind {
            fail!(
                File,
                "the file is of a cache of kind `{}`, but this cache is of kind `{kind}`",
                self.kind
            );
        }
        self.check_layers(config)
    }

    /// Refuses a snapshot of layers with other sizes.
    pub(crate) fn check_layers(&self, config: &CacheConfig) -> Result<()> {
        let [found, expected] = [self.layers.len(), config.layers.len()];
        if found != expected {
            fail!(File, "the file has {found} layers, but this cache has {expected}");
        }
        for (id, (found, layer)) in self.layers.iter().zip(&config.layers).enumerate() {
            let expected = SavedLayer::from(layer);
            for (name, found, expected) in [
                ("n_kv_heads", found.n_kv_heads, expected.n_kv_heads),
                ("k_head_dim", found.k_head_dim, expected.k_head_dim),
                ("v_head_dim", found.v_head_dim, expected.v_head_dim),
            ] {
                if found != expected {
                    fail!(File, "layer {id} has {name} {found} in the file, {expected} here");
                }
            }
            if found.values_in_keys != expected.values_in_keys {
                let of =
                    |in_keys: bool| if in_keys { "in its keys" } else { "apart from its keys" };
                let [found, expected] = [of(found.values_in_keys), of(expected.values_in_keys)];
                fail!(File, "layer {id} has its values {found} in the file, {expected} here");
            }
            if let (Some([window, sinks]), Some(chunk)) = (found.window, found.chunk) {
                fail!(
                    File,
                    "layer {id} has a window of {window} and {sinks} sinks, and chunks of {chunk}, in the file, which \
                     is damaged"
                );
            }
            if (found.window, found.chunk) != (expected.window, expected.chunk) {
                let [found, expected] = [found.policy(), expected.policy()];
                fail!(File, "layer {id} has {found} in the file, {expected} here");
            }
            self.check_window(config, layer.policy)?;
        }
        self.check_recurrent(config)
    }

    /// Refuses a snapshot of other recurrent layers.
    pub(crate) fn check_recurrent(&self, config: &CacheConfig) -> Result<()> {
        let (found, expected) = (&self.recurrent_layers, &config.recurrent_layers);
        if found.len() != expected.len() {
            let [found, expected] = [found.len(), expected.len()];
            fail!(File, "the file has {found} recurrent layers, but this cache has {expected}");
        }
        for (id, (found, expected)) in found.iter().zip(expected).enumerate() {
            if found != expected {
                fail!(File, "recurrent layer {id} is {found} in the file, {expected} here");
            }
        }
        let anchors = config.recurrent_window().map_or(0, |window| window.anchors);
        if self.anchors != anchors {
            fail!(
                File,
                "sequences of the file keep {} anchors, but those of this cache keep {anchors}; \
                 create the cache with the file's number",
                self.anchors
            );
        }
        Ok(())
    }

    /// Refuses a file whose windows have another number of slots: their contents would not fit.
    fn check_window(&self, config: &CacheConfig, policy: LayerPolicy) -> Result<()> {
        if self.capacity < 1 || self.max_step_tokens < 1 {
            let Self { capacity, max_step_tokens, .. } = self;
            fail!(
                File,
                "the file has capacity {capacity} and max_step_tokens {max_step_tokens}, the minimum \
                 is 1"
            );
        }
        if !self.has_window(config, policy) {
            fail!(
                File,
                "the windows of the file are for capacity {} and max_step_tokens {}, but those of \
                 this cache for {} and {}; create the cache with the file's",
                self.capacity,
                self.max_step_tokens,
                config.capacity,
                config.max_step_tokens
            );
        }
        Ok(())
    }

    /// Returns whether a window has the same slots in the saved cache and in a cache of this config.
    pub(crate) fn has_window(&self, config: &CacheConfig, policy: LayerPolicy) -> bool {
        let saved = CacheConfig {
            capacity: self.capacity,
            max_step_tokens: self.max_step_tokens,
            ..CacheConfig::uniform(0, 1, 1, 1)
        };
        let facts = |config: &CacheConfig| {
            let window = config.window(policy)?;
            Some((window.slots(), window.max_step_tokens(), window.slides()))
        };
        facts(&saved) == facts(config)
    }

    /// Returns the formats of the cache after loading, and whether rows then still wait for their conversion at
    /// `quantized_kv_start`. `counted` is the number of positions that count for `quantized_kv_start`.
    pub(crate) fn target(
        &self,
        config: &CacheConfig,
        counted: i32,
    ) -> Result<([KvFormat; 2], bool)> {
        self.check_formats()?;
        if self.storage == SavedFormats::from(config) {
            // The formats of the saved cache remain, even those of an explicit conversion.
            let floats = [config.float_format; 2];
            if self.awaits && (config.quantized_kv_start.is_none() || self.formats != floats) {
                let [k, v] = self.formats;
                fail!(File, "the file has {k} keys and {v} values before quantized_kv_start");
            }
            return Ok((self.formats, self.awaits));
        }
        let target = config.formats_at(counted);
        self.check_conversion(target)?;
        let awaits = config.quantized_kv_start.is_some_and(|tokens| counted < tokens);
        Ok((target, awaits))
    }

    /// Refuses the rows of one sequence if their formats are not `formats` and cannot be converted to them. The cache
    /// stores all sequences in `formats`.
    pub(crate) fn check_joining(&self, config: &CacheConfig, formats: [KvFormat; 2]) -> Result<()> {
        self.check_formats()?;
        // Rows that were saved before `quantized_kv_start` are converted, as the saved cache would have converted them
        // later.
        let waited = self.awaits
            && self.storage == SavedFormats::from(config)
            && self.formats == [config.float_format; 2]
            && formats == [config.k_format, config.v_format];
        if waited {
            return Ok(());
        }
        self.check_conversion(formats)
    }

    /// Refuses formats that do not fit the rows of the layers.
    fn check_formats(&self) -> Result<()> {
        for layer in &self.layers {
            let as_file = |error: Error| Error::new(Status::File, error.at("the file"));
            self.formats[0].check(layer.k_head_dim).map_err(as_file)?;
            if !layer.values_in_keys {
                self.formats[1].check(layer.v_head_dim).map_err(as_file)?;
            }
        }
        Ok(())
    }

    /// Refuses formats that differ from `target` and cannot be converted to it.
    fn check_conversion(&self, target: [KvFormat; 2]) -> Result<()> {
        for (what, found, expected) in
            [("keys", self.formats[0], target[0]), ("values", self.formats[1], target[1])]
        {
            if found != expected && !(found.is_float() && expected.is_float()) {
                fail!(
                    File,
                    "the file has {what} in {found}, but this cache stores them in {expected}; only f32, \
                     f16 and bf16 are converted into each other"
                );
            }
        }
        Ok(())
    }
}

impl ContiguousState {
    /// Returns the same positions as cells of sequence 0, for layer groups with these sinks and numbers of cells.
    pub(crate) fn in_cells(&self, groups: &[(i32, i32)]) -> CellsState {
        let of = |(&(sinks, size), &dropped): (&(i32, i32), &i32)| {
            let length = self.length;
            let runs = match dropped {
                0 => vec![[0, 0, length]],
                _ => vec![[0, 0, sinks], [sinks + dropped, sinks, length - dropped - sinks]],
            };
            let runs: Vec<_> = runs.into_iter().filter(|[.., len]| *len > 0).collect();
            let held = (!runs.is_empty()).then_some(SequenceState { sequence: 0, runs });
            GroupState { size, sequences: held.into_iter().collect() }
        };
        CellsState {
            groups: groups.iter().zip(&self.dropped).map(of).collect(),
            trees: Vec::new(),
            recurrent: None,
            checkpoints: Vec::new(),
        }
    }
}

fn is_false(is: &bool) -> bool {
    !is
}

fn is_zero(n: &i32) -> bool {
    *n == 0
}

/// Returns the error for a file whose integers contradict each other.
pub(crate) fn damaged(what: impl std::fmt::Display) -> Error {
    Error::new(Status::File, format_args!("the file is damaged: {what}"))
}
