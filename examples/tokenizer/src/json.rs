//! JSON in the form of Python's `json.dumps`, which chat templates rely on: a space after every
//! comma and colon, and no needless escapes.

use std::io;

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        writer.write_all(if first { b"" } else { b", " })
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

/// The `tojson` filter of chat templates. Unlike Jinja's own, it does not escape for HTML.
pub fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent = options.get::<Option<usize>>("indent")?;
    // Accepted and ignored.
    let _ = options.get::<Option<bool>>("ensure_ascii")?;
    options.assert_all_used()?;

    let mut bytes = Vec::new();
    let written = match indent {
        None => value.serialize(&mut Serializer::with_formatter(&mut bytes, Spaced)),
        Some(n) => {
            let indent = " ".repeat(n);
            let formatter = PrettyFormatter::with_indent(indent.as_bytes());
            value.serialize(&mut Serializer::with_formatter(&mut bytes, formatter))
        }
    };
    let refuse = |reason: String| Error::new(ErrorKind::BadSerialization, reason);
    written.map_err(|e| refuse(e.to_string()))?;
    String::from_utf8(bytes).map_err(|e| refuse(e.to_string()))
}

#[cfg(test)]
mod tests {
    use minijinja::{context, Environment};

    fn render(source: &str) -> String {
        let mut environment = Environment::new();
        environment.add_filter("tojson", super::tojson);
        environment.render_str(source, context! { text => "a<b>'é\"" }).unwrap()
    }

    #[test]
    fn spaces_and_plain_characters() {
        assert_eq!(
            render("{{ {'b': [1, 2.5, none], 'a': text} | tojson }}"),
            r#"{"b": [1, 2.5, null], "a": "a<b>'é\""}"#
        );
        assert_eq!(render("{{ [] | tojson }}{{ {} | tojson }}"), "[]{}");
    }

    #[test]
    fn indented() {
        assert_eq!(
            render("{{ {'a': [1, 2], 'b': {}} | tojson(indent=4) }}"),
            "{\n    \"a\": [\n        1,\n        2\n    ],\n    \"b\": {}\n}"
        );
    }
}
