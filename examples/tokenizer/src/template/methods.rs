//! Python's methods of strings, lists and mappings. Methods that change a value are missing: transformers refuses
//! them.

use minijinja::value::FunctionArgs;
use minijinja::value::{from_args, Kwargs, Tuple, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Calls `method` of `value`. minijinja-contrib implements the methods that are not here.
pub fn call(
    state: &mut State,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    let made = match (value.kind(), value.as_str()) {
        (ValueKind::String, Some(text)) => string_method(text, method, arguments)?,
        (ValueKind::Seq, _) => list_method(value, method, arguments)?,
        (ValueKind::Map, _) => map_method(value, method, arguments)?,
        _ => None,
    };
    match made {
        Some(made) => Ok(made),
        None => unknown_method_callback(state, value, method, arguments),
    }
}

/// `value[start:stop:step]`.
pub fn slice(
    value: &Value,
    start: Option<i64>,
    stop: Option<i64>,
    step: Option<i64>,
) -> Result<Value, Error> {
    let step = step.unwrap_or(1);
    if step == 0 {
        return refused("slice step cannot be zero");
    }
    if let Some(text) = value.as_str() {
        let chars: Vec<char> = text.chars().collect();
        let chosen = places(chars.len(), start, stop, step).map(|n| chars[n]);
        return Ok(Value::from(chosen.collect::<String>()));
    }
    let items: Vec<Value> = match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => value.try_iter()?.collect(),
        kind => return refused(format!("a {kind} has no slices")),
    };
    let chosen: Vec<Value> =
        places(items.len(), start, stop, step).map(|n| items[n].clone()).collect();
    Ok(match value.downcast_object_ref::<Tuple>() {
        Some(_) => Value::from(Tuple::from(chosen)),
        None => Value::from(chosen),
    })
}

/// Returns the indices that a slice selects from `length` items.
fn places(
    length: usize,
    start: Option<i64>,
    stop: Option<i64>,
    step: i64,
) -> impl Iterator<Item = usize> {
    let length = length as i64;
    // The range of indices for starts and ends.
    let (least, most) = if step > 0 { (0, length) } else { (-1, length - 1) };
    let place = |n: i64| (if n < 0 { n + length } else { n }).clamp(least, most);
    let (first, last) = if step > 0 { (least, most) } else { (most, least) };
    let (at, end) = (start.map_or(first, place), stop.map_or(last, place));
    std::iter::successors(Some(at), move |at| Some(at.saturating_add(step)))
        .take_while(move |&at| if step > 0 { at < end } else { at > end })
        .map(|at| at as usize)
}

/// Removes `chars`, or Python's white space, from one end or both.
pub fn strip<'a>(text: &'a str, chars: Option<&str>, left: bool, right: bool) -> &'a str {
    let removed = |c: char| match chars {
        Some(chars) => chars.contains(c),
        None => is_space(c),
    };
    let text = if left { text.trim_start_matches(removed) } else { text };
    if right {
        text.trim_end_matches(removed)
    } else {
        text
    }
}

fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn refused<T>(reason: impl Into<std::borrow::Cow<'static, str>>) -> Result<T, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, reason))
}

/// Reads the arguments of a method.
fn read<'a, T: FunctionArgs<'a, Output = T>>(arguments: &'a [Value]) -> Result<T, Error> {
    from_args::<T>(arguments)
}

