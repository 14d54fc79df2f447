//! A captured step: a CUDA graph that is replayed.

use std::ops::Range;
use std::ptr::null_mut;

use cudarc::driver::sys::{self, CUstreamCaptureMode};

use crate::step::attend::row_blocks;
use crate::step::check::{capacity, check as check_plan};
use crate::step::device::Device;
use crate::step::driver::{Memory, PinnedMemory, Stream};
use crate::step::error::{check, fail, Result};
use crate::step::inputs::{check_given, check_steps, StepInputs};
use crate::step::launch::{int, Step};
use crate::step::mask::RowBlocks;
use crate::step::plan::{Buffer, CopiedRows, Logits, Plan, MAX_TOKENS};
use crate::step::work::{Layout, Work, BUFFER_ALIGNMENT, LOGITS_AT};

/// A captured plan: an instantiated CUDA graph and its memory. It keeps its device alive.
///
/// Dropping it waits for a running step.
#[derive(Debug)]
pub struct CapturedStep {
    exec: sys::CUgraphExec,
    started: bool,
    tokens: usize,
    groups: Vec<Group>,
    /// The number of argmax ids that are copied.
    chosen: usize,
    logits: usize,
    /// The address of the rows of logits, if each step copies only the row of its last token.
    last_of: Option<u64>,
    /// The range of tapped buffers in the outputs.
    tapped: Range<usize>,
    /// For each buffer that the host fills: its offset in `step`, and the bytes of a row.
    given: Vec<(usize, usize)>,
    /// A [`Step`] for each group, followed by the buffers that the host fills.
    step: PinnedMemory,
    outputs: PinnedMemory,
    /// The device memory and the kernels that the graph uses.
    work: Work,
    device: Device,
}

/// The data of a layer group.
#[derive(Debug)]
struct Group {
    /// The number of slots of its pools.
    capacity: usize,
    /// The host memory from which the mask of a step is copied, if the group has masks.
    tiles: Option<PinnedMemory>,
    /// The blocks of rows that read the mask.
    rows: Option<RowBlocks>,
}

// SAFETY: any thread may use a graph, one at a time, which `&mut` ensures.
unsafe impl Send for CapturedStep {}
// SAFETY: methods with a shared reference only read plain fields.
unsafe impl Sync for CapturedStep {}

/// The results of a step, for the host.
#[derive(Debug, Clone, Copy)]
pub struct Outputs<'a> {
    /// The [copied](crate::Logits::copied) rows of logits, `[rows, vocabulary]`, 2 bytes for each element.
    pub logits: &'a [u8],
    /// The tapped buffers, one after the other, 2 bytes for each element. Empty if no logits are copied.
    pub tapped: &'a [u8],
    /// The argmax of each row of the plan: the first of equal logits, or -1 if a logit is NaN or the largest
    /// is infinite. Empty if the plan does not compute it.
    pub chosen: &'a [i32],
}

impl Device {
    /// Captures a plan as a CUDA graph. Kernels that are not loaded yet are read from the cache folder, or
    /// compiled, which takes seconds.
    ///
    /// # Errors
    /// [`Error::Plan`](crate::Error::Plan) for an invalid plan; [`Error::Compiler`](crate::Error::Compiler)
    /// and [`Error::Driver`](crate::Error::Driver), for example if memory is lacking.
    pub fn capture(&self, plan: &Plan) -> Result<CapturedStep> {
        CapturedStep::new(self, plan)
    }
}

