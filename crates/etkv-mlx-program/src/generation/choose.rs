//! Verification: the host runs a step, and for each token of the step the device chooses the next token.

use super::chosen_tokens::host_ids;
use super::last_rows;
use super::sampler::Sampler;
use crate::error::{fail, Result};
use crate::runtime::{Program, TextInputs, Tokens};
use etkv::mlx;

impl Program {
    /// Runs one step on the program's cache, as [`execute`](Self::execute) does, and returns the argmax of each
    /// token's row of logits. Of equal logits, the first one counts. The logits stay on the device: on a GPU, copying
    /// the logits of a few tokens takes longer than verifying the tokens.
    ///
    /// To verify a tree, pass its tokens in the order in which they were proposed. Declare a step of several
    /// sequences first.
    ///
    /// # Errors
    /// - [`InvalidArgument`](etkv::Status::InvalidArgument) without tokens, if the number of positions
    ///   differs from the number of tokens, and for a program without a cache.
    /// - [`Unsupported`](etkv::Status::Unsupported) for a program whose inputs are not tokens `[1, T]` and
    ///   positions `[T]`, and for several tokens of a program that returns the last row only.
    /// - The errors of the cache for positions that it refuses, and [`Backend`](etkv::Status::Backend) for a
    ///   failure of MLX or logits that are not finite. The step is rolled back.
    pub fn choose(&self, tokens: &[i64], positions: &[i32]) -> Result<Vec<i64>> {
        let loaded = &self.0;
        let Some(cache) = &loaded.cache else {
            fail!(
                InvalidArgument,
                "cannot choose tokens with a program that was loaded without a cache"
            );
        };
        let inputs = TextInputs::find(&loaded.inputs)?;
        let n = tokens.len();
        if n == 0 || positions.len() != n {
            fail!(
                InvalidArgument,
                "{n} tokens at {} positions; expected at least 1 token, and a position for each",
                positions.len()
            );
        }
        if let Some(most) = inputs.most.filter(|&most| n > most as usize) {
            fail!(InvalidArgument, "expected a step of 1 to {most} tokens, got {n}");
        }
        let mut cache = cache.lock()?;
        let mut mlx = mlx::enter()?;
        let take = |_: &mut mlx::Mlx, ids: &[i32]| host_ids(ids);
        let text = (tokens, positions);
        if let Some(ids) = loaded.choose_fast(&mut mlx, &mut *cache, text, take)? {
            return Ok(ids);
        }
        let started: Result<_> = loaded.stream.run(&mlx, || {
            let tokens = Tokens::Host(tokens);
            let (logits, step) =
                loaded.logits(&mlx, &inputs, &tokens, positions, false, &mut *cache)?;
            let chosen = Sampler::default().choose(&last_rows(&logits, n)?, None, &[])?;
            step.schedule(&chosen.arrays())?;
            Ok((chosen, step))
        });
        let (chosen, step) = started?;
        mlx.outside(|| chosen.wait())?;
        let ids = chosen.ids()?;
        loaded.stream.run(&mlx, || step.commit(&[]))?;
        Ok(ids)
    }
}
