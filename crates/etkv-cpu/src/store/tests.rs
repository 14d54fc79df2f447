//! Random calls on stores of every format, with failing allocations. The rows are compared with a simple
//! model.

use std::collections::BTreeMap;

use etkv_core::bookkeeping::Slots;
use etkv_core::{CacheConfig, Extent, KvFormat, Result, Status, Store, StoreLayer};

use super::{Codec, CpuStore, FrozenLayers};
use crate::attention::synthetic::formats;
use crate::floats::to_f16;
use crate::memory::{shortage, SHARES};
use crate::refused::refused;
use crate::store::view::View;
use crate::tensor::{Dtype, Tensor};

/// A pseudorandom number generator.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 33
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    /// Returns a number from a roughly normal distribution.
    fn number(&mut self) -> f32 {
        let sum: f32 = (0..6).map(|_| self.below(1 << 20) as f32 / (1 << 20) as f32 - 0.5).sum();
        sum * 1.4
    }
}

/// Returns every format, with a head_dim of some groups.
fn formats_and_dims() -> impl Iterator<Item = (KvFormat, usize)> {
    let dim = |format: KvFormat| format.granule() * 70usize.div_ceil(format.granule());
    formats().into_iter().map(move |format| (format, dim(format)))
}

/// The bytes of a row in each plane.
type Stored = [Vec<u8>; 3];

fn stored(format: KvFormat, row: &[f32]) -> Stored {
    let codec = Codec::of(format);
    let mut planes = codec.widths(row.len()).map(|width| vec![0; width]);
    codec.encode(row, planes.each_mut().map(|plane| plane.as_mut_slice()));
    planes
}

fn read_back(format: KvFormat, planes: &Stored, dim: usize) -> Vec<f32> {
    let mut row = vec![0.0; dim];
    Codec::of(format).decode(planes.each_ref().map(|plane| plane.as_slice()), &mut row);
    row
}

/// The rows of a layer's keys or values, by slot and head.
#[derive(Clone, Default)]
struct Model {
    rows: BTreeMap<(i32, i32), Stored>,
}

impl Model {
    /// Sets the rows of slots to zero.
    fn blank(&mut self, slots: impl IntoIterator<Item = i32>, heads: i32, format: KvFormat) {
        for slot in slots {
            self.rows.extend((0..heads).map(|head| ((slot, head), zeros(format, 128))));
        }
    }
}

/// Returns the rows of a view.
fn shown(view: &View, start: i32) -> Model {
    let row = |slot: usize, head: usize| {
        let plane = |at| view.row(at, slot, head).unwrap_or_default().to_vec();
        ((start + slot as i32, head as i32), [plane(0), plane(1), plane(2)])
    };
    let heads = 0..view.n_kv_heads();
    let rows = (0..view.len()).flat_map(|slot| heads.clone().map(move |head| (slot, head)));
    Model { rows: rows.map(|(slot, head)| row(slot, head)).collect() }
}

fn zeros(format: KvFormat, dim: usize) -> Stored {
    Codec::of(format).widths(dim).map(|width| vec![0; width])
}

/// Returns a store of one layer without slots.
fn store(heads: i32, dim: i32, formats: [KvFormat; 2]) -> Result<CpuStore> {
    let config = CacheConfig::uniform(1, heads, dim, 1);
    CpuStore::new(&[StoreLayer::from(&config.layers[0])], formats)
}

/// A store of one layer and its expected contents.
struct Run {
    rng: Rng,
    store: CpuStore,
    heads: i32,
    formats: [KvFormat; 2],
    model: [Model; 2],
    slots: i32,
    /// Views and their expected contents.
    held: Vec<(View, Model)>,
    /// Frozen layers, with their formats, slots and rows.
    frozen: Vec<Shared>,
}

