//! Makes text from ids, one at a time: whole characters only, wherever the tokens cut them.

use std::sync::Arc;

use tokenizers::tokenizer::step_decode_stream;

use crate::error::{Error, Result};

/// The text of one answer as it is made. Special tokens are left out.
pub struct Detokenizer {
    tokenizer: Arc<tokenizers::Tokenizer>,
    /// The ids that affect the text to come, and the text that they decode to: the state that
    /// `step_decode_stream` keeps between calls.
    ids: Vec<u32>,
    prefix: String,
    prefix_index: usize,
    /// The text that the last call returned.
    piece: String,
}

impl Detokenizer {
    pub fn new(tokenizer: Arc<tokenizers::Tokenizer>) -> Self {
        Self {
            tokenizer,
            ids: Vec::new(),
            prefix: String::new(),
            prefix_index: 0,
            piece: String::new(),
        }
    }

    /// Adds the next id. Returns the text that it completes, which may be empty.
    pub fn add_token(&mut self, id: u32) -> Result<&str> {
        self.piece.clear();
        let piece = step_decode_stream(
            &self.tokenizer,
            vec![id],
            true,
            &mut self.ids,
            &mut self.prefix,
            &mut self.prefix_index,
        )
        .map_err(|error| Error::Decode { id, reason: error.to_string() })?;
        self.piece.push_str(piece.as_deref().unwrap_or_default());
        Ok(&self.piece)
    }

    /// Ends the answer and returns the rest of its text. U+FFFD stands for an incomplete character.
    /// The next answer may begin.
    pub fn finalize(&mut self) -> Result<&str> {
        self.piece.clear();
        let last = self.ids.last().copied().unwrap_or_default();
        let text = self
            .tokenizer
            .decode(&self.ids, true)
            .map_err(|error| Error::Decode { id: last, reason: error.to_string() })?;
        self.piece.push_str(text.strip_prefix(&self.prefix).unwrap_or_default());
        self.ids.clear();
        self.prefix.clear();
        self.prefix_index = 0;
        Ok(&self.piece)
    }
}

#[cfg(test)]
mod tests {
    use crate::fixture;
    use crate::tokenizer::Tokenizer;

    /// Returns the text of `ids` byte by byte, as the fixture's tokens are.
    fn pieces(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
        let mut detokenizer = tokenizer.detokenizer();
        let mut pieces: Vec<String> =
            ids.iter().map(|&id| detokenizer.add_token(id).unwrap().to_owned()).collect();
        pieces.push(detokenizer.finalize().unwrap().to_owned());
        pieces
    }

    #[test]
    fn whole_characters_only() {
        let tokenizer = Tokenizer::from_pretrained(fixture::folder().path()).unwrap();
        let ids = tokenizer.encode("a é🙂.", false).unwrap();
        let pieces = pieces(&tokenizer, &ids);
        assert_eq!(pieces.concat(), "a é🙂.");
        assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')));
        assert_eq!(pieces.last().unwrap(), "");
    }

    #[test]
    fn a_character_cut_short_comes_out_at_the_end() {
        let tokenizer = Tokenizer::from_pretrained(fixture::folder().path()).unwrap();
        let mut ids = tokenizer.encode("ok🙂", false).unwrap();
        ids.pop();
        let pieces = pieces(&tokenizer, &ids);
        assert_eq!(pieces[..2].concat(), "ok");
        assert!(pieces[2..pieces.len() - 1].iter().all(String::is_empty));
        assert_eq!(pieces.last().unwrap(), "\u{fffd}");
    }

    #[test]
    fn special_tokens_are_left_out_and_a_detokenizer_starts_over() {
        let tokenizer = Tokenizer::from_pretrained(fixture::folder().path()).unwrap();
        let a = tokenizer.encode("a", false).unwrap()[0];
        let mut detokenizer = tokenizer.detokenizer();
        for _ in 0..3 {
            assert_eq!(detokenizer.add_token(fixture::START).unwrap(), "");
            assert_eq!(detokenizer.add_token(a).unwrap(), "a");
            assert_eq!(detokenizer.add_token(fixture::END).unwrap(), "");
            assert_eq!(detokenizer.add_token(a).unwrap(), "a");
            assert_eq!(detokenizer.finalize().unwrap(), "");
        }
    }

    #[test]
    fn an_unknown_id_is_no_text() {
        let tokenizer = Tokenizer::from_pretrained(fixture::folder().path()).unwrap();
        let mut detokenizer = tokenizer.detokenizer();
        assert_eq!(detokenizer.add_token(1_000_000).unwrap(), "");
        assert_eq!(detokenizer.finalize().unwrap(), "");
    }
}
