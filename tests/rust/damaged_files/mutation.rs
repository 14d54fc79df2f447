//! Changes to the parts of a file. Its checksums are then corrected, so the damage can only be detected in the
//! integers.

use etkv_core::bookkeeping::BLOCK;
use etkv_core::snapshot::{
    Book, CellsState, CheckpointState, ContiguousState, GroupState, SequenceState, TreeState,
};
use etkv_core::{KvFormat, RecurrentLayer, Snapshot};
use etkv_tests::Rng;

use crate::file::Parts;

/// Changes a number a little, or sets it to a number near a limit.
fn number(rng: &mut Rng, n: &mut i32) {
    const ODD: [i32; 16] = [
        i32::MIN,
        -BLOCK,
        -1,
        0,
        1,
        2,
        BLOCK - 1,
        BLOCK,
        255,
        256,
        511,
        1 << 16,
        1 << 22,
        1 << 30,
        i32::MAX - 1,
        i32::MAX,
    ];
    *n = match rng.below(4) {
        0 => n.wrapping_add(rng.pick(&[1, -1, 2, -2])),
        1 => n.wrapping_add(rng.pick(&[BLOCK, -BLOCK, 2 * BLOCK, BLOCK - 1])),
        2 => rng.below(700) as i32,
        _ => rng.pick(&ODD),
    };
}

fn index(rng: &mut Rng, len: usize) -> Option<usize> {
    (len > 0).then(|| rng.below(len))
}

/// Removes, duplicates, moves or swaps elements.
fn rearrange<T: Clone>(rng: &mut Rng, list: &mut Vec<T>) {
    let (Some(at), Some(other)) = (index(rng, list.len()), index(rng, list.len())) else {
        return;
    };
    match rng.below(5) {
        0 => drop(list.remove(at)),
        1 => list.insert(other, list[at].clone()),
        2 => list.swap(at, other),
        3 => list.truncate(at),
        _ => list[at] = list[other].clone(),
    }
}

/// Changes some integers of a cache.
pub fn change_snapshot(rng: &mut Rng, snapshot: &mut Snapshot) {
    if rng.chance(0.1) {
        return change_facts(rng, snapshot);
    }
    match &mut snapshot.book {
        Book::Contiguous(ContiguousState { length, dropped }) => {
            match index(rng, dropped.len()).filter(|_| rng.chance(0.5)) {
                Some(at) => number(rng, &mut dropped[at]),
                None => number(rng, length),
            }
        }
        Book::Cells(state) => change_cells(rng, state),
    }
}

/// Changes sizes and settings that must be equal in the cache and its file.
fn change_facts(rng: &mut Rng, snapshot: &mut Snapshot) {
    match rng.below(9) {
        0 => snapshot.kind = rng.pick(&["contiguous", "seq", "tree", "", "rows"]).into(),
        1 => number(rng, &mut snapshot.capacity),
        2 => number(rng, &mut snapshot.max_step_tokens),
        3 => number(rng, &mut snapshot.anchors),
        4 => rearrange(rng, &mut snapshot.layers),
        5 => rearrange(rng, &mut snapshot.recurrent_layers),
        6 => snapshot.awaits = !snapshot.awaits,
        7 => snapshot.formats[rng.below(2)] = rng.pick(&[KvFormat::F32, KvFormat::RowInt4]),
        _ => {
            let Some(at) = index(rng, snapshot.recurrent_layers.len()) else { return };
            let first = rng.chance(0.5);
            let size = match &mut snapshot.recurrent_layers[at] {
                RecurrentLayer::Convolution { channels, .. } if first => channels,
                RecurrentLayer::Convolution { width, .. } => width,
                RecurrentLayer::Recurrence { heads, .. } if first => heads,
                RecurrentLayer::Recurrence { v_dim, .. } => v_dim,
            };
            number(rng, size);
        }
    }
}

