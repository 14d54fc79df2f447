//! Runs a program once before its first real step.
//!
//! The first run of a shape has extra costs on a GPU: kernels are compiled or read from the disk, libraries choose
//! their algorithms, and buffers are allocated. A warm-up moves these costs to the load.

use std::collections::BTreeSet;
use std::time::Instant;

use etkv_core::{Growth, LayerPolicy, MemoryBudget};
use etkv_delegate::LogitsRows;
use tracing::{debug, info};

use super::{last_rows, withdraw, Sampler};
use crate::error::Result;
use crate::ops::ROWS_THAT_RECUR;
use crate::runtime::{Program, RequestedOutputs, TextInputs, Tokens};
use crate::TARGET;
use etkv::kernels;
use etkv::mlx::{self, Mlx};
use etkv::MlxCache;

/// The lengths of steps that read no prompt: a token of an answer, and candidates to verify.
const FEW: [i32; 5] = [1, 2, 8, 16, 32];

/// The maximum tokens of a captured chain, for caches of trees: a token of an answer, and candidates. A text
/// without repetition decodes fastest with this number of tokens.
const CHAIN: i32 = 7;

/// Lengths of further captured steps, for caches of trees. A draft that is fed with hidden states reads a
/// prompt in such steps. Other programs read the end of a prompt in such steps. Drafts also read the tokens
/// that were added since their last candidates in such steps. Each length has a different plan. Together the
/// lengths use all kernels.
const READ: [i32; 3] = [16, 32, 64];

/// The maximum candidates of a captured tree. Candidates of one level do not see each other. For some numbers
/// of tokens, their attention needs another kernel.
const TREE: i32 = 9;

/// The maximum tokens of a step of the warm-up.
const MAX: i32 = 2048;

/// A step of the warm-up, with the sequence and the position of each token.
struct WarmStep {
    sequences: Vec<i32>,
    positions: Vec<i32>,
    /// Whether the step commits, so that the next step follows it.
    stays: bool,
}

impl WarmStep {
    fn of(tokens: i32) -> Self {
        let positions = (0..tokens).collect();
        Self { sequences: vec![0; tokens as usize], positions, stays: false }
    }
}

/// Returns the lengths of the steps, at most `most`: the lengths in [`FEW`], and those to which
/// [products](crate::ops::ROWS_THAT_RECUR) are padded.
fn lengths(most: i32) -> BTreeSet<i32> {
    let prompts = (1..).map(|n| n * ROWS_THAT_RECUR).take_while(|&n| n <= MAX);
    FEW.into_iter().chain(prompts).map(|n| most.min(n)).collect()
}

/// Runs at most `steps` steps, and returns how many ran. Stops without an error before a step that the memory budget
/// refuses.
fn run_allowed(steps: usize, run: &mut dyn FnMut(usize) -> Result<()>) -> Result<usize> {
    for index in 0..steps {
        match run(index) {
            Ok(()) => {}
            Err(error) if MemoryBudget::is_refusal(&error) => {
                info!(target: TARGET, ran = index, steps, %error, "the memory budget ends a warm-up");
                return Ok(index);
            }
            Err(error) => return Err(error),
        }
    }
    Ok(steps)
}

impl Program {
    /// On a GPU with an empty cache, runs steps of several lengths on the program's cache. Rolls the steps back, and
    /// frees the buffers that they needed. Calls `progress` before each step, and at the end, with the number of
    /// steps that ran and the total. Returns the number of steps that ran. The number is 0 on a CPU, because there
    /// the first run takes no longer than later runs. It is also 0 for a program that is neither a language model nor
    /// a draft fed with hidden states. Stops before the first step that the [`MemoryBudget`](etkv_core::MemoryBudget)
    /// refuses, because the budget would refuse longer steps too.
    ///
    /// # Errors
    /// Those of [`execute`](Self::execute), and of [`AttendCache`](etkv::AttendCache) if the cache is in use.
    /// The buffers are freed then, too.
    pub fn warm_up(&self, progress: &mut dyn FnMut(usize, usize)) -> Result<usize> {
        if !mlx::on_gpu()? {
            return Ok(0);
        }
        let began = Instant::now();
        let steps = self.run_ahead_of_time(progress)?;
        let seconds = began.elapsed().as_secs_f32();
        info!(target: TARGET, steps, seconds, "warmed up a program");
        Ok(steps)
    }

