//! The kernels' compiler, and the folder in which its results are kept.

use std::ffi::{c_char, CString};
use std::fs;
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};
use tracing::warn;

use crate::step::error::{fail, Result};
use crate::step::plan::{Element, PackedFormat};
use crate::step::pools::{stage_bytes, type_of};
use crate::text;

// The texts that only steps need.
const ONE_ROW: &str = include_str!("../kernels/one_row.cuh");
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

/// The compiler, for the devices of one architecture.
#[derive(Debug)]
pub(crate) struct Compiler {
    folder: Option<PathBuf>,
    /// The compute capability, as in 90 for 9.0.
    capability: usize,
    version: (i32, i32),
}

/// What is compiled together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Source {
    /// All kernels but attention, those that read packed weights, and those of many rows.
    Product(Element),
    /// Kernels that multiply many rows, with rings of so many places.
    Many { element: Element, depth: usize },
    /// Kernels that read packed weights of so many bits.
    Packed { element: Element, bits: usize },
    /// The kernels that normalize and blend rows.
    Norm(Element),
    /// The kernel that places heads in pools, packed if they have a format.
    Place { element: Element, keys: Option<PackedFormat>, values: Option<PackedFormat> },
    /// Attention over heads of so many elements, of which a block holds so many tiles at a time. So many of its
    /// warps share rows, and a multiprocessor has so many blocks.
    Attend {
        element: Element,
        dim: usize,
        tiles: usize,
        row_warps: usize,
        blocks: usize,
        masked: bool,
    },
    /// The same where keys or values are packed. A warp has so many tiles of rows, which share what it unpacks, and a
    /// multiprocessor so many blocks.
    AttendPacked {
        element: Element,
        dim: usize,
        stages: usize,
        row_tiles: usize,
        row_warps: usize,
        blocks: usize,
        masked: bool,
        keys: Option<PackedFormat>,
        values: Option<PackedFormat>,
    },
}

