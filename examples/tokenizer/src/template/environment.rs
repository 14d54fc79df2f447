//! Jinja with the settings of transformers: a block tag removes the rest of its line, `break` and `continue` work in
//! loops, values have Python's methods, and tests and filters behave as in Jinja2.

use std::fmt::Write;
use std::sync::Arc;

use minijinja::formatting::{format, FormatStyle};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, StringInput, Tuple, ValueKind};
use minijinja::{filters, Environment, Error, ErrorKind, Output, State, Value};
use minijinja_contrib::add_to_environment;

use super::bounds::{self, Budget};
use super::program::{self, Check};
use super::{checks, json, methods, rewrite, text};

/// Returns an environment for one rendering of a template with these checks.
pub fn new(checks: &[Check]) -> Result<Environment<'static>, Error> {
    let budget = Arc::new(Budget::new());
    let mut environment = Environment::new();
    environment.set_syntax(syntax()?);
    environment.set_unknown_method_callback(methods::call);
    let printing = budget.clone();
    environment.set_formatter(move |output, _, value| write(output, value, &printing));
    add_to_environment(&mut environment);
    environment.add_filter("tojson", json::tojson);
    environment.add_filter("trim", trim);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    let printing = budget.clone();
    environment.add_filter("string", move |value: &Value| string(value, &printing));
    for name in ["e", "escape"] {
        let printing = budget.clone();
        environment.add_filter(name, move |value: &Value| escape(value, &printing));
    }
    // Jinja2 does not have these functions, and lazy lists could be nested without end.
    for name in ["bool", "chain", "lines", "pprint", "split", "zip"] {
        environment.remove_filter(name);
    }
    environment.remove_global("debug");
    environment.add_filter("indent", indent);
    environment.add_filter(rewrite::SAME, |value: Value| value);
    environment.add_test("callable", is_callable);
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    let taken = budget.clone();
    environment.add_function(program::ITER, move |value: &Value| {
        let items = iter(value)?;
        // The list of items lives only during the loop.
        taken.take(bounds::items(&items))?;
        Ok::<_, Error>(items)
    });
    let taken = budget.clone();
    environment.add_function(program::PERCENT, move |left: &Value, right: &Value| {
        checks::formatting(left, std::slice::from_ref(right), &taken)?;
        let made = percent(left, right)?;
        taken.take_result(made)
    });
    let taken = budget.clone();
    environment.add_function(
        program::SLICE,
        move |value: &Value, start: Option<i64>, stop: Option<i64>, step: Option<i64>| {
            taken.take_read(value)?;
            methods::slice(value, start, stop, step)
        },
    );
    checks::add(&mut environment, checks, &budget);
    Ok(environment)
}

pub fn syntax() -> Result<SyntaxConfig, Error> {
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()
}

/// Returns whether a value is a macro or a function.
fn is_callable(value: &Value) -> bool {
    value.kind() == ValueKind::Plain
}

/// Returns whether Python can iterate over a value. Python cannot iterate over None, although minijinja can.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Returns whether a value has a length and items, as strings and mappings do.
fn is_sequence(value: &Value) -> bool {
    value.is_undefined()
        || matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String)
}

fn trim(value: StringInput<'_>, chars: Option<String>) -> String {
    methods::strip(value.as_str(), chars.as_deref(), true, true).to_owned()
}

/// Writes a value as Python prints it.
fn write(output: &mut Output, value: &Value, budget: &Budget) -> Result<(), Error> {
    let written = match value.as_str() {
        Some(text) => {
            budget.take_text(text.len() as u64)?;
            output.write_str(text)
        }
        None => output.write_str(&text::printed(value, budget)?),
    };
    written.map_err(Error::from)
}

fn string(value: &Value, budget: &Budget) -> Result<Value, Error> {
    match value.as_str() {
        Some(_) => Ok(value.clone()),
        None => text::printed(value, budget).map(Value::from),
    }
}

/// Escapes for HTML with the same character references as Python.
fn escape(value: &Value, budget: &Budget) -> Result<Value, Error> {
    if value.is_safe() {
        return Ok(value.clone());
    }
    let text = text::printed(value, budget)?;
    let made = budget.writer().written(|made| {
        text.chars().try_for_each(|c| match c {
            '&' => made.write_str("&amp;"),
            '<' => made.write_str("&lt;"),
            '>' => made.write_str("&gt;"),
            '\'' => made.write_str("&#39;"),
            '"' => made.write_str("&#34;"),
            c => made.write_char(c),
        })
    });
    made.map(Value::from_safe_string)
}

fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    filters::length(value)
}

/// Jinja2's filter `int`. It returns the default for text that is not numeric.
fn int(
    state: &State,
    value: &Value,
    default: Option<Value>,
    base: Option<u32>,
    named: Kwargs,
) -> Result<Value, Error> {
    let default = default.or(named.get("default")?).unwrap_or_else(|| Value::from(0));
    let base = base.or(named.get("base")?);
    let made = filters::int(state, value, Some(default.clone()), base, no_names());
    Ok(made.unwrap_or(default))
}

fn float(
    state: &State,
    value: &Value,
    default: Option<Value>,
    named: Kwargs,
) -> Result<Value, Error> {
    let default = default.or(named.get("default")?).unwrap_or_else(|| Value::from(0.0));
    Ok(filters::float(state, value, Some(default.clone()), no_names()).unwrap_or(default))
}

fn no_names() -> Kwargs {
    std::iter::empty::<(String, Value)>().collect()
}

/// Jinja2's filter `indent`. It indents empty lines only if `blank` is set.
fn indent(
    value: &str,
    width: Option<Value>,
    first: Option<bool>,
    blank: Option<bool>,
    named: Kwargs,
) -> Result<String, Error> {
    let width = width.or(named.get("width")?).unwrap_or_else(|| Value::from(4));
    let first = first.or(named.get("first")?).unwrap_or(false);
    let blank = blank.or(named.get("blank")?).unwrap_or(false);
    named.assert_all_used()?;
    let indention = match width.as_str() {
        Some(text) => text.to_owned(),
        None => " ".repeat(width.as_usize().unwrap_or(0)),
    };
    let text = format!("{value}\n");
    let mut lines = methods::lines(&text);
    let mut made = String::new();
    if first {
        made.push_str(&indention);
    }
    if let Some(line) = lines.next() {
        made.push_str(line);
    }
    for line in lines {
        made.push('\n');
        if blank || !line.is_empty() {
            made.push_str(&indention);
        }
        made.push_str(line);
    }
    Ok(made)
}

/// Returns the value that a loop iterates over, as a list if minijinja would not know its length.
fn iter(value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::None => {
            Err(Error::new(ErrorKind::InvalidOperation, "None cannot be looped over"))
        }
        ValueKind::String => {
            Ok(value.as_str().unwrap_or_default().chars().map(Value::from).collect())
        }
        ValueKind::Iterable => Ok(Value::from(value.try_iter()?.collect::<Vec<_>>())),
        _ => Ok(value.clone()),
    }
}

fn raise_exception(message: String) -> Result<String, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

fn strftime_now(format: String) -> Result<String, Error> {
    jiff::fmt::strtime::format(&format, &jiff::Zoned::now())
        .map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
}

/// `left % right`: a formatted string, or a remainder with the sign of `right`.
fn percent(left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(text) = left.as_str() {
        let arguments = match right.downcast_object_ref::<Tuple>() {
            Some(items) => items.to_vec(),
            None => vec![right.clone()],
        };
        return format(FormatStyle::Printf, text, &arguments).map(Value::from);
    }
    let refused = |reason: &str| {
        let told = format!("{} % {}: {reason}", left.kind(), right.kind());
        Error::new(ErrorKind::InvalidOperation, told)
    };
    let whole = |value: &Value| match value.kind() {
        ValueKind::Bool => Some(i64::from(value.is_true())),
        _ => value.as_i64().filter(|_| value.is_integer()),
    };
    if let (Some(a), Some(b)) = (whole(left), whole(right)) {
        if b == 0 {
            return Err(refused("division by zero"));
        }
        let remainder = i128::from(a).rem_euclid(b.into());
        let below = b < 0 && remainder != 0;
        return Ok(Value::from(if below { remainder + i128::from(b) } else { remainder }));
    }
    let number = |value: &Value| {
        whole(value).map(|n| n as f64).or_else(|| f64::try_from(value.clone()).ok())
    };
    match (number(left), number(right)) {
        (Some(_), Some(0.0)) => Err(refused("division by zero")),
        (Some(a), Some(b)) => Ok(Value::from(a - b * (a / b).floor())),
        _ => Err(refused("expected a format string or numbers")),
    }
}
