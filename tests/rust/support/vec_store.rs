//! A store of plain vectors: the smallest backend.
//!
//! It stores float32 in every format. For float formats, rows are rounded to the format. For quantized formats, they
//! are rounded to as many levels as the format has codes, but not to the same values.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use etkv_core::bookkeeping::{MaskRuns, Slots};
use etkv_core::{
    AttendCache, AttendSpec, Error, Extent, KvFormat, Mask, Result, Spec, Status, Step, Store,
    StoreLayer,
};

use crate::backend::Backend;
use crate::oracle::{self, Row, Rows};

/// `[1, heads, n, dim]` in float32.
#[derive(Debug, Clone)]
pub struct Tensor {
    shape: [i32; 4],
    values: Vec<f32>,
    /// Whether the computation of this tensor fails.
    fails: bool,
}

impl Tensor {
    fn zeros(heads: i32, n: i32, dim: i32) -> Self {
        let len = heads as usize * n as usize * dim as usize;
        Self { shape: [1, heads, n, dim], values: vec![0.0; len], fails: false }
    }

    fn place(&self, head: usize, n: usize) -> Range<usize> {
        let [_, _, rows, dim] = self.shape.map(|size| size as usize);
        let start = (head * rows + n) * dim;
        start..start + dim
    }

    fn row(&self, head: usize, n: usize) -> &[f32] {
        &self.values[self.place(head, n)]
    }

    fn row_mut(&mut self, head: usize, n: usize) -> &mut [f32] {
        let place = self.place(head, n);
        &mut self.values[place]
    }

    fn taken(&self, slots: &Slots) -> Self {
        let [_, heads, _, dim] = self.shape;
        let mut taken = Self::zeros(heads, slots.len() as i32, dim);
        for head in 0..heads as usize {
            for (n, slot) in slots.iter().enumerate() {
                taken.row_mut(head, n).copy_from_slice(self.row(head, slot as usize));
            }
        }
        taken
    }

    fn put(&mut self, slots: &Slots, rows: &Self) {
        for head in 0..self.shape[1] as usize {
            for (n, slot) in slots.iter().enumerate() {
                self.row_mut(head, slot as usize).copy_from_slice(rows.row(head, n));
            }
        }
    }

    /// Returns the first elements of each row.
    fn first(&self, elements: i32) -> Self {
        let [_, heads, n, dim] = self.shape;
        let mut first = Self::zeros(heads, n, elements);
        let rows = first.values.chunks_exact_mut(elements as usize);
        for (to, from) in rows.zip(self.values.chunks_exact(dim as usize)) {
            to.copy_from_slice(&from[..elements as usize]);
        }
        Self { fails: self.fails, ..first }
    }

    fn rounded(&self, format: KvFormat) -> Self {
        let mut rounded = self.clone();
        let dim = self.shape[3].max(1) as usize;
        rounded.values.chunks_exact_mut(dim).for_each(|row| round(row, format));
        rounded
    }
}

/// Rounds a row to the levels of `format`.
fn round(row: &mut [f32], format: KvFormat) {
    let (group, levels) = match format {
        KvFormat::F16 | KvFormat::Bf16 | KvFormat::F32 => {
            return row.iter_mut().for_each(|value| *value = oracle::round(*value, format));
        }
        KvFormat::Affine { bits, group } => (group as usize, (1 << (bits - 1)) - 1),
        KvFormat::Mxfp8 => (32, 127),
        KvFormat::Mxfp4 => (32, 7),
        KvFormat::Nvfp4 => (16, 7),
        _ => (row.len(), 7),
    };
    for group in row.chunks_mut(group) {
        let peak = group.iter().fold(0.0f32, |peak, value| peak.max(value.abs()));
        let scale = peak / levels as f32;
        for value in group {
            let usable = scale > 0.0 && scale.is_finite() && value.is_finite();
            *value = if usable { (*value / scale).round() * scale } else { 0.0 };
        }
    }
}

/// The keys or values of one layer, by slot.
struct Buffer {
    format: KvFormat,
    rows: Tensor,
}

impl Buffer {
    fn new(format: KvFormat, heads: i32, dim: i32) -> Result<Self> {
        format.check(dim)?;
        Ok(Self { format, rows: Tensor::zeros(heads, 0, dim) })
    }

