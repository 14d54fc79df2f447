//! Runs a program once before its first real step.
//!
//! The first run of a shape costs a GPU what later ones do not: kernels are compiled or read from the
//! disk, libraries choose their ways, buffers are made. A warm-up pays it while the program is loaded.

use std::collections::BTreeSet;
use std::time::Instant;

use etkv_core::Growth;
use tracing::{debug, info, warn};

use super::execute::Program;
use super::generation::{last_rows, withdraw, Sampler, TextInputs, Tokens};
use super::TARGET;
use crate::error::Result;
use crate::mlx;

/// The tokens of the steps: one of an answer, some to verify, and as many as a prompt's.
const STEPS: [i32; 5] = [1, 2, 8, 16, 512];

impl Program {
    /// Runs steps of several lengths on the program's cache, if that is empty, and rolls them back.
    /// Frees the buffers that they needed. A failure is logged: a real step tells it again.
    pub fn warm_up(&self) {
        let began = Instant::now();
        match self.try_warm_up() {
            Ok(0) => {}
            Ok(steps) => info!(
                target: TARGET,
                steps,
                seconds = began.elapsed().as_secs_f32(),
                "a program is warm"
            ),
            Err(error) => warn!(target: TARGET, %error, "a program cannot be warmed up"),
        }
    }

    fn try_warm_up(&self) -> Result<usize> {
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
        let mut steps = 0;
        let mut mlx = mlx::enter()?;
        for n in lengths {
            if !cache.can_extend(n) {
                break;
            }
            let positions: Vec<i32> = (0..n).collect();
            let tokens = vec![0; n as usize];
            if let Some(cells) = cache.sequences_mut() {
                cells.begin_step(&vec![0; n as usize])?;
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
                drop(step);
                Ok(())
            });
            withdraw(&mut *cache);
            ran?;
            steps += 1;
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
        Ok(steps)
    }
}