impl CapturedStep {
    pub(crate) fn new(device: &Device, plan: &Plan) -> Result<Self> {
        check_plan(plan)?;
        let context = &device.0.context;
        let copied = plan.logits.map_or(CopiedRows::None, |logits| logits.copied);
        let logits = plan.logits.map_or(0, |Logits { rows, vocabulary, copied, .. }| {
            let rows = match copied {
                CopiedRows::None => 0,
                CopiedRows::Last => 1,
                CopiedRows::All => rows,
            };
            2 * rows * vocabulary
        });
        let chosen = plan.logits.filter(|logits| logits.chosen).map_or(0, |logits| logits.rows);
        let work = Work::new(device, plan)?;
        let layout = Layout::of(plan);
        let step = PinnedMemory::new(context, layout.step_bytes)?;
        let tapped = match copied {
            CopiedRows::None => 0,
            _ => layout.outputs_bytes - layout.tapped_at,
        };
        let tapped_at = match copied {
            CopiedRows::All => layout.tapped_at,
            CopiedRows::None | CopiedRows::Last => {
                (LOGITS_AT + logits).next_multiple_of(BUFFER_ALIGNMENT)
            }
        };
        let outputs = PinnedMemory::new(context, tapped_at + tapped)?;
        let row = |Buffer(index): Buffer| 2 * plan.buffers[index] / plan.tokens;
        let given = layout.given.iter().map(|&(buffer, at)| (at, row(buffer))).collect();
        let group_of = |(group, memory): (usize, &Option<Memory>)| {
            let tiles = memory.as_ref().map(|memory| PinnedMemory::new(context, memory.bytes()));
            let rows = row_blocks(plan, group);
            Ok(Group { capacity: capacity(plan, group), tiles: tiles.transpose()?, rows })
        };
        let groups = work.tiles.iter().enumerate().map(group_of).collect::<Result<_>>()?;

        let stream = Stream::new(context)?;
        let graph = Graph::capture(&stream, || {
            // SAFETY: both ranges have `bytes` bytes while the graph lives.
            check("cuMemcpyHtoDAsync", unsafe {
                let to = work.step.address().0;
                sys::cuMemcpyHtoDAsync_v2(to, step.data().cast(), layout.step_bytes, stream.raw)
            })?;
            work.launch_all(&stream, plan)?;
            let copy = |from: usize, to: usize, bytes: usize| match bytes {
                0 => Ok(()),
                // SAFETY: both ranges have `bytes` bytes while the graph lives.
                _ => check("cuMemcpyDtoHAsync", unsafe {
                    let from = work.outputs.address().0 + from as u64;
                    let to = outputs.data().add(to).cast();
                    sys::cuMemcpyDtoHAsync_v2(to, from, bytes, stream.raw)
                }),
            };
            let begin = if chosen > 0 { 0 } else { LOGITS_AT };
            match copied {
                CopiedRows::None => copy(0, 0, 4 * chosen),
                CopiedRows::Last => {
                    copy(0, 0, 4 * chosen)?;
                    copy(layout.tapped_at, tapped_at, tapped)
                }
                // The ids, the logits and the tapped buffers are contiguous on the device and on the host.
                CopiedRows::All => copy(begin, begin, tapped_at + tapped - begin),
            }
        })?;
        let last_of =
            (copied == CopiedRows::Last).then(|| work.outputs.address().0 + LOGITS_AT as u64);
        let exec = graph.instantiate(&device.0.stream)?;
        Ok(Self {
            exec,
            started: false,
            tokens: plan.tokens,
            groups,
            chosen,
            logits,
            last_of,
            tapped: tapped_at..tapped_at + tapped,
            given,
            step,
            outputs,
            work,
            device: device.clone(),
        })
    }

