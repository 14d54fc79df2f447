//! Parts of a template that minijinja reads in another way than Jinja2, in words that it reads alike:
//!
//! | in the template | in its place | because |
//! | --- | --- | --- |
//! | `{% generation %}` | `{% if true %}` | minijinja does not know the marks, which are for training |
//! | `for x in y` | `for x in __iter__((y))` | minijinja loops over None, and does not know the length of a text |
//! | `y[a:b:c]` | `y.__slice__(a, b, c)` | minijinja takes ends behind the start for others if the step is negative |
//! | `a % b` | `__percent__(a, b)` | minijinja computes remainders alone |

use minijinja::machinery::{parse, tokenize, Token};
use serde_json::Value;

use super::environment::syntax;

/// The function that returns what a loop goes over.
pub const ITER: &str = "__iter__";

/// The method that stands for a slice with a step.
pub const SLICE: &str = "__slice__";

/// The function that stands for Python's `%`.
pub const PERCENT: &str = "__percent__";

/// An edit: where, how many bytes it removes, and the text in their place.
type Edit = (usize, usize, String);

/// Returns a template that renders as `source` does in transformers. One that cannot be parsed stays as it is: the
/// error is reported when it is rendered.
pub fn prepared(source: &str) -> String {
    let source = without_generation_marks(source);
    let Some(tokens) = tokens(&source) else {
        return source;
    };
    let mut edits = loops(&tokens);
    edits.extend(slices(&tokens));
    let source = edited(&source, edits).unwrap_or(source);
    // `%` is rare, and a second parse is needed to find its operands.
    if tokens.iter().any(|(token, _, _)| matches!(token, Kind::Percent)) {
        return percent_as_function(&source).unwrap_or(source);
    }
    source
}

/// Applies edits, of which the first of those at one place goes first.
fn edited(source: &str, mut edits: Vec<Edit>) -> Option<String> {
    edits.sort_by_key(|&(at, _, _)| at);
    let mut made = String::with_capacity(source.len());
    let mut from = 0;
    for (at, removed, text) in edits {
        made.push_str(source.get(from..at)?);
        made.push_str(&text);
        from = at + removed;
    }
    made.push_str(source.get(from..)?);
    Some(made)
}

/// The tokens that matter here.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    BlockStart,
    BlockEnd,
    Open,
    OpenBracket,
    Close,
    Colon,
    Percent,
    For,
    In,
    /// A word that ends what a loop goes over.
    IfOrRecursive,
    /// A name or a literal, which a bracket may follow as an index.
    Operand,
    Other,
}

/// Returns the tokens of a template and where each begins and ends; None if it has errors.
fn tokens(source: &str) -> Option<Vec<(Kind, usize, usize)>> {
    let all = tokenize(source, false, syntax().ok()?).map(|token| {
        let (token, span) = token.ok()?;
        let kind = match token {
            Token::BlockStart => Kind::BlockStart,
            Token::BlockEnd => Kind::BlockEnd,
            Token::ParenOpen | Token::BraceOpen => Kind::Open,
            Token::BracketOpen => Kind::OpenBracket,
            Token::ParenClose | Token::BraceClose | Token::BracketClose => Kind::Close,
            Token::Colon => Kind::Colon,
            Token::Mod => Kind::Percent,
            Token::Ident("for") => Kind::For,
            Token::Ident("in") => Kind::In,
            Token::Ident("if" | "recursive") => Kind::IfOrRecursive,
            Token::Ident(_) | Token::Str(_) | Token::String(_) => Kind::Operand,
            _ => Kind::Other,
        };
        Some((kind, span.start_offset as usize, span.end_offset as usize))
    });
    all.collect()
}

