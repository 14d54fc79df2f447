//! A failure in one step or one sequence does not affect others.

use etkv_core::{
    AttendCache, Cache, CacheConfig, CellsCache, ContiguousCache, Growth, KvFormat, LayerPolicy,
    Result, Status, Step,
};

use super::filled;
use crate::backend::{Backend, Tensor};
use crate::{oracle, Rng};

/// Runs one step of one layer. Returns the output of the first query.
fn append<B: Backend>(
    cache: &mut dyn AttendCache<Store = B::Store>,
    positions: &[i32],
    value: f32,
) -> Result<f32> {
    let rows = filled::<B>(1, positions.len(), 64, value);
    let mut step = Step::begin(cache, positions)?;
    let spec = step.update_and_fetch(0, &rows, &rows)?;
    let out = B::attend(&filled::<B>(1, positions.len(), 64, 0.1), &spec, 0.1)?;
    drop(spec);
    step.commit(&[&out])?;
    Ok(B::rows(&out)[0][0][0])
}

/// A weight of 0 does not hide an infinite value: 0 times infinity is NaN.
pub fn values_that_are_not_finite_reach_no_other_sequence<B: Backend>() {
    let formats = ["f32", "f16", "bf16", "affine4g64", "mxfp8", "nvfp4", "row-int4"];
    let run = || -> Result<()> {
        for format in formats.map(|name| name.parse::<KvFormat>().unwrap()) {
            for value in [1e6, f32::INFINITY, f32::NAN] {
                let config = CacheConfig::uniform(1, 1, 64, 64).stored_as(format);
                let mut cache = CellsCache::<B::Store>::with_trees(config)?;
                cache.sequences_mut().unwrap().begin_step(&[0, 0])?;
                append::<B>(&mut cache, &[0, 1], 1.0)?;
                cache.sequences_mut().unwrap().begin_step(&[1, 1])?;
                let stored = append::<B>(&mut cache, &[0, 1], value);
                let fits = value.is_finite() && format != KvFormat::F16;
                match &stored {
                    Ok(_) => assert!(fits, "{value} is stored in {format}"),
                    Err(error) => {
                        assert!(!fits, "{error}");
                        assert_eq!(error.status(), Status::InvalidArgument);
                        assert_eq!(cache.length(), 2, "the step is rolled back");
                        assert!(error.message().contains(&format.to_string()), "{error}");
                        cache.sequences_mut().unwrap().begin_step(&[1, 1])?;
                        append::<B>(&mut cache, &[0, 1], 1.0)?;
                    }
                }
                cache.sequences_mut().unwrap().begin_step(&[2])?;
                append::<B>(&mut cache, &[0], 1.0)?;
                // This reads all cells, including those of the other sequence.
                cache.sequences_mut().unwrap().begin_step(&[0, 2])?;
                let seen = append::<B>(&mut cache, &[2, 1], 1.0)?;
                assert!((seen - 1.0).abs() < 0.1, "{format} {value}: {seen}");
            }
        }
        Ok(())
    };
    B::run(run).unwrap();
}

/// Rows of a step that was evaluated and dropped are in free cells.
pub fn rows_of_an_aborted_step_reach_no_sequence<B: Backend>() {
    let run = || -> Result<()> {
        // There are enough cells to leave room between sequences.
        let mut cache = CellsCache::<B::Store>::new(CacheConfig::uniform(1, 1, 64, 512))?;
        append::<B>(&mut cache, &[0], 1.0)?;
        cache.sequences_mut().unwrap().begin_step(&[1; 8])?;
        let positions: Vec<i32> = (0..8).collect();
        let mut step = Step::begin(&mut cache, &positions)?;
        let rows = filled::<B>(1, 8, 64, f32::NAN);
        drop(step.update_and_fetch(0, &rows, &rows)?);
        step.eval(&[])?;
        drop(step);
        // Three sequences, one of them removed, with free cells between the others.
        for (sequence, n) in [(1, 1), (2, 3), (3, 1)] {
            cache.sequences_mut().unwrap().begin_step(&vec![sequence; n])?;
            append::<B>(&mut cache, &(0..n as i32).collect::<Vec<_>>(), 1.0)?;
        }
        cache.sequences_mut().unwrap().seq_rm(2, 0..i32::MAX)?;
        cache.sequences_mut().unwrap().begin_step(&[0, 3])?;
        assert_eq!(append::<B>(&mut cache, &[1, 1], 1.0)?, 1.0);
        Ok(())
    };
    B::run(run).unwrap();
}