    /// Runs a step of a plan with one group and waits for it.
    ///
    /// # Errors
    /// [`Error::Step`](crate::Error::Step) if the step does not fit the plan, or while another step runs.
    /// This error changes nothing. [`Error::Driver`](crate::Error::Driver) if the device fails. The contents
    /// of the step's slots are then unknown.
    ///
    /// # Safety
    /// As for [`CapturedStep::start`].
    pub unsafe fn run(&mut self, step: &StepInputs) -> Result<Outputs<'_>> {
        // SAFETY: the caller upholds the contract.
        unsafe { self.run_groups(std::slice::from_ref(step), &[]) }
    }

    /// Runs a step, with inputs for each group of the plan, and waits for it. All groups have the same
    /// tokens. For each buffer that the host [fills](Plan::given), `given` has the bytes of these tokens'
    /// rows.
    ///
    /// # Errors
    /// As for [`CapturedStep::run`].
    ///
    /// # Safety
    /// As for [`CapturedStep::start`].
    pub unsafe fn run_groups(
        &mut self,
        steps: &[StepInputs],
        given: &[&[u8]],
    ) -> Result<Outputs<'_>> {
        // SAFETY: the caller upholds the contract.
        unsafe { self.start(steps, given) }?;
        self.wait()
    }

    /// Starts a step with the inputs of [`run_groups`](Self::run_groups). It runs after all steps that were
    /// started earlier on this device.
    ///
    /// # Errors
    /// As for [`CapturedStep::run`].
    ///
    /// # Safety
    /// Until [`wait`](Self::wait) returns, all arrays of the plan must be live and have the shapes of the
    /// plan. Earlier writes of other streams to them must be complete. Meanwhile no other work may write to
    /// them, or read the step's slots of the pools.
    pub unsafe fn start(&mut self, steps: &[StepInputs], given: &[&[u8]]) -> Result<()> {
        if self.started {
            fail!(Step, "a step of this plan is running; wait for it first");
        }
        let groups = self.groups.iter().map(|group| (group.capacity, group.tiles.is_some()));
        check_steps(steps, self.tokens, groups)?;
        check_given(steps, given, self.given.iter().map(|&(_, row)| row))?;
        let Device(device) = &self.device;
        let _current = device.context.enter()?;
        for (group, step) in steps.iter().enumerate() {
            let inputs = Self::inputs(step, self.copy_tiles(group, step)?);
            // SAFETY: the block has room for a `Step` for each group, and is aligned to a page. No graph
            // reads it, since no step is running.
            unsafe { self.step.data().cast::<Step>().add(group).write(inputs) };
        }
        for (&(at, _), rows) in self.given.iter().zip(given) {
            // SAFETY: the block has room for the rows of all tokens of the plan, and the check ensures that
            // the step has no more. No graph reads it.
            unsafe { self.step.data().add(at).copy_from_nonoverlapping(rows.as_ptr(), rows.len()) };
        }
        // SAFETY: the graph and the stream are live. The caller ensures that the memory that the graph uses
        // is live, too.
        let launched = unsafe { sys::cuGraphLaunch(self.exec, device.stream.raw) };
        let started = check("cuGraphLaunch", launched).and_then(|()| self.copy_last_row(&steps[0]));
        if let Err(error) = started {
            // After an error, the copy of the mask may still read memory that the next step will write.
            let _ = device.stream.wait();
            return Err(error);
        }
        self.started = true;
        Ok(())
    }

    /// Starts the copy of the logits of a step's last token, if the plan copies only the row of that token.
    /// The graph cannot copy this row, since the number of tokens varies.
    fn copy_last_row(&self, step: &StepInputs) -> Result<()> {
        let Some(first) = self.last_of else {
            return Ok(());
        };
        let from = first + (self.logits * (step.ids.len() - 1)) as u64;
        // SAFETY: the check ensures that the plan has a row for the token. The destination has the bytes of
        // one row.
        check("cuMemcpyDtoHAsync", unsafe {
            let to = self.outputs.data().add(LOGITS_AT).cast();
            sys::cuMemcpyDtoHAsync_v2(to, from, self.logits, self.device.0.stream.raw)
        })
    }

    /// Returns a step in the layout that the kernels read. `before_tiles` is the number of 64-bit words
    /// before the tiles in the step's mask.
    fn inputs(step: &StepInputs, before_tiles: usize) -> Step {
        let mut inputs = Step {
            keys: int(step.n_keys),
            before_tiles: int(before_tiles),
            unused: [0; 2],
            ids: [0; MAX_TOKENS],
            positions: [0; MAX_TOKENS],
            // Tokens with slot -1 pad the step, and write nothing to the pools.
            slots: [-1; MAX_TOKENS],
        };
        let n = step.ids.len();
        inputs.ids[..n].copy_from_slice(step.ids);
        inputs.positions[..n].copy_from_slice(step.positions);
        inputs.slots[..n].copy_from_slice(step.slots);
        inputs
    }

    /// Starts the copy of a step's mask. The graph cannot copy the mask, since its size varies. Returns the
    /// number of 64-bit words before the tiles.
    fn copy_tiles(&self, group: usize, step: &StepInputs) -> Result<usize> {
        let own = self.groups.get(group);
        let from = own.and_then(|group| Some((group.tiles.as_ref()?, group.rows?)));
        let to = self.work.tiles.get(group).and_then(Option::as_ref);
        let (Some(mask), Some((from, rows)), Some(to)) = (step.mask, from, to) else {
            return Ok(0);
        };
        let numbers = from.bytes().len() / size_of::<u64>();
        // SAFETY: both blocks have room for any mask of this number of tokens over the plan's pools, which
        // the check of the step ensures. No running step reads them.
        let (written, copied) = unsafe {
            let own = std::slice::from_raw_parts_mut(from.data().cast::<u64>(), numbers);
            let written = mask.write(rows, own);
            let (to, bytes) = (to.address().0, size_of::<u64>() * written.all);
            let stream = self.device.0.stream.raw;
            (written, sys::cuMemcpyHtoDAsync_v2(to, from.data().cast(), bytes, stream))
        };
        check("cuMemcpyHtoDAsync", copied)?;
        Ok(written.lists)
    }

    /// Waits for the running step, and returns its results.
    ///
    /// # Errors
    /// [`Error::Step`](crate::Error::Step) if no step was started, and
    /// [`Error::Driver`](crate::Error::Driver) if the device fails.
    pub fn wait(&mut self) -> Result<Outputs<'_>> {
        if !self.started {
            fail!(Step, "no step was started");
        }
        self.started = false;
        self.device.0.stream.wait()?;
        let bytes = self.outputs.bytes();
        // SAFETY: the block has 64 ids or more, and is aligned to a page.
        let chosen = unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast(), self.chosen) };
        let logits = &bytes[LOGITS_AT..][..self.logits];
        Ok(Outputs { logits, tapped: &bytes[self.tapped.clone()], chosen })
    }
}

