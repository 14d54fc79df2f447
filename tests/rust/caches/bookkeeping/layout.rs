//! The slots of rows, and the number of moves. Without the properties that are tested here, reads would still be
//! right, but would need masks, memory or copies.

use etkv_core::bookkeeping::{
    CellsBookkeeping, ContiguousBookkeeping, MaskPlan, Move, Slots, Window,
};
use etkv_core::Growth;

use super::step;

/// Returns the cells of one sequence's next `n` tokens in the first layer group.
fn cells(book: &mut CellsBookkeeping, sequence: i32, n: i32) -> Slots {
    step(book, &[sequence], n).0.swap_remove(0)
}

fn moved(from: &[i32], to: &[i32]) -> Vec<Move> {
    vec![Move { group: 0, from: Slots::of(from), to: Slots::of(to) }]
}

#[test]
fn slots_are_a_run_only_where_each_follows() {
    assert_eq!(Slots::of(&[3, 4, 5]), Slots::Run(3..6));
    assert_eq!(Slots::of(&[3, 5, 6]), Slots::List(vec![3, 5, 6]));
    assert_eq!(Slots::of(&[4, 3]), Slots::List(vec![4, 3]));
    for (slots, len, end) in [(&[][..], 0, 0), (&[7], 1, 8), (&[2, 9, 4], 3, 10)] {
        assert_eq!((Slots::of(slots).len(), Slots::of(slots).end()), (len, end), "{slots:?}");
        assert_eq!(Slots::of(slots).iter().collect::<Vec<_>>(), slots);
    }
}

#[test]
fn sequences_have_numbers_to_255() {
    let mut book = CellsBookkeeping::new(4, []);
    assert_eq!(cells(&mut book, 255, 1), Slots::Run(0..1));
    assert!(book.begin_step(&[256]).is_err() && book.begin_step(&[-1]).is_err());
}

/// A layer group uses all of its slots before it slides.
#[test]
fn a_full_window_has_all_of_its_slots() {
    let window = Window::new(8, 1, 3, 1000);
    let most = window.slots() - window.max_step_tokens();
    assert_eq!(window.allocated(Growth::Exact, most), most);
    assert_eq!(window.allocated(Growth::Exact, most + 1), window.slots());
}

#[test]
fn a_new_sequence_leaves_room_where_there_is_enough_for_both() {
    let mut book = CellsBookkeeping::new(400, []);
    assert_eq!(cells(&mut book, 0, 3), Slots::Run(0..3));
    assert_eq!(cells(&mut book, 1, 2), Slots::Run(67..69));
    assert_eq!(cells(&mut book, 0, 64), Slots::Run(3..67));

    let mut book = CellsBookkeeping::new(3 + 2 + 2 * 64 - 1, []);
    cells(&mut book, 0, 3);
    assert_eq!(cells(&mut book, 1, 2), Slots::Run(3..5));
}

/// If sequences took the first free cell, their cells would alternate once the room after each sequence is used up.
#[test]
fn sequences_that_decode_together_go_on_in_runs() {
    const SEQUENCES: i32 = 8;
    let sequences: Vec<i32> = (0..SEQUENCES).collect();
    let mut book = CellsBookkeeping::new(SEQUENCES * (100 + 200 + 64) + 200, []);
    sequences.iter().for_each(|&sequence| drop(cells(&mut book, sequence, 100)));
    for _ in 0..199 {
        step(&mut book, &sequences, 1);
    }
    book.begin_step(&sequences).unwrap();
    let plans = book.plan(&[299; SEQUENCES as usize]).unwrap();
    let MaskPlan::Explicit(seen) = &plans[0].mask else {
        panic!("expected a mask for several sequences");
    };
    for &sequence in &sequences {
        let runs = seen.runs(sequence as usize);
        assert_eq!(runs.iter().map(|run| run.len()).sum::<usize>(), 300);
        assert!(runs.len() <= 1 + 200 / 16, "sequence {sequence} is in {runs:?}");
    }
}

#[test]
fn a_window_of_one_sequence_is_one_run_that_moves_once_in_room_tokens() {
    let window = Window::new(8, 0, 3, 1000);
    let mut book = CellsBookkeeping::new(1000, [window]);
    let mut plain = ContiguousBookkeeping::new(1000, [Some(window)]);
    for position in 0..500 {
        let plan = plain.plan(&[position]).unwrap();
        let plans = book.plan(&[position]).unwrap();
        assert_eq!(plans[1], plain.group(0, &plan).unwrap(), "position {position}");
        assert_eq!(plans[1].mask, MaskPlan::None);
        let moves: Vec<(Slots, Slots)> =
            book.commit().unwrap().into_iter().map(|one| (one.from, one.to)).collect();
        let expected: Vec<(Slots, Slots)> =
            plain.commit(&plan).unwrap().into_iter().map(|one| (one.from, one.to)).collect();
        assert_eq!(moves, expected, "position {position}");
    }
}

