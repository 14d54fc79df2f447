use super::*;
use crate::Error;

/// Returns the message of an error, or an empty text.
fn told(result: Result<()>) -> String {
    result.err().map_or_else(String::new, |error| error.to_string())
}

#[test]
fn steps_that_do_not_fit_are_refused() {
    let refused = |ids: &[i32], slots: &[i32], n_keys| {
        let step = StepInputs { ids, positions: &[0, 1], slots, n_keys, mask: None };
        match check_step(&step, 2, 10, false) {
            Err(Error::Step(text)) => text,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(refused(&[1], &[0, 1], 2), "1 ids, expected 2");
    assert_eq!(refused(&[1, 2], &[0, 1, 2], 2), "3 slots, expected 2");
    assert_eq!(refused(&[1, 2], &[0, 1], 1), "1 keys, expected 2 to 10");
    assert_eq!(refused(&[1, 2], &[0, 1], 11), "11 keys, expected 2 to 10");
    assert_eq!(refused(&[1, 2], &[0, 10], 10), "slot 10, expected 0 to 9");
    assert_eq!(refused(&[1, 2], &[-1, 1], 10), "slot -1, expected 0 to 9");
    assert_eq!(refused(&[1, 2], &[3, 3], 10), "slot 3 twice");
    // Ids are not checked, because the kernel clamps them.
    let (ids, slots) = (&[-1, i32::MAX], &[9, 8]);
    let step = StepInputs { ids, positions: &[0, 1], slots, n_keys: 10, mask: None };
    check_step(&step, 2, 10, false).unwrap();
}

#[test]
fn masks_that_do_not_fit_are_refused() {
    let refused = |mask: Option<&KeyMask>, masked| {
        let (ids, slots) = (&[1, 2], &[0, 1]);
        let step = StepInputs { ids, positions: &[0, 1], slots, n_keys: 8, mask };
        match check_step(&step, 2, 10, masked) {
            Err(Error::Step(text)) => text,
            other => panic!("{other:?}"),
        }
    };
    let mask = |ends: &[usize]| KeyMask::of(ends.iter().map(|&end| std::iter::once(0..end)));
    assert_eq!(refused(None, true), "no mask, expected one");
    assert_eq!(refused(Some(&mask(&[7, 8])), false), "a mask, expected none");
    assert_eq!(refused(Some(&mask(&[7])), true), "a mask of 1 tokens, expected 2");
    assert_eq!(refused(Some(&mask(&[9, 8])), true), "a mask with key 8, expected keys below 8");
    assert_eq!(refused(Some(&mask(&[7, 0])), true), "token 1 sees no key");
    let (ids, slots) = (&[1, 2], &[0, 1]);
    let mask = mask(&[7, 8]);
    let step = StepInputs { ids, positions: &[0, 1], slots, n_keys: 8, mask: Some(&mask) };
    check_step(&step, 2, 10, true).unwrap();
}

/// Groups differ in slots, keys, masks and pools. All have the same tokens.
#[test]
fn steps_are_told_for_each_group() {
    let groups = [(10, false), (4, true)];
    let mask = KeyMask::of([0..3, 1..4].map(std::iter::once).into_iter());
    let (ids, positions) = (&[7, 8][..], &[8, 9][..]);
    let full = StepInputs { ids, positions, slots: &[8, 9], n_keys: 10, mask: None };
    let window = StepInputs { slots: &[3, 0], n_keys: 4, mask: Some(&mask), ..full };
    let told = |steps: &[StepInputs]| told(check_steps(steps, 2, groups.into_iter()));
    assert_eq!(told(&[full, window]), "");
    assert!(told(&[full]).contains("a step of 1 groups, expected 2"));
    assert!(told(&[window, full]).contains("group 0: a mask, expected none"));
    let text = told(&[full, StepInputs { slots: &[3, 4], ..window }]);
    assert!(text.contains("group 1: slot 4, expected 0 to 3"), "{text}");
    let text = told(&[full, StepInputs { positions: &[8, 10], ..window }]);
    assert!(text.contains("group 1 and group 0 differ"), "{text}");
    assert!(told(&[StepInputs { n_keys: 11, ..full }, window]).contains("group 0: 11 keys"));
}

#[test]
fn given_rows_that_do_not_fit_are_refused() {
    let step =
        StepInputs { ids: &[1, 2], positions: &[0, 1], slots: &[0, 1], n_keys: 2, mask: None };
    let told =
        |given: &[&[u8]], rows: &[usize]| told(check_given(&[step], given, rows.iter().copied()));
    assert_eq!(told(&[], &[]), "");
    assert_eq!(told(&[&[0; 32], &[0; 4]], &[16, 2]), "");
    assert!(told(&[&[0; 32]], &[16, 2]).contains("rows of 1 buffers, expected 2"));
    assert!(
        told(&[&[0; 32], &[0; 2]], &[16, 2]).contains("2 bytes of input 1, expected 2 rows of 2")
    );
    assert!(told(&[&[0; 32]], &[]).contains("rows of 1 buffers, expected 0"));
}
