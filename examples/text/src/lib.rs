//! Text for etkv's example runners: what a model's published folder says about
//! words, as token ids and back.
//!
//! Hugging Face's `tokenizers` encodes and decodes, `minijinja` renders the chat
//! template. C programs call it through `etkv_text.h`, C++ ones through
//! `text.hpp`. It knows nothing of models and caches.

mod capi;
mod chat;
mod error;
mod folder;
mod json;
mod stream;
mod text;

#[cfg(test)]
mod fixture;
