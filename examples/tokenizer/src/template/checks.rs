//! The checks that [`super::program`] inserts before operators, filters, methods and tests. Each check takes the
//! units of the following operation from the budget, and returns the operation's arguments.

use std::sync::Arc;

use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, Value};

use super::bounds::{is_namespace, items, Budget, ITEM};
use super::program::{self, Check, Kind};
use super::text;

/// Adds the checks of operators, and of a template's filters, tests and methods.
pub fn add(environment: &mut Environment, checks: &[Check], budget: &Arc<Budget>) {
    let operators: [(&'static str, Operands); 11] = [
        (program::ADD, add_),
        (program::TIMES, times),
        (program::COMPARE, |all, budget| budget.take_comparison(&all[0], &all[1])),
        (program::IN, |all, budget| budget.take_search(&all[0], &all[1])),
        (program::INDEX, |all, budget| budget.take_whole(&all[1]).map(|_| ())),
        (program::CONTAINER, |all, budget| budget.take_container(all)),
        (program::MAPPING, mapping),
        (program::SPREAD, |all, budget| {
            Budget::check_parts(all)?;
            read(all, budget)
        }),
        (program::SET, set),
        (program::CALL, read),
        ("", read),
    ];
    for (name, check) in operators {
        let budget = budget.clone();
        environment.add_function(name, move |all: Rest<ValueOrKwargs>| {
            let all = all.into_values();
            check(&all, &budget)?;
            Ok::<_, Error>(all)
        });
    }
    for Check { kind, name, function } in checks.iter().cloned() {
        let budget = budget.clone();
        let check: fn(&str, &[Value], &Budget) -> Result<(), Error> = match kind {
            Kind::Filter => filter,
            Kind::Test => test,
            Kind::Method => method,
            Kind::Function => call,
        };
        environment.add_function(function, move |all: Rest<ValueOrKwargs>| {
            let all = all.into_values();
            check(&name, &all, &budget)?;
            Ok::<_, Error>(all)
        });
    }
    let taken = budget.clone();
    environment.add_function(program::RESULT, move |value: Value| taken.take_result(value));
    let joined = budget.clone();
    environment.add_function(program::CONCAT, move |left: &Value, right: &Value| {
        let (left, right) = (text::printed(left, &joined)?, text::printed(right, &joined)?);
        joined.take_text((left.len() + right.len()) as u64)?;
        Ok::<_, Error>(left + &right)
    });
}

type Operands = fn(&[Value], &Budget) -> Result<(), Error>;

fn read(all: &[Value], budget: &Budget) -> Result<(), Error> {
    all.iter().try_for_each(|value| budget.take_read(value))
}

fn add_(all: &[Value], budget: &Budget) -> Result<(), Error> {
    match (all[0].as_str(), all[1].as_str()) {
        (Some(left), Some(right)) => budget.take_text((left.len() + right.len()) as u64),
        _ => read(all, budget),
    }
}

fn times(all: &[Value], budget: &Budget) -> Result<(), Error> {
    let times = |value: &Value| if value.is_number() { number(value).max(1) } else { 1 };
    for (value, by) in [(&all[0], times(&all[1])), (&all[1], times(&all[0]))] {
        match value.as_str() {
            Some(text) => budget.take_text((text.len() as u64).saturating_mul(by))?,
            None => budget.take(items(value).saturating_mul(ITEM).saturating_mul(by))?,
        }
    }
    Ok(())
}

/// `{key: value, …}`. Keys are hashed.
fn mapping(all: &[Value], budget: &Budget) -> Result<(), Error> {
    budget.take_container(all)?;
    whole(all.iter().step_by(2), budget)
}

fn whole<'a>(all: impl IntoIterator<Item = &'a Value>, budget: &Budget) -> Result<(), Error> {
    all.into_iter().try_for_each(|value| budget.take_whole(value).map(|_| ()))
}

/// `{% set namespace.name = value %}`.
fn set(all: &[Value], budget: &Budget) -> Result<(), Error> {
    match is_namespace(&all[0]) {
        true => budget.take_container(&all[..1]),
        false => budget.take(1),
    }
}

