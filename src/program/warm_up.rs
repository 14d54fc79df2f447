//! Runs a program once before its first real step.
//!
//! The first run of a shape costs a GPU what later ones do not: kernels are compiled or read from the
//! disk, libraries choose their ways, buffers are made. A warm-up pays it while the program is loaded.

use std::collections::BTreeSet;
use std::time::Instant;

use etkv_core::Growth;
use tracing::{debug, info};

use super::execute::Program;
use super::generation::{last_rows, withdraw, Sampler, TextInputs, Tokens};
use super::TARGET;
use crate::error::Result;
use crate::mlx;

/// The tokens of the steps: one of an answer, some to verify, and those that a prompt's count as.
const STEPS: [i32; 13] = [1, 2, 8, 16, 32, 64, 128, 192, 256, 320, 384, 448, 512];

impl Program {
    /// On a GPU, runs steps of several lengths on the program's cache, if that is empty, rolls them
    /// back, and frees the buffers that they needed. Calls `progress` before each, and at the end, with
    /// the steps that ran and that there are. Returns the number of steps: none on a CPU, where the
    /// first run takes no longer than later ones, and none for a program that is no language model.
    ///
    /// # Errors
    /// Those of [`execute`](Self::execute), and of [`AttendCache`](crate::AttendCache) if the cache is
    /// in use.
    pub fn warm_up(&self, progress: &mut dyn FnMut(usize, usize)) -> Result<usize> {
        if !mlx::on_gpu()? {
            return Ok(0);
        }
        let began = Instant::now();
        let steps = self.run_ahead_of_time(progress)?;
        let seconds = began.elapsed().as_secs_f32();
        info!(target: TARGET, steps, seconds, "a program is warm");
        Ok(steps)
    }

    fn run_ahead_of_time(&self, progress: &mut dyn FnMut(usize, usize)) -> Result<usize> {
        let loaded = &self.0;
        let (Some(cache), Ok(inputs)) = (&loaded.cache, TextInputs::find(&loaded.inputs)) else {
            return Ok(0);
        };
        let mut cache = cache.lock()?;
        if cache.length() > 0 {
            return Ok(0);
        }
        let most = [inputs.most.unwrap_or(i32::MAX), cache.config().max_step_tokens];
        let most = most.into_iter().filter(|&most| most > 0).min().unwrap_or(i32::MAX);
        let lengths: BTreeSet<i32> = STEPS.map(|n| most.min(n)).into_iter().collect();
        let fitting = lengths.into_iter().filter(|&n| cache.can_extend(n));
        let mut steps: Vec<Vec<i32>> = fitting.map(|n| vec![0; n as usize]).collect();
        if most >= 2 && cache.sequences().is_some() && cache.can_extend(2) {
            // Two sequences need a mask.
            steps.push(vec![0, 1]);
        }
        let mut mlx = mlx::enter()?;
        for (done, sequences) in steps.iter().enumerate() {
            progress(done, steps.len());
            let n = sequences.len() as i32;
            let positions: Vec<i32> = match sequences.last() {
                Some(0) => (0..n).collect(),
                _ => vec![0; sequences.len()],
            };
            let tokens = vec![0; sequences.len()];
            if let Some(cells) = cache.sequences_mut() {
                cells.begin_step(sequences)?;
            }
            let began = Instant::now();
            let ran: Result<_> = loaded.stream.run(&mlx, || {
                let (logits, step) = loaded.logits(
                    &mlx,
                    &inputs,
                    &Tokens::Host(&tokens),
                    &positions,
                    &mut *cache,
                )?;
                let chosen = Sampler::default().choose(&last_rows(&logits, 1)?, None, &[0.0])?;
                step.schedule(&chosen.arrays())?;
                Ok((chosen, step))
            });
            let ran: Result<()> = ran.and_then(|(chosen, step)| {
                mlx.outside(|| chosen.wait())?;
                let _ = step.set_aside();
                Ok(())
            });
            cache.abort();
            withdraw(&mut *cache);
            ran?;
            debug!(
                target: TARGET,
                tokens = n,
                seconds = began.elapsed().as_secs_f32(),
                "a step of the warm-up"
            );
        }
        if cache.config().growth != Growth::Upfront {
            cache.clear(true)?;
        }
        mlx.publish_kernels();
        progress(steps.len(), steps.len());
        Ok(steps.len())
    }
}