/// After a step that fails in any layer, the cache's results are unchanged.
pub fn a_failed_step_is_rolled_back<B: Backend>() {
    let formats = ["f32", "affine4g64", "row-int4"];
    let policies = [LayerPolicy::Full, LayerPolicy::Window { window: 3, sinks: 1 }];
    let run = || -> Result<()> {
        for format in formats.map(|name| name.parse::<KvFormat>().unwrap()) {
            for policy in policies {
                // The steps append, or overwrite rows.
                for (start, n) in [(10, 1), (10, 3), (7, 3)] {
                    for failing in 0..4 {
                        let mut config = CacheConfig::uniform(3, 2, 64, 64).stored_as(format);
                        config.layers[1].policy = policy;
                        let config =
                            CacheConfig { max_step_tokens: 8, growth: Growth::Exact, ..config };
                        let mut cache = ContiguousCache::<B::Store>::new(config.clone())?;
                        fill::<B>(&mut cache)?;
                        fail::<B>(&mut cache, start, n, failing)?;
                        assert!(cache.can_extend(1), "{format} {policy:?} {start} {n} {failing}");
                        assert_eq!(cache.length(), 10);
                        let found = next::<B>(&mut cache)?;

                        let mut untouched = ContiguousCache::<B::Store>::new(config)?;
                        fill::<B>(&mut untouched)?;
                        assert_eq!(
                            found,
                            next::<B>(&mut untouched)?,
                            "{format} {policy:?} {start} {n}"
                        );
                    }
                }
            }
        }
        Ok(())
    };
    B::run(run).unwrap();
}

fn rows<B: Backend>(heads: usize, n: usize, seed: u64) -> Tensor<B> {
    B::tensor(&oracle::random_rows(&mut Rng::new(seed), n, heads, 64))
}

fn fill<B: Backend>(cache: &mut ContiguousCache<B::Store>) -> Result<()> {
    for first in [0, 5] {
        let mut step = Step::begin(cache, &(first..first + 5).collect::<Vec<_>>())?;
        for layer in 0..3 {
            let rows = rows::<B>(2, 5, layer * 100 + first as u64);
            step.update_and_fetch(layer as usize, &rows, &rows)?;
        }
        step.commit(&[])?;
    }
    Ok(())
}

/// Runs a step that fails in layer `failing`, or after the last layer if `failing` is 3.
fn fail<B: Backend>(
    cache: &mut ContiguousCache<B::Store>,
    start: i32,
    n: i32,
    failing: i32,
) -> Result<()> {
    let mut step = Step::begin(cache, &(start..start + n).collect::<Vec<_>>())?;
    let mut x = rows::<B>(2, n as usize, 7);
    for layer in 0..3 {
        if layer == failing {
            match spoil::<B>(x) {
                Some(spoiled) => x = spoiled,
                // A program ends here, which drops its step.
                None => return Ok(()),
            }
        }
        let spec = step.update_and_fetch(layer as usize, &x, &x)?;
        x = B::attend(&x, &spec, 0.1)?;
    }
    if failing == 3 {
        match spoil::<B>(x) {
            Some(spoiled) => x = spoiled,
            None => return Ok(()),
        }
    }
    let error = step.commit(&[&x]).unwrap_err();
    assert_eq!(error.status(), Status::Backend, "{error}");
    Ok(())
}

/// Returns a tensor whose computation fails, or `None` if it fails at once.
fn spoil<B: Backend>(x: Tensor<B>) -> Option<Tensor<B>> {
    let spoiled = B::failing(&x);
    assert_eq!(spoiled.is_err(), B::COMPUTES_AT_ONCE);
    spoiled.ok()
}

