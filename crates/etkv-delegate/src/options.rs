//! The options with which a program is loaded.

use etkv_core::{fail, Result};

/// The rows of logits that a program returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum LogitsRows {
    /// All rows, as exported.
    #[default]
    All,
    /// Only the row of the last token.
    Last,
    /// All rows in steps with proposed candidates or declared sequences, and the row of the last token in other
    /// steps.
    Proposed,
}

/// The passes that change a program when it is loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Passes {
    /// The passes that make the program faster on its device.
    #[default]
    Default,
    /// Only the passes that other options need.
    None,
    /// The passes for a GPU, on any device; for tests.
    Gpu,
    /// The default passes, but no step is captured as a CUDA graph: the interpreter runs all steps.
    Interpreted,
}

/// The options with which a program is loaded.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct LoadOptions {
    /// The key of the cache to which the program is bound.
    pub cache_key: Option<String>,
    /// The rows of the logits that the program returns.
    pub logits: LogitsRows,
    /// The passes over the program. Programs for the CPU have no passes.
    pub passes: Passes,
    /// The name under which the program's buffers can be reset.
    pub buffers: Option<String>,
}

impl LoadOptions {
    /// Parses the options that a backend receives. An empty string stands for an absent option.
    ///
    /// # Errors
    /// [`InvalidArgument`](etkv_core::Status::InvalidArgument) for `logits` other than `all`, `last` and `proposed`,
    /// and for `passes` other than `default`, `interpreted`, `none` and `gpu`.
    pub fn parse(cache_key: &str, logits: &str, passes: &str, buffers: &str) -> Result<Self> {
        let logits = match logits {
            "" | "all" => LogitsRows::All,
            "last" => LogitsRows::Last,
            "proposed" => LogitsRows::Proposed,
            other => fail!(
                InvalidArgument,
                "option `logits` is `{other}`; expected all, last or proposed"
            ),
        };
        let passes = match passes {
            "" | "default" => Passes::Default,
            "none" => Passes::None,
            "gpu" => Passes::Gpu,
            "interpreted" => Passes::Interpreted,
            other => {
                fail!(
                    InvalidArgument,
                    "option `passes` is `{other}`; expected default, interpreted or none"
                )
            }
        };
        let given = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        Ok(Self { cache_key: given(cache_key), logits, passes, buffers: given(buffers) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_words() {
        let options = LoadOptions::parse("", "", "", "").unwrap();
        assert_eq!((&options.cache_key, &options.buffers), (&None, &None));
        assert_eq!((options.logits, options.passes), (LogitsRows::All, Passes::Default));
        let options = LoadOptions::parse("key", "last", "none", "mine").unwrap();
        assert_eq!(options.cache_key.as_deref(), Some("key"));
        assert_eq!(options.buffers.as_deref(), Some("mine"));
        assert_eq!((options.logits, options.passes), (LogitsRows::Last, Passes::None));
        assert_eq!(LoadOptions::parse("", "all", "gpu", "").unwrap().passes, Passes::Gpu);
        let proposed = LoadOptions::parse("", "proposed", "", "").unwrap();
        assert_eq!(proposed.logits, LogitsRows::Proposed);
        let error = LoadOptions::parse("", "", "some", "").unwrap_err();
        assert_eq!(
            error.message(),
            "option `passes` is `some`; expected default, interpreted or none"
        );
        let error = LoadOptions::parse("", "some", "", "").unwrap_err();
        assert_eq!(error.message(), "option `logits` is `some`; expected all, last or proposed");
    }
}
