use etkv_cuda::CopiedRows;
use mlx_rs::ops::quantize;
use mlx_rs::random::normal;

use super::*;
use crate::steps::heads::RowNorm;
use crate::steps::testing::token_inputs;
use etkv::Result;
use etkv_mlx_program::ir::Affine;
use etkv_mlx_program::TextInputs;

const CODES: Value = Value(0);
const BIAS: Value = Value(3);
const ROWS: i32 = 48;
const COLUMNS: i32 = 128;

/// The layer groups of layers with full history.
fn groups(n_layers: usize) -> Arc<Groups> {
    let layers = etkv_core::CacheConfig::uniform(n_layers.max(1), 1, 64, 32).layers;
    Arc::new(Groups::of(&layers).unwrap())
}

/// Addresses of `n` constants, multiples of 64 from 64 on, and of the pools of layers with full history.
fn places(n: u64, pools: Vec<[Pool; 2]>) -> StepAddresses {
    let groups = groups(pools.len());
    StepAddresses { constants: (1..=n).map(|n| 64 * n).collect(), pools, groups }
}

fn kind(tokens: usize) -> Kind {
    Kind {
        tokens,
        masked: smallvec::smallvec![false],
        small_blocks: false,
        copied: CopiedRows::All,
        chosen: false,
    }
}

/// A table of embeddings, and a product with the table. There is no attention.
fn recipe(packing: Affine) -> Recipe {
    let weight = recipe::Weight::Packed(PackedConstants {
        codes: CODES,
        scales: Value(1),
        biases: Value(2),
        packing,
    });
    let product = recipe::Product { bias: Some(BIAS), ..recipe::Product::plain(0, weight, 1) };
    Recipe {
        parts: vec![Part::Embed { table: weight, scale: None, out: 0 }, Part::Product(product)],
        n_buffers: 2,
        logits: 1,
        logits_at: 0,
        tapped: Vec::new(),
        given: Vec::new(),
        last_row_only: false,
        inputs: TextInputs::find(&token_inputs(Value(4), Value(5))).unwrap(),
    }
}

fn constants(packing: Affine) -> Result<Vec<Option<Array>>> {
    let numbers = |shape: &[i32]| normal::<f32>(shape, None, None, None)?.as_dtype(Dtype::Bfloat16);
    let matrix = numbers(&[ROWS, COLUMNS])?;
    let (codes, scales, biases) = quantize(matrix, packing.group_size, packing.bits)?;
    let all = [codes, scales, biases, numbers(&[ROWS])?];
    for array in &all {
        array.eval()?;
    }
    Ok(all.map(Some).into())
}

#[test]
fn packed_weights_are_planned_for() {
    mlx::run(|| {
        for (group_size, bits) in [(32, 4), (64, 4), (128, 8)] {
            let packing = Affine { group_size, bits };
            let recipe = recipe(packing);
            let planner = Planner::of(&recipe, &constants(packing)?).unwrap();
            assert_eq!((planner.dtype, planner.vocabulary), (Dtype::Bfloat16, ROWS as usize));
            assert_eq!(planner.widths, [COLUMNS as usize, ROWS as usize]);
            assert_eq!(planner.n_ids, ROWS as usize);
            let places = places(7, Vec::new());
            let plan = planner.plan(&recipe, &places, &kind(3));
            let packed = |first: u64| {
                let [codes, scales, biases] = [0, 64, 128].map(|next| Address(first + next));
                Weight::Packed(etkv_cuda::PackedWeight {
                    codes,
                    scales,
                    biases,
                    bits: bits as usize,
                    group: group_size as usize,
                })
            };
            let [Launch::Embed(embed), Launch::Product(product)] = plan.launches[..] else {
                panic!("{:?}", plan.launches);
            };
            assert_eq!((embed.table, product.weight), (packed(64), packed(256)));
            assert_eq!((product.bias, product.inner), (Some(Address(448)), COLUMNS as usize));
            assert_eq!(planner.constants.len(), places.constants.len());
        }
        Ok(())
    })
    .unwrap();
}

/// Returns whether the planner refuses a recipe with this packing after `change` replaced a constant.
fn is_refused(said: Affine, index: usize, change: fn(&Array) -> Result<Array>) -> bool {
    mlx::run(|| {
        let mut constants = constants(Affine { group_size: 32, bits: 4 })?;
        let changed = constants[index].as_ref().map(change).transpose()?;
        changed.iter().try_for_each(Array::eval)?;
        constants[index] = changed;
        Ok(Planner::of(&recipe(said), &constants).is_none())
    })
    .unwrap()
}

