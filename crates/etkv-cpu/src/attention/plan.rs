//! Splits a call into tasks. Query rows and slots are split by the shapes only, so that the result does not
//! depend on the number of threads. The number of threads only determines how many heads a task has.

use super::kernels::TILE;

/// The maximum query rows of a KV head in a task. They share each tile that the task unpacks, and their sums
/// fit the processor's cache.
const ROWS: usize = 192;

/// With at most this many query rows for each KV head, a task has several heads, so that it reads whole
/// slots.
const FEW_ROWS: usize = 32;

/// The minimum and maximum number of parts into which slots are split.
const PARTS: [usize; 2] = [8, 32];
/// The maximum number of rows in all parts of a KV head, within the limits above. Each row of a part is written
/// and then merged, which costs time.
const PART_ROWS: usize = 512;

/// The minimum number of tiles of a part.
const TILES: usize = 2;

#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub n_kv_heads: usize,
    /// The query heads of a KV head.
    pub group: usize,
    pub n_tokens: usize,
    pub n_slots: usize,
    pub k_dim: usize,
    pub v_dim: usize,
    /// The float32 elements of a vector.
    pub vector_width: usize,
}

impl Sizes {
    /// Returns the query rows of a KV head.
    pub fn rows(&self) -> usize {
        self.group * self.n_tokens
    }

    /// Returns the elements of a key, rounded up to whole vectors.
    pub fn k_padded(&self) -> usize {
        self.k_dim.next_multiple_of(self.vector_width)
    }

    /// Returns the elements of a value, rounded up to whole vectors.
    pub fn v_padded(&self) -> usize {
        self.v_dim.next_multiple_of(self.vector_width)
    }
}

/// The tasks of a call. Each has some KV heads, some tokens and some slots.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plan {
    pub sizes: Sizes,
    /// The KV heads of a task.
    pub heads: usize,
    /// The tokens of a task.
    pub tokens: usize,
    /// The slots of a task, in whole tiles.
    pub slots: usize,
    /// The number of tasks among which the slots of a row are split. If it is 1, tasks write the result.
    pub n_parts: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Task {
    pub first_head: usize,
    pub end_head: usize,
    pub first_token: usize,
    pub end_token: usize,
    pub first_slot: usize,
    pub end_slot: usize,
    pub part: usize,
}

impl Plan {
    /// Returns the plan for `threads` threads. There is at least one token and one head.
    pub fn new(sizes: Sizes, threads: usize) -> Self {
        let tokens = (ROWS / sizes.group).clamp(1, sizes.n_tokens);
        let n_tiles = sizes.n_slots.div_ceil(TILE);
        let few = sizes.rows() <= FEW_ROWS;
        let most = match tokens == sizes.n_tokens {
            true => (PART_ROWS / sizes.rows()).clamp(PARTS[0], PARTS[1]),
            false => 1,
        };
        let slots = n_tiles.div_ceil(most).max(TILES) * TILE;
        let n_parts = sizes.n_slots.div_ceil(slots).max(1);
        let mut heads = if few { sizes.n_kv_heads } else { 1 };
        // With four tasks for each thread, other load on the machine delays the call less.
        while heads > 1 && n_parts * sizes.n_kv_heads.div_ceil(heads) < 4 * threads {
            heads = heads.div_ceil(2);
        }
        Self { sizes, heads, tokens, slots, n_parts }
    }

    /// Returns the number of tasks.
    pub fn n_tasks(&self) -> usize {
        self.n_blocks() * self.n_head_groups() * self.n_parts
    }

    /// Returns the `i`th task. The longest tasks come first.
    pub fn task(&self, i: usize) -> Task {
        let (part, i) = (i % self.n_parts, i / self.n_parts);
        let (group, i) = (i % self.n_head_groups(), i / self.n_head_groups());
        // With a causal mask, the last tokens see the most slots.
        let block = self.n_blocks() - 1 - i;
        let sizes = &self.sizes;
        Task {
            first_head: group * self.heads,
            end_head: sizes.n_kv_heads.min((group + 1) * self.heads),
            first_token: block * self.tokens,
            end_token: sizes.n_tokens.min((block + 1) * self.tokens),
            first_slot: part * self.slots,
            end_slot: sizes.n_slots.min((part + 1) * self.slots),
            part,
        }
    }

    /// Returns the number of query rows of one KV head in a task.
    pub fn rows(&self) -> usize {
        self.tokens * self.sizes.group
    }

    /// Returns the number of query rows of all KV heads in the call.
    pub fn all_rows(&self) -> usize {
        self.sizes.rows() * self.sizes.n_kv_heads
    }

    fn n_blocks(&self) -> usize {
        self.sizes.n_tokens.div_ceil(self.tokens)
    }

    fn n_head_groups(&self) -> usize {
        self.sizes.n_kv_heads.div_ceil(self.heads)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_cover_each_row_and_slot_once() {
        for (n_kv_heads, group, n_tokens, n_slots) in [
            (3, 3, 1, 4096),
            (1, 1, 1, 1),
            (1, 2, 3, 0),
            (8, 4, 16, 1000),
            (5, 2, 200, 300),
            (2, 300, 3, 65),
        ] {
            let sizes = Sizes {
                n_kv_heads,
                group,
                n_tokens,
                n_slots,
                k_dim: 64,
                v_dim: 64,
                vector_width: 16,
            };
            for threads in [1, 3, 64] {
                let plan = Plan::new(sizes, threads);
                let mut seen = vec![0u8; n_kv_heads * n_tokens * n_slots];
                for task in (0..plan.n_tasks()).map(|i| plan.task(i)) {
                    assert_eq!(task.first_slot % TILE, 0);
                    for head in task.first_head..task.end_head {
                        for token in task.first_token..task.end_token {
                            let row = (head * n_tokens + token) * n_slots;
                            let slots = row + task.first_slot..row + task.end_slot;
                            seen[slots].iter_mut().for_each(|seen| *seen += 1);
                        }
                    }
                }
                assert!(seen.iter().all(|&seen| seen == 1), "{sizes:?} {threads}");
                assert_eq!(plan.slots, Plan::new(sizes, 1).slots);
                assert_eq!(plan.tokens, Plan::new(sizes, 1).tokens);
            }
        }
    }
}
