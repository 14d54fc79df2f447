//! The C++ interface, which `cxx` generates from this file; `tokenizer.cpp` calls it.
//!
//! An error throws `rust::Error` in C++. A panic would end the process, so functions that return a `Result` convert a
//! panic to an error. The other functions only read fields. Text arrives as bytes, and is checked for UTF-8 here.

use std::ffi::OsStr;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::Path;
use std::str;

use crate::detokenizer::Detokenizer;
use crate::error::{Error, Result};
use crate::template::{self, Variables};
use crate::tokenizer::Tokenizer;

#[cxx::bridge(namespace = "etkv::examples::bridge")]
mod ffi {
    /// A message of a conversation, in UTF-8.
    struct Message<'a> {
        /// "system", "user", "assistant", or another role of the template.
        role: &'a [u8],
        content: &'a [u8],
        /// The ids that the model generated for `content`; empty for other text.
        ids: Vec<u32>,
    }

    extern "Rust" {
        type Tokenizer;
        type Detokenizer;

        fn from_pretrained(path: &[u8]) -> Result<Box<Tokenizer>>;
        fn encode(tokenizer: &Tokenizer, text: &[u8], add_special_tokens: bool)
            -> Result<Vec<u32>>;
        fn begins_with_bos(tokenizer: &Tokenizer, text: &[u8]) -> Result<bool>;
        fn check_variables(variables: &[u8]) -> Result<()>;
        /// `variables` is a JSON object, or empty.
        fn render_chat_template(
            tokenizer: &Tokenizer,
            messages: &[Message],
            add_generation_prompt: bool,
            variables: &[u8],
        ) -> Result<String>;
        fn apply_chat_template(
            tokenizer: &Tokenizer,
            messages: &[Message],
            add_generation_prompt: bool,
            variables: &[u8],
        ) -> Result<Vec<u32>>;
        fn has_chat_template(self: &Tokenizer) -> bool;
        fn eos_token_ids(self: &Tokenizer) -> &[u32];
        fn detokenizer(self: &Tokenizer, skip_special_tokens: bool) -> Box<Detokenizer>;

        /// The strings that these functions return are valid until the next call.
        fn add_token(detokenizer: &mut Detokenizer, id: i64) -> Result<&str>;
        fn finalize(detokenizer: &mut Detokenizer) -> Result<&str>;
    }
}

fn from_pretrained(path: &[u8]) -> Result<Box<Tokenizer>> {
    boundary(|| Tokenizer::from_pretrained(Path::new(os_str(path)?)).map(Box::new))
}

fn encode(tokenizer: &Tokenizer, text: &[u8], add_special_tokens: bool) -> Result<Vec<u32>> {
    boundary(|| tokenizer.encode(utf8(text, "the text")?, add_special_tokens))
}

fn begins_with_bos(tokenizer: &Tokenizer, text: &[u8]) -> Result<bool> {
    boundary(|| tokenizer.begins_with_bos(utf8(text, "the text")?))
}

fn render_chat_template(
    tokenizer: &Tokenizer,
    messages: &[ffi::Message],
    add_generation_prompt: bool,
    more: &[u8],
) -> Result<String> {
    boundary(|| tokenizer.render_chat_template(&variables(messages, add_generation_prompt, more)?))
}

fn apply_chat_template(
    tokenizer: &Tokenizer,
    messages: &[ffi::Message],
    add_generation_prompt: bool,
    more: &[u8],
) -> Result<Vec<u32>> {
    boundary(|| tokenizer.apply_chat_template(&variables(messages, add_generation_prompt, more)?))
}

fn check_variables(more: &[u8]) -> Result<()> {
    boundary(|| variables(&[], false, more).map(drop))
}

