//! A model's chat templates. They render a conversation as the text that the model was trained on.
//!
//! transformers renders templates with Jinja2; this module renders the same text with minijinja. `environment`,
//! `methods`, `program` and `rewrite` handle the differences; `bounds` limits templates.

mod bounds;
mod checks;
mod environment;
mod json;
mod methods;
mod program;
mod rewrite;
mod text;
mod values;

use std::collections::BTreeMap;
use std::thread;

use minijinja::machinery::{eval, make_string_output};
use minijinja::{AutoEscape, Error as TemplateError, ErrorKind, Value};

use crate::error::{Error, Result};
pub use values::{Message, Variables};

/// The maximum bytes of a template. The longest published template has 60,000.
const MAX_SOURCE: usize = 256 << 10;

/// The stack of the rendering thread, in bytes; the system provides only the pages in use. Two limits bound the
/// recursion: a level of an expression takes at least two bytes of the template, and a level of a value takes the 512
/// units of a list.
const STACK: usize = 256 << 20;

/// The maximum instructions that a rendering executes.
const MAX_FUEL: u64 = 30_000_000;

/// The maximum depth of nested macros and loops.
const MAX_RECURSION: usize = 100;

/// The name of the template for conversations without tools.
const DEFAULT: &str = "default";

/// The name of the template that is used if there are tools.
const TOOL_USE: &str = "tool_use";

/// The templates of a model by name.
pub struct ChatTemplates {
    sources: BTreeMap<String, String>,
    /// `bos_token` and the other special tokens, by name.
    special_tokens: BTreeMap<String, String>,
}

impl ChatTemplates {
    pub fn new(
        sources: BTreeMap<String, String>,
        special_tokens: BTreeMap<String, String>,
    ) -> Self {
        Self { sources, special_tokens }
    }

    pub fn is_empty(&self) -> bool {
        self.sources.is_empty()
    }

    /// Renders the conversation. With `add_generation_prompt`, also renders the start of the model's next message.
    pub fn render(&self, variables: &Variables) -> Result<String> {
        let source = self.choose(variables.has_tools())?;
        let context = variables.context(&self.special_tokens);
        let refused = |reason: String| Error::Template(reason);
        let thread = thread::Builder::new().stack_size(STACK);
        thread::scope(|scope| {
            thread
                .spawn_scoped(scope, || render(source, context))
                .map_err(|error| refused(error.to_string()))?
                .join()
                .map_err(|_| refused("the template engine panicked".to_owned()))?
                .map_err(|error| refused(sentence(&error)))
        })
    }

    /// Returns the template that transformers chooses.
    fn choose(&self, has_tools: bool) -> Result<&str> {
        let for_tools = if has_tools { self.sources.get(TOOL_USE) } else { None };
        for_tools.or_else(|| self.sources.get(DEFAULT)).map(String::as_str).ok_or_else(|| {
            let names: Vec<&str> = self.sources.keys().map(String::as_str).collect();
            Error::NoDefaultTemplate(names.join(", "))
        })
    }
}

fn render(source: &str, context: Value) -> std::result::Result<String, TemplateError> {
    if source.len() > MAX_SOURCE {
        return Err(TemplateError::new(
            ErrorKind::InvalidOperation,
            format!("it has {} bytes, the maximum is {MAX_SOURCE}", source.len()),
        ));
    }
    let source = rewrite::prepared(source)?;
    let program = program::compiled(&source)?;
    let checks = program.checks();
    let mut environment = environment::new(&checks)?;
    environment.set_fuel(Some(MAX_FUEL));
    environment.set_recursion_limit(MAX_RECURSION);
    let program = program.checked(&checks)?;
    let mut text = String::new();
    let mut output = make_string_output(&mut text);
    eval(
        &environment,
        &program.instructions,
        context,
        &program.blocks,
        &mut output,
        AutoEscape::None,
    )?;
    drop(output);
    match text.len() as u64 {
        bytes if bytes > bounds::MAX_TEXT => Err(bounds::too_long(bytes)),
        _ => Ok(text),
    }
}

/// Returns the message of a template error, with its line. A message that the template raises comes first.
fn sentence(error: &TemplateError) -> String {
    let reason = match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, _) => format!("it executes more than {MAX_FUEL} instructions"),
        (_, Some(detail)) => detail.to_owned(),
        (kind, None) => kind.to_string(),
    };
    match error.line() {
        Some(line) => format!("{reason} (line {line} of the template)"),
        None => reason,
    }
}

#[cfg(test)]
mod tests;
