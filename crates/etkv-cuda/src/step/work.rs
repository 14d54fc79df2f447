//! Launches the kernels of a plan, and allocates the memory between them.

use std::collections::HashMap;
use std::ffi::c_void;

use crate::step::attend::{row_blocks, AttendShape, AttendWork, ATTEND_THREADS};
use crate::step::check::{capacity, rows};
use crate::step::device::Device;
use crate::step::driver::{Kernel, Memory, Stream};
use crate::step::error::{fail, Result};
use crate::step::launch::{
    self, int, many_depth, or_null, ManyWork, PackedWork, ProductKernel, ProductShape, ProductWork,
    Step,
};
use crate::step::mask::max_numbers;
use crate::step::norms::{BlendWork, NormWork, NORM_THREADS};
use crate::step::plan::{
    Attend, Buffer, Embed, Launch, PackedWeight, Plan, Pool, PoolRows, Product, Weight,
};
use crate::step::pools::{place_grid, place_kernel, PlaceWork, Planes};
use crate::step::source::Source;

/// The offset of the logits in the outputs, in bytes. The logits follow the argmax ids.
pub(crate) const LOGITS_AT: usize = 256;
/// The alignment of buffers, in bytes.
pub(crate) const BUFFER_ALIGNMENT: usize = 256;

/// The kernels of a plan, and the memory between them.
#[derive(Debug)]
pub(crate) struct Work {
    product: Kernel,
    row: Kernel,
    tiled: Kernel,
    /// Kernels of many rows, if the plan has such products.
    many: Option<ManyKernels>,
    embed: Kernel,
    choose: Kernel,
    /// Kernels of packed weights, keyed by the bits of a code.
    packed: HashMap<usize, PackedKernels>,
    /// Kernels that normalize and blend rows, if the plan has such launches.
    rows: Option<RowKernels>,
    /// Kernels that place heads, keyed by the index of the launch.
    place: HashMap<usize, Kernel>,
    /// For each launch, if it is attention: the kernel, and the kernel that merges its slices.
    attend: Vec<Option<(Kernel, Kernel, AttendShape)>>,
    /// The address and the bytes of each buffer.
    pub(crate) places: Vec<(u64, usize)>,
    /// A [`Step`] for each group, followed by the buffers that the host fills.
    pub(crate) step: Memory,
    /// The argmax ids, the logits, and the tapped buffers.
    pub(crate) outputs: Memory,
    /// The memory of each group's mask, if it has one.
    pub(crate) tiles: Vec<Option<Memory>>,
    partial: Memory,
    _buffers: Memory,
    device: Device,
}

/// The kernels that multiply many rows, and the memory for their partial sums.
#[derive(Debug)]
struct ManyKernels {
    plain: Kernel,
    gated: Kernel,
    heads: Kernel,
    normalize: Kernel,
    normalized: Memory,
    sums: Memory,
    counts: Memory,
}

impl ManyKernels {
    /// Returns the kernels, or `None` if the plan does not need them.
    fn of(device: &Device, plan: &Plan) -> Result<Option<Self>> {
        let limits = device.0.limits;
        let (mut shared, mut normalized, mut sums, mut counts) = (0, 0, 0, 0);
        for launch in &plan.launches {
            let Launch::Product(product) = launch else {
                continue;
            };
            let n = rows(plan, product);
            let shape = ProductShape::of(plan, product, limits)?;
            if !matches!(shape.kernel, ProductKernel::Many { .. }) {
                continue;
            }
            let (floats, numbers) = shape.scratch(n);
            let elements = product.norm.map_or(0, |_| n * product.inner);
            (shared, sums) = (shape.shared.max(shared), floats.max(sums));
            (normalized, counts) = (elements.max(normalized), numbers.max(counts));
        }
        if shared == 0 {
            return Ok(None);
        }
        let source = Source::Many { element: plan.element, depth: many_depth(limits) };
        let context = &device.0.context;
        Ok(Some(Self {
            plain: device.kernel(source, c"etkv_many", shared)?,
            gated: device.kernel(source, c"etkv_many_gated", shared)?,
            heads: device.kernel(source, c"etkv_many_heads", shared)?,
            normalize: device.kernel(source, c"etkv_normalize", 0)?,
            normalized: Memory::new(context, 2 * normalized)?,
            sums: Memory::new(context, 4 * sums)?,
            counts: Memory::new(context, 4 * counts)?,
        }))
    }
}

