//! The sizes of recurrent layers.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::bookkeeping::{RecurrentWindow, BLOCK};
use crate::error::{fail, Result};

/// The sizes of one recurrent layer, which are facts of the model's architecture.
///
/// A recurrent layer stores float32, independent of the formats of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum RecurrentLayer {
    /// A causal depthwise convolution: a query reads the column of its own position and the `width - 1` columns
    /// before it.
    Convolution {
        /// The number of elements of a column.
        channels: i32,
        /// The number of positions that a query reads, from 1 to 64.
        width: i32,
    },
    /// A linear recurrence: each head keeps a state of `k_dim` times `v_dim` elements.
    Recurrence {
        /// The number of heads of queries and keys. Each of them serves `heads / k_heads` heads of values.
        k_heads: i32,
        /// The number of heads of values and of the state.
        heads: i32,
        /// The number of elements of a key.
        k_dim: i32,
        /// The number of elements of a value.
        v_dim: i32,
        /// Whether there is a decay for each channel of a key, rather than one for each head.
        channel_decay: bool,
    },
}

impl RecurrentLayer {
    /// The number of integers that describe a layer.
    pub const N_FIELDS: usize = 8;

    /// Returns the layer of this kind, 1 or 2, with these `channels`, `width`, `k_heads`, `heads`, `k_dim`, `v_dim` and
    /// `channel_decay`. [`Self::validate`] checks the sizes.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument) for a kind other than 1 and 2, and for a size that only the
    /// other kind has.
    pub fn from_fields(fields: [i32; Self::N_FIELDS]) -> Result<Self> {
        let [kind, channels, width, k_heads, heads, k_dim, v_dim, channel_decay] = fields;
        let of_convolution = [("channels", channels), ("width", width)];
        let of_recurrence = [
            ("k_heads", k_heads),
            ("heads", heads),
            ("k_dim", k_dim),
            ("v_dim", v_dim),
            ("channel_decay", channel_decay),
        ];
        match kind {
            1 => {
                refuse_others(&of_recurrence, "convolution")?;
                Ok(Self::Convolution { channels, width })
            }
            2 => {
                refuse_others(&of_convolution, "recurrence")?;
                let channel_decay = match channel_decay {
                    0 => false,
                    1 => true,
                    other => fail!(InvalidArgument, "channel_decay is {other}, expected 0 or 1"),
                };
                Ok(Self::Recurrence { k_heads, heads, k_dim, v_dim, channel_decay })
            }
            other => fail!(InvalidArgument, "kind is {other}, expected 1 or 2"),
        }
    }

    /// Returns the integers from which [`Self::from_fields`] makes this layer.
    pub fn fields(&self) -> [i32; Self::N_FIELDS] {
        match *self {
            Self::Convolution { channels, width } => [1, channels, width, 0, 0, 0, 0, 0],
            Self::Recurrence { k_heads, heads, k_dim, v_dim, channel_decay } => {
                [2, 0, 0, k_heads, heads, k_dim, v_dim, i32::from(channel_decay)]
            }
        }
    }

    /// Checks every field.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument), with the name of the field in the message.
    pub fn validate(&self) -> Result<()> {
        let at_least_1 = |name: &str, value: i32| match value {
            ..=0 => fail!(InvalidArgument, "{name} is {value}, the minimum is 1"),
            _ => Ok(()),
        };
        match *self {
            Self::Convolution { channels, width } => {
                at_least_1("channels", channels)?;
                at_least_1("width", width)?;
                if width > BLOCK {
                    fail!(InvalidArgument, "width is {width}, the maximum is {BLOCK}");
                }
            }
            Self::Recurrence { k_heads, heads, k_dim, v_dim, .. } => {
                at_least_1("k_heads", k_heads)?;
                at_least_1("heads", heads)?;
                at_least_1("k_dim", k_dim)?;
                at_least_1("v_dim", v_dim)?;
                if heads % k_heads != 0 {
                    fail!(
                        InvalidArgument,
                        "expected heads to be a multiple of k_heads, got {heads} and {k_heads}"
                    );
                }
                if k_dim.checked_mul(v_dim).is_none() || v_dim.checked_add(k_dim).is_none() {
                    fail!(
                        InvalidArgument,
                        "a state of {k_dim} times {v_dim} elements is too large"
                    );
                }
            }
        }
        Ok(())
    }

