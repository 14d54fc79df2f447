//! The sizes of a scan, and the layout of its workspace.

use etkv_core::bookkeeping::BLOCK;

use crate::memory::pieces::{Layout, Pieces};

/// The rows of a block.
pub(super) const ROWS: usize = BLOCK as usize;

/// The sizes of a call. Padded sizes are multiples of the vector width.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub k_heads: usize,
    pub heads: usize,
    pub k_dim: usize,
    pub v_dim: usize,
    pub k_padded: usize,
    pub v_padded: usize,
    pub channel_decay: bool,
    /// Whether updates follow the delta rule.
    pub delta: bool,
    pub n_tokens: usize,
    /// The number of anchors that later chains or the store read.
    pub n_anchors: usize,
    /// The number of stored rows, if they must be gathered, or 0.
    pub n_gathered: usize,
    /// The number of tasks for each head. These tasks divide the head's columns of values into whole vectors.
    pub n_slices: usize,
    pub slice: usize,
}

impl Sizes {
    /// Returns the count of numbers of a decay.
    pub fn decay_dim(&self) -> usize {
        if self.channel_decay {
            self.k_dim
        } else {
            1
        }
    }

    /// Returns the count of numbers of a decay in the workspace, with padding.
    pub fn decay_padded(&self) -> usize {
        if self.channel_decay {
            self.k_padded
        } else {
            1
        }
    }

    /// Returns the stride of rows of updates in the workspace. Each row includes its decay.
    pub fn update_stride(&self) -> usize {
        (self.v_dim + self.decay_dim()).max(self.v_padded).next_multiple_of(16)
    }

    /// Returns whether rows and anchors consist of whole vectors, so that the kernels can read them in place.
    pub fn whole(&self) -> bool {
        self.k_dim == self.k_padded && self.v_dim == self.v_padded
    }

    /// Returns the number of a token's vectors: its query, and its key with the delta rule.
    fn vectors(&self) -> usize {
        if self.delta {
            2
        } else {
            1
        }
    }

    /// Returns the maximum number of tokens of a block.
    fn most(&self) -> usize {
        self.n_tokens.min(ROWS)
    }
}

/// The memory that the tasks of a step share. Only the tasks of a head use the memory of that head.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shared {
    /// `[k_heads, T, k_padded]`, padded with zeros.
    pub keys: *mut f32,
    /// `[heads, T, update_stride]`: values, which are replaced by updates.
    pub updates: *mut f32,
    /// `[heads, T, decay_padded]`: log decays since the anchor.
    pub decays: *mut f32,
    /// `[heads, T]`.
    pub betas: *mut f32,
    /// `[n_anchors, heads, k_dim, v_dim]`.
    pub anchors: *mut f32,
    /// `[n_gathered, k_heads, k_dim]`.
    pub gathered_keys: *mut f32,
    /// `[n_gathered, heads, v_dim + decay_dim]`.
    pub gathered_updates: *mut f32,
}

/// The scratch memory of one thread.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scratch {
    /// The vectors of a block's tokens, followed by the decayed vectors.
    pub vectors: *mut f32,
    /// [`ROWS`] weights for each vector.
    pub weights: *mut f32,
    /// With a decay for each channel: the vectors, decayed from the end of a part of the block.
    pub part: *mut f32,
    /// The outputs of the block's tokens, unless they are written to the job's memory directly.
    pub out: *mut f32,
    /// The last state and the next one.
    pub states: [*mut f32; 2],
    /// Copies of a block's rows from slots.
    pub keys: *mut f32,
    pub updates: *mut f32,
    pub decays: *mut f32,
    /// The decayed keys of a fold. With a decay for each channel, also those of the parts of a block.
    pub folded: *mut f32,
}

impl Layout for Sizes {
    type Shared = Shared;
    type Scratch = Scratch;

    fn shared(&self, pieces: &mut Pieces) -> Shared {
        let row = self.v_dim + self.decay_dim();
        Shared {
            keys: pieces.take(&[self.k_heads, self.n_tokens, self.k_padded]),
            updates: pieces.take(&[self.heads, self.n_tokens, self.update_stride()]),
            decays: pieces.take(&[self.heads, self.n_tokens, self.decay_padded()]),
            betas: pieces.take(&[self.heads, self.n_tokens]),
            anchors: pieces.take(&[self.n_anchors, self.heads, self.k_dim, self.v_dim]),
            gathered_keys: pieces.take(&[self.n_gathered, self.k_heads, self.k_dim]),
            gathered_updates: pieces.take(&[self.n_gathered, self.heads, row]),
        }
    }

    fn scratch(&self, pieces: &mut Pieces) -> Scratch {
        let (rows, k) = (self.vectors() * self.most(), self.k_padded);
        Scratch {
            vectors: pieces.take(&[rows, k]),
            weights: pieces.take(&[rows, ROWS]),
            part: pieces.take(&[if self.channel_decay { rows } else { 0 }, k]),
            out: pieces.take(&[self.most(), self.slice]),
            states: [(); 2].map(|()| pieces.take(&[self.k_dim, self.slice])),
            keys: pieces.take(&[ROWS, k]),
            updates: pieces.take(&[ROWS, self.slice]),
            decays: pieces.take(&[ROWS, self.decay_padded()]),
            folded: pieces.take(&[ROWS + 1, k]),
        }
    }
}
