//! The campaign. It starts workers, and reports the results of the programs that the workers ran.

mod corpus;
mod mutation;
mod worker;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// The bytes of memory that a program may use in addition to those of the worker at its start.
pub const MAX: u64 = 1 << 30;

/// The bytes of address space that a worker may use in addition to those at its start.
pub const LEFT: u64 = 6 << 30;

/// The maximum number of bytes of one tensor. Several such tensors together are below [`MAX`].
pub const TENSOR: usize = 64 << 20;

/// The CPU seconds and the wall-clock seconds after which a program counts as hanging.
const PROCESSOR: f64 = 10.0;
const CLOCK: Duration = Duration::from_secs(100);

/// The maximum number of programs that one worker runs. It limits the influence of earlier programs.
const PROGRAMS: u64 = 2_000;

pub fn main() {
    let Some(programs) = std::env::var_os("ETKV_DAMAGE_PROGRAMS").map(PathBuf::from) else {
        eprintln!("no programs to damage: run `python -m tests.upstream_ops.damage`");
        return;
    };
    if let Some(work) = number("ETKV_DAMAGE_WORK") {
        let first = number("ETKV_FIRST_SEED").unwrap();
        return worker::work(&programs, first, number("ETKV_JOBS").unwrap(), work);
    }
    let refused = worker::refused(&programs);
    assert!(refused.is_empty(), "programs without damage: {refused:#?}");
    let campaign = match number("ETKV_SEED") {
        Some(seed) => Campaign { programs, first: seed, n: 1, jobs: 1, tell: true },
        None => Campaign {
            programs,
            first: number("ETKV_FIRST_SEED").unwrap_or(1),
            n: number("ETKV_RUNS").unwrap_or(4_000),
            jobs: number("ETKV_JOBS").unwrap_or(1),
            tell: std::env::var_os("ETKV_VERBOSE").is_some(),
        },
    };
    let found = campaign.run();
    if found > 0 {
        std::process::exit(1);
    }
}

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name} is `{value}`, not a number")))
}

struct Campaign {
    programs: PathBuf,
    first: u64,
    n: u64,
    jobs: u64,
    /// Whether to print the changes and every error.
    tell: bool,
}

/// A line of a worker, or its end.
struct WorkerLine {
    seed: u64,
    /// The first word of the line: `ran`, `load` or `run`, or the kind of a finding.
    what: String,
    told: String,
}

impl Campaign {
    /// Runs the campaign. Returns the number of findings.
    fn run(&self) -> usize {
        let begin = Instant::now();
        let (send, ended) = mpsc::channel();
        let mut counts: BTreeMap<String, usize> = BTreeMap::new();
        let mut found: Vec<WorkerLine> = Vec::new();
        std::thread::scope(|scope| {
            for job in 0..self.jobs {
                let send = send.clone();
                scope.spawn(move || self.job(job, &send));
            }
            drop(send);
            let (mut n, mut last) = (0, Instant::now());
            for ended in ended {
                n += 1;
                *counts.entry(ended.what.clone()).or_default() += 1;
                if self.tell {
                    println!("{}: {} {}", ended.seed, ended.what, ended.told);
                }
                if !matches!(&ended.what[..], "ran" | "load" | "run") {
                    found.push(ended);
                }
                if last.elapsed() > Duration::from_secs(30) {
                    last = Instant::now();
                    eprintln!("{n} programs, {} findings", found.len());
                }
            }
        });
        self.tell(&counts, &found, begin.elapsed());
        found.len()
    }

    fn tell(&self, counts: &BTreeMap<String, usize>, found: &[WorkerLine], took: Duration) {
        let count = |what: &str| counts.get(what).copied().unwrap_or(0);
        println!(
            "{} damaged programs, seeds {} to {}, {:.0} s: {} ran, {} were refused when loaded, {} when run, \
             {} are findings",
            counts.values().sum::<usize>(),
            self.first,
            self.first + self.n - 1,
            took.as_secs_f64(),
            count("ran"),
            count("load"),
            count("run"),
            found.len()
        );
        if found.is_empty() && !self.tell {
            return;
        }
        let programs = corpus::read(&self.programs);
        let folder = self.programs.with_file_name("found");
        std::fs::create_dir_all(&folder).unwrap();
        for ended in found {
            let damaged = mutation::damaged(&programs, ended.seed);
            let file = folder.join(format!("{}.payload", ended.seed));
            std::fs::write(&file, &damaged.program.payload).unwrap();
            println!(
                "\nseed {}: {}: {}\n  {} with passes {:?}; {}\n  {}",
                ended.seed,
                ended.what,
                ended.told,
                damaged.program.name,
                damaged.passes,
                damaged.changes.join("; "),
                file.display()
            );
        }
        if self.tell && found.is_empty() {
            let damaged = mutation::damaged(&programs, self.first);
            println!("{}: {}", damaged.program.name, damaged.changes.join("; "));
        }
    }

