use super::*;
use crate::steps::recipe::RowInput;

#[test]
fn tapped_rows_lie_side_by_side() {
    mlx::run(|| {
        let packing = Affine { group_size: 64, bits: 4 };
        let mut recipe = recipe(packing);
        let planner = Planner::of(&recipe, &constants(packing)?).unwrap();
        let sizes = [2 * ROWS as usize, 2 * COLUMNS as usize];
        // Two buffers of three rows. All bytes of a row have the same value, which differs between rows.
        let row = |buffer: usize, token: usize| vec![(10 * buffer + token) as u8; sizes[buffer]];
        let all = [0, 1].map(|buffer| (0..3).map(|token| row(buffer, token)).collect::<Vec<_>>());
        let tapped = all.concat().concat();
        recipe.tapped = vec![1, 0];
        for n in 1..=3 {
            let (rows, width) = planner.side_by_side(&recipe, &tapped, n);
            let expected = (0..n).map(|token| [row(0, token), row(1, token)].concat());
            assert_eq!(width, (ROWS + COLUMNS) as usize);
            assert!(*rows == expected.collect::<Vec<_>>().concat(), "{n} tokens");
        }
        recipe.tapped = vec![0];
        let alone = all[1].concat();
        let (rows, width) = planner.side_by_side(&recipe, &alone, 2);
        assert!(width == COLUMNS as usize && *rows == [row(1, 0), row(1, 1)].concat());
        recipe.tapped = Vec::new();
        assert_eq!(planner.side_by_side(&recipe, &[], 2).1, 0);
        recipe.tapped = vec![1, 0];
        let plan = planner.plan(&recipe, &places(7, Vec::new()), &kind(3));
        assert_eq!(plan.tapped, [Buffer(1), Buffer(0)]);
        Ok(())
    })
    .unwrap();
}

/// A draft: the product of the joined norms of embeddings and of input rows, blended with the input rows.
fn draft(packing: Affine, width: usize, dtype: Dtype) -> Recipe {
    let mut recipe = recipe(packing);
    let Some(Part::Product(mut product)) = recipe.parts.pop() else {
        panic!("{:?}", recipe.parts);
    };
    // Buffer 5 holds the joined rows.
    (product.x, product.out) = (5, 6);
    let given = |value, width, buffer| RowInput { value: Value(value), width, dtype, buffer };
    let rows = |x, out| {
        let norm = RowNorm { weight: None, eps: 0.5, out_dtype: None };
        Part::Normalize(recipe::Normalize { x, norm, residual: None, out, next: None })
    };
    recipe.given = vec![given(6, width, 1), given(7, 1, 2)];
    recipe.parts.extend([
        rows(0, 3),
        rows(1, 4),
        Part::Join { x: vec![3, 4], out: 5 },
        Part::Product(product),
        Part::Blend { x: 6, y: 1, share: 2, out: 7 },
    ]);
    Recipe { n_buffers: 8, logits: 6, tapped: vec![7], ..recipe }
}

#[test]
fn drafts_of_given_rows_are_planned_for() {
    mlx::run(|| {
        let packing = Affine { group_size: 32, bits: 4 };
        // The embeddings fill 64 of the product's columns, and the input rows fill the others.
        let given = COLUMNS as usize - 64;
        let weight = |value| recipe::Weight::Plain { value: Value(value), transposed: false };
        let with = |width, dtype, rows: i32| -> Result<Option<Plan>> {
            let mut recipe = draft(packing, width, dtype);
            for part in &mut recipe.parts {
                match part {
                    Part::Embed { table, .. } => *table = weight(0),
                    Part::Product(product) => product.weight = weight(1),
                    _ => {}
                }
            }
            let numbers = |shape: &[i32]| zeros(shape, Dtype::Bfloat16);
            let constants =
                [numbers(&[ROWS, 64])?, numbers(&[rows, COLUMNS])?, None, numbers(&[rows])?];
            let planner = Planner::of(&recipe, &constants);
            let places = places(3, Vec::new());
            Ok(planner.map(|planner| planner.plan(&recipe, &places, &kind(3))))
        };
        let plan = with(given, Dtype::Bfloat16, given as i32)?.unwrap();
        let [_, Launch::Normalize(first), Launch::Normalize(second), Launch::Product(product), Launch::Blend(blend)] =
            plan.launches[..]
        else {
            panic!("{:?}", plan.launches);
        };
        let columns = |first| Some(etkv_cuda::Columns { first, width: COLUMNS as usize });
        assert_eq!((first.x, first.out, first.columns), (Buffer(0), Buffer(5), columns(0)));
        assert_eq!((second.x, second.out, second.columns), (Buffer(1), Buffer(5), columns(64)));
        assert_eq!((product.x, product.inner, product.outputs), (Buffer(5), 128, given));
        let (x, y, share, out) = (Buffer(6), Buffer(1), Buffer(2), Buffer(7));
        assert_eq!(blend, Blend { x, y, share, inner: given, out });
        assert_eq!((&plan.given[..], &plan.tapped[..]), (&[y, share][..], &[out][..]));
        assert_eq!([1, 2, 5, 7].map(|n| plan.buffers[n]), [3 * given, 3, 3 * 128, 3 * given]);
        // Rows of another dtype, rows too narrow for the product, and a product whose width differs from that
        // of the rows.
        assert!(with(given, Dtype::Float16, given as i32)?.is_none());
        assert!(with(given - 8, Dtype::Bfloat16, given as i32)?.is_none());
        assert!(with(given, Dtype::Bfloat16, given as i32 + 8)?.is_none());
        Ok(())
    })
    .unwrap();
}
