//! Checks whether the values that a step writes are finite.

use std::cell::RefCell;

use half::{bf16, f16};
use mlx_rs::ops::concatenate;
use mlx_rs::{Array, Dtype};

use crate::error::Result;
use crate::kernels;
use crate::mlx::{self, cast};

/// The maximum number of tokens of a step whose values are kept until the step ends. Longer steps of a prompt would
/// need memory for the values of all layers at once, so their values are checked layer by layer.
const MAX_KEPT: i32 = 64;

/// The watched writes of one step.
#[derive(Default)]
pub struct Finite {
    writes: Vec<Write>,
    flags: RefCell<Vec<Flag>>,
}

struct Write {
    /// The values, or `None` if a separate flag already covers them.
    kept: Option<Array>,
    /// The dtype of the stored values.
    stored: Dtype,
}

/// A flag that tells whether the values of some writes are finite as stored.
struct Flag {
    /// The writes, in order.
    writes: Vec<usize>,
    numbers: Numbers,
}

enum Numbers {
    /// One number, which is 0 if all values are finite.
    Together(Array),
    /// A number for each write: 0 if the values of the write are finite.
    Each(Array),
}

impl Numbers {
    fn array(&self) -> &Array {
        match self {
            Self::Together(array) | Self::Each(array) => array,
        }
    }
}

impl Write {
    /// Returns whether one array can contain the values of both writes.
    fn joins(&self, other: &Self) -> bool {
        match (&self.kept, &other.kept) {
            (Some(a), Some(b)) => {
                a.shape() == b.shape() && a.dtype() == b.dtype() && self.stored == other.stored
            }
            _ => false,
        }
    }
}

impl Finite {
    /// Adds values, `[1, n_kv_heads, T, head_dim]`, that are stored as the dtype `stored`.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    pub fn watch(&mut self, values: &Array, stored: Dtype) -> Result<()> {
        let few = values.ndim() == 4 && values.dim(2) <= MAX_KEPT;
        if !few {
            let numbers = Numbers::Together(zero_if(values, stored)?);
            let flag = Flag { writes: vec![self.writes.len()], numbers };
            self.flags.get_mut().push(flag);
        }
        self.writes.push(Write { kept: few.then(|| values.clone()), stored });
        Ok(())
    }

    /// Returns the flags. The caller evaluates them together with the writes of the step. Writes since the last call
    /// share a flag if possible, because each flag is one or more kernel launches on a GPU.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    pub fn flags(&self) -> Result<Vec<Array>> {
        let mut flags = self.flags.borrow_mut();
        let mut left: Vec<usize> = (0..self.writes.len()).collect();
        left.retain(|write| !flags.iter().any(|flag| flag.writes.contains(write)));
        while let Some(&first) = left.first() {
            let joins = |&write: &usize| self.writes[first].joins(&self.writes[write]);
            let (writes, others): (Vec<usize>, _) = left.into_iter().partition(joins);
            for some in writes.chunks(kernels::MAX_ARRAYS) {
                flags.push(Flag { writes: some.to_vec(), numbers: self.numbers(some)? });
            }
            left = others;
        }
        Ok(flags.iter().map(|flag| flag.numbers.array().clone()).collect())
    }

    /// Computes whether the values of writes that [join](Write::joins) are finite.
    fn numbers(&self, writes: &[usize]) -> Result<Numbers> {
        let all: Vec<&Array> =
            writes.iter().filter_map(|&write| self.writes[write].kept.as_ref()).collect();
        let stored = self.writes[writes[0]].stored;
        if all[0].dtype() == stored {
            if let Some(each) = kernels::non_finite(&all)? {
                return Ok(Numbers::Each(each));
            }
        }
        Ok(Numbers::Together(match all[..] {
            [one] => zero_if(one, stored)?,
            // Joins them along the heads.
            _ => zero_if(&concatenate(&all, 1)?, stored)?,
        }))
    }

    /// Waits until the flags are computed. Their computation must have started.
    ///
    /// # Errors
    /// [`Backend`](crate::Status::Backend).
    pub fn wait(&self) -> Result<()> {
        self.flags.borrow().iter().try_for_each(|flag| mlx::wait(flag.numbers.array()))
    }

    /// Returns the first write with a value that is not finite.
    pub fn non_finite(&self) -> Option<usize> {
        if self.flags().is_err() {
            // A flag that cannot be read counts as not finite.
            return Some(0);
        }
        let flags = self.flags.borrow();
        flags.iter().filter_map(|flag| self.first_in(flag)).min()
    }

    /// Returns the first write of a flag whose values are not finite, if there is one.
    fn first_in(&self, flag: &Flag) -> Option<usize> {
        let zero = match &flag.numbers {
            Numbers::Each(each) => {
                let numbers = mlx::elements::<u32>(each).unwrap_or_default();
                // If a flag cannot be read, its values may or may not be finite.
                let is_bad = |at: &usize| numbers.get(*at).is_none_or(|&number| number != 0);
                return (0..flag.writes.len()).find(is_bad).map(|at| flag.writes[at]);
            }
            Numbers::Together(zero) => zero,
        };
        if is_zero(zero) {
            return None;
        }
        let is_bad = |write: &Write| match &write.kept {
            Some(values) => !zero_if(values, write.stored).is_ok_and(|zero| is_zero(&zero)),
            None => true,
        };
        let found = flag.writes.iter().copied().find(|&write| is_bad(&self.writes[write]));
        // If no write is bad by its values, the flag could not be read: its first write counts as bad.
        found.or(flag.writes.first().copied())
    }

    /// Drops the records of all writes.
    pub fn clear(&mut self) {
        self.writes.clear();
        self.flags.get_mut().clear();
    }
}

/// Returns a number that is 0 if all of these values are finite as stored. Otherwise it is NaN, because 0 times a value
/// that is not finite is NaN.
fn zero_if(values: &Array, stored: Dtype) -> Result<Array> {
    let stored = cast(values, stored)?;
    // The zero is created in the values' dtype, because a conversion would be another kernel launch.
    let zero = match stored.dtype() {
        Dtype::Float16 => Array::from_slice(&[f16::ZERO], &[1]),
        Dtype::Bfloat16 => Array::from_slice(&[bf16::ZERO], &[1]),
        _ => Array::from_slice(&[0.0f32], &[1]),
    };
    Ok(stored.multiply(zero)?.sum(None)?)
}

/// Returns whether a scalar in a float dtype is 0.
fn is_zero(scalar: &Array) -> bool {
    match scalar.dtype() {
        Dtype::Float16 => scalar.try_item_exact().is_ok_and(|x: f16| x == f16::ZERO),
        Dtype::Bfloat16 => scalar.try_item_exact().is_ok_and(|x: bf16| x == bf16::ZERO),
        _ => scalar.try_item_exact().is_ok_and(|x: f32| x == 0.0),
    }
}
