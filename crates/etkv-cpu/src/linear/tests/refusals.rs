//! Calls with wrong sizes or ids, which must not write anything.

use etkv_core::{Result, Status};

use super::reference::Weights;
use crate::attention::synthetic::Random;
use crate::linear::embedding::{embed_into, Embedding};
use crate::linear::run::{multiply_into, Linear, Product};
use crate::linear::workspace::Workspace;
use crate::linear::{Scales, WeightFormat};
use crate::parallel::Serial;
use crate::refused::refused;

const INT4: WeightFormat = WeightFormat::Int4 { group: 32, scales: Scales::Bf16 };

fn unwritten(done: Result<()>, out: &[f32], status: Status, told: &str) {
    refused(done, status, told);
    assert!(out.iter().all(|x| x.is_nan()));
}

#[test]
fn products_of_other_sizes_are_refused() {
    let weights = Weights::new(INT4, 1, 20, 64, &mut Random::new(1));
    let floats = [0.0; 256];
    let run = |format, rows: &[usize], n_x: usize, n_weights, n_bias: usize, n_out| {
        let mut out = vec![f32::NAN; n_out];
        let linear = Linear { columns: 64, format, rows: rows.to_vec() };
        let weights = &weights.bytes()[..n_weights];
        let mut products = [Product { weights, bias: Some(&floats[..n_bias]), out: &mut out }];
        let mut workspace = Workspace::default();
        let x = &floats[..n_x];
        let done = multiply_into(&linear, x, &mut products, &mut workspace, &Serial);
        (done, out)
    };
    let size = weights.bytes().len();
    let (done, out) = run(INT4, &[20], 128, size, 20, 40);
    done.unwrap();
    assert!(out.iter().all(|x| *x == 0.0));
    for (rows, n_x, n_weights, n_bias, n_out, told) in [
        (&[20][..], 100, size, 20, 40, "expected 1 products of rows of 64, got 1 of 100"),
        (&[20, 20], 128, size, 20, 40, "expected 2 products"),
        (&[20], 128, size - 1, 20, 40, "weights: expected"),
        (&[33], 128, size, 33, 66, "weights: expected"),
        (&[20], 128, size, 19, 40, "bias: expected 20"),
        (&[20], 128, size, 20, 41, "output: expected 40"),
    ] {
        let (done, out) = run(INT4, rows, n_x, n_weights, n_bias, n_out);
        unwritten(done, &out, Status::Shape, told);
    }
    for (format, rows, told) in [
        (
            WeightFormat::Int4 { group: 48, scales: Scales::Bf16 },
            20,
            "group size: expected a multiple of 32",
        ),
        (WeightFormat::Int8 { group: 512, scales: Scales::Bf16 }, 20, "up to 256, got 512"),
        (
            WeightFormat::Int4 { group: 96, scales: Scales::Bf16 },
            20,
            "group size 96 does not divide rows of 64",
        ),
        (
            WeightFormat::Int4 { group: 32, scales: Scales::Nested },
            20,
            "groups of a row: expected a multiple of 8, got 2",
        ),
        (INT4, 0, "rows: expected 1 to"),
    ] {
        let (done, out) = run(format, &[rows], 128, size, 20, 40);
        unwritten(done, &out, Status::Program, told);
    }
}

#[test]
fn ids_of_no_row_are_refused() {
    let embedding = Embedding { rows: 20, width: 64, format: INT4 };
    let weights = Weights::new(INT4, 1, 20, 64, &mut Random::new(1));
    for id in [20i64, -1, i64::MAX, i64::MIN] {
        let ids: Vec<u8> = [3, id].iter().flat_map(|id| id.to_le_bytes()).collect();
        let mut out = [f32::NAN; 128];
        let done = embed_into(&embedding, &ids, weights.bytes(), &mut out, &Serial);
        let told = format!("ids: expected 0 to 19, got {id}");
        unwritten(done, &out, Status::InvalidArgument, &told);
    }
    let mut out = [f32::NAN; 100];
    let done = embed_into(&embedding, &[0; 16], weights.bytes(), &mut out, &Serial);
    unwritten(done, &out, Status::Shape, "output: expected 128");
}
