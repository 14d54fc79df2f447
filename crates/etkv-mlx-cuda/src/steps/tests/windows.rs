//! Steps of caches with windows. The tests identify the rows that a token sees by the rows' contents.

use super::*;
use etkv::mlx;

const POLICIES: [LayerPolicy; 4] = [
    LayerPolicy::Window { window: 5, sinks: 2 },
    LayerPolicy::Full,
    LayerPolicy::Window { window: 5, sinks: 2 },
    LayerPolicy::Window { window: 8, sinks: 0 },
];

/// The contents of a row, which identify it.
fn mark(sequence: i32, position: i32) -> f32 {
    (1000 * sequence + position) as f32
}

/// The host address of the keys of a layer. A row has 8 elements.
fn keys(step: &Step, layer: usize) -> *mut f32 {
    let [(_, keys), _] = step.store().unwrap().planes(layer).unwrap();
    // SAFETY: the handle is live, and the buffer is float32.
    unsafe { mlx_sys::mlx_array_data_uint8(keys[0].as_ptr()) }.cast_mut().cast()
}

/// Runs a step that writes its marks to its slots, as kernels do, and checks what each token sees. Each
/// sequence has all positions from 0.
fn check_step(cache: &mut MlxCache, sequences: &[i32], positions: &[i32]) -> usize {
    let groups = Groups::of(&cache.config().layers).unwrap();
    let mut step = Step::begin(cache, positions).unwrap();
    let rows = groups.place(&mut step).unwrap().unwrap();
    let mut n_masked = 0;
    for (layer, &policy) in POLICIES.iter().enumerate() {
        let rows = &rows[groups.of_layer()[layer]];
        let at = keys(&step, layer);
        for (t, &slot) in rows.slots.iter().enumerate() {
            // SAFETY: the buffer has the slot, and no other thread uses the buffer.
            unsafe { at.add(8 * slot as usize).write(mark(sequences[t], positions[t])) };
        }
        n_masked += usize::from(rows.mask.is_some());
        assert!(rows.mask.is_some() || policy == FULL);
        let seen = if rows.mask.is_some() { seen(rows) } else { seen_without(rows) };
        for (t, seen) in seen.into_iter().enumerate() {
            // SAFETY: the same as above.
            let mut found: Vec<f32> =
                seen.into_iter().map(|key| unsafe { at.add(8 * key).read() }).collect();
            found.sort_by(f32::total_cmp);
            let (sequence, own) = (sequences[t], positions[t]);
            let sees = |&position: &i32| match policy {
                LayerPolicy::Window { window, sinks } => {
                    position > own - window || position < sinks
                }
                _ => true,
            };
            let expected: Vec<f32> =
                (0..=own).filter(sees).map(|position| mark(sequence, position)).collect();
            assert_eq!(found, expected, "layer {layer}, position {own} of sequence {sequence}");
        }
    }
    step.commit(&[]).unwrap();
    n_masked
}

fn is_on_cpu() -> bool {
    !mlx::on_gpu().unwrap()
}

#[test]
fn tokens_of_a_sequence_see_their_windows_and_sinks() {
    let mut number = numbers(0x9e37_79b9_7f4a_7c15);
    let mut longest = 0;
    for _ in (0..20).filter(|_| is_on_cpu()) {
        let mut cache = ContiguousCache::new(with_policies(&POLICIES)).unwrap();
        for _ in 0..60 {
            let length = cache.length();
            let least = cache.rewindable_to().unwrap();
            let start = match number(30) {
                0 => 0,
                1..=5 if least < length => least + number((length - least) as usize) as i32,
                _ => length,
            };
            let n = (1 + number(6) as i32).min(CAPACITY - start);
            if n > 0 {
                let positions: Vec<i32> = (start..start + n).collect();
                // Three layers have windows, and therefore masks. The rows of full history are in order.
                assert_eq!(check_step(&mut cache, &vec![0; n as usize], &positions), 3);
                longest = longest.max(cache.length());
            }
        }
    }
    // Windows have slid several times.
    assert!(longest > 60 || !is_on_cpu(), "{longest}");
}

#[test]
fn tokens_of_several_sequences_see_their_windows_and_sinks() {
    let mut number = numbers(0x2545_f491_4f6c_dd1d);
    let mut n_steps = 0;
    for _ in (0..20).filter(|_| is_on_cpu()) {
        let mut cells = CellsCache::new(with_policies(&POLICIES)).unwrap();
        for _ in 0..50 {
            let sequence = number(3) as i32;
            let n = 1 + number(5) as i32;
            if number(12) == 0 {
                cells.seq_rm(sequence, 0..i32::MAX).unwrap();
            } else if cells.can_extend(n) {
                let shared = number(2) == 0;
                let of = |t| if shared { (sequence + t) % 3 } else { sequence };
                let sequences: Vec<i32> = (0..n).map(of).collect();
                let positions = positions(&cells, &sequences);
                cells.begin_step(&sequences).unwrap();
                check_step(&mut cells, &sequences, &positions);
                n_steps += 1;
            }
        }
    }
    assert!(n_steps > 300 || !is_on_cpu(), "{n_steps}");
}