    fn run_ahead_of_time(&self, progress: &mut dyn FnMut(usize, usize)) -> Result<usize> {
        let loaded = &self.0;
        let Some(cache) = &loaded.cache else {
            return Ok(0);
        };
        let mut cache = cache.lock()?;
        if cache.length() > 0 {
            return Ok(0);
        }
        let Ok(inputs) = TextInputs::find(&loaded.inputs) else {
            return self.capture_draft(&mut *cache, progress);
        };
        let most = inputs.max_tokens(&*cache);
        let fitting = lengths(most).into_iter().filter(|&n| cache.can_extend(n));
        let mut steps: Vec<WarmStep> = fitting.map(WarmStep::of).collect();
        let has_sequences = cache.sequences().is_some();
        if most >= 2 && has_sequences && cache.can_extend(3) {
            // Steps of two sequences need a mask, and slots that are not contiguous: there is a gap after the first
            // sequence.
            steps.push(WarmStep { stays: true, ..WarmStep::of(1) });
            steps.push(WarmStep { sequences: vec![0, 1], positions: vec![1, 0], stays: false });
        }
        let mut mlx = mlx::enter()?;
        let ran = run_allowed(steps.len(), &mut |index| {
            progress(index, steps.len());
            self.run_warm_step(&mut mlx, &mut *cache, &inputs, &steps[index])
        });
        if let Some(cells) = cache.sequences_mut() {
            cells.seq_rm(0, 0..i32::MAX)?;
        }
        // Other caches may need the memory that the steps allocated, even if one of them failed.
        let cleared = match cache.config().growth {
            Growth::Upfront => Ok(()),
            _ => cache.clear(true),
        };
        let ran = ran?;
        cleared?;
        // Graphs are captured after the cache is cleared, so that they contain the addresses of the first real steps'
        // buffers.
        run_allowed(1, &mut |_| self.capture_ahead_of_time(&mut mlx, &mut *cache))?;
        if cache.config().layers.iter().any(|layer| layer.policy != LayerPolicy::Full) {
            mlx.run(kernels::compile_masked)?;
        }
        mlx.publish_kernels();
        progress(steps.len(), steps.len());
        Ok(ran)
    }

