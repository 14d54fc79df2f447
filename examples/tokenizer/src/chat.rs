//! A model's chat template. It renders a conversation as the text that the model was trained on.

use std::collections::BTreeMap;

use minijinja::syntax::SyntaxConfig;
use minijinja::{context, Environment, Error as TemplateError, ErrorKind, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

use crate::error::{Error, Result};
use crate::json::tojson;

/// A message of a conversation.
pub struct Message {
    pub role: String,
    pub content: String,
}

pub struct ChatTemplate {
    source: String,
    /// `bos_token` and the other special tokens, by name.
    special_tokens: BTreeMap<String, String>,
}

impl ChatTemplate {
    pub fn new(source: &str, special_tokens: BTreeMap<String, String>) -> Self {
        Self { source: without_generation_marks(source), special_tokens }
    }

    /// Renders the conversation, and the start of the model's next message if
    /// `add_generation_prompt`.
    pub fn render(&self, messages: &[Message], add_generation_prompt: bool) -> Result<String> {
        let messages: Vec<Value> = messages
            .iter()
            .map(|message| context! { role => message.role.as_str(), content => message.content.as_str() })
            .collect();
        let variables = context! {
            messages,
            add_generation_prompt,
            tools => (),
            documents => (),
            ..Value::from_pairs(self.special_tokens.clone())
        };
        environment()
            .and_then(|environment| environment.render_str(&self.source, variables))
            .map_err(|error| Error::Template(sentence(&error)))
    }
}

/// Returns Jinja with the settings of Hugging Face: block tags remove the line that they are on,
/// `break` and `continue` work in loops, and values have Python's methods.
fn environment() -> std::result::Result<Environment<'static>, TemplateError> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_unknown_method_callback(unknown_method_callback);
    environment.add_filter("tojson", tojson);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    Ok(environment)
}

fn raise_exception(message: String) -> std::result::Result<String, TemplateError> {
    Err(TemplateError::new(ErrorKind::InvalidOperation, message))
}

fn strftime_now(format: String) -> std::result::Result<String, TemplateError> {
    jiff::fmt::strtime::format(&format, &jiff::Zoned::now())
        .map_err(|error| TemplateError::new(ErrorKind::InvalidOperation, error.to_string()))
}

/// Replaces the marks `{% generation %}`, which are for training and render as nothing. A condition
/// that always holds does the same with the same trimming.
fn without_generation_marks(source: &str) -> String {
    let mut source = source.to_owned();
    for open in ["{%", "{%-"] {
        for close in ["%}", "-%}"] {
            source = source
                .replace(&format!("{open} generation {close}"), &format!("{open} if true {close}"))
                .replace(
                    &format!("{open} endgeneration {close}"),
                    &format!("{open} endif {close}"),
                );
        }
    }
    source
}

/// Returns the template's own message if it has one, and the line.
fn sentence(error: &TemplateError) -> String {
    let reason = match error.detail() {
        Some(detail) => detail.to_owned(),
        None => error.kind().to_string(),
    };
    match error.line() {
        Some(line) => format!("{reason} (line {line} of the template)"),
        None => reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn template(source: &str) -> ChatTemplate {
        let tokens = [("bos_token", "<s>"), ("eos_token", "</s>")];
        ChatTemplate::new(source, tokens.map(|(k, v)| (k.to_owned(), v.to_owned())).into())
    }

    fn said(role: &str, content: &str) -> Message {
        Message { role: role.to_owned(), content: content.to_owned() }
    }

    #[test]
    fn whitespace_and_special_tokens() {
        let chatml = template(
            "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\nQ: {{ m['content'] | trim }}\n  {% else %}\nA: {{ m.content }}{{ eos_token }}\n  {% endif %}\n{% endfor %}\n{%- if add_generation_prompt %}A:{% endif %}",
        );
        let messages = [said("user", " hi "), said("assistant", "yo")];
        assert_eq!(chatml.render(&messages, false).unwrap(), "<s>Q: hi\nA: yo</s>\n");
        assert_eq!(chatml.render(&messages[..1], true).unwrap(), "<s>Q: hi\nA:");
    }

    #[test]
    fn python_methods_namespaces_and_loop_controls() {
        let source = "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.content.startswith('skip') %}{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}{{ m.content.split('|')[-1].strip().upper() }};{% endfor %}{{ ns.n }}{{ messages[::-1][0].role }}{{ messages[1:] | length }}";
        let messages = [said("user", "a| b "), said("user", "skip"), said("tool", "c")];
        assert_eq!(template(source).render(&messages, false).unwrap(), "B;C;2tool2");
    }

    #[test]
    fn absent_tools_and_undefined_names_are_false() {
        let source = "{% if tools %}T{% endif %}{% if not tools is defined %}U{% endif %}{% if tools is none %}N{% endif %}{% if enable_thinking is defined and enable_thinking is false %}X{% endif %}";
        assert_eq!(template(source).render(&[], false).unwrap(), "N");
    }

    #[test]
    fn generation_marks_render_as_nothing() {
        let source = "a {%- generation -%} b {% endgeneration %} c";
        assert_eq!(template(source).render(&[], false).unwrap(), "ab  c");
    }

    #[test]
    fn a_template_can_refuse() {
        let refusal = template("\n{{ raise_exception('roles must alternate') }}")
            .render(&[], false)
            .unwrap_err();
        assert_eq!(
            refusal.to_string(),
            "the chat template cannot render this conversation: roles must alternate (line 2 of the template)"
        );
    }

    #[test]
    fn a_broken_template_is_an_error() {
        assert!(template("{% for m in %}").render(&[], false).is_err());
    }

    #[test]
    fn the_date() {
        let year = template("{{ strftime_now('%Y') }}").render(&[], false).unwrap();
        assert!(year.parse::<i32>().unwrap() > 2000, "{year}");
    }
}
