//! The kernel for any machine.

use super::IntegerTile;
use crate::linear::blocks::QUAD;
use crate::linear::weights::ROWS;

/// # Safety
/// The same as for [`IntegerTile::run`].
pub(super) unsafe fn run(tile: &IntegerTile) {
    let n = tile.n;
    let code_bytes = ROWS * tile.group * tile.codes.bits() / 8;
    let (size, (sharing, of_factors)) = (tile.stored.size(), tile.stored.shared());
    let is_biased = tile.stored.are_biased();
    for i in 0..n {
        let mut sums = [0.0f32; ROWS];
        for group in 0..tile.n_groups {
            // SAFETY: the caller upholds the contract.
            unsafe {
                let shared = sharing * (size + code_bytes) + of_factors;
                let factors = tile.weights.add(group / sharing * shared);
                let at = factors.add(of_factors + group % sharing * (size + code_bytes));
                let codes = std::slice::from_raw_parts(at.add(size), code_bytes);
                let quads = tile.inputs.cast::<[i8; QUAD]>().add(group * tile.group / QUAD * n + i);
                let start = *tile.starts.add(group * n + i);
                let mut dots = [if is_biased { 0 } else { start }; ROWS];
                for quad in 0..tile.group / QUAD {
                    let x = *quads.add(quad * n);
                    for (row, dot) in dots.iter_mut().enumerate() {
                        for (j, &x) in x.iter().enumerate() {
                            let code = match tile.codes.bits() {
                                8 => codes[(quad * ROWS + row) * QUAD + j],
                                _ => {
                                    let two = codes[(quad / 2 * ROWS + row) * QUAD + j];
                                    two >> (quad % 2 * 4) & 15
                                }
                            };
                            *dot += i32::from(tile.codes.number(code)) * i32::from(x);
                        }
                    }
                }
                let scale = *tile.scales.add(group * n + i);
                let [of_weights, biases] = tile.stored.all(at, factors);
                for (row, (sum, dot)) in sums.iter_mut().zip(dots).enumerate() {
                    if is_biased {
                        *sum = biases[row].mul_add(scale * start as f32, *sum);
                    }
                    *sum = (dot as f32).mul_add(of_weights[row] * scale, *sum);
                }
            }
        }
        // SAFETY: the caller upholds the contract.
        unsafe { tile.out.add(i * ROWS).cast::<[f32; ROWS]>().write_unaligned(sums) };
    }
}
