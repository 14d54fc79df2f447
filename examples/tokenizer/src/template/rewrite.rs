//! Parts of a template that minijinja does not read, in words that it reads.

use minijinja::machinery::{parse, tokenize, Token};
use serde_json::Value;

use super::environment::syntax;

/// The function that stands for Python's `%`.
pub const PERCENT: &str = "__percent__";

/// Returns a template that renders as `source` does in transformers. One that cannot be parsed stays as it is: the
/// error is reported when it is rendered.
pub fn prepared(source: &str) -> String {
    let source = without_generation_marks(source);
    // `%` is rare, and a second parse is needed to find it.
    if !has_percent(&source) {
        return source;
    }
    percent_as_function(&source).unwrap_or(source)
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

fn has_percent(source: &str) -> bool {
    let Ok(syntax) = syntax() else { return false };
    tokenize(source, false, syntax).any(|token| matches!(token, Ok((Token::Mod, _))))
}

/// Returns `source` with `left % right` as a call; None if it cannot be parsed. minijinja computes remainders alone.
fn percent_as_function(source: &str) -> Option<String> {
    let tree = parse(source, "template", syntax().ok()?).ok()?;
    let mut edits = Vec::new();
    collect(source, &serde_json::to_value(&tree).ok()?, &mut edits);
    // Stable: what is inserted at one place keeps its order, the outer operator first.
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

/// An edit: where, how many bytes it removes, and the text in their place.
type Edit = (usize, usize, String);

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