struct Shared {
    rows: FrozenLayers,
    formats: [KvFormat; 2],
    slots: i32,
    model: [Model; 2],
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut rng = Rng(seed);
        for _ in 0..3 {
            rng.next();
        }
        let heads = rng.pick(&[1, 2, 3]);
        let formats = [Self::format(&mut rng), Self::format(&mut rng)];
        let store = store(heads, 128, formats).unwrap();
        Self {
            rng,
            store,
            heads,
            formats,
            model: Default::default(),
            slots: 0,
            held: Vec::new(),
            frozen: Vec::new(),
        }
    }

    fn format(rng: &mut Rng) -> KvFormat {
        rng.pick(&formats())
    }

    /// Makes some allocations fail.
    fn starve(&mut self) {
        shortage::after((self.rng.below(3) == 0).then(|| self.rng.below(6)));
    }

    fn grown(&mut self, slots: i32) {
        for (model, format) in self.model.iter_mut().zip(self.formats) {
            model.blank(self.slots..slots, self.heads, format);
        }
        self.slots = self.slots.max(slots);
    }

    /// Grows until both buffers have these slots, because a call that fails may grow only one of them.
    fn grow(&mut self, slots: i32) {
        self.starve();
        let grown = self.store.grow(0, slots);
        shortage::after(None);
        if let Err(error) = grown {
            assert_eq!(error.status(), Status::Backend);
            for extent in self.store.extents(0) {
                assert!(extent.slots == self.slots || extent.slots == slots);
            }
            self.store.grow(0, slots).unwrap();
        }
        self.grown(slots);
    }

    /// Returns some distinct slots.
    fn some_slots(&mut self) -> Slots {
        let n = 1 + self.rng.below(self.slots.min(5) as usize) as i32;
        if self.rng.below(2) == 0 {
            let start = self.rng.below((self.slots - n + 1) as usize) as i32;
            return Slots::Run(start..start + n);
        }
        let mut all: Vec<i32> = (0..self.slots).collect();
        for at in 0..n as usize {
            let other = at + self.rng.below(all.len() - at);
            all.swap(at, other);
        }
        all.truncate(n as usize);
        Slots::List(all)
    }

    /// Returns rows of a random dtype, some of them outside its range, and their values.
    fn rows(&mut self, n: i32) -> (Tensor, Vec<f32>) {
        let shape = [1, self.heads, n, 128];
        let mut values: Vec<f32> = (0..shape.iter().product()).map(|_| self.rng.number()).collect();
        if self.rng.below(4) == 0 {
            let at = self.rng.below(values.len());
            values[at] = self.rng.pick(&[f32::NAN, f32::INFINITY, 1e6, -1e-6, -0.0]);
        }
        let tensor = match self.rng.pick(&[Dtype::F32, Dtype::F16, Dtype::Bf16]) {
            Dtype::F32 => Tensor::new(shape, values),
            Dtype::F16 => Tensor::new(shape, values.iter().map(|&x| to_f16(x)).collect::<Vec<_>>()),
            Dtype::Bf16 => Tensor::new(
                shape,
                values.iter().map(|&x| half::bf16::from_f32(x)).collect::<Vec<_>>(),
            ),
        };
        let tensor = tensor.unwrap();
        let values = tensor.to_f32();
        (tensor, values)
    }

    /// Runs a step, which is committed or aborted, for example because an allocation failed.
    fn step(&mut self) {
        let slots = self.some_slots();
        let n = slots.len() as i32;
        let [(k, keys), (v, values)] = [self.rows(n), self.rows(n)];
        let before = self.model.clone();
        self.starve();
        let displaced = vec![(0, slots.clone())];
        let Ok(saved) = self.store.begin(&displaced) else {
            shortage::after(None);
            return;
        };
        let written = self.store.write(0, &slots, &k, Some(&v), true);
        shortage::after(None);
        if written.is_ok() {
            for (which, rows) in [keys, values].iter().enumerate() {
                for (at, slot) in slots.iter().enumerate() {
                    for head in 0..self.heads {
                        let row = &rows[(head as usize * n as usize + at) * 128..][..128];
                        let row = stored(self.formats[which], row);
                        self.model[which].rows.insert((slot, head), row);
                    }
                }
            }
            let format = self.formats[1];
            let is_lost = |&value: &f32| match format.is_float() {
                true => !read_back(format, &stored(format, &[value]), 1)[0].is_finite(),
                false => !value.is_finite(),
            };
            let values = v.to_f32();
            assert_eq!(self.store.non_finite().is_some(), values.iter().any(is_lost), "{format}");
            self.check();
        }
        if written.is_ok() && self.rng.below(2) == 0 {
            self.store.end();
        } else {
            self.store.abort(saved, &displaced).unwrap();
            self.model = before;
        }
        assert_eq!(self.store.non_finite(), None);
    }

    /// Blanks slots, like the abort of a step that did not replace any rows.
    fn blank(&mut self) {
        let slots = self.some_slots();
        let saved = self.store.begin(&[]).unwrap();
        self.store.abort(saved, &[(0, slots.clone())]).unwrap();
        for (model, format) in self.model.iter_mut().zip(self.formats) {
            model.blank(slots.iter(), self.heads, format);
        }
    }

    fn relocate(&mut self) {
        let (from, to) = (self.some_slots(), self.some_slots());
        let n = from.len().min(to.len());
        let cut = |slots: &Slots| Slots::of(&slots.iter().take(n).collect::<Vec<_>>());
        let (from, to) = (cut(&from), cut(&to));
        self.store.relocate(&[0], &from, &to, self.slots).unwrap();
        for model in &mut self.model {
            let before = model.rows.clone();
            for (from, to) in from.iter().zip(to.iter()) {
                for head in 0..self.heads {
                    model.rows.insert((to, head), before[&(from, head)].clone());
                }
            }
        }
    }

    fn convert(&mut self) {
        let formats = [Self::format(&mut self.rng), Self::format(&mut self.rng)];
        self.starve();
        let converted = self.store.convert(0, formats);
        shortage::after(None);
        let reached = self.store.extents(0).map(|extent| extent.format);
        for which in 0..2 {
            assert!(reached[which] == self.formats[which] || reached[which] == formats[which]);
        }
        match converted {
            Ok(()) => assert_eq!(reached, formats),
            Err(error) => assert_eq!(error.status(), Status::Backend),
        }
        for (which, model) in self.model.iter_mut().enumerate() {
            let (from, to) = (self.formats[which], reached[which]);
            if from != to {
                for row in model.rows.values_mut() {
                    *row = stored(to, &read_back(from, row, 128));
                }
            }
        }
        self.formats = reached;
    }

    fn clear(&mut self) {
        let formats = [Self::format(&mut self.rng), Self::format(&mut self.rng)];
        let slots = self.rng.below(12) as i32;
        self.starve();
        let cleared = self.store.clear(formats, &[slots]);
        shortage::after(None);
        let extents = self.store.extents(0);
        if cleared.is_err() {
            assert_eq!(extents.map(|extent| extent.format), self.formats);
            self.store.grow(0, slots).unwrap();
            return self.grown(slots);
        }
        let mut most = 0;
        for (which, Extent { format, slots: held, .. }) in extents.into_iter().enumerate() {
            let kept = if self.formats[which] == formats[which] { self.slots } else { 0 };
            assert_eq!((format, held), (formats[which], kept.max(slots)));
            most = most.max(held);
            self.model[which].rows.retain(|(slot, _), _| *slot < kept);
            self.model[which].blank(kept..held, self.heads, format);
        }
        self.formats = formats;
        // Both buffers get the same number of slots, which the other calls expect.
        for which in 0..2 {
            self.model[which].blank(extents[which].slots..most, self.heads, formats[which]);
        }
        self.store.grow(0, most).unwrap();
        self.slots = most;
    }

    /// Freezes the first slots. The slots after them are freed.
    fn freeze(&mut self) {
        let all = self.slots;
        let slots =
            if self.rng.below(2) == 0 { all } else { self.rng.below(all as usize + 1) as i32 };
        let (most, anew) = (all + self.rng.below(40) as i32, self.rng.below(4) == 0);
        if slots == all {
            self.starve();
        }
        let frozen = self.store.freeze(&[slots], &[most], anew);
        shortage::after(None);
        let extents = self.store.extents(0);
        let rows = match frozen {
            Ok(rows) => rows,
            Err(error) => return assert_eq!(error.status(), Status::Backend),
        };
        let shared = if SHARES { slots } else { 0 };
        assert!(extents.iter().all(|extent| (extent.slots, extent.shared) == (slots, shared)));
        self.slots = slots;
        self.model.iter_mut().for_each(|model| model.rows.retain(|(slot, _), _| *slot < slots));
        let model = self.model.clone();
        self.frozen.push(Shared { rows, formats: self.formats, slots, model });
    }

    /// Continues with a new store that is attached to earlier frozen rows.
    fn attach(&mut self) {
        if self.frozen.is_empty() {
            return;
        }
        let Shared { rows, formats, slots, model } =
            &self.frozen[self.rng.below(self.frozen.len())];
        let mut store = store(self.heads, 128, *formats).unwrap();
        let most = slots + (self.rng.next() % 40) as i32;
        store.attach(rows, &[most]).unwrap();
        let shared = if SHARES { *slots } else { 0 };
        let extent = |format| Extent { format, slots: *slots, shared };
        assert_eq!(store.extents(0), formats.map(extent));
        (self.store, self.formats, self.slots) = (store, *formats, *slots);
        self.model = model.clone();
        if self.rng.below(3) == 0 {
            self.frozen.clear();
        }
    }

    /// Compares all rows, including those of earlier views.
    fn check(&mut self) {
        let [k, v] = self.store.read(0, 0..self.slots).unwrap();
        for (view, model) in [&k, &v].into_iter().zip(&self.model) {
            assert!(shown(view, 0).rows == model.rows, "{}", view.format());
            // The first elements of a row may end within a group.
            let part = view.head_dim() - 1;
            let whole = view.dequantized().unwrap();
            let cut = whole.chunks_exact(view.head_dim()).flat_map(|row| &row[..part]);
            let bits = |value: &f32| value.to_bits();
            let found: Vec<u32> =
                view.first(part).dequantized().unwrap().iter().map(bits).collect();
            assert!(found.into_iter().eq(cut.map(bits)), "{}", view.format());
        }
        let start = self.rng.below(self.slots as usize + 1) as i32;
        let stop = start + self.rng.below((self.slots - start) as usize + 1) as i32;
        let parts = self.store.read(0, start..stop).unwrap();
        for (view, model) in parts.iter().zip(&self.model) {
            let mut expected = model.rows.clone();
            expected.retain(|(slot, _), _| (start..stop).contains(slot));
            assert!(shown(view, start).rows == expected, "{start} to {stop}: {}", view.format());
        }
        for (view, model) in &self.held {
            assert!(shown(view, 0).rows == model.rows, "a view of {} changed", view.format());
        }
    }

    fn hold(&mut self) {
        self.held.clear();
        if self.rng.below(2) == 0 {
            let [k, v] = self.store.read(0, 0..self.slots).unwrap();
            self.held.extend([k, v].into_iter().zip(self.model.clone()));
        }
    }
}

