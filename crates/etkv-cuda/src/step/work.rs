//! The kernels of a plan as they are launched, and the memory between them.

use std::ffi::c_void;

use crate::step::check::rows;
use crate::step::compile::Source;
use crate::step::device::Device;
use crate::step::driver::{Kernel, Memory, Stream};
use crate::step::error::{fail, Result};
use crate::step::launch::{
    self, int, or_null, AttendShape, AttendWork, ProductKernel, ProductShape, ProductWork, Step,
};
use crate::step::plan::{Attend, Buffer, Embed, Launch, Plan, Product};

/// Where the logits are behind the ids that are chosen, in bytes, and how far apart buffers begin.
pub(crate) const LOGITS_AT: usize = 256;
const APART: usize = 256;

/// The kernels of a plan, and the memory between them.
#[derive(Debug)]
pub(crate) struct Work {
    product: Kernel,
    row: Kernel,
    tiled: Kernel,
    embed: Kernel,
    choose: Kernel,
    /// Of each launch, if it is attention: itself, and what merges its slices.
    attend: Vec<Option<(Kernel, Kernel, AttendShape)>>,
    /// Where each buffer is, and its bytes.
    pub(crate) places: Vec<(u64, usize)>,
    pub(crate) step: Memory,
    pub(crate) outputs: Memory,
    partial: Memory,
    _buffers: Memory,
    device: Device,
}

impl Work {
    pub(crate) fn new(device: &Device, plan: &Plan) -> Result<Self> {
        let context = &device.0.context;
        let limits = device.0.limits;
        let source = Source::Product(plan.element);
        let mut attend = Vec::new();
        for launch in &plan.launches {
            attend.push(match launch {
                Launch::Attend(work) => {
                    let shape = AttendShape::of(plan, work, limits)?;
                    let kernel = device.kernel(shape.source, c"etkv_attend", shape.bytes_shared)?;
                    let merge = device.kernel(shape.source, c"etkv_merge", 0)?;
                    Some((kernel, merge, shape))
                }
                Launch::Product(product) => {
                    ProductShape::of(plan, product, limits)?;
                    None
                }
                Launch::Embed(_) => None,
            });
        }
        let shapes = || attend.iter().flatten().map(|(_, _, shape)| shape);
        let floats = shapes().map(|shape| shape.floats).max().unwrap_or(0);
        let logits = plan.logits.map(|logits| logits.buffer);
        let logits_bytes = logits.map_or(0, |Buffer(index)| 2 * plan.buffers[index]);
        let outputs = Memory::new(context, LOGITS_AT + logits_bytes)?;
        let mut bytes = 0;
        let mut places = Vec::new();
        for (index, &elements) in plan.buffers.iter().enumerate() {
            places.push((bytes as u64, 2 * elements));
            if logits != Some(Buffer(index)) {
                bytes += (2 * elements).next_multiple_of(APART);
            }
        }
        let buffers = Memory::new(context, bytes)?;
        for (index, (place, _)) in places.iter_mut().enumerate() {
            *place = match logits == Some(Buffer(index)) {
                true => outputs.address().0 + LOGITS_AT as u64,
                false => buffers.address().0 + *place,
            };
        }
        Ok(Self {
            product: device.kernel(source, c"etkv_product", limits.product_shared())?,
            row: device.kernel(source, c"etkv_row", limits.product_shared())?,
            tiled: device.kernel(source, c"etkv_tiled", limits.block_shared)?,
            embed: device.kernel(source, c"etkv_embed", 0)?,
            choose: device.kernel(source, c"etkv_choose", 0)?,
            attend,
            places,
            step: Memory::new(context, size_of::<Step>())?,
            outputs,
            partial: Memory::new(context, 4 * floats)?,
            _buffers: buffers,
            device: device.clone(),
        })
    }

    fn at(&self, Buffer(index): Buffer) -> u64 {
        self.places[index].0
    }