/// Returns a layer group or, more often, the rows or the anchors of recurrent layers.
fn group<'a>(rng: &mut Rng, state: &'a mut CellsState) -> Option<&'a mut GroupState> {
    match &mut state.recurrent {
        Some(recurrent) if rng.chance(0.7) => {
            Some(if rng.chance(0.5) { &mut recurrent.rows } else { &mut recurrent.anchors })
        }
        _ => index(rng, state.groups.len()).map(|at| &mut state.groups[at]),
    }
}

/// Returns every layer group, and the rows and the anchors of recurrent layers.
fn groups(state: &mut CellsState) -> impl Iterator<Item = &mut GroupState> {
    let recurrent = state.recurrent.iter_mut();
    state.groups.iter_mut().chain(recurrent.flat_map(|own| [&mut own.rows, &mut own.anchors]))
}

fn change_cells(rng: &mut Rng, state: &mut CellsState) {
    match rng.below(20) {
        0..=7 => {
            if let Some(group) = group(rng, state) {
                change_group(rng, group);
            }
        }
        8..=11 => change_checkpoints(rng, state),
        12 | 13 => change_trees(rng, state),
        14 => renumber(rng, state),
        15 => state.recurrent = None,
        16 => rearrange(rng, &mut state.groups),
        17 => exchange_rows_and_anchors(state),
        _ => cut(rng, state),
    }
}

fn exchange_rows_and_anchors(state: &mut CellsState) {
    if let Some(recurrent) = &mut state.recurrent {
        std::mem::swap(&mut recurrent.rows, &mut recurrent.anchors);
    }
}

fn change_group(rng: &mut Rng, group: &mut GroupState) {
    if rng.chance(0.1) {
        return number(rng, &mut group.size);
    }
    if rng.chance(0.15) {
        return spread(rng, group);
    }
    if rng.chance(0.1) {
        return rearrange(rng, &mut group.sequences);
    }
    let Some(at) = index(rng, group.sequences.len()) else { return };
    let others = group.sequences.clone();
    let SequenceState { sequence, runs } = &mut group.sequences[at];
    match rng.below(8) {
        0 => number(rng, sequence),
        1 => rearrange(rng, runs),
        // Replaces the cells of an owner by the cells of another owner.
        2 => runs.clone_from(&others[rng.below(others.len())].runs),
        3 => {
            // Moves all positions.
            let by = rng.pick(&[-BLOCK, -1, 1, BLOCK]);
            runs.iter_mut().for_each(|run| run[0] = run[0].wrapping_add(by));
        }
        4 => {
            // Removes the first or the last positions.
            let ends = rng.chance(0.5);
            let n = rng.pick(&[1, 2, 3, BLOCK]);
            let run = if ends { runs.last_mut() } else { runs.first_mut() };
            if let Some([position, cell, len]) = run {
                let n = n.min(*len - 1);
                *len -= n;
                if !ends {
                    (*position, *cell) = (*position + n, *cell + n);
                }
            }
        }
        _ => {
            let Some(at) = index(rng, runs.len()) else { return };
            let field = rng.below(3);
            number(rng, &mut runs[at][field]);
        }
    }
}

/// Moves all cells of a layer group far away, which leaves holes.
fn spread(rng: &mut Rng, group: &mut GroupState) {
    let by = rng.pick(&[1, 50, 1000, 1 << 20, (1 << 22) - 2000, 1 << 24, i32::MAX - 600]);
    let least = rng.below(300) as i32;
    let runs = group.sequences.iter_mut().flat_map(|held| &mut held.runs);
    for run in runs.filter(|run| run[1] >= least) {
        run[1] = run[1].saturating_add(by);
    }
    group.size = group.size.max(by.saturating_add(600));
}

