//! Values as Python prints them.

use minijinja::value::{Tuple, ValueKind};
use minijinja::Value;

use super::json;

/// Returns `str(value)` of a number with a fraction, a list or a mapping; None for values that minijinja prints alike.
pub fn printed(value: &Value) -> Option<String> {
    match value.kind() {
        ValueKind::Number if !value.is_integer() => {
            f64::try_from(value.clone()).ok().map(json::float)
        }
        ValueKind::Seq => {
            let items = value.try_iter().ok()?.map(|item| repr(&item)).collect::<Vec<_>>();
            let is_tuple = value.downcast_object_ref::<Tuple>().is_some();
            Some(match (is_tuple, items.as_slice()) {
                (true, [one]) => format!("({one},)"),
                (true, _) => format!("({})", items.join(", ")),
                (false, _) => format!("[{}]", items.join(", ")),
            })
        }
        ValueKind::Map => {
            let pairs = value.as_object()?.try_iter_pairs()?;
            let items = pairs.map(|(key, item)| format!("{}: {}", repr(&key), repr(&item)));
            Some(format!("{{{}}}", items.collect::<Vec<_>>().join(", ")))
        }
        _ => None,
    }
}

fn repr(value: &Value) -> String {
    printed(value).unwrap_or_else(|| format!("{value:?}"))
}
