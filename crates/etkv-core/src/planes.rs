//! The planes of a row: how formats lie in files, in any backend's store alike.

use crate::format::KvFormat;

/// The element type of a plane. Elements lie with their lowest byte first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// A byte: packed codes, or a scale of 8 bits.
    U8,
    /// IEEE binary16.
    F16,
    /// bfloat16.
    Bf16,
    /// IEEE binary32.
    F32,
}

impl Element {
    /// Returns the bytes of an element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::U8 => 1,
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
        }
    }
}

/// A plane of a row: the elements, or the codes, scales or offsets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlaneFormat {
    /// `rows`, `codes`, `scales` or `offsets`.
    pub name: &'static str,
    /// The type of its elements.
    pub element: Element,
    /// The elements of one row.
    pub width: usize,
}

impl PlaneFormat {
    /// Returns the bytes of one row.
    pub const fn row_bytes(&self) -> usize {
        self.width.saturating_mul(self.element.bytes())
    }
}

impl KvFormat {
    /// Returns the planes of a row of `head_dim` elements. Codes are packed, the first lowest.
    pub fn planes(self, head_dim: usize) -> Vec<PlaneFormat> {
        let plane = |name, element, width| PlaneFormat { name, element, width };
        let rows = |element| vec![plane("rows", element, head_dim)];
        let codes = |bits: usize| plane("codes", Element::U8, head_dim / 8 * bits);
        let scales = |element, group: usize| plane("scales", element, head_dim / group);
        match self {
            Self::F32 => rows(Element::F32),
            Self::F16 => rows(Element::F16),
            Self::Bf16 => rows(Element::Bf16),
            Self::Affine { bits, group } => {
                let groups = usize::from(group).max(1);
                vec![
                    codes(bits.into()),
                    scales(Element::F16, groups),
                    PlaneFormat { name: "offsets", ..scales(Element::F16, groups) },
                ]
            }
            Self::Mxfp8 => vec![codes(8), scales(Element::U8, 32)],
            Self::Mxfp4 => vec![codes(4), scales(Element::U8, 32)],
            Self::Nvfp4 => vec![codes(4), scales(Element::U8, 16)],
            Self::RowInt4 | Self::RowFp4 => {
                vec![codes(4), plane("scales", Element::F16, 1)]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_have_the_bytes_of_rows() {
        for name in [
            "f32",
            "f16",
            "bf16",
            "affine2g32",
            "affine3g64",
            "affine5g128",
            "affine8",
            "mxfp8",
            "mxfp4",
            "nvfp4",
            "row-int4",
            "row-fp4",
        ] {
            let format: KvFormat = name.parse().unwrap();
            let bytes: usize = format.planes(128).iter().map(PlaneFormat::row_bytes).sum();
            assert_eq!(bytes, format.row_bytes(128), "{name}");
        }
    }
}
