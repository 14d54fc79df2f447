//! The inputs of a language model: token ids and positions.

use mlx_rs::{Array, Dtype};
use smallvec::SmallVec;

use crate::dtype::dtype_of;
use crate::error::{fail, Result};
use crate::ir::{Dim, InputSpec, Value};
use crate::ops::frame::Frame;
use etkv::mlx;
use etkv::MlxCache;

/// Tokens of a step, on the device or on the host.
pub enum Tokens<'a> {
    /// Ids on the host.
    Host(&'a [i64]),
    /// Ids that the device has chosen, `[T]`, and an exclusive upper limit of the ids.
    Device(&'a Array, i32),
}

/// The two inputs of a language model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TextInputs {
    /// Token ids, `[1, T]`.
    tokens: (Value, Dtype),
    /// The positions of the tokens, `[T]`.
    positions: (Value, Dtype),
    /// The maximum tokens of a step, if the program limits them.
    pub most: Option<i32>,
}

impl TextInputs {
    /// Finds the token and position inputs among the inputs of a program.
    ///
    /// # Errors
    /// [`Unsupported`](etkv::Status::Unsupported) for a program with other inputs.
    pub fn find(inputs: &[InputSpec]) -> Result<Self> {
        let (mut tokens, mut positions, mut most) = (None, None, None);
        for input in inputs {
            let InputSpec::Tensor { value, shape, scalar_type, .. } = input else {
                fail!(
                    Unsupported,
                    "cannot choose tokens with a program that has an integer as input"
                );
            };
            let dtype = dtype_of(*scalar_type)?;
            let found = match shape[..] {
                [Dim::Static(1), Dim::UpTo(limit)] => {
                    most = limit;
                    &mut tokens
                }
                [Dim::UpTo(_)] => &mut positions,
                _ => fail!(
                    Unsupported,
                    "cannot choose tokens with a program whose inputs are other than tokens [1, T] and \
                     positions [T]"
                ),
            };
            let is_integer = matches!(dtype, Dtype::Int32 | Dtype::Int64);
            if !is_integer || found.replace((*value, dtype)).is_some() {
                fail!(
                    Unsupported,
                    "cannot choose tokens with a program whose inputs are other than tokens [1, T] and \
                     positions [T], both integers"
                );
            }
        }
        match (tokens, positions) {
            (Some(tokens), Some(positions)) => Ok(Self { tokens, positions, most }),
            _ => fail!(
                Unsupported,
                "cannot choose tokens with a program that does not take tokens [1, T] and \
                 positions [T]"
            ),
        }
    }

    /// Returns the value of the token ids.
    pub fn tokens(&self) -> Value {
        self.tokens.0
    }

    /// Returns the value of the positions.
    pub fn positions(&self) -> Value {
        self.positions.0
    }

    /// Returns the maximum tokens of a step on a cache.
    pub fn max_tokens(&self, cache: &MlxCache) -> i32 {
        self.most.unwrap_or(i32::MAX).min(cache.config().step_limit()).max(1)
    }

    /// Binds the inputs of a step.
    pub fn bind(&self, frame: &mut Frame, tokens: &Tokens, positions: &[i32]) -> Result<()> {
        let n = positions.len() as i32;
        let (value, dtype) = self.tokens;
        match tokens {
            Tokens::Host(ids) => {
                let array = mlx::array_of(ids, &[1, n])?.as_dtype(dtype)?;
                frame.set(value, array);
                frame.set_host_ints(value, SmallVec::from_slice(ids));
            }
            Tokens::Device(ids, below) => {
                frame.set(value, ids.as_dtype(dtype)?.reshape(&[1, n])?);
                frame.set_limit(value, Some(*below));
            }
        }
        let (value, dtype) = self.positions;
        frame.set(value, mlx::array_of(positions, &[n])?.as_dtype(dtype)?);
        frame.set_host_ints(value, positions.iter().copied().map(i64::from).collect());
        Ok(())
    }
}