    fn slots(&self) -> i32 {
        self.rows.shape[2]
    }

    fn grow(&mut self, slots: i32) {
        let [_, heads, before, dim] = self.rows.shape;
        if slots > before {
            let mut grown = Tensor::zeros(heads, slots, dim);
            grown.put(&Slots::Run(0..before), &self.rows);
            self.rows = grown;
        }
    }
}

/// The kind of call of the store that fails next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    Grow,
    Relocate,
    Convert,
}

thread_local! {
    static NEXT_FAILURE: Cell<Option<Failure>> = const { Cell::new(None) };
}

/// Makes the next call of this kind on this thread fail.
pub fn fail_next(failure: Failure) {
    NEXT_FAILURE.set(Some(failure));
}

fn may_fail(what: Failure) -> Result<()> {
    if NEXT_FAILURE.get() == Some(what) {
        NEXT_FAILURE.set(None);
        return Err(Error::new(Status::Backend, "out of memory, as the test asked for"));
    }
    Ok(())
}

/// The store of a cache in plain vectors.
pub struct VecStore {
    layers: Vec<[Buffer; 2]>,
    sizes: Vec<StoreLayer>,
    /// For each watched write of the open step, whether its values are finite.
    finite: Vec<bool>,
    /// The flags of a step that ended unread.
    unread: Vec<bool>,
    /// Whether the open step wrote a tensor whose computation fails.
    fails: bool,
}

impl Store for VecStore {
    const NAME: &'static str = "Vec";
    const ENDS_UNREAD: bool = true;

    type Tensor = Tensor;
    type View = Tensor;
    type Mask = Arc<MaskRuns>;
    type Saved = Vec<(usize, Slots, [Tensor; 2])>;
    type Frozen = Vec<[Tensor; 2]>;

    fn new(layers: &[StoreLayer], formats: [KvFormat; 2]) -> Result<Self> {
        let sizes = layers.to_vec();
        let layers = layers.iter().map(|layer| {
            let [k, v] = layer.formats(formats);
            Ok([
                Buffer::new(k, layer.heads[0], layer.dims[0])?,
                Buffer::new(v, layer.heads[1], layer.dims[1])?,
            ])
        });
        let layers = layers.collect::<Result<_>>()?;
        Ok(Self { layers, sizes, finite: Vec::new(), unread: Vec::new(), fails: false })
    }

    fn shape(tensor: &Tensor) -> &[i32] {
        &tensor.shape
    }

    fn extents(&self, layer: usize) -> [Extent; 2] {
        let [k, v] = &self.layers[layer];
        [k, v].map(|buffer| Extent { format: buffer.format, slots: buffer.slots(), shared: 0 })
    }

    fn grow(&mut self, layer: usize, slots: i32) -> Result<()> {
        if self.layers[layer].iter().any(|buffer| buffer.slots() < slots) {
            may_fail(Failure::Grow)?;
        }
        self.layers[layer].iter_mut().for_each(|buffer| buffer.grow(slots));
        Ok(())
    }

    fn begin(&mut self, displaced: &[(usize, Slots)]) -> Result<Self::Saved> {
        let saved = displaced.iter().map(|(layer, slots)| {
            let [k, v] = &self.layers[*layer];
            (*layer, slots.clone(), [k.rows.taken(slots), v.rows.taken(slots)])
        });
        Ok(saved.collect())
    }

    fn write(
        &mut self,
        layer: usize,
        slots: &Slots,
        k: &Tensor,
        v: Option<&Tensor>,
        watch: bool,
    ) -> Result<()> {
        let rows = [Some(k), v].into_iter().flatten();
        for (buffer, rows) in self.layers[layer].iter_mut().zip(rows) {
            buffer.rows.put(slots, &rows.rounded(buffer.format));
            self.fails |= rows.fails;
        }
        if watch {
            let format = self.layers[layer][usize::from(v.is_some())].format;
            let as_stored = |&value: &f32| oracle::round(value, format);
            self.finite.push(v.unwrap_or(k).values.iter().map(as_stored).all(f32::is_finite));
        }
        Ok(())
    }

