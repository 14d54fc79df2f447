//! Checks that plans and views match, so that the kernels can rely on them.

use etkv_core::bookkeeping::{AnchorSource, RecurrentPlan, RowSource, BLOCK};
use etkv_core::{fail, KvFormat, Result};

use crate::store::view::View;
use crate::tensor::Tensor;

/// Rows of float32 numbers in slots.
#[derive(Debug, Clone, Copy)]
pub(super) struct Stored {
    first: *const f32,
    slot_stride: usize,
    head_stride: usize,
    n_slots: usize,
}

impl Stored {
    /// Returns the rows of a view, which must have `heads` heads with rows of `dim` numbers. Without a view
    /// there are no slots.
    ///
    /// # Errors
    /// [`Shape`](etkv_core::Status::Shape) for another format or shape. The message includes the name `rows`.
    pub fn of(view: Option<&View>, rows: &str, heads: usize, dim: usize) -> Result<Self> {
        let none = Self { first: std::ptr::null(), slot_stride: 0, head_stride: 0, n_slots: 0 };
        let Some(view) = view else { return Ok(none) };
        if view.format != KvFormat::F32 || [view.n_kv_heads, view.head_dim] != [heads, dim] {
            fail!(
                Shape,
                "expected {rows} of {heads} heads with {dim} elements in f32, got {} heads with {} in {}",
                view.n_kv_heads,
                view.head_dim,
                view.format
            );
        }
        let Some(plane) = &view.planes[0] else { return Ok(none) };
        Ok(Self {
            first: plane.memory.as_ptr().cast_const().wrapping_add(plane.offset).cast(),
            slot_stride: plane.slot_stride / 4,
            head_stride: plane.head_stride / 4,
            n_slots: view.n_slots,
        })
    }

    /// Returns the row of a slot.
    pub fn row(&self, slot: i32, head: usize) -> *const f32 {
        self.first.wrapping_add(slot as usize * self.slot_stride + head * self.head_stride)
    }

    fn has(&self, slot: i32) -> bool {
        usize::try_from(slot).is_ok_and(|slot| slot < self.n_slots)
    }
}

/// Checks that a plan has `n_tokens` tokens, and that its slots exist in all of `stored`.
///
/// # Errors
/// [`Shape`](etkv_core::Status::Shape) for another number of tokens, and
/// [`Internal`](etkv_core::Status::Internal) for a plan with invalid indices.
pub(super) fn check_rows(plan: &RecurrentPlan, n_tokens: usize, stored: &[Stored]) -> Result<()> {
    if plan.n_tokens() != n_tokens {
        fail!(Shape, "expected inputs of {} tokens, got {n_tokens}", plan.n_tokens());
    }
    let mut next = 0;
    for chain in &plan.chains {
        if chain.tokens.start != next || chain.tokens.end < next || chain.position < 0 {
            fail!(
                Internal,
                "tokens {:?} at position {} follow token {next}",
                chain.tokens,
                chain.position
            );
        }
        next = chain.tokens.end;
        for &row in &chain.rows {
            let exists = match row {
                RowSource::Slot(slot) => stored.iter().all(|stored| stored.has(slot)),
                RowSource::Token(token) => token < chain.tokens.start,
            };
            if !exists {
                fail!(Internal, "{row:?} precedes tokens {:?}", chain.tokens);
            }
        }
    }
    let ascends = plan.stored.windows(2).all(|pair| pair[0] < pair[1]);
    if !ascends || plan.stored.last().is_some_and(|&last| last >= n_tokens) {
        fail!(Internal, "tokens {:?} of {n_tokens} are stored", plan.stored);
    }
    Ok(())
}

/// Checks the anchors and folds of a plan.
///
/// # Errors
/// [`Internal`](etkv_core::Status::Internal) for a plan with invalid indices.
pub(super) fn check_anchors(plan: &RecurrentPlan, anchors: &Stored) -> Result<()> {
    let mut made = 0;
    for chain in &plan.chains {
        let before = chain.position.checked_sub(chain.base).filter(|n| (0..=BLOCK).contains(n));
        let last = i64::from(chain.position) + chain.tokens.len() as i64 - 1;
        let crossed = last / i64::from(BLOCK) - i64::from(chain.base / BLOCK);
        let folds = if chain.tokens.is_empty() { 0 } else { crossed.max(0) as usize };
        let enough = before.is_some_and(|n| chain.rows.len() >= n as usize);
        let anchor = match chain.anchor {
            AnchorSource::Zero => chain.base == 0,
            AnchorSource::Slot(slot) => anchors.has(slot),
            AnchorSource::Fold(fold) => fold < made,
        };
        let range = chain.folds.start == made && chain.folds.len() == folds;
        if !enough || !anchor || !(range || folds == 0) || chain.base < 0 || chain.base % BLOCK != 0
        {
            fail!(
                Internal,
                "tokens {:?} at position {} start from {:?} at {} with {} rows and folds {:?}",
                chain.tokens,
                chain.position,
                chain.anchor,
                chain.base,
                chain.rows.len(),
                chain.folds
            );
        }
        made += folds;
    }
    if made != plan.folds.len() {
        fail!(Internal, "{} anchors are planned, but {made} are computed", plan.folds.len());
    }
    Ok(())
}

/// Checks the shape of an input.
///
/// # Errors
/// [`Shape`](etkv_core::Status::Shape), with the name of the input.
pub(super) fn check_shape(tensor: &Tensor, name: &str, expected: [usize; 4]) -> Result<()> {
    if tensor.shape().map(|size| usize::try_from(size).unwrap_or(usize::MAX)) != expected {
        fail!(Shape, "expected {name} of shape {expected:?}, got {:?}", tensor.shape());
    }
    Ok(())
}

/// Converts a size to the type of a shape's axis.
///
/// # Errors
/// [`Shape`](etkv_core::Status::Shape) for a size that does not fit.
pub(super) fn axis(size: usize) -> Result<i32> {
    match i32::try_from(size) {
        Ok(size) => Ok(size),
        Err(_) => fail!(Shape, "expected sizes of at most {}, got {size}", i32::MAX),
    }
}
