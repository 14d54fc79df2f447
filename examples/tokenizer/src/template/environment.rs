//! Jinja with the settings of transformers: block tags remove the line that they are on, `break` and `continue` work
//! in loops, values have Python's methods, and tests and filters decide as Jinja2's do.

use minijinja::formatting::{format, FormatStyle};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, StringInput, Tuple, ValueKind};
use minijinja::{escape_formatter, filters, Environment, Error, ErrorKind, Output, State, Value};
use minijinja_contrib::add_to_environment;

use super::{json, methods, rewrite, text};

pub fn new() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(syntax()?);
    environment.set_unknown_method_callback(methods::call);
    environment.set_formatter(write);
    add_to_environment(&mut environment);
    environment.add_filter("tojson", json::tojson);
    environment.add_filter("trim", trim);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("int", int);
    environment.add_filter("float", float);
    environment.add_filter("string", string);
    environment.add_filter("e", escape);
    environment.add_filter("escape", escape);
    environment.add_test("callable", is_callable);
    environment.add_test("iterable", is_iterable);
    environment.add_test("sequence", is_sequence);
    environment.add_function("raise_exception", raise_exception);
    environment.add_function("strftime_now", strftime_now);
    environment.add_function(rewrite::ITER, iter);
    environment.add_function(rewrite::PERCENT, percent);
    Ok(environment)
}

pub fn syntax() -> Result<SyntaxConfig, Error> {
    SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()
}

/// Is this a macro or a function?
fn is_callable(value: &Value) -> bool {
    value.kind() == ValueKind::Plain
}

/// Has Python an iterator of this value? None has not, though minijinja loops over it.
fn is_iterable(value: &Value) -> bool {
    !value.is_none() && value.try_iter().is_ok()
}

/// Has this value a length and items? Strings and mappings have, too.
fn is_sequence(value: &Value) -> bool {
    value.is_undefined()
        || matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String)
}

fn trim(value: StringInput<'_>, chars: Option<String>) -> String {
    methods::strip(value.as_str(), chars.as_deref(), true, true).to_owned()
}

/// Writes a value as Python prints it.
fn write(output: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match text::printed(value) {
        Some(text) => write!(output, "{text}").map_err(Error::from),
        None => escape_formatter(output, state, value),
    }
}

fn string(value: &Value) -> Value {
    if value.as_str().is_some() {
        return value.clone();
    }
    Value::from(text::printed(value).unwrap_or_else(|| value.to_string()))
}

/// Escapes for HTML with the references that Python writes.
fn escape(value: &Value) -> Value {
    if value.is_safe() {
        return value.clone();
    }
    let text = text::printed(value).unwrap_or_else(|| value.to_string());
    let mut made = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => made.push_str("&amp;"),
            '<' => made.push_str("&lt;"),
            '>' => made.push_str("&gt;"),
            '\'' => made.push_str("&#39;"),
            '"' => made.push_str("&#34;"),
            c => made.push(c),
        }
    }
    Value::from_safe_string(made)
}

fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() {
        return Ok(0);
    }
    filters::length(value)
}

/// Jinja2's filter returns the default for text that is not numeric.
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

/// Returns what a loop goes over: a list where minijinja does not know the length otherwise.
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

/// `left % right`: what a format string makes of its arguments, or a remainder with the sign of `right`.
fn percent(left: &Value, right: &Value) -> Result<Value, Error> {
    if let Some(text) = left.as_str() {
        let arguments = match right.downcast_object_ref::<Tuple>() {
            Some(items) => items.to_vec(),
            None => vec![right.clone()],
        };
        return format(FormatStyle::Printf, text, &arguments).map(Value::from);
    }
    let refused = |reason: &str| {
        let told = format!("{left} % {right}: {reason}");
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
