//! The recurrent layers of a step.

use std::sync::Arc;

use tracing::{trace, warn};

use super::{check_rows, Progress, Storage};
use crate::bookkeeping::{LayerGroupPlan, RecurrentPlan, Slots};
use crate::error::{fail, Result};
use crate::spec::RecurrentSpec;
use crate::store::{RecurrentWork, Store};
use crate::watch::TARGET;

impl<S: Store> Storage<S> {
    /// Passes the rows and anchors that a recurrent layer reads to `work`, and writes the rows and anchors that
    /// `work` returns. `buffers` are the plans of the rows and of the anchors. If the step already has the layer's
    /// rows, nothing is written.
    pub fn update_recurrent(
        &mut self,
        layer: usize,
        plan: &Arc<RecurrentPlan>,
        buffers: &[LayerGroupPlan],
        work: &mut RecurrentWork<S>,
    ) -> Result<()> {
        let _span = self.enter_step();
        self.read_and_write(layer, plan, buffers, work).inspect_err(|error| {
            let status = error.status();
            warn!(target: TARGET, layer, ?status, %error, "a recurrent layer fails");
        })
    }

    fn read_and_write(
        &mut self,
        layer: usize,
        plan: &Arc<RecurrentPlan>,
        buffers: &[LayerGroupPlan],
        work: &mut RecurrentWork<S>,
    ) -> Result<()> {
        let n_layers = self.layers.recurrent.len();
        let (Some(&rows), Some(config)) =
            (self.layers.recurrent.get(layer), self.config.recurrent_layers.get(layer))
        else {
            fail!(
                Shape,
                "expected a recurrent layer from 0 to {}, got {layer}",
                n_layers as i64 - 1
            )
        };
        let ([row_plan, anchor_plan], Some(&progress)) = (buffers, self.done.get(rows)) else {
            fail!(Step, "no step is open on this cache");
        };
        let anchors = config.anchor().map(|_| rows + 1);
        for (id, plan) in [(Some(rows), row_plan), (anchors, anchor_plan)] {
            if let Some(id) = id {
                self.grow(id, self.allocated(self.layers.groups[id], plan.needed()))?;
            }
        }
        let [first, second] = self.store.read(rows, 0..row_plan.needed())?;
        let second = self.layers.layers[rows].has_second().then_some(second);
        let states = match anchors {
            Some(id) if anchor_plan.needed() > 0 => {
                let [states, _] = self.store.read(id, 0..anchor_plan.needed())?;
                Some(states)
            }
            _ => None,
        };
        let plan = Arc::clone(plan);
        let spec = RecurrentSpec { rows: [Some(first), second], anchors: states, plan };
        let made = work(&spec)?;
        // If a view still existed, the writes would copy the buffer.
        drop(spec);
        if progress == Progress::Done {
            return Ok(());
        }
        self.done[rows] = Progress::Begun;
        let [k, v] = &made.rows;
        self.write_part(rows, &row_plan.write, [k.as_ref(), v.as_ref()], layer)?;
        self.done[rows] = Progress::Done;
        if let Some(id) = anchors {
            self.done[id] = Progress::Begun;
            if !anchor_plan.write.is_empty() {
                self.write_part(id, &anchor_plan.write, [made.anchors.as_ref(), None], layer)?;
            }
            self.done[id] = Progress::Done;
        }
        trace!(target: TARGET, layer, written = row_plan.write.len(), "a recurrent layer");
        Ok(())
    }

    /// Writes rows or anchors of recurrent layer `layer`, after a check of their shapes.
    fn write_part(
        &mut self,
        id: usize,
        slots: &Slots,
        tensors: [Option<&S::Tensor>; 2],
        layer: usize,
    ) -> Result<()> {
        let target = self.layers.layers[id];
        for (buffer, tensor) in
            tensors.iter().enumerate().take(if target.has_second() { 2 } else { 1 })
        {
            let Some(tensor) = tensor else {
                fail!(Internal, "recurrent layer {layer} did not return rows for buffer {buffer}");
            };
            let expected = [1, target.heads[buffer], slots.len() as i32, target.dims[buffer]];
            check_rows("rows", layer, S::shape(tensor), expected)?;
        }
        if let [Some(first), second] = tensors {
            self.store.write(id, slots, first, second, false)?;
        }
        Ok(())
    }
}