fn string_method(text: &str, method: &str, arguments: &[Value]) -> Result<Option<Value>, Error> {
    let made = match method {
        "strip" | "lstrip" | "rstrip" => {
            let (chars,) = read::<(Option<&str>,)>(arguments)?;
            Value::from(strip(text, chars, method != "rstrip", method != "lstrip"))
        }
        "removeprefix" => {
            let (prefix,) = read::<(&str,)>(arguments)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,) = read::<(&str,)>(arguments)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "split" | "rsplit" => split(text, method == "rsplit", arguments)?,
        "splitlines" => split_lines(text, arguments)?,
        "partition" => {
            let separator = separator(arguments)?;
            match text.split_once(separator) {
                Some((before, after)) => triple(before, separator, after),
                None => triple(text, "", ""),
            }
        }
        "rpartition" => {
            let separator = separator(arguments)?;
            match text.rsplit_once(separator) {
                Some((before, after)) => triple(before, separator, after),
                None => triple("", "", text),
            }
        }
        "find" | "rfind" | "index" | "rindex" => {
            let (what, start, end) = read::<(&str, Option<i64>, Option<i64>)>(arguments)?;
            let place = find(text, what, start, end, method.starts_with('r'));
            match place {
                None if method.ends_with("index") => return refused("substring not found"),
                place => Value::from(place.map_or(-1, |place| place as i64)),
            }
        }
        "count" => {
            let (what, start, end) = read::<(&str, Option<i64>, Option<i64>)>(arguments)?;
            let part = sliced(text, start, end).map_or("", |(_, part)| part);
            Value::from(if what.is_empty() {
                part.chars().count() + 1
            } else {
                part.matches(what).count()
            })
        }
        "startswith" | "endswith" => {
            let (what, start, end) = read::<(&Value, Option<i64>, Option<i64>)>(arguments)?;
            let part = sliced(text, start, end).map(|(_, part)| part);
            Value::from(has_affix(part, what, method)?)
        }
        "center" | "ljust" | "rjust" => {
            let (width, fill) = read::<(i64, Option<char>)>(arguments)?;
            justified(text, method, width, fill.unwrap_or(' '))?
        }
        "zfill" => {
            let (width,) = read::<(i64,)>(arguments)?;
            let (sign, digits) = match text.strip_prefix(['-', '+']) {
                Some(digits) => (&text[..1], digits),
                None => ("", text),
            };
            let zeros = padding(text, width)?;
            Value::from(format!("{sign}{}{digits}", "0".repeat(zeros)))
        }
        "title" => Value::from(title(text)),
        "swapcase" => Value::from(text.chars().flat_map(swapped).collect::<String>()),
        "casefold" => Value::from(text.to_lowercase()),
        "isdecimal" => Value::from(!text.is_empty() && text.chars().all(char::is_numeric)),
        "istitle" => Value::from(text == title(text) && text.chars().any(char::is_alphabetic)),
        "expandtabs" => {
            let (size,) = read::<(Option<usize>,)>(arguments)?;
            Value::from(expanded(text, size.unwrap_or(8).min(1000)))
        }
        _ => return Ok(None),
    };
    Ok(Some(made))
}

fn separator(arguments: &[Value]) -> Result<&str, Error> {
    match read::<(&str,)>(arguments)? {
        ("",) => refused("empty separator"),
        (separator,) => Ok(separator),
    }
}

fn triple(before: &str, separator: &str, after: &str) -> Value {
    Value::from(Tuple::from([before, separator, after].map(Value::from)))
}

fn split(text: &str, from_right: bool, arguments: &[Value]) -> Result<Value, Error> {
    let (separator, most, named) = read::<(Option<Value>, Option<i64>, Kwargs)>(arguments)?;
    let separator = separator.or(named.get("sep")?).filter(|value| !value.is_none());
    let most = most.or(named.get("maxsplit")?).unwrap_or(-1);
    named.assert_all_used()?;
    let most = usize::try_from(most).map_or(usize::MAX, |most| most.saturating_add(1));
    let Some(separator) = separator else {
        return Ok(split_at_space(text, from_right, most));
    };
    let mut parts: Vec<&str> = match separator.as_str() {
        None => return refused(format!("split takes a string, not a {}", separator.kind())),
        Some("") => return refused("empty separator"),
        Some(separator) if from_right => text.rsplitn(most, separator).collect(),
        Some(separator) => text.splitn(most, separator).collect(),
    };
    if from_right {
        parts.reverse();
    }
    Ok(parts.into_iter().map(Value::from).collect())
}

/// Splits at runs of white space into at most `most` parts. The last part keeps its trailing space.
fn split_at_space(text: &str, from_right: bool, most: usize) -> Value {
    let near = |text| strip(text, None, !from_right, from_right);
    let mut parts = Vec::new();
    let mut rest = near(text);
    while !rest.is_empty() {
        let place = if from_right { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(place) = place.filter(|_| parts.len() + 1 < most) else {
            parts.push(rest);
            break;
        };
        let (before, after) = rest.split_at(place);
        let part = if from_right { strip(after, None, true, false) } else { before };
        parts.push(part);
        rest = near(if from_right { before } else { after });
    }
    if from_right {
        parts.reverse();
    }
    parts.into_iter().map(Value::from).collect()
}

fn split_lines(text: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (keep, named) = read::<(Option<bool>, Kwargs)>(arguments)?;
    let keep = keep.or(named.get("keepends")?).unwrap_or(false);
    named.assert_all_used()?;
    let parts = Lines { rest: text }.map(|(line, end)| Value::from(if keep { end } else { line }));
    Ok(Value::from(parts.collect::<Vec<_>>()))
}

/// Returns the lines of a text, as Python's `splitlines` does.
pub fn lines(text: &str) -> impl Iterator<Item = &str> {
    Lines { rest: text }.map(|(line, _)| line)
}

/// Lines without and with their ends.
struct Lines<'a> {
    rest: &'a str,
}

impl<'a> Iterator for Lines<'a> {
    type Item = (&'a str, &'a str);

    fn next(&mut self) -> Option<Self::Item> {
        let text = self.rest;
        let ends = |c: char| {
            matches!(
                c,
                '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'
                    ..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}'
            )
        };
        let place = match text.find(ends) {
            Some(place) => place,
            None if text.is_empty() => return None,
            None => text.len(),
        };
        let after = &text[place..];
        let end = match after.chars().next() {
            Some('\r') if after.starts_with("\r\n") => 2,
            Some(c) => c.len_utf8(),
            None => 0,
        };
        self.rest = &after[end..];
        Some((&text[..place], &text[..place + end]))
    }
}

