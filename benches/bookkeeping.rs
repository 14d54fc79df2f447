//! Measures the bookkeeping of caches, without tensors: planning a step, and the calls between steps.

use std::hint::black_box;

use criterion::{criterion_group, Criterion};
use etkv_benches::{table, time_of};
use etkv_core::bookkeeping::{CellsBookkeeping, ContiguousBookkeeping};

const CAPACITY: i32 = 131_072;

fn contiguous(length: i32) -> ContiguousBookkeeping {
    let mut book = ContiguousBookkeeping::new(CAPACITY, [None]);
    let plan = book.plan(&(0..length).collect::<Vec<_>>()).expect("a first step");
    book.commit(&plan).expect("a first step");
    book
}

/// Returns `n` sequences of `each` tokens, stored one after the other.
fn cells(n: i32, each: i32) -> CellsBookkeeping {
    let mut book = CellsBookkeeping::new(CAPACITY, []);
    for sequence in 0..n {
        append(&mut book, &vec![sequence; each as usize], &(0..each).collect::<Vec<_>>());
    }
    book
}

/// Returns `n` sequences of `each` tokens. The tokens arrive in turn, so no two consecutive cells form a run.
fn interleaved(n: i32, each: i32) -> CellsBookkeeping {
    let mut book = CellsBookkeeping::new(CAPACITY, []);
    let sequences: Vec<i32> = (0..n).collect();
    for position in 0..each {
        append(&mut book, &sequences, &vec![position; n as usize]);
    }
    book
}

fn append(book: &mut CellsBookkeeping, sequences: &[i32], positions: &[i32]) {
    book.begin_step(sequences).expect("sequences");
    book.plan(positions).expect("a step");
    book.commit().expect("a step");
}

/// Plans the next token of every sequence, and rolls it back.
fn plan_all(book: &mut CellsBookkeeping, sequences: &[i32], positions: &[i32]) {
    book.begin_step(sequences).expect("sequences");
    black_box(book.plan(positions).expect("a step"));
    book.abort();
}

fn plan_contiguous(book: &ContiguousBookkeeping, position: i32) {
    let plan = book.plan(black_box(&[position])).expect("a step");
    black_box(book.group(0, &plan).expect("a plan"));
}

fn plan_one(book: &mut CellsBookkeeping, position: i32) {
    black_box(book.plan(black_box(&[position])).expect("a step"));
    book.abort();
}

fn plans(criterion: &mut Criterion) {
    let book = contiguous(32_768);
    criterion.bench_function("plan: contiguous, 32,768", |b| {
        b.iter(|| plan_contiguous(&book, 32_768));
    });
    let mut book = cells(1, 32_768);
    criterion.bench_function("plan: cells, 1 sequence of 32,768", |b| {
        b.iter(|| plan_one(&mut book, 32_768));
    });
    let sequences: Vec<i32> = (0..64).collect();
    let positions = vec![1024; 64];
    let mut book = cells(64, 1024);
    criterion.bench_function("plan: cells, 64 sequences of 1,024, with mask", |b| {
        b.iter(|| plan_all(&mut book, &sequences, &positions));
    });
    let mut book = interleaved(64, 1024);
    criterion.bench_function("plan: cells, 64 sequences of 1,024 in turns, with mask", |b| {
        b.iter(|| plan_all(&mut book, &sequences, &positions));
    });
}

fn verbs(criterion: &mut Criterion) {
    let mut book = cells(1, 65_536);
    criterion.bench_function("fork of 65,536, and its removal", |b| {
        b.iter(|| fork(&mut book));
    });
    criterion.bench_function("tree of 32 after 65,536: propose, plan, commit 5", |b| {
        b.iter(|| tree(&mut book, 65_536));
    });
}

fn fork(book: &mut CellsBookkeeping) {
    book.seq_cp(0, 1, 0..i32::MAX).expect("a fork");
    book.seq_rm(1, 0..i32::MAX).expect("a removal");
}

/// Proposes 32 nodes and runs them. Then accepts 5 of them, and removes these 5.
fn tree(book: &mut CellsBookkeeping, length: i32) {
    let parents: Vec<i32> = (0..32).map(|node| (node - 1) / 2 - i32::from(node == 0)).collect();
    book.propose(0, &parents).expect("a tree");
    let mut depths = [0; 32];
    (1..32).for_each(|node: usize| depths[node] = depths[parents[node] as usize] + 1);
    let positions: Vec<i32> = depths.iter().map(|depth| length + depth).collect();
    book.plan(&positions).expect("a step");
    book.commit().expect("a step");
    book.commit_tree(0, &[0, 1, 3, 7, 15]).expect("a chain");
    book.seq_rm(0, length..i32::MAX).expect("a removal");
}

criterion_group!(groups, plans, verbs);

fn main() {
    let lengths = [256, 1024, 4096, 16_384, 65_536];
    table(
        "Integers against length",
        &lengths,
        &mut [
            (
                "contiguous plan",
                Box::new(|length| {
                    let book = contiguous(length);
                    time_of(|| plan_contiguous(&book, length))
                }),
            ),
            (
                "cells plan, 1 seq",
                Box::new(|length| {
                    let mut book = cells(1, length);
                    time_of(|| plan_one(&mut book, length))
                }),
            ),
            (
                "cells plan, 64 seqs",
                Box::new(|length| {
                    let each = length / 64;
                    let mut book = cells(64, each);
                    let sequences: Vec<i32> = (0..64).collect();
                    time_of(|| plan_all(&mut book, &sequences, &[each; 64]))
                }),
            ),
            (
                "fork and removal",
                Box::new(|length| {
                    let mut book = cells(1, length);
                    time_of(|| fork(&mut book))
                }),
            ),
            (
                "tree of 32, 5 accepted",
                Box::new(|length| {
                    let mut book = cells(1, length);
                    time_of(|| tree(&mut book, length))
                }),
            ),
        ],
    );
    groups();
    Criterion::default().configure_from_args().final_summary();
}
