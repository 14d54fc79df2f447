//! The scan of a step: its inputs, its parts in order, and the rows and anchors that are stored.

use etkv_core::bookkeeping::{AnchorSource, RecurrentPlan, RowSource};
use etkv_core::RecurrentLayer;
use mlx_rs::ops::{concatenate, maximum};
use mlx_rs::{Array, Dtype};

use super::groups::{parts, Work};
use super::rows::{check_plan, stored, stored_tokens, take};
use super::sizes::Sizes;
use super::{blocks, check_shape, on_cuda, short, RecurrentRows, RecurrentSpec};
use crate::error::{fail, Result};
use crate::kernels::recurrent::{Numbers, Operands, Rows, Stored};
use crate::mlx::{cast, joined};

/// Lower log decays are clamped to this bound. The decay at this bound is close to 0.
const MIN_LOG_DECAY: f32 = -88.0;

/// The maximum number of tokens of a chain for which the decays of all channels are computed for each pair of tokens.
const MAX_PAIRS: usize = 16;

/// The inputs of a step of `T` tokens. Their dtypes may differ.
#[derive(Debug, Clone, Copy)]
pub struct ScanInputs<'a> {
    /// Queries, `[1, k_heads, T, k_dim]`.
    pub q: &'a Array,
    /// Keys, `[1, k_heads, T, k_dim]`.
    pub k: &'a Array,
    /// Values, `[1, heads, T, v_dim]`; `heads` is a multiple of `k_heads`.
    pub v: &'a Array,
    /// Log decays, `[1, heads, T]`, or `[1, heads, T, k_dim]` with a decay for each channel.
    pub g: &'a Array,
    /// Write strengths of the delta rule, `[1, heads, T]`. Without the delta rule the update of a token is its value.
    pub beta: Option<&'a Array>,
}

/// Computes a recurrence over the tokens of a step, with a state `S` for each head:
///
/// ```text
/// u = beta (v - (exp(g) S)^T k)      or v, without beta
/// S = exp(g) S + k u^T
/// output = scale S^T q
/// ```
///
/// Returns the outputs, `[1, heads, T, v_dim]`, and the rows and anchors that the plan stores. The outputs are in
/// `out_dtype`, or in the dtype of `q` if `out_dtype` is `None`. A log decay below -88 is clamped to -88, for which
/// the decay is close to 0.
///
/// # Errors
/// [`Shape`](crate::Status::Shape) if shapes do not match, [`Internal`](crate::Status::Internal) if the plan refers
/// to tokens, slots or anchors that do not exist, and [`Backend`](crate::Status::Backend).
pub fn scan(
    inputs: &ScanInputs,
    scale: f32,
    spec: &RecurrentSpec,
    out_dtype: Option<Dtype>,
) -> Result<(Array, RecurrentRows)> {
    let plan = &*spec.plan;
    check_plan(plan)?;
    let sizes = sizes_of(inputs, plan)?;
    let rows = stored_rows(spec, sizes)?;
    let out_dtype = out_dtype.unwrap_or(inputs.q.dtype());
    let operands = Operands {
        rows: [inputs.q, inputs.k, inputs.v].map(Rows::Heads),
        decays: Numbers::Heads(inputs.g),
        strengths: inputs.beta.map(Numbers::Heads),
    };
    let computed = on_cuda::scan(&operands, sizes, rows, &spec.plan, scale, out_dtype)?;
    if let Some(computed) = computed {
        return Ok(computed);
    }
    let mut step = Step {
        sizes,
        inputs: Inputs::of(inputs, sizes)?,
        stored: rows,
        folds: Vec::new(),
        computed: Vec::new(),
        order: Vec::new(),
    };
    let most = if sizes.decays > 1 { MAX_PAIRS } else { usize::MAX };
    for work in parts(plan, most)? {
        match work {
            Work::Groups(groups) => short::run(&mut step, &groups)?,
            Work::Chain(chain) => blocks::run(&mut step, &plan.chains[chain])?,
            Work::Fold { anchor, rows, fold } => {
                let state = blocks::fold_rows(&step, anchor, &rows)?;
                step.add_fold(fold, state)?;
            }
        }
    }
    step.finish(plan, scale, out_dtype)
}

