//! Calls of mixtures of experts. They do not use the cache, so they are not part of a forward.

use std::sync::{Arc, Mutex, Weak};

use etkv_core::{fail, Result};
use etkv_delegate::{Argument, Host};

use super::argument::{floats, integers, packed, pick};
use super::forward::output;
use super::payload::{self, RoutedExperts};
use crate::experts::{route_into, Activation, Experts, Inputs, Workspace};
use crate::linear::Workspaces;
use crate::parallel::Parallel;

/// A loaded call.
pub struct ExpertsCall {
    experts: Experts,
    inputs: [Option<usize>; 7],
    workspaces: Arc<Workspaces<Workspace>>,
}

impl ExpertsCall {
    /// Returns the call of a checked payload.
    pub fn new(call: &RoutedExperts) -> Self {
        static SHARED: Mutex<Weak<Workspaces<Workspace>>> = Mutex::new(Weak::new());
        let workspaces = Workspaces::shared(&SHARED);
        Self { experts: call.experts(), inputs: call.inputs, workspaces }
    }

    /// Returns the number of inputs.
    pub fn n_inputs(&self) -> usize {
        payload::n_inputs(&self.inputs)
    }

    /// Runs the call.
    ///
    /// # Errors
    /// [`Shape`](etkv_core::Status::Shape) and [`Dtype`](etkv_core::Status::Dtype) for arguments that do not
    /// match the call; [`InvalidArgument`](etkv_core::Status::InvalidArgument) for an index without an
    /// expert; the errors of the host.
    pub fn run(
        &self,
        inputs: &[Argument],
        output_type: i8,
        host: &mut dyn Host,
        parallel: &dyn Parallel,
    ) -> Result<()> {
        let [Some(x), Some(chosen), Some(factors), Some(first), Some(second), first_bias, second_bias] =
            pick(inputs, &self.inputs)
        else {
            fail!(Internal, "a call of experts lacks inputs");
        };
        let experts = &self.experts;
        let &[n_tokens, hidden] = x.shape() else {
            fail!(Shape, "hidden states: expected [T, hidden], got shape {:?}", x.shape());
        };
        let &[_, k] = chosen.shape() else {
            fail!(Shape, "experts: expected [T, k], got shape {:?}", chosen.shape());
        };
        if hidden as usize != experts.hidden {
            fail!(Shape, "hidden states: expected rows of {}, got {hidden}", experts.hidden);
        }
        let chosen_experts = integers(chosen, "experts")?;
        let given = Inputs {
            x: floats(x, "hidden states")?,
            k: k as usize,
            experts: chosen_experts,
            routing_weights: floats(factors, "factors")?,
            first: packed(first, experts.weights[0])?,
            second: packed(second, experts.weights[1])?,
            first_bias: first_bias.map(|bias| floats(bias, "biases")).transpose()?,
            second_bias: second_bias.map(|bias| floats(bias, "biases")).transpose()?,
        };
        let mut read = vec![(x, "hidden states"), (chosen, "experts"), (factors, "factors")];
        read.extend([(first, "weights"), (second, "weights")]);
        read.extend([first_bias, second_bias].into_iter().flatten().map(|bias| (bias, "biases")));
        let out = output(host, &[n_tokens, hidden], output_type, &read)?;
        // SAFETY: only this call borrows the host's memory, and no input of the call overlaps it.
        let out = unsafe { out.floats()? };
        self.workspaces.with(|workspace| route_into(experts, &given, out, workspace, parallel))
    }
}

impl RoutedExperts {
    /// Returns the experts of the call.
    pub fn experts(&self) -> Experts {
        Experts {
            n_experts: self.n_experts,
            hidden: self.hidden,
            intermediate: self.intermediate,
            weights: std::array::from_fn(|at| self.weights.0[at].format(self.group_size.0[at])),
            activation: Activation {
                function: self.activation,
                gated: self.gated,
                alpha: self.alpha,
                limit: self.limit.unwrap_or(f32::INFINITY),
                offset: self.offset,
            },
        }
    }
}
