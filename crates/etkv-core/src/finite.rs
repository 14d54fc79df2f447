//! Checks whether the bytes of rows are finite.

use crate::format::{Element, KvFormat, PlaneFormat};

impl KvFormat {
    /// Returns whether the bytes of one plane of rows in this format are finite. No element, scale or offset may be
    /// infinite or NaN, and no scale may make the largest code infinite in f32.
    pub(crate) fn is_finite(self, plane: &PlaneFormat, bytes: &[u8]) -> bool {
        let halves = |bytes: &[u8], exponent: u16| {
            let mut each = bytes.chunks_exact(2).filter_map(|two| two.try_into().ok());
            each.all(|two| u16::from_le_bytes(two) & exponent != exponent)
        };
        // E4M3 has NaN but no infinity.
        let e4m3 = |bytes: &[u8]| bytes.iter().all(|byte| byte & 0x7f != 0x7f);
        let bytes_up_to = |max: u8| bytes.iter().all(|&scale| scale <= max);
        match plane.element {
            Element::F32 => {
                let mut each = bytes.chunks_exact(4).filter_map(|four| four.try_into().ok());
                return each.all(|four| f32::from_le_bytes(four).is_finite());
            }
            Element::F16 => return halves(bytes, 0x7c00),
            Element::Bf16 => return halves(bytes, 0x7f80),
            Element::U8 => {}
        }
        match (self, plane.name == "scales") {
            // A scale is a power of two. The largest codes are 448 and 6.
            (Self::Mxfp8, true) => bytes_up_to(246),
            (Self::Mxfp4, true) => bytes_up_to(252),
            (Self::Mxfp8, false) | (Self::Nvfp4, true) => e4m3(bytes),
            // All codes are finite. Scales of the other formats are float16.
            (Self::Mxfp4 | Self::Nvfp4, false)
            | (Self::Affine { .. } | Self::RowInt4 | Self::RowFp4, _)
            | (Self::F32 | Self::F16 | Self::Bf16, _) => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_are_not_finite_are_known_by_their_bytes() {
        let all = |format: &str, plane: &str, bytes: &[u8]| {
            let format: KvFormat = format.parse().unwrap();
            let planes = format.planes(128);
            let plane = planes.iter().find(|found| found.name == plane).unwrap();
            format.is_finite(plane, bytes)
        };
        for (bits, finite) in [(0x7bff, true), (0xfbff, true), (0x7c00, false), (0xfe01, false)] {
            let bytes = u16::to_le_bytes(bits);
            assert_eq!(all("f16", "rows", &[[0, 0], bytes].concat()), finite);
            assert_eq!(all("affine4g64", "offsets", &bytes), finite);
            assert_eq!(all("row-int4", "scales", &bytes), finite);
        }
        assert!(all("bf16", "rows", &0x7f7fu16.to_le_bytes()));
        assert!(!all("bf16", "rows", &0xff80u16.to_le_bytes()));
        assert!(all("f32", "rows", &f32::MIN.to_le_bytes()));
        assert!(!all("f32", "rows", &f32::NAN.to_le_bytes()));
        assert!(all("affine4g64", "codes", &[0xff; 4]));
        for (format, plane, byte, finite) in [
            ("mxfp8", "codes", 0x7e, true),
            ("mxfp8", "codes", 0xff, false),
            ("mxfp8", "scales", 246, true),
            ("mxfp8", "scales", 247, false),
            ("mxfp4", "scales", 252, true),
            ("mxfp4", "scales", 253, false),
            ("nvfp4", "scales", 0x7e, true),
            ("nvfp4", "scales", 0x7f, false),
        ] {
            assert_eq!(all(format, plane, &[0, byte]), finite, "{format} {plane} {byte}");
        }
    }

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