#[test]
fn stores_hold_what_was_written_while_memory_runs_out() {
    for seed in 0..300 {
        let mut run = Run::new(seed);
        run.grow(1);
        for _ in 0..30 {
            match run.rng.below(16) {
                0 => run.clear(),
                1 => run.convert(),
                2 => run.grow(run.slots + 3),
                3 => run.hold(),
                4 if run.slots > 0 => run.blank(),
                5 if run.slots > 0 => run.relocate(),
                6 if run.rng.below(4) == 0 => {
                    run.store.release();
                    run.model = Default::default();
                    run.slots = 0;
                }
                7 | 8 => run.freeze(),
                9 => run.attach(),
                _ if run.slots > 0 => run.step(),
                _ => run.grow(2),
            }
            run.check();
        }
    }
}

/// The hashes (FNV-1a) of the planes that MLX 0.32.2 computes for the same rows on x86-64.
const HASHES: [(&str, u64); 14] = [
    ("f32", 0x3468_260d_d0e2_52bf),
    ("f16", 0x2d3e_f76d_5010_206c),
    ("bf16", 0x1045_4a9f_bac8_7b04),
    ("affine2g32", 0xfaee_0c8d_30a0_8f88),
    ("affine3g32", 0xca3d_80c6_ab5a_8bfe),
    ("affine4g64", 0xbc30_22fa_1341_4590),
    ("affine5g64", 0xa774_6232_4431_f815),
    ("affine6g128", 0x2e6d_5ad5_6b75_b17d),
    ("affine8g64", 0x0ee8_2362_2a9a_8950),
    ("mxfp8", 0x5dc8_4b6a_06bd_dd69),
    ("mxfp4", 0xd6dd_8aa6_10e9_df9e),
    ("nvfp4", 0x20ac_2464_834e_5551),
    ("row-int4", 0xe3c2_fa9d_f208_6f43),
    ("row-fp4", 0xe2aa_152b_d488_e886),
];