    /// Returns the number of rows before a token that a convolution reads. It is 0 for a recurrence, which reads only
    /// rows since an anchor.
    pub fn lead(&self) -> i32 {
        match *self {
            Self::Convolution { width, .. } => width - 1,
            Self::Recurrence { .. } => 0,
        }
    }

    /// Returns the heads and the elements of the two parts of a row. A convolution has only the first.
    pub fn row(&self) -> [Option<[i32; 2]>; 2] {
        match *self {
            Self::Convolution { channels, .. } => [Some([1, channels]), None],
            Self::Recurrence { k_heads, heads, k_dim, v_dim, channel_decay } => {
                let decays = if channel_decay { k_dim } else { 1 };
                [Some([k_heads, k_dim]), Some([heads, v_dim + decays])]
            }
        }
    }

    /// Returns the heads and the elements of an anchor, or `None` for a convolution.
    pub fn anchor(&self) -> Option<[i32; 2]> {
        match *self {
            Self::Convolution { .. } => None,
            Self::Recurrence { heads, k_dim, v_dim, .. } => Some([heads, k_dim * v_dim]),
        }
    }
}

impl fmt::Display for RecurrentLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Convolution { channels, width } => {
                write!(f, "a convolution of {channels} channels and width {width}")
            }
            Self::Recurrence { k_heads, heads, k_dim, v_dim, channel_decay } => {
                let decay = if channel_decay { "channel" } else { "head" };
                write!(
                    f,
                    "a recurrence of {heads} heads, {k_heads} of them for keys, with states of {k_dim} times {v_dim} \
                     and a decay for each {decay}"
                )
            }
        }
    }
}

/// Refuses a layer that also has sizes of the other kind.
fn refuse_others(others: &[(&str, i32)], kind: &str) -> Result<()> {
    if let Some((name, value)) = others.iter().find(|&&(_, value)| value != 0) {
        fail!(InvalidArgument, "{name} is {value}, expected 0 for a {kind}");
    }
    Ok(())
}

/// Returns the window of these layers, or `None` if there are none.
pub(crate) fn window_of(layers: &[RecurrentLayer], anchors: i32) -> Option<RecurrentWindow> {
    let lead = layers.iter().map(RecurrentLayer::lead).max()?;
    Some(RecurrentWindow { lead, anchors })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_invalid_field_is_named() {
        let message = |layer: RecurrentLayer| layer.validate().unwrap_err().to_string();
        let convolution = |channels, width| RecurrentLayer::Convolution { channels, width };
        assert!(convolution(8, 4).validate().is_ok());
        assert_eq!(message(convolution(0, 4)), "channels is 0, the minimum is 1");
        assert_eq!(message(convolution(8, 65)), "width is 65, the maximum is 64");
        let recurrence = |k_heads, heads, k_dim| RecurrentLayer::Recurrence {
            k_heads,
            heads,
            k_dim,
            v_dim: 8,
            channel_decay: false,
        };
        assert!(recurrence(2, 4, 8).validate().is_ok());
        assert_eq!(
            message(recurrence(3, 4, 8)),
            "expected heads to be a multiple of k_heads, got 4 and 3"
        );
        assert!(message(recurrence(1, 1, i32::MAX)).contains("too large"));
    }

    #[test]
    fn sizes_follow_from_the_layer() {
        let layer = RecurrentLayer::Recurrence {
            k_heads: 2,
            heads: 4,
            k_dim: 8,
            v_dim: 16,
            channel_decay: true,
        };
        assert_eq!(layer.row(), [Some([2, 8]), Some([4, 24])]);
        assert_eq!(layer.anchor(), Some([4, 128]));
        let convolution = RecurrentLayer::Convolution { channels: 8, width: 4 };
        assert_eq!((convolution.row(), convolution.anchor()), ([Some([1, 8]), None], None));
        assert_eq!(window_of(&[layer, convolution], 2).map(|window| window.lead), Some(3));
        assert_eq!(window_of(&[], 2), None);
    }
}
