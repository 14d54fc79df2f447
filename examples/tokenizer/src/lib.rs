//! The tokenizer of etkv's example runners: text to token ids and back, by what a
//! model's published folder says.
//!
//! Hugging Face's `tokenizers` encodes and decodes, `minijinja` renders the chat
//! template, `cxx` makes the C++ face. `tokenizer.hpp` is what runners include. It
//! knows nothing of models and caches.

mod bridge;
mod chat;
mod detokenizer;
mod error;
mod folder;
mod json;
mod tokenizer;

#[cfg(test)]
mod fixture;