fn filter(name: &str, all: &[Value], budget: &Budget) -> Result<(), Error> {
    let name: String = name.chars().filter(|c| !c.is_ascii_whitespace()).collect();
    let (value, arguments) = (&all[0], &all[1..]);
    match name.as_str() {
        "replace" => replacement(value, arguments, budget),
        "join" => {
            let mut separator = 0;
            for argument in flat(arguments) {
                separator += budget.take_whole(&argument)?;
            }
            joined(value, separator, budget)
        }
        "indent" => indentation(value, arguments, budget),
        "format" => formatting(value, arguments, budget),
        "batch" | "slice" => {
            characters(all, budget)?;
            numbers(arguments).try_for_each(|n| budget.take(n.saturating_mul(ITEM)))
        }
        "map" => match arguments.first().and_then(Value::as_str) {
            Some(inner) => {
                budget.take_read(value)?;
                for item in value.try_iter()? {
                    let rest = arguments[1..].iter().cloned();
                    filter(inner, &[item].into_iter().chain(rest).collect::<Vec<_>>(), budget)?;
                }
                Ok(())
            }
            None => read(all, budget),
        },
        "select" | "reject" | "selectattr" | "rejectattr" => {
            whole(all, budget)?;
            let mut each = 1u64;
            for argument in arguments {
                each = each.saturating_add(budget.take_whole(argument)?);
            }
            budget.take(items(value).saturating_mul(each))
        }
        // These operations do not read the contents of items.
        "list" | "reverse" => characters(all, budget),
        "first" | "last" | "length" | "count" | "default" | "d" | "items" => read(all, budget),
        "trim" => stripped(value, arguments, budget),
        "wordcount" => budget.take(text_length(value).saturating_mul(10)),
        _ => whole(all, budget),
    }
}

/// These filters convert a text to a list of characters.
fn characters(all: &[Value], budget: &Budget) -> Result<(), Error> {
    budget.take(text_length(&all[0]).saturating_mul(ITEM))?;
    read(all, budget)
}

fn call(name: &str, all: &[Value], budget: &Budget) -> Result<(), Error> {
    match name {
        // These filters convert other values to text.
        "raise_exception" | "strftime_now" => whole(all, budget),
        _ => read(all, budget),
    }
}

fn test(name: &str, all: &[Value], budget: &Budget) -> Result<(), Error> {
    match (name, all) {
        ("in", [what, container, ..]) => budget.take_search(what, container),
        ("startingwith" | "endingwith" | "filter" | "test", _) => whole(all, budget),
        (_, [left, right, ..]) => budget.take_comparison(left, right),
        (_, [value]) if value.as_str().is_some() => budget.take_read(value),
        _ => budget.take(1),
    }
}

fn method(name: &str, all: &[Value], budget: &Budget) -> Result<(), Error> {
    let (value, arguments) = (&all[0], &all[1..]);
    let Some(text) = value.as_str() else {
        return match name {
            "index" | "count" => whole(all, budget),
            _ => {
                budget.take_read(value)?;
                whole(arguments, budget)
            }
        };
    };
    match name {
        "replace" => replacement(value, arguments, budget),
        "join" => match arguments.first() {
            Some(parts) => joined(parts, text.len() as u64, budget),
            None => Ok(()),
        },
        "format" => formatting(value, arguments, budget),
        "strip" | "lstrip" | "rstrip" => stripped(value, arguments, budget),
        "expandtabs" => {
            let tabs = text.matches('\t').count() as u64;
            let width = numbers(arguments).max().unwrap_or(8);
            budget.take_text((text.len() as u64).saturating_add(tabs.saturating_mul(width)))
        }
        _ => whole(all, budget),
    }
}

/// Takes the units of `strip`, `lstrip` or `rstrip`, which compare each character of the text with each character to
/// strip.
fn stripped(value: &Value, arguments: &[Value], budget: &Budget) -> Result<(), Error> {
    let removed = arguments.first().map_or(1, text_length).max(1);
    whole(std::iter::once(value), budget)?;
    budget.take(text_length(value).saturating_mul(removed) / 16)
}

fn text_length(value: &Value) -> u64 {
    value.as_str().map_or(0, str::len) as u64
}