#[test]
fn packed_weights_that_kernels_do_not_read_are_not_planned_for() {
    let packing = Affine { group_size: 32, bits: 4 };
    let same = |array: &Array| Ok(array.clone());
    assert!(!is_refused(packing, 0, same));
    // Groups or bits that do not match the constants, and bits that no kernel supports.
    assert!(is_refused(Affine { group_size: 64, ..packing }, 0, same));
    assert!(is_refused(Affine { bits: 8, ..packing }, 0, same));
    assert!(is_refused(Affine { bits: 2, ..packing }, 0, same));
    let wide = |array: &Array| Ok(array.as_dtype(Dtype::Float32)?);
    assert!(is_refused(packing, 1, wide));
    assert!(is_refused(packing, 2, wide));
    assert!(is_refused(packing, 0, |array| Ok(array.as_dtype(Dtype::Int32)?)));
    // Column-major biases, and scales that all rows share.
    assert!(is_refused(packing, 2, |array| {
        let columns = array.transpose_axes(&[1, 0])?.contiguous()?;
        Ok(columns.transpose_axes(&[1, 0])?)
    }));
    assert!(is_refused(packing, 1, |array| {
        let row = mlx::slice_axis(array, 0, 0, 1, 1)?;
        Ok(mlx_rs::ops::broadcast_to(&row, array.shape())?)
    }));
}

const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const HEADS: usize = 8;

fn zeros(shape: &[i32], dtype: Dtype) -> Result<Option<Array>> {
    let made = mlx_rs::ops::zeros_dtype(shape, dtype)?;
    made.eval()?;
    Ok(Some(made))
}

/// A recipe with one layer of 4 + 2 + 2 heads, and its planner. Only shapes matter.
fn decoder(k_norm: Option<RowNorm>) -> (Recipe, Planner) {
    let packing = Affine { group_size: 32, bits: 4 };
    let weight = |value| recipe::Weight::Plain { value: Value(value), transposed: false };
    let heads = LayerHeads {
        layer: 0,
        n_q: 4,
        n_kv: KV_HEADS,
        head_dim: HEAD_DIM,
        rotation: Some((Value(2), Dtype::Bfloat16)),
        rotated: HEAD_DIM,
        q_norm: None,
        k_norm,
    };
    let product = recipe::Product { heads: Some(heads), ..recipe::Product::plain(0, weight(1), 1) };
    let dtype = Some(Dtype::Bfloat16);
    let recipe = Recipe {
        parts: vec![
            Part::Embed { table: weight(0), scale: None, out: 0 },
            Part::Product(product),
            Part::Attend { layer: 0, q: 1, scale: 0.125, dtype, out: 2 },
            Part::Product(recipe::Product::plain(0, weight(0), 3)),
        ],
        n_buffers: 4,
        logits: 3,
        ..recipe(packing)
    };
    let planner = mlx::run(|| {
        let constants = [
            zeros(&[ROWS, COLUMNS], Dtype::Bfloat16)?,
            zeros(&[(HEADS * HEAD_DIM) as i32, COLUMNS], Dtype::Bfloat16)?,
            zeros(&[HEAD_DIM as i32 / 2], Dtype::Float32)?,
            zeros(&[HEAD_DIM as i32], Dtype::Bfloat16)?,
        ];
        Ok(Planner::of(&recipe, &constants))
    });
    let planner = planner.unwrap().unwrap();
    (recipe, planner)
}

fn plan_of(pools: [Pool; 2], k_norm: Option<RowNorm>) -> Plan {
    let (recipe, planner) = decoder(k_norm);
    planner.plan(&recipe, &places(5, vec![pools]), &kind(2))
}

fn pool(rows: PoolRows) -> Pool {
    Pool { rows, capacity: 256 }
}

#[test]
fn heads_of_plain_pools_are_stored_by_their_product() {
    let pools = [640, 1280].map(|at| pool(PoolRows::Plain(Address(at))));
    let plan = plan_of(pools, None);
    let [_, Launch::Product(product), Launch::Attend(attend), _] = plan.launches[..] else {
        panic!("{:?}", plan.launches);
    };
    let heads = product.heads.unwrap();
    assert_eq!((heads.n_q, heads.n_kv, heads.head_dim), (4, KV_HEADS, HEAD_DIM));
    assert_eq!(([heads.keys, heads.values], [attend.keys, attend.values]), (pools, pools));
    assert_eq!((product.out, attend.q, plan.buffers.len()), (Buffer(1), Buffer(1), 4));
}

#[test]
fn heads_of_packed_pools_are_placed() {
    let rows = etkv_cuda::PackedRows {
        format: KvFormat::Nvfp4,
        codes: Address(640),
        scales: Address(1280),
        offsets: None,
    };
    // The pool of values is packed, the pool of keys is not.
    let pools = [pool(PoolRows::Plain(Address(320))), pool(PoolRows::Packed(rows))];
    let plan = plan_of(pools, None);
    let [_, Launch::Product(product), Launch::PlaceHeads(place), Launch::Attend(attend), _] =
        plan.launches[..]
    else {
        panic!("{:?}", plan.launches);
    };
    assert_eq!((product.heads, product.out, place.x), (None, Buffer(4), Buffer(4)));
    assert_eq!(product.outputs, HEADS * HEAD_DIM);
    assert_eq!([place.heads.keys, place.heads.values], pools);
    assert_eq!((place.heads.n_q, place.heads.periods), (4, Some(Address(192))));
    assert_eq!((place.out, attend.q), (Buffer(1), Buffer(1)));
    assert_eq!(plan.buffers[4], 2 * HEADS * HEAD_DIM);
}

