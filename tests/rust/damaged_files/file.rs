//! A cache file that is split into its parts. The parts are changed and joined again with correct checksums.

use std::collections::BTreeMap;

use etkv_core::snapshot::PlaneRows;
use etkv_core::{Element, Snapshot};
use serde_json::{json, Map, Value};

/// A tensor of a file.
#[derive(Debug, Clone)]
pub struct Section {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<u64>,
    pub bytes: Vec<u8>,
}

/// The parts of a file.
#[derive(Debug, Clone)]
pub struct Parts {
    /// The metadata, without the integers of the cache.
    pub words: BTreeMap<String, String>,
    pub snapshot: Snapshot,
    /// The token ids and the planes, in the order of their bytes. The checksums are computed anew.
    pub sections: Vec<Section>,
}

impl Parts {
    /// Splits a file into its parts.
    pub fn of(file: &[u8]) -> Self {
        let end = 8 + u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        let header: Map<String, Value> = serde_json::from_slice(&file[8..end]).unwrap();
        let mut words: BTreeMap<String, String> =
            serde_json::from_value(header["__metadata__"].clone()).unwrap();
        let snapshot = serde_json::from_str(&words.remove("cache").unwrap()).unwrap();
        let tensors = header.iter().filter(|(name, _)| *name != "__metadata__");
        let mut placed: Vec<(u64, Section)> = tensors
            .filter(|(name, _)| *name != "checksums")
            .map(|(name, tensor)| {
                let numbers = |key: &str| -> Vec<u64> {
                    tensor[key].as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect()
                };
                let (shape, offsets) = (numbers("shape"), numbers("data_offsets"));
                let bytes = file[end + offsets[0] as usize..end + offsets[1] as usize].to_vec();
                let dtype = tensor["dtype"].as_str().unwrap().to_owned();
                (offsets[1], Section { name: name.clone(), dtype, shape, bytes })
            })
            .collect();
        placed.sort_by_key(|(end, _)| *end);
        let sections = placed.into_iter().map(|(_, section)| section).collect();
        Self { words, snapshot, sections }
    }

    /// Replaces the planes by those that the snapshot requires. The bytes of a new plane are those of the file, cut
    /// or repeated to the required length.
    pub fn fit(&mut self, planes: &[PlaneRows]) {
        let old: BTreeMap<String, Vec<u8>> =
            self.sections.drain(1..).map(|section| (section.name, section.bytes)).collect();
        for rows in planes.iter().filter(|rows| rows.n_slots > 0) {
            let side = if rows.id.values { "v" } else { "k" };
            let name = format!("layers.{}.{side}.{}", rows.id.layer, rows.format.name);
            let dtype = match rows.format.element {
                Element::U8 => "U8",
                Element::F16 => "F16",
                Element::Bf16 => "BF16",
                Element::F32 => "F32",
            };
            let shape = [rows.n_slots, rows.n_kv_heads, rows.format.width].map(|n| n as u64);
            let source = old.get(&name).filter(|bytes| !bytes.is_empty());
            let source = source.map_or(&[0u8][..], |bytes| bytes);
            let bytes = source.iter().copied().cycle().take(rows.bytes()).collect();
            self.sections.push(Section { name, dtype: dtype.into(), shape: shape.into(), bytes });
        }
    }

    /// Returns the token ids.
    pub fn tokens(&self) -> Vec<i64> {
        let each = self.sections[0].bytes.chunks_exact(8);
        each.map(|token| i64::from_le_bytes(token.try_into().unwrap())).collect()
    }

    /// Returns the file, with correct checksums.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut words = self.words.clone();
        words.insert("cache".into(), serde_json::to_string(&self.snapshot).unwrap());
        let mut header = Map::from_iter([("__metadata__".into(), json!(words))]);
        let mut at = 0;
        let mut add = |name: &str, dtype: &str, shape: &[u64], bytes: u64| {
            let place = json!({"dtype": dtype, "shape": shape, "data_offsets": [at, at + bytes]});
            at += bytes;
            header.insert(name.into(), place);
        };
        for Section { name, dtype, shape, bytes } in &self.sections {
            add(name, dtype, shape, bytes.len() as u64);
        }
        let n_parts = self.sections.len() as u64 + 1;
        add("checksums", "U8", &[n_parts, 16], n_parts * 16);
        let mut file = vec![0; 8];
        file.extend(serde_json::to_vec(&header).unwrap());
        file.resize(file.len().next_multiple_of(8), b' ');
        let length = file.len() as u64 - 8;
        file[..8].copy_from_slice(&length.to_le_bytes());
        let mut sums = vec![etkv_file::checksum(&file)];
        for section in &self.sections {
            sums.push(etkv_file::checksum(&section.bytes));
            file.extend(&section.bytes);
        }
        file.extend(sums.concat());
        file
    }
}
