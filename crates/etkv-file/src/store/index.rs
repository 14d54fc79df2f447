//! The index of the texts of a store's files.

use std::collections::HashMap;
use std::sync::Arc;

use etkv_core::snapshot::{SavedFormats, SavedLayer};
use etkv_core::{Cache, Error, Reach, RecurrentLayer, Result, Snapshot, Status};

use super::place::StoredFile;
use super::texts::{Entry, Texts};
use crate::header::Header;

/// The properties that the texts of one group share, as JSON: the model's fingerprint, and the kind, layers and
/// formats of the cache. For layers with windows or chunks, also the settings that determine their slots.
pub type Group = String;

/// Returns the group of a cache's texts.
pub fn group_of(fingerprint: &str, cache: &dyn Cache) -> Result<Group> {
    group_with(fingerprint, cache.kind(), cache)
}

/// Returns the group of a cache's texts. Caches with the same `kind` share these texts.
pub fn group_with(fingerprint: &str, kind: &str, cache: &dyn Cache) -> Result<Group> {
    let config = cache.config();
    let layers: Vec<SavedLayer> = config.layers.iter().map(SavedLayer::from).collect();
    let sizes = [config.capacity, config.max_step_tokens];
    let anchors = config.recurrent_window().map_or(0, |window| window.anchors);
    let recurrent = (&config.recurrent_layers[..], anchors);
    group(fingerprint, kind, (&layers, recurrent), &SavedFormats::from(config), sizes)
}

fn group_of_file(header: &Header) -> Result<Group> {
    let snapshot = &header.snapshot;
    let Snapshot { kind, storage, capacity, max_step_tokens, .. } = snapshot;
    let recurrent = (&snapshot.recurrent_layers[..], snapshot.anchors);
    let layers = (&snapshot.layers[..], recurrent);
    group(&header.fingerprint, kind, layers, storage, [*capacity, *max_step_tokens])
}

fn group(
    fingerprint: &str,
    kind: &str,
    (layers, recurrent): (&[SavedLayer], (&[RecurrentLayer], i32)),
    formats: &SavedFormats,
    sizes: [i32; 2],
) -> Result<Group> {
    let drops = |layer: &SavedLayer| layer.window.is_some() || layer.chunk.is_some();
    let sizes = layers.iter().any(drops).then_some(sizes);
    // Omitted if there are no recurrent layers, so that names of older files stay valid.
    let recurrent = (!recurrent.0.is_empty()).then_some(recurrent);
    let of_text = (fingerprint, kind, layers, formats, sizes);
    match recurrent {
        None => serde_json::to_string(&of_text),
        Some(recurrent) => serde_json::to_string(&(of_text, recurrent)),
    }
    .map_err(|error| Error::new(Status::Internal, error))
}

/// A file whose text begins with the same tokens as another text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Match {
    /// The name in the store.
    pub name: String,
    /// The number of first tokens that both texts share and to which the file's cache can be rewound.
    pub n_tokens: usize,
}

/// The texts of a store's files.
#[derive(Debug, Default)]
pub struct Index {
    /// The names of files, by text.
    groups: HashMap<Group, Texts<String>>,
    files: HashMap<String, IndexedFile>,
    /// Files whose texts are too long for the capacity with which they were read: the identity of each file, and that
    /// capacity.
    longer: HashMap<String, (u64, usize)>,
}

/// A file that was read.
#[derive(Debug)]
struct IndexedFile {
    /// A number that identifies the file: another file with the same name has another number.
    identity: u64,
    /// The group and the text, or `None` if the file cannot be used.
    text: Option<(Group, Arc<[i64]>)>,
}

impl Index {
    /// Returns whether this file has been read, or its text is known to be longer than `capacity`.
    pub fn knows(&self, file: &StoredFile, capacity: usize) -> bool {
        let is_longer =
            |&(identity, than): &(u64, usize)| identity == file.identity && than >= capacity;
        self.files.get(&file.name).is_some_and(|known| known.identity == file.identity)
            || self.longer.get(&file.name).is_some_and(is_longer)
    }

    /// Records that the text of a file is longer than `capacity`.
    pub fn is_longer(&mut self, file: &StoredFile, capacity: usize) {
        self.longer.insert(file.name.clone(), (file.identity, capacity));
    }

    /// Adds a file with its header and token ids, or marks it as unusable.
    pub fn add(&mut self, file: &StoredFile, beginning: Option<(&Header, Vec<i64>)>) -> Result<()> {
        let StoredFile { name, identity, .. } = file;
        self.remove(name);
        let mut text = None;
        if let Some((header, tokens)) = beginning {
            let group = group_of_file(header)?;
            let all = i32::try_from(tokens.len()).unwrap_or(i32::MAX);
            let mut reach = Reach {
                rewindable_to: header.rewindable_to.unwrap_or(all),
                checkpoints: header.snapshot.checkpoints(),
            };
            // Texts shorter than `quantized_kv_start` have other formats.
            let start = header.snapshot.storage.quantized_kv_start;
            let converted_at = start.filter(|&start| start <= all).unwrap_or_default();
            reach.checkpoints.retain(|&kept| kept >= converted_at);
            let capacity = usize::try_from(header.snapshot.capacity).unwrap_or_default();
            let entry = Entry { what: name.clone(), reach, capacity };
            let tokens: Arc<[i64]> = tokens.into();
            self.groups.entry(group.clone()).or_default().insert(tokens.clone(), entry);
            text = Some((group, tokens));
        }
        self.files.insert(name.clone(), IndexedFile { identity: *identity, text });
        Ok(())
    }