impl Source {
    /// Returns the whole text. Kernels overlap from compute capability 9.0 on.
    fn text(self, capability: usize) -> String {
        let overlaps = if capability >= 90 { "#define ETKV_OVERLAPS\n" } else { "" };
        let (head, parts) = match self {
            Self::Product(element) => (
                format!("{overlaps}using Element = {};\n", element.name()),
                &[
                    STEP,
                    text::INSTRUCTIONS,
                    text::TURN,
                    text::FEW_ROWS,
                    ONE_ROW,
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
                    text::TURN,
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
                    text::TURN,
                    text::FEW_ROWS,
                    ONE_ROW,
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
            Self::Place { element, keys, values } => (
                format!(
                    "{overlaps}using Element = {};\n#define ETKV_KEYS {}\n#define ETKV_VALUES {}\n",
                    element.name(),
                    type_of(keys),
                    type_of(values),
                ),
                &[
                    STEP,
                    text::INSTRUCTIONS,
                    text::TURN,
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

impl Compiler {
    /// Returns the compiler if its library is found. `folder` need not exist.
    pub(crate) fn find(capability: usize, folder: Option<&Path>) -> Result<Self> {
        // SAFETY: loading the compiler runs its initializers only.
        if !unsafe { sys::is_culib_present() } {
            fail!(Unavailable, "the kernels' compiler, libnvrtc, is not found");
        }
        let mut version = (0, 0);
        // SAFETY: writes two numbers.
        check("nvrtcVersion", unsafe { sys::nvrtcVersion(&mut version.0, &mut version.1) })?;
        Ok(Self { folder: folder.map(Path::to_owned), capability, version })
    }

    fn options(&self) -> [String; 2] {
        [format!("--gpu-architecture=sm_{}", self.capability), "-std=c++17".to_owned()]
    }

    /// Returns what `load` makes of the cubin of a source: of the one that is kept, or else of a new
    /// one, which is then kept.
    pub(crate) fn load<T>(&self, source: Source, load: impl Fn(&[u8]) -> Result<T>) -> Result<T> {
        let text = source.text(self.capability);
        let kept = self.folder.as_ref().map(|folder| folder.join(self.name(&text)));
        if let Some(found) = kept.as_deref().and_then(read) {
            match load(&found) {
                Ok(loaded) => return Ok(loaded),
                Err(error) => warn!(%error, file = ?kept, "a kept kernel is compiled anew"),
            }
        }
        let cubin = self.compile(&text)?;
        let loaded = load(&cubin)?;
        if let Some(path) = kept {
            if let Err(error) = write(&path, &cubin) {
                warn!(%error, file = ?path, "a kernel is not kept and will be compiled again");
            }
        }
        Ok(loaded)
    }

    /// Returns the name of the file of a text's cubin.
    fn name(&self, text: &str) -> String {
        let (major, minor) = self.version;
        let all = format!("{major}.{minor} {:?}\n{text}", self.options());
        format!("{:032x}.cubin", hash(all.as_bytes()))
    }

    fn compile(&self, text: &str) -> Result<Vec<u8>> {
        let Ok(text) = CString::new(text) else {
            fail!(Compiler, "a zero byte in its text");
        };
        let options = self.options().map(|option| CString::new(option).unwrap_or_default());
        let options = options.each_ref().map(|option| option.as_ptr());
        let mut program = Program(null_mut());
        // SAFETY: the text outlives the program; each list has as many elements as is said; the
        // buffer has the size that the compiler asks for.
        unsafe {
            let name = c"etkv.cu".as_ptr();
            let made =
                sys::nvrtcCreateProgram(&mut program.0, text.as_ptr(), name, 0, null(), null());
            check("nvrtcCreateProgram", made)?;
            let count = options.len() as i32;
            let done = sys::nvrtcCompileProgram(program.0, count, options.as_ptr());
            if done != nvrtcResult::NVRTC_SUCCESS {
                fail!(Compiler, "{done:?}, sm_{}: {}", self.capability, program.log());
            }
            let mut bytes = 0;
            check("nvrtcGetCUBINSize", sys::nvrtcGetCUBINSize(program.0, &mut bytes))?;
            let mut cubin = vec![0u8; bytes];
            check("nvrtcGetCUBIN", sys::nvrtcGetCUBIN(program.0, cubin.as_mut_ptr().cast()))?;
            Ok(cubin)
        }
    }
}

/// A text that is compiled.
struct Program(nvrtcProgram);

impl Program {
    /// Returns what the compiler says, shortened.
    fn log(&self) -> String {
        let mut bytes = 0;
        // SAFETY: the program is live; the buffer has the size that the compiler asks for.
        let log = unsafe {
            if sys::nvrtcGetProgramLogSize(self.0, &mut bytes) != nvrtcResult::NVRTC_SUCCESS {
                return String::new();
            }
            let mut log = vec![0u8; bytes];
            let got = sys::nvrtcGetProgramLog(self.0, log.as_mut_ptr().cast::<c_char>());
            if got != nvrtcResult::NVRTC_SUCCESS {
                return String::new();
            }
            log
        };
        String::from_utf8_lossy(&log).trim_end_matches('\0').chars().take(2000).collect()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: created once.
            unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
        }
    }
}

fn check(call: &str, result: nvrtcResult) -> Result<()> {
    match result {
        nvrtcResult::NVRTC_SUCCESS => Ok(()),
        _ => fail!(Compiler, "{call} returned {result:?}"),
    }
}

/// Returns a cubin that was kept, if it is whole: its hash follows it.
fn read(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = fs::read(path).ok()?;
    let (cubin, kept) = bytes.split_last_chunk::<16>()?;
    if u128::from_le_bytes(*kept) != hash(cubin) {
        warn!(file = ?path, "a kept kernel is damaged and compiled anew");
        return None;
    }
    bytes.truncate(bytes.len() - 16);
    Some(bytes)
}

/// Keeps a cubin: under another name first, so that no one finds a part of it.
fn write(path: &Path, cubin: &[u8]) -> std::io::Result<()> {
    static WRITTEN: AtomicU64 = AtomicU64::new(0);
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder)?;
    }
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    let beside = path.with_extension(format!("{}-{number}", std::process::id()));
    let bytes = [cubin, &hash(cubin).to_le_bytes()].concat();
    let done = fs::write(&beside, bytes).and_then(|()| fs::rename(&beside, path));
    if done.is_err() {
        // What is left of it is of no use; that it stays is no other error.
        let _ = fs::remove_file(&beside);
    }
    done
}

/// FNV-1a of 128 bits.
fn hash(bytes: &[u8]) -> u128 {
    bytes.iter().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |hash, &byte| {
        (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    })
}

#[cfg(test)]
mod tests;