    fn begins_with(k: &Tensor, v: &Tensor) -> Result<bool> {
        Ok(k.first(v.shape[3]).values == v.values)
    }

    fn read(&self, layer: usize, slots: Range<i32>) -> Result<[Tensor; 2]> {
        let view = |buffer: &Buffer| Tensor {
            fails: self.fails,
            ..buffer.rows.taken(&Slots::Run(slots.clone()))
        };
        let [k, v] = &self.layers[layer];
        let (k, v) = (view(k), view(v));
        Ok(match self.sizes[layer].second_in_first {
            0 => [k, v],
            elements => [k.clone(), k.first(elements)],
        })
    }

    fn mask(runs: &Arc<MaskRuns>) -> Result<Arc<MaskRuns>> {
        Ok(Arc::clone(runs))
    }

    fn eval(&self, outputs: &[&Tensor]) -> Result<()> {
        if self.fails || outputs.iter().any(|output| output.fails) {
            return Err(Error::new(Status::Backend, "a tensor that fails when it is computed"));
        }
        Ok(())
    }

    fn non_finite(&self) -> Option<usize> {
        self.finite.iter().position(|finite| !finite)
    }

    fn end(&mut self) {
        self.finite.clear();
        self.fails = false;
    }

    fn end_unread(&mut self) {
        assert!(
            self.unread.is_empty(),
            "a step ends before the values of the previous one are read"
        );
        self.unread = std::mem::take(&mut self.finite);
        self.end();
    }

    fn unread_non_finite(&mut self) -> Option<usize> {
        std::mem::take(&mut self.unread).iter().position(|finite| !finite)
    }

    fn abort(&mut self, saved: Self::Saved, blank: &[(usize, Slots)]) -> Result<()> {
        self.end();
        for (layer, slots) in blank {
            let in_keys = self.sizes[*layer].second_in_first > 0;
            let values = &mut self.layers[*layer][usize::from(!in_keys)].rows;
            let zeros = Tensor::zeros(values.shape[1], slots.len() as i32, values.shape[3]);
            values.put(slots, &zeros);
        }
        for (layer, slots, rows) in saved {
            for (buffer, rows) in self.layers[layer].iter_mut().zip(rows) {
                buffer.rows.put(&slots, &rows);
            }
        }
        Ok(())
    }

    fn relocate(&mut self, layers: &[usize], from: &Slots, to: &Slots, slots: i32) -> Result<()> {
        for &layer in layers {
            may_fail(Failure::Relocate)?;
            for buffer in &mut self.layers[layer] {
                let rows = buffer.rows.taken(from);
                buffer.grow(slots);
                buffer.rows.put(to, &rows);
            }
        }
        Ok(())
    }

    fn convert(&mut self, layer: usize, formats: [KvFormat; 2]) -> Result<()> {
        for (buffer, format) in self.layers[layer].iter_mut().zip(formats) {
            if buffer.format != format {
                may_fail(Failure::Convert)?;
                *buffer = Buffer { format, rows: buffer.rows.rounded(format) };
            }
        }
        Ok(())
    }

    fn clear(&mut self, formats: [KvFormat; 2], slots: &[i32]) -> Result<()> {
        if slots.iter().any(|&slots| slots > 0) {
            may_fail(Failure::Grow)?;
        }
        self.end();
        for ((buffers, sizes), &slots) in self.layers.iter_mut().zip(&self.sizes).zip(slots) {
            for (buffer, format) in buffers.iter_mut().zip(sizes.formats(formats)) {
                if buffer.format != format {
                    let [_, heads, _, dim] = buffer.rows.shape;
                    *buffer = Buffer::new(format, heads, dim)?;
                }
                buffer.grow(slots);
            }
        }
        Ok(())
    }

    /// Copies the rows, because this store cannot share memory.
    fn freeze(&mut self, slots: &[i32], _most: &[i32], _anew: bool) -> Result<Self::Frozen> {
        may_fail(Failure::Grow)?;
        let of = |(buffers, &end): (&[Buffer; 2], &i32)| {
            buffers.each_ref().map(|buffer| buffer.rows.taken(&Slots::Run(0..end)))
        };
        Ok(self.layers.iter().zip(slots).map(of).collect())
    }

