//! Weights in MLX's packed float formats: numbers of few bits with a shared exponent or scale. No pass transforms
//! them. Matrices with a scale and a bias for each group are in [`quantized`](super::quantized).

use mlx_rs::{Array, Dtype};

use super::calls::{none, Arguments};
use super::many_rows;
use super::weights::Weights;
use crate::error::{fail, Result};
use crate::ir::{Affine, Packing, PackingMode};
use etkv::mlx::{call, optional_int};

/// MLX's packings: name, mode, size of a group, and bits.
const FLOATS: [(&str, PackingMode, i32, i32); 3] = [
    ("mxfp4", PackingMode::Mxfp4, 32, 4),
    ("mxfp8", PackingMode::Mxfp8, 32, 8),
    ("nvfp4", PackingMode::Nvfp4, 16, 4),
];

/// Returns a packing by its name, and whether it has biases.
pub fn packing(mode: &str, group_size: i32, bits: i32, has_biases: bool) -> Result<Packing> {
    if mode == "affine" {
        if !has_biases {
            fail!(Program, "expected biases with affine quantization, got none");
        }
        if !matches!(bits, 2 | 3 | 4 | 5 | 6 | 8) {
            fail!(Unsupported, "expected weights of 2, 3, 4, 5, 6 or 8 bits, got {bits}");
        }
        if !matches!(group_size, 32 | 64 | 128) {
            fail!(
                Unsupported,
                "expected quantization in groups of 32, 64 or 128, got {group_size}"
            );
        }
        return Ok(Affine { group_size, bits }.into());
    }
    let Some((_, kind, group, width)) = FLOATS.iter().find(|(name, ..)| *name == mode) else {
        fail!(Unsupported, "unknown quantization `{mode}`; available: affine, mxfp4, mxfp8, nvfp4");
    };
    if (group_size, bits) != (*group, *width) || has_biases {
        fail!(
            Program,
            "expected {mode} of {width} bits in groups of {group} without biases, got {bits} bits in \
             groups of {group_size}"
        );
    }
    Ok(Packing { mode: *kind, group_size, bits })
}

impl From<Affine> for Packing {
    fn from(Affine { group_size, bits }: Affine) -> Self {
        Self { mode: PackingMode::Affine, group_size, bits }
    }
}

/// Returns a tensor of a call, or an empty handle.
pub fn given(
    arguments: &Arguments,
    index: &mut usize,
    is_given: bool,
) -> Result<mlx_sys::mlx_array> {
    if !is_given {
        return Ok(none());
    }
    *index += 1;
    Ok(arguments.tensor(*index - 1)?.as_ptr())
}

pub fn run_dequantize(
    arguments: &Arguments,
    packing: Packing,
    [biases, global_scale]: [bool; 2],
    dtype: Option<Dtype>,
) -> Result<Array> {
    let (w, scales) = (arguments.tensor(0)?.as_ptr(), arguments.tensor(1)?.as_ptr());
    let mut next = 2;
    let biases = given(arguments, &mut next, biases)?;
    let global_scale = given(arguments, &mut next, global_scale)?;
    let dtype = mlx_sys::mlx_optional_dtype {
        value: dtype.unwrap_or(Dtype::Float32).into(),
        has_value: dtype.is_some(),
    };
    let (group, bits, mode) =
        (optional_int(packing.group_size), optional_int(packing.bits), packing.name());
    // SAFETY: the arrays are live, or empty handles.
    call(|made, stream| unsafe {
        mlx_sys::mlx_dequantize(
            made,
            w,
            scales,
            biases,
            group,
            bits,
            mode.as_ptr(),
            global_scale,
            dtype,
            stream,
        )
    })
}

pub fn run_matmul(
    arguments: &Arguments,
    packing: Packing,
    transpose: bool,
    biases: bool,
) -> Result<Array> {
    let [x, w, scales] = [0, 1, 2].map(|index| arguments.tensor(index));
    let biases = if biases { Some(arguments.tensor(3)?) } else { None };
    many_rows::product(x?, &Weights::new([w?, scales?], biases, packing), transpose)
}
