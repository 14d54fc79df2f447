//! Queries and outputs: tensors of the program, by pointer and strides.

use std::marker::PhantomData;

use half::{bf16, f16};

use crate::tensor::Dtype;

/// The shape `[n_heads, n_tokens, head_dim]` of queries or outputs, and the strides of their rows, in
/// elements. The elements of a row are contiguous.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// The number of query heads.
    pub n_heads: usize,
    /// The number of tokens of the step.
    pub n_tokens: usize,
    /// The number of elements of a row.
    pub head_dim: usize,
    /// The elements from a head to the next one.
    pub head_stride: usize,
    /// The elements from a token to the next one.
    pub token_stride: usize,
}

impl Shape {
    /// Returns the shape of a contiguous tensor.
    pub const fn contiguous(n_heads: usize, n_tokens: usize, head_dim: usize) -> Self {
        let head_stride = n_tokens * head_dim;
        Self { n_heads, n_tokens, head_dim, head_stride, token_stride: head_dim }
    }

    /// Returns the number of elements from the first to the last of a tensor of this shape, including gaps.
    const fn span(&self) -> usize {
        if self.n_heads == 0 || self.n_tokens == 0 || self.head_dim == 0 {
            return 0;
        }
        (self.n_heads - 1) * self.head_stride
            + (self.n_tokens - 1) * self.token_stride
            + self.head_dim
    }

    fn offset(&self, head: usize, token: usize) -> usize {
        head * self.head_stride + token * self.token_stride
    }
}

/// The queries of a step, without the scale.
#[derive(Debug, Clone, Copy)]
pub struct Queries<'a> {
    start: *const u8,
    dtype: Dtype,
    shape: Shape,
    lifetime: PhantomData<&'a [u8]>,
}

// SAFETY: this is a shared borrow of numbers.
unsafe impl Sync for Queries<'_> {}
// SAFETY: the same as above.
unsafe impl Send for Queries<'_> {}

impl<'a> Queries<'a> {
    /// Returns the queries at `start`.
    ///
    /// # Safety
    /// The elements of `shape` must exist at its strides, be of type `dtype`, be aligned to their size, and
    /// not change during `'a`.
    pub unsafe fn new(start: *const u8, dtype: Dtype, shape: Shape) -> Self {
        Self { start, dtype, shape, lifetime: PhantomData }
    }

    /// Returns contiguous float32 queries, or `None` if the shape needs more than `numbers`.
    pub fn of_f32(numbers: &'a [f32], shape: Shape) -> Option<Self> {
        // SAFETY: the elements are inside the slice.
        (numbers.len() >= shape.span())
            .then(|| unsafe { Self::new(numbers.as_ptr().cast(), Dtype::F32, shape) })
    }

    /// Returns the shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Writes `factor` times a row to `out`, and fills the rest with zeros.
    pub(super) fn read(&self, head: usize, token: usize, factor: f32, out: &mut [f32]) {
        let (dim, offset) = (self.shape.head_dim, self.shape.offset(head, token));
        let (out, rest) = out.split_at_mut(dim);
        rest.fill(0.0);
        // SAFETY: the row is part of the tensor, which the caller of `new` ensures to be valid.
        unsafe {
            let start = self.start.add(offset * self.dtype.size());
            self.dtype.load(std::slice::from_raw_parts(start, dim * self.dtype.size()), out);
        }
        out.iter_mut().for_each(|x| *x *= factor);
    }
}

/// The destination of a step's result.
#[derive(Debug)]
pub struct Output<'a> {
    start: *mut u8,
    dtype: Dtype,
    shape: Shape,
    lifetime: PhantomData<&'a mut [u8]>,
}

// SAFETY: threads write different rows; see `write`.
unsafe impl Sync for Output<'_> {}
// SAFETY: this is an exclusive borrow of numbers.
unsafe impl Send for Output<'_> {}

impl<'a> Output<'a> {
    /// Returns the output at `start`.
    ///
    /// # Safety
    /// The elements of `shape` must exist at its strides, be of type `dtype`, and be aligned to their size.
    /// Rows must not overlap, and nothing else may access them during `'a`.
    pub unsafe fn new(start: *mut u8, dtype: Dtype, shape: Shape) -> Self {
        Self { start, dtype, shape, lifetime: PhantomData }
    }

    /// Returns a contiguous float32 output, or `None` if the shape needs more than `numbers`.
    pub fn of_f32(
        numbers: &'a mut [f32],
        n_heads: usize,
        n_tokens: usize,
        dim: usize,
    ) -> Option<Self> {
        let shape = Shape::contiguous(n_heads, n_tokens, dim);
        // SAFETY: the elements are inside the slice, which is borrowed exclusively.
        (numbers.len() >= shape.span())
            .then(|| unsafe { Self::new(numbers.as_mut_ptr().cast(), Dtype::F32, shape) })
    }

    /// Returns the shape.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Writes a row.
    ///
    /// # Safety
    /// No other thread may write the same row.
    pub(super) unsafe fn write(&self, head: usize, token: usize, row: &[f32]) {
        let dim = self.shape.head_dim;
        // SAFETY: the row is part of the tensor, which the caller of `new` ensures to be valid. Only this
        // thread writes it.
        unsafe {
            let start = self.start.add(self.shape.offset(head, token) * self.dtype.size());
            match self.dtype {
                Dtype::F32 => {
                    std::slice::from_raw_parts_mut(start.cast::<f32>(), dim)
                        .copy_from_slice(&row[..dim]);
                }
                Dtype::F16 => {
                    let out = std::slice::from_raw_parts_mut(start.cast::<f16>(), dim);
                    out.iter_mut().zip(row).for_each(|(out, &x)| *out = f16::from_f32(x));
                }
                Dtype::Bf16 => {
                    let out = std::slice::from_raw_parts_mut(start.cast::<bf16>(), dim);
                    out.iter_mut().zip(row).for_each(|(out, &x)| *out = bf16::from_f32(x));
                }
            }
        }
    }
}