    /// Runs every `jobs`-th seed in workers, one worker after the other.
    fn job(&self, job: u64, send: &mpsc::Sender<WorkerLine>) {
        let (mut seed, end) = (self.first + job, self.first + self.n);
        while seed < end {
            let n = (end - seed).div_ceil(self.jobs).min(PROGRAMS);
            seed = Worker::start(&self.programs, seed, self.jobs, n, job).follow(send);
        }
    }
}

struct Worker {
    child: Child,
    errors: PathBuf,
    step: u64,
    first: u64,
    n: u64,
}

impl Worker {
    fn start(programs: &Path, first: u64, step: u64, n: u64, job: u64) -> Self {
        let errors = programs.with_file_name(format!("worker-{job}-{}.log", std::process::id()));
        let child = Command::new(std::env::current_exe().unwrap())
            .env("ETKV_DAMAGE_PROGRAMS", programs)
            .env("ETKV_DAMAGE_WORK", n.to_string())
            .env("ETKV_FIRST_SEED", first.to_string())
            .env("ETKV_JOBS", step.to_string())
            .env("ETKV_DEVICE", "cpu")
            // The arena of each thread uses address space.
            .env("MALLOC_ARENA_MAX", "1")
            .env("OPENBLAS_NUM_THREADS", "1")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&errors).unwrap())
            .spawn()
            .unwrap();
        Self { child, errors, step, first, n }
    }

    /// Sends the result of each program. Returns the next seed to run.
    fn follow(mut self, send: &mpsc::Sender<WorkerLine>) -> u64 {
        let lines = BufReader::new(self.child.stdout.take().unwrap()).lines();
        let (line, told) = mpsc::channel();
        let reader = std::thread::spawn(move || {
            lines.map_while(Result::ok).try_for_each(|text| line.send(text).ok())
        });
        let mut running: Option<(u64, f64, Instant)> = None;
        let mut next = self.first;
        let mut is_late = false;
        loop {
            let line = match told.recv_timeout(Duration::from_millis(500)) {
                Ok(line) => line,
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    if let Some((_, processor, clock)) = running {
                        let took = self.processor() - processor;
                        if took > PROCESSOR || clock.elapsed() > CLOCK {
                            is_late = true;
                            let _ = self.child.kill();
                        }
                    }
                    continue;
                }
            };
            let mut words = line.splitn(4, ' ');
            let word = words.next().unwrap_or_default();
            let seed = words.next().and_then(|seed| seed.parse().ok()).unwrap_or(0);
            match word {
                "begin" => running = Some((seed, self.processor(), Instant::now())),
                "end" => {
                    running = None;
                    next = seed + self.step;
                    let what = words.next().unwrap_or_default().to_owned();
                    let told = words.next().unwrap_or_default().to_owned();
                    let _ = send.send(WorkerLine { seed, what, told });
                }
                _ => {}
            }
        }
        let _ = reader.join();
        let status = self.child.wait().unwrap();
        if let Some((seed, ..)) = running {
            let what = match (is_late, status.signal()) {
                (true, _) => String::from("hang"),
                (false, Some(signal)) => format!("signal-{signal}"),
                (false, None) => format!("exit-{:?}", status.code()),
            };
            let _ = send.send(WorkerLine { seed, what, told: self.last_words() });
            next = seed + self.step;
        } else if next == self.first {
            panic!("a worker ran none of {} programs: {}", self.n, self.last_words());
        }
        if running.is_none() && !status.success() {
            // One of the earlier programs has written to memory that it does not own.
            let told =
                format!("{status} after seeds {} to here: {}", self.first, self.last_words());
            let _ =
                send.send(WorkerLine { seed: next - self.step, what: String::from("late"), told });
        }
        let _ = std::fs::remove_file(&self.errors);
        next
    }

    /// Returns the CPU seconds that the worker has used.
    fn processor(&self) -> f64 {
        let path = format!("/proc/{}/stat", self.child.id());
        let text = std::fs::read_to_string(path).unwrap_or_default();
        let fields = text.rsplit(')').next().unwrap_or_default();
        let of =
            |index| fields.split_whitespace().nth(index).and_then(|n: &str| n.parse::<f64>().ok());
        (of(11).unwrap_or(0.0) + of(12).unwrap_or(0.0)) / 100.0
    }

    /// Returns the last lines of the worker's stderr.
    fn last_words(&self) -> String {
        let mut text = Vec::new();
        if let Ok(mut file) = File::open(&self.errors) {
            let n = file.metadata().map_or(0, |data| data.len());
            let _ = file.seek(SeekFrom::Start(n.saturating_sub(1_000)));
            let _ = file.read_to_end(&mut text);
        }
        String::from_utf8_lossy(&text).trim().replace('\n', " | ")
    }
}
