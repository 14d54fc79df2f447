//! Storage formats of keys and values in the kernels.

use etkv_core::KvFormat;

use crate::step::mask::TILE;

/// Returns the bytes of shared memory of a tile of keys and values, as in the kernel.
pub(crate) fn stage_bytes(keys: Option<KvFormat>, values: Option<KvFormat>, dim: usize) -> usize {
    let tile = |format: Option<KvFormat>, alignment: usize| {
        let packing = format.and_then(KvFormat::packing);
        let row = packing.map_or(2 * dim, |packing| dim * packing.bits / 8).next_multiple_of(16);
        // Rows are spaced so that threads read them from different banks.
        let pitch = if row % alignment == 0 { row + 16 } else { row };
        let scales = packing.map_or(0, |packing| {
            let offset = if packing.has_offsets { 2 } else { 0 };
            dim / packing.group_of(dim) * (packing.scale.bytes() + offset)
        });
        (TILE * (pitch + scales)).next_multiple_of(16)
    };
    tile(keys, 128) + tile(values, 32)
}

/// Returns the CUDA type of a pool's format.
pub(crate) fn type_of(format: Option<KvFormat>) -> String {
    let name = match format {
        None | Some(KvFormat::F32 | KvFormat::F16 | KvFormat::Bf16) => "Plain",
        Some(KvFormat::Affine { bits, group }) => return format!("etkv::Affine<{bits}, {group}>"),
        Some(KvFormat::Mxfp8) => "Mxfp8",
        Some(KvFormat::Mxfp4) => "Mxfp4",
        Some(KvFormat::Nvfp4) => "Nvfp4",
        Some(KvFormat::RowInt4) => "RowInt4",
        Some(KvFormat::RowFp4) => "RowFp4",
    };
    format!("etkv::{name}")
}
