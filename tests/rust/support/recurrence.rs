//! A convolution and a recurrence from first principles, in float32 and in a fixed order. They are computed over a
//! whole text, and by the plan of a step. If the plan is right, both give the same bits.

use etkv_core::bookkeeping::{AnchorSource, RecurrentPlan, RowSource, BLOCK};
use etkv_core::{RecurrentLayer, RecurrentRows, RecurrentSpec, Result};

use crate::backend::{Backend, Tensor};
use crate::oracle::{Row, Rows};
use crate::Rng;

/// A token of a text. Its number determines its inputs in every layer.
pub type Token = u64;

/// The data that a layer keeps of a token: the two parts of its row.
type Part = [Row; 2];

/// The kernels of recurrent layers in a test.
pub trait Kernels<B: Backend>: 'static {
    /// Computes a layer of a step by its plan. Adds the outputs of the tokens to `outputs`.
    fn planned(
        layer: usize,
        config: RecurrentLayer,
        tokens: &[Token],
        spec: &RecurrentSpec<<B::Store as etkv_core::Store>::View>,
        outputs: &mut Rows,
    ) -> Result<RecurrentRows<Tensor<B>>>;

    /// Returns the outputs of a layer for a text that runs alone, from its beginning.
    fn alone(layer: usize, config: RecurrentLayer, text: &[Token]) -> Rows;
}

/// The kernels of this file.
pub struct Plain;

impl<B: Backend> Kernels<B> for Plain {
    fn planned(
        layer: usize,
        config: RecurrentLayer,
        tokens: &[Token],
        spec: &RecurrentSpec<<B::Store as etkv_core::Store>::View>,
        outputs: &mut Rows,
    ) -> Result<RecurrentRows<Tensor<B>>> {
        planned::<B>(layer, config, tokens, spec, outputs)
    }

    fn alone(layer: usize, config: RecurrentLayer, text: &[Token]) -> Rows {
        alone(layer, config, text)
    }
}

/// The inputs of one token in a layer. A convolution has only `k`.
pub struct Inputs {
    pub q: Row,
    pub k: Row,
    pub v: Row,
    /// Log decays, and write strengths, for each head.
    pub g: Row,
    pub beta: Vec<f32>,
}

fn random(rng: &mut Rng, heads: usize, dim: usize) -> Row {
    (0..heads).map(|_| (0..dim).map(|_| (rng.unit() * 2.0 - 1.0) as f32).collect()).collect()
}

/// The sizes of a layer: heads of keys and of values, and elements of each.
#[derive(Clone, Copy)]
struct Sizes {
    k_heads: usize,
    heads: usize,
    k_dim: usize,
    v_dim: usize,
    decays: usize,
}

impl Sizes {
    fn of(layer: RecurrentLayer) -> Self {
        match layer {
            RecurrentLayer::Convolution { channels, width } => Self {
                k_heads: 1,
                heads: 1,
                k_dim: channels as usize,
                v_dim: width as usize,
                decays: 0,
            },
            RecurrentLayer::Recurrence { k_heads, heads, k_dim, v_dim, channel_decay } => {
                let decays = if channel_decay { k_dim as usize } else { 1 };
                let [k_heads, heads, k_dim, v_dim] =
                    [k_heads, heads, k_dim, v_dim].map(|size| size as usize);
                Self { k_heads, heads, k_dim, v_dim, decays }
            }
        }
    }
}

/// Returns the inputs of a token to a layer of this config.
pub fn inputs_of(layer: usize, config: RecurrentLayer, token: Token) -> Inputs {
    inputs(layer, &Sizes::of(config), token)
}

fn inputs(layer: usize, sizes: &Sizes, token: Token) -> Inputs {
    let mut rng = Rng::new(token.wrapping_mul(31).wrapping_add(layer as u64 + 7));
    let q = random(&mut rng, sizes.k_heads, sizes.k_dim);
    let k = random(&mut rng, sizes.k_heads, sizes.k_dim);
    let v = random(&mut rng, sizes.heads, sizes.v_dim);
    let mut g = random(&mut rng, sizes.heads, sizes.decays);
    g.iter_mut().flatten().for_each(|g| *g = -0.2 * g.abs());
    let beta = (0..sizes.heads).map(|_| rng.unit() as f32).collect();
    Inputs { q, k, v, g, beta }
}

