use mlx_rs::ops::quantize;
use mlx_rs::random::normal;

use super::*;
use crate::error::Result;
use crate::program::generation::TextInputs;
use crate::program::ir::{Affine, Dim, InputSpec};

const CODES: Value = Value(0);
const BIAS: Value = Value(3);
const ROWS: i32 = 48;
const COLUMNS: i32 = 128;

/// A table of embeddings, and a product with it. Attention is not planned for here.
fn recipe(packing: Affine) -> Recipe {
    let weight = recipe::Weight::Packed(Packed {
        codes: CODES,
        scales: Value(1),
        biases: Value(2),
        packing,
    });
    let input = |value, name: &str, shape| InputSpec::Tensor {
        value: Value(value),
        name: name.to_owned(),
        shape,
        scalar_type: 4,
    };
    let inputs = [
        input(4, "ids", vec![Dim::Static(1), Dim::UpTo(None)]),
        input(5, "positions", vec![Dim::UpTo(None)]),
    ];
    let product = recipe::Product {
        x: 0,
        weight,
        bias: Some(BIAS),
        norm: None,
        gate: None,
        plus: None,
        heads: None,
        out: 1,
    };
    Recipe {
        parts: vec![Part::Embed { table: weight, out: 0 }, Part::Product(product)],
        n_buffers: 2,
        logits: 1,
        last_row_only: false,
        inputs: TextInputs::find(&inputs).unwrap(),
    }
}

/// The constants of the recipe.
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
            let places = Places { constants: (1..=7).collect(), pools: Vec::new() };
            let kind = Kind { tokens: 3, masked: false, copied: true, chosen: false };
            let plan = planner.plan(&recipe, &places, kind);
            let packed = |first| {
                Weight::Packed(etkv_cuda::Packed {
                    codes: Address(first),
                    scales: Address(first + 1),
                    biases: Address(first + 2),
                    bits: bits as usize,
                    group: group_size as usize,
                })
            };
            let [Launch::Embed(embed), Launch::Product(product)] = plan.launches[..] else {
                panic!("{:?}", plan.launches);
            };
            assert_eq!((embed.table, product.weight), (packed(1), packed(4)));
            assert_eq!((product.bias, product.inner), (Some(Address(7)), COLUMNS as usize));
            assert_eq!(planner.constants.len(), places.constants.len());
        }
        Ok(())
    })
    .unwrap();
}

/// Returns whether a recipe that says this packing is refused, once a constant is what `change` makes of it.
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
    // Other groups than the constants have, and bits that no kernel has.
    assert!(is_refused(Affine { group_size: 64, ..packing }, 0, same));
    assert!(is_refused(Affine { bits: 8, ..packing }, 0, same));
    assert!(is_refused(Affine { bits: 2, ..packing }, 0, same));
    let wide = |array: &Array| Ok(array.as_dtype(Dtype::Float32)?);
    assert!(is_refused(packing, 1, wide));
    assert!(is_refused(packing, 2, wide));
    assert!(is_refused(packing, 0, |array| Ok(array.as_dtype(Dtype::Int32)?)));
    // Biases that lie column by column, and scales that all rows share.
    assert!(is_refused(packing, 2, |array| {
        let columns = array.transpose_axes(&[1, 0])?.contiguous()?;
        Ok(columns.transpose_axes(&[1, 0])?)
    }));
    assert!(is_refused(packing, 1, |array| {
        let row = mlx::slice_axis(array, 0, 0, 1, 1)?;
        Ok(mlx_rs::ops::broadcast_to(&row, array.shape())?)
    }));
}
