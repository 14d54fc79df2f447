//! The CPU's kernels of recurrent layers over real caches: they give the same bits as a text that runs in one step.
//! This holds whatever was cut, forked, aborted, proposed, saved, loaded or attached earlier.

use std::cell::Cell;
use std::sync::Arc;

use etkv_core::bookkeeping::{AnchorSource, Chain, RecurrentPlan, RowSource, BLOCK};
use etkv_core::{
    AttendCache, CacheConfig, CellsCache, RecurrentLayer, RecurrentRows, RecurrentSpec, Result,
};
use etkv_cpu::attention::synthetic::Threads;
use etkv_cpu::recurrent::{
    convolve, scan, Activation, ConvolveInputs, Scan, ScanInputs, Workspace,
};
use etkv_cpu::{CpuStore, Tensor, View};
use etkv_tests::backend::Backend;
use etkv_tests::campaign::recurrent::{first_difference, texts_run_as_if_alone};
use etkv_tests::on_cpu::OnCpu;
use etkv_tests::oracle::{Row, Rows};
use etkv_tests::recurrence::{inputs_of, Inputs, Kernels, Token};

struct CpuKernels;

impl Kernels<OnCpu> for CpuKernels {
    fn planned(
        layer: usize,
        config: RecurrentLayer,
        tokens: &[Token],
        spec: &RecurrentSpec<View>,
        outputs: &mut Rows,
    ) -> Result<RecurrentRows<Tensor>> {
        let inputs: Vec<Inputs> =
            tokens.iter().map(|&token| inputs_of(layer, config, token)).collect();
        let of = |part: &dyn Fn(&Inputs) -> Row| -> Tensor {
            OnCpu::tensor(&inputs.iter().map(part).collect::<Rows>())
        };
        let mut workspace = Workspace::default();
        let (out, rows) = match config {
            RecurrentLayer::Convolution { channels, width } => {
                let column = |token: &Inputs| token.k[0].iter().map(|&x| vec![x]).collect();
                let weight: Vec<f32> = (0..channels * width).map(|n| (n as f32).sin()).collect();
                let inputs = ConvolveInputs {
                    x: &of(&column),
                    weight: &Tensor::new([1, 1, channels, width], weight)?,
                    bias: None,
                    activation: if layer == 0 { Activation::Silu } else { Activation::None },
                };
                convolve(&inputs, spec, None, &mut workspace, &Threads(2))?
            }
            RecurrentLayer::Recurrence { k_heads, heads, k_dim, v_dim, channel_decay } => {
                let [k_heads, heads, k_dim, v_dim] =
                    [k_heads, heads, k_dim, v_dim].map(|size| size as usize);
                let scale = 0.7;
                let sizes = Scan { k_heads, heads, k_dim, v_dim, channel_decay, scale };
                let beta = of(&|token| token.beta.iter().map(|&beta| vec![beta]).collect());
                let inputs = ScanInputs {
                    q: &of(&|token| token.q.clone()),
                    k: &of(&|token| token.k.clone()),
                    v: &of(&|token| token.v.clone()),
                    g: &of(&|token| token.g.clone()),
                    // Layers with and without the delta rule.
                    beta: (layer != 1).then_some(&beta),
                };
                scan(&sizes, &inputs, spec, None, &mut workspace, &Threads(2))?
            }
        };
        outputs.extend(OnCpu::rows(&out));
        Ok(rows)
    }

    fn alone(layer: usize, config: RecurrentLayer, text: &[Token]) -> Rows {
        let n = text.len() as i32;
        let cache = CacheConfig {
            layers: Vec::new(),
            recurrent_layers: vec![config],
            ..CacheConfig::uniform(0, 1, 1, n)
        };
        let mut cache = CellsCache::<CpuStore>::contiguous(cache).unwrap();
        cache.begin(&(0..n).collect::<Vec<_>>()).unwrap();
        let mut outputs = Rows::new();
        cache
            .update_recurrent(0, &mut |spec| Self::planned(layer, config, text, spec, &mut outputs))
            .unwrap();
        cache.commit().unwrap();
        outputs
    }
}

#[test]
fn kernels_give_the_bits_of_a_text_that_ran_in_one_step() {
    texts_run_as_if_alone::<OnCpu, CpuKernels>(120);
}

