//! What a storage format does with a row.

/// The bytes of one row in each plane, 0 for a plane that a format lacks.
pub(crate) type Widths = [usize; 3];

/// A storage format. The length of a row fits it. Planes of zeros decode to a row of zeros.
pub(crate) trait RowCodec {
    /// Returns the bytes of a row of `head_dim` elements.
    fn widths(&self, head_dim: usize) -> Widths;

    /// Converts a row to planes of these widths.
    fn encode(&self, row: &[f32], planes: [&mut [u8]; 3]);

    /// Converts planes to a row.
    fn decode(&self, planes: [&[u8]; 3], row: &mut [f32]);

    /// Returns the smallest [`magnitude`](crate::floats::magnitude) that becomes infinite when stored;
    /// infinity in formats whose range covers the program's dtype.
    fn infinite_from(&self) -> u32 {
        f32::INFINITY.to_bits()
    }
}
