//! Damaged files: some bytes changed, removed or added, and integers replaced by absurd ones, with
//! checksums that are made right again.

use etkv_core::{Cache, Status};
use etkv_file::{load, save};

use super::driver::{forward, operate, AnyCache, Shape};
use super::{labels, Place, MODEL};
use crate::backend::Backend;
use crate::{for_seeds, Rng};

/// Damaged files of each seed.
const FILES: usize = 50;

/// Returns what a cache writes: its integers and all rows.
fn contents(cache: &mut dyn Cache) -> (String, Vec<u8>) {
    let face = cache.saving().unwrap();
    let snapshot = face.snapshot().unwrap();
    let mut all = Vec::new();
    face.read_rows(&snapshot, &mut |_, bytes| {
        all.extend_from_slice(bytes);
        Ok(())
    })
    .unwrap();
    (format!("{snapshot:?}"), all)
}

fn header_end(bytes: &[u8]) -> usize {
    8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize
}

/// Changes a file anyhow.
fn damage(rng: &mut Rng, bytes: &mut Vec<u8>) {
    let n = bytes.len();
    // Half of them in the header, which is short.
    let end = if rng.chance(0.5) { header_end(bytes).min(n) } else { n };
    let at = rng.below(end);
    match rng.below(8) {
        0..=2 => bytes[at] ^= 1 << rng.below(8),
        3 => bytes.truncate(at),
        4 => bytes.extend(vec![rng.next_u64() as u8; 1 + rng.below(40)]),
        5 => {
            let stop = (at + 1 + rng.below(100)).min(n);
            bytes[at..stop].fill(rng.pick(&[0, 0xff, b'9', b' ']));
        }
        6 => {
            let stop = (at + 1 + rng.below(16)).min(n);
            bytes.drain(at..stop);
        }
        _ => bytes[..8]
            .copy_from_slice(&rng.pick(&[0, 7, u64::MAX, 1 << 40, n as u64]).to_le_bytes()),
    }
}

/// Replaces a number of the header by another, and makes the checksum of the header right.
fn lie(rng: &mut Rng, bytes: &mut Vec<u8>) {
    let end = header_end(bytes);
    let mut text = String::from_utf8(bytes[8..end].to_vec()).unwrap().trim_end().to_owned();
    // Not those of the tensors' offsets alone.
    let state = text.find("\"cache\":").unwrap_or(0);
    let from = if rng.chance(0.8) { state } else { 0 };
    let digits: Vec<usize> = (from.max(1)..text.len())
        .filter(|&at| {
            let byte = |at: usize| text.as_bytes()[at];
            byte(at).is_ascii_digit() && !byte(at - 1).is_ascii_digit()
        })
        .collect();
    if digits.is_empty() {
        return;
    }
    let at = rng.pick(&digits);
    let stop = (at..text.len()).find(|&at| !text.as_bytes()[at].is_ascii_digit()).unwrap();
    let old: i64 = text[at..stop].parse().unwrap_or(0);
    let new = rng.pick(&[
        old + 1,
        old - 1,
        -1,
        0,
        1,
        255,
        256,
        1 << 16,
        1 << 30,
        i32::MAX.into(),
        i32::MIN.into(),
        i64::MAX,
    ]);
    text.replace_range(at..stop, &new.to_string());
    let mut header = vec![0; 8];
    header.extend_from_slice(text.as_bytes());
    header.resize(header.len().next_multiple_of(8), b' ');
    let length = header.len() as u64 - 8;
    header[..8].copy_from_slice(&length.to_le_bytes());
    let sum = etkv_file::checksum(&header);
    bytes.splice(..end, header);
    let n_parts = text.matches("data_offsets").count();
    let at = bytes.len() - n_parts * sum.len();
    bytes[at..at + sum.len()].copy_from_slice(&sum);
}

pub fn damaged_files_are_refused_and_change_nothing<B: Backend>() {
    if !B::SAVES {
        return;
    }
    let place = Place::new();
    for_seeds(if B::COMPUTES_AT_ONCE { 60 } else { 12 }, |seed| {
        B::run(|| {
            let mut rng = Rng::new(seed);
            let shape = Shape::new(&mut rng);
            let mut caches: Vec<AnyCache<B>> = vec![shape.make::<B>()];
            for _ in 0..20 {
                operate::<B>(&mut rng, &mut caches);
            }
            let mut saved = caches.remove(0);
            let tokens: Vec<i64> = (0..saved.length().into()).collect();
            save(&mut *saved, &place.path, labels(&tokens)).unwrap();
            let whole = std::fs::read(&place.path).unwrap();
            for _ in 0..10 {
                operate::<B>(&mut rng, std::slice::from_mut(&mut saved));
            }
            let mut before = contents(&mut *saved);
            for _ in 0..FILES {
                let mut bytes = whole.clone();
                let lies = rng.chance(0.4);
                if lies {
                    lie(&mut rng, &mut bytes);
                } else {
                    damage(&mut rng, &mut bytes);
                }
                std::fs::write(&place.path, &bytes).unwrap();
                match load(&mut *saved, &place.path, MODEL) {
                    Err(error) => {
                        assert!(
                            matches!(error.status(), Status::File | Status::Backend),
                            "{error}"
                        );
                        assert_eq!(contents(&mut *saved), before, "{error}");
                    }
                    Ok(_) => {
                        // What the checksums say is right may be loaded; it does no harm.
                        assert!(lies || bytes == whole, "a damaged file is loaded");
                        for _ in 0..3 {
                            let one = &mut Rng::new(rng.next_u64());
                            let next = saved.next_position();
                            let _ = next.and_then(|next| forward::<B>(one, &mut saved, &[next]));
                        }
                        saved = shape.make::<B>();
                        std::fs::write(&place.path, &whole).unwrap();
                        load(&mut *saved, &place.path, MODEL).unwrap();
                        before = contents(&mut *saved);
                    }
                }
            }
        });
    });
}