/// An error at a boundary: at a position where the state of a recurrence becomes an anchor, or where a step begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Planted {
    /// No error: the plan is cut into more chains, which must give the same bits.
    Cut,
    /// As [`Cut`](Self::Cut), but the token after a boundary reads the row of another token than the one before it.
    CutWithAnotherRow,
    /// An anchor lacks the last of its 64 rows.
    FoldOf63,
    /// An anchor has one token too many: the one after the boundary.
    LateFold,
    /// The anchor of the block before is stored.
    OldAnchor,
    /// The sums of decays do not start again at the boundary.
    DecaysRunOn,
    /// A convolution skips the column before a step.
    SkippedColumn,
    /// The columns before a step are in reverse order.
    ReversedColumns,
    /// The rows since the anchor are in reverse order.
    ReversedRows,
}

thread_local! {
    static PLANTED: Cell<Planted> = const { Cell::new(Planted::Cut) };
}

/// The kernels of the CPU, with the error [`PLANTED`] in the steps of a cache. Texts that run alone have no error.
struct WithError;

impl Kernels<OnCpu> for WithError {
    fn planned(
        layer: usize,
        config: RecurrentLayer,
        tokens: &[Token],
        spec: &RecurrentSpec<View>,
        outputs: &mut Rows,
    ) -> Result<RecurrentRows<Tensor>> {
        let mut plan = (*spec.plan).clone();
        let planted = PLANTED.get();
        match planted {
            Planted::Cut => plan.chains = cut(&plan, 0),
            Planted::CutWithAnotherRow => plan.chains = cut(&plan, 1),
            _ => plan.chains.iter_mut().for_each(|chain| misread(planted, config, chain)),
        }
        // All rows and anchors are returned, because the errors need some that are not stored.
        plan.stored = (0..tokens.len()).collect();
        plan.folds = (0..plan.folds.len() as i32).map(Some).collect();
        let all = RecurrentSpec { plan: Arc::new(plan), ..spec.clone() };
        let made = CpuKernels::planned(layer, config, tokens, &all, outputs)?;
        let mut rows = made.rows.each_ref().map(|rows| rows.as_ref().map(OnCpu::rows));
        let mut anchors = made.anchors.as_ref().map_or(Rows::new(), OnCpu::rows);
        if let [Some(keys), Some(updates)] = &mut rows {
            misfold(planted, config, spec, keys, updates, &mut anchors);
        }
        let plan = &spec.plan;
        let stored = |rows: Rows| -> Tensor {
            OnCpu::tensor(&plan.stored.iter().map(|&token| rows[token].clone()).collect::<Rows>())
        };
        let anchors = plan.folds.iter().zip(anchors).filter(|(slot, _)| slot.is_some());
        let anchors: Rows = anchors.map(|(_, anchor)| anchor).collect();
        Ok(RecurrentRows {
            rows: rows.map(|rows| rows.map(stored)),
            anchors: (!anchors.is_empty()).then(|| OnCpu::tensor(&anchors)),
        })
    }

    fn alone(layer: usize, config: RecurrentLayer, text: &[Token]) -> Rows {
        CpuKernels::alone(layer, config, text)
    }
}

/// Returns the chains of a plan, each cut after the first token of a block. That token's row is replaced by the row
/// `off` positions before it.
fn cut(plan: &RecurrentPlan, off: usize) -> Vec<Chain> {
    let mut chains = Vec::new();
    for chain in &plan.chains {
        let boundary = chain.base + BLOCK;
        let first = chain.tokens.start + (boundary - chain.position) as usize;
        if chain.folds.is_empty() || first + 1 >= chain.tokens.end {
            chains.push(chain.clone());
            continue;
        }
        let fold = chain.folds.start;
        let (mut before, mut after) = (chain.clone(), chain.clone());
        before.tokens.end = first + 1;
        before.folds.end = fold + 1;
        after.tokens.start = first + 1;
        after.folds.start = fold + 1;
        (after.position, after.base) = (boundary + 1, boundary);
        after.anchor = AnchorSource::Fold(fold);
        after.rows.extend((chain.tokens.start..=first).map(RowSource::Token));
        let last = after.rows.len() - 1;
        after.rows[last] = after.rows[last - off];
        chains.extend([before, after]);
    }
    chains
}