/// The bytes must not change, because caches are exchanged through files with other builds and machines.
#[test]
fn the_bits_of_a_format_do_not_change() {
    let mut rng = Rng(1);
    let mut rows: Vec<f32> = Vec::new();
    for row in 0..64 {
        let scale = 2f32.powi(row % 48 - 24);
        let outlier = if row % 5 == 0 { 9.0 } else { 1.0 };
        rows.extend(
            (0..128).map(|at| rng.number() * scale * if at == row { outlier } else { 1.0 }),
        );
    }
    let hashed = |name: &str| {
        let format: KvFormat = name.parse().unwrap();
        let planes: Vec<Stored> = rows.chunks(128).map(|row| stored(format, row)).collect();
        let bytes = (0..3).flat_map(|plane| planes.iter().flat_map(move |row| &row[plane]));
        bytes.fold(0xcbf2_9ce4_8422_2325u64, |hash, &byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        })
    };
    let found: Vec<(&str, u64)> =
        HASHES.into_iter().map(|(name, _)| (name, hashed(name))).collect();
    assert_eq!(found, HASHES);
}

/// The error of each element is within the limit of its format.
#[test]
fn rows_are_as_near_as_the_format_allows() {
    let mut rng = Rng(2);
    for (format, dim) in formats_and_dims() {
        for scale in [1.0, 1e-3, 700.0] {
            let row: Vec<f32> = (0..dim).map(|_| rng.number() * scale).collect();
            let back = read_back(format, &stored(format, &row), dim);
            let block = match format {
                KvFormat::RowInt4 | KvFormat::RowFp4 => dim,
                format => format.granule(),
            };
            for (values, back) in row.chunks(block).zip(back.chunks(block)) {
                let most = values.iter().fold(0f32, |most, x| most.max(x.abs()));
                for (x, y) in values.iter().zip(back) {
                    let bound = match format {
                        KvFormat::F32 => 0.0,
                        KvFormat::F16 => x.abs() / 2048.0 + 3e-8,
                        KvFormat::Bf16 => x.abs() / 256.0,
                        // One step between codes.
                        KvFormat::Affine { bits, .. } => {
                            2.0 * most / ((1 << bits) as f32 - 1.0) * 1.5 + most / 500.0
                        }
                        KvFormat::Mxfp8 => x.abs() / 16.0 + most / 448.0 / 8.0,
                        // The error of a scaled element is at most 1, and the scaled peak is above 3.5.
                        KvFormat::Mxfp4 => most / 3.5,
                        KvFormat::Nvfp4 => (most / 5.0).max(0.006),
                        KvFormat::RowInt4 => most / 7.0 * 0.51,
                        _ => most / 6.0 * 1.01,
                    };
                    assert!((x - y).abs() <= bound, "{format}: {x} is read as {y}, not {bound}");
                }
            }
        }
    }
}