/// Computes the recurrence of a layer as [`scan`] does. Returns `None` if no kernel computes it together with the
/// operations before it. Functions must have inputs for all tokens of the step.
///
/// # Errors
/// As [`scan`].
pub fn fused_scan(
    layer: RecurrentLayer,
    operands: &Operands,
    scale: f32,
    spec: &RecurrentSpec,
    out_dtype: Dtype,
) -> Result<Option<(Array, RecurrentRows)>> {
    check_plan(&spec.plan)?;
    let RecurrentLayer::Recurrence { k_heads, heads, k_dim, v_dim, channel_decay: false } = layer
    else {
        return Ok(None);
    };
    if k_heads < 1 || heads < 1 || heads % k_heads != 0 || k_dim < 1 || v_dim < 1 {
        return Ok(None);
    }
    let n = spec.plan.n_tokens() as i32;
    let fits = |rows: Rows, heads: i32, dim: i32| match rows {
        Rows::Heads(x) => x.shape() == [1, heads, n, dim],
        Rows::Columns { x, start, .. } => {
            let end = heads.checked_mul(dim).and_then(|columns| columns.checked_add(start));
            let has = |columns| start >= 0 && end.is_some_and(|end| end <= columns);
            matches!(*x.shape(), [1, tokens, columns] if tokens == n && has(columns))
        }
    };
    let are_heads = |numbers: Numbers| match numbers {
        Numbers::Heads(x) => x.shape() == [1, heads, n],
        Numbers::Function(..) => true,
    };
    let [q, k, v] = operands.rows;
    let fit = fits(q, k_heads, k_dim) && fits(k, k_heads, k_dim) && fits(v, heads, v_dim);
    if !fit || !are_heads(operands.decays) || !operands.strengths.is_none_or(are_heads) {
        return Ok(None);
    }
    let delta = operands.strengths.is_some();
    let sizes = Sizes { k_heads, share: heads / k_heads, k_dim, v_dim, decays: 1, delta };
    let rows = stored_rows(spec, sizes)?;
    on_cuda::scan(operands, sizes, rows, &spec.plan, scale, out_dtype)
}

/// Returns the buffers that a recurrence of these sizes reads.
fn stored_rows(spec: &RecurrentSpec, sizes: Sizes) -> Result<Stored<'_>> {
    let state = sizes.k_dim.saturating_mul(sizes.v_dim);
    Ok(Stored {
        keys: stored(spec.rows[0].as_ref(), "keys", [sizes.k_heads, sizes.k_dim])?,
        updates: stored(spec.rows[1].as_ref(), "updates", [sizes.heads(), sizes.row()])?,
        anchors: stored(spec.anchors.as_ref(), "anchors", [sizes.heads(), state])?,
    })
}

/// Checks the shapes of the inputs, and returns their sizes.
fn sizes_of(inputs: &ScanInputs, plan: &RecurrentPlan) -> Result<Sizes> {
    let n = plan.n_tokens() as i32;
    let (&[_, k_heads, _, k_dim], &[_, heads, _, v_dim]) = (inputs.k.shape(), inputs.v.shape())
    else {
        let (k, v) = (inputs.k.shape(), inputs.v.shape());
        fail!(Shape, "expected keys and values of shape [1, heads, T, dim], got {k:?} and {v:?}");
    };
    if k_heads < 1 || heads < 1 || heads % k_heads != 0 || k_dim < 1 || v_dim < 1 {
        fail!(
            Shape,
            "expected heads that are a multiple of the keys' heads, and dims of at least 1, got {heads} \
             heads, {k_heads} of keys, dims {k_dim} and {v_dim}"
        );
    }
    check_shape(inputs.q, "queries", &[1, k_heads, n, k_dim])?;
    check_shape(inputs.k, "keys", &[1, k_heads, n, k_dim])?;
    check_shape(inputs.v, "values", &[1, heads, n, v_dim])?;
    let (n_axes, decays) = if inputs.g.ndim() == 3 { (3, 1) } else { (4, k_dim) };
    check_shape(inputs.g, "decays", &[1, heads, n, k_dim][..n_axes])?;
    if let Some(beta) = inputs.beta {
        check_shape(beta, "write strengths", &[1, heads, n])?;
    }
    let (share, delta) = (heads / k_heads, inputs.beta.is_some());
    Ok(Sizes { k_heads, share, k_dim, v_dim, decays, delta })
}