fn change_checkpoints(rng: &mut Rng, state: &mut CellsState) {
    let Some(at) = index(rng, state.checkpoints.len()) else {
        // Adds a checkpoint for which no rows are kept.
        let position = BLOCK * (1 + rng.below(4) as i32);
        return state.checkpoints.push(CheckpointState {
            owner: 256 + rng.below(3) as i32,
            position,
            sequences: vec![0],
        });
    };
    match rng.below(10) {
        0 | 1 => number(rng, &mut state.checkpoints[at].position),
        2 => number(rng, &mut state.checkpoints[at].owner),
        3 => state.checkpoints[at].sequences.push(rng.below(6) as i32),
        4 => rearrange(rng, &mut state.checkpoints[at].sequences),
        5 => {
            let sequences = &mut state.checkpoints[at].sequences;
            let Some(member) = index(rng, sequences.len()) else { return };
            number(rng, &mut sequences[member]);
        }
        // Adds a copy of a checkpoint that owns other cells.
        6 | 7 => {
            let from = state.checkpoints[at].clone();
            let taken = |owner: i32| state.checkpoints.iter().any(|kept| kept.owner == owner);
            let owner = (256..512).rev().find(|&owner| !taken(owner)).unwrap_or(511);
            let by = rng.pick(&[0, 0, -BLOCK, BLOCK, 1]);
            for group in groups(state) {
                let held = group.sequences.iter().find(|held| held.sequence == from.owner);
                let copied = held.map(|held| SequenceState { sequence: owner, ..held.clone() });
                group.sequences.extend(copied);
            }
            let position = from.position.saturating_add(by);
            state.checkpoints.push(CheckpointState { owner, position, ..from });
        }
        // Gives a checkpoint the cells of a sequence, or removes the checkpoint's cells.
        8 => {
            let owner = state.checkpoints[at].owner;
            let Some(group) = group(rng, state) else { return };
            let donor = group.sequences.first().map(|held| held.runs.clone());
            let own = group.sequences.iter_mut().find(|held| held.sequence == owner);
            if let (Some(own), Some(donor)) = (own, donor) {
                own.runs = donor;
            }
        }
        _ => {
            let owner = state.checkpoints[at].owner;
            if let Some(group) = group(rng, state) {
                group.sequences.retain(|held| held.sequence != owner);
            }
        }
    }
}

fn change_trees(rng: &mut Rng, state: &mut CellsState) {
    let n_groups = state.groups.len();
    let Some(at) = index(rng, state.trees.len()) else {
        return state.trees.push(TreeState {
            sequence: rng.below(4) as i32,
            parents: vec![-1, 0, rng.below(2) as i32],
            n_written: rng.below(2),
            cells: vec![vec![rng.below(400) as i32]; n_groups],
            rows: vec![rng.below(400) as i32],
            anchors: vec![(0, rng.below(9) as i32)],
        });
    };
    let tree = &mut state.trees[at];
    match rng.below(8) {
        0 => number(rng, &mut tree.sequence),
        1 => match index(rng, tree.parents.len()) {
            Some(node) => number(rng, &mut tree.parents[node]),
            None => tree.parents.push(-1),
        },
        2 => tree.n_written = rng.pick(&[0, 1, tree.parents.len(), usize::MAX]),
        3 => {
            let Some(group) = index(rng, tree.cells.len()) else { return };
            match index(rng, tree.cells[group].len()).filter(|_| rng.chance(0.7)) {
                Some(node) => number(rng, &mut tree.cells[group][node]),
                None => rearrange(rng, &mut tree.cells),
            }
        }
        4 => match index(rng, tree.rows.len()).filter(|_| rng.chance(0.7)) {
            Some(node) => number(rng, &mut tree.rows[node]),
            None => rearrange(rng, &mut tree.rows),
        },
        5 => {
            let node = rng.pick(&[0, 1, tree.n_written.saturating_sub(1), usize::MAX]);
            tree.anchors.push((node, rng.pick(&[0, 1, 2, 7, 1 << 20, i32::MAX, -1])));
        }
        6 => match index(rng, tree.anchors.len()) {
            Some(at) => number(rng, &mut tree.anchors[at].1),
            None => tree.anchors.push((0, 0)),
        },
        _ => rearrange(rng, &mut state.trees),
    }
}

