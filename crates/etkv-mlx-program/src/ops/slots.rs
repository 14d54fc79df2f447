//! The payload's slots, and the value of each slot while a program is decoded.

use std::collections::BTreeMap;

use crate::error::{fail, Result};
use crate::fb;
use crate::ir::{Int, IntValue, Out, Value};

/// The maximum slots of a program: more than any program has, and few enough to allocate.
const MAX_SLOTS: u32 = 1_000_000;

/// The number of tensor slots of each kind. Slots are numbered in this order, temporaries last.
pub struct Counts {
    pub constants: u32,
    pub inputs: u32,
    /// The slot of the first buffer that the program keeps between calls, and the number of buffers.
    pub buffers: (u32, u32),
    all: u32,
    ints: u32,
}

impl Counts {
    /// Reads the numbers of slots from a payload.
    pub fn read(graph: fb::MLXGraph) -> Result<Self> {
        let kinds = [
            graph.num_constant_tensors(),
            graph.num_input_tensors(),
            graph.num_output_tensors(),
            graph.num_mutable_buffer_tensors(),
            graph.num_temp_tensors(),
        ];
        let all: u64 = kinds.iter().map(|&n| u64::from(n)).sum();
        if all > u64::from(MAX_SLOTS) || graph.num_values() > MAX_SLOTS {
            fail!(
                Program,
                "the program has {all} tensors and {} values, the maximum is {MAX_SLOTS}",
                graph.num_values()
            );
        }
        Ok(Self {
            constants: kinds[0],
            inputs: kinds[1],
            buffers: (kinds[0] + kinds[1] + kinds[2], kinds[3]),
            all: all as u32,
            ints: graph.num_values(),
        })
    }
}

/// The value of each slot at one point of a program.
#[derive(Debug, Clone, Default)]
pub struct SlotValues {
    pub tensors: BTreeMap<u32, Value>,
    pub ints: BTreeMap<u32, IntValue>,
}

/// Tracks the value of each slot.
pub struct Slots {
    counts: Counts,
    held: SlotValues,
    n_values: u32,
    n_ints: u32,
}

impl Slots {
    /// Returns slots without values.
    pub fn new(counts: Counts) -> Self {
        Self { counts, held: SlotValues::default(), n_values: 0, n_ints: 0 }
    }

    /// Returns the number of slots.
    pub fn counts(&self) -> &Counts {
        &self.counts
    }

    /// Returns the number of tensor values so far.
    pub fn n_values(&self) -> u32 {
        self.n_values
    }

    /// Returns the number of integer values so far.
    pub fn n_ints(&self) -> u32 {
        self.n_ints
    }

    /// Returns the value in a slot.
    pub fn read(&self, tid: &fb::Tid) -> Result<Value> {
        match self.held.tensors.get(&tid.idx()) {
            Some(&value) => Ok(value),
            None => fail!(Program, "tensor {} is read before it is written", tid.idx()),
        }
    }

    /// Returns the value in a slot, if one is named.
    pub fn read_optional(&self, tid: Option<&fb::Tid>) -> Result<Option<Value>> {
        tid.map(|tid| self.read(tid)).transpose()
    }

    /// Returns an integer argument.
    pub fn int(&self, argument: fb::IntOrVid) -> Result<Int> {
        if !argument.is_vid() {
            return Ok(Int::Literal(argument.literal()));
        }
        let Some(vid) = argument.vid() else {
            fail!(Program, "expected an integer argument, got none");
        };
        Ok(Int::Value(self.read_int(vid)?))
    }

    /// Returns the value in an integer slot.
    pub fn read_int(&self, vid: &fb::Vid) -> Result<IntValue> {
        match self.held.ints.get(&vid.idx()) {
            Some(&value) => Ok(value),
            None => fail!(Program, "value {} is read before it is written", vid.idx()),
        }
    }

    /// Assigns a new value to a slot.
    pub fn write(&mut self, tid: &fb::Tid) -> Result<Out> {
        let value = self.new_values(1);
        self.set(tid, value)?;
        Ok(Out::Tensor(value))
    }

    /// Assigns a new value to an integer slot.
    pub fn write_int(&mut self, vid: &fb::Vid) -> Result<Out> {
        let (slot, n) = (vid.idx(), self.counts.ints);
        if slot >= n {
            fail!(Program, "cannot write value {slot}: the program has {n}");
        }
        Ok(Out::Int(self.bind_int(slot)))
    }

    /// Assigns a new value to the integer slot of an input.
    pub fn input_int(&mut self, slot: u32) -> Result<IntValue> {
        if slot >= self.counts.ints {
            fail!(Program, "value {slot} is an input, and the program has {}", self.counts.ints);
        }
        Ok(self.bind_int(slot))
    }

    /// Copies the value of one slot to another.
    pub fn copy(&mut self, from: &fb::Tid, to: &fb::Tid) -> Result<()> {
        let value = self.read(from)?;
        self.set(to, value)
    }

    fn set(&mut self, tid: &fb::Tid, value: Value) -> Result<()> {
        let (slot, n) = (tid.idx(), self.counts.all);
        if slot >= n {
            fail!(Program, "cannot write tensor {slot}: the program has {n}");
        }
        self.held.tensors.insert(slot, value);
        Ok(())
    }

    /// Assigns a new value to the slot of a constant or an input.
    pub fn bind(&mut self, slot: u32) -> Value {
        let value = self.new_values(1);
        self.held.tensors.insert(slot, value);
        value
    }

    fn bind_int(&mut self, slot: u32) -> IntValue {
        let value = self.new_int();
        self.held.ints.insert(slot, value);
        value
    }

    /// Ends the init chain. Returns the constants that it has overwritten, as pairs of the constant and its new
    /// value. Restores all slots to `before`.
    pub fn end_init(&mut self, before: SlotValues) -> Vec<(Value, Value)> {
        let mut written = Vec::new();
        for slot in 0..self.counts.constants {
            let constant = Value(slot);
            match self.held.tensors.insert(slot, constant) {
                Some(value) if value != constant => written.push((constant, value)),
                _ => {}
            }
        }
        self.held = before;
        written
    }

    /// Returns the current values of the slots.
    pub fn held(&self) -> &SlotValues {
        &self.held
    }

    /// Replaces the values of the slots, and returns the old values.
    pub fn exchange(&mut self, held: SlotValues) -> SlotValues {
        std::mem::replace(&mut self.held, held)
    }

    /// Returns the first of `n` new consecutive values, which are in no slot.
    pub fn new_values(&mut self, n: u32) -> Value {
        self.n_values += n;
        Value(self.n_values - n)
    }

    /// Returns a new integer value, which is in no slot.
    pub fn new_int(&mut self) -> IntValue {
        self.n_ints += 1;
        IntValue(self.n_ints - 1)
    }
}