    /// Records that a file cannot be used. This holds until another file has the same name.
    pub fn give_up(&mut self, name: &str) {
        if let Some(identity) = self.files.get(name).map(|known| known.identity) {
            self.remove(name);
            self.files.insert(name.to_owned(), IndexedFile { identity, text: None });
        }
    }

    fn remove(&mut self, name: &str) {
        let Some((group, tokens)) = self.files.remove(name).and_then(|known| known.text) else {
            return;
        };
        let Some(texts) = self.groups.get_mut(&group) else { return };
        // Another file may have the same text.
        if texts.get(&tokens).is_some_and(|entry| entry.what == name) {
            texts.remove(&tokens);
        }
        if texts.is_empty() {
            self.groups.remove(&group);
        }
    }

    /// Removes the files for which `is_there` is false.
    pub fn keep(&mut self, is_there: impl Fn(&str) -> bool) {
        self.longer.retain(|name, _| is_there(name));
        let gone: Vec<String> = self.files.keys().filter(|name| !is_there(name)).cloned().collect();
        gone.iter().for_each(|name| self.remove(name));
    }

    /// Returns at most `most` files whose caches have at most `capacity` positions and share at least `least` first
    /// tokens with a text. Files that share more tokens come first.
    pub fn matches<'a>(
        &'a self,
        group: &str,
        tokens: &'a [i64],
        least: usize,
        capacity: usize,
        most: usize,
    ) -> impl Iterator<Item = Match> + 'a {
        let texts = self.groups.get(group);
        let found = texts.map(|texts| texts.matches(tokens, least, capacity, most));
        found
            .into_iter()
            .flatten()
            .map(|(n_tokens, entry)| Match { name: entry.what.clone(), n_tokens })
    }

    /// Returns the maximum number of first tokens that any text of the index shares with `tokens`.
    pub fn common(&self, group: &str, tokens: &[i64], capacity: usize) -> usize {
        self.groups.get(group).map_or(0, |texts| texts.common(tokens, capacity))
    }

    /// Returns a file that can replace a file of this text in every use. The text of the returned file has at most
    /// `capacity` tokens, so that a cache of this capacity can load it.
    pub fn covering(
        &self,
        group: &str,
        tokens: &[i64],
        reach: &Reach,
        capacity: usize,
    ) -> Option<&Entry<String>> {
        self.groups.get(group)?.covering(tokens, reach, capacity)
    }

    /// Returns the files that a file of this text can replace in every use.
    pub fn covered(&self, group: &str, tokens: &[i64], reach: &Reach) -> Vec<String> {
        let texts = self.groups.get(group).into_iter();
        let covered = texts.flat_map(|texts| texts.covered(tokens, reach));
        covered.map(|entry| entry.what.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use etkv_core::snapshot::{Book, CellsState, CheckpointState, SavedFormats};
    use etkv_core::KvFormat;

    use super::*;

    fn file(name: &str) -> StoredFile {
        let used = std::time::SystemTime::UNIX_EPOCH;
        StoredFile { name: name.to_owned(), bytes: 1, used, identity: 1 }
    }

    fn header(fingerprint: &str, rewindable_to: i32) -> Header {
        header_with(fingerprint, rewindable_to, &[])
    }

    fn header_with(fingerprint: &str, rewindable_to: i32, checkpoints: &[usize]) -> Header {
        let of = |&position: &usize| CheckpointState {
            owner: 256 + position as i32,
            position: position as i32,
            sequences: vec![0],
        };
        let cells = CellsState {
            groups: Vec::new(),
            trees: Vec::new(),
            recurrent: None,
            checkpoints: checkpoints.iter().map(of).collect(),
        };
        let snapshot = Snapshot {
            kind: "contiguous".into(),
            layers: Vec::new(),
            recurrent_layers: Vec::new(),
            anchors: 0,
            capacity: 100,
            max_step_tokens: 0,
            storage: SavedFormats {
                k_format: KvFormat::F32,
                v_format: KvFormat::F32,
                quantized_kv_start: None,
                float_format: KvFormat::F32,
            },
            formats: [KvFormat::F32; 2],
            awaits: false,
            book: Book::Cells(cells),
        };
        let mut header = Header::new(fingerprint, snapshot, 0, &[]).unwrap();
        header.rewindable_to = Some(rewindable_to);
        header
    }

    /// Returns a text of a few tokens. Many of these texts begin with the same tokens.
    fn text(state: &mut u64) -> Vec<i64> {
        let mut next = |below: u64| {
            *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_041);
            (*state >> 33) % below
        };
        (0..1 + next(7)).map(|_| next(3) as i64 - 1).collect()
    }

    /// Compares the index with a list that is searched linearly.
    #[test]
    fn an_index_finds_the_same_texts_as_a_list() {
        let mut state = 7;
        for _ in 0..200 {
            let mut index = Index::default();
            let mut list: Vec<(Vec<i64>, usize, Vec<usize>, String)> = Vec::new();
            let group = group_of_file(&header("a", 0)).unwrap();
            let n_files = 1 + text(&mut state).len() * 3;
            for number in 0..n_files {
                let tokens = text(&mut state);
                let least = text(&mut state).len() - 1;
                let name = format!("{number}");
                let kept: Vec<usize> = text(&mut state)
                    .iter()
                    .map(|&token| token.unsigned_abs() as usize % 6 + 1)
                    .collect();
                let header = header_with("a", least as i32, &kept);
                index.add(&file(&name), Some((&header, tokens.clone()))).unwrap();
                list.retain(|(text, ..)| *text != tokens);
                list.push((tokens, least, kept, name));
                if number % 4 == 3 {
                    let (.., name) = list.remove(number % list.len());
                    index.remove(&name);
                }
            }
            index.add(&file("other"), Some((&header("b", 0), vec![0, 0, 0]))).unwrap();
            index.add(&file("damaged"), None).unwrap();
            let query = text(&mut state);
            for (least, capacity) in [(1, 100), (2, 5), (3, 3)] {
                let found: Vec<Match> =
                    index.matches(&group, &query, least, capacity, usize::MAX).collect();
                let alike =
                    |text: &[i64]| text.iter().zip(&query).take_while(|(a, b)| a == b).count();
                let serves = |text: &[i64], to: usize, kept: &[usize]| {
                    let reaches = |n: &usize| *n == text.len() || *n >= to || kept.contains(n);
                    (1..=alike(text)).rev().find(reaches).unwrap_or(0)
                };
                let mut wanted: Vec<(usize, &str)> = list
                    .iter()
                    .filter(|(text, ..)| text.len() <= capacity)
                    .map(|(text, to, kept, name)| (serves(text, *to, kept), name.as_str()))
                    .filter(|&(n, _)| n >= least)
                    .collect();
                let counts: Vec<usize> = found.iter().map(|found| found.n_tokens).collect();
                assert!(counts.is_sorted_by(|a, b| a >= b));
                let mut found: Vec<(usize, &str)> =
                    found.iter().map(|found| (found.n_tokens, found.name.as_str())).collect();
                found.sort_unstable();
                wanted.sort_unstable();
                assert_eq!(found, wanted, "{query:?} in {list:?}");
            }
            for (mine, capacity) in [(0, 100), (2, 100), (6, 5)] {
                let covers = list.iter().any(|(text, to, ..)| {
                    let to_all = *to <= mine.min(query.len());
                    text.starts_with(&query) && to_all && text.len() <= capacity
                });
                let reach = Reach { rewindable_to: mine as i32, checkpoints: Vec::new() };
                let found = index.covering(&group, &query, &reach, capacity);
                assert_eq!(found.is_some(), covers);
            }
            for to in [0, 2, 4] {
                let reach = Reach { rewindable_to: to as i32, checkpoints: vec![1] };
                let mut covered = index.covered(&group, &query, &reach);
                let is_covered = |text: &[i64], least: usize, kept: &[usize]| {
                    let mut lost =
                        kept.iter().filter(|&&kept| kept <= text.len() && kept < to && kept != 1);
                    let shorter = query.starts_with(text) && text.len() < query.len();
                    shorter && to <= least.min(text.len()) && lost.next().is_none()
                };
                let wanted =
                    list.iter().filter(|(text, least, kept, _)| is_covered(text, *least, kept));
                let mut wanted: Vec<String> = wanted.map(|(.., name)| name.clone()).collect();
                covered.sort_unstable();
                wanted.sort_unstable();
                assert_eq!(covered, wanted, "{query:?} in {list:?}");
            }
        }
    }

    #[test]
    fn missing_files_leave_the_index() {
        let mut index = Index::default();
        let group = group_of_file(&header("a", 0)).unwrap();
        index.add(&file("one"), Some((&header("a", 0), vec![1, 2]))).unwrap();
        index.add(&file("two"), Some((&header("a", 0), vec![1, 2]))).unwrap();
        index.add(&file("three"), None).unwrap();
        index.keep(|name| name == "two");
        assert!(index.knows(&file("two"), 8));
        assert!(!index.knows(&file("one"), 8) && !index.knows(&file("three"), 8));
        assert!(!index.knows(&StoredFile { identity: 2, ..file("two") }, 8));
        let found: Vec<Match> = index.matches(&group, &[1, 2, 3], 1, 9, 5).collect();
        assert_eq!(found, [Match { name: "two".into(), n_tokens: 2 }]);
        index.give_up("two");
        assert_eq!(index.matches(&group, &[1, 2, 3], 1, 9, 5).count(), 0);
        assert!(index.knows(&file("two"), 8));
        index.keep(|_| false);
        assert_eq!(index.matches(&group, &[1, 2], 1, 9, 5).count(), 0);
    }
}
