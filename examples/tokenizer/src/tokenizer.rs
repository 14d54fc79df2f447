//! A tokenizer, and the settings of its folder for conversations.

use std::path::Path;
use std::sync::Arc;

use crate::backend::Backend;
use crate::conversation::{parts, Part};
use crate::detokenizer::Detokenizer;
use crate::error::{Error, Result};
use crate::folder::Folder;
use crate::pipeline;
use crate::template::{ChatTemplates, Variables};

pub struct Tokenizer {
    pub backend: Arc<Backend>,
    folder: Folder,
    templates: ChatTemplates,
    eos_token_ids: Vec<u32>,
}

impl Tokenizer {
    /// Opens a `tokenizer.json`, or the folder that holds one.
    pub fn from_pretrained(path: &Path) -> Result<Self> {
        let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
        if !file.exists() {
            return Err(Error::Missing(file));
        }
        let unreadable = |reason: String| Error::Tokenizer { path: file.clone(), reason };
        pipeline::check(&file).map_err(unreadable)?;
        let model = tokenizers::Tokenizer::from_file(&file)
            .map_err(|error| unreadable(error.to_string()))?;
        let mut folder = Folder::read(file.parent().unwrap_or(Path::new(".")))?;
        let backend = Backend::new(model, &folder.config).map_err(unreadable)?;

        let templates = ChatTemplates::new(
            std::mem::take(&mut folder.chat_templates),
            folder.special_tokens.clone(),
        );
        let eos_token_ids = match &folder.eos_token_ids {
            Some(ids) => ids.clone(),
            None => folder
                .special_tokens
                .get("eos_token")
                .and_then(|token| backend.id_of(token))
                .into_iter()
                .collect(),
        };
        Ok(Self { backend: Arc::new(backend), folder, templates, eos_token_ids })
    }

