//! The header of a file: its tensors in the format of safetensors, and its metadata.

use std::collections::HashMap;

use etkv_core::error::fail;
use etkv_core::snapshot::PlaneRows;
use etkv_core::{Element, Error, Result, Snapshot, Status};
use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::Dtype;

use crate::checksum;

/// The version of the format. A file of another version is refused.
pub const VERSION: u32 = 1;

/// The maximum number of bytes of a header.
pub const MAX_HEADER: u64 = 64 << 20;

const KIND: &str = "etkv-cache";
const REWINDABLE_TO: &str = "rewindable_to";
const TOKENS: &str = "tokens";
const CHECKSUMS: &str = "checksums";

/// The description of a file's tensors.
pub struct Header {
    pub fingerprint: String,
    pub snapshot: Snapshot,
    pub n_tokens: usize,
    /// The least length to which the only sequence can be rewound, if it is known.
    pub rewindable_to: Option<i32>,
    /// The name, dtype, shape, and first and last byte of each tensor.
    tensors: Vec<(String, TensorInfo)>,
}

/// Returns an error of a file.
pub fn refused(what: impl std::fmt::Display) -> Error {
    Error::new(Status::File, what)
}

/// The maximum number of characters of a file that a message quotes.
const MAX_QUOTED: usize = 200;

/// Quotes a text of a file for a message. A long text is cut.
pub fn quoted(what: impl std::fmt::Display) -> String {
    let mut text = what.to_string();
    if let Some((end, _)) = text.char_indices().nth(MAX_QUOTED) {
        text.truncate(end);
        text.push('…');
    }
    text
}

/// Returns the tensors of a file: token ids, planes, and the checksums. A plane without slots has no tensor.
pub fn tensors(n_tokens: usize, planes: &[PlaneRows]) -> Result<Vec<(String, TensorInfo)>> {
    let mut all = Vec::new();
    let mut start = 0usize;
    let mut add = |name: String, dtype: Dtype, shape: Vec<usize>| {
        let elements = shape.iter().try_fold(1usize, |n, &size| n.checked_mul(size));
        let bytes = elements.and_then(|n| n.checked_mul(dtype.bitsize() / 8));
        let Some(end) = bytes.and_then(|bytes| start.checked_add(bytes)) else {
            fail!(File, "the tensor {name} of shape {shape:?} is larger than any file");
        };
        all.push((name, TensorInfo { dtype, shape, data_offsets: (start, end) }));
        start = end;
        Ok(())
    };
    add(TOKENS.into(), Dtype::I64, vec![n_tokens])?;
    let mut n_parts = 2;
    for rows in planes.iter().filter(|rows| rows.n_slots > 0) {
        let side = if rows.id.values { "v" } else { "k" };
        let dtype = match rows.format.element {
            Element::U8 => Dtype::U8,
            Element::F16 => Dtype::F16,
            Element::Bf16 => Dtype::BF16,
            Element::F32 => Dtype::F32,
        };
        let shape = vec![rows.n_slots, rows.n_kv_heads, rows.format.width];
        add(format!("layers.{}.{side}.{}", rows.id.layer, rows.format.name), dtype, shape)?;
        n_parts += 1;
    }
    add(CHECKSUMS.into(), Dtype::U8, vec![n_parts, checksum::BYTES])?;
    Ok(all)
}

impl Header {
    pub fn new(
        fingerprint: &str,
        snapshot: Snapshot,
        n_tokens: usize,
        planes: &[PlaneRows],
    ) -> Result<Self> {
        let tensors = tensors(n_tokens, planes)?;
        let fingerprint = fingerprint.to_owned();
        Ok(Self { fingerprint, snapshot, n_tokens, rewindable_to: None, tensors })
    }

    /// Returns the number of checksums: one for the header, one for the token ids, and one for each plane.
    pub fn n_parts(&self) -> usize {
        self.tensors.len()
    }

    /// Returns the number of bytes of all tensors.
    pub fn data_bytes(&self) -> u64 {
        self.tensors.last().map_or(0, |(_, info)| info.data_offsets.1 as u64)
    }

