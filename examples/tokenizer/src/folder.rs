//! The files of a published model next to its `tokenizer.json`.

use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::{Error, Result};

/// The settings of a model's folder, without the tokenizer. Every file may be missing.
pub struct Folder {
    pub path: PathBuf,
    /// The contents of `tokenizer_config.json`, or null.
    pub config: Value,
    /// The chat templates by name. A single template has the name "default".
    pub chat_templates: BTreeMap<String, String>,
    /// `bos_token`, `eos_token` and the other special tokens, by name.
    pub special_tokens: BTreeMap<String, String>,
    /// The ids that end an answer, from `generation_config.json`.
    pub eos_token_ids: Option<Vec<u32>>,
}

impl Folder {
    pub fn read(path: &Path) -> Result<Self> {
        let config = read_json(&path.join("tokenizer_config.json"))?.unwrap_or(Value::Null);
        let generation_file = path.join("generation_config.json");
        let generation = read_json(&generation_file)?.unwrap_or(Value::Null);
        let mut chat_templates = template_files(path)?;
        if chat_templates.is_empty() {
            chat_templates = templates_in(&config);
        }
        Ok(Self {
            path: path.to_owned(),
            chat_templates,
            special_tokens: special_tokens(&config),
            eos_token_ids: ids(&generation["eos_token_id"])
                .map_err(|reason| Error::File { path: generation_file, reason })?,
            config,
        })
    }
}

/// Returns `chat_template.jinja`, and the templates of `additional_chat_templates`.
fn template_files(path: &Path) -> Result<BTreeMap<String, String>> {
    let mut templates = BTreeMap::new();
    let folder = path.join("additional_chat_templates");
    let unreadable =
        |error: std::io::Error| Error::File { path: folder.clone(), reason: error.to_string() };
    let entries =
        if folder.is_dir() { Some(fs::read_dir(&folder).map_err(unreadable)?) } else { None };
    for entry in entries.into_iter().flatten() {
        let file = entry.map_err(unreadable)?.path();
        let name = file.file_name().and_then(|name| name.to_str()?.strip_suffix(".jinja"));
        if let (Some(name), Some(text)) = (name, read_text(&file)?) {
            templates.insert(name.to_owned(), text);
        }
    }
    if let Some(template) = read_text(&path.join("chat_template.jinja"))? {
        templates.insert("default".to_owned(), template);
    }
    Ok(templates)
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

/// Returns the templates of a config, which has a single one, a list with names, or a map by name.
fn templates_in(config: &Value) -> BTreeMap<String, String> {
    let named = |name: &Value, template: &Value| {
        Some((name.as_str()?.to_owned(), template.as_str()?.to_owned()))
    };
    match &config["chat_template"] {
        Value::String(template) => [("default".to_owned(), template.clone())].into(),
        Value::Array(all) => {
            all.iter().filter_map(|entry| named(&entry["name"], &entry["template"])).collect()
        }
        Value::Object(all) => all
            .iter()
            .filter_map(|(name, template)| named(&Value::from(name.as_str()), template))
            .collect(),
        _ => BTreeMap::new(),
    }
}

/// Returns every `…_token` of the config, and its model-specific special tokens. In older folders a token is an
/// object.
fn special_tokens(config: &Value) -> BTreeMap<String, String> {
    let of_the_model = ["extra_special_tokens", "model_specific_special_tokens"]
        .into_iter()
        .filter_map(|name| config[name].as_object())
        .flatten();
    let named =
        config.as_object().into_iter().flatten().filter(|(name, _)| name.ends_with("_token"));
    named
        .chain(of_the_model)
        .filter_map(|(name, value)| {
            let token = value.as_str().or_else(|| value["content"].as_str())?;
            Some((name.clone(), token.to_owned()))
        })
        .collect()
}

/// Returns one id or a list of ids as a list; None for null.
fn ids(value: &Value) -> std::result::Result<Option<Vec<u32>>, String> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let ids = match value {
        Value::Null => return Ok(None),
        Value::Array(list) => list.iter().map(id).collect(),
        one => id(one).map(|id| vec![id]),
    };
    match ids {
        Some(ids) => Ok(Some(ids)),
        None => Err(format!("eos_token_id is {value}, expected an id or a list of ids")),
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
        assert!(read.chat_templates.is_empty());
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
        assert_eq!(read.chat_templates["default"], "old");
        assert_eq!(read.special_tokens["bos_token"], "<s>");
        assert_eq!(read.special_tokens["eos_token"], "</s>");
        assert_eq!(read.special_tokens.len(), 2);

        fs::write(folder.path().join("chat_template.jinja"), "new").unwrap();
        let read = Folder::read(folder.path()).unwrap();
        assert_eq!(read.chat_templates["default"], "new");
        assert_eq!(read.chat_templates.len(), 1);

        let more = folder.path().join("additional_chat_templates");
        fs::create_dir(&more).unwrap();
        fs::write(more.join("tool_use.jinja"), "tools").unwrap();
        fs::write(more.join("notes.txt"), "no template").unwrap();
        let read = Folder::read(folder.path()).unwrap();
        assert_eq!(read.chat_templates["tool_use"], "tools");
        assert_eq!(read.chat_templates.len(), 2);
    }

    #[test]
    fn several_templates() {
        let list = json!({"chat_template": [
            {"name": "tool_use", "template": "t"},
            {"name": "default", "template": "d"},
        ]});
        let map = json!({"chat_template": {"tool_use": "t", "default": "d"}});
        for config in [list, map] {
            let templates = templates_in(&config);
            assert_eq!((&*templates["default"], &*templates["tool_use"]), ("d", "t"));
        }
        assert!(templates_in(&json!({"chat_template": []})).is_empty());
    }

    #[test]
    fn tokens_of_the_model_alone() {
        let tokens = special_tokens(&json!({"extra_special_tokens": {"image_token": "<image>"}}));
        assert_eq!(tokens["image_token"], "<image>");
        assert!(special_tokens(&json!({"extra_special_tokens": ["<image>"]})).is_empty());
    }

    #[test]
    fn eos_token_ids_are_one_or_a_list() {
        assert_eq!(ids(&json!(7)), Ok(Some(vec![7])));
        assert_eq!(ids(&json!([1, 2])), Ok(Some(vec![1, 2])));
        assert_eq!(ids(&json!(null)), Ok(None));
        for wrong in [json!(-1), json!("2"), json!([1, null])] {
            let refusal = ids(&wrong).unwrap_err();
            assert!(refusal.starts_with("eos_token_id is "), "{refusal}");
        }
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
