//! Describes the pools of a cache for the kernels.

use etkv_core::KvFormat;
use etkv_cuda::{Address, Element, PackedRows, Pool, PoolRows};
use mlx_rs::{Array, Dtype};

use super::{element_of, format_of};

/// The head dim must be a multiple of this number if the pool is packed or a separate kernel places the
/// heads.
pub const PLACED: usize = 32;

/// Returns whether the kernels support heads of `head_dim` elements in a format. A float format must be the
/// program's dtype.
pub fn takes(format: KvFormat, head_dim: usize, element: Element) -> bool {
    match format.is_float() {
        true => format == format_of(element),
        false => head_dim % PLACED == 0,
    }
}

/// Returns a pool of `n_kv` heads, whose rows have `head_dim` elements. Returns `None` if the kernels do not
/// support its buffers. `address` returns the address of an array's first element.
pub fn pool_at(
    &(format, ref buffers): &(KvFormat, Vec<&Array>),
    n_kv: usize,
    head_dim: usize,
    element: Element,
    address: impl Fn(&Array) -> Option<u64>,
) -> Option<Pool> {
    let capacity = usize::try_from(buffers.first()?.shape().get(2).copied()?).ok()?;
    let at = |array: &Array, width: usize, dtype: Dtype| {
        let fits = is_plane(array, [n_kv, capacity, width]) && array.dtype() == dtype;
        fits.then(|| address(array).map(Address)).flatten()
    };
    let Some(packing) = format.packing() else {
        let &[rows] = &buffers[..] else {
            return None;
        };
        (element_of(rows.dtype()) == Some(element)).then_some(())?;
        let rows = PoolRows::Plain(at(rows, head_dim, rows.dtype())?);
        return Some(Pool { rows, capacity });
    };
    let scale = if packing.scale.bytes() == 2 { Dtype::Float16 } else { Dtype::Uint8 };
    let groups = head_dim / packing.group_of(head_dim);
    let (codes, scales, offsets) = match buffers[..] {
        [codes, scales] if !packing.has_offsets => (codes, scales, None),
        [codes, scales, offsets] if packing.has_offsets => (codes, scales, Some(offsets)),
        _ => return None,
    };
    let rows = PackedRows {
        format,
        codes: at(codes, head_dim * packing.bits / 32, Dtype::Uint32)?,
        scales: at(scales, groups, scale)?,
        offsets: match offsets {
            Some(offsets) => Some(at(offsets, groups, Dtype::Float16)?),
            None => None,
        },
    };
    (head_dim % PLACED == 0).then_some(Pool { rows: PoolRows::Packed(rows), capacity })
}

/// Returns whether an array is `[1, heads, slots, width]` and row-major. The stride of an axis with one
/// element has no meaning, and may be any number after a step that wrote a single slot.
fn is_plane(array: &Array, [heads, slots, width]: [usize; 3]) -> bool {
    let shape = [1, heads, slots, width];
    let strides = [heads * slots * width, slots * width, width, 1];
    let is_shape = array.shape().iter().map(|&size| size as usize).eq(shape);
    let mut axes = array.strides().iter().zip(strides).zip(shape);
    is_shape && axes.all(|((&stride, expected), size)| size == 1 || stride == expected)
}

#[cfg(test)]
mod tests;
