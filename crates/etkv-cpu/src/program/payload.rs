//! The exporter's description of a call: JSON, written by `python/etkv/export/cpu/calls.py`.

use etkv_core::{fail, Error, Result, Status};
use serde::Deserialize;

/// The version of payloads that this build reads.
const VERSION: u32 = 1;

/// The most calls of a forward: more than any model has, and few enough for a flag for each.
const MAX_CALLS: usize = 1 << 16;

/// The payload of a call.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case", deny_unknown_fields)]
pub enum Payload {
    /// Attention over a layer of the cache.
    UpdateAndAttend(Attend),
    /// The rows of hidden states for which the model's head computes logits.
    SelectRows(SelectRows),
    /// One of two tensors, chosen by the capacity of the cache.
    SelectByCapacity(SelectByCapacity),
}

/// Attention over a layer of the cache.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub struct Attend {
    version: u32,
    /// A name that all calls of a program share. Programs of the same graph have the same name.
    pub program: String,
    /// The number of this call among those of a forward, from 0.
    pub call: usize,
    /// The number of calls of a forward.
    pub n_calls: usize,
    /// The number of layers of the cache that the calls use, from 0.
    pub n_layers: usize,
    /// The layer of the cache.
    pub layer: usize,
    /// The factor of the scores.
    pub scale: f32,
    /// The inputs that are the queries, keys, values and positions. Two may be the same.
    pub inputs: [usize; 4],
    /// Whether the program has a call that selects rows, computes all rows or computes the last row only.
    pub logits: Logits,
}

/// The rows of logits that a program can compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Logits {
    /// The rows that are selected at load.
    Selected,
    /// One row for each token.
    All,
    /// The row of the last token.
    Last,
}

/// The rows of hidden states for which the model's head computes logits.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct SelectRows {
    version: u32,
}

/// One of two tensors: the second for a cache whose capacity exceeds the limit.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct SelectByCapacity {
    version: u32,
    /// The largest capacity that the first tensor is for.
    pub limit: i32,
}

impl Payload {
    /// Reads a payload.
    ///
    /// # Errors
    /// [`Program`](Status::Program) for bytes that are no payload, and [`Version`](Status::Version) for a
    /// payload of another version.
    pub fn read(bytes: &[u8]) -> Result<Self> {
        let payload: Self = serde_json::from_slice(bytes).map_err(|error| {
            Error::new(Status::Program, format!("the payload of a CPU call is damaged: {error}"))
        })?;
        let (Self::UpdateAndAttend(Attend { version, .. })
        | Self::SelectRows(SelectRows { version })
        | Self::SelectByCapacity(SelectByCapacity { version, .. })) = payload;
        if version != VERSION {
            fail!(
                Version,
                "expected a CPU program of version {VERSION}, got {version}; export it again"
            );
        }
        if let Self::UpdateAndAttend(attend) = &payload {
            attend.check()?;
        }
        Ok(payload)
    }
}

impl Attend {
    /// Returns the number of inputs.
    pub fn n_inputs(&self) -> usize {
        self.inputs.iter().max().map_or(0, |last| last + 1)
    }

    fn check(&self) -> Result<()> {
        if self.n_calls > MAX_CALLS {
            fail!(Program, "expected at most {MAX_CALLS} calls of a forward, got {}", self.n_calls);
        }
        if self.call >= self.n_calls {
            fail!(Program, "expected a call below {}, got {}", self.n_calls, self.call);
        }
        if self.layer >= self.n_layers {
            fail!(Program, "expected a layer below {}, got {}", self.n_layers, self.layer);
        }
        if self.inputs.iter().any(|&input| input >= self.inputs.len()) {
            fail!(Program, "expected inputs from 0 to 3, got {:?}", self.inputs);
        }
        if !self.scale.is_finite() {
            fail!(Program, "expected a finite scale, got {}", self.scale);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"{"op": "update_and_attend", "version": 1, "program": "p", "call": 0, "n_calls": 2,
        "n_layers": 2, "layer": 1, "scale": 0.5, "inputs": [2, 0, 0, 1], "logits": "selected"}"#;

    #[test]
    fn a_call_is_read() {
        let Payload::UpdateAndAttend(attend) = Payload::read(GOOD.as_bytes()).unwrap() else {
            panic!("another op");
        };
        assert_eq!((attend.layer, attend.n_inputs(), attend.logits), (1, 3, Logits::Selected));
        let rows = Payload::read(br#"{"op": "select_rows", "version": 1}"#).unwrap();
        assert!(matches!(rows, Payload::SelectRows(_)));
        let choice = Payload::read(br#"{"op": "select_by_capacity", "version": 1, "limit": 4096}"#);
        let Payload::SelectByCapacity(choice) = choice.unwrap() else {
            panic!("another op");
        };
        assert_eq!(choice.limit, 4096);
    }

    #[test]
    fn damage_is_refused() {
        for (from, to, told) in [
            ("update_and_attend", "update", "unknown variant `update`"),
            ("\"call\": 0", "\"call\": 2", "below 2, got 2"),
            ("\"call\": 0", "\"call\": -1", "damaged"),
            ("\"n_calls\": 2", "\"n_calls\": 100000000000000", "at most 65536 calls"),
            ("\"layer\": 1", "\"layer\": 2", "layer below 2, got 2"),
            ("[2, 0, 0, 1]", "[2, 0, 4, 1]", "from 0 to 3, got [2, 0, 4, 1]"),
            ("[2, 0, 0, 1]", "[2, 0, 1]", "damaged"),
            ("0.5", "1e39", "scale"),
            ("}", "", "damaged"),
        ] {
            let text = GOOD.replacen(from, to, 1);
            assert_ne!(text, GOOD);
            let error = Payload::read(text.as_bytes()).unwrap_err();
            assert_eq!(error.status(), Status::Program, "{text}");
            assert!(error.message().contains(told), "{error}");
        }
    }

    #[test]
    fn other_versions_are_refused() {
        let text = GOOD.replacen("\"version\": 1", "\"version\": 2", 1);
        let error = Payload::read(text.as_bytes()).unwrap_err();
        assert_eq!(error.status(), Status::Version);
        assert!(error.message().contains("version 1, got 2"), "{error}");
    }
}