    /// Refuses a file whose tensors are not the tensors that its integers require.
    pub fn check_tensors(&self, expected: &[(String, TensorInfo)]) -> Result<()> {
        let same = |a: &TensorInfo, b: &TensorInfo| {
            a.dtype == b.dtype && a.shape == b.shape && a.data_offsets == b.data_offsets
        };
        for (at, (name, info)) in expected.iter().enumerate() {
            match self.tensors.get(at) {
                Some((found, there)) if found == name && same(info, there) => {}
                Some((found, there)) => {
                    let got = format_args!("{found} of {:?} {:?}", there.dtype, there.shape);
                    fail!(
                        File,
                        "the file is damaged: expected the tensor {name} of {:?} {:?}, got {}",
                        info.dtype,
                        info.shape,
                        quoted(got)
                    )
                }
                None => fail!(File, "the file is damaged: it lacks the tensor {name}"),
            }
        }
        if let Some((name, _)) = self.tensors.get(expected.len()) {
            fail!(File, "the file is damaged: it has an unexpected tensor {}", quoted(name));
        }
        Ok(())
    }

    /// Returns the header as a file contains it: its length, then JSON.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let internal = |error: &dyn std::fmt::Display| Error::new(Status::Internal, error);
        let state = serde_json::to_string(&self.snapshot).map_err(|error| internal(&error))?;
        let mut metadata = HashMap::from([
            ("kind".into(), KIND.into()),
            ("version".into(), VERSION.to_string()),
            ("model".into(), self.fingerprint.clone()),
            ("cache".into(), state),
        ]);
        let least = self.rewindable_to.map(|least| (REWINDABLE_TO.into(), least.to_string()));
        metadata.extend(least);
        let all = self.tensors.iter().map(|(name, info)| (name.clone(), copied(info))).collect();
        let all = Metadata::new(Some(metadata), all).map_err(|error| internal(&error))?;
        let mut bytes = vec![0; 8];
        serde_json::to_writer(&mut bytes, &all).map_err(|error| internal(&error))?;
        // Tensors start at a multiple of 8 bytes.
        bytes.resize(bytes.len().next_multiple_of(8), b' ');
        let length = bytes.len() as u64 - 8;
        if length > MAX_HEADER {
            fail!(
                File,
                "the cache's sequences need a header of {length} bytes, the maximum is \
                 {MAX_HEADER}; compact the cache first"
            );
        }
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        Ok(bytes)
    }

    /// Parses a header from JSON.
    pub fn of_json(json: &[u8]) -> Result<Self> {
        let all: Metadata = serde_json::from_slice(json).map_err(|error| {
            refused(format_args!("the file is not a safetensors file: {}", quoted(error)))
        })?;
        let words = all.metadata().as_ref();
        let word = |name: &str| words.and_then(|words| words.get(name)).map(String::as_str);
        if word("kind") != Some(KIND) {
            fail!(File, "this safetensors file does not contain a cache: its metadata lacks the kind `{KIND}`");
        }
        let version = word("version").unwrap_or("none");
        if version != VERSION.to_string() {
            fail!(
                File,
                "the file has version {} of the format, but this build reads {VERSION}",
                quoted(version)
            );
        }
        let (Some(fingerprint), Some(state)) = (word("model"), word("cache")) else {
            fail!(File, "the file is damaged: its metadata lacks the model or the cache");
        };
        let snapshot = serde_json::from_str(state).map_err(|error| {
            refused(format_args!("the file is damaged: its integers: {}", quoted(error)))
        })?;
        let tensors: Vec<(String, TensorInfo)> = all
            .offset_keys()
            .into_iter()
            .filter_map(|name| all.info(&name).map(|info| (name.clone(), copied(info))))
            .collect();
        let n_tokens = match tensors.first() {
            Some((name, info))
                if name == TOKENS && info.dtype == Dtype::I64 && info.shape.len() == 1 =>
            {
                info.shape[0]
            }
            _ => fail!(File, "the file is damaged: it lacks the tensor {TOKENS}"),
        };
        let fingerprint = fingerprint.to_owned();
        let rewindable_to = word(REWINDABLE_TO).and_then(|least| least.parse().ok());
        Ok(Self { fingerprint, snapshot, n_tokens, rewindable_to, tensors })
    }
}

fn copied(info: &TensorInfo) -> TensorInfo {
    let TensorInfo { dtype, shape, data_offsets } = info;
    TensorInfo { dtype: *dtype, shape: shape.clone(), data_offsets: *data_offsets }
}
