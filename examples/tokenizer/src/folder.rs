//! The files that a published model keeps beside its `tokenizer.json`.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{Error, Result};

/// The settings of the folder besides the tokenizer itself. Every file may be missing.
pub struct Folder {
    pub path: PathBuf,
    pub chat_template: Option<String>,
    /// `bos_token`, `eos_token` and the other special tokens, by name.
    pub special_tokens: BTreeMap<String, String>,
    /// From `generation_config.json`: the ids that end an answer.
    pub eos_token_ids: Option<Vec<u32>>,
}

impl Folder {
    pub fn read(path: &Path) -> Result<Self> {
        let config = read_json(&path.join("tokenizer_config.json"))?.unwrap_or(Value::Null);
        let generation = read_json(&path.join("generation_config.json"))?.unwrap_or(Value::Null);
        let chat_template = match read_text(&path.join("chat_template.jinja"))? {
            Some(template) => Some(template),
            None => template_in(&config),
        };
        Ok(Self {
            path: path.to_owned(),
            chat_template,
            special_tokens: special_tokens(&config),
            eos_token_ids: ids(&generation["eos_token_id"]),
        })
    }
}

fn read_text(path: &Path) -> Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::File { path: path.to_owned(), reason: error.to_string() }),
    }
}

fn read_json(path: &Path) -> Result<Option<Value>> {
    let Some(text) = read_text(path)? else {
        return Ok(None);
    };
    serde_json::from_str(&text)
        .map(Some)
        .map_err(|error| Error::File { path: path.to_owned(), reason: error.to_string() })
}

/// Returns the one template, or the one named "default" of several.
fn template_in(config: &Value) -> Option<String> {
    match &config["chat_template"] {
        Value::String(template) => Some(template.clone()),
        Value::Array(named) => named
            .iter()
            .find(|entry| entry["name"] == "default")
            .and_then(|entry| entry["template"].as_str())
            .map(str::to_owned),
        _ => None,
    }
}

/// Returns every `…_token` of the config. Older folders write a token as an object.
fn special_tokens(config: &Value) -> BTreeMap<String, String> {
    let Some(entries) = config.as_object() else {
        return BTreeMap::new();
    };
    entries
        .iter()
        .filter(|(name, _)| name.ends_with("_token"))
        .filter_map(|(name, value)| {
            let token = value.as_str().or_else(|| value["content"].as_str())?;
            Some((name.clone(), token.to_owned()))
        })
        .collect()
}

/// Returns one id or a list of ids.
fn ids(value: &Value) -> Option<Vec<u32>> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    match value {
        Value::Array(list) => list.iter().map(id).collect(),
        one => id(one).map(|id| vec![id]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_empty_folder_says_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let read = Folder::read(folder.path()).unwrap();
        assert!(read.chat_template.is_none());
        assert!(read.special_tokens.is_empty());
        assert!(read.eos_token_ids.is_none());
    }

    #[test]
    fn the_template_file_goes_before_the_config() {
        let folder = tempfile::tempdir().unwrap();
        let config = json!({
            "chat_template": "old",
            "bos_token": {"content": "<s>", "lstrip": false},
            "eos_token": "</s>",
            "pad_token": null,
            "add_bos_token": true,
        });
        fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
        let read = Folder::read(folder.path()).unwrap();
        assert_eq!(read.chat_template.as_deref(), Some("old"));
        assert_eq!(read.special_tokens["bos_token"], "<s>");
        assert_eq!(read.special_tokens["eos_token"], "</s>");
        assert_eq!(read.special_tokens.len(), 2);

        fs::write(folder.path().join("chat_template.jinja"), "new").unwrap();
        let read = Folder::read(folder.path()).unwrap();
        assert_eq!(read.chat_template.as_deref(), Some("new"));
    }

    #[test]
    fn the_default_of_several_templates() {
        let config = json!({"chat_template": [
            {"name": "tool_use", "template": "t"},
            {"name": "default", "template": "d"},
        ]});
        assert_eq!(template_in(&config).as_deref(), Some("d"));
        assert_eq!(template_in(&json!({"chat_template": []})), None);
    }

    #[test]
    fn eos_token_ids_are_one_or_a_list() {
        assert_eq!(ids(&json!(7)), Some(vec![7]));
        assert_eq!(ids(&json!([1, 2])), Some(vec![1, 2]));
        assert_eq!(ids(&json!(null)), None);
        assert_eq!(ids(&json!(-1)), None);
    }

    #[test]
    fn a_broken_config_names_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("generation_config.json");
        fs::write(&path, "{").unwrap();
        let error = Folder::read(folder.path()).err().unwrap().to_string();
        assert!(error.contains(path.to_str().unwrap()), "{error}");
    }
}
