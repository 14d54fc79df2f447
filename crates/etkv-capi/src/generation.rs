//! `etkv_generation`: answers of a loaded program.

use std::ffi::c_void;

use etkv_core::Result;

use super::boundary::{c_functions, free, list, out, put, read_struct};
use super::cache::etkv_cache;
use super::handle::{self, Object};
use super::sampling::{etkv_sampling, read_sampling};

/// A text to continue, as C passes it.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct etkv_prompt {
    pub struct_size: usize,
    pub tokens: *const i64,
    pub n_tokens: usize,
    pub sequence: i32,
    pub reserved: i32,
}

/// The options of generation, as C passes them.
#[repr(C)]
#[derive(Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct etkv_generation_options {
    pub struct_size: usize,
    pub sampling: *const etkv_sampling,
    pub stop: *const i64,
    pub n_stop: usize,
    pub max_tokens: i32,
    pub run_ahead: i32,
}

/// A handle on running answers.
#[allow(non_camel_case_types)]
pub struct etkv_generation(inner::Generation);

impl Object for etkv_generation {
    const NAME: &'static str = "etkv_generation";
}

c_functions!(
    /// Prepares answers by the program that was last loaded with a cache.
    unsafe fn etkv_generation_new(
        cache: *const etkv_cache,
        prompts: *const etkv_prompt,
        n_prompts: usize,
        options: *const etkv_generation_options,
        generation: *mut *mut etkv_generation,
    ) -> Result<()> {
        let target = out(generation, "generation")?;
        let cache = handle::look_up(cache, "cache")?;
        let options = read_struct(options, "options")?;
        let mut given = Vec::new();
        let mut prompt = prompts;
        for index in 0..n_prompts {
            let name = format!("prompts[{index}]");
            let raw = read_struct(prompt, &name)?;
            let tokens = list(raw.tokens, raw.n_tokens, "tokens of a prompt")?;
            given.push((raw.sequence, tokens.to_vec()));
            prompt = prompt.byte_add(raw.struct_size);
        }
        let stop = list(options.stop, options.n_stop, "options.stop")?.to_vec();
        let sampling = read_sampling(options.sampling)?;
        let made = inner::Generation::new(&cache.cache, given, sampling, stop, &options)?;
        target.write(handle::give(etkv_generation(made)));
        Ok(())
    }

    /// Runs the next step of the prompts.
    unsafe fn etkv_generation_read_prompts(
        generation: *const etkv_generation,
        waiting: *mut usize,
    ) -> Result<()> {
        put(waiting, "waiting", || handle::look_up(generation, "generation")?.0.read_prompts())
    }

    /// Returns the next token of each answer.
    unsafe fn etkv_generation_next(
        generation: *const etkv_generation,
        tokens: *mut i64,
        ends: *mut i32,
        room: usize,
        n: *mut usize,
    ) -> Result<()> {
        let (tokens, n) = (out(tokens, "tokens")?, out(n, "n")?);
        let ends = out(ends, "ends")?;
        let generation = handle::look_up(generation, "generation")?;
        let next = generation.0.next(room)?;
        for index in 0..room {
            let (token, end) = next.tokens.get(index).copied().unwrap_or((-1, 0));
            tokens.add(index).write(token);
            ends.add(index).write(end);
        }
        n.write(next.count);
        Ok(())
    }

    /// Ends answers, from any thread.
    unsafe fn etkv_generation_cancel(generation: *const etkv_generation) -> Result<()> {
        handle::look_up(generation, "generation")?.0.cancel();
        Ok(())
    }

    /// Rolls back the step that was enqueued ahead.
    unsafe fn etkv_generation_pause(generation: *const etkv_generation) -> Result<()> {
        handle::look_up(generation, "generation")?.0.pause()
    }

    /// Runs one step of the program that was last loaded with a cache, and chooses an id for each token of the step.
    unsafe fn etkv_generation_choose(
        cache: *const etkv_cache,
        tokens: *const i64,
        positions: *const i32,
        n: usize,
        chosen: *mut i64,
    ) -> Result<()> {
        let chosen = out(chosen, "chosen")?;
        let cache = handle::look_up(cache, "cache")?;
        let tokens = list(tokens, n, "tokens")?;
        let ids = inner::choose(&cache.cache, tokens, list(positions, n, "positions")?)?;
        for (index, &id) in ids.iter().enumerate() {
            chosen.add(index).write(id);
        }
        Ok(())
    }

    /// Warms up the program that was last loaded with a cache.
    unsafe fn etkv_generation_warm_up(
        cache: *const etkv_cache,
        progress: Option<extern "C" fn(*mut c_void, usize, usize)>,
        context: *mut c_void,
    ) -> Result<()> {
        let cache = handle::look_up(cache, "cache")?;
        inner::warm_up(&cache.cache, &mut |done, steps| {
            if let Some(progress) = progress {
                progress(context, done, steps);
            }
        })
    }
);

/// Frees answers, and rolls back the step that was enqueued ahead.
#[no_mangle]
pub extern "C" fn etkv_generation_free(generation: *mut etkv_generation) {
    free(generation);
}

/// The result of one call for each prompt: a token id or -1, and the number of the reason why the answer ended.
struct Next {
    tokens: Vec<(i64, i32)>,
    count: usize,
}

#[cfg(feature = "mlx-programs")]
mod inner {
    use std::sync::atomic::{AtomicBool, Ordering};

    use etkv_core::{fail, Error, MemoryBudget, SharedCache, Status};
    use etkv_delegate::Sampling;
    use etkv_mlx_program::{self as program, End, GenerationOptions, Program, Prompt, RunAhead};
    use parking_lot::{Mutex, MutexGuard};

    use super::{etkv_generation_options, Next, Result};

