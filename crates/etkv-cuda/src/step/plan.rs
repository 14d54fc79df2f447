//! The plan of a step: its kernels, and the buffers between them.

use etkv_core::KvFormat;

/// The maximum number of tokens of a step.
pub const MAX_TOKENS: usize = 64;
/// The maximum number of rows for the kernels of few rows. Products with packed weights need these kernels.
pub const MAX_FEW: usize = 16;

/// The maximum number of layer groups of a plan.
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

/// A buffer of a [`Plan`]: an index into [`Plan::buffers`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Buffer(pub usize);

/// The keys or the values of a layer: `n_kv` heads of `capacity` rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pool {
    /// The rows of all heads.
    pub rows: PoolRows,
    /// The number of rows of each head: the slots.
    pub capacity: usize,
}

/// How a pool stores its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PoolRows {
    /// `[1, n_kv, capacity, head_dim]` of the plan's elements, row-major, aligned to 16 bytes.
    Plain(Address),
    /// Packed codes with scales.
    Packed(PackedRows),
}

/// Packed rows: planes `[1, n_kv, capacity, width]`, row-major. The format determines the width of each
/// plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PackedRows {
    /// The packed format.
    pub format: KvFormat,
    /// Words of 32 bits with the first code in the lowest bits, aligned to 16 bytes.
    pub codes: Address,
    /// float16, or bytes of E8M0 or E4M3, aligned to 16 bytes.
    pub scales: Address,
    /// float16, aligned to 16 bytes. Only affine formats have offsets.
    pub offsets: Option<Address>,
}

/// A row-major matrix `[rows, columns]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Weight {
    /// In the plan's elements.
    Plain(Address),
    /// Packed codes.
    Packed(PackedWeight),
}

/// A matrix of packed codes. The value of code `q` is `scale * q + bias`, with the scale and bias of its
/// group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PackedWeight {
    /// `[rows, columns]` of `bits` bits, with the first code in the lowest bits, aligned to 16 bytes.
    pub codes: Address,
    /// `[rows, columns / group]`, of the plan's elements.
    pub scales: Address,
    /// The same as `scales`.
    pub biases: Address,
    /// The bits of a code: 4 or 8.
    pub bits: usize,
    /// The codes of a group: 32, 64 or 128. The number of columns is a multiple of it.
    pub group: usize,
}

/// The computation of a step. T in the shapes below is `tokens`.
#[derive(Debug, Clone, PartialEq)]
pub struct Plan {
    /// The type of all elements.
    pub element: Element,
    /// The number of tokens: 1 to [`MAX_TOKENS`].
    pub tokens: usize,
    /// The number of elements of each buffer between launches. The device allocates the buffers.
    pub buffers: Vec<usize>,
    /// The launches, in the order in which they run.
    pub launches: Vec<Launch>,
    /// For each layer group, whether every step has a [`KeyMask`](crate::KeyMask) for it. There are 1 to
    /// [`MAX_GROUPS`] groups. In all layers of a group, a step's rows have the same slots, and its tokens see
    /// the same keys. Without a mask, query t sees the slots below `n_keys - T + t + 1`. If all groups have
    /// masks, a step may have fewer tokens than the plan.
    pub masked: Vec<bool>,
    /// Whether attention with a mask splits rows into small blocks. A block reads only the tiles of keys that
    /// its tokens see, so small blocks suit tokens that have few visible keys in common.
    pub small_blocks: bool,
    /// Buffers that the host fills before each step, with a row for each token. No buffer is listed twice.
    pub given: Vec<Buffer>,
    /// The outputs for the host.
    pub logits: Option<Logits>,
    /// Buffers that are copied to the host with the logits, for hidden states. Each has a multiple of 8
    /// elements. A buffer may not be listed twice, be the buffer of the logits, or be in `given`. If no
    /// logits are copied, these buffers are not copied either.
    pub tapped: Vec<Buffer>,
    /// Whether a kernel may begin before the previous one has ended, to prefetch its weights. Has no effect
    /// on devices before compute capability 9.0.
    pub overlap: bool,
    /// The number of blocks of an attention, or `None` to choose one for the device.
    pub attention_blocks: Option<usize>,
}

