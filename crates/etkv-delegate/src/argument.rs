//! The arguments that a program and its host exchange.

use std::marker::PhantomData;

use etkv_core::Result;

/// An input or an output of a program: a contiguous tensor, or an integer.
///
/// It has the layout of `etkv::interpreter::Argument` in `cpp/interpreter.hpp`, so it crosses the bridge
/// unchanged.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Argument<'a> {
    data: *const u8,
    n_bytes: usize,
    shape: *const i32,
    rank: usize,
    integer: i64,
    scalar_type: i8,
    is_tensor: bool,
    /// The lifetime of the memory that the pointers borrow.
    borrowed: PhantomData<(&'a [u8], &'a [i32])>,
}

// The layout in cpp/interpreter.hpp, which checks the same numbers.
#[cfg(target_pointer_width = "64")]
const _: () = {
    use std::mem::{offset_of, size_of};
    assert!(size_of::<Argument>() == 48);
    assert!(offset_of!(Argument, shape) == 16);
    assert!(offset_of!(Argument, integer) == 32);
    assert!(offset_of!(Argument, scalar_type) == 40);
    assert!(offset_of!(Argument, is_tensor) == 41);
};

impl<'a> Argument<'a> {
    /// Returns a tensor argument: ExecuTorch's number of the dtype, the shape, and the elements in row-major order.
    pub fn tensor(scalar_type: i8, shape: &'a [i32], bytes: &'a [u8]) -> Self {
        Self {
            data: bytes.as_ptr(),
            n_bytes: bytes.len(),
            shape: shape.as_ptr(),
            rank: shape.len(),
            integer: 0,
            scalar_type,
            is_tensor: true,
            borrowed: PhantomData,
        }
    }

    /// Returns an integer argument.
    pub fn of(integer: i64) -> Self {
        Self { integer, is_tensor: false, ..Self::tensor(0, &[], &[]) }
    }

    /// Returns whether the argument is a tensor.
    pub fn is_tensor(&self) -> bool {
        self.is_tensor
    }

    /// Returns the integer, or `None` for a tensor.
    pub fn integer(&self) -> Option<i64> {
        (!self.is_tensor).then_some(self.integer)
    }

    /// Returns ExecuTorch's number of the tensor's dtype.
    pub fn scalar_type(&self) -> i8 {
        self.scalar_type
    }

    /// Returns the tensor's shape.
    pub fn shape(&self) -> &'a [i32] {
        // SAFETY: the fields come from a slice, or from the bridge, which guarantees the same.
        unsafe { slice(self.shape, self.rank) }
    }

    /// Returns the tensor's elements in row-major order.
    pub fn bytes(&self) -> &'a [u8] {
        // SAFETY: as above.
        unsafe { slice(self.data, self.n_bytes) }
    }
}

/// # Safety
/// `data` is NULL or points to `n` elements that stay alive and unchanged during `'a`.
unsafe fn slice<'a, T>(data: *const T, n: usize) -> &'a [T] {
    if data.is_null() || n == 0 {
        return &[];
    }
    // SAFETY: the caller upholds the contract above.
    unsafe { std::slice::from_raw_parts(data, n) }
}

/// The host that runs a program. It owns the outputs.
pub trait Host {
    /// Sets the shape of the output at `index`, and returns its memory: `n_bytes` bytes, aligned for its elements.
    /// The run writes the elements in row-major order. It may fail after it has written some of them.
    ///
    /// # Errors
    /// [`Shape`](etkv_core::Status::Shape) if the output cannot have this shape. The step is then rolled back.
    fn place(&mut self, index: usize, shape: &[i32], n_bytes: usize) -> Result<&mut [u8]>;

    /// Sets the output at `index`, an integer.
    ///
    /// # Errors
    /// [`Shape`](etkv_core::Status::Shape) if the output is not an integer. The step is then rolled back.
    fn set_integer(&mut self, index: usize, value: i64) -> Result<()>;
}