    /// Warms up a draft that is fed with hidden states: steps of a few tokens, if they are captured. Longer steps use
    /// kernels that the warm-up of the model has compiled. Returns the number of steps that ran.
    fn capture_draft(
        &self,
        cache: &mut MlxCache,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<usize> {
        if self.0.executor.is_none() {
            return Ok(0);
        }
        progress(0, 1);
        let mut mlx = mlx::enter()?;
        let ran = run_allowed(1, &mut |_| self.capture_ahead_of_time(&mut mlx, cache))?;
        progress(1, 1);
        Ok(ran)
    }

    /// Captures the steps that come first: one token; on caches of trees also chains of [candidates](CHAIN),
    /// steps that [read text](READ), and [trees](TREE). Also captures a step of one token of a second
    /// sequence. The keys of that sequence come after those of the first, so its attention needs another
    /// kernel. Steps of several sequences and steps of trees use that kernel, too.
    fn capture_ahead_of_time(&self, mlx: &mut Mlx, cache: &mut MlxCache) -> Result<()> {
        if self.0.executor.is_none() {
            return Ok(());
        }
        let (chain, read) = if cache.trees().is_some() { (CHAIN, &READ[..]) } else { (1, &[][..]) };
        let firsts = (1..=chain).chain(read.iter().copied()).map(|tokens| (0, tokens));
        let second = cache.sequences().map(|_| (1, 1));
        let mut captured = Ok(());
        for (sequence, tokens) in firsts.chain(second) {
            if captured.is_ok() && sequence == 1 {
                // The first sequence still has its slots.
                captured = self.capture_step(mlx, cache, 0, 1);
            }
            if captured.is_err() {
                break;
            }
            captured = self.capture_step(mlx, cache, sequence, tokens);
            if captured.is_ok() && Some(&tokens) == read.first() {
                captured = self.capture_trees(mlx, cache);
            }
            if let Some(cells) = cache.sequences_mut() {
                cells.seq_rm(sequence, 0..i32::MAX)?;
            }
        }
        if cache.length() > 0 || captured.is_err() {
            // If a step reached `quantized_kv_start`, this also undoes the conversion.
            cache.clear(false)?;
        }
        captured
    }

    /// Captures a step of a sequence that begins at position 0, if possible. Captures a graph for each result
    /// that a host may request: all logits, the logits of the last token, or tokens that the device chooses.
    fn capture_step(
        &self,
        mlx: &mut Mlx,
        cache: &mut MlxCache,
        sequence: i32,
        tokens: i32,
    ) -> Result<()> {
        if !cache.can_extend(tokens) {
            return Ok(());
        }
        let leaves_out = self.0.logits == LogitsRows::Proposed && tokens > 1;
        let all = [
            (RequestedOutputs::Logits, !leaves_out || tokens <= CHAIN),
            (RequestedOutputs::LastLogits, leaves_out),
            (RequestedOutputs::ArgmaxIds, self.chooses()),
        ];
        let positions: Vec<i32> = (0..tokens).collect();
        for wanted in all.into_iter().filter_map(|(wanted, comes)| comes.then_some(wanted)) {
            if let Some(cells) = cache.sequences_mut() {
                cells.seq_rm(sequence, 0..i32::MAX)?;
                cells.begin_step(&vec![sequence; tokens as usize])?;
            }
            let ran = self.0.run_fast_once(mlx, cache, &positions, wanted);
            withdraw(cache);
            ran?;
        }
        Ok(())
    }

    /// Captures steps of candidates after the text of sequence 0. Does nothing without a text: candidates would have
    /// no keys in common.
    fn capture_trees(&self, mlx: &mut Mlx, cache: &mut MlxCache) -> Result<()> {
        let text = cache.length();
        let kinds =
            [(RequestedOutputs::Logits, true), (RequestedOutputs::ArgmaxIds, self.chooses())];
        if text == 0 {
            debug!(target: TARGET, "no trees are captured, because no text was captured");
            return Ok(());
        }
        for tokens in 2..=TREE {
            for &(wanted, _) in kinds.iter().filter(|(_, comes)| *comes) {
                let n = tokens as usize;
                match cache.can_extend(tokens).then(|| cache.trees_mut()).flatten() {
                    Some(trees) => trees.propose(0, &vec![-1; n])?,
                    None => return Ok(()),
                }
                let ran = self.0.run_fast_once(mlx, cache, &vec![text; n], wanted);
                let removed = cache.trees_mut().map(|trees| trees.commit_tree(0, &[]));
                ran?;
                removed.transpose()?;
            }
        }
        Ok(())
    }

    /// Returns whether the device may choose tokens. For a draft that is fed with hidden states, the host chooses.
    fn chooses(&self) -> bool {
        TextInputs::find(&self.0.inputs).is_ok()
    }

    fn run_warm_step(
        &self,
        mlx: &mut Mlx,
        cache: &mut MlxCache,
        inputs: &TextInputs,
        step: &WarmStep,
    ) -> Result<()> {
        let loaded = &self.0;
        let tokens = vec![0; step.positions.len()];
        if let Some(cells) = cache.sequences_mut() {
            cells.begin_step(&step.sequences)?;
        }
        let began = Instant::now();
        // As in real steps, a few tokens may be candidates. Candidates need all logits.
        let one_row = tokens.len() > FEW[FEW.len() - 1] as usize;
        let ran: Result<_> = loaded.stream.run(mlx, || {
            let tokens = Tokens::Host(&tokens);
            let positions = &step.positions;
            let (logits, opened) =
                loaded.logits(mlx, inputs, &tokens, positions, one_row, cache)?;
            let chosen = Sampler::default().choose(&last_rows(&logits, 1)?, None, &[0.0])?;
            opened.schedule(&chosen.arrays())?;
            Ok((chosen, opened))
        });
        let ran = ran.and_then(|(chosen, opened)| {
            mlx.outside(|| chosen.wait())?;
            if step.stays {
                loaded.stream.run(mlx, || opened.commit(&[]))?;
            } else {
                let _ = opened.set_aside();
            }
            Ok(())
        });
        cache.abort();
        withdraw(cache);
        debug!(
            target: TARGET,
            tokens = tokens.len(),
            seconds = began.elapsed().as_secs_f32(),
            "a step of the warm-up"
        );
        ran
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_memory_budget_ends_a_warm_up_quietly() {
        use etkv_core::{CacheConfig, ContiguousCache};

        use crate::error::{Error, Status};
        use etkv::MlxStore;

        // The budget belongs to the process. No cache of another test needs this number of bytes.
        let mut config = CacheConfig::uniform(1, 1, 4, i32::MAX);
        config.growth = Growth::Upfront;
        let budget = MemoryBudget::global();
        budget.set_limit(Some(1 << 33));
        let refused: Error = ContiguousCache::<MlxStore>::new(config).err().unwrap().into();
        budget.set_limit(None);
        let refusing = |from, error: &Error| {
            let mut tried = 0;
            let error = error.clone();
            let ran = run_allowed(5, &mut |index| {
                tried += 1;
                if index < from {
                    Ok(())
                } else {
                    Err(error.clone())
                }
            });
            (ran, tried)
        };
        assert_eq!(refusing(3, &refused), (Ok(3), 4));
        assert_eq!(refusing(0, &refused.clone().at("layer 1")), (Ok(0), 1));
        assert_eq!(refusing(9, &refused), (Ok(5), 5));
        let other = Error::new(Status::Backend, refused.message());
        assert_eq!(refusing(2, &other), (Err(other), 3));
    }

    #[test]
    fn steps_are_those_that_come() {
        let of = |most| lengths(most).into_iter().collect::<Vec<_>>();
        assert_eq!(of(1), [1]);
        assert_eq!(of(40), [1, 2, 8, 16, 32, 40]);
        assert_eq!(of(200), [1, 2, 8, 16, 32, 64, 128, 192, 200]);
        assert_eq!(of(512).len(), 5 + 8);
        assert_eq!(of(i32::MAX).last(), Some(&MAX));
    }
}
