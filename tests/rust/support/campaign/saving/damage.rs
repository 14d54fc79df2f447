//! Damaged files. Either some bytes are changed, removed, added or swapped, or integers and words of the header are
//! replaced and the checksums corrected.
//!
//! A second cache does not load the damaged files. After each file both caches must give the same results.

use etkv_core::Status;
use etkv_file::{load, save};

use super::driver::{forward, operate, AnyCache, Shape};
use super::{written, SaveFile};
use crate::backend::Backend;
use crate::stores::{labels, MODEL};
use crate::{for_seeds, Rng};

/// The number of damaged files for each seed.
const FILES: usize = 50;

fn header_end(bytes: &[u8]) -> usize {
    8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize
}

fn damage(rng: &mut Rng, bytes: &mut Vec<u8>) {
    let n = bytes.len();
    // Half of the changes are in the header, which is short.
    let end = if rng.chance(0.5) { header_end(bytes).min(n) } else { n };
    let at = rng.below(end);
    match rng.below(9) {
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
        7 => {
            // Swaps two parts of the same length, such as the keys of two layers.
            let other = rng.below(n);
            let len = (1 + rng.below(4096)).min(at.abs_diff(other)).min(n - at.max(other));
            for i in 0..len {
                bytes.swap(at + i, other + i);
            }
        }
        _ => bytes[..8]
            .copy_from_slice(&rng.pick(&[0, 7, u64::MAX, 1 << 40, n as u64]).to_le_bytes()),
    }
}

/// Replaces a number of the header by another, and corrects the checksum of the header.
fn lie(rng: &mut Rng, bytes: &mut Vec<u8>) {
    let end = header_end(bytes);
    let mut text = String::from_utf8(bytes[8..end].to_vec()).unwrap().trim_end().to_owned();
    // Mostly replaces integers of the cache, because most other numbers are offsets of tensors.
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
    replace_header(bytes, &text);
}

/// Replaces a word of the header by another valid one, or removes it.
fn reword(rng: &mut Rng, bytes: &mut Vec<u8>) {
    const WORDS: [&str; 14] = [
        "contiguous",
        "cells",
        "seq",
        "tree",
        "f32",
        "f16",
        "bf16",
        "row-int4",
        "affine8g64",
        "true",
        "false",
        "null",
        "F16",
        "tokens",
    ];
    let end = header_end(bytes);
    let mut text = String::from_utf8(bytes[8..end].to_vec()).unwrap().trim_end().to_owned();
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    let starts: Vec<usize> = (1..text.len())
        .filter(|&at| {
            let byte = |at: usize| text.as_bytes()[at];
            byte(at).is_ascii_alphabetic() && !is_letter(byte(at - 1))
        })
        .collect();
    let at = rng.pick(&starts);
    let stop = (at..text.len()).find(|&at| !is_letter(text.as_bytes()[at])).unwrap_or(text.len());
    let new = if rng.chance(0.1) { "" } else { rng.pick(&WORDS) };
    text.replace_range(at..stop, new);
    replace_header(bytes, &text);
}

/// Replaces the header of a file, and corrects its checksum.
fn replace_header(bytes: &mut Vec<u8>, text: &str) {
    let end = header_end(bytes);
    let mut header = vec![0; 8];
    header.extend_from_slice(text.as_bytes());
    header.resize(header.len().next_multiple_of(8), b' ');
    let length = header.len() as u64 - 8;
    header[..8].copy_from_slice(&length.to_le_bytes());
    let sum = etkv_file::checksum(&header);
    bytes.splice(..end, header);
    let n_parts = text.matches("data_offsets").count();
    if let Some(at) = bytes.len().checked_sub(n_parts * sum.len()) {
        let len = sum.len().min(bytes.len() - at);
        bytes[at..at + len].copy_from_slice(&sum[..len]);
    }
}

pub fn damaged_files_are_refused_and_change_nothing<B: Backend>() {
    let place = SaveFile::new();
    for_seeds(if B::COMPUTES_AT_ONCE { 20 } else { 8 }, |seed| {
        B::run(|| {
            let mut rng = Rng::new(seed);
            let shape = Shape::new(&mut rng);
            let mut caches: Vec<AnyCache<B>> = (0..2).map(|_| shape.make::<B>()).collect();
            for _ in 0..20 {
                operate::<B>(&mut rng, &mut caches);
            }
            let tokens: Vec<i64> = (0..caches[0].length().into()).collect();
            save(&mut *caches[0], &place.path, labels(&tokens)).unwrap();
            // Rolls back a step that was set aside.
            save(&mut *caches[1], &place.path, labels(&tokens)).unwrap();
            let whole = std::fs::read(&place.path).unwrap();
            for _ in 0..10 {
                operate::<B>(&mut rng, &mut caches);
            }
            for _ in 0..FILES {
                let before = written(caches[0].saving().unwrap());
                assert_eq!(written(caches[1].saving().unwrap()), before);
                let mut bytes = whole.clone();
                let lies = rng.chance(0.5);
                match lies {
                    true if rng.chance(0.3) => reword(&mut rng, &mut bytes),
                    true => lie(&mut rng, &mut bytes),
                    false => damage(&mut rng, &mut bytes),
                }
                std::fs::write(&place.path, &bytes).unwrap();
                match load(&mut *caches[0], &place.path, MODEL) {
                    Err(error) => {
                        assert!(
                            matches!(error.status(), Status::File | Status::Backend),
                            "{error}"
                        );
                        assert_eq!(written(caches[0].saving().unwrap()), before, "{error}");
                        operate::<B>(&mut rng, &mut caches);
                    }
                    Ok(_) => {
                        // A file with correct checksums may be loaded, but does no harm.
                        assert!(lies || bytes == whole, "a damaged file is loaded");
                        for _ in 0..3 {
                            let one = &mut Rng::new(rng.next_u64());
                            let next = caches[0].next_position();
                            let _ =
                                next.and_then(|next| forward::<B>(one, &mut caches[0], &[next]));
                        }
                        std::fs::write(&place.path, &whole).unwrap();
                        for cache in &mut caches {
                            *cache = shape.make::<B>();
                            load(&mut **cache, &place.path, MODEL).unwrap();
                        }
                    }
                }
            }
        });
    });
}
