//! The kernel for any machine.

use super::IntegerTile;
use crate::linear::blocks::QUAD;
use crate::linear::weights::ROWS;

/// # Safety
/// The same as for [`IntegerTile::run`].
pub(super) unsafe fn run(tile: &IntegerTile) {
    let n = tile.n;
    let (start, code_bytes) =
        (tile.stored.size(), ROWS * tile.group / if tile.is_int4 { 2 } else { 1 });
    for i in 0..n {
        let mut sums = [0.0f32; ROWS];
        for group in 0..tile.n_groups {
            // SAFETY: the caller upholds the contract.
            unsafe {
                let at = tile.weights.add(group * (start + code_bytes));
                let of_group = std::slice::from_raw_parts(at, start + code_bytes);
                let codes = &of_group[start..];
                let quads = tile.inputs.cast::<[i8; QUAD]>().add(group * tile.group / QUAD * n + i);
                let mut dots = [*tile.starts.add(group * n + i); ROWS];
                for quad in 0..tile.group / QUAD {
                    let x = *quads.add(quad * n);
                    for (row, dot) in dots.iter_mut().enumerate() {
                        for (j, &x) in x.iter().enumerate() {
                            let code = match tile.is_int4 {
                                true => {
                                    let two = codes[(quad / 2 * ROWS + row) * QUAD + j];
                                    two >> (quad % 2 * 4) & 15
                                }
                                false => codes[(quad * ROWS + row) * QUAD + j],
                            };
                            *dot += i32::from(code) * i32::from(x);
                        }
                    }
                }
                let scale = *tile.scales.add(group * n + i);
                for (row, (sum, dot)) in sums.iter_mut().zip(dots).enumerate() {
                    let of_weights = tile.stored.of_row(of_group, row);
                    *sum = (dot as f32).mul_add(of_weights * scale, *sum);
                }
            }
        }
        // SAFETY: the caller upholds the contract.
        unsafe { tile.out.add(i * ROWS).cast::<[f32; ROWS]>().write_unaligned(sums) };
    }
}
