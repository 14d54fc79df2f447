use super::*;
use etkv_core::KvFormat;

use crate::step::plan::{Address, Buffer, Element, PackedRows, Pool, PoolRows};

const H100: Limits = Limits { processors: 132, block_shared: 232_448, processor_shared: 233_472 };

fn shape(tokens: usize, n_q: usize, n_kv: usize, head_dim: usize, pool: Pool) -> AttendShape {
    let (q, out) = (Buffer(0), Buffer(1));
    let (group, keys, values, scale) = (0, pool, pool, 1.0);
    let attend = Attend { group, q, keys, values, n_q, n_kv, head_dim, scale, out };
    let plan = Plan::new(Element::Bf16, tokens, Vec::new(), Vec::new());
    AttendShape::of(&plan, &attend, H100).unwrap()
}

#[test]
fn attention_is_divided_among_the_processors() {
    let of = |tokens, n_q, n_kv, head_dim, capacity| {
        let rows = PoolRows::Plain(Address(16));
        shape(tokens, n_q, n_kv, head_dim, Pool { rows, capacity })
    };
    let llama = of(1, 32, 8, 64, 8192);
    assert_eq!((llama.grid, llama.bytes_shared), ([49, 8, 1], 55_296));
    assert_eq!((llama.floats, llama.merging), (49 * 8 * 16 * 66, [4, 8, 1]));
    // With many rows, a multiprocessor runs two blocks instead of three, and each has room for more tiles.
    let many = of(16, 32, 8, 128, 8192);
    assert_eq!((many.grid, many.bytes_shared), ([33, 8, 1], 3 * 34_816));
    // With fewer merging blocks, each has more threads and registers.
    let merges = (llama.merge, many.merge, of(64, 32, 8, 128, 8192).merge);
    assert_eq!(merges, (MergeKernel::Few, MergeKernel::Some, MergeKernel::Many));
    assert_eq!(of(1, 32, 8, 128, 8192).bytes_shared, 2 * 34_816);
    assert_eq!(of(16, 9, 1, 64, 8192).grid, [64, 1, 3]);
    // The number of slices is at most the number of tiles.
    assert_eq!(of(1, 8, 2, 64, 65).grid, [2, 2, 1]);
    assert_eq!(of(1, 8, 2, 64, 1).grid, [1, 2, 1]);
    // More KV heads than blocks.
    assert_eq!(of(1, 512, 512, 64, 8192).grid, [1, 512, 1]);
    let wide = of(16, 8, 1, 256, 8192);
    let element = Element::Bf16;
    assert_eq!(
        wide.source,
        Source::Attend { element, dim: 256, tiles: 1, row_warps: 4, blocks: 2, masked: false }
    );
    assert_eq!(wide.bytes_shared, 68_096);
}

#[test]
fn packed_pools_share_what_is_unpacked() {
    let at = Address(16);
    let format = KvFormat::Affine { bits: 4, group: 64 };
    let rows = PackedRows { format, codes: at, scales: at, offsets: Some(at) };
    let pool = Pool { rows: PoolRows::Packed(rows), capacity: 32_768 };
    let of = |tokens, head_dim| shape(tokens, 32, 8, head_dim, pool);
    let tiles = |shape: &AttendShape| match shape.source {
        Source::AttendPacked { row_tiles, blocks, stages, .. } => (row_tiles, blocks, stages),
        other => panic!("{other:?}"),
    };
    let one = of(1, 128);
    assert_eq!((tiles(&one), one.grid, one.bytes_shared), ((1, 4, 4), [64, 8, 1], 4 * 10_240));
    assert_eq!((tiles(&of(4, 128)), of(4, 128).grid), ((2, 3, 4), [49, 8, 1]));
    let eight = of(8, 128);
    assert_eq!((tiles(&eight), eight.grid), ((4, 2, 4), [33, 8, 1]));
    assert_eq!(eight.floats, 33 * 8 * 32 * 130);
    assert_eq!((of(16, 128).grid, of(64, 128).grid), ([33, 8, 1], [8, 8, 4]));
    assert_eq!((tiles(&of(16, 256)), of(64, 256).grid), ((2, 2, 4), [8, 8, 4]));
    assert_eq!(tiles(&of(1, 256)).0, 1);
}