#[test]
fn windows_move_only_when_they_slide() {
    let mut book = CellsBookkeeping::new(100, [Window::new(8, 0, 3, 100)]);
    step(&mut book, &[0], 2);
    step(&mut book, &[1], 2);
    book.seq_rm(0, 0..i32::MAX).unwrap();
    assert_eq!(step(&mut book, &[1], 1).1, []);
}

#[test]
fn every_sequence_of_a_step_slides() {
    let mut book = CellsBookkeeping::new(100, [Window::new(8, 0, 3, 100)]);
    for _ in 0..30 {
        step(&mut book, &[0, 1, 2], 1);
        let least = [0, 1, 2].map(|sequence| book.rewindable_to(sequence).unwrap());
        assert_eq!(least, [least[0]; 3]);
    }
    assert!(book.rewindable_to(0).unwrap() > 0);
}

#[test]
fn windows_also_slide_after_accepted_candidates() {
    let window = Window::new(8, 0, 3, 500);
    let mut book = CellsBookkeeping::new(500, [window]);
    for next in (0..300).step_by(3) {
        book.propose(0, &[-1, 0, 1]).unwrap();
        let plans = book.plan(&[next, next + 1, next + 2]).unwrap();
        assert!(plans[1].needed() <= window.slots(), "{:?}", plans[1]);
        book.commit().unwrap();
        book.commit_tree(0, &[0, 1, 2]).unwrap();
    }
}

#[test]
fn holes_are_filled_from_the_end() {
    let mut book = CellsBookkeeping::new(400, []);
    cells(&mut book, 0, 10);
    book.seq_rm(0, 2..4).unwrap();
    assert_eq!(book.compact().unwrap(), moved(&[8, 9], &[2, 3]));
}

#[test]
fn runs_stay_where_they_are() {
    for [front, back] in [[0, 1], [1, 0]] {
        let mut book = CellsBookkeeping::new(20, []);
        cells(&mut book, front, 4);
        cells(&mut book, back, 4);
        book.seq_rm(front, 1..2).unwrap();
        assert_eq!(book.compact().unwrap(), moved(&[3], &[1]));
    }
}

/// If there are too few cells for room between sequences, the sequences begin where they would begin without room.
#[test]
fn tight_sequences_close_their_holes_in_place() {
    let mut book = CellsBookkeeping::new(20, []);
    for sequence in [0, 1] {
        cells(&mut book, sequence, 4);
        book.seq_rm(sequence, 1..2).unwrap();
    }
    assert_eq!(book.compact().unwrap(), moved(&[3, 7], &[1, 5]));
}

#[test]
fn compaction_leaves_room_where_there_is_enough() {
    let mut book = CellsBookkeeping::new(400, []);
    cells(&mut book, 0, 300);
    assert_eq!(cells(&mut book, 1, 10), Slots::Run(300..310));
    assert_eq!(cells(&mut book, 0, 5), Slots::Run(326..331));
    book.seq_rm(0, 0..250).unwrap();
    assert_eq!(book.compact().unwrap().len(), 1);
    assert_eq!(cells(&mut book, 0, 64), Slots::Run(305..369));
    assert!(book.is_contiguous(0).unwrap() && book.is_contiguous(1).unwrap());
}

#[test]
fn a_fork_continues_after_its_shared_cells() {
    let mut book = CellsBookkeeping::new(400, []);
    cells(&mut book, 0, 4);
    book.seq_cp(0, 1, 0..i32::MAX).unwrap();
    book.seq_cp(0, 2, 0..i32::MAX).unwrap();
    assert_eq!(cells(&mut book, 1, 2), Slots::Run(4..6));
    assert_eq!(cells(&mut book, 2, 2), Slots::Run(22..24));
    book.seq_rm(1, 0..i32::MAX).unwrap();
    assert_eq!(book.compact().unwrap(), moved(&[22, 23], &[4, 5]));
}

#[test]
fn candidates_without_a_sequence_stay_where_they_are() {
    let mut book = CellsBookkeeping::new(400, []);
    cells(&mut book, 0, 300);
    book.propose(1, &[-1, -1]).unwrap();
    assert_eq!(book.plan(&[0, 0]).unwrap()[0].write, Slots::Run(300..302));
    book.commit().unwrap();
    book.seq_rm(0, 1..2).unwrap();
    assert_eq!(book.compact().unwrap(), moved(&[299], &[1]));
}