    /// Asks the stream for all launches.
    pub(crate) fn launch_all(&self, stream: &Stream, plan: &Plan) -> Result<()> {
        let overlap = plan.overlap && self.device.0.overlaps;
        for (number, launch) in plan.launches.iter().enumerate() {
            // The first follows a copy, which has to end.
            let overlaps = overlap && number > 0;
            match (launch, &self.attend[number]) {
                (Launch::Embed(embed), _) => self.embed(stream, plan, embed, overlaps)?,
                (Launch::Product(product), _) => self.product(stream, plan, product, overlaps)?,
                (Launch::Attend(attend), Some((kernel, merge, shape))) => {
                    let work = self.attend_work(plan, attend, shape);
                    let (threads, shared) = (launch::ATTEND_THREADS, shape.bytes_shared);
                    let arguments = &mut [of(&work)];
                    // SAFETY: this is the kernels' argument; the plan's check has compared all sizes.
                    unsafe {
                        let grid = shape.grid;
                        launch::launch(stream, kernel, grid, threads, shared, arguments, overlaps)?;
                        let grid = shape.merging;
                        launch::launch(stream, merge, grid, threads, 0, arguments, overlap)?;
                    }
                }
                (Launch::Attend(_), None) => fail!(Plan, "attention has no kernel"),
            }
        }
        match plan.logits.filter(|logits| logits.chosen) {
            Some(logits) => {
                let (out, from) = (self.outputs.address().0, self.at(logits.buffer));
                let grid = [logits.rows, 1, 1];
                let vocabulary = int(logits.vocabulary);
                let arguments = &mut [of(&out), of(&from), of(&vocabulary)];
                let threads = launch::CHOOSE_THREADS;
                // SAFETY: these are the kernel's arguments; the logits have so many rows.
                unsafe {
                    launch::launch(stream, &self.choose, grid, threads, 0, arguments, overlap)
                }
            }
            None => Ok(()),
        }
    }

    fn embed(&self, stream: &Stream, plan: &Plan, embed: &Embed, overlaps: bool) -> Result<()> {
        let (out, table, step) = (self.at(embed.out), embed.table.0, self.step.address().0);
        let (vocabulary, inner) = (int(embed.vocabulary), int(embed.inner));
        let arguments = &mut [of(&out), of(&table), of(&step), of(&vocabulary), of(&inner)];
        let (grid, threads) = ([plan.tokens, 1, 1], launch::EMBED_THREADS);
        // SAFETY: these are the kernel's arguments; the buffer has a row for each token.
        unsafe { launch::launch(stream, &self.embed, grid, threads, 0, arguments, overlaps) }
    }

    fn product(
        &self,
        stream: &Stream,
        plan: &Plan,
        product: &Product,
        overlaps: bool,
    ) -> Result<()> {
        let shape = ProductShape::of(plan, product, self.device.0.limits)?;
        let skipped = (plan.tokens - rows(plan, product)) * product.inner;
        let mut work = ProductWork {
            x: self.at(product.x) + 2 * skipped as u64,
            w: product.weight.0,
            bias: or_null(product.bias),
            norm: or_null(product.norm.and_then(|norm| norm.weight)),
            plus: product.plus.map_or(0, |plus| self.at(plus)),
            out: self.at(product.out),
            step: self.step.address().0,
            eps: product.norm.map_or(0.0, |norm| norm.eps),
            normalizes: i32::from(product.norm.is_some()),
            gate: product.gate.map_or(0, |gate| gate as i32),
            rows: int(rows(plan, product)),
            outputs: int(product.outputs),
            inner: int(product.inner),
            most_shared: int(shape.shared / 2),
            ..ProductWork::default()
        };
        if let Some(heads) = &product.heads {
            let turned = heads.periods.map_or(0, |_| (heads.n_q + heads.n_kv) * heads.head_dim);
            work.periods = or_null(heads.periods);
            work.keys = heads.keys.address.0;
            work.values = heads.values.address.0;
            work.keys_head = (heads.keys.capacity * heads.head_dim) as i64;
            work.values_head = (heads.values.capacity * heads.head_dim) as i64;
            work.head_dim = int(heads.head_dim);
            work.turned = int(turned);
            work.queries = int(heads.n_q);
            work.each = int(heads.n_kv);
        }
        let kernel = match shape.kernel {
            ProductKernel::Row => &self.row,
            ProductKernel::Few => &self.product,
            ProductKernel::Tiled => &self.tiled,
        };
        let (threads, shared) = (shape.threads, shape.shared);
        let (grid, arguments) = ([shape.blocks, 1, 1], &mut [of(&work)]);
        // SAFETY: this is the kernel's argument; the plan's check has compared all sizes.
        unsafe { launch::launch(stream, kernel, grid, threads, shared, arguments, overlaps) }
    }

    fn attend_work(&self, plan: &Plan, attend: &Attend, shape: &AttendShape) -> AttendWork {
        AttendWork {
            q: self.at(attend.q),
            keys: attend.keys.address.0,
            values: attend.values.address.0,
            out: self.at(attend.out),
            step: self.step.address().0,
            partial: self.partial.address().0,
            keys_head: (attend.keys.capacity * attend.head_dim) as i64,
            values_head: (attend.values.capacity * attend.head_dim) as i64,
            scale: attend.scale,
            tokens: int(plan.tokens),
            queries: int(attend.n_q),
            each: int(attend.n_kv),
            slices: int(shape.grid[0]),
        }
    }
}

/// Returns the address of an argument, which the driver reads.
fn of<T>(argument: &T) -> *mut c_void {
    std::ptr::from_ref(argument).cast_mut().cast()
}