fn loops(tokens: &[(Kind, usize, usize)]) -> Vec<Edit> {
    let mut edits = Vec::new();
    let starts = tokens.windows(2).enumerate();
    for (n, _) in starts.filter(|(_, pair)| (pair[0].0, pair[1].0) == (Kind::BlockStart, Kind::For))
    {
        let Some(place) = tokens[n..].iter().position(|&(kind, _, _)| kind == Kind::In) else {
            continue;
        };
        let first = n + place + 1;
        let mut depth = 0;
        let last = tokens[first..].iter().position(|&(kind, _, _)| match kind {
            Kind::Open | Kind::OpenBracket => {
                depth += 1;
                false
            }
            Kind::Close => {
                depth -= 1;
                false
            }
            Kind::IfOrRecursive | Kind::BlockEnd => depth == 0,
            _ => false,
        });
        if let Some(length @ 1..) = last {
            edits.push((tokens[first].1, 0, format!("{ITER}((")));
            edits.push((tokens[first + length - 1].2, 0, "))".to_owned()));
        }
    }
    edits
}

fn slices(tokens: &[(Kind, usize, usize)]) -> Vec<Edit> {
    let mut edits = Vec::new();
    // The open brackets: the token, and the colons in it.
    let mut open: Vec<(usize, Vec<usize>)> = Vec::new();
    for (n, &(kind, _, _)) in tokens.iter().enumerate() {
        match kind {
            Kind::Open | Kind::OpenBracket => open.push((n, Vec::new())),
            Kind::Colon => {
                if let Some((_, colons)) = open.last_mut() {
                    colons.push(n);
                }
            }
            Kind::Close => {
                let Some((start, colons)) = open.pop() else {
                    continue;
                };
                let is_index = tokens[start].0 == Kind::OpenBracket
                    && start > 0
                    && matches!(tokens[start - 1].0, Kind::Operand | Kind::Close);
                if is_index && colons.len() == 2 {
                    let places = [start, colons[0], colons[1], n];
                    let words = [&format!(".{SLICE}("), ",", ",", ")"];
                    for (place, word) in places.into_iter().zip(words) {
                        // Nothing between two of them is Python's None.
                        let is_empty = place > start && places.contains(&(place - 1));
                        let text = if is_empty { format!("none{word}") } else { word.to_owned() };
                        edits.push((tokens[place].1, tokens[place].2 - tokens[place].1, text));
                    }
                }
            }
            _ => {}
        }
    }
    edits
}

/// Replaces the marks `{% generation %}`, which are for training and render as nothing. A condition that always holds
/// does the same with the same trimming.
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

/// Returns `source` with `left % right` as a call; None if it cannot be parsed.
fn percent_as_function(source: &str) -> Option<String> {
    let tree = parse(source, "template", syntax().ok()?).ok()?;
    let mut edits = Vec::new();
    collect(source, &serde_json::to_value(&tree).ok()?, &mut edits);
    edited(source, edits)
}

/// Adds the edits of `node`, a serialized part of the tree, and of its parts.
fn collect(source: &str, node: &Value, edits: &mut Vec<Edit>) {
    match node {
        Value::Object(fields) => {
            let edit = edits_of(source, &node["inner"]);
            if let Some([open, comma, _]) = &edit {
                edits.push(open.clone());
                edits.push(comma.clone());
            }
            fields.values().for_each(|field| collect(source, field, edits));
            if let Some([_, _, close]) = edit {
                edits.push(close);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| collect(source, item, edits)),
        _ => {}
    }
}

/// Returns the edits of a node and its span, if it is the operator.
fn edits_of(source: &str, inner: &Value) -> Option<[Edit; 3]> {
    let operator = &inner[0];
    if operator["op"] != "Rem" {
        return None;
    }
    let offset = |span: &Value, name: &str| span[name].as_u64().map(|at| at as usize);
    let start = offset(&inner[1], "start_offset")?;
    let end = offset(&inner[1], "end_offset")?;
    let left = offset(&operator["left"]["inner"][1], "end_offset")?;
    let right = offset(&operator["right"]["inner"][1], "start_offset")?;
    // Parentheses and space alone stand between the operands and the operator.
    let at = left + source.get(left..right)?.find('%')?;
    Some([(start, 0, format!("{PERCENT}(")), (at, 1, ",".to_owned()), (end, 0, ")".to_owned())])
}
