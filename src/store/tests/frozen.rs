//! Pools that read frozen rows in their first slots.

use mlx_rs::transforms::eval;

use super::*;
use crate::mlx::run;

const HEADS: i32 = 2;
const DIM: i32 = 64;

/// Returns the bits of some slots of a pool.
fn bits(pool: &Pool, start: i32, stop: i32) -> Result<Vec<Vec<u8>>> {
    pool.read(start, stop)?.parts.iter().map(bytes_of).collect()
}

/// Returns a pool with `slots` slots that reads the first `end` slots of another pool, which freezes them.
fn attached(pool: &mut Pool, end: i32, slots: i32) -> Result<Pool> {
    pool.freeze(end, false)?;
    let mut other = Pool::new(pool.format(), HEADS, DIM)?;
    other.attach(&pool.share(end))?;
    other.grow(slots)?;
    Ok(other)
}

#[test]
fn two_regions_read_as_one() {
    run(|| {
        for (format, _) in
            formats().into_iter().filter(|(format, dim)| *dim == DIM || format.is_float())
        {
            let plain = pool_of(format, &rows(1, HEADS, 30, DIM))?;
            let mut first = pool_of(format, &rows(1, HEADS, 30, DIM))?;
            let mut second = attached(&mut first, 20, 30)?;
            second.put(&Slots::Run(20..30), &plain.copy(&Slots::Run(20..30))?)?;
            eval(second.buffers())?;
            for pool in [&first, &second] {
                assert_eq!((pool.slots(), pool.base(), pool.shared), (30, 20, 20));
                for (start, stop) in
                    [(0, 30), (0, 20), (20, 30), (5, 25), (19, 21), (0, 1), (29, 30)]
                {
                    let expected = bits(&plain, start, stop)?;
                    assert_eq!(bits(pool, start, stop)?, expected, "{format}");
                }
                let list = Slots::List(vec![25, 3, 19, 20, 7]);
                let (found, expected) = (pool.copy(&list)?, plain.copy(&list)?);
                for (found, expected) in found.arrays().iter().zip(expected.arrays()) {
                    assert_eq!(bytes_of(found)?, bytes_of(expected)?, "{format}");
                }
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_write_to_frozen_slots_changes_one_pool() {
    run(|| {
        for format in [KvFormat::F16, KvFormat::RowInt4] {
            for start in [0, 7, 19] {
                let mut plain = pool_of(format, &rows(1, HEADS, 20, DIM))?;
                let mut first = pool_of(format, &rows(1, HEADS, 20, DIM))?;
                let before = bits(&first, 0, 20)?;
                let mut second = attached(&mut first, 20, 20)?;
                let slots = Slots::Run(start..start + 1);
                for pool in [&mut plain, &mut second] {
                    pool.write(&slots, &rows(9, HEADS, 1, DIM))?;
                }
                // After the rollback, the slots that the pool has copied have the values of the frozen rows again.
                second.roll_back()?;
                for (from, to) in [(0, start), (start + 1, 20)] {
                    if from < to {
                        let same = bits(&second, from, to)? == bits(&first, from, to)?;
                        assert!(same, "{format}: slots {from} to {to} after a write of {start}");
                    }
                }
                assert_eq!((second.base(), second.shared, second.slots()), (start, start, 20));
                second.write(&slots, &rows(9, HEADS, 1, DIM))?;
                eval(second.buffers())?;
                assert_eq!(bits(&second, 0, 20)?, bits(&plain, 0, 20)?, "{format} {start}");
                assert_eq!(bits(&first, 0, 20)?, before, "{format} {start}");
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn a_pool_that_copies_frozen_rows_has_them_alone() {
    run(|| {
        for format in [KvFormat::F32, KvFormat::RowInt4] {
            let mut first = pool_of(format, &rows(1, HEADS, 20, DIM))?;
            let before = bits(&first, 0, 20)?;
            let mut second = attached(&mut first, 15, 15)?;
            for (pool, slots) in [(&mut first, 20), (&mut second, 15)] {
                pool.own()?;
                assert_eq!((pool.base(), pool.shared, pool.slots()), (0, 0, slots));
            }
            assert!(bits(&second, 0, 15)? == bits(&first, 0, 15)?, "{format}");
            second.write(&Slots::Run(3..4), &rows(9, HEADS, 1, DIM))?;
            eval(second.buffers())?;
            assert!(bits(&first, 0, 20)? == before, "{format}");
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn pieces_follow_each_other_and_become_one_anew() {
    run(|| {
        let mut pool = pool_of(KvFormat::F16, &rows(1, HEADS, 40, DIM))?;
        let before = bits(&pool, 0, 40)?;
        for (end, anew, pieces) in [(10, false, 1), (30, false, 2), (20, false, 2), (40, true, 1)] {
            pool.freeze(end, anew)?;
            assert_eq!(pool.share(end).len(), pieces, "{end}");
            assert_eq!(bits(&pool, 0, 40)?, before, "{end}");
        }
        assert_eq!((pool.base(), pool.slots()), (40, 40));
        pool.release();
        assert_eq!((pool.base(), pool.slots(), pool.shared), (0, 0, 0));
        Ok(())
    })
    .unwrap();
}
