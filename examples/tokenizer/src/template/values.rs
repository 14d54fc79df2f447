//! The variables that a template sees.

use std::collections::BTreeMap;

use minijinja::value::{merge_maps, ValueKind};
use minijinja::{context, Value};

use crate::error::{Error, Result};

/// A message of a conversation.
#[derive(Clone)]
pub struct Message {
    pub role: String,
    pub content: String,
    /// The ids that the model generated for `content`; empty for other text.
    pub ids: Vec<u32>,
}

/// The variables of a template.
pub struct Variables {
    pub messages: Vec<Message>,
    pub add_generation_prompt: bool,
    /// Additional variables by name, such as `tools`. They replace other variables of the same name, even `messages`.
    more: Value,
}

/// The names under which a message may have its reasoning. Templates read the first.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

impl Variables {
    /// `more` is a JSON object, or empty.
    pub fn new(messages: Vec<Message>, add_generation_prompt: bool, more: &str) -> Result<Self> {
        let more = if more.is_empty() {
            context! {}
        } else {
            serde_json::from_str(more).map_err(|error| Error::Variables(error.to_string()))?
        };
        if more.kind() != ValueKind::Map {
            return Err(Error::Variables(format!("it is a {}", more.kind())));
        }
        Ok(Self { messages, add_generation_prompt, more })
    }

    pub fn has_tools(&self) -> bool {
        self.named("tools").is_some_and(|tools| !tools.is_none())
    }

    /// Returns the variables with a mark in place of the text of each message in `numbers`.
    pub fn with_marks(&self, numbers: &[usize], mark: impl Fn(usize) -> String) -> Self {
        let mut messages = self.messages.clone();
        for &n in numbers {
            messages[n].content = mark(n);
        }
        Self {
            messages,
            add_generation_prompt: self.add_generation_prompt,
            more: self.more.clone(),
        }
    }

    /// Returns all variables of the template.
    pub fn context(&self, special_tokens: &BTreeMap<String, String>) -> Value {
        let messages: Value = match self.named("messages") {
            Some(messages) => messages,
            None => self
                .messages
                .iter()
                .map(|message| context! { role => message.role.as_str(), content => message.content.as_str() })
                .collect(),
        };
        // Later variables replace earlier variables of the same name.
        let defaults = context! {
            add_generation_prompt => self.add_generation_prompt,
            tools => (),
            documents => (),
            ..Value::from_pairs(special_tokens.clone())
        };
        let given = merge_maps([defaults, self.more.clone()]);
        merge_maps([given, context! { messages => normalized(&messages) }])
    }

    fn named(&self, name: &str) -> Option<Value> {
        self.more.get_attr(name).ok().filter(|value| !value.is_undefined())
    }
}

/// Returns messages as transformers passes them to templates: keys without a value are absent, and reasoning has the
/// names that templates read.
fn normalized(messages: &Value) -> Value {
    let Ok(messages) = messages.try_iter() else {
        return messages.clone();
    };
    messages.map(|message| normalized_message(&message)).collect()
}

fn normalized_message(message: &Value) -> Value {
    if message.kind() != ValueKind::Map {
        return message.clone();
    }
    let pairs =
        || message.as_object().and_then(|object| object.try_iter_pairs()).into_iter().flatten();
    let mut kept: Vec<(Value, Value)> = pairs().filter(|(_, value)| !value.is_none()).collect();
    let value_of = |kept: &[(Value, Value)], name: &str| {
        kept.iter().find(|(key, _)| key.as_str() == Some(name)).map(|(_, value)| value.clone())
    };
    let reasoning = REASONING.iter().find_map(|name| value_of(&kept, name));
    if let Some(reasoning) = reasoning {
        // Keys are in the order of transformers.
        let thinking = value_of(&kept, "thinking").unwrap_or_else(|| reasoning.clone());
        kept.retain(|(key, _)| key.as_str() != Some("thinking"));
        kept.insert(0, (Value::from("thinking"), thinking));
        match kept.iter_mut().find(|(key, _)| key.as_str() == Some("reasoning_content")) {
            Some((_, value)) => *value = reasoning,
            None => kept.push((Value::from("reasoning_content"), reasoning)),
        }
    }
    Value::from_pairs(kept)
}