/// The inputs in float32.
pub struct Inputs {
    /// `[k_heads, T, k_dim]`.
    pub q: Array,
    /// `[k_heads, T, k_dim]`.
    pub k: Array,
    /// `[heads, T, v_dim]`.
    pub v: Array,
    /// `[heads, T, decays]`.
    pub g: Array,
    /// `[heads, T, 1]`.
    pub beta: Option<Array>,
}

impl Inputs {
    fn of(inputs: &ScanInputs, sizes: Sizes) -> Result<Self> {
        let of = |array: &Array, heads: i32, dim: i32| -> Result<Array> {
            Ok(cast(array, Dtype::Float32)?.reshape(&[heads, -1, dim])?)
        };
        let (k_heads, heads) = (sizes.k_heads, sizes.heads());
        Ok(Self {
            q: of(inputs.q, k_heads, sizes.k_dim)?,
            k: of(inputs.k, k_heads, sizes.k_dim)?,
            v: of(inputs.v, heads, sizes.v_dim)?,
            g: maximum(of(inputs.g, heads, sizes.decays)?, Array::from_f32(MIN_LOG_DECAY))?,
            beta: inputs.beta.map(|beta| of(beta, heads, 1)).transpose()?,
        })
    }
}

/// A step: its inputs, and the results so far.
pub struct Step<'a> {
    pub sizes: Sizes,
    pub inputs: Inputs,
    stored: Stored<'a>,
    /// `[k_heads, share, k_dim, v_dim]`.
    folds: Vec<Array>,
    computed: Vec<Computed>,
    /// The token of each computed row, in order; `None` for padding.
    order: Vec<Option<usize>>,
}

/// The results of some tokens.
struct Computed {
    /// `[heads, n, v_dim]`.
    out: Array,
    /// `[heads, n, v_dim + decays]`.
    updates: Array,
}

/// Rows that precede tokens.
pub struct Before {
    /// `[k_heads, m, k_dim]`.
    pub keys: Array,
    /// `[heads, m, v_dim + decays]`.
    pub updates: Array,
}

