//! The tensors that a program keeps between calls, such as a cache in its graph.

use mlx_rs::ops::zeros_dtype;
use mlx_rs::Array;
use parking_lot::Mutex;
use smallvec::SmallVec;

use crate::error::{fail, Error, Result};
use crate::ir::Buffer;
use crate::ops::frame::{Frame, Output};

/// The buffers of a loaded program. They are zero until a call writes them. Use them only under the lock of MLX.
pub struct Buffers {
    name: Option<String>,
    list: Vec<Buffer>,
    arrays: Mutex<Vec<Option<Array>>>,
    /// The error of a call that failed to compute the buffers.
    broken: Mutex<Option<Error>>,
}

impl Buffers {
    /// Returns buffers of zeros.
    pub fn new(name: Option<String>, list: Vec<Buffer>) -> Self {
        let arrays = Mutex::new(vec![None; list.len()]);
        Self { name, list, arrays, broken: Mutex::new(None) }
    }

    /// Returns whether there are buffers and they have this name.
    pub fn is_named(&self, name: &str) -> bool {
        !self.list.is_empty() && self.name.as_deref() == Some(name)
    }

    /// Returns the number of buffers.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Sets all buffers to zero.
    pub fn reset(&self) {
        self.arrays.lock().fill(None);
        *self.broken.lock() = None;
    }

    /// Makes further calls fail until a reset, because the last call failed to compute the buffers.
    pub fn give_up(&self, error: &Error) {
        if !self.list.is_empty() {
            *self.broken.lock() = Some(error.clone());
        }
    }

    /// Binds the values of the buffers. Returns a second reference to each buffer: a call that fails before its
    /// computation starts must leave the buffers unchanged.
    pub fn bind(&self, frame: &mut Frame) -> Result<SmallVec<[Array; 4]>> {
        if let Some(error) = &*self.broken.lock() {
            fail!(
                Step,
                "an earlier call did not compute the program's buffers ({error}); reset them"
            );
        }
        let mut found = SmallVec::new();
        let arrays = self.arrays.lock();
        for (buffer, array) in self.list.iter().zip(arrays.iter()) {
            let array = match array {
                Some(array) => array.clone(),
                None => zeros_dtype(&buffer.shape, buffer.dtype)?,
            };
            frame.set(buffer.value, array.clone());
            found.push(array);
        }
        Ok(found)
    }

    /// Stores the buffers that a call returns, and returns them. Their computation may still run.
    pub fn keep(&self, made: SmallVec<[Output; 4]>) -> Result<Vec<Array>> {
        let mut kept = Vec::with_capacity(made.len());
        for (buffer, output) in self.list.iter().zip(&made) {
            match output.tensor() {
                Some(array) if array.shape() == buffer.shape => kept.push(array.clone()),
                Some(array) => fail!(
                    Program,
                    "buffer `{}` has shape {:?}, but a call returns shape {:?}",
                    buffer.name,
                    buffer.shape,
                    array.shape()
                ),
                None => fail!(Internal, "a buffer is not a tensor"),
            }
        }
        *self.arrays.lock() = kept.iter().cloned().map(Some).collect();
        Ok(kept)
    }
}
