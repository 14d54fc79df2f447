//! The fields of an instruction as text.

use crate::fb;

/// Returns the fields of an instruction in the schema's debug format, with short forms of numbers and
/// tensors.
pub fn of(found: &fb::Instruction<'_>) -> String {
    let text = format!("{found:?}");
    // `Instruction { op_type: X, op: X { fields } }`
    let inner = text.split_once(" op: ").map_or("", |(_, op)| op);
    let inner = inner.split_once('{').map_or("", |(_, fields)| fields);
    let mut text = inner.trim().strip_suffix("} }").unwrap_or_default().trim().to_owned();
    if let Some(node) = found.op_as_metal_kernel_node() {
        text = without_source(text, node);
    }
    for (reference, short) in [("Tid", 't'), ("Vid", 'v')] {
        text = replaced(&text, &format!("{reference} {{ idx: "), |index| format!("{short}{index}"));
    }
    for choice in ["IntOrVidOrTid", "IntOrVid", "FloatOrVid", "VidOrTid"] {
        text = replaced(&text, &format!("{choice} {{ "), chosen);
    }
    replaced_some(&text)
}

/// Replaces the sources of a kernel by their sizes: the sources would fill pages.
fn without_source(text: String, node: fb::MetalKernelNode<'_>) -> String {
    let mut text = text;
    let header = node.header().unwrap_or_default();
    for (start, size) in [("source: \"", node.source().len()), ("header: Some(\"", header.len())] {
        let Some((before, after)) = text.split_once(start) else { continue };
        let mut escaped = false;
        let end = after.find(|c| {
            let is_end = c == '"' && !escaped;
            escaped = c == '\\' && !escaped;
            is_end
        });
        let Some(end) = end else { continue };
        let name = start.trim_end_matches('"');
        text = format!("{before}{name}{size} bytes{}", &after[end + 1..]);
    }
    text
}

/// Replaces each part of `text` from `start` to the next ` }` by the result of `of` for the text between them.
fn replaced(text: &str, start: &str, of: impl Fn(&str) -> String) -> String {
    let mut made = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((before, found)) = rest.split_once(start) {
        let Some((inner, after)) = found.split_once(" }") else { break };
        made.push_str(before);
        made.push_str(&of(inner));
        rest = after;
    }
    made.push_str(rest);
    made
}

/// Returns the value of the field that a choice selects.
fn chosen(fields: &str) -> String {
    let field = |name: &str| {
        let found =
            fields.split(", ").find_map(|field| field.strip_prefix(name)?.strip_prefix(": "));
        found.unwrap_or_default()
    };
    let first = fields.split_once(": ").map_or("", |(name, _)| name);
    let name = match (field("is_vid"), field("kind")) {
        ("true", _) | (_, "1") => "vid",
        (_, "2") => "tid",
        _ if first == "literal" => "literal",
        _ => "tid",
    };
    field(name).to_owned()
}

/// Replaces `Some(x)` with `x`.
fn replaced_some(text: &str) -> String {
    const SOME: &str = "Some(";
    let mut made = String::with_capacity(text.len());
    // For each open bracket: whether the bracket is removed.
    let mut open = Vec::new();
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        if let Some(inner) = rest.strip_prefix(SOME) {
            open.push(true);
            rest = inner;
            continue;
        }
        let goes = match c {
            '(' => {
                open.push(false);
                false
            }
            ')' => open.pop().unwrap_or(false),
            _ => false,
        };
        if !goes {
            made.push(c);
        }
        rest = &rest[c.len_utf8()..];
    }
    made
}
