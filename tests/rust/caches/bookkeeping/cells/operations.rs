//! Generated operations on a pool of cells.

use etkv_core::LayerPolicy;
use etkv_tests::shrink::Case;
use etkv_tests::Rng;

/// `policies` has an entry for each layer group except the first, which has full history.
#[derive(Debug, Clone)]
pub struct Config {
    pub capacity: i32,
    pub max_step_tokens: i32,
    pub policies: Vec<LayerPolicy>,
}

/// When the operation runs, each number is reduced modulo the number of possible values.
#[derive(Debug, Clone)]
pub enum Op {
    /// Runs a step of `n` tokens for each of these sequences, interleaved or one sequence after the other.
    Step {
        sequences: Vec<i32>,
        n: i32,
        in_turns: bool,
        abort: bool,
    },
    /// Runs a step of `n` tokens that all of these sequences share.
    Shared {
        sequences: Vec<i32>,
        n: i32,
        abort: bool,
    },
    /// Runs a step of `n` tokens without a declaration of their sequences.
    Undeclared {
        n: i32,
        abort: bool,
    },
    /// Runs a step in which the position of one token is wrong by `by`.
    Skewed {
        sequence: i32,
        n: i32,
        odd: usize,
        by: i32,
    },
    Copy {
        source: i32,
        target: i32,
        start: i32,
        end: i32,
    },
    Remove {
        sequence: i32,
        start: i32,
        end: i32,
    },
    /// Rewinds to a position that differs by `by` from the least allowed one.
    BackToLeast {
        sequence: i32,
        by: i32,
    },
    Keep {
        sequence: i32,
    },
    /// A number n stands for the parent `n % (number of earlier nodes + 2) - 1`. `i32::MAX` stands for the previous
    /// node.
    Propose {
        sequence: i32,
        parents: Vec<i32>,
    },
    /// Accepts a node and its ancestors, or, if `chain` is false, arbitrary nodes.
    Accept {
        sequence: i32,
        node: i32,
        chain: bool,
    },
    Compact,
    Clear,
}

pub fn generate(rng: &mut Rng) -> Case<Config, Op> {
    let policy = |rng: &mut Rng| {
        let width = rng.pick(&[1, 2, 3, 8, 20, 64]);
        match rng.chance(0.4) {
            true => LayerPolicy::Chunk { chunk: width },
            false => LayerPolicy::Window { window: width, sinks: rng.pick(&[0, 0, 1, 4, 9]) },
        }
    };
    let config = Config {
        capacity: rng.pick(&[1, 8, 30, 100, 300]),
        max_step_tokens: rng.pick(&[1, 2, 7, 40]),
        policies: (0..rng.below(3)).map(|_| policy(rng)).collect(),
    };
    let n_sequences = rng.pick(&[1, 2, 4, 12]);
    let longest = rng.pick(&[1, 3, config.max_step_tokens as usize, 40]);
    let trees = rng.chance(0.6);
    let op = |rng: &mut Rng| {
        let any = |rng: &mut Rng| match rng.below(60) {
            0 => rng.pick(&[-1, 255, 256, i32::MAX, i32::MIN]),
            _ => (rng.below(n_sequences) * rng.pick(&[1, 1, 21])) as i32,
        };
        let several = |rng: &mut Rng| -> Vec<i32> {
            let n = if rng.chance(0.02) { 0 } else { 1 + rng.below(n_sequences) };
            (0..n).map(|_| any(rng)).collect()
        };
        let (place, other) = (rng.below(1000) as i32, rng.below(1000) as i32);
        let n = 1 + rng.below(longest) as i32;
        let abort = rng.chance(0.2);
        let tree_op = rng.below(10);
        match rng.below(if trees { 50 } else { 32 }) {
            0 if rng.chance(0.2) => Op::Clear,
            0 | 1 => Op::Compact,
            2 => Op::Skewed {
                sequence: any(rng),
                n,
                odd: rng.below(longest),
                by: rng.pick(&[-1, 1, 2, i32::MAX, i32::MIN]),
            },
            3..=6 => Op::Copy {
                source: any(rng),
                target: any(rng),
                start: if rng.chance(0.7) { -i32::from(rng.chance(0.02)) } else { place },
                end: if rng.chance(0.6) { i32::MAX } else { other },
            },
            7..=10 => Op::Remove {
                sequence: any(rng),
                start: if rng.chance(0.4) { -i32::from(rng.chance(0.02)) } else { place },
                end: if rng.chance(0.6) { i32::MAX } else { other },
            },
            11 | 12 => Op::BackToLeast { sequence: any(rng), by: rng.pick(&[0, 0, 1, -1]) },
            13 if rng.chance(0.3) => Op::Keep { sequence: any(rng) },
            14 | 15 => Op::Shared { sequences: several(rng), n, abort },
            16..=21 => Op::Undeclared { n, abort },
            32..=41 if tree_op < 6 => Op::Propose {
                sequence: any(rng),
                parents: match rng.chance(0.3) {
                    true => vec![i32::MAX; 1 + rng.below(3)],
                    false => (0..rng.below(12)).map(|_| rng.below(1000) as i32).collect(),
                },
            },
            32..=41 => Op::Accept { sequence: any(rng), node: place, chain: rng.chance(0.9) },
            42..=49 => Op::Undeclared { n, abort },
            _ => Op::Step { sequences: several(rng), n, in_turns: rng.chance(0.5), abort },
        }
    };
    let ops = (0..150).map(|_| op(rng)).collect();
    Case { config, ops }
}