/// Returns the output of a convolution. It is a weighted sum of the token's column and the columns before it. The
/// weights depend on the distance.
fn convolve(columns: &[&[f32]], width: usize) -> Vec<f32> {
    let own = columns[columns.len() - 1];
    let seen = &columns[columns.len().saturating_sub(width)..];
    (0..own.len())
        .map(|channel| {
            let distances = (0..seen.len()).rev();
            seen.iter()
                .zip(distances)
                .fold(0.0, |sum, (column, far)| sum + column[channel] * (0.3 + far as f32 * 0.11))
        })
        .collect()
}

/// Computes the row and the output of a token from the last anchor before it and the rows since that anchor.
fn scan(sizes: &Sizes, anchor: &Row, rows: &[&Part], token: &Inputs) -> (Part, Row) {
    let share = sizes.heads / sizes.k_heads;
    let (mut updates, mut outputs) = (Row::new(), Row::new());
    for head in 0..sizes.heads {
        let k_head = head / share;
        let decay_of = |part: &Part| part[1][head][sizes.v_dim..].to_vec();
        let before = rows.last().map_or(vec![0.0; sizes.decays], |part| decay_of(part));
        let total: Vec<f32> = before.iter().zip(&token.g[head]).map(|(a, g)| a + g).collect();
        let decay = |from: &[f32], channel: usize| {
            let at = channel.min(sizes.decays - 1);
            (total[at] - from[at]).exp()
        };
        let zeros = vec![0.0; sizes.decays];
        let read = |x: &[f32]| -> Vec<f32> {
            let mut sums = vec![0.0f32; sizes.v_dim];
            for (channel, x) in x.iter().enumerate() {
                let weight = x * decay(&zeros, channel);
                for (sum, state) in sums.iter_mut().zip(&anchor[head][channel * sizes.v_dim..]) {
                    *sum += weight * state;
                }
            }
            for part in rows {
                let from = decay_of(part);
                let key = &part[0][k_head];
                let weight = (0..sizes.k_dim).fold(0.0, |sum, channel| {
                    sum + key[channel] * x[channel] * decay(&from, channel)
                });
                for (sum, u) in sums.iter_mut().zip(&part[1][head]) {
                    *sum += weight * u;
                }
            }
            sums
        };
        let seen = read(&token.k[k_head]);
        let u: Vec<f32> = seen
            .iter()
            .zip(&token.v[head])
            .map(|(seen, v)| token.beta[head] * (v - seen))
            .collect();
        let own = token.k[k_head].iter().zip(&token.q[k_head]).fold(0.0, |sum, (k, q)| sum + k * q);
        let output =
            read(&token.q[k_head]).iter().zip(&u).map(|(read, u)| read + own * u).collect();
        updates.push(u.into_iter().chain(total).collect());
        outputs.push(output);
    }
    ([token.k.clone(), updates], outputs)
}

/// Returns the anchor after a whole block.
fn fold(sizes: &Sizes, anchor: &Row, rows: &[&Part]) -> Row {
    assert_eq!(rows.len(), BLOCK as usize, "an anchor follows a whole block");
    let share = sizes.heads / sizes.k_heads;
    let head = |(head, state): (usize, &Vec<f32>)| {
        let total = &rows[rows.len() - 1][1][head][sizes.v_dim..];
        let at = |channel: usize| channel.min(sizes.decays - 1);
        let mut folded: Vec<f32> = state
            .iter()
            .enumerate()
            .map(|(n, value)| value * total[at(n / sizes.v_dim)].exp())
            .collect();
        for part in rows {
            let (key, update) = (&part[0][head / share], &part[1][head]);
            for (n, value) in folded.iter_mut().enumerate() {
                let (channel, column) = (n / sizes.v_dim, n % sizes.v_dim);
                let decay = (total[at(channel)] - update[sizes.v_dim + at(channel)]).exp();
                *value += decay * key[channel] * update[column];
            }
        }
        folded
    };
    anchor.iter().enumerate().map(head).collect()
}

fn zero(sizes: &Sizes) -> Row {
    vec![vec![0.0; sizes.k_dim * sizes.v_dim]; sizes.heads]
}

