//! The tokens that a step chooses, on the host or still being computed.

use mlx_rs::ops::concatenate;
use mlx_rs::transforms::async_eval;
use mlx_rs::Array;

use crate::error::{fail, Result};
use etkv::mlx;

/// The tokens that one step chooses.
pub enum ChosenTokens {
    /// Ids that a captured step returned. A negative id means that the logits are not finite. The ids are not
    /// stored in MLX arrays: work in MLX between captured steps would end the [epoch](mlx::epoch) of the
    /// addresses in the steps' graphs.
    Host(Vec<i32>),
    Device(DeviceTokens),
}

impl ChosenTokens {
    /// Waits for the computation of the tokens, which was already started.
    pub fn wait(&self) -> Result<()> {
        match self {
            Self::Host(_) => Ok(()),
            Self::Device(tokens) => tokens.wait(),
        }
    }

    /// Returns the computed token ids.
    ///
    /// # Errors
    /// [`Backend`](etkv::Status::Backend) for logits that are not finite.
    pub fn ids(&self) -> Result<Vec<i64>> {
        match self {
            Self::Host(ids) => host_ids(ids),
            Self::Device(tokens) => tokens.ids(),
        }
    }

    /// Concatenates tokens in order, and starts the computation.
    pub fn joined(mut parts: Vec<Self>) -> Result<Self> {
        if parts.len() == 1 {
            return Ok(parts.swap_remove(0));
        }
        let parts: Vec<DeviceTokens> =
            parts.into_iter().map(Self::on_device).collect::<Result<_>>()?;
        let all = |of: fn(&DeviceTokens) -> &Array| -> Result<Array> {
            Ok(concatenate(&parts.iter().map(of).collect::<Vec<_>>(), 0)?)
        };
        let below = parts.iter().map(|part| part.below).max().unwrap_or(0);
        let (tokens, witness) = (all(|part| &part.tokens)?, all(|part| &part.witness)?);
        let joined = DeviceTokens { tokens, witness, below };
        async_eval(joined.arrays())?;
        Ok(Self::Device(joined))
    }

    fn on_device(self) -> Result<DeviceTokens> {
        match self {
            Self::Host(ids) => DeviceTokens::from_host(&ids),
            Self::Device(tokens) => Ok(tokens),
        }
    }

    /// Returns the tokens at `rows` in an array, and an exclusive upper limit of the ids.
    pub fn at(&self, rows: &[usize]) -> Result<(Array, i32)> {
        match self {
            Self::Host(ids) => DeviceTokens::from_host(ids)?.at(rows),
            Self::Device(tokens) => tokens.at(rows),
        }
    }
}

/// Chosen tokens in arrays. Their computation may still run.
pub struct DeviceTokens {
    /// Token ids, `[B]`, int32.
    pub(super) tokens: Array,
    /// `[B]`, float32: a number that is not finite if the logits of the row are not finite.
    pub(super) witness: Array,
    /// An exclusive upper limit of the ids.
    pub(super) below: i32,
}

impl DeviceTokens {
    fn from_host(ids: &[i32]) -> Result<Self> {
        let n = ids.len() as i32;
        let below = ids.iter().max().map_or(0, |most| most + 1);
        let witness = |&id: &i32| if id < 0 { f32::NAN } else { 0.0 };
        let witness = mlx::array_of(&ids.iter().map(witness).collect::<Vec<f32>>(), &[n])?;
        Ok(Self { tokens: mlx::array_of(ids, &[n])?, witness, below })
    }

    /// Returns the arrays to compute.
    pub fn arrays(&self) -> [&Array; 2] {
        [&self.tokens, &self.witness]
    }

    /// Waits for the computation, which was already started.
    pub fn wait(&self) -> Result<()> {
        self.arrays().into_iter().try_for_each(mlx::wait)
    }

