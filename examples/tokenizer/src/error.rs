//! Errors of a tokenizer, as messages for users.

use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("there is no tokenizer at {}", .0.display())]
    Missing(PathBuf),

    #[error("cannot read the tokenizer {}: {reason}", path.display())]
    Tokenizer { path: PathBuf, reason: String },

    #[error("cannot read {}: {reason}", path.display())]
    File { path: PathBuf, reason: String },

    #[error("the tokenizer cannot encode this text: {0}")]
    Encode(String),

    #[error("the tokenizer cannot decode token {id}: {reason}")]
    Decode { id: i64, reason: String },

    #[error("{} has no chat template", .0.display())]
    NoTemplate(PathBuf),

    #[error("none of the chat templates is for a conversation without tools: expected one named default, found {0}")]
    NoDefaultTemplate(String),

    #[error("the chat template cannot render this conversation: {0}")]
    Template(String),

    #[error("the variables of the chat template cannot be read: expected a JSON object: {0}")]
    Variables(String),

    #[error("message {0} has no role: expected system, user, assistant, or another one of the chat template")]
    NoRole(usize),

    #[error("{what} is not valid UTF-8 at byte {at}")]
    Utf8 { what: &'static str, at: usize },

    #[error("a defect in the tokenizer library: {0}")]
    Panic(String),
}

pub type Result<T> = std::result::Result<T, Error>;
