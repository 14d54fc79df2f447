//! Helpers of the benchmarks: medians, and tables of times by length.

use std::hint::black_box;
use std::time::{Duration, Instant};

/// A measured case: its name, and its time at a length.
pub type Case<'a> = (&'a str, Box<dyn FnMut(i32) -> Duration>);

/// Prints a table of median times, with a row for each length and a column for each case. Cases are measured in
/// turns.
pub fn table(title: &str, lengths: &[i32], cases: &mut [Case]) {
    println!("\n{title}");
    print!("{:>10}", "length");
    cases.iter().for_each(|(name, _)| print!("{name:>24}"));
    println!();
    for &length in lengths {
        const ROUNDS: usize = 9;
        let mut times = vec![Vec::new(); cases.len()];
        for _ in 0..ROUNDS {
            for ((_, measure), times) in cases.iter_mut().zip(&mut times) {
                times.push(measure(length));
            }
        }
        print!("{length:>10}");
        for times in &mut times {
            times.sort_unstable();
            print!("{:>24}", format!("{:.3?}", times[ROUNDS / 2]));
        }
        println!();
    }
}

/// Returns the mean time of a call, over a few milliseconds of calls.
pub fn time_of<T>(mut call: impl FnMut() -> T) -> Duration {
    let mut n = 1;
    loop {
        let start = Instant::now();
        for _ in 0..n {
            black_box(call());
        }
        let spent = start.elapsed();
        if spent > Duration::from_millis(3) || n >= 1 << 24 {
            return spent / n;
        }
        n *= 2;
    }
}
