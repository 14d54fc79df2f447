//! What a step computes: its launches, and what lies between them.

use etkv_core::KvFormat;

/// Tokens of a step, at most.
pub const MAX_TOKENS: usize = 64;
/// Rows that are multiplied by kernels for a few, which packed weights need.
pub const MAX_FEW: usize = 16;

/// Groups of layers of a plan, at most.
pub const MAX_GROUPS: usize = 4;

/// The type of all weights that are not packed, of keys and values, and of what lies between launches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs)]
pub enum Element {
    F16,
    Bf16,
}

impl Element {
    /// Returns the name in CUDA.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F16 => "__half",
            Self::Bf16 => "__nv_bfloat16",
        }
    }
}

/// Where memory of the device begins, which belongs to the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Address(pub u64);

/// A buffer of a [`Plan`]: an index of [`Plan::buffers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Buffer(pub usize);

/// The keys or the values of a layer: `n_kv` heads of `capacity` rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pool {
    /// The rows of all heads.
    pub rows: PoolRows,
    /// The rows of each head.
    pub capacity: usize,
}

/// How a pool stores its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PoolRows {
    /// `[1, n_kv, capacity, head_dim]` of the plan's elements, row-major: a multiple of 16 bytes.
    Plain(Address),
    /// Codes with scales.
    Packed(PackedRows),
}

/// Rows of codes: planes `[1, n_kv, capacity, width]`, row-major, of which a row's width follows from the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PackedRows {
    /// What codes and scales stand for: a packed format.
    pub format: KvFormat,
    /// Words of 32 bits, the first code the lowest: a multiple of 16 bytes.
    pub codes: Address,
    /// float16, or bytes of E8M0 or E4M3: a multiple of 16 bytes.
    pub scales: Address,
    /// float16, in affine formats only: a multiple of 16 bytes.
    pub offsets: Option<Address>,
}

/// A matrix `[rows, columns]`, row-major.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Weight {
    /// Of the plan's elements.
    Plain(Address),
    /// Of fewer bits an element.
    Packed(Packed),
}

/// A matrix of codes: code `q` stands for `scale * q + bias`, by the scale and the bias of its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Packed {
    /// `[rows, columns]`, of so many bits a code, the first the lowest: a multiple of 16 bytes.
    pub codes: Address,
    /// `[rows, columns / group]`, of the plan's elements.
    pub scales: Address,
    /// Likewise.
    pub biases: Address,
    /// 4 or 8.
    pub bits: usize,
    /// The codes of a group: 32, 64 or 128, which the columns are a multiple of.
    pub group: usize,
}

/// A step of `tokens` tokens, T below.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The type of all elements.
    pub element: Element,
    /// T: 1 to [`MAX_TOKENS`].
    pub tokens: usize,
    /// The elements of each buffer between launches. The device allocates them.
    pub buffers: Vec<usize>,
    /// What runs, in this order.
    pub launches: Vec<Launch>,
    /// Of each group of layers whether every step has a [`KeyMask`](crate::KeyMask) for it: 1 to [`MAX_GROUPS`].
    /// The layers of a group store a step's rows in the same slots of their pools, and its tokens see the same
    /// keys. Without a mask query t of T sees the rows of the pools below `n_keys - T + t + 1`. If all groups have
    /// masks, a step may have fewer tokens than the plan.
    pub masked: Vec<bool>,
    /// Whether attention with a mask cuts rows into small blocks, each of which reads only the keys that its
    /// tokens see: for tokens of sequences that have few keys in common.
    pub apart: bool,
    /// Buffers that the host fills before each step, with a row for each token: different ones.
    pub given: Vec<Buffer>,
    /// What the host gets.
    pub logits: Option<Logits>,
    /// Buffers that the host gets with logits, if some are copied: hidden states of layers, of a multiple of 8
    /// elements each. They are different ones, and others than the logits and the given ones.
    pub tapped: Vec<Buffer>,
    /// Whether a kernel may begin before the one before it has ended, and ask for its weights. Without
    /// effect on devices before compute capability 9.0.
    pub overlap: bool,
    /// The blocks of an attention that is divided among the multiprocessors, or `None` for two on each.
    pub attention_blocks: Option<usize>,
}

impl Plan {
    /// Returns whether each step has a mask for a group.
    pub(crate) fn is_masked(&self, group: usize) -> bool {
        self.masked.get(group).copied().unwrap_or(false)
    }
}

/// The logits, as the last launch that writes their buffer leaves them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Logits {
    /// `[rows, vocabulary]`.
    pub buffer: Buffer,
    /// 1 to [`MAX_TOKENS`].
    pub rows: usize,
    /// The logits of a row.
    pub vocabulary: usize,
    /// Which rows are copied to the host.
    pub copied: Copied,
    /// Whether the place of the greatest logit of each row is.
    pub chosen: bool,
}

/// The rows of logits that the host gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Copied {
    /// None, and no tapped buffers either.
    None,
    /// That of the last token of each step. The plan then has a row for each of its tokens.
    Last,
    /// All [rows](Logits::rows).
    All,
}

/// A kernel of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Launch {
    /// The rows of the step's tokens.
    Embed(Embed),
    /// A product with a weight.
    Product(Product),
    /// Rows that are normalized.
    Normalize(Normalize),
    /// Rows that are shared with others.
    Blend(Blend),
    /// Heads that a product has made, to where attention takes them.
    Place(Place),
    /// Attention over the keys of a layer.
    Attend(Attend),
}

