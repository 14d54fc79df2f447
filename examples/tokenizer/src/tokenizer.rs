//! A tokenizer, and the settings of its folder for conversations.

use std::path::Path;
use std::sync::Arc;

use crate::chat::{ChatTemplate, Message};
use crate::detokenizer::Detokenizer;
use crate::error::{Error, Result};
use crate::folder::Folder;

pub struct Tokenizer {
    pub model: Arc<tokenizers::Tokenizer>,
    folder: Folder,
    template: Option<ChatTemplate>,
    eos_token_ids: Vec<u32>,
}

impl Tokenizer {
    /// Opens a `tokenizer.json`, or the folder that holds one.
    pub fn from_pretrained(path: &Path) -> Result<Self> {
        let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
        if !file.exists() {
            return Err(Error::Missing(file));
        }
        let mut tokenizer = tokenizers::Tokenizer::from_file(&file)
            .map_err(|error| Error::Tokenizer { path: file.clone(), reason: error.to_string() })?;
        // A tokenizer's cache of words stays with the thread, even after the tokenizer is dropped.
        let mut model = tokenizer.get_model().clone();
        model.resize_cache(0);
        tokenizer.with_model(model);

        let folder = Folder::read(file.parent().unwrap_or(Path::new(".")))?;
        let template = folder
            .chat_template
            .as_deref()
            .map(|source| ChatTemplate::new(source, folder.special_tokens.clone()));
        let eos_token_ids = match &folder.eos_token_ids {
            Some(ids) => ids.clone(),
            None => folder
                .special_tokens
                .get("eos_token")
                .and_then(|token| tokenizer.token_to_id(token))
                .into_iter()
                .collect(),
        };
        Ok(Self { model: Arc::new(tokenizer), folder, template, eos_token_ids })
    }

    /// Returns the ids of `text`. With `add_special_tokens`, includes the tokens that the tokenizer
    /// puts around a text.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        self.model
            .encode_fast(text, add_special_tokens)
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|error| Error::Encode(error.to_string()))
    }

    /// Returns the ids of a conversation. With `add_generation_prompt`, it ends where the model's
    /// next message begins.
    pub fn apply_chat_template(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<Vec<u32>> {
        let template =
            self.template.as_ref().ok_or_else(|| Error::NoTemplate(self.folder.path.clone()))?;
        // The template writes the special tokens itself.
        self.encode(&template.render(messages, add_generation_prompt)?, false)
    }

    pub fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// Returns the ids that end an answer; none if the folder does not name any.
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.eos_token_ids
    }

    /// Returns a detokenizer for one answer. It may outlive the tokenizer.
    pub fn detokenizer(&self) -> Box<Detokenizer> {
        Box::new(Detokenizer::new(Arc::clone(&self.model)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use std::fs;

    #[test]
    fn a_file_or_its_folder() {
        let folder = fixture::folder();
        let by_folder = Tokenizer::from_pretrained(folder.path()).unwrap();
        let by_file = Tokenizer::from_pretrained(&folder.path().join("tokenizer.json")).unwrap();
        let ids = by_folder.encode("hello é", false).unwrap();
        assert_eq!(ids, by_file.encode("hello é", false).unwrap());
        assert_eq!(by_folder.model.decode(&ids, true).unwrap(), "hello é");
    }

    #[test]
    fn special_tokens_around_a_text() {
        let tokenizer = Tokenizer::from_pretrained(fixture::folder().path()).unwrap();
        let bare = tokenizer.encode("a", false).unwrap();
        let special = tokenizer.encode("a", true).unwrap();
        assert_eq!(special, [&[fixture::START][..], &bare].concat());
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
        let tokenizer = Tokenizer::from_pretrained(fixture::folder().path()).unwrap();
        let messages = [Message { role: "user".to_owned(), content: "hi".to_owned() }];
        let ids = tokenizer.apply_chat_template(&messages, true).unwrap();
        assert_eq!(ids[0], fixture::START);
        assert_eq!(
            tokenizer.model.decode(&ids, false).unwrap(),
            "<start>user: hi<end><start>assistant: "
        );
    }

    #[test]
    fn without_a_template() {
        let folder = fixture::folder();
        fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
        let tokenizer = Tokenizer::from_pretrained(folder.path()).unwrap();
        assert!(!tokenizer.has_chat_template());
        let error = tokenizer.apply_chat_template(&[], true).unwrap_err().to_string();
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
