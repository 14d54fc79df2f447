//! The interface of a storage format's codec.

/// The bytes of one row in each plane, or 0 for a plane that the format lacks.
pub(crate) type Widths = [usize; 3];

/// The codec of a storage format. The format must support the length of the row. Planes of zeros decode to a
/// row of zeros.
pub(crate) trait RowCodec {
    /// Returns the bytes of a row of `head_dim` elements.
    fn widths(&self, head_dim: usize) -> Widths;

    /// Converts a row to planes of these widths.
    fn encode(&self, row: &[f32], planes: [&mut [u8]; 3]);

    /// Converts planes to a row.
    fn decode(&self, planes: [&[u8]; 3], row: &mut [f32]);

    /// Returns the smallest [`magnitude`](crate::floats::magnitude) that becomes infinite when it is stored.
    /// It is infinity for formats that cover the range of the program's dtype.
    fn infinite_from(&self) -> u32 {
        f32::INFINITY.to_bits()
    }
}