/// The kernels that read packed weights of one number of bits.
#[derive(Debug)]
struct PackedKernels {
    product: Kernel,
    embed: Kernel,
}

impl PackedKernels {
    /// Returns the kernels that a plan needs, keyed by the number of bits.
    fn of(device: &Device, plan: &Plan) -> Result<HashMap<usize, Self>> {
        let mut found = HashMap::new();
        for launch in &plan.launches {
            let (Launch::Product(Product {
                weight: Weight::Packed(PackedWeight { bits, .. }),
                ..
            })
            | Launch::Embed(Embed { table: Weight::Packed(PackedWeight { bits, .. }), .. })) =
                *launch
            else {
                continue;
            };
            if found.contains_key(&bits) {
                continue;
            }
            let source = Source::Packed { element: plan.element, bits };
            let shared = device.0.limits.product_shared();
            let product = device.kernel(source, c"etkv_packed", shared)?;
            let embed = device.kernel(source, c"etkv_embed_packed", 0)?;
            found.insert(bits, Self { product, embed });
        }
        Ok(found)
    }
}

/// The kernels that normalize and blend rows.
#[derive(Debug)]
struct RowKernels {
    norm: Kernel,
    blend: Kernel,
}

impl RowKernels {
    /// Returns the kernels, or `None` if the plan does not need them.
    fn of(device: &Device, plan: &Plan) -> Result<Option<Self>> {
        let needs = |launch: &Launch| matches!(launch, Launch::Normalize(_) | Launch::Blend(_));
        if !plan.launches.iter().any(needs) {
            return Ok(None);
        }
        let source = Source::Norm(plan.element);
        let norm = device.kernel(source, c"etkv_norm", 0)?;
        Ok(Some(Self { norm, blend: device.kernel(source, c"etkv_blend", 0)? }))
    }
}

/// The layout of the memory that the host writes before a step, and of the memory that it reads after the
/// step. Each of the two is one block, both on the host and on the device.
#[derive(Debug)]
pub(crate) struct Layout {
    /// The buffers that the host fills, and their offsets. They follow the [`Step`] of each group.
    pub(crate) given: Vec<(Buffer, usize)>,
    pub(crate) step_bytes: usize,
    /// The logits and the tapped buffers, with their offsets. They follow the argmax ids.
    outputs: Vec<(Buffer, usize)>,
    /// The offset of the tapped buffers.
    pub(crate) tapped_at: usize,
    pub(crate) outputs_bytes: usize,
}

impl Layout {
    pub(crate) fn of(plan: &Plan) -> Self {
        let bytes_of = |Buffer(index): Buffer| 2 * plan.buffers[index];
        let mut step_bytes = plan.masked.len() * size_of::<Step>();
        let place = |&buffer: &Buffer| {
            let at = step_bytes.next_multiple_of(BUFFER_ALIGNMENT);
            step_bytes = at + bytes_of(buffer);
            (buffer, at)
        };
        let given = plan.given.iter().map(place).collect();
        let logits = plan.logits.map(|logits| logits.buffer);
        let tapped_at = LOGITS_AT + logits.map_or(0, bytes_of).next_multiple_of(BUFFER_ALIGNMENT);
        let mut outputs_bytes = tapped_at;
        let place = |&buffer: &Buffer| {
            let at = outputs_bytes;
            outputs_bytes += bytes_of(buffer);
            (buffer, at)
        };
        let tapped: Vec<_> = plan.tapped.iter().map(place).collect();
        let outputs = logits.map(|logits| (logits, LOGITS_AT)).into_iter().chain(tapped).collect();
        Self { given, step_bytes, outputs, tapped_at, outputs_bytes }
    }

    fn has(&self, buffer: Buffer) -> bool {
        self.given.iter().chain(&self.outputs).any(|(other, _)| *other == buffer)
    }
}

