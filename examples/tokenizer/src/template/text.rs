//! Values as Python prints them.

use std::fmt::{self, Write};

use minijinja::value::{Tuple, ValueKind};
use minijinja::{Error, Value};

use super::bounds::{is_too_deep, Budget};
use super::json;

/// Returns `str(value)`.
pub fn printed(value: &Value, budget: &Budget) -> Result<String, Error> {
    budget.writer().written(|writer| match value.kind() {
        ValueKind::Number | ValueKind::Seq | ValueKind::Map => write_repr(writer, value, 0),
        _ => write!(writer, "{value}"),
    })
}

/// Writes `repr(value)`. Fails if lists are nested too deep.
fn write_repr(writer: &mut impl Write, value: &Value, depth: usize) -> fmt::Result {
    if is_too_deep(depth) {
        return Err(fmt::Error);
    }
    match value.kind() {
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) => writer.write_str(&json::float(number)),
            Err(_) => write!(writer, "{value}"),
        },
        ValueKind::Seq | ValueKind::Iterable => {
            let is_tuple = value.downcast_object_ref::<Tuple>().is_some();
            let (open, close) = if is_tuple { ('(', ')') } else { ('[', ']') };
            writer.write_char(open)?;
            let mut n = 0;
            for item in value.try_iter().map_err(|_| fmt::Error)? {
                writer.write_str(if n > 0 { ", " } else { "" })?;
                write_repr(writer, &item, depth + 1)?;
                n += 1;
            }
            writer.write_str(if is_tuple && n == 1 { "," } else { "" })?;
            writer.write_char(close)
        }
        ValueKind::Map => {
            writer.write_char('{')?;
            for (n, key) in value.try_iter().map_err(|_| fmt::Error)?.enumerate() {
                writer.write_str(if n > 0 { ", " } else { "" })?;
                write_repr(writer, &key, depth + 1)?;
                writer.write_str(": ")?;
                write_repr(writer, &value.get_item(&key).unwrap_or_default(), depth + 1)?;
            }
            writer.write_char('}')
        }
        _ => write!(writer, "{value:?}"),
    }
}
