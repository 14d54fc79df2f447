//! Only the first step of a shape allocates memory.

mod counting;

use counting::allocations;
use etkv_core::KvFormat;
use etkv_cpu::attention::synthetic::{self, Random};
use etkv_cpu::attention::{attend, MaskRef, Output, Queries, Shape, Workspace};
use etkv_cpu::Parallel;

/// Runs the work of two threads in sequence, since starting threads would allocate.
struct InTurn;

impl Parallel for InTurn {
    fn threads(&self) -> usize {
        2
    }

    fn run(&self, count: usize, call: &(dyn Fn(usize) + Sync)) {
        (0..count).for_each(call);
    }
}

#[test]
fn a_step_of_the_same_shape_allocates_nothing() {
    let mut random = Random::new(1);
    let format = KvFormat::Affine { bits: 8, group: 64 };
    let k = synthetic::view(format, 3, 64, 2000, &mut random).unwrap();
    let v = synthetic::view(KvFormat::F16, 3, 64, 2000, &mut random).unwrap();
    for n_tokens in [1, 8, 100] {
        let queries = vec![0.5; 9 * n_tokens * 64];
        let mut numbers = vec![0.0; 9 * n_tokens * 64];
        let runs: Vec<_> = (0..n_tokens as u32).map(|i| i..1900 + i).collect();
        let ends: Vec<_> = (1..=n_tokens as u32).collect();
        let shape = Shape::contiguous(9, n_tokens, 64);
        let queries = Queries::of_f32(&queries, shape).unwrap();
        let mut out = Output::of_f32(&mut numbers, 9, n_tokens, 64).unwrap();
        let mask = MaskRef::Runs { runs: &runs, ends: &ends };
        let mut step = |work: &mut Workspace| {
            attend(work, &InTurn, &queries, &k, &v, mask, 0.125, &mut out).unwrap();
        };
        let first = allocations(|| step(&mut Workspace::new()));
        assert!(first > 0, "the first step allocates the workspace");
        let mut work = Workspace::new();
        step(&mut work);
        assert_eq!(allocations(|| (0..20).for_each(|_| step(&mut work))), 0, "{n_tokens} tokens");
    }
}