impl Work {
    pub(crate) fn new(device: &Device, plan: &Plan) -> Result<Self> {
        let context = &device.0.context;
        let limits = device.0.limits;
        let source = Source::Product(plan.element);
        let (mut attend, mut place) = (Vec::new(), HashMap::new());
        for (number, launch) in plan.launches.iter().enumerate() {
            if let Launch::PlaceHeads(work) = launch {
                place.insert(number, place_kernel(device, plan, work)?);
            }
            attend.push(match launch {
                Launch::Attend(work) => {
                    let shape = AttendShape::of(plan, work, limits)?;
                    let kernel = device.kernel(shape.source, c"etkv_attend", shape.bytes_shared)?;
                    let merge = device.kernel(shape.source, shape.merge.name(), 0)?;
                    Some((kernel, merge, shape))
                }
                Launch::Product(product) => {
                    ProductShape::of(plan, product, limits)?;
                    None
                }
                Launch::Embed(_)
                | Launch::Normalize(_)
                | Launch::Blend(_)
                | Launch::PlaceHeads(_) => None,
            });
        }
        let shapes = || attend.iter().flatten().map(|(_, _, shape)| shape);
        let floats = shapes().map(|shape| shape.floats).max().unwrap_or(0);
        let layout = Layout::of(plan);
        let step = Memory::new(context, layout.step_bytes)?;
        let outputs = Memory::new(context, layout.outputs_bytes)?;
        let mut bytes = 0;
        let mut place_of = |(index, &elements): (usize, &usize)| {
            let (buffer, all) = (Buffer(index), 2 * elements);
            let found = |places: &[(Buffer, usize)]| {
                places.iter().find(|(other, _)| *other == buffer).map(|&(_, at)| at as u64)
            };
            if let Some(at) = found(&layout.given) {
                return (step.address().0 + at, all);
            }
            if let Some(at) = found(&layout.outputs) {
                return (outputs.address().0 + at, all);
            }
            let at = bytes;
            bytes += all.next_multiple_of(BUFFER_ALIGNMENT);
            // An offset. The address of the buffers' memory is added after its allocation below.
            (at as u64, all)
        };
        let mut places: Vec<(u64, usize)> =
            plan.buffers.iter().enumerate().map(&mut place_of).collect();
        let buffers = Memory::new(context, bytes)?;
        let tiles_of = |group: usize| {
            let bytes = |rows| 8 * max_numbers(rows, capacity(plan, group));
            row_blocks(plan, group).map(|rows| Memory::new(context, bytes(rows))).transpose()
        };
        for (index, (place, _)) in places.iter_mut().enumerate() {
            if !layout.has(Buffer(index)) {
                *place += buffers.address().0;
            }
        }
        Ok(Self {
            product: device.kernel(source, c"etkv_product", limits.product_shared())?,
            row: device.kernel(source, c"etkv_row", limits.product_shared())?,
            tiled: device.kernel(source, c"etkv_tiled", limits.block_shared)?,
            many: ManyKernels::of(device, plan)?,
            embed: device.kernel(source, c"etkv_embed", 0)?,
            choose: device.kernel(source, c"etkv_choose", 0)?,
            packed: PackedKernels::of(device, plan)?,
            rows: RowKernels::of(device, plan)?,
            place,
            attend,
            places,
            step,
            outputs,
            tiles: (0..plan.masked.len()).map(tiles_of).collect::<Result<_>>()?,
            partial: Memory::new(context, 4 * floats)?,
            _buffers: buffers,
            device: device.clone(),
        })
    }

    /// Returns the address of the step for a layer group.
    fn step_of(&self, group: usize) -> u64 {
        self.step.address().0 + (group * size_of::<Step>()) as u64
    }

    fn at(&self, Buffer(index): Buffer) -> u64 {
        self.places[index].0
    }

