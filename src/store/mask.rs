//! Masks as boolean arrays.

use etkv_core::bookkeeping::MaskRuns;
use mlx_rs::ops::arange;
use mlx_rs::{Array, Dtype};

use crate::error::Result;
use crate::mlx;

/// The minimum number of elements of a mask that a GPU computes from its runs. For smaller masks, filling and copying
/// the bytes on the host costs no more than the few launches on the GPU.
const MIN: usize = 1 << 18;

/// The maximum number of elements of each of three temporary arrays. These arrays have an element for each query,
/// slot and run of a query. Larger masks are copied as bytes.
const MAX: usize = 8 << 20;

/// Returns the mask as an array, `[T, L]`.
pub fn array(mask: &MaskRuns) -> Result<Array> {
    match runs_to_compare(mask) {
        Some(most) if mlx::is_stream_on_gpu()? => of_runs(mask, most),
        _ => of_bytes(mask),
    }
}

/// Returns the maximum number of runs of a query if the GPU should compute the mask from runs, or `None` if bytes are
/// faster.
fn runs_to_compare(mask: &MaskRuns) -> Option<usize> {
    let elements = mask.n_tokens() * mask.n_slots();
    let most = (0..mask.n_tokens()).map(|query| mask.runs(query).len()).max()?;
    (elements >= MIN && (1..=MAX / elements).contains(&most)).then_some(most)
}

fn of_bytes(mask: &MaskRuns) -> Result<Array> {
    let bytes = mask.bytes()?;
    let shape = [mask.n_tokens() as i32, mask.n_slots() as i32];
    // SAFETY: the shape has as many elements as there are bytes. Each byte is 0 or 1, which is how MLX stores
    // booleans.
    let mask = unsafe { mlx::host_array(&bytes, &shape, Dtype::Bool) }?;
    // The mask is copied to the device, because every layer reads it.
    mlx::on_device(&mask)
}

/// Computes the mask on the device, for queries with at most `most` runs.
fn of_runs(mask: &MaskRuns, most: usize) -> Result<Array> {
    let n = mask.n_tokens();
    let (mut starts, mut ends) = (Vec::with_capacity(n * most), Vec::with_capacity(n * most));
    for query in 0..n {
        let runs = mask.runs(query);
        for at in 0..most {
            let run = runs.get(at).cloned().unwrap_or(0..0);
            starts.push(run.start as i32);
            ends.push(run.end as i32);
        }
    }
    let shape = [n as i32, most as i32, 1];
    let slots = arange::<_, i32>(0, mask.n_slots() as i32, None)?;
    let begun = slots.ge(mlx::on_device(&mlx::array_of(&starts, &shape)?)?)?;
    let before = slots.lt(mlx::on_device(&mlx::array_of(&ends, &shape)?)?)?;
    let seen = begun.logical_and(before)?;
    Ok(match most {
        1 => seen.squeeze_axes(&[1])?,
        _ => seen.any_axis(1, false)?,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use etkv_core::bookkeeping::{CellsBookkeeping, MaskPlan};

    use super::*;

    fn append(book: &mut CellsBookkeeping, sequences: &[i32], positions: &[i32]) {
        book.begin_step(sequences).unwrap();
        book.plan(positions).unwrap();
        book.commit().unwrap();
    }

    /// Returns the mask of a step of one token for each of these sequences.
    fn mask_of(book: &mut CellsBookkeeping, sequences: &[i32], positions: &[i32]) -> Arc<MaskRuns> {
        book.begin_step(sequences).unwrap();
        book.plan(positions).unwrap();
        let MaskPlan::Explicit(mask) = &book.plans()[0].mask else { panic!("no mask") };
        Arc::clone(mask)
    }

    /// Returns the bookkeeping of two sequences of `n` tokens, each in one run of cells.
    fn two_runs(capacity: i32, n: i32) -> CellsBookkeeping {
        let mut book = CellsBookkeeping::new(capacity, []);
        for sequence in [0, 1] {
            append(&mut book, &vec![sequence; n as usize], &(0..n).collect::<Vec<_>>());
        }
        book
    }

    fn expected(mask: &MaskRuns) -> Result<Vec<bool>> {
        Ok(mask.bytes()?.iter().map(|&byte| byte == 1).collect())
    }

    #[test]
    fn runs_make_the_array_that_bytes_make() {
        mlx::run(|| {
            // The cells are in one run, in two runs, and in five runs.
            let mut book = CellsBookkeeping::new(100, []);
            append(&mut book, &[0; 4], &[0, 1, 2, 3]);
            append(&mut book, &[1; 3], &[0, 1, 2]);
            for position in 0..5 {
                append(&mut book, &[2, 3], &[position, position]);
            }
            append(&mut book, &[1], &[3]);
            let mask = mask_of(&mut book, &[0, 1, 2], &[4, 4, 5]);
            let most = (0..3).map(|query| mask.runs(query).len()).max().unwrap();
            assert!(most > 1);
            let expected = expected(&mask)?;
            for made in
                [array(&mask)?, of_bytes(&mask)?, of_runs(&mask, most)?, of_runs(&mask, most + 2)?]
            {
                assert_eq!(made.shape(), [3, mask.n_slots() as i32]);
                assert_eq!(mlx::elements::<bool>(&made)?, expected);
            }
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn one_run_for_each_query_needs_no_axis_of_runs() {
        mlx::run(|| {
            let mask = mask_of(&mut two_runs(1000, 5), &[0, 1], &[5, 5]);
            assert_eq!(mask.runs(0).len(), 1);
            assert_eq!(mlx::elements::<bool>(&of_runs(&mask, 1)?)?, expected(&mask)?);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn small_masks_and_masks_of_many_runs_are_copied_as_bytes() {
        let in_turns = |rotates: i32, n: i32| {
            let mut book = CellsBookkeeping::new(1 << 20, []);
            for first in (0..rotates).map(|rotation| rotation * n) {
                let positions: Vec<i32> = (first..first + n).collect();
                append(&mut book, &vec![0; n as usize], &positions);
                append(&mut book, &vec![1; n as usize], &positions);
            }
            runs_to_compare(&mask_of(&mut book, &[0, 1], &[rotates * n, rotates * n]))
        };
        assert_eq!((in_turns(3, 1), in_turns(70, 1000)), (None, None));
        let mask = mask_of(&mut two_runs(1 << 20, 70_000), &[0, 1], &[70_000, 70_000]);
        assert!(runs_to_compare(&mask).is_some_and(|most| most <= 2));
    }
}
