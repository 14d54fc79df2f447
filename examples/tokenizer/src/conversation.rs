//! A conversation in parts: text of the template, and ids of answers, which are not tokenized again.

use crate::error::Result;
use crate::template::Variables;

/// A part of a model's input.
#[derive(Debug, PartialEq)]
pub enum Part {
    Text(String),
    /// The ids of a message.
    Ids(Vec<u32>),
}

/// The delimiter of a message's number. The number stands in place of the message's text. The delimiter is a
/// private-use character, which no text of a conversation has.
const MARK: char = '\u{f8fe}';

/// Renders a conversation, and replaces the text of messages with ids by their ids.
///
/// A message that the template changes stays text. Some templates, for example, remove the reasoning of earlier
/// answers.
pub fn parts(
    variables: &Variables,
    render: impl Fn(&Variables) -> Result<String>,
) -> Result<Vec<Part>> {
    let text = render(variables)?;
    let mut answers: Vec<usize> =
        (0..variables.messages.len()).filter(|&n| !variables.messages[n].ids.is_empty()).collect();
    while !answers.is_empty() {
        let Ok(marked) = render(&variables.with_marks(&answers, mark)) else {
            break;
        };
        match split(&text, &marked, variables) {
            Ok(parts) => return Ok(parts),
            Err(changed) => match answers.iter().position(|&n| Some(n) == changed) {
                Some(place) => answers.remove(place),
                None => break,
            },
        };
    }
    Ok(vec![Part::Text(text)])
}

fn mark(n: usize) -> String {
    format!("{MARK}{n}{MARK}")
}

/// Splits `text` at the messages that have marks in `marked`, the same conversation rendered with marks. If `text`
/// and `marked` differ elsewhere, returns the message next to the difference.
fn split(
    text: &str,
    marked: &str,
    variables: &Variables,
) -> std::result::Result<Vec<Part>, Option<usize>> {
    // Texts and message numbers alternate.
    let mut pieces = marked.split(MARK);
    let mut before = pieces.next().unwrap_or_default();
    let mut last = marked.split(MARK).nth(1).and_then(|n| n.parse().ok());
    let mut rest = text.strip_prefix(before).ok_or(last)?;
    let mut parts = Vec::new();
    while let (Some(number), Some(after)) = (pieces.next(), pieces.next()) {
        last = number.parse().ok();
        let message = last.and_then(|n: usize| variables.messages.get(n)).ok_or(last)?;
        let content = message.content.as_str();
        // Many templates trim a message. The ids of the message stay complete, because the cache has all of them.
        rest = [content, content.trim(), content.trim_start(), content.trim_end()]
            .into_iter()
            .find_map(|content| rest.strip_prefix(content)?.strip_prefix(after))
            .ok_or(last)?;
        parts.push(Part::Text(before.to_owned()));
        parts.push(Part::Ids(message.ids.clone()));
        before = after;
    }
    if !rest.is_empty() {
        return Err(last);
    }
    parts.push(Part::Text(before.to_owned()));
    Ok(parts)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::template::Message;

    fn variables() -> Variables {
        let said = |content: &str, ids: &[u32]| Message {
            role: "assistant".to_owned(),
            content: content.to_owned(),
            ids: ids.to_vec(),
        };
        let messages = vec![said("q", &[]), said(" a ", &[1, 2]), said("a", &[3]), said("", &[4])];
        Variables::new(messages, false, "").unwrap()
    }

    fn texts(rendered: impl Fn(&[Message]) -> String) -> Vec<Part> {
        parts(&variables(), |variables| Ok(rendered(&variables.messages))).unwrap()
    }

    fn text(text: &str) -> Part {
        Part::Text(text.to_owned())
    }

    #[test]
    fn ids_stand_for_verbatim_and_trimmed_text() {
        let whole =
            texts(|all| all.iter().map(|one| format!("<{}>", one.content.trim())).collect());
        let expected = [
            text("<q><"),
            Part::Ids(vec![1, 2]),
            text("><"),
            Part::Ids(vec![3]),
            text("><"),
            Part::Ids(vec![4]),
            text(">"),
        ];
        assert_eq!(whole, expected);
    }

    #[test]
    fn text_that_the_template_changes_is_text() {
        let changed = |one: &Message| {
            if one.content == " a " { "b" } else { one.content.as_str() }.to_owned()
        };
        let whole = texts(|all| all.iter().map(|one| format!("<{}>", changed(one))).collect());
        let expected =
            [text("<q><b><"), Part::Ids(vec![3]), text("><"), Part::Ids(vec![4]), text(">")];
        assert_eq!(whole, expected);
        assert_eq!(texts(|_| "constant".to_owned()), [text("constant")]);
        let counted = texts(|all| all.iter().map(|one| one.content.len().to_string()).collect());
        assert_eq!(counted, [text("1310")]);
    }
}
