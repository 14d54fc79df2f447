//! The temporary memory of writes and attention.

use mlx_rs::memory::{active_memory, clear_cache, peak_memory, reset_peak_memory};
use mlx_rs::transforms::eval;

use super::*;
use crate::attention::{attend, AttendSpec, Mask};
use crate::mlx::run;

/// Returns the peak of MLX's memory during `work`, minus the memory before it.
fn peak_of(work: impl FnOnce() -> Result<()>) -> Result<usize> {
    clear_cache()?;
    let before = active_memory()?;
    reset_peak_memory()?;
    work()?;
    Ok(peak_memory()?.saturating_sub(before))
}

#[test]
fn writes_happen_in_place() {
    run(|| {
        let all = formats().into_iter().filter(|(format, _)| format.check(128).is_ok());
        for (format, _) in all {
            let slots = 8192;
            let mut pool = Pool::new(format, 4, 128)?;
            pool.grow(slots)?;
            let buffer = slots as usize * slot_bytes(&pool) as usize;
            let lists = [
                Slots::Run(100..116),
                Slots::List((0..16).map(|at| at * 2 + at / 4).collect()),
                Slots::List((0..64).map(|at| at * 100).collect()),
            ];
            for slots in lists {
                let rows = rows(1, 4, slots.len() as i32, 128);
                rows.eval()?;
                let peak = peak_of(|| {
                    pool.write(&slots, &rows)?;
                    Ok(eval(pool.buffers())?)
                })?;
                assert!(peak < buffer / 2, "{format}: {peak} bytes to write, {buffer} are held");
                let stored = pool.copy(&slots)?;
                eval(stored.arrays())?;
                let peak = peak_of(|| {
                    pool.put(&slots, &stored)?;
                    Ok(eval(pool.buffers())?)
                })?;
                assert!(peak < buffer / 2, "{format}: {peak} bytes to put, {buffer} are held");
            }
        }
        Ok(())
    })
    .unwrap();
}

#[test]
fn growing_holds_no_more_than_both_sizes() {
    run(|| {
        let mut pool = Pool::new(KvFormat::F16, 4, 128)?;
        pool.grow(4096)?;
        let slot = slot_bytes(&pool) as usize;
        let peak = peak_of(|| pool.grow(8192))?;
        assert!(peak <= 8192 * slot + (1 << 16), "{peak} bytes to grow to {}", 8192 * slot);
        Ok(())
    })
    .unwrap();
}

#[test]
fn decoding_does_not_unpack_the_history() {
    run(|| {
        if crate::kernels::can_run()? {
            println!("skipped: on CUDA the interpreter unpacks up to 256 MiB of a layer");
            return Ok(());
        }
        let n = 16384;
        let written = rows(3, 4, n, 128);
        let q = rows(4, 8, 1, 128);
        eval([&written, &q])?;
        let all = formats().into_iter().filter(|(format, _)| format.check(128).is_ok());
        for (format, _) in all.filter(|(format, _)| !format.is_float()) {
            let pool = pool_of(format, &written)?;
            let packed = n as usize * slot_bytes(&pool) as usize;
            let peak = peak_of(|| {
                let spec =
                    AttendSpec { k: pool.read(0, n)?, v: pool.read(0, n)?, mask: Mask::None };
                Ok(attend(&q, &spec, 0.1, None)?.eval()?)
            })?;
            let unpacked = 2 * written.nbytes();
            eprintln!("{format}: peak {peak}, packed K {packed}, unpacked K and V {unpacked}");
            assert!(peak < unpacked / 2, "{format}: {peak} bytes, unpacked it is {unpacked}");
        }
        Ok(())
    })
    .unwrap();
}