#[test]
fn caches_of_the_program_s_floats_and_of_codes_are_taken() {
    use KvFormat::{Bf16, Mxfp8, RowInt4, F16, F32};
    let (_, planner) = decoder(None);
    let affine = |group| KvFormat::Affine { bits: 4, group };
    for formats in [[Bf16; 2], [Bf16, Mxfp8], [affine(32), affine(64)], [RowInt4, Bf16]] {
        assert!(planner.can_store(formats), "{formats:?}");
    }
    for formats in [[F16; 2], [Bf16, F32], [F16, Mxfp8]] {
        assert!(!planner.can_store(formats), "{formats:?}");
    }
}

#[test]
fn heads_that_are_normalized_are_placed() {
    let pools = [640, 1280].map(|at| pool(PoolRows::Plain(Address(at))));
    let plan = plan_of(pools, Some(RowNorm { weight: Some(Value(3)), eps: 0.5, out_dtype: None }));
    let [_, Launch::Product(product), Launch::PlaceHeads(place), _, Launch::Product(head)] =
        plan.launches[..]
    else {
        panic!("{:?}", plan.launches);
    };
    assert!(product.heads.is_none());
    assert_eq!([place.heads.keys, place.heads.values], pools);
    // The order of the addresses is: the table, the weight, the periods, the norm, the head.
    let norm = Norm { weight: Some(Address(256)), wide: false, eps: 0.5 };
    assert_eq!((place.q_norm, place.k_norm), (None, Some(norm)));
    assert_eq!(
        (place.heads.periods, head.weight),
        (Some(Address(192)), Weight::Plain(Address(320)))
    );
}

/// The planner distinguishes norm weights in float32 from those in the program's dtype. Rows with a float32
/// weight must be converted.
#[test]
fn rows_are_normalized_with_weights_of_both_kinds() {
    let (bf16, f32) = (Dtype::Bfloat16, Dtype::Float32);
    let weight = recipe::Weight::Plain { value: Value(0), transposed: false };
    let planned = |out_dtypes: [Option<Dtype>; 2], scale| {
        let norm = |weight, out_dtype| RowNorm { weight: Some(Value(weight)), eps: 0.5, out_dtype };
        let normalize = recipe::Normalize {
            x: 0,
            norm: norm(1, out_dtypes[0]),
            residual: Some(0),
            out: 1,
            next: Some((norm(2, out_dtypes[1]), 2)),
        };
        let recipe = Recipe {
            parts: vec![
                Part::Embed { table: weight, scale: Some(Value(scale)), out: 0 },
                Part::Normalize(normalize),
            ],
            n_buffers: 3,
            logits: 2,
            ..recipe(Affine { group_size: 32, bits: 4 })
        };
        let planner = mlx::run(|| {
            let constants = [
                zeros(&[ROWS, COLUMNS], bf16)?,
                zeros(&[COLUMNS], f32)?,
                zeros(&[COLUMNS], bf16)?,
                zeros(&[], bf16)?,
            ];
            Ok(Planner::of(&recipe, &constants))
        });
        let places = places(4, Vec::new());
        planner.unwrap().map(|planner| planner.plan(&recipe, &places, &kind(2)))
    };
    let plan = planned([Some(bf16), None], 3).unwrap();
    let [Launch::Embed(embed), Launch::Normalize(rows)] = plan.launches[..] else {
        panic!("{:?}", plan.launches);
    };
    assert_eq!(embed.scale, Some(Address(128)));
    let norm = |at, wide| Norm { weight: Some(Address(at)), wide, eps: 0.5 };
    assert_eq!((rows.norm, rows.next), (norm(192, true), Some((norm(256, false), Buffer(2)))));
    assert_eq!((rows.x, rows.residual, rows.out), (Buffer(0), Some(Buffer(0)), Buffer(1)));
    assert_eq!((rows.inner, plan.buffers), (COLUMNS as usize, vec![2 * COLUMNS as usize; 3]));
    // Rows that stay float32, rows that become float32, and a scale of more than one number.
    assert!(planned([None, None], 3).is_none());
    assert!(planned([Some(bf16), Some(f32)], 3).is_none());
    assert!(planned([Some(bf16), None], 2).is_none());
}

#[test]
fn heads_that_turn_in_part_are_placed() {
    let pool = pool(PoolRows::Plain(Address(640)));
    let periods = Some(Address(64));
    let (keys, values, group) = (pool, pool, 0);
    let of =
        |rotated| Heads { group, n_q: 4, n_kv: 2, head_dim: 64, periods, rotated, keys, values };
    assert!(fits_product(&of(64), [None; 2]));
    assert!(!fits_product(&of(48), [None; 2]));
}

mod hidden;
