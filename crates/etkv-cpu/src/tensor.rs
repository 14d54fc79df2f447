//! Tensors that programs pass.

use std::ffi::c_void;

use etkv_core::error::fail;
use etkv_core::Result;
use half::{bf16, f16};

use crate::floats::{load_bf16, load_f16, load_f32, store_bf16, store_f16, store_f32};

/// The element type of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
}

impl Dtype {
    /// Returns the bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Converts the bytes of a row to float32.
    pub(crate) fn load(self, bytes: &[u8], out: &mut [f32]) {
        match self {
            Self::F32 => load_f32(bytes, out),
            Self::F16 => load_f16(bytes, out),
            Self::Bf16 => load_bf16(bytes, out),
        }
    }

    /// Converts a row in float32 to bytes.
    pub(crate) fn store(self, row: &[f32], out: &mut [u8]) {
        match self {
            Self::F32 => store_f32(row, out),
            Self::F16 => store_f16(row, out),
            Self::Bf16 => store_bf16(row, out),
        }
    }
}

/// Owned elements of a tensor.
#[derive(Debug, Clone)]
pub enum Values {
    /// IEEE binary32.
    F32(Vec<f32>),
    /// IEEE binary16.
    F16(Vec<f16>),
    /// bfloat16.
    Bf16(Vec<bf16>),
}

impl Values {
    /// Returns `n` zeros.
    pub(crate) fn zeros(dtype: Dtype, n: usize) -> Self {
        match dtype {
            Dtype::F32 => vec![0f32; n].into(),
            Dtype::F16 => vec![f16::ZERO; n].into(),
            Dtype::Bf16 => vec![bf16::ZERO; n].into(),
        }
    }

    /// Returns the first element, the dtype and the number of elements.
    fn parts(&self) -> (*const u8, Dtype, usize) {
        match self {
            Self::F32(values) => (values.as_ptr().cast(), Dtype::F32, values.len()),
            Self::F16(values) => (values.as_ptr().cast(), Dtype::F16, values.len()),
            Self::Bf16(values) => (values.as_ptr().cast(), Dtype::Bf16, values.len()),
        }
    }

    /// Returns the first element and the dtype.
    pub(crate) fn as_mut_ptr(&mut self) -> (*mut u8, Dtype) {
        match self {
            Self::F32(values) => (values.as_mut_ptr().cast(), Dtype::F32),
            Self::F16(values) => (values.as_mut_ptr().cast(), Dtype::F16),
            Self::Bf16(values) => (values.as_mut_ptr().cast(), Dtype::Bf16),
        }
    }
}

macro_rules! from_vectors {
    ($($float:ident: $variant:ident),+) => {$(
        impl From<Vec<$float>> for Values {
            fn from(values: Vec<$float>) -> Self {
                Self::$variant(values)
            }
        }
    )+};
}

from_vectors!(f32: F32, f16: F16, bf16: Bf16);

#[derive(Debug, Clone)]
enum Data {
    Owned(Values),
    Borrowed { start: *const u8, dtype: Dtype },
}

/// A tensor `[1, heads, T, dim]` in float32, float16 or bfloat16, in owned memory or in a program's memory.
/// It may have any strides.
#[derive(Debug, Clone)]
pub struct Tensor {
    data: Data,
    shape: [i32; 4],
    /// The stride of each axis, in elements.
    strides: [isize; 4],
}

impl Tensor {
    /// Returns a tensor of these elements, in row-major order.
    ///
    /// # Errors
    /// [`Shape`](etkv_core::Status::Shape) if the number of elements is not that of the shape.
    pub fn new(shape: [i32; 4], values: impl Into<Values>) -> Result<Self> {
        let values = values.into();
        let (n, (.., found)) = (count(shape)?, values.parts());
        if n != found {
            fail!(Shape, "expected {n} elements for shape {shape:?}, got {found}");
        }
        Ok(Self { data: Data::Owned(values), shape, strides: row_major(shape) })
    }

    /// Returns a tensor over borrowed memory. `start` points to the element at index 0, and `strides` are in
    /// elements.
    ///
    /// # Errors
    /// [`Shape`](etkv_core::Status::Shape) for a negative size.
    ///
    /// # Safety
    /// Until the tensor is dropped, all elements must be in one allocation, be initialized, be aligned to
    /// their dtype, and not be written. If the tensor has no elements, `start` may be any pointer.
    pub unsafe fn borrowed(
        start: *const c_void,
        dtype: Dtype,
        shape: [i32; 4],
        strides: [isize; 4],
    ) -> Result<Self> {
        count(shape)?;
        Ok(Self { data: Data::Borrowed { start: start.cast(), dtype }, shape, strides })
    }