    fn attach(&mut self, frozen: &Self::Frozen, _most: &[i32]) -> Result<()> {
        may_fail(Failure::Grow)?;
        for (buffers, rows) in self.layers.iter_mut().zip(frozen) {
            for (buffer, rows) in buffers.iter_mut().zip(rows) {
                buffer.rows = rows.clone();
            }
        }
        Ok(())
    }

    fn release(&mut self) {
        for buffer in self.layers.iter_mut().flatten() {
            let [_, heads, _, dim] = buffer.rows.shape;
            buffer.rows = Tensor::zeros(heads, 0, dim);
        }
    }
}

/// Runs a step of `n` tokens that begin at position `start`, in the first layer of a cache of one head.
pub fn append(cache: &mut dyn AttendCache<Store = VecStore>, start: i32, n: usize) -> Result<()> {
    let dim = cache.config().layers[0].k_head_dim as usize;
    let rows = OnVec::tensor(&vec![vec![vec![1.0; dim]]; n]);
    let mut step = Step::begin(cache, &(start..).take(n).collect::<Vec<_>>())?;
    step.update_and_fetch(0, &rows, &rows)?;
    step.commit(&[])
}

/// The backend of plain vectors, which computes eagerly.
pub struct OnVec;

impl Backend for OnVec {
    type Store = VecStore;

    const SAVES: bool = false;

    fn run<T>(work: impl FnOnce() -> T) -> T {
        work()
    }

    fn tensor(rows: &[Row]) -> Tensor {
        let (heads, dim) = (rows[0].len(), rows[0][0].len());
        let mut tensor = Tensor::zeros(heads as i32, rows.len() as i32, dim as i32);
        for (n, row) in rows.iter().enumerate() {
            for (head, values) in row.iter().enumerate() {
                tensor.row_mut(head, n).copy_from_slice(values);
            }
        }
        tensor
    }

    fn rows(tensor: &Tensor) -> Rows {
        let [_, heads, n, _] = tensor.shape.map(|size| size as usize);
        let row = |n| (0..heads).map(|head| tensor.row(head, n).to_vec()).collect();
        (0..n).map(row).collect()
    }

    fn view(view: &Tensor) -> Rows {
        Self::rows(view)
    }

    /// Computes attention as a program does: hidden rows are read with a weight of 0.
    fn attend(q: &Tensor, spec: &Spec<VecStore>, scale: f32) -> Result<Tensor> {
        let AttendSpec { k, v, mask } = spec;
        let [_, heads, n, _] = q.shape.map(|size| size as usize);
        let [_, kv_heads, len, dim] = v.shape.map(|size| size as usize);
        let mut out = Tensor::zeros(heads as i32, n as i32, dim as i32);
        for head in 0..heads {
            let kv_head = head * kv_heads / heads;
            for query in 0..n {
                let is_seen = |slot: usize| match mask {
                    Mask::None => true,
                    Mask::Causal => slot + n <= len + query,
                    Mask::Explicit(mask) => mask.sees(query, slot),
                };
                let row = q.row(head, query);
                let score = |slot: usize| {
                    let products = row.iter().zip(k.row(kv_head, slot));
                    let sum: f64 = products.map(|(&a, &b)| f64::from(a) * f64::from(b)).sum();
                    if is_seen(slot) {
                        sum * f64::from(scale)
                    } else {
                        f64::NEG_INFINITY
                    }
                };
                let scores: Vec<f64> = (0..len).map(score).collect();
                let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - largest).exp()).collect();
                let total: f64 = weights.iter().sum();
                for (at, found) in out.row_mut(head, query).iter_mut().enumerate() {
                    let weighted = weights.iter().enumerate();
                    let sum: f64 = weighted
                        .map(|(slot, weight)| weight * f64::from(v.row(kv_head, slot)[at]))
                        .sum();
                    *found = (sum / total) as f32;
                }
            }
        }
        out.fails = q.fails || k.fails || v.fails;
        Ok(out)
    }

    fn quantized(rows: &[Row], format: KvFormat) -> Rows {
        Self::rows(&Self::tensor(rows).rounded(format))
    }

    fn failing(x: &Tensor) -> Result<Tensor> {
        Ok(Tensor { fails: true, ..x.clone() })
    }
}