    /// Returns the ids of `text`. With `add_special_tokens`, includes the tokens that the tokenizer adds around a
    /// text. The first token (BOS) is not added to a text that already begins with it.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        self.backend.encode(text, add_special_tokens)
    }

    /// Returns whether `text` begins with the token that the tokenizer adds before a text.
    pub fn begins_with_bos(&self, text: &str) -> Result<bool> {
        self.backend.begins_with_bos(text)
    }

    /// Returns the text of a conversation.
    pub fn render_chat_template(&self, variables: &Variables) -> Result<String> {
        if !self.has_chat_template() {
            return Err(Error::NoTemplate(self.folder.path.clone()));
        }
        self.templates.render(variables)
    }

    /// Returns the ids of a conversation. The ids of a message are used instead of its text, if the template writes
    /// that text unchanged.
    pub fn apply_chat_template(&self, variables: &Variables) -> Result<Vec<u32>> {
        let parts = parts(variables, |variables| self.render_chat_template(variables))?;
        let mut ids = Vec::new();
        for part in parts {
            match part {
                // The template writes the special tokens itself.
                Part::Text(text) if ids.is_empty() => ids = self.encode(&text, false)?,
                Part::Text(text) => ids.extend(self.backend.encode_after(&text)?),
                Part::Ids(answer) => ids.extend(answer),
            }
        }
        Ok(ids)
    }

    pub fn has_chat_template(&self) -> bool {
        !self.templates.is_empty()
    }

    /// Returns the ids that end an answer; none if the folder does not name any.
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.eos_token_ids
    }

    /// Returns a detokenizer for one answer. The detokenizer may outlive the tokenizer.
    pub fn detokenizer(&self, skip_special_tokens: bool) -> Box<Detokenizer> {
        Box::new(Detokenizer::new(Arc::clone(&self.backend), skip_special_tokens))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use crate::template::Message;
    use serde_json::json;
    use std::fs;

    fn said(role: &str, content: &str, ids: &[u32]) -> Message {
        Message { role: role.to_owned(), content: content.to_owned(), ids: ids.to_vec() }
    }

    fn conversation(messages: &[Message]) -> Variables {
        Variables::new(messages.to_vec(), true, "").unwrap()
    }

    #[test]
    fn a_file_or_its_folder() {
        let folder = fixture::folder();
        let by_folder = Tokenizer::from_pretrained(folder.path()).unwrap();
        let by_file = Tokenizer::from_pretrained(&folder.path().join("tokenizer.json")).unwrap();
        let ids = by_folder.encode("hello é", false).unwrap();
        assert_eq!(ids, by_file.encode("hello é", false).unwrap());
        assert_eq!(by_folder.backend.decode(&ids, true).unwrap(), "hello é");
    }

    #[test]
    fn special_tokens_around_a_text() {
        let tokenizer = fixture::tokenizer();
        let bare = tokenizer.encode("a", false).unwrap();
        let special = tokenizer.encode("a", true).unwrap();
        assert_eq!(special, [&[fixture::START][..], &bare].concat());
        assert!(!tokenizer.begins_with_bos("a").unwrap());
    }

    #[test]
    fn a_text_with_bos_gets_no_second_one() {
        let tokenizer = fixture::tokenizer();
        let once = tokenizer.encode("a", true).unwrap();
        assert_eq!(tokenizer.encode("<start>a", true).unwrap(), once);
        assert!(tokenizer.begins_with_bos("<start>a").unwrap());
        // A BOS in the text itself stays.
        let twice = [&[fixture::START][..], &once].concat();
        assert_eq!(tokenizer.encode("<start><start>a", true).unwrap(), twice);
        assert_eq!(tokenizer.encode("", true).unwrap(), [fixture::START]);
        assert_eq!(tokenizer.encode("<start>", true).unwrap(), [fixture::START]);
    }

    #[test]
    fn truncation_and_padding_do_not_count() {
        let folder = fixture::folder();
        let plain =
            Tokenizer::from_pretrained(folder.path()).unwrap().encode("hello", true).unwrap();
        let path = folder.path().join("tokenizer.json");
        let mut file: serde_json::Value =
            serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
        file["truncation"] =
            json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
        file["padding"] = json!({"strategy": {"Fixed": 32}, "direction": "Left", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "!"});
        fs::write(&path, file.to_string()).unwrap();
        let tokenizer = Tokenizer::from_pretrained(folder.path()).unwrap();
        assert_eq!(tokenizer.encode("hello", true).unwrap(), plain);
    }

    #[test]
    fn settings_of_the_config_count() {
        let folder = fixture::folder();
        let path = folder.path().join("tokenizer_config.json");
        fs::write(&path, r#"{"split_special_tokens": true}"#).unwrap();
        let tokenizer = Tokenizer::from_pretrained(folder.path()).unwrap();
        assert_eq!(tokenizer.encode("<end>", false).unwrap().len(), 5);
        let spaced = |config: &str| {
            fs::write(&path, config).unwrap();
            let tokenizer = Tokenizer::from_pretrained(folder.path()).unwrap();
            let ids = tokenizer.encode("a , b .", false).unwrap();
            tokenizer.backend.decode(&ids, true).unwrap()
        };
        assert_eq!(spaced(r#"{"clean_up_tokenization_spaces": true}"#), "a , b .");
        let even_for_bpe = r#"{"clean_up_tokenization_spaces": true,
            "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": true}"#;
        assert_eq!(spaced(even_for_bpe), "a, b.");
    }

    #[test]
    fn eos_token_ids_of_the_generation_config_go_first() {
        let folder = fixture::folder();
        assert_eq!(
            Tokenizer::from_pretrained(folder.path()).unwrap().eos_token_ids(),
            [fixture::END]
        );
        fs::write(folder.path().join("generation_config.json"), r#"{"eos_token_id": [5, 6]}"#)
            .unwrap();
        assert_eq!(Tokenizer::from_pretrained(folder.path()).unwrap().eos_token_ids(), [5, 6]);
    }

    #[test]
    fn a_conversation() {
        let tokenizer = fixture::tokenizer();
        let ids = tokenizer.apply_chat_template(&conversation(&[said("user", "hi", &[])])).unwrap();
        assert_eq!(ids[0], fixture::START);
        assert_eq!(
            tokenizer.backend.decode(&ids, false).unwrap(),
            "<start>user: hi<end><start>assistant: "
        );
    }

    #[test]
    fn an_answer_keeps_its_ids() {
        let tokenizer = fixture::tokenizer();
        // The tokenizer would encode the same text to other ids.
        let answer = [fixture::END, 1, 2];
        let whole = tokenizer
            .apply_chat_template(&conversation(&[
                said("user", "yo", &[]),
                said("assistant", " yo ", &answer),
                said("user", "yo", &[]),
            ]))
            .unwrap();
        let expected = [
            tokenizer.encode("<start>user: yo<end><start>assistant: ", false).unwrap(),
            answer.to_vec(),
            tokenizer.encode("<end><start>user: yo<end><start>assistant: ", false).unwrap(),
        ]
        .concat();
        assert_eq!(whole, expected);
    }

    #[test]
    fn without_a_template() {
        let folder = fixture::folder();
        fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
        let tokenizer = Tokenizer::from_pretrained(folder.path()).unwrap();
        assert!(!tokenizer.has_chat_template());
        let error = tokenizer.apply_chat_template(&conversation(&[])).unwrap_err().to_string();
        assert!(error.ends_with("has no chat template"), "{error}");
    }

    #[test]
    fn missing_and_unreadable_tokenizers_name_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        let missing = Tokenizer::from_pretrained(folder.path()).err().unwrap().to_string();
        assert_eq!(missing, format!("there is no tokenizer at {}", path.display()));

        fs::write(&path, "{\"version\": 1").unwrap();
        let unreadable = Tokenizer::from_pretrained(&path).err().unwrap().to_string();
        assert!(
            unreadable.starts_with(&format!("cannot read the tokenizer {}: ", path.display())),
            "{unreadable}"
        );
    }
}