/// Returns the number of characters before `start`, and the characters from `start` to `end`. Negative bounds count
/// from the end. None if `start` is after the text or after `end`.
fn sliced(text: &str, start: Option<i64>, end: Option<i64>) -> Option<(usize, &str)> {
    let length = text.chars().count() as i64;
    let place = |n: i64| if n < 0 { (n + length).max(0) } else { n };
    let start = place(start.unwrap_or(0));
    let end = place(end.unwrap_or(length)).min(length);
    if start > length || start > end {
        return None;
    }
    let byte = |n: i64| text.char_indices().nth(n as usize).map_or(text.len(), |(at, _)| at);
    Some((start as usize, &text[byte(start)..byte(end)]))
}

/// Returns the index of the first or last character at which `what` begins.
fn find(text: &str, what: &str, start: Option<i64>, end: Option<i64>, last: bool) -> Option<usize> {
    let (before, part) = sliced(text, start, end)?;
    let place = if last { part.rfind(what) } else { part.find(what) }?;
    Some(before + part[..place].chars().count())
}

/// Returns whether `part` has the prefix or suffix `what`. `what` may be a tuple of several.
fn has_affix(part: Option<&str>, what: &Value, method: &str) -> Result<bool, Error> {
    if what.kind() == ValueKind::Seq {
        for one in what.try_iter()? {
            if has_affix(part, &one, method)? {
                return Ok(true);
            }
        }
        return Ok(false);
    }
    let Some(affix) = what.as_str() else {
        return refused(format!(
            "{method} takes a string or a tuple of strings, not a {}",
            what.kind()
        ));
    };
    Ok(part.is_some_and(|part| {
        if method == "startswith" {
            part.starts_with(affix)
        } else {
            part.ends_with(affix)
        }
    }))
}

/// The maximum width of padding.
const MAX_WIDTH: i64 = 1 << 20;

/// Returns how many characters must be added to `text` to reach `width`.
fn padding(text: &str, width: i64) -> Result<usize, Error> {
    if width > MAX_WIDTH {
        return refused(format!("the width is {width}, the maximum is {MAX_WIDTH}"));
    }
    Ok(usize::try_from(width).unwrap_or(0).saturating_sub(text.chars().count()))
}

fn justified(text: &str, method: &str, width: i64, fill: char) -> Result<Value, Error> {
    let lacking = padding(text, width)?;
    let left = match method {
        "ljust" => 0,
        "rjust" => lacking,
        // As in Python, the extra character is on the left if the width is odd.
        _ => lacking / 2 + (lacking & (width as usize) & 1),
    };
    let fill = |n: usize| fill.to_string().repeat(n);
    Ok(Value::from(format!("{}{text}{}", fill(left), fill(lacking - left))))
}

/// A letter after a letter becomes lower case; any other letter becomes upper case.
fn title(text: &str) -> String {
    let mut inside = false;
    let mut made = String::with_capacity(text.len());
    for c in text.chars() {
        match (c.is_alphabetic(), inside) {
            (true, true) => made.extend(c.to_lowercase()),
            (true, false) => made.extend(c.to_uppercase()),
            (false, _) => made.push(c),
        }
        inside = c.is_alphabetic();
    }
    made
}

fn swapped(c: char) -> Vec<char> {
    if c.is_uppercase() {
        c.to_lowercase().collect()
    } else {
        c.to_uppercase().collect()
    }
}

fn expanded(text: &str, size: usize) -> String {
    let mut made = String::with_capacity(text.len());
    let mut column = 0;
    for c in text.chars() {
        match c {
            '\t' => {
                let spaces = if size == 0 { 0 } else { size - column % size };
                made.push_str(&" ".repeat(spaces));
                column += spaces;
            }
            c => {
                made.push(c);
                column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
            }
        }
    }
    made
}

fn list_method(list: &Value, method: &str, arguments: &[Value]) -> Result<Option<Value>, Error> {
    match method {
        "index" => {
            let (what,) = read::<(&Value,)>(arguments)?;
            match list.try_iter()?.position(|item| item == *what) {
                Some(place) => Ok(Some(Value::from(place))),
                None => refused(format!("{what} is not in the list")),
            }
        }
        "copy" => {
            let () = read::<()>(arguments)?;
            Ok(Some(list.clone()))
        }
        _ => Ok(None),
    }
}

fn map_method(map: &Value, method: &str, arguments: &[Value]) -> Result<Option<Value>, Error> {
    if method != "copy" {
        return Ok(None);
    }
    let () = read::<()>(arguments)?;
    Ok(Some(map.clone()))
}
