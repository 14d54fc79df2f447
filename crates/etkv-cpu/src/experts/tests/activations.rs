//! Tests of the activations.

use super::reference::function;
use super::{swiglu, FUNCTIONS};
use crate::experts::activation::{Activate, Activation};
use crate::linear::weights::ROWS;
use crate::simd::{with_simd, Instructions, Simd};

#[test]
fn functions_of_a_number() {
    for function_of in FUNCTIONS {
        for instructions in Instructions::available() {
            for alpha in [1.0, 1.702] {
                let activation =
                    Activation { function: function_of, gated: false, alpha, ..swiglu() };
                for start in (-640..640).step_by(ROWS) {
                    let mut x = [0f32; ROWS];
                    x.iter_mut().enumerate().for_each(|(i, x)| {
                        *x = (start + i as i32) as f32 / 32.0;
                    });
                    let given = x;
                    let (gates, ups) = (x.as_mut_ptr(), x.as_ptr());
                    // SAFETY: the machine has the instructions, and there is one row.
                    with_simd!(instructions, |S| unsafe {
                        S::enter(Activate { activation, gates, ups, n: 1 });
                    });
                    for (given, found) in given.iter().zip(x) {
                        let expected = function(&activation, f64::from(*given));
                        let error = (f64::from(found) - expected).abs();
                        assert!(
                            error <= 4e-7 * f64::from(given.abs()) + 1e-9,
                            "{function_of:?} of {given}: {found}, not {expected}"
                        );
                    }
                }
            }
        }
    }
}
