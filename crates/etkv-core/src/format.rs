//! Storage formats of keys and values, independent of the dtype that the model computes in.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{fail, Error, Result};

/// A storage format. A row is the key or the value of one position in one KV head. Each row is encoded independently.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub enum KvFormat {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    #[default]
    F16,
    /// bfloat16.
    Bf16,
    /// Integers of `bits` bits with a float16 scale and offset for every `group` elements: MLX's affine quantization.
    Affine {
        /// The number of bits of a code: 2, 3, 4, 5, 6 or 8.
        bits: u8,
        /// The number of elements of a group: 32, 64 or 128. It must divide head_dim.
        group: u8,
    },
    /// OCP microscaling: E4M3 elements, with an E8M0 scale for every 32 elements.
    Mxfp8,
    /// OCP microscaling: E2M1 elements, with an E8M0 scale for every 32 elements.
    Mxfp4,
    /// NVIDIA's block float: E2M1 elements, with an E4M3 scale for every 16 elements.
    Nvfp4,
    /// Symmetric integers from -8 to 7 with one float16 scale for each row. The scale is the row's largest magnitude
    /// divided by 7.
    RowInt4,
    /// E2M1 elements (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) with one float16 scale for each row. The scale
    /// is the row's largest magnitude divided by 6.
    RowFp4,
}

/// Declares the formats without parameters, and their names. The compiler reports a format that is missing from the
/// list.
macro_rules! named_formats {
    ($($format:ident => $name:literal,)+) => {
        const NAMED: &[(KvFormat, &str)] = &[$((KvFormat::$format, $name)),+];

        impl KvFormat {
            /// Returns the name of a format without parameters.
            const fn name(self) -> Option<&'static str> {
                match self {
                    $(Self::$format => Some($name),)+
                    Self::Affine { .. } => None,
                }
            }
        }
    };
}

named_formats! {
    F32 => "f32",
    F16 => "f16",
    Bf16 => "bf16",
    Mxfp8 => "mxfp8",
    Mxfp4 => "mxfp4",
    Nvfp4 => "nvfp4",
    RowInt4 => "row-int4",
    RowFp4 => "row-fp4",
}

/// The element type of a plane. Elements are little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// A byte: packed codes, or an 8-bit scale.
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

/// A plane of rows: their elements, codes, scales or offsets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlaneFormat {
    /// `rows`, `codes`, `scales` or `offsets`.
    pub name: &'static str,
    /// The type of the elements.
    pub element: Element,
    /// The number of elements in one row.
    pub width: usize,
}

impl PlaneFormat {
    /// Returns the bytes of one row.
    pub const fn row_bytes(&self) -> usize {
        self.width.saturating_mul(self.element.bytes())
    }
}

/// The layout of the rows of a packed format: codes, scales, and optional offsets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packing {
    /// The number of bits of a code.
    pub bits: usize,
    /// The number of elements that share a scale; `None` if all elements of a row share one scale.
    pub group: Option<usize>,
    /// The type of a scale: float16, or a byte of E8M0 or E4M3.
    pub scale: Element,
    /// Whether each group has an offset, in float16.
    pub has_offsets: bool,
}

impl Packing {
    /// Returns the number of elements that share a scale, in rows of `head_dim` elements.
    pub const fn group_of(&self, head_dim: usize) -> usize {
        match self.group {
            Some(group) => group,
            None => head_dim,
        }
    }
}

impl KvFormat {
    /// Returns the element type of rows in a float dtype, or the layout of packed rows. All sizes follow from it.
    const fn layout(self) -> std::result::Result<Element, Packing> {
        let (bits, group, scale, has_offsets) = match self {
            Self::F32 => return Ok(Element::F32),
            Self::F16 => return Ok(Element::F16),
            Self::Bf16 => return Ok(Element::Bf16),
            Self::Affine { bits, group } => {
                (bits as usize, Some(group as usize), Element::F16, true)
            }
            Self::Mxfp8 => (8, Some(32), Element::U8, false),
            Self::Mxfp4 => (4, Some(32), Element::U8, false),
            Self::Nvfp4 => (4, Some(16), Element::U8, false),
            Self::RowInt4 | Self::RowFp4 => (4, None, Element::F16, false),
        };
        Err(Packing { bits, group, scale, has_offsets })
    }

    /// Returns the layout of packed rows, or `None` for rows in a float dtype.
    pub const fn packing(self) -> Option<Packing> {
        match self.layout() {
            Ok(_) => None,
            Err(packing) => Some(packing),
        }
    }

    /// Returns whether rows are stored in a float dtype, unpacked.
    pub const fn is_float(self) -> bool {
        self.packing().is_none()
    }

    /// Returns the number that must divide head_dim. It is the number of elements that share a scale. In
    /// formats with one scale for each row, it is the number of elements in a word of 32 bits.
    pub const fn granule(self) -> usize {
        match self.packing() {
            None => 1,
            Some(Packing { group: Some(group), .. }) => group,
            Some(Packing { bits, .. }) => 32 / bits,
        }
    }

