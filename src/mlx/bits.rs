//! MLX's bitwise functions of integers, with broadcasting.

use mlx_rs::Array;

use super::call;
use crate::error::Result;

macro_rules! elementwise {
    ($($(#[$doc:meta])* $name:ident = $function:ident;)+) => {$(
        $(#[$doc])*
        pub fn $name(a: &Array, b: &Array) -> Result<Array> {
            // SAFETY: the handles outlive the call.
            call(|made, stream| unsafe {
                mlx_sys::$function(made, a.as_ptr(), b.as_ptr(), stream)
            })
        }
    )+};
}

elementwise! {
    /// Returns `a << b`.
    shl = mlx_left_shift;
    /// Returns `a >> b`.
    shr = mlx_right_shift;
    /// Returns `a & b`.
    and = mlx_bitwise_and;
    /// Returns `a | b`.
    or = mlx_bitwise_or;
}
