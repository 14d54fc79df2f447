//! Payloads with random damage.

use etkv_core::Result;
use etkv_cpu::attention::synthetic::Random;

const PAYLOADS: usize = 20_000;

const NUMBERS: [&str; 12] =
    ["0", "1", "2", "3", "4", "16", "17", "32", "1048576", "-1", "1e9", "null"];

/// Passes damaged copies of `payload` to `run`: words are removed, replaced or repeated, and numbers are
/// changed. Some copies must run, and most must be refused.
pub fn check(payload: &str, mut run: impl FnMut(&str) -> Result<()>) {
    let words: Vec<&str> = payload.split_inclusive([' ', ',', ':']).collect();
    let mut random = Random::new(7);
    let mut below = |n: usize| random.below(n);
    let mut ran = 0;
    for _ in 0..PAYLOADS {
        let mut text: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
        for _ in 0..=below(2) {
            let at = below(text.len());
            match below(4) {
                0 => drop(text.remove(at)),
                1 => text[at] = words[below(words.len())].to_owned(),
                2 => {
                    let end = text[at].trim_start_matches(|c: char| c.is_ascii_digit()).to_owned();
                    text[at] = format!("{}{end}", NUMBERS[below(NUMBERS.len())]);
                }
                _ => text.insert(at, words[below(words.len())].to_owned()),
            }
        }
        ran += usize::from(run(&text.concat()).is_ok());
    }
    let refused = PAYLOADS - ran;
    assert!(ran > 100 && refused > 1000, "{ran} ran, {refused} were refused");
}
