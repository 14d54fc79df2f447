//! Source texts of kernels, and the ones that are compiled together.

use etkv_core::KvFormat;

use crate::step::formats::{stage_bytes, type_of};
use crate::step::plan::Element;
use crate::text;

// Texts that only captured steps need.
const TILED_ROWS: &str = include_str!("../kernels/tiled_rows.cuh");
const MANY_ROWS: &str = include_str!("../kernels/many_rows.cuh");
const PACKED: &str = include_str!("../kernels/packed.cuh");
const STEP: &str = include_str!("../kernels/step.cuh");
const MERGE: &str = include_str!("../kernels/merge.cuh");
const TOKENS: &str = include_str!("../kernels/tokens.cuh");
const PRODUCT_WORK: &str = include_str!("../kernels/product_work.cuh");
const PRODUCT_ENTRY: &str = include_str!("../kernels/product_entry.cuh");
const MANY_ENTRY: &str = include_str!("../kernels/many_entry.cuh");
const PACKED_ENTRY: &str = include_str!("../kernels/packed_entry.cuh");
const FORMATS: &str = include_str!("../kernels/formats.cuh");
const NORM: &str = include_str!("../kernels/norm.cuh");
const NORM_ENTRY: &str = include_str!("../kernels/norm_entry.cuh");
const ENCODE: &str = include_str!("../kernels/encode.cuh");
const PLACE: &str = include_str!("../kernels/place.cuh");
const PLACE_ENTRY: &str = include_str!("../kernels/place_entry.cuh");
const DECODE: &str = include_str!("../kernels/decode.cuh");
const PACKED_ROWS: &str = include_str!("../kernels/packed_rows.cuh");
const PACKED_SLICE: &str = include_str!("../kernels/packed_slice.cuh");
const ATTEND_WORK: &str = include_str!("../kernels/attend_work.cuh");
const ATTEND_PLAIN: &str = include_str!("../kernels/attend_plain.cuh");
const ATTEND_PACKED: &str = include_str!("../kernels/attend_packed.cuh");
const ATTEND_ENTRY: &str = include_str!("../kernels/attend_entry.cuh");

/// Kernels that are compiled together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    /// The kernels that the other variants do not list.
    Product(Element),
    /// Kernels that multiply many rows, with rings of `depth` slots.
    Many { element: Element, depth: usize },
    /// Kernels that read packed weights of `bits` bits.
    Packed { element: Element, bits: usize },
    /// The kernels that normalize and blend rows.
    Norm(Element),
    /// The kernel that places heads in pools. A pool with a format is packed.
    PlaceHeads { element: Element, keys: Option<KvFormat>, values: Option<KvFormat> },
    /// Attention over plain pools, with heads of `dim` elements. A block has room for `tiles` tiles, and
    /// divides its rows among `row_warps` warps. A multiprocessor runs `blocks` blocks.
    Attend {
        element: Element,
        dim: usize,
        tiles: usize,
        row_warps: usize,
        blocks: usize,
        masked: bool,
    },
    /// Attention over packed keys or values. `stages` is the number of tiles in a block. A warp has
    /// `row_tiles` row tiles, which share the keys and values that it unpacks.
    AttendPacked {
        element: Element,
        dim: usize,
        stages: usize,
        row_tiles: usize,
        row_warps: usize,
        blocks: usize,
        masked: bool,
        keys: Option<KvFormat>,
        values: Option<KvFormat>,
    },
}

