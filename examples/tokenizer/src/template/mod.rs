//! A model's chat templates. They render a conversation as the text that the model was trained on.
//!
//! transformers renders templates with Jinja2; this module renders the same text with minijinja. What the two engines
//! do differently is in `environment`, `methods` and `rewrite`.

mod environment;
mod json;
mod methods;
mod rewrite;
mod text;
mod values;

use std::collections::BTreeMap;
use std::io;
use std::thread;

use minijinja::{Error as TemplateError, ErrorKind, Value};

use crate::error::{Error, Result};
pub use values::{Message, Variables};

/// Bytes of stack of the thread that renders: deep templates must not depend on the caller's.
const STACK: usize = 16 << 20;

/// The most instructions that a rendering executes.
const MAX_FUEL: u64 = 20_000_000;

/// The most bytes that a template renders to.
const MAX_OUTPUT: usize = 64 << 20;

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
        let sources = sources.into_iter().map(|(name, text)| (name, rewrite::prepared(&text)));
        Self { sources: sources.collect(), special_tokens }
    }

    pub fn is_empty(&self) -> bool {
        self.sources.is_empty()
    }

    /// Renders the conversation, and the start of the model's next message if `add_generation_prompt`.
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
    let mut environment = environment::new()?;
    environment.set_fuel(Some(MAX_FUEL));
    let mut output = Limited(Vec::new());
    environment.template_from_str(source)?.render_captured_to(context, &mut output)?;
    String::from_utf8(output.0)
        .map_err(|error| TemplateError::new(ErrorKind::InvalidOperation, error.to_string()))
}

/// Text that is refused when it is longer than [`MAX_OUTPUT`].
struct Limited(Vec<u8>);

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_OUTPUT {
            return Err(io::Error::other(format!("the text is longer than {MAX_OUTPUT} bytes")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the template's own message if it has one, and the line.
fn sentence(error: &TemplateError) -> String {
    let reason = match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, _) => format!("it executes more than {MAX_FUEL} instructions"),
        (ErrorKind::WriteFailure, _) => format!("its text is longer than {MAX_OUTPUT} bytes"),
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