/// A window is read without a mask only if positions are in order.
#[test]
fn windows_stay_in_order() {
    let mut book = CellsBookkeeping::new(100, [Window::new(20, 0, 5, 100)]);
    step(&mut book, &[0], 5);
    step(&mut book, &[0], 5);
    book.seq_rm(0, 2..4).unwrap();
    let window = Move { group: 1, from: Slots::Run(0..2), to: Slots::Run(2..4) };
    assert_eq!(book.compact().unwrap(), [moved(&[8, 9], &[2, 3]), vec![window]].concat());
}

#[test]
fn nothing_moves_without_a_gain() {
    let mut book = CellsBookkeeping::new(30, []);
    cells(&mut book, 0, 4);
    for fork in [1, 2] {
        book.seq_cp(0, fork, 0..i32::MAX).unwrap();
    }
    cells(&mut book, 0, 2);
    assert_eq!(cells(&mut book, 1, 2), Slots::Run(6..8));
    assert_eq!(cells(&mut book, 2, 2), Slots::Run(8..10));
    assert_eq!(cells(&mut book, 1, 1), Slots::Run(10..11));
    assert_eq!(book.compact().unwrap(), []);
}

#[test]
fn a_chain_of_candidates_keeps_its_order_when_it_moves() {
    let mut book = CellsBookkeeping::new(20, []);
    let node = |book: &mut CellsBookkeeping, parent: i32| {
        book.propose(0, &[parent]).unwrap();
        let plan = book.plan(&[3 + parent + 1]).unwrap()[0].clone();
        book.commit().unwrap();
        plan
    };
    cells(&mut book, 0, 3);
    cells(&mut book, 1, 1);
    assert_eq!(node(&mut book, -1).write, Slots::Run(4..5));
    cells(&mut book, 2, 1);
    assert_eq!(node(&mut book, 0).write, Slots::Run(6..7));
    // This sequence has two runs, so there is something to compact.
    assert_eq!(cells(&mut book, 2, 1), Slots::Run(7..8));
    book.seq_rm(1, 0..i32::MAX).unwrap();
    book.compact().unwrap();
    book.seq_rm(2, 0..i32::MAX).unwrap();
    let plan = node(&mut book, 1);
    assert_eq!((plan.write, plan.read, plan.mask), (Slots::Run(5..6), 0..6, MaskPlan::None));
}

/// Returns the number of rows that a compaction moves.
fn n_moved(book: &mut CellsBookkeeping) -> usize {
    book.compact().unwrap().iter().map(|one| one.from.len()).sum()
}

#[test]
fn only_cells_after_a_hole_move() {
    for (capacity, moves) in [(4096, 4), (2100, 4), (2048, 4 + 16), (2000, 4 + 64)] {
        let mut book = CellsBookkeeping::new(capacity, []);
        cells(&mut book, 0, 2000);
        book.seq_rm(0, 4..1000).unwrap();
        assert_eq!(n_moved(&mut book), moves, "of {capacity} cells");
        assert!(book.is_contiguous(0).unwrap());
        // The next tokens keep the sequence contiguous.
        let plan = &book.plan(&[2000]).unwrap()[0];
        assert_eq!(plan.mask, MaskPlan::None);
    }
}

#[test]
fn a_long_run_does_not_make_way_for_a_short_sequence() {
    let mut book = CellsBookkeeping::new(4096, []);
    cells(&mut book, 0, 300);
    cells(&mut book, 1, 2000);
    // The first sequence fills the room before the second, and continues after it.
    cells(&mut book, 0, 70);
    book.seq_rm(0, 0..294).unwrap();
    assert!(!book.is_contiguous(0).unwrap());
    assert!(n_moved(&mut book) <= 76);
    assert!(book.is_contiguous(0).unwrap() && book.is_contiguous(1).unwrap());
    assert_eq!(n_moved(&mut book), 0);
}

/// Only layers of full history leave room between sequences. In windows it would waste memory.
#[test]
fn a_window_group_takes_the_slots_of_its_sequences() {
    let window = Window::new(8, 0, 3, 1000);
    let mut book = CellsBookkeeping::new(1000, [window]);
    for _ in 0..100 {
        for sequence in [0, 1] {
            let end = step(&mut book, &[sequence], 1).0[1].end();
            assert!(end <= 2 * window.slots(), "{end}");
        }
    }
}
