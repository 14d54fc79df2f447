//! The damage of a seed, which is the same on every machine.

use std::collections::BTreeMap;

use etkv_mlx_program::{LogitsRows, Passes};
use etkv_tests::Rng;

use super::corpus::{ExportedProgram, Kind, Site};

/// A damaged program, and the settings with which it is loaded and run.
pub struct DamagedProgram {
    pub program: ExportedProgram,
    pub passes: Passes,
    pub logits: LogitsRows,
    pub runs: usize,
    /// Descriptions of the changes.
    pub changes: Vec<String>,
}

/// Returns the damaged program of a seed. Each operation has the same number of seeds.
pub fn damaged(programs: &[ExportedProgram], seed: u64) -> DamagedProgram {
    let mut rng = Rng::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5dee_ce66);
    let rng = &mut rng;
    // The first random numbers of consecutive seeds are similar, so they are skipped.
    for _ in 0..4 {
        rng.next_u64();
    }
    let mut of_op: BTreeMap<&str, Vec<&ExportedProgram>> = BTreeMap::new();
    for program in programs {
        for op in &program.ops {
            of_op.entry(op).or_default().push(program);
        }
    }
    let op = below(rng, of_op.len());
    let of_op = of_op.into_values().nth(op).unwrap();
    let mut damage =
        Damage { program: of_op[below(rng, of_op.len())].clone(), changes: Vec::new(), rng };
    match below(damage.rng, 100) {
        0..82 => damage.numbers(),
        82..88 => damage.bits(),
        88..92 => damage.bytes(),
        92..96 => damage.words(),
        _ => damage.end(),
    }
    if one_in(damage.rng, 7) {
        damage.inputs();
    }
    if one_in(damage.rng, 12) {
        damage.constants();
    }
    let Damage { program, changes, rng } = damage;
    let passes = match below(rng, 20) {
        0..12 => Passes::Default,
        12..17 => Passes::Gpu,
        _ => Passes::None,
    };
    let logits = if one_in(rng, 40) { LogitsRows::Last } else { LogitsRows::All };
    let runs = if one_in(rng, 3) { 2 } else { 1 };
    DamagedProgram { program, passes, logits, runs, changes }
}

fn below(rng: &mut Rng, n: usize) -> usize {
    rng.below(n.max(1))
}

fn one_in(rng: &mut Rng, n: usize) -> bool {
    rng.below(n) == 0
}

fn pick<T: Copy>(rng: &mut Rng, list: &[T]) -> T {
    list[below(rng, list.len())]
}

struct Damage<'a> {
    program: ExportedProgram,
    changes: Vec<String>,
    rng: &'a mut Rng,
}

