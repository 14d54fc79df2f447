//! The backend of plain memory, which computes eagerly.

use etkv_core::{CacheConfig, Error, KvFormat, Result, Spec, Status};
use etkv_cpu::attention::synthetic::Threads;
use etkv_cpu::attention::Workspace;
use etkv_cpu::{ContiguousCache, CpuStore, Step, Tensor, View};

use crate::backend::Backend;
use crate::oracle::{Row, Rows};

/// Returns rows as a tensor that a program passes, `[1, heads, rows, dim]`.
pub fn tensor(rows: &[Row]) -> Tensor {
    let (heads, dim) = (rows[0].len(), rows[0][0].len());
    let values: Vec<f32> = (0..heads)
        .flat_map(|head| rows.iter().flat_map(move |row| row[head].iter().copied()))
        .collect();
    Tensor::new([1, heads as i32, rows.len() as i32, dim as i32], values).unwrap()
}

/// Returns the rows of `[heads, n, dim]`.
fn split(values: &[f32], [heads, n, dim]: [usize; 3]) -> Rows {
    let row = |at| (0..heads).map(|head| values[(head * n + at) * dim..][..dim].to_vec()).collect();
    (0..n).map(row).collect()
}

/// The backend of plain memory.
pub struct OnCpu;

impl Backend for OnCpu {
    type Store = CpuStore;

    const COMPUTES_AT_ONCE: bool = true;

    fn run<T>(work: impl FnOnce() -> T) -> T {
        work()
    }

    fn tensor(rows: &[Row]) -> Tensor {
        tensor(rows)
    }

    fn rows(tensor: &Tensor) -> Rows {
        let [_, heads, n, dim] = tensor.shape().map(|size| size as usize);
        split(&tensor.to_f32(), [heads, n, dim])
    }

    fn view(view: &View) -> Rows {
        split(&view.dequantized().unwrap(), [view.n_kv_heads(), view.len(), view.head_dim()])
    }

    fn attend(q: &Tensor, spec: &Spec<CpuStore>, scale: f32) -> Result<Tensor> {
        etkv_cpu::attend(q, spec, scale, None, &mut Workspace::new(), &Threads(2))
    }

    /// Returns the rows that a cache reads. The tests of the storage compare these with error bounds.
    fn quantized(stored: &[Row], format: KvFormat) -> Rows {
        let (heads, dim) = (stored[0].len(), stored[0][0].len());
        let n = stored.len();
        let config = CacheConfig::uniform(1, heads as i32, dim as i32, n as i32);
        let mut cache = ContiguousCache::new(config.stored_as(format)).unwrap();
        let mut step = Step::begin(&mut cache, &(0..n as i32).collect::<Vec<_>>()).unwrap();
        let written = tensor(stored);
        let spec = step.update_and_fetch(0, &written, &written).unwrap();
        split(&spec.k.dequantized().unwrap(), [heads, n, dim])
    }

    fn failing(_: &Tensor) -> Result<Tensor> {
        Err(Error::new(Status::Backend, "an op that fails"))
    }
}
