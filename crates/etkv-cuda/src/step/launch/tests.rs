use super::*;
use crate::step::plan::{Buffer, Element, Gate, Norm, PackedWeight};

const H100: Limits = Limits { processors: 132, block_shared: 232_448, processor_shared: 233_472 };

fn plan(tokens: usize) -> Plan {
    Plan::new(Element::Bf16, tokens, Vec::new(), Vec::new())
}

fn product(inner: usize, outputs: usize) -> Product {
    let weight = Weight::Plain(Address(16));
    let norm = Some(Norm { weight: None, wide: false, eps: 0.0 });
    Product { norm, ..Product::plain(Buffer(0), weight, inner, outputs, Buffer(1)) }
}

#[test]
fn rows_that_are_normalized_fit_shared_memory() {
    let of = |tokens, product: &Product| ProductShape::of(&plan(tokens), product, H100);
    let few = |blocks, elements: usize| {
        let (kernel, threads) = (ProductKernel::Few, 256);
        ProductShape { kernel, blocks, threads, shared: 2 * elements }
    };
    let row = |team, blocks, elements| {
        let kernel = ProductKernel::Row { team };
        ProductShape { kernel, ..few(blocks, elements) }
    };
    assert_eq!(of(1, &product(2048, 2560)), Ok(row(1, 160, 2080)));
    assert_eq!(of(1, &product(2048, 128_256)), Ok(row(1, 264, 2080)));
    assert_eq!(of(2, &product(2056, 2560)), Ok(few(160, 4176)));
    assert_eq!(of(16, &product(2056, 128_256)), Ok(few(264, 33_408)));
    assert_eq!(of(16, &product(6144, 4096)), Ok(few(132, 98_816)));
    let text = of(16, &product(8192, 4096)).unwrap_err().to_string();
    assert!(text.contains("131584 elements") && text.contains("107776 or fewer"), "{text}");
    let last = Product { last_row: true, ..product(8192, 4096) };
    assert_eq!(of(16, &last), Ok(row(1, 256, 8224)));
    let gated = Product { gate: Some(Gate::Silu), ..product(2048, 1000) };
    assert_eq!(of(1, &gated), Ok(row(1, 125, 2080)));
    // All numbers of rows use the same kernel.
    let at = Address(16);
    let packed = PackedWeight { codes: at, scales: at, biases: at, bits: 4, group: 64 };
    let packed = Product { weight: Weight::Packed(packed), ..product(2048, 2560) };
    assert_eq!(of(1, &packed), Ok(few(160, 2080)));
    assert_eq!(of(16, &packed), Ok(few(160, 33_280)));
}

#[test]
fn rings_take_what_fits_them() {
    let of = |tokens, product: &Product| ProductShape::of(&plan(tokens), product, H100).unwrap();
    let tiled = |blocks, shared| {
        let (kernel, threads) = (ProductKernel::Tiled, 512);
        ProductShape { kernel, blocks, threads, shared }
    };
    let held = [16 * (8192 + 1024 + 32), 16 * (8192 + 2048 + 64)];
    assert_eq!(of(2, &product(2048, 1024)), tiled(64, held[0]));
    assert_eq!(of(16, &product(2048, 128_256)), tiled(132, held[1]));
    let gated = Product { gate: Some(Gate::Silu), ..product(2048, 1000) };
    assert_eq!(of(8, &gated), tiled(125, held[0]));
    // Long rows that are not normalized.
    let plain = Product { norm: None, ..product(8192, 2048) };
    assert_eq!(of(1, &plain).kernel, ProductKernel::Row { team: 2 });
    assert_eq!(of(2, &plain), tiled(128, 16 * (9216 + 1024 + 32)));
    assert_eq!(of(16, &plain), tiled(128, 16 * (12_288 + 2048 + 64)));
    assert_eq!(of(2, &product(8192, 2048)).kernel, ProductKernel::Few);
    // Weights that are not aligned to 16 bytes, and devices with less shared memory.
    let misplaced = Product { weight: Weight::Plain(Address(8)), ..plain };
    assert_eq!(of(16, &misplaced).kernel, ProductKernel::Few);
    let small = Limits { processors: 82, block_shared: 101_376, processor_shared: 102_400 };
    let shape = ProductShape::of(&plan(16), &plain, small).unwrap();
    assert_eq!(shape.kernel, ProductKernel::Few);
}
