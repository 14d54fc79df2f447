//! Decodes ids to text, one id at a time, in whole characters even if a character spans several tokens.

use std::sync::Arc;

use crate::backend::Backend;
use crate::error::{Error, Result};

/// The replacement for bytes that form no character.
const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// The maximum number of ids whose text is held back because it ends within a character. Each new id decodes that
/// text again.
const MAX_HELD: usize = 64;

/// The text of one answer during its generation. The pieces together are the text of all ids.
///
/// Text that the next ids may change is held back: the bytes of an incomplete character, and a run of byte tokens,
/// because a run is decoded as a whole.
pub struct Detokenizer {
    backend: Arc<Backend>,
    skip_special_tokens: bool,
    /// The ids that affect later text. The text of the first `n_context` ids is already returned.
    ids: Vec<u32>,
    n_context: usize,
    /// The part of the text of `ids` that is already returned.
    out: String,
    /// The text that the last call returned.
    piece: String,
}

impl Detokenizer {
    pub fn new(backend: Arc<Backend>, skip_special_tokens: bool) -> Self {
        Self {
            backend,
            skip_special_tokens,
            ids: Vec::new(),
            n_context: 0,
            out: String::new(),
            piece: String::new(),
        }
    }

    /// Adds the next id. Returns the text that the id completes. The text may be empty. An id without a token has no
    /// text.
    pub fn add_token(&mut self, id: i64) -> Result<&str> {
        self.piece.clear();
        let id = u32::try_from(id).map_err(|_| Error::Decode {
            id,
            reason: "expected an id from 0 to 4294967295".to_owned(),
        })?;
        let Some(token) = self.backend.token(id) else {
            return Ok("");
        };
        if self.skip_special_tokens && self.backend.is_special(&token) {
            return Ok("");
        }
        self.ids.push(id);
        if !self.backend.is_byte(&token) {
            self.read()?;
        }
        Ok(&self.piece)
    }

    /// Moves the final part of the ids' text to `piece`.
    fn read(&mut self) -> Result<()> {
        let text = self.backend.decode(&self.ids, self.skip_special_tokens)?;
        let certain = text.strip_suffix(REPLACEMENT).unwrap_or(&text);
        let is_cut = certain.len() < text.len();
        let waits = self.ids.len() - self.n_context < MAX_HELD;
        match certain.strip_prefix(&self.out) {
            Some(piece) => {
                self.piece.push_str(piece);
                if is_cut && waits {
                    self.out.push_str(piece);
                    return Ok(());
                }
            }
            None if waits => return Ok(()),
            None => self.piece.push_str(after_common_prefix(certain, &self.out)),
        }
        // The ids since the last piece become the context of the next ids, because some decoders treat the first id
        // differently.
        self.ids.drain(..self.n_context);
        self.n_context = self.ids.len();
        self.out = self.backend.decode(&self.ids, self.skip_special_tokens)?;
        if is_cut && self.out.ends_with(REPLACEMENT) {
            self.out.truncate(self.out.len() - REPLACEMENT.len_utf8());
        }
        Ok(())
    }

    /// Ends the answer and returns the rest of its text. U+FFFD stands for an incomplete character.
    /// The next answer may begin.
    pub fn finalize(&mut self) -> Result<&str> {
        self.piece.clear();
        let text = self.backend.decode(&self.ids, self.skip_special_tokens)?;
        self.piece.push_str(after_common_prefix(&text, &self.out));
        self.ids.clear();
        self.n_context = 0;
        self.out.clear();
        Ok(&self.piece)
    }
}

/// Returns `text` without the beginning that `text` shares with `out`.
fn after_common_prefix<'a>(text: &'a str, out: &str) -> &'a str {
    let common =
        text.chars().zip(out.chars()).take_while(|(a, b)| a == b).map(|(c, _)| c.len_utf8());
    &text[common.sum()..]
}

#[cfg(test)]
mod tests {
    use crate::fixture;
    use crate::tokenizer::Tokenizer;

    fn pieces(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
        let mut detokenizer = tokenizer.detokenizer(true);
        let mut pieces: Vec<String> =
            ids.iter().map(|&id| detokenizer.add_token(id.into()).unwrap().to_owned()).collect();
        pieces.push(detokenizer.finalize().unwrap().to_owned());
        pieces
    }

    #[test]
    fn whole_characters_only() {
        let tokenizer = fixture::tokenizer();
        let ids = tokenizer.encode("a é🙂.", false).unwrap();
        let pieces = pieces(&tokenizer, &ids);
        assert_eq!(pieces.concat(), "a é🙂.");
        assert!(pieces.iter().all(|piece| !piece.contains('\u{fffd}')));
        assert_eq!(pieces.last().unwrap(), "");
    }

    #[test]
    fn a_character_cut_short_comes_out_at_the_end() {
        let tokenizer = fixture::tokenizer();
        let mut ids = tokenizer.encode("ok🙂", false).unwrap();
        ids.pop();
        let pieces = pieces(&tokenizer, &ids);
        assert_eq!(pieces[..2].concat(), "ok");
        assert!(pieces[2..pieces.len() - 1].iter().all(String::is_empty));
        assert_eq!(pieces.last().unwrap(), "\u{fffd}");
    }

    #[test]
    fn a_run_of_byte_tokens_is_read_as_a_whole() {
        let tokenizer = fixture::with_byte_fallback();
        let byte = |byte: u8| tokenizer.backend.id_of(&format!("<0x{byte:02X}>")).unwrap();
        let a = tokenizer.backend.id_of("a").unwrap();
        let ids: Vec<u32> = [a]
            .into_iter()
            .chain("é".bytes().map(byte))
            // A whole character, then an incomplete one. Decoded together, neither is a character.
            .chain([byte(0xe2), a, fixture::START, byte(0xf0), a, a])
            .chain("🙂".bytes().map(byte))
            .collect();
        let pieces = pieces(&tokenizer, &ids);
        assert_eq!(pieces.concat(), tokenizer.backend.decode(&ids, true).unwrap());
        assert_eq!(pieces.concat(), "a\u{fffd}\u{fffd}\u{fffd}a\u{fffd}aa🙂");
        assert_eq!(pieces[0], "a");
    }

    #[test]
    fn special_tokens_are_left_out_or_kept_and_a_detokenizer_starts_over() {
        let tokenizer = fixture::tokenizer();
        let a = i64::from(tokenizer.encode("a", false).unwrap()[0]);
        for (skip, start, end) in [(true, "", ""), (false, "<start>", "<end>")] {
            let mut detokenizer = tokenizer.detokenizer(skip);
            for _ in 0..3 {
                assert_eq!(detokenizer.add_token(fixture::START.into()).unwrap(), start);
                assert_eq!(detokenizer.add_token(a).unwrap(), "a");
                assert_eq!(detokenizer.add_token(fixture::END.into()).unwrap(), end);
                assert_eq!(detokenizer.add_token(a).unwrap(), "a");
                assert_eq!(detokenizer.finalize().unwrap(), "");
            }
        }
    }

    #[test]
    fn an_unknown_id_is_no_text_and_a_number_that_is_no_id_is_an_error() {
        let mut detokenizer = fixture::tokenizer().detokenizer(true);
        assert_eq!(detokenizer.add_token(1_000_000).unwrap(), "");
        for id in [-1, 1 << 32] {
            let refusal = detokenizer.add_token(id).unwrap_err().to_string();
            assert_eq!(
                refusal,
                format!(
                    "the tokenizer cannot decode token {id}: expected an id from 0 to 4294967295"
                )
            );
        }
        assert_eq!(detokenizer.finalize().unwrap(), "");
    }
}