fn variables(
    messages: &[ffi::Message],
    add_generation_prompt: bool,
    more: &[u8],
) -> Result<Variables> {
    let messages = messages
        .iter()
        .enumerate()
        .map(|(index, message)| {
            let role = utf8(message.role, "the role")?;
            if role.is_empty() {
                return Err(Error::NoRole(index));
            }
            Ok(template::Message {
                role: role.to_owned(),
                content: utf8(message.content, "the text")?.to_owned(),
                ids: message.ids.clone(),
            })
        })
        .collect::<Result<Vec<_>>>()?;
    Variables::new(messages, add_generation_prompt, utf8(more, "the template's variables")?)
}

fn add_token(detokenizer: &mut Detokenizer, id: i64) -> Result<&str> {
    boundary(|| detokenizer.add_token(id))
}

fn finalize(detokenizer: &mut Detokenizer) -> Result<&str> {
    boundary(|| detokenizer.finalize())
}

/// Runs `body`, and returns its panic as an error.
fn boundary<T>(body: impl FnOnce() -> Result<T>) -> Result<T> {
    // A panic cannot leave invalid state: tokenizers are read-only, and a detokenizer holds only text.
    catch_unwind(AssertUnwindSafe(body))
        .unwrap_or_else(|panic| Err(Error::Panic(panic_message(panic.as_ref()))))
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> String {
    if let Some(message) = panic.downcast_ref::<&str>() {
        (*message).to_owned()
    } else if let Some(message) = panic.downcast_ref::<String>() {
        message.clone()
    } else {
        "unknown".to_owned()
    }
}

fn utf8<'a>(bytes: &'a [u8], what: &'static str) -> Result<&'a str> {
    str::from_utf8(bytes).map_err(|error| Error::Utf8 { what, at: error.valid_up_to() })
}

#[cfg(unix)]
fn os_str(path: &[u8]) -> Result<&OsStr> {
    use std::os::unix::ffi::OsStrExt;
    Ok(OsStr::from_bytes(path))
}

#[cfg(not(unix))]
fn os_str(path: &[u8]) -> Result<&OsStr> {
    utf8(path, "the path").map(OsStr::new)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;

    fn open() -> Box<Tokenizer> {
        from_pretrained(fixture::folder().path().to_str().unwrap().as_bytes()).unwrap()
    }

    #[test]
    fn a_detokenizer_outlives_its_tokenizer() {
        let tokenizer = open();
        let ids = encode(&tokenizer, "hi é".as_bytes(), false).unwrap();
        let mut detokenizer = tokenizer.detokenizer(true);
        drop(tokenizer);
        let mut answer = String::new();
        for id in ids {
            answer += add_token(&mut detokenizer, id.into()).unwrap();
        }
        assert_eq!(answer, "hi é");
        assert_eq!(finalize(&mut detokenizer).unwrap(), "");
    }

    #[test]
    fn what_is_not_utf8_is_an_error() {
        let tokenizer = open();
        let bad = b"a\xff";
        let told = |error: Error| error.to_string();
        assert_eq!(
            told(encode(&tokenizer, bad, false).unwrap_err()),
            "the text is not valid UTF-8 at byte 1"
        );
        for (role, content, what) in [(&bad[..], &b""[..], "role"), (b"user", bad, "text")] {
            let messages = [ffi::Message { role, content, ids: Vec::new() }];
            assert_eq!(
                told(apply_chat_template(&tokenizer, &messages, true, b"").unwrap_err()),
                format!("the {what} is not valid UTF-8 at byte 1")
            );
        }
    }

    #[test]
    fn a_message_without_a_role_is_an_error() {
        let messages = ["user", ""].map(|role| ffi::Message {
            role: role.as_bytes(),
            content: b"hi",
            ids: Vec::new(),
        });
        let error = apply_chat_template(&open(), &messages, true, b"").unwrap_err();
        assert!(error.to_string().starts_with("message 1 has no role"), "{error}");
    }

    #[test]
    fn a_panic_is_an_error() {
        let error = boundary::<()>(|| panic!("oh no")).unwrap_err();
        assert_eq!(error.to_string(), "a defect in the tokenizer library: oh no");
    }
}
