//! A tokenizer, and what its folder says about conversations.

use std::path::Path;
use std::sync::Arc;

use tokenizers::Tokenizer;

use crate::chat::{ChatTemplate, Message};
use crate::error::{Error, Result};
use crate::folder::Folder;

pub struct Text {
    pub tokenizer: Arc<Tokenizer>,
    folder: Folder,
    template: Option<ChatTemplate>,
    eos_token_ids: Vec<u32>,
}

impl Text {
    /// Opens a `tokenizer.json`, or the folder that holds one.
    pub fn open(path: &Path) -> Result<Self> {
        let file = if path.is_dir() { path.join("tokenizer.json") } else { path.to_owned() };
        if !file.exists() {
            return Err(Error::Missing(file));
        }
        let mut tokenizer = Tokenizer::from_file(&file)
            .map_err(|error| Error::Tokenizer { path: file.clone(), reason: error.to_string() })?;
        // What a tokenizer remembers of words stays with the thread, also when the
        // tokenizer is gone.
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
        Ok(Self { tokenizer: Arc::new(tokenizer), folder, template, eos_token_ids })
    }

    /// The ids of `text`; with the tokens that the tokenizer puts around a text
    /// if `special`.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        self.tokenizer
            .encode_fast(text, special)
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|error| Error::Encode(error.to_string()))
    }

    /// The ids of a conversation, up to where the model's next message begins
    /// if `add_generation_prompt`.
    pub fn encode_chat(
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

    /// The ids that end an answer; none if the folder does not tell.
    pub fn eos_token_ids(&self) -> &[u32] {
        &self.eos_token_ids
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
        let by_folder = Text::open(folder.path()).unwrap();
        let by_file = Text::open(&folder.path().join("tokenizer.json")).unwrap();
        let ids = by_folder.encode("hello é", false).unwrap();
        assert_eq!(ids, by_file.encode("hello é", false).unwrap());
        assert_eq!(by_folder.tokenizer.decode(&ids, true).unwrap(), "hello é");
    }

    #[test]
    fn special_tokens_around_a_text() {
        let text = Text::open(fixture::folder().path()).unwrap();
        let bare = text.encode("a", false).unwrap();
        let special = text.encode("a", true).unwrap();
        assert_eq!(special, [&[fixture::START][..], &bare].concat());
    }

    #[test]
    fn eos_token_ids_of_the_generation_config_go_first() {
        let folder = fixture::folder();
        assert_eq!(Text::open(folder.path()).unwrap().eos_token_ids(), [fixture::END]);
        fs::write(folder.path().join("generation_config.json"), r#"{"eos_token_id": [5, 6]}"#)
            .unwrap();
        assert_eq!(Text::open(folder.path()).unwrap().eos_token_ids(), [5, 6]);
    }

    #[test]
    fn a_conversation() {
        let text = Text::open(fixture::folder().path()).unwrap();
        let messages = [Message { role: "user".to_owned(), content: "hi".to_owned() }];
        let ids = text.encode_chat(&messages, true).unwrap();
        assert_eq!(ids[0], fixture::START);
        assert_eq!(
            text.tokenizer.decode(&ids, false).unwrap(),
            "<start>user: hi<end><start>assistant: "
        );
    }

    #[test]
    fn without_a_template() {
        let folder = fixture::folder();
        fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
        let text = Text::open(folder.path()).unwrap();
        assert!(!text.has_chat_template());
        let error = text.encode_chat(&[], true).unwrap_err().to_string();
        assert!(error.ends_with("has no chat template"), "{error}");
    }

    #[test]
    fn missing_and_unreadable_tokenizers_name_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        let missing = Text::open(folder.path()).err().unwrap().to_string();
        assert_eq!(missing, format!("there is no tokenizer at {}", path.display()));

        fs::write(&path, "{\"version\": 1").unwrap();
        let unreadable = Text::open(&path).err().unwrap().to_string();
        assert!(
            unreadable.starts_with(&format!("cannot read the tokenizer {}: ", path.display())),
            "{unreadable}"
        );
    }
}
