//! The computation of a step: its kernels, and the buffers between them.

use etkv_core::KvFormat;

/// The most tokens of a step.
pub const MAX_TOKENS: usize = 64;
/// The most rows for the kernels of few rows, which packed weights need.
pub const MAX_FEW: usize = 16;

/// The most layer groups of a plan.
pub const MAX_GROUPS: usize = 4;

/// The type of all unpacked weights, of keys and values, and of the buffers between kernels.
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

/// An address in device memory that belongs to the caller.
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

/// Rows of codes: planes `[1, n_kv, capacity, width]`, row-major. The width of a row follows from the format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PackedRows {
    /// The packed format of codes and scales.
    pub format: KvFormat,
    /// Words of 32 bits, the first code in the lowest bits: a multiple of 16 bytes.
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
    /// With fewer bits an element.
    Packed(PackedWeight),
}

/// A matrix of codes: code `q` stands for `scale * q + bias`, by the scale and the bias of its group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PackedWeight {
    /// `[rows, columns]` of `bits` bits, the first code in the lowest bits: a multiple of 16 bytes.
    pub codes: Address,
    /// `[rows, columns / group]`, of the plan's elements.
    pub scales: Address,
    /// Likewise.
    pub biases: Address,
    /// 4 or 8.
    pub bits: usize,
    /// The codes of a group: 32, 64 or 128. The columns are a multiple of it.
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
    /// The kernels, in the order in which they run.
    pub launches: Vec<Launch>,
    /// For each layer group, whether every step has a [`KeyMask`](crate::KeyMask) for it: 1 to [`MAX_GROUPS`]
    /// groups. The layers of a group store a step's rows in the same slots of their pools, and its tokens see
    /// the same keys. Without a mask query t of T sees the rows of the pools below `n_keys - T + t + 1`. If
    /// all groups have masks, a step may have fewer tokens than the plan.
    pub masked: Vec<bool>,
    /// Whether attention with a mask splits rows into small blocks, each of which reads only the keys that
    /// its tokens see: for tokens of sequences that have few keys in common.
    pub small_blocks: bool,
    /// Buffers that the host fills before each step, with a row for each token. All are different.
    pub given: Vec<Buffer>,
    /// The outputs for the host.
    pub logits: Option<Logits>,
    /// Buffers that the host gets with the logits, if some are copied: hidden states of layers, a multiple of
    /// 8 elements each. They are all different, and are neither the logits nor buffers that the host fills.
    pub tapped: Vec<Buffer>,
    /// Whether a kernel may begin before the previous one has ended, and prefetch its weights. Has no effect
    /// on devices before compute capability 9.0.
    pub overlap: bool,
    /// The blocks of an attention that is split among the multiprocessors, or `None` for two on each.
    pub attention_blocks: Option<usize>,
}

impl Plan {
    /// Returns whether each step has a mask for a layer group.
    pub(crate) fn is_masked(&self, group: usize) -> bool {
        self.masked.get(group).copied().unwrap_or(false)
    }
}

/// The logits: the contents of their buffer after the last kernel that writes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Logits {
    /// `[rows, vocabulary]`.
    pub buffer: Buffer,
    /// 1 to [`MAX_TOKENS`].
    pub rows: usize,
    /// The logits of a row.
    pub vocabulary: usize,
    /// The rows that are copied to the host.
    pub copied: CopiedRows,
    /// Whether the argmax of each row is copied too.
    pub chosen: bool,
}

/// The rows of logits that the host gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopiedRows {
    /// None, and no tapped buffers either.
    None,
    /// The row of the last token of each step. The plan then has a row for each of its tokens.
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
    /// Rows that are blended with others.
    Blend(Blend),
    /// Stores the heads of a product where attention reads them.
    PlaceHeads(PlaceHeads),
    /// Attention over the keys of a layer.
    Attend(Attend),
}

/// The rows of a table for the step's token ids. An id out of range gets the nearest row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Embed {
    /// `[vocabulary, inner]`.
    pub table: Weight,
    /// The factor of the rows, one of the plan's elements.
    pub scale: Option<Address>,
    /// The number of rows of the table.
    pub vocabulary: usize,
    /// The elements of a row.
    pub inner: usize,
    /// `[T, inner]`.
    pub out: Buffer,
}