    /// Enqueues all launches of the plan on the stream.
    pub(crate) fn launch_all(&self, stream: &Stream, plan: &Plan) -> Result<()> {
        let overlap = plan.overlap && self.device.0.overlaps;
        let by_token = [plan.tokens, 1, 1];
        for (number, launch) in plan.launches.iter().enumerate() {
            // The first launch must wait for the end of the copy before it.
            let overlaps = overlap && number > 0;
            match (launch, &self.attend[number]) {
                (Launch::Embed(embed), _) => self.embed(stream, plan, embed, overlaps)?,
                (Launch::Product(product), _) => self.product(stream, plan, product, overlaps)?,
                (Launch::Attend(attend), Some((kernel, merge, shape))) => {
                    let work = self.attend_work(plan, attend, shape);
                    let (block, merging) = ((ATTEND_THREADS, shape.bytes_shared), shape.merging);
                    enqueue(stream, kernel, shape.grid, block, &work, overlaps)?;
                    enqueue(stream, merge, merging, (shape.merge.threads(), 0), &work, overlap)?;
                }
                (Launch::Normalize(normalize), _) => {
                    let work = NormWork::of(normalize, |buffer| self.at(buffer));
                    let kernel = &self.rows()?.norm;
                    enqueue(stream, kernel, by_token, (NORM_THREADS, 0), &work, overlaps)?;
                }
                (Launch::Blend(blend), _) => {
                    let work = BlendWork::of(blend, |buffer| self.at(buffer));
                    let kernel = &self.rows()?.blend;
                    enqueue(stream, kernel, by_token, (NORM_THREADS, 0), &work, overlaps)?;
                }
                (Launch::PlaceHeads(place), _) => {
                    let Some(kernel) = self.place.get(&number) else {
                        fail!(Plan, "heads that are placed have no kernel");
                    };
                    let step = self.step_of(place.heads.group);
                    let places = [self.at(place.x), self.at(place.out), step];
                    let work = PlaceWork::of(place, places);
                    let (grid, threads) = place_grid(plan, place);
                    enqueue(stream, kernel, grid, (threads, 0), &work, overlaps)?;
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
                // SAFETY: the arguments are those of the kernel, and the logits have that many rows.
                unsafe {
                    launch::launch(stream, &self.choose, grid, threads, 0, arguments, overlap)
                }
            }
            None => Ok(()),
        }
    }

    /// Returns the kernels of rows, which the plan must need.
    fn rows(&self) -> Result<&RowKernels> {
        match &self.rows {
            Some(kernels) => Ok(kernels),
            None => fail!(Plan, "rows that are normalized or blended have no kernels"),
        }
    }

    /// Returns the kernels of a packed weight, which the plan must need.
    fn packed(&self, packed: &PackedWeight) -> Result<&PackedKernels> {
        match self.packed.get(&packed.bits) {
            Some(kernels) => Ok(kernels),
            None => fail!(Plan, "weights of {} bits have no kernels", packed.bits),
        }
    }

    fn embed(&self, stream: &Stream, plan: &Plan, embed: &Embed, overlaps: bool) -> Result<()> {
        // All groups have the same ids.
        let (out, step) = (self.at(embed.out), self.step_of(0));
        let (vocabulary, inner) = (int(embed.vocabulary), int(embed.inner));
        let scale = or_null(embed.scale);
        let (grid, threads) = ([plan.tokens, 1, 1], launch::EMBED_THREADS);
        let launch = |kernel: &Kernel, arguments: &mut [*mut c_void]| {
            // SAFETY: the arguments are those of the kernel, and the buffer has a row for each token.
            unsafe { launch::launch(stream, kernel, grid, threads, 0, arguments, overlaps) }
        };
        match embed.table {
            Weight::Plain(table) => {
                let arguments = &mut [
                    of(&out),
                    of(&table.0),
                    of(&scale),
                    of(&step),
                    of(&vocabulary),
                    of(&inner),
                ];
                launch(&self.embed, arguments)
            }
            Weight::Packed(table) => {
                let shift = group_shift(&table);
                let arguments = &mut [
                    of(&out),
                    of(&table.codes.0),
                    of(&table.scales.0),
                    of(&table.biases.0),
                    of(&scale),
                    of(&step),
                    of(&shift),
                    of(&vocabulary),
                    of(&inner),
                ];
                launch(&self.packed(&table)?.embed, arguments)
            }
        }
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
        let (Weight::Plain(codes) | Weight::Packed(PackedWeight { codes, .. })) = product.weight;
        let mut work = ProductWork {
            x: self.at(product.x) + 2 * skipped as u64,
            w: codes.0,
            bias: or_null(product.bias),
            norm: or_null(product.norm.and_then(|norm| norm.weight)),
            residual: product.residual.map_or(0, |residual| self.at(residual)),
            out: self.at(product.out),
            step: self.step_of(product.heads.map_or(0, |heads| heads.group)),
            eps: product.norm.map_or(0.0, |norm| norm.eps),
            normalizes: i32::from(product.norm.is_some()),
            gate: product.gate.map_or(0, |gate| gate as i32),
            rows: int(rows(plan, product)),
            outputs: int(product.outputs),
            inner: int(product.inner),
            max_shared: int(shape.shared / 2),
            ..ProductWork::default()
        };
        if let Some(heads) = &product.heads {
            let rotated = heads.periods.map_or(0, |_| (heads.n_q + heads.n_kv) * heads.head_dim);
            work.periods = or_null(heads.periods);
            work.keys = plain(heads.keys)?;
            work.values = plain(heads.values)?;
            work.keys_head = (heads.keys.capacity * heads.head_dim) as i64;
            work.values_head = (heads.values.capacity * heads.head_dim) as i64;
            work.head_dim = int(heads.head_dim);
            work.rotated = int(rotated);
            work.queries = int(heads.n_q);
            work.each = int(heads.n_kv);
        }
        let (grid, block) = ([shape.blocks, 1, 1], (shape.threads, shape.shared));
        match (product.weight, shape.kernel) {
            (Weight::Packed(packed), _) => {
                let work = PackedWork {
                    product: work,
                    scales: packed.scales.0,
                    biases: packed.biases.0,
                    group_shift: group_shift(&packed),
                    unused: 0,
                };
                let kernel = &self.packed(&packed)?.product;
                enqueue(stream, kernel, grid, block, &work, overlaps)
            }
            (Weight::Plain(_), ProductKernel::Row { team }) => {
                work.team = int(team);
                enqueue(stream, &self.row, grid, block, &work, overlaps)
            }
            (Weight::Plain(_), ProductKernel::Few) => {
                enqueue(stream, &self.product, grid, block, &work, overlaps)
            }
            (Weight::Plain(_), ProductKernel::Tiled) => {
                enqueue(stream, &self.tiled, grid, block, &work, overlaps)
            }
            (Weight::Plain(_), ProductKernel::Many { splits, .. }) => {
                let Some(many) = &self.many else {
                    fail!(Plan, "products of many rows have no kernels");
                };
                if product.norm.is_some() {
                    let out = many.normalized.address().0;
                    let arguments = &mut [of(&work), of(&out)];
                    let (grid, threads) = ([rows(plan, product), 1, 1], launch::NORMALIZE_THREADS);
                    // SAFETY: the arguments are those of the kernel, and the memory has that many rows.
                    unsafe {
                        let kernel = &many.normalize;
                        launch::launch(stream, kernel, grid, threads, 0, arguments, overlaps)?;
                    }
                    (work.x, work.norm, work.normalizes) = (out, 0, 0);
                }
                let work = ManyWork {
                    product: work,
                    sums: many.sums.address().0,
                    counts: many.counts.address().0,
                    splits: int(splits),
                    unused: 0,
                };
                let overlaps =
                    overlaps || product.norm.is_some() && plan.overlap && self.device.0.overlaps;
                let kernel = match (product.gate, &product.heads) {
                    (Some(_), _) => &many.gated,
                    (None, Some(_)) => &many.heads,
                    (None, None) => &many.plain,
                };
                enqueue(stream, kernel, grid, block, &work, overlaps)
            }
        }
    }

    fn attend_work(&self, plan: &Plan, attend: &Attend, shape: &AttendShape) -> AttendWork {
        let tiles = self.tiles.get(attend.group).and_then(Option::as_ref);
        AttendWork {
            q: self.at(attend.q),
            out: self.at(attend.out),
            step: self.step_of(attend.group),
            tiles: tiles.map_or(0, |tiles| tiles.address().0),
            partial: self.partial.address().0,
            keys: Planes::of(attend.keys),
            values: Planes::of(attend.values),
            scale: attend.scale,
            tokens: int(plan.tokens),
            queries: int(attend.n_q),
            each: int(attend.n_kv),
            slices: int(shape.grid[0]),
            unused: 0,
        }
    }
}

/// Returns the address of a plain pool's rows.
fn plain(pool: Pool) -> Result<u64> {
    match pool.rows {
        PoolRows::Plain(address) => Ok(address.0),
        PoolRows::Packed(_) => fail!(Plan, "heads of a product go to plain pools"),
    }
}

/// Returns the base-2 logarithm of a packed weight's group size, which is a power of two.
fn group_shift(packed: &PackedWeight) -> i32 {
    packed.group.trailing_zeros() as i32
}

/// Launches a kernel of one argument, which must be `argument`. `block` has the number of threads of a block,
/// and its bytes of dynamic shared memory.
fn enqueue<T>(
    stream: &Stream,
    kernel: &Kernel,
    grid: [usize; 3],
    block: (usize, usize),
    argument: &T,
    overlaps: bool,
) -> Result<()> {
    let ((threads, shared), arguments) = (block, &mut [of(argument)]);
    // SAFETY: the argument is that of the kernel, and the check of the plan has verified all sizes.
    unsafe { launch::launch(stream, kernel, grid, threads, shared, arguments, overlaps) }
}

/// Returns the address of an argument, for the driver.
fn of<T>(argument: &T) -> *mut c_void {
    std::ptr::from_ref(argument).cast_mut().cast()
}
