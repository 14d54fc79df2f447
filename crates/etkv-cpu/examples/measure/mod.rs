//! Functions that the measurements of kernels share.

use std::error::Error;
use std::time::Instant;

use etkv_cpu::attention::synthetic::Random;
use etkv_cpu::Parallel;
use rayon::prelude::*;

/// Threads that exist for the whole run, as in a host. Starting threads would take as long as a short call.
pub struct Threads(pub rayon::ThreadPool);

impl Parallel for Threads {
    fn threads(&self) -> usize {
        self.0.current_num_threads()
    }

    fn run(&self, count: usize, call: &(dyn Fn(usize) + Sync)) {
        self.0.install(|| (0..count).into_par_iter().with_max_len(1).for_each(call));
    }
}

/// Returns bytes that are finite numbers in every format.
pub fn weights(size: usize, random: &mut Random) -> Vec<u8> {
    let mut words = Vec::with_capacity(size);
    while words.len() < size {
        words.extend((random.bits() & 0x3f3f_3f3f_3f3f_3f3f).to_le_bytes());
    }
    words.truncate(size);
    words
}

/// Returns the median wall-clock time of a call, and the median processor time.
pub fn seconds(mut call: impl FnMut(usize), calls: usize) -> [f64; 2] {
    let cpu = || {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
    };
    let mut times: [Vec<f64>; 2] = Default::default();
    for number in 0..calls {
        let (start, used) = (Instant::now(), cpu());
        call(number);
        times[0].push(start.elapsed().as_secs_f64());
        times[1].push(cpu() - used);
    }
    times.map(|mut times| median(&mut times)[0])
}

/// Returns the median and the minimum.
pub fn median(times: &mut [f64]) -> [f64; 2] {
    times.sort_by(f64::total_cmp);
    [times[times.len() / 2], times[0]]
}

/// Adds up numbers in several sums, so that reads do not wait for each other.
pub fn sum(bytes: &[u8]) -> u64 {
    let mut sums = [0u64; 32];
    for chunk in bytes.as_chunks::<256>().0 {
        for (sum, x) in sums.iter_mut().zip(chunk.as_chunks::<8>().0) {
            *sum = sum.wrapping_add(u64::from_le_bytes(*x));
        }
    }
    sums.iter().fold(0, |sum, &x| sum.wrapping_add(x))
}

/// Returns as many threads as the first argument specifies, or two.
pub fn threads() -> Result<Threads, Box<dyn Error>> {
    let threads = std::env::args().nth(1).map_or(Ok(2), |text| text.parse())?;
    Ok(Threads(rayon::ThreadPoolBuilder::new().num_threads(threads).build()?))
}
