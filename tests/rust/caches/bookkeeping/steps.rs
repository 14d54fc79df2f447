//! Refusals, visibility before a commit, and state after an abort.

use etkv_core::bookkeeping::{CellsBookkeeping, ContiguousBookkeeping, Window};
use etkv_core::Status;

use super::step;

fn run(start: i32, n: i32) -> Vec<i32> {
    (start..start + n).collect()
}

#[test]
fn a_step_is_not_seen_before_it_is_committed() {
    let mut book = CellsBookkeeping::new(100, [Window::new(8, 0, 40, 100)]);
    let seen = |book: &CellsBookkeeping| {
        let taken = [book.length(), book.used(0), book.used(1), book.seq_len(0).unwrap()];
        (taken, book.can_extend(100), book.can_extend(90))
    };
    book.plan(&run(0, 10)).unwrap();
    assert_eq!(seen(&book), ([0; 4], true, true));
    book.commit().unwrap();
    assert_eq!(seen(&book), ([10; 4], false, true));
    book.propose(0, &[-1, 0]).unwrap();
    book.plan(&[10, 11]).unwrap();
    assert_eq!(seen(&book), ([10; 4], false, true));
}

#[test]
fn declaring_no_tokens_is_refused() {
    let mut book = CellsBookkeeping::new(10, []);
    for result in [book.begin_step(&[]), book.begin_step_shared(&[])] {
        let error = result.unwrap_err();
        assert_eq!(error.status(), Status::InvalidArgument);
        assert!(error.message().contains("at least 1 token"), "{error}");
    }
    book.plan(&[0]).unwrap();
}

/// After a declared step that did not run, the pending frontier of a tree can run.
#[test]
fn declarations_can_be_cancelled() {
    let mut book = CellsBookkeeping::new(10, []);
    step(&mut book, &[0], 2);
    book.begin_step(&[0, 0, 0]).unwrap();
    book.propose(0, &[-1]).unwrap();
    let error = book.plan(&[2]).unwrap_err();
    assert_eq!(error.status(), Status::InvalidArgument, "{error}");
    for _ in 0..2 {
        book.cancel_step().unwrap();
    }
    book.plan(&[2]).unwrap();
    assert_eq!(book.cancel_step().unwrap_err().status(), Status::Step);
    book.commit().unwrap();
    assert_eq!(book.tree_len(0).unwrap(), 1);
}

/// A mask of 40,000 queries over 80,000 cells has more elements than an array can have.
#[test]
fn a_mask_that_is_too_large_is_refused_and_nothing_has_changed() {
    let mut book = CellsBookkeeping::new(100_000, []);
    step(&mut book, &[0], 40_000);
    let both = [vec![0; 20_000], vec![1; 20_000]].concat();
    let positions = [run(40_000, 20_000), run(0, 20_000)].concat();
    book.begin_step(&both).unwrap();
    // Tries twice, because the first attempt must not take cells or change anything.
    for _ in 0..2 {
        let error = book.plan(&positions).unwrap_err();
        assert_eq!(error.status(), Status::Capacity);
        // 64 of these slots are free between the two sequences.
        for named in ["40000 tokens", "80064 slots", "2147483647"] {
            assert!(error.message().contains(named), "{error}");
        }
        assert_eq!((book.length(), book.used(0)), (40_000, 40_000));
        assert_eq!((book.sequences(), book.plans()), (vec![0], &[][..]));
    }
    let error = book.plan(&[0]).unwrap_err();
    assert!(error.message().contains("declared 40000"), "{error}");
    // Tokens of one sequence read fewer slots, and need no mask.
    step(&mut book, &[0], 20_000);
    step(&mut book, &[1], 20_000);
    assert_eq!(book.length(), 80_000);
}

#[test]
fn a_window_whose_mask_is_too_large_is_refused() {
    let window = Window::new(40_000, 0, 40_000, 200_000);
    let mut book = ContiguousBookkeeping::new(200_000, [None, Some(window)]);
    let plan = book.plan(&run(0, 40_000)).unwrap();
    book.commit(&plan).unwrap();
    let before = book.clone();
    let error = book.plan(&run(40_000, 40_000)).unwrap_err();
    assert_eq!(error.status(), Status::Capacity);
    assert!(error.message().contains("40000"), "{error}");
    assert_eq!(book, before);
    // A part of the step fits.
    assert!(book.plan(&run(40_000, 10_000)).is_ok());
}

#[test]
fn a_plan_that_is_stale_is_refused() {
    let mut book = ContiguousBookkeeping::new(100, [None]);
    let append = |book: &mut ContiguousBookkeeping, n: i32| {
        let plan = book.plan(&run(book.length(), n)).unwrap();
        book.commit(&plan).unwrap();
    };
    append(&mut book, 3);
    let plan = book.plan(&[3, 4]).unwrap();
    book.rewind(0).unwrap();
    let before = book.clone();
    assert_eq!(book.commit(&plan).unwrap_err().status(), Status::Step);
    assert_eq!(book, before);
    // The plan stays stale whatever the length of the sequence is.
    append(&mut book, 3);
    assert_eq!(book.commit(&plan).unwrap_err().status(), Status::Step);
    let plan = book.plan(&[3]).unwrap();
    book.commit(&plan).unwrap();
    assert_eq!(book.commit(&plan).unwrap_err().status(), Status::Step);
    let plan = book.plan(&[4]).unwrap();
    book.clear();
    assert_eq!(book.commit(&plan).unwrap_err().status(), Status::Step);
    assert_eq!(book.length(), 0);
}

#[test]
fn a_sequence_goes_back_to_positions_that_it_holds() {
    let mut book = CellsBookkeeping::new(100, []);
    step(&mut book, &[0], 50);
    book.seq_rm(0, 0..20).unwrap();
    book.seq_rm(0, 30..40).unwrap();
    assert_eq!(book.rewindable_to(0).unwrap(), 21);
    for length in [-1, 1, 19, 20, 31, 35, 40, 51] {
        let error = book.rewind(length).unwrap_err();
        assert_eq!(error.status(), Status::Position, "{length}");
        assert!(error.message().contains(&length.to_string()), "{error}");
    }
    assert_eq!(book.seq_len(0).unwrap(), 20);
    for length in [50, 45, 41, 30, 21] {
        book.rewind(length).unwrap();
        assert_eq!(book.seq_next(0).unwrap(), length);
    }
    book.rewind(0).unwrap();
    assert_eq!((book.seq_next(0).unwrap(), book.seq_len(0).unwrap()), (0, 0));
}

#[test]
fn a_sequence_of_which_nothing_is_left_begins_anew() {
    let mut book = CellsBookkeeping::new(100, []);
    step(&mut book, &[0], 50);
    book.seq_rm(0, 0..20).unwrap();
    book.seq_rm(0, 20..i32::MAX).unwrap();
    assert_eq!((book.seq_next(0).unwrap(), book.rewindable_to(0).unwrap()), (0, 0));
    step(&mut book, &[0], 3);
    assert_eq!(book.seq_positions(0).unwrap(), vec![0..3; 1]);
}