impl Plan {
    /// Returns a plan of one layer group without a mask. The plan returns nothing to the host.
    pub fn new(
        element: Element,
        tokens: usize,
        buffers: Vec<usize>,
        launches: Vec<Launch>,
    ) -> Self {
        Self {
            element,
            tokens,
            buffers,
            launches,
            masked: vec![false],
            small_blocks: false,
            given: Vec::new(),
            logits: None,
            tapped: Vec::new(),
            overlap: true,
            attention_blocks: None,
        }
    }

    /// Returns whether steps have a mask for a layer group.
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
    /// The number of logits of a row.
    pub vocabulary: usize,
    /// The rows that are copied to the host.
    pub copied: CopiedRows,
    /// Whether the argmax of each row is copied, too.
    pub chosen: bool,
}

/// The rows of logits that are copied to the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CopiedRows {
    /// No rows, and no tapped buffers.
    None,
    /// The row of the step's last token. The plan must then have a row for each of its tokens.
    Last,
    /// All [rows](Logits::rows).
    All,
}

/// A launch of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Launch {
    /// Reads the embeddings of the tokens.
    Embed(Embed),
    /// Multiplies rows by a weight.
    Product(Product),
    /// Normalizes rows.
    Normalize(Normalize),
    /// Blends rows with other rows.
    Blend(Blend),
    /// Normalizes and rotates the heads of a product, and writes keys and values to the pools.
    PlaceHeads(PlaceHeads),
    /// Computes attention over the keys of a layer.
    Attend(Attend),
}

/// Reads the rows of a table at the step's token ids. Ids out of range are clamped.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Embed {
    /// `[vocabulary, inner]`.
    pub table: Weight,
    /// The factor of the rows, in the plan's element type.
    pub scale: Option<Address>,
    /// The number of rows of the table.
    pub vocabulary: usize,
    /// The number of elements of a row.
    pub inner: usize,
    /// `[T, inner]`.
    pub out: Buffer,
}

/// `out = rotated(gated(norm(x) weight^T + bias)) + residual`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Product {
    /// `[T, inner]`.
    pub x: Buffer,
    /// Whether only the last row is multiplied. The result then has one row.
    pub last_row: bool,
    /// `[outputs, inner]`, or `[2 * outputs, inner]` with a gate.
    pub weight: Weight,
    /// The number of elements of a row of `x`: a multiple of 8.
    pub inner: usize,
    /// The number of elements of a row of the result.
    pub outputs: usize,
    /// One element for each row of the weight.
    pub bias: Option<Address>,
    /// The norm of `x`, with a weight that is not [wide](Norm::wide).
    pub norm: Option<Norm>,
    /// The activation function of the first half of the outputs, whose result multiplies the second half.
    pub gate: Option<Gate>,
    /// `[rows, outputs]`, which is added to the result. May be the same buffer as `out`.
    pub residual: Option<Buffer>,
    /// The heads, if the outputs are heads. Their pools must be plain, and there is neither a gate nor a
    /// residual.
    pub heads: Option<Heads>,
    /// `[rows, outputs]`, or `[rows, n_q, head_dim]` for heads.
    pub out: Buffer,
}

impl Product {
    /// Returns a product of all rows, without operations around it.
    pub fn plain(x: Buffer, weight: Weight, inner: usize, outputs: usize, out: Buffer) -> Self {
        Self {
            x,
            last_row: false,
            weight,
            inner,
            outputs,
            bias: None,
            norm: None,
            gate: None,
            residual: None,
            heads: None,
            out,
        }
    }
}

/// An RMS norm.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Norm {
    /// `[inner]`, or `None` for ones.
    pub weight: Option<Address>,
    /// Whether the weight is float32. A row is then rounded only once, after the multiplication by the
    /// weight. Products do not support such norms.
    pub wide: bool,
    /// The number that is added to the mean square.
    pub eps: f32,
}