impl Damage<'_> {
    /// Changes numbers in place.
    fn numbers(&mut self) {
        let n = match below(self.rng, 20) {
            0..12 => 1,
            12..17 => 2,
            _ => 3 + below(self.rng, 4),
        };
        for _ in 0..n {
            let site = self.site();
            self.number(site);
        }
    }

    fn site(&mut self) -> Site {
        // These changes are rarer, because the verifier refuses most changes to the structure, and the decoder
        // refuses most changes to tensors.
        let (inside, kinds) = (below(self.rng, 100) < 75, below(self.rng, 100));
        let fits = |kind: Kind| match kind {
            Kind::Slot | Kind::Type => (72..86).contains(&kinds),
            Kind::Length => (86..95).contains(&kinds),
            Kind::Offset | Kind::Field | Kind::Text => 95 <= kinds,
            _ => kinds < 72,
        };
        let sites = &self.program.sites;
        let fit: Vec<Site> =
            sites.iter().copied().filter(|site| fits(site.kind) && site.inside == inside).collect();
        pick(self.rng, if fit.is_empty() { sites } else { &fit })
    }

    /// Returns another site of the same kind.
    fn other(&mut self, site: Site) -> Site {
        let same: Vec<Site> =
            self.program.sites.iter().copied().filter(|other| other.kind == site.kind).collect();
        pick(self.rng, &same)
    }

    fn number(&mut self, site: Site) {
        let Site { at, kind, .. } = site;
        let size = match kind {
            Kind::Byte | Kind::Type | Kind::Text => 1,
            Kind::Field => 2,
            Kind::Int64 | Kind::Double => 8,
            _ => 4,
        };
        let old = read(&self.program.payload, at, size);
        let other = self.other(site);
        let of_other = read(&self.program.payload, other.at, size);
        let rng = &mut *self.rng;
        let small = below(rng, 72) as i64 - 8;
        let new = match kind {
            Kind::Byte => {
                let known = [0, 1, 2, 3, 4, 5, 6, 11, 15, 27, 28, 29, 7, 9, 127, 128, 255];
                if one_in(rng, 4) {
                    rng.below(256) as u64
                } else {
                    pick(rng, &known)
                }
            }
            Kind::Text | Kind::Type => rng.below(if kind == Kind::Text { 256 } else { 140 }) as u64,
            Kind::Int32 | Kind::Int64 => {
                let old = if size == 4 { i64::from(old as i32) } else { old as i64 };
                let near = [old.wrapping_add(1), old.wrapping_sub(1), old.wrapping_mul(2), old / 2];
                let wide = [i64::MIN, i64::MAX, 1 << 31, 1 << 32, 1 << 40, -(1 << 31) - 1, 1 << 62];
                let absurd = [
                    0,
                    1,
                    -1,
                    -2,
                    i64::from(i32::MIN),
                    i64::from(i32::MAX),
                    1 << 30,
                    1 << 20,
                    65_536,
                    46_341,
                    1 << 12,
                ];
                (match below(rng, 10) {
                    0 | 1 => small,
                    2 | 3 => pick(rng, &near),
                    4 => old.wrapping_neg(),
                    5 => of_other as i64,
                    6 if size == 8 => pick(rng, &wide),
                    _ => pick(rng, &absurd),
                }) as u64
            }
            Kind::Float => {
                let some = [
                    0.0,
                    -0.0,
                    f32::NAN,
                    f32::INFINITY,
                    f32::NEG_INFINITY,
                    f32::MAX,
                    f32::MIN_POSITIVE,
                    1e-45,
                    -1.0,
                    2.0,
                    1e30,
                ];
                u64::from(pick(rng, &some).to_bits())
            }
            Kind::Double => {
                let some = [
                    0.0,
                    -0.0,
                    f64::NAN,
                    f64::INFINITY,
                    f64::NEG_INFINITY,
                    f64::MAX,
                    5e-324,
                    -1.0,
                    2.0,
                    1e300,
                    9.3e18,
                ];
                pick(rng, &some).to_bits()
            }
            Kind::Uint32 | Kind::Slot => match below(rng, 10) {
                0..7 => of_other,
                7 => rng.below(16) as u64,
                8 => old.wrapping_add(1),
                _ => pick(rng, &[0, u64::from(u32::MAX), 1 << 31, 1_000_000, 1 << 20]),
            },
            Kind::Length => match below(rng, 10) {
                0..2 => 0,
                2..6 => old.wrapping_sub(1),
                6 => 1,
                7 => old.wrapping_add(1),
                8 => old * 2,
                _ => pick(rng, &[u64::from(u32::MAX), 1 << 31, 1 << 29, of_other]),
            },
            // Points to the target of another offset.
            Kind::Offset if !one_in(rng, 4) => {
                (other.at as u64).wrapping_add(of_other).wrapping_sub(at as u64)
            }
            Kind::Offset => pick(rng, &[0, 4, old.wrapping_add(4), u64::from(u32::MAX), 1 << 31]),
            Kind::Field => match below(rng, 3) {
                0 => 0,
                1 => of_other,
                _ => rng.below(64) as u64,
            },
        };
        let new = new & (u64::MAX >> (64 - 8 * size));
        // Swaps two numbers of the same kind.
        let is_swap = matches!(kind, Kind::Int32 | Kind::Int64 | Kind::Slot | Kind::Type)
            && one_in(self.rng, 6);
        let new = if is_swap { of_other } else { new };
        if is_swap {
            self.write(other.at, old, size);
        }
        self.write(at, new, size);
        let swapped =
            if is_swap { format!(", and {} is {old:#x}", other.at) } else { String::new() };
        self.changes.push(format!("{kind:?} at {at} is {new:#x}, was {old:#x}{swapped}"));
    }

    fn write(&mut self, at: usize, number: u64, size: usize) {
        self.program.payload[at..at + size].copy_from_slice(&number.to_le_bytes()[..size]);
    }

    fn bits(&mut self) {
        for _ in 0..pick(self.rng, &[1, 1, 2, 8]) {
            let (at, bit) = (below(self.rng, self.program.payload.len()), below(self.rng, 8));
            self.program.payload[at] ^= 1 << bit;
            self.changes.push(format!("bit {bit} of byte {at}"));
        }
    }

    fn bytes(&mut self) {
        for _ in 0..pick(self.rng, &[1, 1, 3]) {
            let at = below(self.rng, self.program.payload.len());
            let byte = self.rng.below(256) as u8;
            self.program.payload[at] = byte;
            self.changes.push(format!("byte {at} is {byte}"));
        }
    }

    fn words(&mut self) {
        let at = below(self.rng, self.program.payload.len() / 4 - 1) * 4;
        let size = pick(self.rng, &[4, 8]);
        let number = self.absurd();
        self.write(at, number, size);
        self.changes.push(format!("{size} bytes at {at} are {number:#x}"));
    }

    fn absurd(&mut self) -> u64 {
        let absurd =
            [0, 1, u64::MAX, 1 << 31, 0x7fff_ffff, 1 << 63, u64::MAX >> 1, 1 << 32, 0x7fc0_0000];
        pick(self.rng, &absurd)
    }

    fn end(&mut self) {
        let n = below(self.rng, self.program.payload.len());
        self.program.payload.truncate(n);
        self.changes.push(format!("the first {n} bytes"));
    }

    fn inputs(&mut self) {
        let n = self.program.inputs.len();
        if n == 0 {
            return;
        }
        let (index, absurd) = (below(self.rng, n), self.absurd().to_le_bytes());
        let at = below(self.rng, usize::MAX >> 1);
        overwrite(&mut self.program.inputs[index].bytes, at, &absurd);
        self.changes.push(format!("8 bytes of input {index}"));
    }

    fn constants(&mut self) {
        let n = self.program.constants.len();
        if n == 0 {
            return;
        }
        let (index, absurd) = (below(self.rng, n), self.absurd().to_le_bytes());
        let at = below(self.rng, usize::MAX >> 1);
        let constant = &mut self.program.constants[index].1;
        match one_in(self.rng, 4) {
            true => constant.truncate(at % (constant.len() + 1)),
            false => overwrite(constant, at, &absurd),
        }
        self.changes.push(format!("constant {index}"));
    }
}

fn read(payload: &[u8], at: usize, size: usize) -> u64 {
    payload[at..at + size].iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}

/// Writes a number at an offset that is a multiple of its size.
fn overwrite(bytes: &mut [u8], at: usize, number: &[u8; 8]) {
    let words = bytes.len() / 8;
    if words > 0 {
        let at = at % words * 8;
        bytes[at..at + 8].copy_from_slice(number);
    } else {
        let n = bytes.len();
        bytes.copy_from_slice(&number[..n]);
    }
}
