//! Runs one task of a scan: some columns of one head's values, over all chains of the step.

use etkv_core::bookkeeping::{AnchorSource, Chain, RowSource};

use super::channels::{DecayedDots, FromEnd, ToEnd, PART};
use super::fold::{DecayKeys, Fold};
use super::job::Job;
use super::kernels::{Columns, Decay, Dots, Weigh};
use super::layout::{Scratch, ROWS};
use super::load::load_run;
use crate::simd::Simd;
use crate::tensor::Dtype;

/// A state: `k_dim` rows of the task's columns, or null if it is zero.
#[derive(Debug, Clone, Copy)]
struct State {
    start: *const f32,
    stride: usize,
}

/// The rows of a block so far: keys, updates (from the task's first column on), and decays.
struct Block {
    n: usize,
    keys: [*const f32; ROWS],
    updates: [*const f32; ROWS],
    decays: [*const f32; ROWS],
}

/// The head of a task, and its columns.
#[derive(Debug, Clone, Copy)]
struct Task {
    head: usize,
    k_head: usize,
    column: usize,
    /// The number of columns. `padded` is rounded up to whole vectors.
    n_columns: usize,
    padded: usize,
}

/// Runs task `i`.
///
/// # Safety
/// The machine must have the instructions of `S`. The job's pointers must be valid as their fields document,
/// and its heads must be loaded. No other thread may use the scratch memory or run the same task.
pub(super) unsafe fn run<S: Simd>(job: &Job, i: usize, scratch: &Scratch) {
    let sizes = &job.sizes;
    let (head, column) = (i / sizes.n_slices, i % sizes.n_slices * sizes.slice);
    let n_columns = sizes.slice.min(sizes.v_dim - column);
    let padded = sizes.slice.min(sizes.v_padded - column);
    let k_head = head / (sizes.heads / sizes.k_heads);
    let task = Task { head, k_head, column, n_columns, padded };
    for chain in &job.plan.chains {
        // SAFETY: the caller upholds the contract.
        unsafe { job.chain::<S>(task, chain, scratch) };
    }
    if i.is_multiple_of(sizes.n_slices) {
        // SAFETY: only this task uses the decays of the head, and the columns after its updates.
        unsafe { job.append_decays(head) };
    }
}