impl Step<'_> {
    /// Returns these rows: first the rows that are in slots, then all others, both in the given order.
    pub fn rows(&self, rows: &[RowSource]) -> Result<Before> {
        let (mut slots, mut tokens) = (Vec::new(), Vec::new());
        for row in rows {
            match *row {
                RowSource::Slot(slot) => slots.push(slot),
                RowSource::Token(token) => tokens.push(token as i32),
            }
        }
        let Sizes { k_heads, k_dim, .. } = self.sizes;
        let (mut keys, mut updates) = (Vec::new(), Vec::new());
        if !slots.is_empty() {
            let (Some(all_keys), Some(all_updates)) = (self.stored.keys, self.stored.updates)
            else {
                fail!(Internal, "cannot read the slots of a step: there are no stored rows");
            };
            keys.push(take(all_keys, &slots, 2)?.reshape(&[k_heads, -1, k_dim])?);
            let shape = [self.sizes.heads(), -1, self.sizes.row()];
            updates.push(take(all_updates, &slots, 2)?.reshape(&shape)?);
        }
        if !tokens.is_empty() {
            keys.push(take(&self.inputs.k, &tokens, 1)?);
            updates.push(self.by_token(|computed| &computed.updates, &tokens)?);
        }
        Ok(Before { keys: joined(&keys, 1)?, updates: joined(&updates, 1)? })
    }

    /// Returns a state `[k_heads, share, k_dim, v_dim]`, or `None` if it is zero.
    pub fn state(&self, anchor: AnchorSource) -> Result<Option<Array>> {
        let Sizes { k_heads, share, k_dim, v_dim, .. } = self.sizes;
        match anchor {
            AnchorSource::Zero => Ok(None),
            AnchorSource::Slot(slot) => {
                let Some(anchors) = self.stored.anchors else {
                    fail!(
                        Internal,
                        "cannot read the anchor of a step: there are no stored anchors"
                    );
                };
                let state = take(anchors, &[slot], 2)?;
                Ok(Some(state.reshape(&[k_heads, share, k_dim, v_dim])?))
            }
            AnchorSource::Fold(fold) => match self.folds.get(fold) {
                Some(state) => Ok(Some(state.clone())),
                None => fail!(Internal, "cannot read fold {fold} before it is computed"),
            },
        }
    }

    /// Adds the next fold of the plan, a state `[k_heads, share, k_dim, v_dim]`. `fold` is its index.
    pub fn add_fold(&mut self, fold: usize, state: Array) -> Result<()> {
        if fold != self.folds.len() {
            fail!(Internal, "expected fold {}, got fold {fold}", self.folds.len());
        }
        self.folds.push(state);
        Ok(())
    }

    /// Adds results of these tokens: outputs without the scale, `[heads, n, v_dim]`, updates of the same shape, and
    /// the sums of log decays, `[heads, n, decays]`. Rows without a token are padding.
    pub fn add(
        &mut self,
        tokens: impl IntoIterator<Item = Option<usize>>,
        out: Array,
        updates: &Array,
        sums: &Array,
    ) -> Result<()> {
        self.order.extend(tokens);
        let updates = concatenate(&[updates, sums], -1)?;
        self.computed.push(Computed { out, updates });
        Ok(())
    }

    /// Returns one of the arrays of results, with the rows of these tokens.
    fn by_token(&self, part: impl Fn(&Computed) -> &Array, tokens: &[i32]) -> Result<Array> {
        let parts: Vec<Array> = self.computed.iter().map(part).cloned().collect();
        let all = joined(&parts, 1)?;
        let mut at = vec![-1; self.inputs.k.dim(1) as usize];
        for (row, token) in self.order.iter().enumerate() {
            if let Some(at) = token.and_then(|token| at.get_mut(token)) {
                *at = row as i32;
            }
        }
        let of = |&token: &i32| at.get(token as usize).copied().unwrap_or(-1);
        take(&all, &tokens.iter().map(of).collect::<Vec<_>>(), 1)
    }

    fn finish(
        &self,
        plan: &RecurrentPlan,
        scale: f32,
        dtype: Dtype,
    ) -> Result<(Array, RecurrentRows)> {
        let Sizes { k_heads, k_dim, v_dim, .. } = self.sizes;
        let heads = self.sizes.heads();
        let all: Vec<i32> = (0..plan.n_tokens() as i32).collect();
        let out = self.by_token(|computed| &computed.out, &all)?;
        let mut out = out.reshape(&[1, heads, -1, v_dim])?;
        if scale != 1.0 {
            out = out.multiply(Array::from_f32(scale))?;
        }
        let tokens = stored_tokens(plan);
        let keys = take(&self.inputs.k, &tokens, 1)?.reshape(&[1, k_heads, -1, k_dim])?;
        let updates = self.by_token(|computed| &computed.updates, &tokens)?;
        let updates = updates.reshape(&[1, heads, -1, self.sizes.row()])?;
        let kept = plan.folds.iter().zip(&self.folds).filter(|(slot, _)| slot.is_some());
        let kept = kept
            .map(|(_, state)| Ok(state.reshape(&[1, heads, 1, k_dim * v_dim])?))
            .collect::<Result<Vec<_>>>()?;
        let anchors = match &kept[..] {
            [] => None,
            kept => Some(joined(kept, 2)?),
        };
        let rows = RecurrentRows { rows: [Some(keys), Some(updates)], anchors };
        Ok((cast(&out, dtype)?, rows))
    }
}