    /// Returns the dtype of the elements.
    pub fn dtype(&self) -> Dtype {
        match &self.data {
            Data::Owned(values) => values.parts().1,
            Data::Borrowed { dtype, .. } => *dtype,
        }
    }

    /// Returns the shape.
    pub fn shape(&self) -> &[i32; 4] {
        &self.shape
    }

    /// Returns the elements in float32, in row-major order.
    pub fn to_f32(&self) -> Vec<f32> {
        let [batch, heads, n, dim] = self.shape.map(|size| size as usize);
        let mut values = vec![0.0; batch * heads * n * dim];
        for (at, out) in values.chunks_exact_mut(dim.max(1)).enumerate() {
            let index = [at / (heads * n), at / n % heads, at % n];
            // SAFETY: the index is inside the shape.
            unsafe { self.load_row(index, out) };
        }
        values
    }

    /// Returns whether each row begins with the elements of the corresponding row of `other`. Compares in
    /// float32, and NaN equals NaN.
    pub(crate) fn begins_with(&self, other: &Self) -> bool {
        let [rows, first] =
            [self, other].map(|tensor| (tensor.to_f32(), tensor.shape[3].max(1) as usize));
        let pairs = rows.0.chunks_exact(rows.1).zip(first.0.chunks_exact(first.1));
        let same = |(a, b): (&f32, &f32)| a == b || (a.is_nan() && b.is_nan());
        pairs.into_iter().all(|(row, first)| row.iter().zip(first).all(same))
    }

    /// Passes each row of the first batch to `take`: its index in `T`, its head, and its elements in float32.
    /// `row` must have the length of a row.
    pub(crate) fn for_each_row(&self, row: &mut [f32], mut take: impl FnMut(usize, usize, &[f32])) {
        let [batch, heads, n, dim] = self.shape.map(|size| size as usize);
        let row = &mut row[..dim];
        for at in 0..if batch > 0 { n } else { 0 } {
            for head in 0..heads {
                // SAFETY: the index is inside the shape.
                unsafe { self.load_row([0, head, at], row) };
                take(at, head, row);
            }
        }
    }

    /// The same with the bytes of rows. Returns false, without calls, if the elements of rows are not
    /// contiguous.
    pub(crate) fn for_each_run(&self, mut take: impl FnMut(usize, usize, &[u8])) -> bool {
        let [batch, heads, n, _] = self.shape.map(|size| size as usize);
        if !self.has_runs() {
            return false;
        }
        for at in 0..if batch > 0 { n } else { 0 } {
            for head in 0..heads {
                // SAFETY: the index is inside the shape, and rows are contiguous.
                take(at, head, unsafe { self.run([0, head, at]) });
            }
        }
        true
    }

    /// Returns the stride of each axis, in elements.
    pub(crate) fn strides(&self) -> &[isize; 4] {
        &self.strides
    }

    /// Returns the address of the first element.
    pub(crate) fn start(&self) -> *const u8 {
        match &self.data {
            Data::Owned(values) => values.parts().0,
            Data::Borrowed { start, .. } => *start,
        }
    }

    /// Returns whether the elements of a row are contiguous.
    pub(crate) fn has_runs(&self) -> bool {
        self.strides[3] == 1 || self.shape[3] <= 1
    }

    /// Returns the first element of a row.
    ///
    /// # Safety
    /// The element must exist.
    unsafe fn element(&self, index: [usize; 3]) -> *const u8 {
        let along = index.iter().zip(&self.strides);
        let offset: isize = along.map(|(&at, stride)| at as isize * stride).sum();
        // SAFETY: the constructors ensure that the element is in the same allocation.
        unsafe { self.start().offset(offset * self.dtype().size() as isize) }
    }

    /// Returns the bytes of a row.
    ///
    /// # Safety
    /// The index must be inside the shape, and rows must be contiguous.
    unsafe fn run(&self, index: [usize; 3]) -> &[u8] {
        let size = self.shape[3] as usize * self.dtype().size();
        if size == 0 {
            return &[];
        }
        // SAFETY: the constructors ensure that the elements of the row are initialized, and not written while
        // they are borrowed.
        unsafe { std::slice::from_raw_parts(self.element(index), size) }
    }

    /// Converts a row to float32. `out` must have the length of the row.
    ///
    /// # Safety
    /// The index must be inside the shape.
    unsafe fn load_row(&self, index: [usize; 3], out: &mut [f32]) {
        let dtype = self.dtype();
        if self.has_runs() {
            // SAFETY: the caller upholds the contract.
            return dtype.load(unsafe { self.run(index) }, out);
        }
        let step = self.strides[3] * dtype.size() as isize;
        // SAFETY: the caller upholds the contract. The row has several elements, since it is not contiguous.
        let start = unsafe { self.element(index) };
        for (at, out) in (0..).zip(out) {
            // SAFETY: the element is part of the row, and has this size.
            let bytes =
                unsafe { std::slice::from_raw_parts(start.offset(at * step), dtype.size()) };
            dtype.load(bytes, std::slice::from_mut(out));
        }
    }
}