impl Job<'_> {
    unsafe fn chain<S: Simd>(&self, task: Task, chain: &Chain, scratch: &Scratch) {
        let sizes = &self.sizes;
        let before = (chain.position - chain.base) as usize;
        // Rows in slots are far apart in memory. They are copied if they are read often.
        let pack = !sizes.whole() || chain.tokens.len() > 8;
        let null = std::ptr::null();
        let mut block =
            Block { n: 0, keys: [null; ROWS], updates: [null; ROWS], decays: [null; ROWS] };
        // SAFETY: the caller upholds the contract, and the plan was checked.
        unsafe {
            for &source in &chain.rows[chain.rows.len() - before..] {
                match source {
                    RowSource::Slot(slot) => self.read(&mut block, task, slot, pack, scratch),
                    RowSource::Token(token) => self.take(&mut block, task, token),
                }
            }
            let (mut state, mut other) = (self.state(task, chain.anchor, scratch), 1);
            let (mut token, mut fold) = (chain.tokens.start, chain.folds.start);
            while token < chain.tokens.end {
                if block.n == ROWS {
                    let to = scratch.states[other];
                    self.fold::<S>(task, &block, state, to, scratch);
                    self.keep(task, fold, to);
                    state = State { start: to, stride: task.padded };
                    (other, fold, block.n) = (1 - other, fold + 1, 0);
                }
                let end = chain.tokens.end.min(token + ROWS - block.n);
                let before = block.n;
                (token..end).for_each(|token| self.take(&mut block, task, token));
                self.tokens::<S>(task, token, before, &block, state, scratch);
                token = end;
            }
        }
    }

    /// Appends the row of a token of this step.
    unsafe fn take(&self, block: &mut Block, task: Task, token: usize) {
        let (sizes, shared, n) = (&self.sizes, &self.shared, block.n);
        // SAFETY: the caller upholds the contract.
        unsafe {
            block.keys[n] =
                shared.keys.add((task.k_head * sizes.n_tokens + token) * sizes.k_padded);
            let at = task.head * sizes.n_tokens + token;
            block.updates[n] = shared.updates.add(at * sizes.update_stride() + task.column);
            block.decays[n] = shared.decays.add(at * sizes.decay_padded());
        }
        block.n += 1;
    }

    /// Appends the row of a slot. With `pack`, copies it to scratch memory.
    unsafe fn read(&self, block: &mut Block, task: Task, slot: i32, pack: bool, scratch: &Scratch) {
        let (sizes, n) = (&self.sizes, block.n);
        let key = self.keys.row(slot, task.k_head);
        let update = self.updates.row(slot, task.head);
        // SAFETY: the caller upholds the contract.
        unsafe {
            let decay = update.add(sizes.v_dim);
            let update = update.add(task.column);
            (block.keys[n], block.updates[n], block.decays[n]) = (key, update, decay);
            if pack {
                let copies = [
                    (&mut block.keys, scratch.keys, sizes.k_dim, sizes.k_padded),
                    (&mut block.updates, scratch.updates, task.n_columns, task.padded),
                    (&mut block.decays, scratch.decays, sizes.decay_dim(), sizes.decay_padded()),
                ];
                for (row, to, dim, padded) in copies {
                    let to = to.add(n * padded);
                    std::ptr::copy_nonoverlapping(row[n], to, dim);
                    to.add(dim).write_bytes(0, padded - dim);
                    row[n] = to;
                }
            }
        }
        block.n += 1;
    }

    /// Returns the state from which a chain starts. Uses the first scratch state if it must be padded.
    unsafe fn state(&self, task: Task, source: AnchorSource, scratch: &Scratch) -> State {
        let sizes = &self.sizes;
        let first = match source {
            AnchorSource::Zero => return State { start: std::ptr::null(), stride: 0 },
            AnchorSource::Slot(slot) => self.anchors.row(slot, task.head),
            AnchorSource::Fold(fold) => self.kept(fold, task.head),
        };
        // SAFETY: the caller upholds the contract.
        unsafe {
            let start = first.add(task.column);
            if sizes.v_dim == sizes.v_padded {
                return State { start, stride: sizes.v_dim };
            }
            let to = scratch.states[0];
            for c in 0..sizes.k_dim {
                let (from, to) = (start.add(c * sizes.v_dim), to.add(c * task.padded));
                std::ptr::copy_nonoverlapping(from, to, task.n_columns);
                to.add(task.n_columns).write_bytes(0, task.padded - task.n_columns);
            }
            State { start: to, stride: task.padded }
        }
    }

    /// Returns the address of a head of a fold's anchor in the workspace, or null if it is not kept.
    fn kept(&self, fold: usize, head: usize) -> *mut f32 {
        let sizes = &self.sizes;
        match self.places[fold] {
            Some(place) => {
                let at = place as usize * sizes.heads + head;
                self.shared.anchors.wrapping_add(at * sizes.k_dim * sizes.v_dim)
            }
            None => std::ptr::null_mut(),
        }
    }

    /// Copies a new state to the workspace, if its anchor is kept.
    unsafe fn keep(&self, task: Task, fold: usize, state: *const f32) {
        let kept = self.kept(fold, task.head);
        if kept.is_null() {
            return;
        }
        for c in 0..self.sizes.k_dim {
            // SAFETY: the caller upholds the contract, and only this task uses the columns.
            unsafe {
                let to = kept.add(c * self.sizes.v_dim + task.column);
                std::ptr::copy_nonoverlapping(state.add(c * task.padded), to, task.n_columns);
            }
        }
    }

    /// Computes the state after a complete block.
    unsafe fn fold<S: Simd>(
        &self,
        task: Task,
        block: &Block,
        state: State,
        to: *mut f32,
        scratch: &Scratch,
    ) {
        let sizes = &self.sizes;
        let (dim, by_channel) = (sizes.k_padded, sizes.channel_decay);
        let (keys, decays, out) = (&block.keys, &block.decays, scratch.folded);
        // SAFETY: the caller upholds the contract.
        unsafe {
            S::enter(DecayKeys { keys, decays, by_channel, dim, out });
            S::enter(Fold {
                from: state.start,
                from_stride: state.stride,
                k_dim: sizes.k_dim,
                keys: scratch.folded,
                key_stride: dim,
                updates: &block.updates,
                to,
                width: task.padded,
            });
        }
    }

    /// Computes updates and outputs of tokens, which are the rows of the block after the first `before`.
    unsafe fn tokens<S: Simd>(
        &self,
        task: Task,
        token: usize,
        before: usize,
        block: &Block,
        state: State,
        scratch: &Scratch,
    ) {
        // SAFETY: the caller upholds the contract.
        unsafe {
            match self.sizes.delta {
                true => self.tokens_of::<S, 2>(task, token, before, block, state, scratch),
                false => self.tokens_of::<S, 1>(task, token, before, block, state, scratch),
            }
        }
    }

    /// The same as [`tokens`](Self::tokens), with `M` vectors for each token.
    unsafe fn tokens_of<S: Simd, const M: usize>(
        &self,
        task: Task,
        token: usize,
        before: usize,
        block: &Block,
        state: State,
        scratch: &Scratch,
    ) {
        let (sizes, shared) = (&self.sizes, &self.shared);
        let (n_tokens, dim) = (block.n - before, sizes.k_padded);
        let at = task.head * sizes.n_tokens + token;
        // SAFETY: the caller upholds the contract.
        unsafe {
            for n in 0..n_tokens {
                let vectors = scratch.vectors.add(n * M * dim);
                self.load::<M>(task, token + n, block.keys[before + n], vectors);
            }
            match sizes.channel_decay {
                true => self.weigh_channels::<S, M>(before, block, scratch),
                false => self.weigh::<S, M>(before, block, scratch),
            }
            for n in 0..n_tokens {
                let (decay, vectors) = (block.decays[before + n], scratch.vectors.add(n * M * dim));
                S::enter(Decay::<M> { vectors, dim, decay, by_channel: sizes.channel_decay });
            }
            // Outputs that need no conversion are written directly.
            let in_place = self.dtype == Dtype::F32 && task.n_columns == task.padded;
            let first = at * sizes.v_dim + task.column;
            let (out, out_stride) = match in_place {
                true => (self.out.cast::<f32>().add(first), sizes.v_dim),
                false => (scratch.out, task.padded),
            };
            S::enter(Columns::<M> {
                state: state.start,
                state_stride: state.stride,
                k_dim: sizes.k_dim,
                vectors: scratch.vectors,
                vector_stride: dim,
                weights: scratch.weights,
                rows: &block.updates[..before],
                updates: shared.updates.add(at * sizes.update_stride() + task.column),
                update_stride: sizes.update_stride(),
                betas: shared.betas.add(at),
                out,
                out_stride,
                n_tokens,
                width: task.padded,
            });
            for n in 0..if in_place { 0 } else { n_tokens } {
                let row =
                    std::slice::from_raw_parts(scratch.out.add(n * task.padded), task.n_columns);
                self.write(first + n * sizes.v_dim, row);
            }
        }
    }

    /// Computes the weights of all rows for the tokens after the first `before` rows of a block.
    unsafe fn weigh<S: Simd, const M: usize>(
        &self,
        before: usize,
        block: &Block,
        scratch: &Scratch,
    ) {
        let (n_tokens, dim) = (block.n - before, self.sizes.k_padded);
        let (vectors, rows, out) = (scratch.vectors, &block.keys[..block.n], scratch.weights);
        let mut decays = [0.0; ROWS];
        // SAFETY: the caller upholds the contract.
        unsafe {
            S::enter(Dots::<M> { vectors, n_tokens, rows, causal: true, dim, out });
            for (decay, &row) in decays.iter_mut().zip(&block.decays[..block.n]) {
                *decay = *row;
            }
            for last in before..block.n {
                let products = scratch.weights.add((last - before) * M * ROWS);
                let (decay, count) = (decays[last], last + 1);
                S::enter(Weigh::<M> { products, decay, decays: &decays, count });
            }
        }
    }

    /// The same as [`weigh`](Self::weigh), with a decay for each channel.
    unsafe fn weigh_channels<S: Simd, const M: usize>(
        &self,
        before: usize,
        block: &Block,
        scratch: &Scratch,
    ) {
        let dim = self.sizes.k_padded;
        // SAFETY: the caller upholds the contract.
        unsafe {
            let vectors = |n: usize| scratch.vectors.add((n - before) * M * dim).cast_const();
            let weights = |n: usize| scratch.weights.add((n - before) * M * ROWS);
            for part in 0..(block.n - 1) / PART {
                let (start, next) = (part * PART, (part + 1) * PART);
                // The first token of a later part.
                let first = before.max(next);
                let (keys, decays) = (&block.keys[start..next], &block.decays[start..next]);
                let (end, out) = (block.decays[next - 1], scratch.folded.add(start * dim));
                S::enter(ToEnd { keys, decays, end, dim, out });
                let mut rows = [std::ptr::null(); PART];
                for (i, row) in rows.iter_mut().enumerate() {
                    *row = out.add(i * dim).cast_const();
                }
                let (decays, out) = (&block.decays[first..block.n], scratch.part);
                S::enter(FromEnd::<M> { vectors: vectors(first), decays, end, dim, out });
                S::enter(Dots::<M> {
                    vectors: scratch.part,
                    n_tokens: block.n - first,
                    rows: &rows,
                    causal: false,
                    dim,
                    out: weights(first).add(start),
                });
            }
            for last in before..block.n {
                let start = last / PART * PART;
                let (rows, decays) = (&block.keys[start..=last], &block.decays[start..=last]);
                let (decay, out) = (block.decays[last], weights(last).add(start));
                let vectors = vectors(last);
                S::enter(DecayedDots::<M> { vectors, decay, decays, rows, dim, out });
            }
        }
    }

    /// Loads the vectors of a token, padded with zeros, and its value.
    unsafe fn load<const M: usize>(
        &self,
        task: Task,
        token: usize,
        key: *const f32,
        vectors: *mut f32,
    ) {
        let (sizes, dim) = (&self.sizes, self.sizes.k_padded);
        let at = task.head * sizes.n_tokens + token;
        // SAFETY: the caller upholds the contract.
        unsafe {
            if M == 2 {
                std::ptr::copy_nonoverlapping(key, vectors, dim);
            }
            let query = std::slice::from_raw_parts_mut(vectors.add((M - 1) * dim), dim);
            let (query, rest) = query.split_at_mut(sizes.k_dim);
            load_run(self.inputs.q, [0, task.k_head, token, 0], 3, query);
            query.iter_mut().for_each(|x| *x *= self.scale);
            rest.fill(0.0);
            let value = self.shared.updates.add(at * sizes.update_stride() + task.column);
            let value = std::slice::from_raw_parts_mut(value, task.n_columns);
            load_run(self.inputs.v, [0, task.head, token, task.column], 3, value);
        }
    }

    /// Writes outputs from element `at` on.
    unsafe fn write(&self, at: usize, row: &[f32]) {
        let size = self.dtype.size();
        // SAFETY: only this task uses the columns.
        let out =
            unsafe { std::slice::from_raw_parts_mut(self.out.add(at * size), row.len() * size) };
        self.dtype.store(row, out);
    }

    /// Writes the decays of a head after its updates, as in stored rows.
    unsafe fn append_decays(&self, head: usize) {
        let sizes = &self.sizes;
        for at in head * sizes.n_tokens..(head + 1) * sizes.n_tokens {
            // SAFETY: the caller upholds the contract.
            unsafe {
                let from = self.shared.decays.add(at * sizes.decay_padded());
                let to = self.shared.updates.add(at * sizes.update_stride() + sizes.v_dim);
                std::ptr::copy_nonoverlapping(from.cast_const(), to, sizes.decay_dim());
            }
        }
    }
}