#[test]
fn rows_have_the_bytes_of_the_format() {
    for (format, dim) in formats_and_dims() {
        let widths = Codec::of(format).widths(dim);
        assert_eq!(widths.iter().sum::<usize>(), format.row_bytes(dim), "{format}");
        let zeros = read_back(format, &zeros(format, dim), dim);
        assert!(zeros.iter().all(|&x| x == 0.0), "{format}");
    }
}

/// Impossible sizes are refused without a change.
#[test]
fn slots_that_do_not_fit_memory_are_refused() {
    for format in ["f32", "affine2g128"].map(|name| name.parse::<KvFormat>().unwrap()) {
        let mut store = store(1 << 20, 1 << 10, [format; 2]).unwrap();
        for slots in [1 << 26, i32::MAX] {
            for words in [&format!("{slots} slots"), "lower the capacity"] {
                refused(store.grow(0, slots), Status::Backend, words);
            }
            assert_eq!(store.extents(0), [Extent { format, slots: 0, shared: 0 }; 2]);
        }
    }
}

#[test]
fn misuse_is_refused() {
    let odd = store(1, 32, [KvFormat::F16, "affine4g64".parse().unwrap()]);
    assert_eq!(odd.err().unwrap().status(), Status::InvalidArgument);
    let mut store = store(1, 32, [KvFormat::F16; 2]).unwrap();
    store.grow(0, 4).unwrap();
    let rows = |shape: [i32; 4]| {
        Tensor::new(shape, vec![1f32; shape.iter().product::<i32>() as usize]).unwrap()
    };
    let status = |result: Result<()>| result.unwrap_err().status();
    let two = rows([1, 1, 2, 32]);
    for (slots, expected) in [
        (Slots::Run(3..5), Status::Internal),
        (Slots::Run(-1..1), Status::Internal),
        (Slots::List(vec![0, 4]), Status::Internal),
        (Slots::List(vec![0, -1]), Status::Internal),
        (Slots::Run(0..1), Status::Shape),
    ] {
        assert_eq!(status(store.write(0, &slots, &two, Some(&two), false)), expected, "{slots:?}");
    }
    for shape in [[2, 1, 2, 32], [1, 2, 2, 32], [1, 1, 2, 31]] {
        let other = rows(shape);
        let slots = Slots::Run(0..2);
        assert_eq!(status(store.write(0, &slots, &other, Some(&two), false)), Status::Shape);
    }
    assert_eq!(status(store.read(0, 3..5).map(drop)), Status::Internal);
    assert_eq!(
        status(store.relocate(&[0], &Slots::Run(0..1), &Slots::Run(1..3), 4)),
        Status::Internal
    );
}
