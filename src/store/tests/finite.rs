//! Few flags find which write of a step has a value that is not finite.

use super::*;
use crate::mlx::run;
use crate::store::finite::Finite;

/// Returns ones of this shape, except that the last element is `last`.
fn ones(heads: i32, n: i32, dim: i32, last: f32, dtype: Dtype) -> Result<Array> {
    let mut all = vec![1.0f32; (heads * n * dim) as usize];
    *all.last_mut().unwrap() = last;
    Ok(array(&all, &[1, heads, n, dim]).as_dtype(dtype)?)
}

#[test]
fn writes_of_one_shape_share_a_flag() {
    run(|| {
        let mut finite = Finite::default();
        assert!(finite.flags()?.is_empty());
        for heads in [2, 2, 3, 2] {
            finite.watch(&ones(heads, 4, 8, 1.0, Dtype::Float32)?, Dtype::Float16)?;
        }
        assert_eq!(finite.flags()?.len(), 2);
        assert_eq!(finite.flags()?.len(), 2, "they are made once");
        // Writes of other input or stored dtypes, and later writes.
        finite.watch(&ones(2, 4, 8, 1.0, Dtype::Float16)?, Dtype::Float16)?;
        finite.watch(&ones(2, 4, 8, 1.0, Dtype::Float32)?, Dtype::Bfloat16)?;
        finite.watch(&ones(2, 4, 8, 1.0, Dtype::Float32)?, Dtype::Float16)?;
        finite.watch(&ones(2, 4, 8, 1.0, Dtype::Float32)?, Dtype::Float16)?;
        assert_eq!(finite.flags()?.len(), 5);
        // Values of a prompt are not kept for a later flag.
        finite.watch(&ones(2, 65, 8, 1.0, Dtype::Float32)?, Dtype::Float16)?;
        finite.watch(&ones(2, 65, 8, 1.0, Dtype::Float32)?, Dtype::Float16)?;
        assert_eq!(finite.flags()?.len(), 7);
        mlx_rs::transforms::async_eval(finite.flags()?.iter())?;
        finite.wait()?;
        assert_eq!(finite.non_finite(), None);
        finite.clear();
        assert!(finite.flags()?.is_empty());
        Ok(())
    })
    .unwrap();
}

#[test]
fn the_first_write_that_is_not_finite_is_named() {
    // The number of heads, the number of tokens, and the dtype of the input values.
    let writes = [
        (2, 4, Dtype::Float32),
        (2, 65, Dtype::Float32),
        (2, 4, Dtype::Float32),
        (3, 4, Dtype::Float16),
        (2, 4, Dtype::Float32),
        (2, 65, Dtype::Float32),
    ];
    run(|| {
        for stored in [Dtype::Float32, Dtype::Float16, Dtype::Bfloat16] {
            for value in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e6, -1e6, 0.0, -0.0, 6e4] {
                for bad in 0..writes.len() {
                    for also in bad..writes.len() {
                        let mut finite = Finite::default();
                        for (at, &(heads, n, dtype)) in writes.iter().enumerate() {
                            let last = if at == bad || at == also { value } else { 1.0 };
                            finite.watch(&ones(heads, n, 8, last, dtype)?, stored)?;
                        }
                        let narrow =
                            |at: usize| stored == Dtype::Float16 || writes[at].2 == Dtype::Float16;
                        let fits = |at| value.abs() < 65520.0 || (!narrow(at) && value.is_finite());
                        let expected = [bad, also].into_iter().find(|&at| !fits(at));
                        let found = finite.non_finite();
                        assert_eq!(found, expected, "{value} in {bad} and {also}, {stored:?}");
                    }
                }
            }
        }
        Ok(())
    })
    .unwrap();
}
