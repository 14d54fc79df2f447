//! JSON in the format of Python's `json.dumps`, which chat templates rely on.

use std::io;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

use super::bounds::{too_long, MAX_TEXT};

/// The arguments of `json.dumps` that templates may pass.
struct Python {
    ensure_ascii: bool,
    /// The indentation of a level; None writes one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    level: usize,
    /// Whether an item of the innermost list or mapping was written.
    has_value: bool,
}

impl Python {
    fn begin_line<W: ?Sized + io::Write>(&self, writer: &mut W) -> io::Result<()> {
        let Some(indent) = &self.indent else {
            return Ok(());
        };
        writer.write_all(b"\n")?;
        (0..self.level).try_for_each(|_| writer.write_all(indent.as_bytes()))
    }

    fn begin<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.level += 1;
        self.has_value = false;
        writer.write_all(bracket)
    }

    fn end<W: ?Sized + io::Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.level -= 1;
        if self.has_value {
            self.begin_line(writer)?;
        }
        self.has_value = true;
        writer.write_all(bracket)
    }

    fn next<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if !first {
            writer.write_all(self.item_separator.as_bytes())?;
        }
        self.has_value = true;
        self.begin_line(writer)
    }
}

impl Formatter for Python {
    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(float(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        fragment: &str,
    ) -> io::Result<()> {
        if !self.ensure_ascii {
            return writer.write_all(fragment.as_bytes());
        }
        for c in fragment.chars() {
            if matches!(c, ' '..='~') {
                write!(writer, "{c}")?;
            } else {
                let mut units = [0; 2];
                c.encode_utf16(&mut units)
                    .iter()
                    .try_for_each(|unit| write!(writer, "\\u{unit:04x}"))?;
            }
        }
        Ok(())
    }

    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.next(writer, first)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.next(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key_separator.as_bytes())
    }
}

/// Returns a float as Python prints it.
pub fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".to_owned();
    }
    let size = value.abs();
    if value.is_infinite() || size == 0.0 || (1e-4..1e16).contains(&size) {
        return format!("{value:?}");
    }
    let text = format!("{value:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    match exponent.strip_prefix('-') {
        Some(exponent) => format!("{digits}e-{exponent:0>2}"),
        None => format!("{digits}e+{exponent:0>2}"),
    }
}

/// The `tojson` filter of chat templates. Unlike Jinja's, it does not escape for HTML.
pub fn tojson(
    value: &Value,
    ensure_ascii: Option<Value>,
    indent: Option<Value>,
    named: Kwargs,
) -> Result<String, Error> {
    let ensure_ascii =
        ensure_ascii.or(named.get("ensure_ascii")?).is_some_and(|value| value.is_true());
    let indent = match indent.or(named.get("indent")?).filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => Some(indentation(&indent)?),
    };
    let item = if indent.is_some() { "," } else { ", " };
    let separators = named.get::<Option<Vec<String>>>("separators")?;
    let (item_separator, key_separator) = match separators.as_deref() {
        None => (item.to_owned(), ": ".to_owned()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(_) => return Err(refused("separators are a pair")),
    };
    let sort_keys = named.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    named.assert_all_used()?;

    let python =
        Python { ensure_ascii, indent, item_separator, key_separator, level: 0, has_value: false };
    let mut bytes = Limited(Vec::new());
    let value = if sort_keys { sorted(value)? } else { value.clone() };
    value
        .serialize(&mut Serializer::with_formatter(&mut bytes, python))
        .map_err(|error| refused(&error.to_string()))?;
    String::from_utf8(bytes.0).map_err(|error| refused(&error.to_string()))
}

/// A buffer that refuses bytes beyond the limit of a text.
struct Limited(Vec<u8>);

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let length = (self.0.len() + bytes.len()) as u64;
        if length > MAX_TEXT {
            return Err(io::Error::other(too_long(length).to_string()));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The maximum indentation of a level.
const MAX_INDENT: usize = 64;

fn indentation(indent: &Value) -> Result<String, Error> {
    match (indent.as_str(), indent.as_usize()) {
        (Some(text), _) if text.len() <= MAX_INDENT => Ok(text.to_owned()),
        (None, Some(n)) if n <= MAX_INDENT => Ok(" ".repeat(n)),
        _ => Err(refused(&format!("indent is {indent}, expected 0 to {MAX_INDENT} or a text"))),
    }
}

fn refused(reason: &str) -> Error {
    Error::new(ErrorKind::BadSerialization, reason.to_owned())
}

/// Returns `value` with the keys of every mapping sorted.
fn sorted(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            keys.sort();
            let pairs = keys.into_iter().map(|key| {
                let item = sorted(&value.get_item(&key)?)?;
                Ok((key, item))
            });
            Ok(Value::from_pairs(pairs.collect::<Result<Vec<_>, Error>>()?))
        }
        ValueKind::Seq => Ok(Value::from(
            value.try_iter()?.map(|item| sorted(&item)).collect::<Result<Vec<_>, _>>()?,
        )),
        _ => Ok(value.clone()),
    }
}

#[cfg(test)]
mod tests {
    use minijinja::{context, Environment};

    fn render(source: &str) -> String {
        let mut environment = Environment::new();
        environment.add_filter("tojson", super::tojson);
        environment.render_str(source, context! { text => "a<b>'é\"🙂" }).unwrap()
    }

    #[test]
    fn spaces_and_plain_characters() {
        assert_eq!(
            render("{{ {'b': [1, 2.5, none], 'a': text} | tojson }}"),
            r#"{"b": [1, 2.5, null], "a": "a<b>'é\"🙂"}"#
        );
        assert_eq!(render("{{ [] | tojson }}{{ {} | tojson }}"), "[]{}");
    }

    #[test]
    fn indented() {
        assert_eq!(
            render("{{ {'a': [1, 2], 'b': {}, 'c': [{}]} | tojson(indent=4) }}"),
            "{\n    \"a\": [\n        1,\n        2\n    ],\n    \"b\": {},\n    \"c\": [\n        {}\n    ]\n}"
        );
    }

    #[test]
    fn the_other_arguments() {
        assert_eq!(
            render("{{ text | tojson(ensure_ascii=true) }}"),
            r#""a<b>'\u00e9\"\ud83d\ude42""#
        );
        assert_eq!(
            render("{{ {'b': [1, 2], 'a': {'d': 1, 'c': 2}} | tojson(separators=(',', ':'), sort_keys=true) }}"),
            r#"{"a":{"c":2,"d":1},"b":[1,2]}"#
        );
    }

    #[test]
    fn floats() {
        let printed = [1.0, 1e16, 1.5e-5, 123456.75, -2e300].map(super::float);
        assert_eq!(printed, ["1.0", "1e+16", "1.5e-05", "123456.75", "-2e+300"]);
    }
}