impl Source {
    /// Returns the complete source text. Kernels can overlap from compute capability 9.0 on.
    pub(crate) fn text(self, capability: usize) -> String {
        let overlaps = if capability >= 90 { "#define ETKV_OVERLAPS\n" } else { "" };
        let (head, parts) = match self {
            Self::Product(element) => (
                format!("{overlaps}using Element = {};\n", element.name()),
                &[
                    STEP,
                    text::INSTRUCTIONS,
                    text::ROTATION,
                    text::FEW_ROWS,
                    text::ONE_ROW,
                    TILED_ROWS,
                    TOKENS,
                    PRODUCT_WORK,
                    PRODUCT_ENTRY,
                ][..],
            ),
            Self::Many { element, depth } => (
                format!(
                    "{overlaps}using Element = {};\nconstexpr int MANY_DEPTH = {depth};\n",
                    element.name(),
                ),
                &[
                    STEP,
                    text::INSTRUCTIONS,
                    text::ROTATION,
                    text::FEW_ROWS,
                    MANY_ROWS,
                    PRODUCT_WORK,
                    MANY_ENTRY,
                ][..],
            ),
            Self::Packed { element, bits } => (
                format!(
                    "{overlaps}using Element = {};\nconstexpr int BITS = {bits};\n",
                    element.name(),
                ),
                &[
                    STEP,
                    text::INSTRUCTIONS,
                    text::ROTATION,
                    text::FEW_ROWS,
                    text::ONE_ROW,
                    TOKENS,
                    PACKED,
                    PRODUCT_WORK,
                    PACKED_ENTRY,
                ][..],
            ),
            Self::Norm(element) => (
                format!("{overlaps}using Element = {};\n", element.name()),
                &[text::INSTRUCTIONS, NORM, NORM_ENTRY][..],
            ),
            Self::PlaceHeads { element, keys, values } => (
                format!(
                    "{overlaps}using Element = {};\n#define ETKV_KEYS {}\n#define ETKV_VALUES {}\n",
                    element.name(),
                    type_of(keys),
                    type_of(values),
                ),
                &[
                    STEP,
                    text::INSTRUCTIONS,
                    text::ROTATION,
                    text::ROWS,
                    FORMATS,
                    ENCODE,
                    NORM,
                    PLACE,
                    PLACE_ENTRY,
                ][..],
            ),
            Self::Attend { element, dim, tiles, row_warps, blocks, masked } => (
                format!(
                    "{overlaps}using Element = {};\nconstexpr int DIM = {dim}, STAGES = {tiles};\n\
                     constexpr bool IS_LISTED = {masked};\n#define ETKV_ROW_WARPS {row_warps}\n\
                     #define ETKV_BLOCKS {blocks}\n",
                    element.name(),
                ),
                &[
                    STEP,
                    text::INSTRUCTIONS,
                    text::ROWS,
                    text::SLICE,
                    MERGE,
                    FORMATS,
                    ATTEND_WORK,
                    ATTEND_PLAIN,
                    ATTEND_ENTRY,
                ][..],
            ),
            Self::AttendPacked {
                element,
                dim,
                stages,
                row_tiles,
                row_warps,
                blocks,
                masked,
                keys,
                values,
            } => (
                format!(
                    "{overlaps}using Element = {};\nconstexpr int DIM = {dim}, STAGES = {stages};\n\
                     constexpr bool IS_LISTED = {masked};\n#define ETKV_ROW_TILES {row_tiles}\n\
                     #define ETKV_ROW_WARPS {row_warps}\n\
                     #define ETKV_BLOCKS {blocks}\n\
                     #define ETKV_KEYS {}\n#define ETKV_VALUES {}\n#define ETKV_STAGE {}\n",
                    element.name(),
                    type_of(keys),
                    type_of(values),
                    stage_bytes(keys, values, dim),
                ),
                &[
                    STEP,
                    text::INSTRUCTIONS,
                    text::ROWS,
                    text::SLICE,
                    MERGE,
                    FORMATS,
                    DECODE,
                    PACKED_ROWS,
                    PACKED_SLICE,
                    ATTEND_WORK,
                    ATTEND_PACKED,
                    ATTEND_ENTRY,
                ][..],
            ),
        };
        [text::PRELUDE, &head].into_iter().chain(parts.iter().copied()).collect()
    }
}