/// Returns the outputs of the step at position 10.
fn next<B: Backend>(cache: &mut ContiguousCache<B::Store>) -> Result<Vec<f32>> {
    let (q, rows) = (rows::<B>(4, 1, 8), rows::<B>(2, 1, 9));
    let mut step = Step::begin(cache, &[10])?;
    let mut outputs = Vec::new();
    for layer in 0..3 {
        let spec = step.update_and_fetch(layer, &rows, &rows)?;
        let out = B::attend(&q, &spec, 0.1)?;
        drop(spec);
        step.eval(&[&out])?;
        outputs.extend(B::rows(&out)[0].iter().flatten());
    }
    step.commit(&[])?;
    Ok(outputs)
}

pub fn a_conversion_by_hand_lasts_until_the_cache_is_cleared<B: Backend>() {
    let run = || -> Result<()> {
        let config =
            CacheConfig { quantized_kv_start: Some(4), ..CacheConfig::uniform(1, 1, 64, 64) };
        let mut cache = ContiguousCache::<B::Store>::new(config.stored_as(KvFormat::RowInt4))?;
        append::<B>(&mut cache, &[0, 1], 1.0)?;
        cache.convert(KvFormat::F32, KvFormat::F32)?;
        append::<B>(&mut cache, &[2, 3, 4], 1.0)?;
        assert_eq!(cache.formats(), [KvFormat::F32; 2]);
        cache.clear(false)?;
        assert_eq!(cache.formats(), [KvFormat::F16; 2]);
        append::<B>(&mut cache, &[0, 1, 2, 3], 1.0)?;
        assert_eq!(cache.formats(), [KvFormat::RowInt4; 2]);
        Ok(())
    };
    B::run(run).unwrap();
}

pub fn candidates_do_not_count_for_quantized_kv_start<B: Backend>() {
    let run = || -> Result<()> {
        let config =
            CacheConfig { quantized_kv_start: Some(10), ..CacheConfig::uniform(1, 1, 64, 64) };
        let mut cache = CellsCache::<B::Store>::with_trees(config.stored_as(KvFormat::RowInt4))?;
        append::<B>(&mut cache, &[0, 1], 1.0)?;
        cache.trees_mut().unwrap().propose(0, &[-1; 9])?;
        append::<B>(&mut cache, &[2; 9], 1.0)?;
        assert_eq!(cache.formats(), [KvFormat::F16; 2]);
        cache.trees_mut().unwrap().commit_tree(0, &[0])?;
        assert_eq!(cache.formats(), cache.config().formats_at(3));
        append::<B>(&mut cache, &[3, 4, 5, 6, 7, 8], 1.0)?;
        cache.trees_mut().unwrap().propose(0, &[-1])?;
        append::<B>(&mut cache, &[9], 1.0)?;
        cache.trees_mut().unwrap().commit_tree(0, &[0])?;
        assert_eq!(cache.formats(), cache.config().formats_at(10));
        Ok(())
    };
    B::run(run).unwrap();
}

/// The rows of a step are stored in float before they are converted at `quantized_kv_start`, so the step has a limit.
pub fn at_capacity_is_the_maximum_memory<B: Backend>() {
    let run = || -> Result<()> {
        let config = CacheConfig {
            quantized_kv_start: Some(10),
            growth: Growth::Exact,
            max_step_tokens: 40,
            ..CacheConfig::uniform(1, 1, 64, 1000).stored_as(KvFormat::RowInt4)
        };
        let mut cache = ContiguousCache::<B::Store>::new(config)?;
        let error = cache.begin(&(0..50).collect::<Vec<_>>()).unwrap_err();
        assert_eq!(error.status(), Status::Capacity);
        assert!(error.message().contains("50 positions in f16, the maximum is 49"), "{error}");
        let (mut most, mut length) = (0, 0);
        for n in [9, 40, 40, 500, 411] {
            let positions: Vec<i32> = (length..length + n).collect();
            let rows = filled::<B>(1, n as usize, 64, 1.0);
            cache.begin(&positions)?;
            cache.update_and_fetch(0, &rows, &rows)?;
            most = most.max(cache.memory().allocated);
            cache.commit()?;
            most = most.max(cache.memory().allocated);
            length += n;
        }
        assert_eq!(most, cache.memory().at_capacity);
        Ok(())
    };
    B::run(run).unwrap();
}
