//! Changes in the text of a template before it is compiled:
//!
//! | in the template | replaced by | reason |
//! | --- | --- | --- |
//! | `{% generation %}` | `{% if true %}` | minijinja does not have this tag, which is for training |
//! | `for x in 1, 2` | `for x in (1, 2)` | minijinja does not parse a tuple there |
//! | `a * b` | `a|__same__ * b` | minijinja folds constants when it compiles, without limits |

use minijinja::machinery::{tokenize, Span, Token};
use minijinja::{Error, ErrorKind};

use super::environment::syntax;

/// A filter that returns its argument.
pub const SAME: &str = "__same__";

/// The text that applies the filter.
const KEPT: &str = "|__same__ ";

/// The maximum number of tokens of one tag. The time to compile a tag grows with the square of that number.
const MAX_TOKENS: usize = 4096;

/// Returns a template that renders as `source` does in transformers. A template with a syntax error stays as it is,
/// because compiling it reports the error.
pub fn prepared(source: &str) -> Result<String, Error> {
    let source = without_generation_marks(source);
    let mut edits = Vec::new();
    let mut tag = Tag::default();
    for token in tokenize(&source, false, syntax()?) {
        let Ok((token, span)) = token else {
            return Ok(source.clone());
        };
        tag.read(&token, span, &mut edits);
        if tag.length > MAX_TOKENS {
            let line = span.start_line;
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("a tag has more than {MAX_TOKENS} words and signs (line {line})"),
            ));
        }
    }
    edits.sort_by_key(|&(at, _)| at);
    let mut made = String::with_capacity(source.len());
    let mut from = 0;
    for (at, text) in edits {
        made.push_str(&source[from..at]);
        made.push_str(text);
        from = at;
    }
    made.push_str(&source[from..]);
    Ok(made)
}

/// The part of a tag that has been read so far.
#[derive(Default)]
struct Tag {
    length: usize,
    /// The number of open brackets.
    depth: usize,
    after_operand: bool,
    /// The start of a tuple that a loop may iterate over.
    tuple: Option<usize>,
    has_comma: bool,
    is_loop: bool,
    end: usize,
}

impl Tag {
    /// Reads the next token. Adds texts to insert to `edits`, with their offsets.
    fn read(&mut self, token: &Token<'_>, span: Span, edits: &mut Vec<(usize, &'static str)>) {
        let (start, end) = (span.start_offset as usize, span.end_offset as usize);
        match token {
            Token::VariableStart | Token::BlockStart => *self = Self::default(),
            Token::BlockEnd | Token::Ident("if" | "recursive") if self.depth == 0 => {
                if let (Some(first), true) = (self.tuple.take(), self.has_comma) {
                    edits.extend([(first, "("), (self.end, ")")]);
                }
            }
            Token::Ident("for") if self.length == 1 => self.is_loop = true,
            Token::Ident("in") if self.is_loop => {
                self.is_loop = false;
                self.tuple = Some(end);
            }
            Token::Comma if self.depth == 0 && self.tuple.is_some() => self.has_comma = true,
            Token::BracketOpen | Token::ParenOpen | Token::BraceOpen => self.depth += 1,
            Token::BracketClose | Token::ParenClose | Token::BraceClose => {
                self.depth = self.depth.saturating_sub(1);
            }
            Token::Mul if self.after_operand => edits.push((start, KEPT)),
            _ => {}
        }
        self.length += 1;
        self.end = end;
        self.after_operand = matches!(
            token,
            Token::Ident(_)
                | Token::Str(_)
                | Token::String(_)
                | Token::Int(_)
                | Token::Int128(_)
                | Token::Float(_)
                | Token::BracketClose
                | Token::ParenClose
                | Token::BraceClose
        );
    }
}

/// Replaces the tags `{% generation %}` by a condition that is always true. These tags are for training and render
/// nothing. The condition trims white space in the same way.
fn without_generation_marks(source: &str) -> String {
    let mut made = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start);
        made.push_str(before);
        let inner = &tag[2..];
        let name = inner.trim_start_matches(['-', '+']).trim_start();
        let lead = &inner[..inner.len() - name.len()];
        let word = [("endgeneration", "endif"), ("generation", "if true")].into_iter().find(
            |(word, _)| {
                name.strip_prefix(word).is_some_and(|after| {
                    after.trim_start().trim_start_matches(['-', '+']).starts_with("%}")
                })
            },
        );
        made.push_str("{%");
        match word {
            Some((word, stands_for)) => {
                made.push_str(lead);
                made.push_str(stands_for);
                rest = &name[word.len()..];
            }
            None => rest = inner,
        }
    }
    made.push_str(rest);
    made
}
