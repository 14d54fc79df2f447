//! A small model folder for tests. The tokenizer's tokens are single bytes.

use std::fs;

use serde_json::json;
use tempfile::TempDir;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;

use crate::tokenizer::Tokenizer;

pub const START: u32 = 256;
pub const END: u32 = 257;

/// Returns the tokenizer of [`folder`].
pub fn tokenizer() -> Tokenizer {
    Tokenizer::from_pretrained(folder().path()).unwrap()
}

/// Returns a tokenizer like [`tokenizer`], with byte tokens as in Llama 2.
pub fn with_byte_fallback() -> Tokenizer {
    let folder = folder();
    let path = folder.path().join("tokenizer.json");
    let mut file: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(&path).unwrap()).unwrap();
    for byte in 0..=255 {
        file["model"]["vocab"][format!("<0x{byte:02X}>")] = json!(300 + byte);
    }
    file["decoder"] = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0}]});
    fs::write(&path, file.to_string()).unwrap();
    Tokenizer::from_pretrained(folder.path()).unwrap()
}

pub fn folder() -> TempDir {
    let mut alphabet: Vec<char> = ByteLevel::alphabet().into_iter().collect();
    alphabet.sort_unstable();
    let vocab: serde_json::Map<_, _> =
        alphabet.into_iter().zip(0..).map(|(byte, id)| (byte.to_string(), json!(id))).collect();
    let added = |id: u32, content: &str| {
        json!({"id": id, "content": content, "special": true, "single_word": false,
               "lstrip": false, "rstrip": false, "normalized": false})
    };
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [added(START, "<start>"), added(END, "<end>")],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false,
                          "trim_offsets": true, "use_regex": true},
        "post_processor": {"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<start>", "type_id": 0}},
                       {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                     {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<start>": {"id": "<start>", "ids": [START], "tokens": ["<start>"]}}},
        "decoder": {"type": "ByteLevel", "add_prefix_space": true,
                    "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    let config = json!({"bos_token": "<start>", "eos_token": "<end>"});
    let template = "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}{{ bos_token }}assistant: {% endif %}";

    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    write("tokenizer.json", &tokenizer.to_string());
    write("tokenizer_config.json", &config.to_string());
    write("chat_template.jinja", template);
    folder
}