    /// Returns the program that was last loaded with a cache.
    fn bound_to(cache: &SharedCache) -> Result<Program> {
        Program::bound_to(cache).map_err(|error| match error.status() {
            Status::Kind => Error::new(
                Status::Kind,
                "only MLX programs choose tokens on the device, and the cache is for another \
                 backend: run its program step by step, and choose tokens with \
                 etkv_sampling_choose",
            ),
            _ => error.into(),
        })
    }

    pub fn warm_up(cache: &SharedCache, progress: &mut dyn FnMut(usize, usize)) -> Result<()> {
        bound_to(cache)?.warm_up(progress)?;
        Ok(())
    }

    pub fn choose(cache: &SharedCache, tokens: &[i64], positions: &[i32]) -> Result<Vec<i64>> {
        Ok(bound_to(cache)?.choose(tokens, positions)?)
    }

    /// Answers of an MLX program.
    pub struct Generation {
        generation: Mutex<program::Generation>,
        n_prompts: usize,
        /// Whether the answers must end. It is set without the lock of `generation`, because a running call holds that
        /// lock.
        cancelled: AtomicBool,
    }

    impl Generation {
        pub fn new(
            cache: &SharedCache,
            prompts: Vec<(i32, Vec<i64>)>,
            sampling: Sampling,
            stop: Vec<i64>,
            options: &etkv_generation_options,
        ) -> Result<Self> {
            let Ok(max_tokens) = usize::try_from(options.max_tokens) else {
                fail!(InvalidArgument, "max_tokens is {}, the minimum is 0", options.max_tokens);
            };
            let mut made = GenerationOptions::default();
            (made.sampling, made.stop, made.max_tokens) = (sampling, stop, max_tokens);
            made.run_ahead = match options.run_ahead {
                0 => RunAhead::Auto,
                1 => RunAhead::Never,
                2 => RunAhead::Always,
                other => fail!(InvalidArgument, "run_ahead is {other}, expected 0 to 2"),
            };
            let n_prompts = prompts.len();
            let prompts =
                prompts.into_iter().map(|(sequence, tokens)| Prompt::new(sequence, tokens));
            let program = bound_to(cache)?;
            let generation = program::Generation::new(&program, prompts.collect(), made)?;
            let (generation, cancelled) = (Mutex::new(generation), AtomicBool::new(false));
            Ok(Self { generation, n_prompts, cancelled })
        }

        /// Ends the answers after the running step.
        pub fn cancel(&self) {
            self.cancelled.store(true, Ordering::Relaxed);
        }

        fn is_cancelled(&self) -> bool {
            self.cancelled.load(Ordering::Relaxed)
        }

        /// Waits for other threads, except in the memory callback: there the other threads may wait for this thread.
        fn lock(&self) -> Result<MutexGuard<'_, program::Generation>> {
            match self.generation.try_lock() {
                Some(generation) => Ok(generation),
                None if MemoryBudget::is_reclaiming() => fail!(
                    Step,
                    "the answers are in use, and the memory callback must not wait for them"
                ),
                None => Ok(self.generation.lock()),
            }
        }

        pub fn read_prompts(&self) -> Result<usize> {
            let mut generation = self.lock()?;
            if self.is_cancelled() {
                return Ok(generation.waiting());
            }
            Ok(generation.read_prompts()?)
        }

        pub fn next(&self, room: usize) -> Result<Next> {
            if room < self.n_prompts {
                fail!(
                    InvalidArgument,
                    "tokens and ends have room for {room}, there are {} prompts",
                    self.n_prompts
                );
            }
            let mut tokens = vec![(-1, 0); self.n_prompts];
            let mut generation = self.lock()?;
            while !self.is_cancelled() && generation.read_prompts()? > 0 {}
            if self.is_cancelled() {
                generation.pause();
                return Ok(Next { tokens, count: 0 });
            }
            let generated = generation.next_tokens()?;
            for one in &generated {
                let end = match one.end {
                    None => 0,
                    Some(End::Stop) => 1,
                    Some(End::Length) => 2,
                    Some(End::Capacity) => 3,
                    Some(_) => fail!(Internal, "an answer ended for a reason that has no number"),
                };
                tokens[one.prompt] = (one.token, end);
            }
            Ok(Next { tokens, count: generated.len() })
        }

        pub fn pause(&self) -> Result<()> {
            self.lock()?.pause();
            Ok(())
        }
    }
}

#[cfg(not(feature = "mlx-programs"))]
mod inner {
    use etkv_core::{fail, SharedCache};
    use etkv_delegate::Sampling;

    use super::{etkv_generation_options, Next, Result};

    pub fn warm_up(_: &SharedCache, _: &mut dyn FnMut(usize, usize)) -> Result<()> {
        fail!(Unsupported, "this libetkv runs no MLX programs");
    }

    pub fn choose(_: &SharedCache, _: &[i64], _: &[i32]) -> Result<Vec<i64>> {
        fail!(Unsupported, "this libetkv runs no MLX programs");
    }

    /// Answers. A build without MLX programs has none.
    pub enum Generation {}

    impl Generation {
        pub fn new(
            _: &SharedCache,
            _: Vec<(i32, Vec<i64>)>,
            _: Sampling,
            _: Vec<i64>,
            _: &etkv_generation_options,
        ) -> Result<Self> {
            fail!(Unsupported, "this libetkv runs no MLX programs, and only these can generate");
        }

        pub fn read_prompts(&self) -> Result<usize> {
            match *self {}
        }

        pub fn next(&self, _: usize) -> Result<Next> {
            match *self {}
        }

        pub fn cancel(&self) {
            match *self {}
        }

        pub fn pause(&self) -> Result<()> {
            match *self {}
        }
    }
}