/// The rows of a table by the step's token ids. An id that is none gets the nearest row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Embed {
    /// `[vocabulary, inner]`.
    pub table: Weight,
    /// One of the plan's elements, by which rows are multiplied.
    pub scale: Option<Address>,
    /// The rows of the table.
    pub vocabulary: usize,
    /// The elements of a row.
    pub inner: usize,
    /// `[T, inner]`.
    pub out: Buffer,
}

/// `out = rotated(gated(norm(x) weight^T + bias)) + plus`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Product {
    /// `[T, inner]`.
    pub x: Buffer,
    /// Whether only the last row is taken, so that the result has one row.
    pub last_row: bool,
    /// `[outputs, inner]`; `[2 * outputs, inner]` with a gate, whose half is the first.
    pub weight: Weight,
    /// The elements of a row of `x`: a multiple of 8.
    pub inner: usize,
    /// The elements of a row of the result.
    pub outputs: usize,
    /// An element for each row of the weight.
    pub bias: Option<Address>,
    /// How `x` is normalized first, with a weight that is not [wide](Norm::wide).
    pub norm: Option<Norm>,
    /// The function of the first half of the outputs, by which the second half is multiplied.
    pub gate: Option<Gate>,
    /// `[rows, outputs]`, added to the result. May be `out`.
    pub plus: Option<Buffer>,
    /// What the outputs are if they are heads, whose pools are plain. Then there is no gate and no sum.
    pub heads: Option<Heads>,
    /// `[rows, outputs]`, or `[rows, n_q, head_dim]` for heads.
    pub out: Buffer,
}

/// A normalization by the root mean square.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// `[inner]`, or `None` for ones.
    pub weight: Option<Address>,
    /// Whether the weight is float32, behind which a row is rounded once. Not for the rows of a product.
    pub wide: bool,
    /// Added to the mean square.
    pub eps: f32,
}

/// `out = norm(x) + plus`, and another norm of that.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Normalize {
    /// `[T, inner]`.
    pub x: Buffer,
    /// The elements of a row: a multiple of 8.
    pub inner: usize,
    /// How `x` is normalized.
    pub norm: Norm,
    /// `[T, inner]`, added to that. May be `out`, if that has no other columns.
    pub plus: Option<Buffer>,
    /// `[T, inner]`, or some columns of wider rows.
    pub out: Buffer,
    /// Which columns. There is no next norm then.
    pub columns: Option<Columns>,
    /// How `out` is normalized, and where to.
    pub next: Option<(Norm, Buffer)>,
}

/// Columns of a buffer `[T, width]`. Both numbers are multiples of 8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Columns {
    /// The first of them.
    pub first: usize,
    /// The elements of a row.
    pub width: usize,
}

/// `out = x + share * (y - x)`, each difference, product and sum rounded: `y` where its share is 1, `x` where that is 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Blend {
    /// `[T, inner]`.
    pub x: Buffer,
    /// `[T, inner]`.
    pub y: Buffer,
    /// `[T]`.
    pub share: Buffer,
    /// The elements of a row: a multiple of 8.
    pub inner: usize,
    /// `[T, inner]`. May be `x` or `y`.
    pub out: Buffer,
}

/// An activation function. The kernel has the same numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Gate {
    Silu = 1,
    Gelu = 2,
    GeluTanh = 3,
}

/// Heads that are normalized, rotated and stored, as a product does with its own, but also to packed pools and
/// after norms of queries and keys.
///
/// A token with a key or value that is not finite gets queries of NaN where that is read, since codes would
/// hide it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Place {
    /// `[T, n_q + 2 * n_kv, head_dim]`.
    pub x: Buffer,
    /// Where they go. Here head_dim is a multiple of 32.
    pub heads: Heads,
    /// How each head of queries is normalized first. The weight is `[head_dim]`.
    pub q_norm: Option<Norm>,
    /// Likewise for keys.
    pub k_norm: Option<Norm>,
    /// The queries, `[T, n_q, head_dim]`.
    pub out: Buffer,
}

/// Outputs that are heads: `n_q` of queries, then `n_kv` of keys, then `n_kv` of values. Row t of the
/// keys and values goes to row `slots[t]` of each head of the pools.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Heads {
    /// The [group](Plan::masked) of the layer.
    pub group: usize,
    /// Heads of queries: a multiple of `n_kv`.
    pub n_q: usize,
    /// Heads of keys, and of values.
    pub n_kv: usize,
    /// The elements of a head: a multiple of 16, of 32 to 256; of 64 for more than [`MAX_FEW`] tokens.
    pub head_dim: usize,
    /// The periods of rotary embedding, `[rotated / 2]`, float32: element j of a query or key rotates
    /// together with `rotated / 2 + j`, by `1 / periods[j]` a position. `None` if nothing rotates.
    pub periods: Option<Address>,
    /// The first elements of a head that rotate: all of those of a product, a multiple of 16 of those that are
    /// placed.
    pub rotated: usize,
    /// Where the keys go.
    pub keys: Pool,
    /// Where the values go.
    pub values: Pool,
}

/// Attention to the rows of the pools that [`Plan::masked`] says.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attend {
    /// The [group](Plan::masked) of the layer.
    pub group: usize,
    /// `[T, n_q, head_dim]`.
    pub q: Buffer,
    /// The keys, those of this step too.
    pub keys: Pool,
    /// The values, likewise.
    pub values: Pool,
    /// Heads of queries: a multiple of `n_kv`.
    pub n_q: usize,
    /// Heads of keys.
    pub n_kv: usize,
    /// The elements of a head: a multiple of 16, of 32 to 256.
    pub head_dim: usize,
    /// By which scores are multiplied.
    pub scale: f32,
    /// `[T, n_q * head_dim]`.
    pub out: Buffer,
}
