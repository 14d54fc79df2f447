//! The tokenizer of etkv's example runners: text to token ids and back, with the settings of a
//! model's published folder.
//!
//! Hugging Face's `tokenizers` encodes and decodes, `minijinja` renders the chat template, and
//! `cxx` generates the C++ interface. Runners include `tokenizer.hpp`. This crate does not depend
//! on models or caches.

mod backend;
mod bridge;
mod conversation;
mod detokenizer;
mod error;
mod folder;
mod pipeline;
mod template;
mod tokenizer;

#[cfg(test)]
mod fixture;
