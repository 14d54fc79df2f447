//! The tokenizer of a `tokenizer.json`. All runners convert between text and ids by these rules.
//! `python/etkv/_backend.py` has the same rules, and a test compares the two:
//!
//! 1. `tokenizer.json` determines the ids of a text. Its `truncation` and `padding` are ignored: a prompt is read in
//!    full.
//! 2. Two settings of `tokenizer_config.json` apply: `split_special_tokens` (text that spells a special token is
//!    ordinary text) and `clean_up_tokenization_spaces` (as in transformers, not for BPE).
//! 3. The tokenizer's first token (BOS) is not added to a text that already begins with it.

use serde_json::Value;
use tokenizers::decoders::fuse::Fuse;
use tokenizers::decoders::sequence::Sequence;
use tokenizers::decoders::wordpiece::WordPiece;
use tokenizers::normalizers::replace::Replace;
use tokenizers::{DecoderWrapper, ModelWrapper, Tokenizer};

use crate::error::{Error, Result};

/// The pairs that [`Backend::decode`] replaces for `clean_up_tokenization_spaces`, in this order.
const CLEAN_UP: [(&str, &str); 10] = [
    (" .", "."),
    (" ?", "?"),
    (" !", "!"),
    (" ,", ","),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" 's", "'s"),
    (" 've", "'ve"),
    (" 're", "'re"),
];

pub struct Backend {
    tokenizer: Tokenizer,
    /// Whether tokens such as `<0xE2>` stand for bytes.
    byte_fallback: bool,
}

impl Backend {
    /// `config` is the contents of `tokenizer_config.json`.
    pub fn new(mut tokenizer: Tokenizer, config: &Value) -> std::result::Result<Self, String> {
        // Disable the cache of words: each thread would keep it even after the tokenizer is dropped.
        let mut model = tokenizer.get_model().clone();
        model.resize_cache(0);
        let is_bpe = matches!(model, ModelWrapper::BPE(_));
        tokenizer.with_model(model);
        tokenizer.with_truncation(None).map_err(|error| error.to_string())?;
        tokenizer.with_padding(None);

        let is_set = |name: &str| config[name].as_bool().unwrap_or(false);
        tokenizer.set_encode_special_tokens(is_set("split_special_tokens"));
        let even_for_bpe =
            "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output";
        if is_set("clean_up_tokenization_spaces") && (!is_bpe || is_set(even_for_bpe)) {
            let decoder = cleaning(tokenizer.get_decoder()).map_err(|error| error.to_string())?;
            tokenizer.with_decoder(Some(decoder));
        }
        let byte_fallback = tokenizer.get_decoder().is_some_and(has_byte_fallback);
        Ok(Self { tokenizer, byte_fallback })
    }

    /// Returns the ids of `text`. With `add_special_tokens`, includes the tokens that the tokenizer adds around a
    /// text.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        let mut ids = self.encoded(text, add_special_tokens)?;
        if add_special_tokens && self.doubles_first(text, &ids)? {
            ids.remove(0);
        }
        Ok(ids)
    }

    /// Returns whether `text` begins with the token that the tokenizer adds before a text.
    pub fn begins_with_bos(&self, text: &str) -> Result<bool> {
        self.doubles_first(text, &self.encoded(text, true)?)
    }

    /// Returns whether `ids`, the ids of `text` with special tokens, begin with the first id of `text` twice.
    fn doubles_first(&self, text: &str, ids: &[u32]) -> Result<bool> {
        if ids.len() < 2 || ids[0] != ids[1] {
            return Ok(false);
        }
        let own = self.encoded(text, false)?;
        Ok(own.first() == Some(&ids[0]) && ids[1..].starts_with(&own))
    }

    fn encoded(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>> {
        self.tokenizer
            .encode_fast(text, add_special_tokens)
            .map(|encoding| encoding.get_ids().to_vec())
            .map_err(|error| Error::Encode(error.to_string()))
    }

    /// Returns the ids of a text that continues another one, without the space that some tokenizers add before a
    /// text.
    pub fn encode_after(&self, text: &str) -> Result<Vec<u32>> {
        let anchor = self.encoded("\n", false)?;
        let anchored = self.encoded(&format!("\n{text}"), false)?;
        match anchored.strip_prefix(anchor.as_slice()) {
            Some(ids) if !anchor.is_empty() => Ok(ids.to_vec()),
            _ => self.encoded(text, false),
        }
    }

    pub fn decode(&self, ids: &[u32], skip_special_tokens: bool) -> Result<String> {
        let last = ids.last().copied().unwrap_or_default();
        self.tokenizer
            .decode(ids, skip_special_tokens)
            .map_err(|error| Error::Decode { id: last.into(), reason: error.to_string() })
    }

    pub fn id_of(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// Returns the token of `id`; None if the vocabulary has no such id.
    pub fn token(&self, id: u32) -> Option<String> {
        self.tokenizer.id_to_token(id)
    }

    pub fn is_special(&self, token: &str) -> bool {
        self.tokenizer.get_added_vocabulary().is_special_token(token)
    }

    /// Returns whether the token stands for one byte. Such bytes form characters with adjacent bytes.
    pub fn is_byte(&self, token: &str) -> bool {
        let digits = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
        self.byte_fallback
            && digits
                .is_some_and(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok())
    }
}

fn has_byte_fallback(decoder: &DecoderWrapper) -> bool {
    match decoder {
        DecoderWrapper::ByteFallback(_) => true,
        DecoderWrapper::Sequence(all) => all.get_decoders().iter().any(has_byte_fallback),
        _ => false,
    }
}

/// Returns a decoder that applies [`CLEAN_UP`] to the output of `decoder`.
fn cleaning(decoder: Option<&DecoderWrapper>) -> tokenizers::Result<DecoderWrapper> {
    // Without a decoder, tokens are separated by spaces. No token has this prefix, so WordPiece only adds spaces.
    let spaced = || DecoderWrapper::WordPiece(WordPiece::new("\u{f8fe}".to_owned(), false));
    let decoder = decoder.cloned().unwrap_or_else(spaced);
    let mut steps = vec![decoder, DecoderWrapper::Fuse(Fuse::new())];
    for (from, to) in CLEAN_UP {
        steps.push(DecoderWrapper::Replace(Replace::new(from, to)?));
    }
    Ok(DecoderWrapper::Sequence(Sequence::new(steps)))
}
