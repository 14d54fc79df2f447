//! A test of the Rust allocations in a step of a loaded program.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use etkv_core::{CacheConfig, Session};

use super::*;
use crate::Passes;
use etkv::builders;
use etkv::MLX_BACKEND;

/// The system's allocator, with a counter for each thread. MLX does not use this allocator.
struct CountingAllocator;

thread_local! {
    static COUNT: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: it forwards all calls.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.set(COUNT.get() + 1);
        // SAFETY: as for this function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: as for this function.
        unsafe { System.dealloc(start, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// A host with memory for one output.
struct Room(Vec<u8>);

impl Host for Room {
    fn place(&mut self, _: usize, _: &[i32], n_bytes: usize) -> etkv_core::Result<&mut [u8]> {
        Ok(&mut self.0[..n_bytes])
    }

    fn set_integer(&mut self, _: usize, _: i64) -> etkv_core::Result<()> {
        panic!("an output is an integer");
    }
}

fn reshape(builder: &mut Builder, x: u32, shape: &[i64], out: u32) -> Node {
    let shape = Some(literals(builder, shape));
    node!(builder, ReshapeNode, ReshapeNodeArgs, [x: x, out: out], shape: shape)
}

fn concatenate(builder: &mut Builder, tensors: [u32; 2], out: u32) -> Node {
    let tensors = Some(builder.create_vector(&tensors.map(fb::Tid::new)));
    node!(builder, ConcatenateNode, ConcatenateNodeArgs, [out: out], tensors: tensors, axis: -1)
}

/// Splits `x`, `[1, T, 16]`, in halves.
fn split(builder: &mut Builder, x: u32, outs: [u32; 2]) -> Node {
    let outs = Some(builder.create_vector(&outs.map(fb::Tid::new)));
    let sizes = Some(literals(builder, &[8, 8]));
    node!(builder, SplitNode, SplitNodeArgs, [x: x], outs: outs, sizes: sizes, axis: -1)
}

/// Loads a program of `n` blocks of views, pieces and sums, and one layer of attention.
fn blocks(n: u32, session: &Session, passes: Passes) -> Program {
    let parts = Parts {
        constants: vec![("rows".to_owned(), vec![4, 8])],
        // 1: tokens, 2: positions.
        inputs: vec![(vec![1, OPEN], INT64), (vec![OPEN], INT64)],
        n_temporaries: 3 + 8 * n,
        outputs: vec![5 + 8 * n],
        ..Default::default()
    };
    let payload = parts.payload(|builder| {
        let mut nodes = vec![take(builder, 0, 1, 3)];
        for x in (0..n).map(|block| 3 + 8 * block) {
            nodes.extend([
                reshape(builder, x, &[1, -1, 2, 4], x + 1),
                transpose(builder, x + 1, &[0, 2, 1, 3], x + 2),
                add(builder, x + 2, x + 2, x + 3),
                transpose(builder, x + 3, &[0, 2, 1, 3], x + 4),
                reshape(builder, x + 4, &[1, -1, 8], x + 5),
                concatenate(builder, [x + 5, x], x + 6),
                split(builder, x + 6, [x + 7, x + 1]),
                add(builder, x + 7, x + 1, x + 8),
            ]);
        }
        let last = 3 + 8 * n;
        nodes.extend([expand(builder, last, last + 1), attend(builder, last + 1, 2, last + 2)]);
        vec![nodes]
    });
    let mut weights = Weights::of([("rows", &[1.0; 32])]);
    let mut options = LoadOptions::default();
    options.cache_key = Some(session.key().to_owned());
    options.passes = passes;
    Program::load(&payload, &mut weights, &options, None).unwrap()
}

/// Returns the number of allocations of a decode step, after a few such steps.
fn of_a_step(n: u32, passes: Passes) -> usize {
    let config = CacheConfig::uniform(1, 1, 8, 64);
    let session = Session::new(builders(), MLX_BACKEND, "contiguous", config).unwrap();
    let program = blocks(n, &session, passes);
    let (mut last, mut room) = (0, Room(vec![0; 1 << 12]));
    for position in 0..12i64 {
        let (token, position) = (2i64.to_ne_bytes(), position.to_ne_bytes());
        let inputs =
            [Argument::tensor(INT64, &[1, 1], &token), Argument::tensor(INT64, &[1], &position)];
        let before = COUNT.get();
        program.execute(&inputs, &[FLOAT32], &mut room).unwrap();
        last = COUNT.get() - before;
    }
    last
}

#[test]
fn instructions_allocate_nothing() {
    for passes in [Passes::Default, Passes::None] {
        let (few, many) = (of_a_step(2, passes), of_a_step(12, passes));
        println!("{passes:?}: {few} allocations of a step of 2 blocks, {many} of 12");
        assert_eq!(many, few, "{passes:?}: of 12 blocks, and of 2");
    }
}