impl CapturedStep {
    /// Copies the beginning of a buffer to `to`, for tests. The buffer contains what the last kernel that
    /// wrote to it has left.
    ///
    /// # Errors
    /// [`Error::Step`](crate::Error::Step) while a step runs or for more bytes than the buffer has, and
    /// [`Error::Driver`](crate::Error::Driver) if the device fails.
    pub fn read(&self, buffer: Buffer, to: &mut [u8]) -> Result<()> {
        if self.started {
            fail!(Step, "a step of this plan is running; wait for it first");
        }
        let Some(&(place, bytes)) = self.work.places.get(buffer.0) else {
            fail!(Step, "buffer {} of {}", buffer.0, self.work.places.len());
        };
        if to.len() > bytes {
            fail!(Step, "{} bytes of buffer {}, which has {bytes}", to.len(), buffer.0);
        }
        let _current = self.device.0.context.enter()?;
        // SAFETY: the buffer has that many bytes.
        let copied = unsafe { sys::cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), place, to.len()) };
        check("cuMemcpyDtoH", copied)
    }
}

impl Drop for CapturedStep {
    fn drop(&mut self) {
        if self.started {
            // The result does not matter: after a device error, no work runs.
            let _ = self.device.0.stream.wait();
        }
        if let Ok(_current) = self.device.0.context.enter() {
            // SAFETY: the graph is destroyed once, and no step runs.
            unsafe { sys::cuGraphExecDestroy(self.exec) };
        }
    }
}

/// The nodes of a graph.
struct Graph(sys::CUgraph);

impl Graph {
    /// Captures the work that `work` enqueues on the stream.
    fn capture(stream: &Stream, work: impl FnOnce() -> Result<()>) -> Result<Self> {
        let _current = stream.context.enter()?;
        // In this mode, the capture does not affect other threads and libraries.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is live, and nothing else uses it.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(stream.raw, mode) })?;
        let done = work();
        let mut graph = Self(null_mut());
        // SAFETY: the call writes a handle, or null.
        let ended = unsafe { sys::cuStreamEndCapture(stream.raw, &mut graph.0) };
        done?;
        check("cuStreamEndCapture", ended)?;
        Ok(graph)
    }

    /// Instantiates the graph, and uploads it to the device.
    fn instantiate(&self, stream: &Stream) -> Result<sys::CUgraphExec> {
        let _current = stream.context.enter()?;
        let mut exec = null_mut();
        // SAFETY: the graph and the stream are live; the first call writes the handle.
        unsafe {
            check("cuGraphInstantiate", sys::cuGraphInstantiateWithFlags(&mut exec, self.0, 0))?;
            if let Err(error) = check("cuGraphUpload", sys::cuGraphUpload(exec, stream.raw)) {
                sys::cuGraphExecDestroy(exec);
                return Err(error);
            }
        }
        Ok(exec)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: the graph is destroyed once.
            unsafe { sys::cuGraphDestroy(self.0) };
        }
    }
}