fn renumber(rng: &mut Rng, state: &mut CellsState) {
    let (from, to) = (rng.below(4) as i32, rng.pick(&[1, 5, 200, 255, 256, 300]));
    for group in groups(state) {
        for held in group.sequences.iter_mut().filter(|held| held.sequence == from) {
            held.sequence = to;
        }
        group.sequences.sort_by_key(|held| held.sequence);
    }
    for tree in state.trees.iter_mut().filter(|tree| tree.sequence == from) {
        tree.sequence = to;
    }
    state.trees.sort_by_key(|tree| tree.sequence);
    let members = state.checkpoints.iter_mut().flat_map(|kept| &mut kept.sequences);
    members.filter(|member| **member == from).for_each(|member| *member = to);
}

/// Shortens a sequence in every layer group, or in all except the anchors.
fn cut(rng: &mut Rng, state: &mut CellsState) {
    let (sequence, end) = (rng.below(4) as i32, rng.below(400) as i32);
    let keeps_anchors = rng.chance(0.3);
    let anchors = state.groups.len() + 1;
    for (at, group) in groups(state).enumerate() {
        if at == anchors && keeps_anchors {
            continue;
        }
        let end = if at == anchors { end / BLOCK + 1 } else { end };
        for held in group.sequences.iter_mut().filter(|held| held.sequence == sequence) {
            held.runs.retain_mut(|[position, _, len]| {
                *len = (*len).min(end.saturating_sub(*position));
                *len > 0
            });
        }
        group.sequences.retain(|held| !held.runs.is_empty());
    }
}

/// Swaps, duplicates, cuts or renames tensors, or changes token ids or words of the header.
pub fn change_sections(rng: &mut Rng, parts: &mut Parts) {
    let at = rng.below(parts.sections.len());
    let other = rng.below(parts.sections.len());
    match rng.below(10) {
        0 => parts.sections.swap(at, other),
        1 => drop(parts.sections.remove(at)),
        2 => parts.sections.insert(other, parts.sections[at].clone()),
        3 => {
            let name = parts.sections[at].name.clone();
            parts.sections[at].name = std::mem::replace(&mut parts.sections[other].name, name);
        }
        4 => {
            let bytes = std::mem::take(&mut parts.sections[at].bytes);
            parts.sections[at].bytes = std::mem::replace(&mut parts.sections[other].bytes, bytes);
        }
        5 => {
            let section = &mut parts.sections[at];
            let n = rng.below(section.bytes.len() + 1);
            section.bytes.truncate(n);
        }
        6 => {
            let section = &mut parts.sections[at];
            let Some(dim) = index(rng, section.shape.len()) else { return };
            section.shape[dim] = rng.pick(&[0, 1, section.shape[dim] + 1, 1 << 40, u64::MAX]);
        }
        7 => {
            // Fills a part of a section with one byte.
            let section = &mut parts.sections[at];
            let Some(start) = index(rng, section.bytes.len()) else { return };
            let end = (start + rng.below(200)).min(section.bytes.len());
            section.bytes[start..end].fill(rng.pick(&[0, 0x7f, 0xff]));
        }
        8 => {
            let values = ["0", "-1", "64", "2147483647", "9999999999", ""];
            let name = rng.pick(&["rewindable_to", "version", "kind", "model"]);
            parts.words.insert(name.into(), rng.pick(&values).into());
        }
        _ => {
            // Changes the length of the text.
            let tokens = &mut parts.sections[0];
            let n = rng.below(2 * tokens.bytes.len() / 8 + 2);
            tokens.bytes.resize(8 * n, 1);
            tokens.shape = vec![n as u64];
        }
    }
}

/// Changes some bytes, without correcting the checksums.
pub fn change_bytes(rng: &mut Rng, file: &mut Vec<u8>) {
    let at = rng.below(file.len());
    match rng.below(4) {
        0 => file[at] ^= 1 << rng.below(8),
        1 => file.truncate(at),
        2 => drop(file.drain(at..(at + 1 + rng.below(40)).min(file.len()))),
        _ => file.extend(vec![rng.next_u64() as u8; 1 + rng.below(40)]),
    }
}
