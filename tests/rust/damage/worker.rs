//! A process that loads and runs damaged programs, with a limit on its memory.

use std::io::Write;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::path::Path;

use etkv::{CacheConfig, KvFormat, Session, Status, MLX_BACKEND};
use etkv_mlx_program::{
    Argument, ArgumentDescription, ConstantSource, DimDescription, Host, LoadOptions, Program,
};

use super::corpus::{self, ExportedProgram, Tensor};
use super::mutation::{self, DamagedProgram};
use super::{LEFT, MAX, TENSOR};

/// The maximum number of bytes of an input that is adapted to a damaged program.
const MAX_INPUT: usize = 16 << 20;

/// Runs `n` seeds, starting with `first`, in steps of `step`. Writes a line before and after each.
pub fn work(programs: &Path, first: u64, step: u64, n: u64) {
    let programs = corpus::read(programs);
    // A panic is reported to the parent process.
    std::panic::set_hook(Box::new(|info| eprintln!("{info}")));
    warm_up(&programs[0]);
    etkv_mlx_program::set_max_bytes(TENSOR);
    limit();
    let start = resident();
    let mut out = std::io::stdout().lock();
    for seed in (0..n).map(|index| first + index * step) {
        let damaged = mutation::damaged(&programs, seed);
        writeln!(out, "begin {seed}").unwrap();
        let ended = catch_unwind(AssertUnwindSafe(|| run(&damaged)));
        let mut told = ended.unwrap_or_else(|_| String::from("panic"));
        let grown = peak().saturating_sub(start);
        if grown > MAX {
            told = format!("memory {grown} bytes: {told}");
        }
        writeln!(out, "end {seed} {told}").unwrap();
        // The memory of earlier programs must not count for the next one.
        if resident() > start + MAX / 4 {
            writeln!(out, "grown {seed}").unwrap();
            return;
        }
    }
    writeln!(out, "done").unwrap();
}

/// Makes MLX initialize its global state.
fn warm_up(program: &ExportedProgram) {
    assert_eq!(run(&whole(program)), "ran", "{} does not run", program.name);
}

/// Returns an undamaged program.
fn whole(program: &ExportedProgram) -> DamagedProgram {
    DamagedProgram {
        program: program.clone(),
        passes: Default::default(),
        logits: Default::default(),
        runs: 1,
        changes: Vec::new(),
    }
}

/// Loads and runs the undamaged programs. Returns the name and the error of each that fails, except for programs that
/// need a Metal kernel, which no build here has.
pub fn refused(programs: &Path) -> Vec<String> {
    etkv_mlx_program::set_max_bytes(TENSOR);
    let programs = corpus::read(programs);
    let told = programs.iter().map(|program| (program, run(&whole(program))));
    told.filter(|(_, told)| told != "ran" && !told.contains("Metal kernel"))
        .map(|(program, told)| format!("{}: {told}", program.name))
        .collect()
}

/// Limits the address space of the process to its current size plus [`LEFT`].
fn limit() {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = status.split(' ').next().unwrap().parse().unwrap();
    let soft = pages * 4096 + LEFT;
    if std::env::var_os("ETKV_DAMAGE_UNLIMITED").is_some() {
        return;
    }
    for (resource, soft) in [(libc::RLIMIT_AS, soft), (libc::RLIMIT_CORE, 0)] {
        let limit = libc::rlimit { rlim_cur: soft, rlim_max: soft };
        // SAFETY: the struct outlives the call.
        assert_eq!(unsafe { libc::setrlimit(resource, &limit) }, 0);
    }
}

/// Returns the maximum number of bytes that were resident since the last call.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap_or_default();
    let _ = std::fs::write("/proc/self/clear_refs", "5");
    line.split_whitespace().next().and_then(|n| n.parse::<u64>().ok()).unwrap_or(0) * 1024
}

fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    status.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok()).unwrap_or(0) * 4096
}

/// Returns the result of a program as a line.
pub fn run(damaged: &DamagedProgram) -> String {
    match load_and_run(damaged) {
        Ok(()) => String::from("ran"),
        Err((place, error)) => {
            let message = error.to_string().replace('\n', " ");
            match error.status() {
                Status::Internal => format!("internal {message}"),
                status => format!("{place} {status:?}: {message}"),
            }
        }
    }
}

