//! Undoing a committed step leaves no trace of it.

use etkv_core::bookkeeping::{CellsBookkeeping, LayerGroupPlan, Window};
use etkv_core::Status;
use etkv_tests::{for_seeds, Rng};

const N_SEQUENCES: i32 = 4;

/// Plans a step of one token for each of these lists of sequences. The sequences of a list share the token.
fn plan(book: &mut CellsBookkeeping, owners: &[Vec<i32>]) -> Option<Vec<LayerGroupPlan>> {
    let members: Vec<&[i32]> = owners.iter().map(Vec::as_slice).collect();
    book.begin_step_shared(&members).unwrap();
    let mut added = [0; N_SEQUENCES as usize];
    let mut positions = Vec::new();
    for members in owners {
        positions.push(book.seq_next(members[0]).unwrap() + added[members[0] as usize]);
        members.iter().for_each(|&member| added[member as usize] += 1);
    }
    let planned = book.plan(&positions).ok().map(<[_]>::to_vec);
    if planned.is_none() {
        book.cancel_step().unwrap();
    }
    planned
}

fn random_owners(rng: &mut Rng) -> Vec<Vec<i32>> {
    let mut owners: Vec<Vec<i32>> = Vec::new();
    for _ in 0..1 + rng.below(5) {
        let first = rng.below(N_SEQUENCES as usize) as i32;
        let other = rng.below(N_SEQUENCES as usize) as i32;
        owners.push(if rng.chance(0.3) && other != first {
            vec![first, other]
        } else {
            vec![first]
        });
    }
    owners
}

fn change(book: &mut CellsBookkeeping, rng: &mut Rng) {
    let (source, target) = (rng.below(4) as i32, rng.below(4) as i32);
    let at = rng.below(12) as i32;
    // Some of these operations are refused.
    match rng.below(4) {
        0 => drop(book.seq_cp(source, target, 0..i32::MAX)),
        1 => drop(book.seq_rm(source, at..i32::MAX)),
        2 => drop(book.seq_rm(source, 0..at)),
        _ => drop(book.compact()),
    }
}

#[test]
fn later_steps_do_not_depend_on_an_undone_step() {
    for_seeds(150, |seed| {
        let mut rng = Rng::new(seed);
        let mut book = CellsBookkeeping::new(60, []);
        let mut undone = 0;
        for _ in 0..40 {
            if rng.chance(0.3) {
                change(&mut book, &mut rng);
            }
            let mut other = book.clone();
            if plan(&mut other, &random_owners(&mut rng)).is_some() {
                assert!(other.only_adds());
                let written = other.plans()[0].write.clone();
                let added = other.commit_added().unwrap();
                assert_eq!(added.cells(), &written);
                assert_eq!(other.length(), book.length() + written.len() as i32);
                // Plans a step that the host has not requested yet.
                if rng.chance(0.5) && plan(&mut other, &[vec![0]]).is_some() {
                    assert_eq!(other.undo(&added).unwrap_err().status(), Status::Step);
                    other.abort();
                    other.cancel_step().unwrap();
                }
                other.undo(&added).unwrap();
                undone += 1;
            }
            assert_eq!((other.length(), other.sequences()), (book.length(), book.sequences()));
            for sequence in 0..N_SEQUENCES {
                assert_eq!(other.seq_positions(sequence), book.seq_positions(sequence));
                assert_eq!(other.is_contiguous(sequence), book.is_contiguous(sequence));
            }
            let owners = random_owners(&mut rng);
            let planned = plan(&mut other, &owners);
            assert_eq!(planned, plan(&mut book, &owners));
            if planned.is_some() {
                other.commit().unwrap();
                book.commit().unwrap();
            } else {
                book.seq_rm(rng.below(4) as i32, 0..i32::MAX).unwrap();
                other = book.clone();
            }
            assert_eq!(other.length(), book.length());
        }
        assert!(undone > 5);
    });
}

#[test]
fn steps_that_drop_or_move_rows_are_not_undone() {
    let mut windowed = CellsBookkeeping::new(100, [Window::new(8, 0, 40, 100)]);
    windowed.plan(&[0]).unwrap();
    assert!(!windowed.only_adds());
    let mut tree = CellsBookkeeping::new(100, []);
    assert!(!tree.only_adds(), "no step is open");
    assert_eq!(tree.commit_added().unwrap_err().status(), Status::Step);
    tree.plan(&[0]).unwrap();
    assert!(tree.only_adds());
    tree.commit().unwrap();
    tree.propose(0, &[-1]).unwrap();
    tree.plan(&[1]).unwrap();
    assert!(!tree.only_adds());
}