/// `text.replace(from, to)`.
fn replacement(value: &Value, arguments: &[Value], budget: &Budget) -> Result<(), Error> {
    let value = text::printed(value, budget)?;
    let [from, to, ..] = arguments else {
        return Ok(());
    };
    let (from, to) = (text::printed(from, budget)?, text::printed(to, budget)?);
    let found = value.matches(&from).count() as u64;
    budget.take_text((value.len() as u64).saturating_add(found.saturating_mul(to.len() as u64)))
}

/// A join of the printed items of `parts`.
fn joined(parts: &Value, separator: u64, budget: &Budget) -> Result<(), Error> {
    let bytes = budget.take_whole(parts)?;
    budget.take_text(bytes.saturating_add(items(parts).saturating_mul(separator)))
}

/// The filter `indent`. Its argument is the number of characters that it adds to each line.
fn indentation(value: &Value, arguments: &[Value], budget: &Budget) -> Result<(), Error> {
    let value = text::printed(value, budget)?;
    let lines = 1 + value.matches('\n').count() as u64;
    let texts = flat(arguments).filter_map(|value| value.as_str().map(|text| text.len() as u64));
    let width = numbers(arguments).chain(texts).max().unwrap_or(4);
    budget.take_text((value.len() as u64).saturating_add(lines.saturating_mul(width)))
}

/// `text % arguments`, `text.format(…)`.
pub fn formatting(value: &Value, arguments: &[Value], budget: &Budget) -> Result<(), Error> {
    let Some(text) = value.as_str() else {
        return Ok(());
    };
    budget.take_read(value)?;
    let mut each = 0;
    for argument in arguments {
        each = u64::max(each, budget.take_whole(argument)?);
    }
    let given = numbers(arguments).max().unwrap_or(0);
    let (mut total, mut places) = (text.len() as u64, 0);
    for spec in text.match_indices(['%', '{']).map(|(at, _)| spec(&text[at..])) {
        let width = spec.split(|c: char| !c.is_ascii_digit()).map(width).max().unwrap_or(0);
        let width = if spec.contains('*') { width.max(given) } else { width };
        total = total.saturating_add(width).saturating_add(each);
        places += 1;
    }
    // A format may print a part of a value at each placeholder.
    budget.take(places)?;
    budget.take_text(total)
}

/// Returns the format specification at the start of `text`, after a `%` or `{`.
fn spec(text: &str) -> &str {
    let is_longer = |c: char| c.is_ascii_digit() || "-+ #.*".contains(c);
    if let Some(inside) = text.strip_prefix('{') {
        return &inside[..inside.find(['{', '}']).unwrap_or(inside.len())];
    }
    let rest = &text[1..];
    let rest = match rest.strip_prefix('(') {
        Some(named) => named.split_once(')').map_or("", |(_, rest)| rest),
        None => rest,
    };
    &rest[..rest.find(|c| !is_longer(c)).unwrap_or(rest.len())]
}

/// Returns the value of `digits`, at most `u64::MAX`.
fn width(digits: &str) -> u64 {
    if digits.is_empty() {
        return 0;
    }
    digits.parse().unwrap_or(u64::MAX)
}

/// Returns the absolute values of the numbers among arguments, including named arguments.
fn numbers(arguments: &[Value]) -> impl Iterator<Item = u64> + '_ {
    flat(arguments).filter(Value::is_number).map(|value| number(&value))
}

/// Returns the absolute value of a number; `u64::MAX` if it is not an `i64`.
fn number(value: &Value) -> u64 {
    value.as_i64().map_or(u64::MAX, i64::unsigned_abs)
}

/// Flattens arguments: named arguments to their values, and tuples to their items.
fn flat(arguments: &[Value]) -> impl Iterator<Item = Value> + '_ {
    arguments.iter().flat_map(|value| match value {
        value if value.is_kwargs() => Kwargs::try_from(value.clone())
            .map(|named| {
                let named = &named;
                named.args().filter_map(|name| named.get(name).ok()).collect::<Vec<Value>>()
            })
            .unwrap_or_default(),
        value if value.kind() == ValueKind::Seq => {
            value.try_iter().map(Iterator::collect).unwrap_or_default()
        }
        value => vec![value.clone()],
    })
}
