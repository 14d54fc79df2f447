//! The limits of a rendering. Templates are untrusted, and must not exhaust memory or time.
//!
//! minijinja limits the number of instructions, but one instruction can double a text. So each operation that reads
//! or writes more than a few bytes takes units from a [`Budget`] before it runs. A unit is a byte of text; an item of
//! a list counts as [`ITEM`] units.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};

/// The maximum bytes of one text, within a template and as its output.
pub const MAX_TEXT: u64 = 16 << 20;

/// The maximum units that a rendering reads and writes.
const MAX_UNITS: u64 = 256 << 20;

/// The maximum nesting of lists that are printed or compared.
const MAX_DEPTH: usize = 100;

/// The units of an item of a list or a mapping. They stand for its bytes and for the time to read it.
pub const ITEM: u64 = 32;

/// The units of a new list or mapping. They limit how deep lists and mappings can be nested.
const CONTAINER: u64 = 512;

/// The remaining units of a rendering.
pub struct Budget(AtomicU64);

impl Budget {
    pub fn new() -> Self {
        Self(AtomicU64::new(MAX_UNITS))
    }

    pub fn take(&self, units: u64) -> Result<(), Error> {
        let taken = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(units));
        taken
            .map(|_| ())
            .map_err(|_| refusal(format!("it reads and writes more than {} MiB", MAX_UNITS >> 20)))
    }

    /// Takes the units of a text before it is written.
    pub fn take_text(&self, bytes: u64) -> Result<(), Error> {
        if bytes > MAX_TEXT {
            return Err(too_long(bytes));
        }
        self.take(bytes)
    }

    /// Takes the units of a value that an operation returned. Returns the value. A lazy iterable becomes a list,
    /// because lazy iterables can be nested without end.
    pub fn take_result(&self, value: Value) -> Result<Value, Error> {
        if let Some(text) = value.as_str() {
            self.take_text(text.len() as u64)?;
            return Ok(value);
        }
        if value.kind() != ValueKind::Iterable {
            self.take(1 + items(&value) * ITEM)?;
            return Ok(value);
        }
        let mut made = Vec::new();
        for item in value.try_iter()? {
            self.take(ITEM)?;
            made.push(item);
        }
        Ok(Value::from(made))
    }

    /// Takes the units of reading a value, without the contents of its items.
    pub fn take_read(&self, value: &Value) -> Result<(), Error> {
        self.take(1 + text_or_items(value))
    }

    /// Takes the units of reading a value and all of its contents. Returns the bytes of its texts, plus at least one
    /// for each other value.
    pub fn take_whole(&self, value: &Value) -> Result<u64, Error> {
        let bytes = self.whole(value, 0)?;
        self.take(bytes)?;
        Ok(bytes)
    }

    fn whole(&self, value: &Value, depth: usize) -> Result<u64, Error> {
        if depth > MAX_DEPTH {
            return Err(too_deep());
        }
        self.take(ITEM)?;
        let Some(inside) = inside(value)? else {
            // The longest number has 310 digits.
            let printed = if value.is_number() && !value.is_integer() { 320 } else { 40 };
            return Ok(value.as_str().map_or(printed, |text| 1 + text.len() as u64));
        };
        let mut bytes = 1u64;
        for item in inside {
            bytes = bytes.saturating_add(self.whole(&item, depth + 1)?);
        }
        Ok(bytes)
    }

    /// Takes the units of comparing two values.
    pub fn take_comparison(&self, left: &Value, right: &Value) -> Result<(), Error> {
        match (left.as_str(), right.as_str()) {
            (Some(left), Some(right)) => self.take(1 + left.len().min(right.len()) as u64),
            // Values of different kinds are unequal, and their contents are not read.
            (Some(_), _) | (_, Some(_)) => Ok(()),
            _ if left.as_object().is_some() && right.as_object().is_some() => {
                self.take_whole(left)?;
                self.take_whole(right).map(|_| ())
            }
            _ => Ok(()),
        }
    }

    /// Takes the units of a search for `what` in `container`.
    pub fn take_search(&self, what: &Value, container: &Value) -> Result<(), Error> {
        if container.as_str().is_some() || container.kind() == ValueKind::Map {
            self.take_read(container)?;
            return self.take_whole(what).map(|_| ());
        }
        let one = self.take_whole(what)?;
        if what.as_object().is_some() {
            return self.take_whole(container).map(|_| ());
        }
        self.take(items(container).saturating_mul(one))
    }

    /// Takes the units of a new list or mapping with the contents `parts`.
    pub fn take_container(&self, parts: &[Value]) -> Result<(), Error> {
        self.take(CONTAINER + parts.len() as u64 * ITEM)?;
        Self::check_parts(parts)
    }

    /// Refuses values that must not be contained in another value.
    pub fn check_parts(parts: &[Value]) -> Result<(), Error> {
        // A namespace can change later, so it could later contain itself.
        match parts.iter().any(is_namespace) {
            true => Err(refusal("a namespace cannot be within another value".into())),
            false => Ok(()),
        }
    }

    /// Returns a writer that refuses text beyond the limit of a text or of the remaining units.
    pub fn writer(&self) -> Writer<'_> {
        Writer { text: String::new(), budget: self, refusal: None }
    }
}

/// A text that takes units from the budget while it is written.
pub struct Writer<'a> {
    text: String,
    budget: &'a Budget,
    refusal: Option<Error>,
}

impl Writer<'_> {
    /// Returns the text that `write` writes.
    pub fn written(
        mut self,
        write: impl FnOnce(&mut Self) -> fmt::Result,
    ) -> Result<String, Error> {
        let written = write(&mut self);
        match (written, self.refusal) {
            (_, Some(refusal)) => Err(refusal),
            (Ok(()), None) => Ok(self.text),
            (Err(_), None) => Err(too_deep()),
        }
    }
}

impl fmt::Write for Writer<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let length = (self.text.len() + text.len()) as u64;
        let refusal = match length > MAX_TEXT {
            true => Some(too_long(length)),
            false => self.budget.take(text.len() as u64).err(),
        };
        if refusal.is_some() {
            self.refusal = refusal;
            return Err(fmt::Error);
        }
        self.text.push_str(text);
        Ok(())
    }
}

/// Returns whether `depth` is too deep to print.
pub fn is_too_deep(depth: usize) -> bool {
    depth > MAX_DEPTH
}

/// Returns the number of items of a list or a mapping; 0 for other values.
pub fn items(value: &Value) -> u64 {
    match value.as_str() {
        Some(_) => 0,
        None => value.len().unwrap_or(0) as u64,
    }
}

fn text_or_items(value: &Value) -> u64 {
    value.as_str().map_or_else(|| items(value) * ITEM, |text| text.len() as u64)
}

/// Returns the contents of a list or a mapping, including keys; None for other values.
fn inside(value: &Value) -> Result<Option<Box<dyn Iterator<Item = Value>>>, Error> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => Ok(Some(Box::new(value.try_iter()?))),
        ValueKind::Map => {
            let map = value.clone();
            let pairs = value.try_iter()?.flat_map(move |key| {
                let item = map.get_item(&key).unwrap_or_default();
                [key, item]
            });
            Ok(Some(Box::new(pairs)))
        }
        _ => Ok(None),
    }
}

pub fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

pub fn too_long(bytes: u64) -> Error {
    refusal(format!("it makes a text of {bytes} bytes, the maximum is {MAX_TEXT}"))
}

fn too_deep() -> Error {
    refusal(format!("its lists are nested more than {MAX_DEPTH} levels deep"))
}

fn refusal(reason: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, reason)
}