    /// Returns the planes of a row of `head_dim` elements. Codes are packed starting with the lowest bits.
    pub fn planes(self, head_dim: usize) -> Vec<PlaneFormat> {
        let plane = |name, element, width| PlaneFormat { name, element, width };
        let packing = match self.layout() {
            Ok(element) => return vec![plane("rows", element, head_dim)],
            Err(packing) => packing,
        };
        let groups = head_dim / packing.group_of(head_dim).max(1);
        let mut planes = vec![
            plane("codes", Element::U8, head_dim / 8 * packing.bits),
            plane("scales", packing.scale, groups),
        ];
        if packing.has_offsets {
            planes.push(plane("offsets", Element::F16, groups));
        }
        planes
    }

    /// Returns the bytes of one row of `head_dim` elements, including its scales.
    pub fn row_bytes(self, head_dim: usize) -> usize {
        self.planes(head_dim).iter().map(PlaneFormat::row_bytes).sum()
    }

    /// Checks that the format exists and that rows of `head_dim` elements fit it.
    ///
    /// # Errors
    /// [`InvalidArgument`](crate::Status::InvalidArgument), with the value in the message.
    pub fn check(self, head_dim: i32) -> Result<()> {
        if let Self::Affine { bits, group } = self {
            if !matches!(bits, 2..=6 | 8) {
                fail!(
                    InvalidArgument,
                    "expected affine storage of 2, 3, 4, 5, 6 or 8 bits, got {bits}"
                );
            }
            if !matches!(group, 32 | 64 | 128) {
                fail!(
                    InvalidArgument,
                    "expected affine groups of 32, 64 or 128 elements, got {group}"
                );
            }
        }
        let granule = self.granule();
        if usize::try_from(head_dim).map_or(true, |dim| dim % granule != 0) {
            fail!(
                InvalidArgument,
                "{self} needs a head_dim that is a multiple of {granule}, got head_dim {head_dim}"
            );
        }
        Ok(())
    }
}

impl fmt::Display for KvFormat {
    fn fmt(&self, out: &mut fmt::Formatter) -> fmt::Result {
        match (self, self.name()) {
            (Self::Affine { bits, group }, _) => write!(out, "affine{bits}g{group}"),
            (_, name) => out.write_str(name.unwrap_or_default()),
        }
    }
}

impl From<KvFormat> for String {
    fn from(format: KvFormat) -> Self {
        format.to_string()
    }
}

impl TryFrom<String> for KvFormat {
    type Error = Error;

    fn try_from(name: String) -> Result<Self> {
        name.parse()
    }
}

impl FromStr for KvFormat {
    type Err = Error;

    /// Parses the output of `Display`. `affine8` means `affine8g32`, and so on. Groups of 32 have half the error of
    /// groups of 64. Each group costs 4 bytes.
    fn from_str(name: &str) -> Result<Self> {
        let affine = || {
            let sizes = name.strip_prefix("affine")?;
            let (bits, group) = sizes.split_once('g').unwrap_or((sizes, "32"));
            // Each format has a single name, so numbers must have neither a sign nor leading zeros.
            let number = |text: &str| text.parse().ok().filter(|n: &u8| n.to_string() == text);
            Some(Self::Affine { bits: number(bits)?, group: number(group)? })
        };
        let named = NAMED.iter().find(|(_, known)| *known == name).map(|(format, _)| *format);
        // A head_dim of 128 is a multiple of every group, so this checks only the bits and the group.
        match named.or_else(affine).filter(|format| format.check(128).is_ok()) {
            Some(format) => Ok(format),
            None => {
                let names: Vec<&str> = NAMED.iter().map(|(_, name)| *name).collect();
                let names = names.join(", ");
                let affine = "affine<2|3|4|5|6|8>[g<32|64|128>]";
                fail!(
                    InvalidArgument,
                    "unknown storage format `{name}`; available: {names}, {affine}"
                )
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for name in NAMED.iter().map(|(_, name)| *name).chain(["affine3g32"]) {
            assert_eq!(name.parse::<KvFormat>().unwrap().to_string(), name);
        }
        let affine8 = KvFormat::Affine { bits: 8, group: 32 };
        assert_eq!("affine8".parse::<KvFormat>().unwrap(), affine8);
        let unknown = ["", "affine", "affine7", "affine4g16", "f64", "affine4g", "affine+8"];
        for name in unknown.into_iter().chain(["affine08", "affine4g+32", "affine4g032", "f32 "]) {
            let message = name.parse::<KvFormat>().unwrap_err().to_string();
            assert!(message.contains(&format!("`{name}`")), "{message}");
        }
    }

    #[test]
    fn head_dims_are_whole_groups() {
        let affine = KvFormat::Affine { bits: 4, group: 64 };
        assert!(affine.check(128).is_ok());
        assert_eq!(
            affine.check(96).unwrap_err().message(),
            "affine4g64 needs a head_dim that is a multiple of 64, got head_dim 96"
        );
        assert!(KvFormat::RowInt4.check(80).is_ok());
        assert!(KvFormat::Affine { bits: 7, group: 64 }.check(64).is_err());
    }

    #[test]
    fn rows_have_the_bytes_of_their_codes_and_scales() {
        assert_eq!(KvFormat::Affine { bits: 4, group: 64 }.row_bytes(128), 64 + 8);
        assert_eq!(KvFormat::Affine { bits: 3, group: 32 }.row_bytes(64), 24 + 8);
        assert_eq!(KvFormat::Mxfp8.row_bytes(64), 66);
        assert_eq!(KvFormat::Nvfp4.row_bytes(64), 36);
        assert_eq!(KvFormat::RowInt4.row_bytes(64), 34);
    }
}