/// `out = rotated(gated(norm(x) weight^T + bias)) + residual`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Product {
    /// `[T, inner]`.
    pub x: Buffer,
    /// Whether only the last row is multiplied, so that the result has one row.
    pub last_row: bool,
    /// `[outputs, inner]`; `[2 * outputs, inner]` with a gate, which is the first half.
    pub weight: Weight,
    /// The elements of a row of `x`: a multiple of 8.
    pub inner: usize,
    /// The elements of a row of the result.
    pub outputs: usize,
    /// One element for each row of the weight.
    pub bias: Option<Address>,
    /// The norm of `x`, with a weight that is not [wide](Norm::wide).
    pub norm: Option<Norm>,
    /// The function of the first half of the outputs. It multiplies the second half.
    pub gate: Option<Gate>,
    /// The residual, `[rows, outputs]`, added to the result. May be `out`.
    pub residual: Option<Buffer>,
    /// The description of the outputs if they are heads, whose pools are plain. Then there is no gate and no
    /// residual.
    pub heads: Option<Heads>,
    /// `[rows, outputs]`, or `[rows, n_q, head_dim]` for heads.
    pub out: Buffer,
}

/// An RMS norm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// `[inner]`, or `None` for ones.
    pub weight: Option<Address>,
    /// Whether the weight is float32; a row is then rounded once after it. Not allowed for the rows of a
    /// product.
    pub wide: bool,
    /// Added to the mean square.
    pub eps: f32,
}

/// `out = norm(x) + residual`, and another norm of the result.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Normalize {
    /// `[T, inner]`.
    pub x: Buffer,
    /// The elements of a row: a multiple of 8.
    pub inner: usize,
    /// The norm of `x`.
    pub norm: Norm,
    /// The residual, `[T, inner]`, added to the normalized rows. May be `out`, if that has no other columns.
    pub residual: Option<Buffer>,
    /// `[T, inner]`, or some columns of wider rows.
    pub out: Buffer,
    /// The columns of `out`. Then there is no next norm.
    pub columns: Option<Columns>,
    /// The norm of `out`, and its result.
    pub next: Option<(Norm, Buffer)>,
}

/// Columns of a buffer `[T, width]`. Both numbers are multiples of 8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Columns {
    /// The first column.
    pub first: usize,
    /// The elements of a row.
    pub width: usize,
}

/// `out = x + share * (y - x)`, with each difference, product and sum rounded: `y` where its share is 1, `x`
/// where it is 0.
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

/// An activation function. The kernel uses the same numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Gate {
    Silu = 1,
    Gelu = 2,
    GeluTanh = 3,
}

/// Heads that are normalized, rotated and stored. A product does this with its own heads; this launch also
/// writes packed pools and applies norms to queries and keys.
///
/// If a key or value of a token is not finite, its queries become NaN, since codes would hide it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlaceHeads {
    /// `[T, n_q + 2 * n_kv, head_dim]`.
    pub x: Buffer,
    /// Their destinations. Here head_dim is a multiple of 32.
    pub heads: Heads,
    /// The norm of each head of queries. The weight is `[head_dim]`.
    pub q_norm: Option<Norm>,
    /// Likewise for keys.
    pub k_norm: Option<Norm>,
    /// The queries, `[T, n_q, head_dim]`.
    pub out: Buffer,
}

/// Outputs that are heads: `n_q` of queries, then `n_kv` of keys, then `n_kv` of values. Row t of the keys
/// and values goes to row `slots[t]` of each head of the pools.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Heads {
    /// The [group](Plan::masked) of the layer.
    pub group: usize,
    /// Heads of queries: a multiple of `n_kv`.
    pub n_q: usize,
    /// Heads of keys, and of values.
    pub n_kv: usize,
    /// The elements of a head: a multiple of 16 from 32 to 256; a multiple of 64 for more than [`MAX_FEW`]
    /// tokens.
    pub head_dim: usize,
    /// The periods of the rotary embedding, `[rotated / 2]`, float32: element j of a query or key rotates
    /// together with element `rotated / 2 + j`, by `1 / periods[j]` a position. `None` if nothing rotates.
    pub periods: Option<Address>,
    /// The number of first elements of a head that rotate: all of them in a product, a multiple of 16 in
    /// [`PlaceHeads`].
    pub rotated: usize,
    /// The destination of the keys.
    pub keys: Pool,
    /// The destination of the values.
    pub values: Pool,
}

/// Attention to the rows of the pools that [`Plan::masked`] describes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Attend {
    /// The [group](Plan::masked) of the layer.
    pub group: usize,
    /// `[T, n_q, head_dim]`.
    pub q: Buffer,
    /// The keys, including those of this step.
    pub keys: Pool,
    /// The values, including those of this step.
    pub values: Pool,
    /// Heads of queries: a multiple of `n_kv`.
    pub n_q: usize,
    /// Heads of keys.
    pub n_kv: usize,
    /// The elements of a head: a multiple of 16 from 32 to 256.
    pub head_dim: usize,
    /// The factor of the scores.
    pub scale: f32,
    /// `[T, n_q * head_dim]`.
    pub out: Buffer,
}