/// `out = norm(x) + residual`, and optionally a norm of this result.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Normalize {
    /// `[T, inner]`.
    pub x: Buffer,
    /// The number of elements of a row: a multiple of 8.
    pub inner: usize,
    /// The norm of `x`.
    pub norm: Norm,
    /// `[T, inner]`, which is added to the normalized rows. May be the same buffer as `out`, if `columns` is
    /// `None`.
    pub residual: Option<Buffer>,
    /// `[T, inner]`, or `[T, columns.width]`.
    pub out: Buffer,
    /// The columns of `out` to which the result is written. There is then neither a residual nor a next norm.
    pub columns: Option<Columns>,
    /// The norm of `out`, and the buffer of its result.
    pub next: Option<(Norm, Buffer)>,
}

/// A range of columns in a buffer `[T, width]`. Both numbers are multiples of 8.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Columns {
    /// The first column.
    pub first: usize,
    /// The number of elements of a row.
    pub width: usize,
}

/// `out = x + share * (y - x)`, where each operation is rounded. A share of 1 gives `y`, a share of 0 gives
/// `x`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Blend {
    /// `[T, inner]`.
    pub x: Buffer,
    /// `[T, inner]`.
    pub y: Buffer,
    /// `[T]`.
    pub share: Buffer,
    /// The number of elements of a row: a multiple of 8.
    pub inner: usize,
    /// `[T, inner]`. May be the same buffer as `x` or `y`.
    pub out: Buffer,
}

/// An activation function. The kernels identify the functions by the same numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Gate {
    Silu = 1,
    Gelu = 2,
    GeluTanh = 3,
}

/// Normalizes, rotates and stores heads. In contrast to a [`Product`] with heads, this launch also supports
/// packed pools, norms of queries and keys, and partial rotation.
///
/// If a key or value of a token is not finite, the token's queries become NaN, because packed codes would
/// hide the value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PlaceHeads {
    /// `[T, n_q + 2 * n_kv, head_dim]`.
    pub x: Buffer,
    /// The pools, periods and sizes. `head_dim` must be a multiple of 32 here.
    pub heads: Heads,
    /// The norm of each query head. The weight is `[head_dim]`.
    pub q_norm: Option<Norm>,
    /// The norm of each key head. The weight is `[head_dim]`.
    pub k_norm: Option<Norm>,
    /// The queries, `[T, n_q, head_dim]`.
    pub out: Buffer,
}

/// The order of the heads is: `n_q` query heads, `n_kv` key heads, `n_kv` value heads. Row t of keys and
/// values is written to slot `slots[t]` of the pools.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Heads {
    /// The [group](Plan::masked) of the layer.
    pub group: usize,
    /// The number of query heads: a multiple of `n_kv`.
    pub n_q: usize,
    /// The number of key heads, and of value heads.
    pub n_kv: usize,
    /// The number of elements of a head: a multiple of 16 from 32 to 256, or a multiple of 64 for more than
    /// [`MAX_FEW`] tokens.
    pub head_dim: usize,
    /// The periods of the rotary embedding, float32 `[rotated / 2]`, or `None` if nothing rotates. Elements j
    /// and `rotated / 2 + j` of a query or key rotate together, by the angle `position / periods[j]`.
    pub periods: Option<Address>,
    /// The number of elements that rotate, from the start of each head: `head_dim` in a product, and a
    /// multiple of 16 in [`PlaceHeads`].
    pub rotated: usize,
    /// The pool to which keys are written.
    pub keys: Pool,
    /// The pool to which values are written.
    pub values: Pool,
}

/// Attention over the slots of the pools that [`Plan::masked`] describes.
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
    /// The number of query heads: a multiple of `n_kv`.
    pub n_q: usize,
    /// The number of KV heads.
    pub n_kv: usize,
    /// The number of elements of a head: a multiple of 16 from 32 to 256.
    pub head_dim: usize,
    /// The factor by which scores are multiplied.
    pub scale: f32,
    /// `[T, n_q * head_dim]`.
    pub out: Buffer,
}
