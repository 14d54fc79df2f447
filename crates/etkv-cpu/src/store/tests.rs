//! Generated calls on stores of every format, with memory that runs out, compared with rows that
//! are kept one by one.

use std::collections::BTreeMap;

use etkv_core::bookkeeping::Slots;
use etkv_core::{Extent, KvFormat, LayerConfig, LayerPolicy, Status, Store};

use super::{Codec, CpuStore};
use crate::floats::to_f16;
use crate::memory::shortage;
use crate::tensor::{Dtype, Tensor};
use crate::view::View;

/// Numbers that a seed repeats.
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

    /// Roughly normally distributed.
    fn number(&mut self) -> f32 {
        let sum: f32 = (0..6).map(|_| self.below(1 << 20) as f32 / (1 << 20) as f32 - 0.5).sum();
        sum * 1.4
    }
}

/// Every format, with a head_dim that fits it.
fn formats() -> Vec<(KvFormat, i32)> {
    let mut formats = vec![
        (KvFormat::F32, 24),
        (KvFormat::F16, 24),
        (KvFormat::Bf16, 70),
        (KvFormat::Mxfp8, 96),
        (KvFormat::Mxfp4, 64),
        (KvFormat::Nvfp4, 48),
        (KvFormat::RowInt4, 80),
        (KvFormat::RowFp4, 72),
    ];
    for bits in [2, 3, 4, 5, 6, 8] {
        for (group, dim) in [(32, 96), (64, 128), (128, 256)] {
            formats.push((KvFormat::Affine { bits, group }, dim));
        }
    }
    formats
}

/// The bytes of a row in each plane.
type Stored = [Vec<u8>; 3];

fn stored(format: KvFormat, row: &[f32]) -> Stored {
    let codec = Codec::of(format).unwrap();
    let mut planes = codec.widths(row.len()).map(|width| vec![0; width]);
    codec.encode(row, planes.each_mut().map(|plane| plane.as_mut_slice()));
    planes
}

fn read_back(format: KvFormat, planes: &Stored, dim: usize) -> Vec<f32> {
    let mut row = vec![0.0; dim];
    Codec::of(format).unwrap().decode(planes.each_ref().map(|plane| plane.as_slice()), &mut row);
    row
}

/// The rows of one layer's keys, or of its values: by slot and head.
#[derive(Clone, Default)]
struct Model {
    rows: BTreeMap<(i32, i32), Stored>,
}

/// The rows of a view.
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
    Codec::of(format).unwrap().widths(dim).map(|width| vec![0; width])
}

/// A store of one layer beside what it holds.
struct Run {
    rng: Rng,
    store: CpuStore,
    layer: LayerConfig,
    formats: [KvFormat; 2],
    model: [Model; 2],
    slots: i32,
    /// Views, and what they showed when they were read.
    held: Vec<(View, Model)>,
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut rng = Rng(seed);
        for _ in 0..3 {
            rng.next();
        }
        let layer = LayerConfig {
            n_kv_heads: rng.pick(&[1, 2, 3]),
            k_head_dim: 128,
            v_head_dim: 128,
            policy: LayerPolicy::Full,
        };
        let formats = [Self::format(&mut rng), Self::format(&mut rng)];
        let store = CpuStore::new(std::slice::from_ref(&layer), formats).unwrap();
        Self { rng, store, layer, formats, model: Default::default(), slots: 0, held: Vec::new() }
    }

    fn format(rng: &mut Rng) -> KvFormat {
        let all: Vec<KvFormat> = formats().into_iter().map(|(format, _)| format).collect();
        rng.pick(&all)
    }

    /// Makes memory run out, sometimes.
    fn starve(&mut self) {
        shortage::after((self.rng.below(3) == 0).then(|| self.rng.below(6)));
    }

    fn grown(&mut self, slots: i32) {
        for (model, format) in self.model.iter_mut().zip(self.formats) {
            for slot in self.slots..slots {
                for head in 0..self.layer.n_kv_heads {
                    model.rows.insert((slot, head), zeros(format, 128));
                }
            }
        }
        self.slots = self.slots.max(slots);
    }

    /// Grows until both buffers have these slots: a call that fails may leave either grown.
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

    /// Returns some slots, none twice.
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

    /// Returns rows of any dtype, some of them beyond it, and their values.
    fn rows(&mut self, n: i32) -> (Tensor, Vec<f32>) {
        let shape = [1, self.layer.n_kv_heads, n, 128];
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

    /// Runs a step: it is kept, or aborted, perhaps because memory ran out.
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
        let written = self.store.write(0, &slots, &k, &v, true);
        shortage::after(None);
        if written.is_ok() {
            for (which, rows) in [keys, values].iter().enumerate() {
                for (at, slot) in slots.iter().enumerate() {
                    for head in 0..self.layer.n_kv_heads {
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

    /// Blanks slots, as an abort does whose step displaced nothing.
    fn blank(&mut self) {
        let slots = self.some_slots();
        let saved = self.store.begin(&[]).unwrap();
        self.store.abort(saved, &[(0, slots.clone())]).unwrap();
        for (model, format) in self.model.iter_mut().zip(self.formats) {
            for slot in slots.iter() {
                for head in 0..self.layer.n_kv_heads {
                    model.rows.insert((slot, head), zeros(format, 128));
                }
            }
        }
    }

    fn relocate(&mut self) {
        let (from, to) = (self.some_slots(), self.some_slots());
        let n = from.len().min(to.len());
        let cut = |slots: &Slots| Slots::of(&slots.iter().take(n).collect::<Vec<_>>());
        let (from, to) = (cut(&from), cut(&to));
        self.store.relocate(0, &from, &to, self.slots).unwrap();
        for model in &mut self.model {
            let before = model.rows.clone();
            for (from, to) in from.iter().zip(to.iter()) {
                for head in 0..self.layer.n_kv_heads {
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
        for (which, Extent { format, slots: held }) in extents.into_iter().enumerate() {
            let kept = if self.formats[which] == formats[which] { self.slots } else { 0 };
            assert_eq!((format, held), (formats[which], kept.max(slots)));
            most = most.max(held);
            self.model[which].rows.retain(|(slot, _), _| *slot < kept);
            for slot in kept..held {
                for head in 0..self.layer.n_kv_heads {
                    self.model[which].rows.insert((slot, head), zeros(format, 128));
                }
            }
        }
        self.formats = formats;
        // The same slots everywhere, for the other calls.
        for which in 0..2 {
            let held = extents[which].slots;
            for slot in held..most {
                for head in 0..self.layer.n_kv_heads {
                    self.model[which].rows.insert((slot, head), zeros(formats[which], 128));
                }
            }
        }
        self.store.grow(0, most).unwrap();
        self.slots = most;
    }

    /// Compares all rows, and those that views keep.
    fn check(&mut self) {
        let [k, v] = self.store.read(0, 0..self.slots).unwrap();
        for (view, model) in [&k, &v].into_iter().zip(&self.model) {
            assert!(shown(view, 0).rows == model.rows, "{}", view.format());
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
            match run.rng.below(12) {
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
                _ if run.slots > 0 => run.step(),
                _ => run.grow(2),
            }
            run.check();
        }
    }
}