/// Returns the strides of contiguous elements.
pub(crate) fn row_major(shape: [i32; 4]) -> [isize; 4] {
    let mut strides = [1isize; 4];
    for axis in (0..3).rev() {
        strides[axis] = strides[axis + 1].saturating_mul(shape[axis + 1] as isize);
    }
    strides
}

/// Returns the number of elements of a shape.
fn count(shape: [i32; 4]) -> Result<usize> {
    let n = shape.iter().try_fold(1usize, |n, &size| n.checked_mul(usize::try_from(size).ok()?));
    match n.filter(|&n| isize::try_from(n.saturating_mul(4)).is_ok()) {
        Some(n) => Ok(n),
        None => fail!(Shape, "expected sizes of at least 0 that fit memory, got shape {shape:?}"),
    }
}

#[cfg(test)]
mod tests {
    use etkv_core::Status;

    use super::*;

    fn rows(tensor: &Tensor) -> Vec<(usize, usize, Vec<f32>)> {
        let mut rows = Vec::new();
        tensor.for_each_row(&mut [0.0; 8], |at, head, row| rows.push((at, head, row.to_vec())));
        rows
    }

    #[test]
    fn rows_of_every_dtype_and_stride_are_the_same() {
        let values: Vec<f32> = (0..24).map(|at| at as f32 - 7.0).collect();
        let halves: Vec<f16> = values.iter().map(|&value| f16::from_f32(value)).collect();
        let bfloats: Vec<bf16> = values.iter().map(|&value| bf16::from_f32(value)).collect();
        let shape = [1, 3, 2, 4];
        let tensors = [
            Tensor::new(shape, values.clone()).unwrap(),
            Tensor::new(shape, halves).unwrap(),
            Tensor::new(shape, bfloats).unwrap(),
        ];
        for tensor in &tensors {
            assert_eq!(tensor.to_f32(), values);
            assert_eq!(rows(tensor).len(), 6);
            for (at, head, row) in rows(tensor) {
                assert_eq!(row, values[(head * 2 + at) * 4..][..4]);
            }
        }
        // The memory is [1, 2, 4, 3], the view [1, 3, 2, 4].
        let transposed: Vec<f16> = (0..24)
            .map(|at| (at / 12, at / 3 % 4, at % 3))
            .map(|(n, dim, head)| f16::from_f32(values[(head * 2 + n) * 4 + dim]))
            .collect();
        let start = transposed.as_ptr().cast();
        // SAFETY: the vector outlives the tensor and has these elements.
        let view = unsafe { Tensor::borrowed(start, Dtype::F16, shape, [24, 1, 12, 3]) }.unwrap();
        assert_eq!(view.to_f32(), values);
        assert_eq!(rows(&view), rows(&tensors[0]));
        assert!(!view.for_each_run(|_, _, _| unreachable!()));
        // Contiguous rows in the order of tokens.
        let side: Vec<f32> = (0..24)
            .map(|at| (at / 12, at / 4 % 3, at % 4))
            .map(|(n, head, dim)| values[(head * 2 + n) * 4 + dim])
            .collect();
        let start = side.as_ptr().cast();
        // SAFETY: the same as above.
        let view = unsafe { Tensor::borrowed(start, Dtype::F32, shape, [24, 4, 12, 1]) }.unwrap();
        assert_eq!(view.to_f32(), values);
        let mut runs = 0;
        assert!(view.for_each_run(|_, _, bytes| {
            runs += 1;
            assert_eq!(bytes.len(), 16);
        }));
        assert_eq!(runs, 6);
    }

    #[test]
    fn shapes_are_checked() {
        let error = Tensor::new([1, 2, 3, 4], vec![0f32; 23]).unwrap_err();
        assert_eq!(error.status(), Status::Shape);
        assert!(error.message().contains("24") && error.message().contains("23"), "{error}");
        for shape in [[1, -1, 1, 1], [i32::MAX; 4]] {
            // SAFETY: the tensor is refused, so it is never read.
            let tensor = unsafe { Tensor::borrowed(std::ptr::null(), Dtype::F32, shape, [0; 4]) };
            assert_eq!(tensor.unwrap_err().status(), Status::Shape);
        }
        // SAFETY: there are no elements.
        let none = unsafe { Tensor::borrowed(std::ptr::null(), Dtype::F16, [1, 2, 0, 4], [0; 4]) };
        assert!(rows(&none.unwrap()).is_empty());
    }
}