    /// Returns the computed token ids.
    ///
    /// # Errors
    /// [`Backend`](etkv::Status::Backend) for logits that are not finite.
    pub fn ids(&self) -> Result<Vec<i64>> {
        let witness: Vec<f32> = mlx::elements(&self.witness)?;
        let ids: Vec<i32> = mlx::elements(&self.tokens)?;
        finite(&ids, |row| witness[row].is_finite())
    }

    fn at(&self, rows: &[usize]) -> Result<(Array, i32)> {
        if rows.iter().copied().eq(0..self.tokens.size()) {
            return Ok((self.tokens.clone(), self.below));
        }
        let rows: Vec<i32> = rows.iter().map(|&row| row as i32).collect();
        let rows = mlx::array_of(&rows, &[rows.len() as i32])?;
        Ok((self.tokens.take_axis(rows, 0)?, self.below))
    }
}

/// Returns the ids that a captured step returned. A negative id means that the logits are not finite.
///
/// # Errors
/// [`Backend`](etkv::Status::Backend) for logits that are not finite.
pub fn host_ids(ids: &[i32]) -> Result<Vec<i64>> {
    finite(ids, |row| ids[row] >= 0)
}

/// Returns ids as `i64`. Refuses a row that is not finite.
fn finite(ids: &[i32], is_finite: impl Fn(usize) -> bool) -> Result<Vec<i64>> {
    if let Some(row) = (0..ids.len()).find(|&row| !is_finite(row)) {
        fail!(Backend, "cannot choose a token: the logits of row {row} are not finite");
    }
    Ok(ids.iter().copied().map(i64::from).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Status;

    /// Ids of the host, and the same ids in arrays.
    fn both(ids: &[i32]) -> [ChosenTokens; 2] {
        let on_device = DeviceTokens::from_host(ids).unwrap();
        [ChosenTokens::Host(ids.to_vec()), ChosenTokens::Device(on_device)]
    }

    /// A captured step returns ids, and -1 for logits that are not finite.
    #[test]
    fn tokens_are_refused_where_their_logits_are_not_finite() {
        mlx::run(|| {
            for chosen in both(&[3, 0, 7]) {
                assert_eq!(chosen.ids()?, [3, 0, 7]);
                assert_eq!(chosen.at(&[0, 1, 2])?.1, 8);
            }
            for row in 0..3 {
                let mut ids = [3, 0, 7];
                ids[row] = -1;
                for chosen in both(&ids) {
                    let refused = chosen.ids().unwrap_err();
                    assert_eq!(refused.status(), Status::Backend);
                    assert!(refused.message().contains(&format!("row {row} are not finite")));
                }
            }
            assert_eq!(DeviceTokens::from_host(&[-1])?.below, 0);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn rows_of_tokens_are_joined_and_taken() {
        mlx::run(|| {
            let [host, device] = both(&[3, 0]);
            let joined = ChosenTokens::joined(vec![host, ChosenTokens::Host(vec![9]), device])?;
            assert_eq!(joined.ids()?, [3, 0, 9, 3, 0]);
            let (taken, below) = joined.at(&[2, 0])?;
            assert_eq!((mlx::elements::<i32>(&taken)?, below), (vec![9, 3], 10));
            for chosen in both(&[5, 6]) {
                assert_eq!(mlx::elements::<i32>(&chosen.at(&[1])?.0)?, [6]);
            }
            Ok(())
        })
        .unwrap();
    }

    /// The graphs of captured steps keep their addresses during an epoch.
    #[test]
    fn tokens_of_the_host_need_no_work_in_mlx() {
        let mlx = mlx::enter().unwrap();
        let before = mlx::epoch(&mlx);
        let chosen = ChosenTokens::joined(vec![ChosenTokens::Host(vec![4])]).unwrap();
        chosen.wait().unwrap();
        assert_eq!(chosen.ids().unwrap(), [4]);
        drop(chosen);
        assert_eq!(mlx::epoch(&mlx), before);
    }
}