/// Returns the outputs of a layer for a text that runs alone, from its beginning.
pub fn alone(layer: usize, config: RecurrentLayer, text: &[Token]) -> Rows {
    let sizes = Sizes::of(config);
    let inputs: Vec<Inputs> = text.iter().map(|&token| inputs(layer, &sizes, token)).collect();
    if let RecurrentLayer::Convolution { width, .. } = config {
        let columns: Vec<&[f32]> = inputs.iter().map(|token| &token.k[0][..]).collect();
        let output = |at| vec![convolve(&columns[..=at], width as usize)];
        return (0..text.len()).map(output).collect();
    }
    let (mut anchor, mut block, mut outputs) = (zero(&sizes), Vec::<Part>::new(), Rows::new());
    for token in &inputs {
        if block.len() == BLOCK as usize {
            anchor = fold(&sizes, &anchor, &block.iter().collect::<Vec<_>>());
            block.clear();
        }
        let (row, output) = scan(&sizes, &anchor, &block.iter().collect::<Vec<_>>(), token);
        block.push(row);
        outputs.push(output);
    }
    outputs
}

/// Computes a layer of a step by its plan. Adds the outputs of the tokens to `outputs`.
pub fn planned<B: Backend>(
    layer: usize,
    config: RecurrentLayer,
    tokens: &[Token],
    spec: &RecurrentSpec<<B::Store as etkv_core::Store>::View>,
    outputs: &mut Rows,
) -> Result<RecurrentRows<Tensor<B>>> {
    let sizes = Sizes::of(config);
    let plan = &*spec.plan;
    assert_eq!(plan.n_tokens(), tokens.len());
    let [first, second] = spec.rows.each_ref().map(|view| view.as_ref().map(B::view));
    let states = spec.anchors.as_ref().map(B::view);
    let slot = |slot: i32| -> Part {
        let at = |rows: &Option<Rows>| {
            rows.as_ref().map_or(Row::new(), |rows| rows[slot as usize].clone())
        };
        [at(&first), at(&second)]
    };
    let mut fresh: Vec<Part> = Vec::new();
    let mut anchors: Vec<Row> = Vec::new();
    for chain in &plan.chains {
        assert_eq!(chain.tokens.start, fresh.len());
        let mut rows: Vec<Part> = chain
            .rows
            .iter()
            .map(|row| match *row {
                RowSource::Slot(at) => slot(at),
                RowSource::Token(token) => fresh[token].clone(),
            })
            .collect();
        if let RecurrentLayer::Convolution { width, .. } = config {
            for &token in &tokens[chain.tokens.clone()] {
                let column = inputs(layer, &sizes, token).k;
                rows.push([column.clone(), Row::new()]);
                let columns: Vec<&[f32]> = rows.iter().map(|part| &part[0][0][..]).collect();
                outputs.push(vec![convolve(&columns, width as usize)]);
                fresh.push([column, Row::new()]);
            }
            continue;
        }
        let mut anchor = match chain.anchor {
            AnchorSource::Zero => zero(&sizes),
            AnchorSource::Slot(at) => states.as_ref().unwrap()[at as usize].clone(),
            AnchorSource::Fold(fold) => anchors[fold].clone(),
        };
        let mut base = chain.base;
        assert_eq!(base % BLOCK, 0);
        let mut block = rows.split_off(rows.len() - (chain.position - base) as usize);
        for (&token, position) in tokens[chain.tokens.clone()].iter().zip(chain.position..) {
            if position == base + BLOCK {
                anchor = fold(&sizes, &anchor, &block.iter().collect::<Vec<_>>());
                anchors.push(anchor.clone());
                block.clear();
                base = position;
            }
            let token = inputs(layer, &sizes, token);
            let (row, output) = scan(&sizes, &anchor, &block.iter().collect::<Vec<_>>(), &token);
            block.push(row.clone());
            fresh.push(row);
            outputs.push(output);
        }
        assert_eq!(anchors.len(), chain.folds.end);
    }
    Ok(written::<B>(config, plan, &fresh, &anchors))
}

/// Returns the rows and anchors that a step stores.
fn written<B: Backend>(
    config: RecurrentLayer,
    plan: &RecurrentPlan,
    fresh: &[Part],
    anchors: &[Row],
) -> RecurrentRows<Tensor<B>> {
    let part = |n: usize| {
        let rows: Rows = plan.stored.iter().map(|&token| fresh[token][n].clone()).collect();
        config.row()[n].map(|_| B::tensor(&rows))
    };
    let stored = plan.folds.iter().zip(anchors).filter(|(slot, _)| slot.is_some());
    let anchors: Rows = stored.map(|(_, anchor)| anchor.clone()).collect();
    let anchors = (!anchors.is_empty()).then(|| B::tensor(&anchors));
    RecurrentRows { rows: [part(0), part(1)], anchors }
}
