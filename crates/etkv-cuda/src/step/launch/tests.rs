use super::*;
use crate::step::plan::{Buffer, Element, Gate, Norm, Pool};

const H100: Limits = Limits { processors: 132, block_shared: 232_448, processor_shared: 233_472 };

fn plan(tokens: usize) -> Plan {
    Plan {
        element: Element::Bf16,
        tokens,
        buffers: Vec::new(),
        launches: Vec::new(),
        logits: None,
        overlap: false,
        attention_blocks: None,
    }
}

fn product(inner: usize, outputs: usize) -> Product {
    Product {
        x: Buffer(0),
        last_row: false,
        weight: Address(16),
        inner,
        outputs,
        bias: None,
        norm: Some(Norm { weight: None, eps: 0.0 }),
        gate: None,
        plus: None,
        heads: None,
        out: Buffer(1),
    }
}

#[test]
fn rows_that_are_normalized_fit_shared_memory() {
    let of = |tokens, product: &Product| ProductShape::of(&plan(tokens), product, H100);
    let shape = |blocks, shared| ProductShape { blocks, shared, is_row: false };
    let row = |blocks, shared| ProductShape { is_row: true, ..shape(blocks, shared) };
    assert_eq!(of(1, &product(2048, 2560)), Ok(row(160, 2080)));
    assert_eq!(of(1, &product(2048, 128_256)), Ok(row(264, 2080)));
    assert_eq!(of(2, &product(2048, 2560)), Ok(shape(160, 4160)));
    assert_eq!(of(16, &product(2048, 128_256)), Ok(shape(264, 33_280)));
    assert_eq!(of(16, &product(6144, 4096)), Ok(shape(132, 98_816)));
    let text = of(16, &product(8192, 4096)).unwrap_err().to_string();
    assert!(text.contains("131584 elements") && text.contains("107776 or fewer"), "{text}");
    let last = Product { last_row: true, ..product(8192, 4096) };
    assert_eq!(of(16, &last), Ok(row(256, 8224)));
    let plain = Product { norm: None, ..product(8192, 2048) };
    assert_eq!(of(16, &plain), Ok(shape(128, 0)));
    let gated = Product { gate: Some(Gate::Silu), ..product(2048, 1000) };
    assert_eq!(of(1, &gated), Ok(row(125, 2080)));
}

#[test]
fn attention_is_divided_among_the_processors() {
    let pool = |capacity| Pool { address: Address(16), capacity };
    let of = |tokens, n_q, n_kv, head_dim, capacity| {
        let attend = Attend {
            q: Buffer(0),
            keys: pool(capacity),
            values: pool(capacity),
            n_q,
            n_kv,
            head_dim,
            scale: 1.0,
            out: Buffer(1),
        };
        AttendShape::of(&plan(tokens), &attend, H100).unwrap()
    };
    let llama = of(1, 32, 8, 64, 8192);
    assert_eq!((llama.grid, llama.bytes_shared), ([33, 8, 1], 36_864));
    assert_eq!((llama.floats, llama.counters), (33 * 8 * 16 * 66, 72));
    assert_eq!(of(16, 32, 8, 64, 8192).grid, [33, 8, 1]);
    assert_eq!(of(16, 9, 1, 64, 8192).grid, [64, 1, 3]);
    // No more slices than tiles.
    assert_eq!(of(1, 8, 2, 64, 65).grid, [2, 2, 1]);
    assert_eq!(of(1, 8, 2, 64, 1).grid, [1, 2, 1]);
    // More KV heads than blocks.
    assert_eq!(of(1, 512, 512, 64, 8192).grid, [1, 512, 1]);
    let wide = of(16, 8, 1, 256, 8192);
    assert_eq!(wide.source, Source::Attend { element: Element::Bf16, dim: 256, tiles: 1 });
    assert_eq!(wide.bytes_shared, 68_096);
}
