//! The backend of MLX arrays, which computes lazily.

use etkv::{ContiguousCache, KvView, MlxStore};
use etkv_core::{CacheConfig, KvFormat, Result, Spec, Step};
use mlx_rs::{Array, Dtype};

use crate::backend::Backend;
use crate::oracle::{Row, Rows};

/// Returns rows as an array that a program passes, `[1, heads, rows, dim]`.
pub fn array(rows: &[Row]) -> Array {
    let (heads, dim) = (rows[0].len(), rows[0][0].len());
    let values: Vec<f32> = (0..heads)
        .flat_map(|head| rows.iter().flat_map(move |row| row[head].iter().copied()))
        .collect();
    Array::from_slice(&values, &[1, heads as i32, rows.len() as i32, dim as i32])
}

/// Returns the rows of an evaluated `[1, heads, rows, dim]`.
pub fn rows(array: &Array) -> Rows {
    let shape: Vec<usize> = array.shape().iter().map(|&size| size as usize).collect();
    let [heads, n, dim] = [shape[1], shape[2], shape[3]];
    let flat = array.contiguous().unwrap();
    // MLX has no data pointer for an array without elements.
    let values = if array.size() > 0 { flat.as_slice::<f32>() } else { &[] };
    let row = |at| (0..heads).map(|head| values[(head * n + at) * dim..][..dim].to_vec()).collect();
    (0..n).map(row).collect()
}

/// The backend of MLX.
pub struct OnMlx;

impl Backend for OnMlx {
    type Store = MlxStore;
    const COST: u64 = 3;

    fn run<T>(work: impl FnOnce() -> T) -> T {
        etkv::mlx::run(|| Ok(work())).unwrap()
    }

    fn tensor(rows: &[Row]) -> Array {
        array(rows)
    }

    fn rows(tensor: &Array) -> Rows {
        rows(tensor)
    }

    fn view(view: &KvView) -> Rows {
        let read = view.dequantized(Dtype::Float32).unwrap();
        read.eval().unwrap();
        rows(&read)
    }

    fn attend(q: &Array, spec: &Spec<MlxStore>, scale: f32) -> Result<Array> {
        Ok(etkv::attend(q, spec, scale, None)?)
    }

    /// Returns the rows that a cache reads. The tests of the storage compare these with error bounds.
    fn quantized(stored: &[Row], format: KvFormat) -> Rows {
        let (heads, dim) = (stored[0].len() as i32, stored[0][0].len() as i32);
        let n = stored.len() as i32;
        let config = CacheConfig::uniform(1, heads, dim, n).stored_as(format);
        let mut cache = ContiguousCache::new(config).unwrap();
        let mut step = Step::begin(&mut cache, &(0..n).collect::<Vec<_>>()).unwrap();
        let written = array(stored);
        let spec = step.update_and_fetch(0, &written, &written).unwrap();
        let read = spec.k.dequantized(Dtype::Float32).unwrap();
        read.eval().unwrap();
        rows(&read)
    }

    /// Returns the result of a transform that MLX refuses when it runs.
    fn failing(x: &Array) -> Result<Array> {
        let failing = || -> etkv::Result<Array> {
            let odd = Array::ones::<f32>(&[1, 11])?.hadamard_transform(None)?;
            Ok(x.multiply(odd.sum(None)?)?)
        };
        Ok(failing()?)
    }
}