type Failure = (&'static str, etkv::Error);

fn load_and_run(damaged: &DamagedProgram) -> Result<(), Failure> {
    let DamagedProgram { program, .. } = damaged;
    let session = session(&program.cache);
    let mut options = LoadOptions::default();
    options.cache_key = session.as_ref().map(|session| session.key().to_owned());
    options.passes = damaged.passes;
    options.logits = damaged.logits;
    let mut source = Constants(&program.constants);
    let loaded = Program::load(&program.payload, &mut source, &options, None)
        .map_err(|error| ("load", error))?;
    for _ in 0..damaged.runs {
        let ran = execute(&loaded, &program.inputs, program);
        let Err(error) = ran else { continue };
        let of_inputs =
            matches!(error.status(), Status::InvalidArgument | Status::Shape | Status::Dtype);
        match of_inputs.then(|| fitting(program)).flatten() {
            Some(inputs) => execute(&loaded, &inputs, program).map_err(|error| ("run", error))?,
            None => return Err(("run", error)),
        }
    }
    Ok(())
}

fn execute(loaded: &Program, inputs: &[Tensor], program: &ExportedProgram) -> etkv::Result<()> {
    let arguments: Vec<Argument> = inputs
        .iter()
        .map(|input| match input.scalar_type {
            INTEGER => {
                Argument::of(input.bytes.iter().rev().fold(0, |n, &byte| n << 8 | i64::from(byte)))
            }
            scalar_type => Argument::tensor(scalar_type, &input.shape, &input.bytes),
        })
        .collect();
    let mut types = program.outputs.clone();
    types.resize(loaded.n_outputs(), FLOAT32);
    loaded.execute(&arguments, &types, &mut DiscardingHost::default())
}

/// ExecuTorch's number of float32, and the number that marks an integer input.
const FLOAT32: i8 = 6;
const INTEGER: i8 = -1;

/// Returns inputs with the dtypes and shapes that a damaged program declares, and the elements of its original
/// inputs.
fn fitting(program: &ExportedProgram) -> Option<Vec<Tensor>> {
    let described = Program::describe(&program.payload, None).ok()?;
    let whole: Vec<u8> = program.inputs.iter().flat_map(|input| input.bytes.clone()).collect();
    let mut inputs = Vec::new();
    for (index, argument) in described.inputs.iter().enumerate() {
        let own = program.inputs.get(index).map_or(&whole, |input| &input.bytes);
        inputs.push(fit(argument, own)?);
    }
    Some(inputs)
}

fn fit(argument: &ArgumentDescription, own: &[u8]) -> Option<Tensor> {
    let Some(shape) = &argument.shape else {
        let bytes = own.iter().copied().chain(std::iter::repeat(0)).take(8).collect();
        return Some(Tensor { scalar_type: INTEGER, shape: Vec::new(), bytes });
    };
    let shape: Vec<i32> = shape
        .iter()
        .map(|dim| match *dim {
            DimDescription::Static(size) => size,
            DimDescription::Range { most, .. } => most.unwrap_or(3).min(3),
            _ => 1,
        })
        .collect();
    let (scalar_type, size) = match &argument.dtype[..] {
        "uint8" => (0, 1),
        "int8" => (1, 1),
        "int16" => (2, 2),
        "int32" => (3, 4),
        "int64" => (4, 8),
        "float16" => (5, 2),
        "float32" => (6, 4),
        "bool" => (11, 1),
        "bfloat16" => (15, 2),
        "uint16" => (27, 2),
        "uint32" => (28, 4),
        "uint64" => (29, 8),
        _ => return None,
    };
    let n = shape
        .iter()
        .try_fold(size, |n: usize, &dim| n.checked_mul(usize::try_from(dim).ok()?))
        .filter(|&n| n <= MAX_INPUT)?;
    let own = if own.is_empty() { &[0] } else { own };
    Some(Tensor { scalar_type, shape, bytes: own.iter().copied().cycle().take(n).collect() })
}

fn session(cache: &str) -> Option<Session> {
    if cache.is_empty() {
        return None;
    }
    let numbers: Vec<i32> = cache.split(',').map(|number| number.parse().unwrap()).collect();
    let config = CacheConfig::uniform(numbers[1] as usize, numbers[2], numbers[3], numbers[0]);
    let format = match numbers.get(4) {
        Some(5) => KvFormat::F16,
        Some(15) => KvFormat::Bf16,
        _ => KvFormat::F32,
    };
    let session =
        Session::new(etkv::builders(), MLX_BACKEND, "contiguous", config.stored_as(format));
    Some(session.unwrap())
}

struct Constants<'a>(&'a [(String, Vec<u8>)]);

impl ConstantSource for Constants<'_> {
    fn find(&mut self, name: &str) -> Option<&[u8]> {
        self.0.iter().find(|(key, _)| key == name).map(|(_, bytes)| &bytes[..])
    }
}

/// A host that reads every output and keeps no output.
#[derive(Default)]
struct DiscardingHost(Vec<u8>);

impl Host for DiscardingHost {
    fn place(&mut self, _: usize, _: &[i32], n_bytes: usize) -> etkv_core::Result<&mut [u8]> {
        self.0.resize(n_bytes, 0);
        Ok(&mut self.0)
    }

    fn set_integer(&mut self, _: usize, _: i64) -> etkv_core::Result<()> {
        Ok(())
    }
}