/// Changes the rows that a chain reads.
fn misread(planted: Planted, config: RecurrentLayer, chain: &mut Chain) {
    let lead = chain.rows.len().min(config.lead() as usize);
    let block = (chain.position - chain.base) as usize;
    let since = |n: usize| chain.rows.len() - n;
    match (planted, config) {
        (Planted::SkippedColumn, RecurrentLayer::Convolution { .. }) if lead > 0 => {
            let earliest = chain.rows[0];
            chain.rows.pop();
            chain.rows.insert(0, earliest);
        }
        (Planted::ReversedColumns, RecurrentLayer::Convolution { .. }) => {
            let from = since(lead);
            chain.rows[from..].reverse();
        }
        (Planted::ReversedRows, RecurrentLayer::Recurrence { .. }) => {
            let from = since(block);
            chain.rows[from..].reverse();
        }
        _ => {}
    }
}

/// Changes the anchors that a step of a recurrence stores, and the decays in its rows.
fn misfold(
    planted: Planted,
    config: RecurrentLayer,
    spec: &RecurrentSpec<View>,
    keys: &Rows,
    updates: &mut Rows,
    anchors: &mut Rows,
) {
    let RecurrentLayer::Recurrence { k_heads, heads, v_dim, .. } = config else {
        return;
    };
    let [k_heads, heads, v_dim] = [k_heads, heads, v_dim].map(|size| size as usize);
    let held = spec.rows.each_ref().map(|view| view.as_ref().map_or(Rows::new(), OnCpu::view));
    let states = spec.anchors.as_ref().map_or(Rows::new(), OnCpu::view);
    // The product of a row's key and update.
    let product = |key: &Row, update: &Row, head: usize, at: usize| {
        key[head * k_heads / heads][at / v_dim] * update[head][at % v_dim]
    };
    let (right, right_updates) = (anchors.clone(), updates.clone());
    for chain in &spec.plan.chains {
        for fold in chain.folds.clone() {
            let boundary = chain.base + (fold - chain.folds.start) as i32 * BLOCK + BLOCK;
            let token = chain.tokens.start + (boundary - chain.position) as usize;
            let last = match boundary > chain.position {
                true => RowSource::Token(token - 1),
                false => chain.rows[chain.rows.len() - 1],
            };
            let (key, update) = match last {
                RowSource::Token(at) => (&keys[at], &right_updates[at]),
                RowSource::Slot(at) => (&held[0][at as usize], &held[1][at as usize]),
            };
            for (head, state) in anchors[fold].iter_mut().enumerate() {
                for (at, state) in state.iter_mut().enumerate() {
                    match planted {
                        Planted::FoldOf63 => *state -= product(key, update, head, at),
                        Planted::LateFold => {
                            let next = &right_updates[token];
                            let decays = &next[head][v_dim..];
                            let decay = decays[(at / v_dim).min(decays.len() - 1)];
                            *state = *state * decay.exp() + product(&keys[token], next, head, at);
                        }
                        Planted::OldAnchor => {
                            let source = match fold > chain.folds.start {
                                true => AnchorSource::Fold(fold - 1),
                                false => chain.anchor,
                            };
                            *state = match source {
                                AnchorSource::Zero => 0.0,
                                AnchorSource::Slot(slot) => states[slot as usize][head][at],
                                AnchorSource::Fold(fold) => right[fold][head][at],
                            };
                        }
                        _ => {}
                    }
                }
            }
            if planted == Planted::DecaysRunOn {
                for row in &mut updates[token..chain.tokens.end.min(token + BLOCK as usize)] {
                    for (row, before) in row.iter_mut().zip(update) {
                        let decays = row[v_dim..].iter_mut().zip(&before[v_dim..]);
                        decays.for_each(|(decay, before)| *decay += before);
                    }
                }
            }
        }
    }
}

/// Returns whether one of these seeds finds the error.
fn is_found(planted: Planted, seeds: u64) -> bool {
    PLANTED.set(planted);
    (0..seeds).any(|seed| first_difference::<OnCpu, WithError>(seed).is_some())
}

#[test]
fn planted_errors_at_boundaries_are_found() {
    assert!(!is_found(Planted::Cut, 20), "a plan in more chains gives the same bits");
    for planted in [
        Planted::CutWithAnotherRow,
        Planted::FoldOf63,
        Planted::LateFold,
        Planted::OldAnchor,
        Planted::DecaysRunOn,
        Planted::SkippedColumn,
        Planted::ReversedColumns,
        Planted::ReversedRows,
    ] {
        assert!(is_found(planted, 20), "{planted:?} is not found");
    }
}
