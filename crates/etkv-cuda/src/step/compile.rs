//! Compiles kernels, and caches the results in a folder.

use std::ffi::{c_char, CString};
use std::fs;
use std::path::{Path, PathBuf};
use std::ptr::{null, null_mut};
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::nvrtc::sys::{self, nvrtcProgram, nvrtcResult};
use tracing::warn;

use crate::step::driver::Context;
use crate::step::error::{fail, Result};

/// The compiler for devices of one compute capability.
#[derive(Debug)]
pub struct Compiler {
    folder: Option<PathBuf>,
    /// The compute capability: 90 for 9.0.
    pub(crate) capability: usize,
    version: (i32, i32),
}

impl Compiler {
    /// Returns the compiler for device 0. Compiled kernels are cached in `folder`, which is created if it
    /// does not exist.
    ///
    /// # Errors
    /// [`Error::Unavailable`](crate::Error::Unavailable) with the reason, if there is no device or no compiler
    /// (libnvrtc).
    pub fn open(folder: Option<&Path>) -> Result<Self> {
        Self::for_capability(Context::open()?.capability()?, folder)
    }

    /// Returns the compiler for devices of a compute capability, such as 90 for 9.0. This machine need not
    /// have such a device.
    ///
    /// # Errors
    /// [`Error::Unavailable`](crate::Error::Unavailable) if there is no compiler.
    pub fn for_capability(capability: usize, folder: Option<&Path>) -> Result<Self> {
        // SAFETY: loading the compiler's library only runs its initializers.
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

    /// Returns the cubin of a source text, which must not have `#include`. If it is not cached, compiles the
    /// text and caches the cubin.
    ///
    /// # Errors
    /// [`Error::Compiler`](crate::Error::Compiler) with the compiler's message.
    pub fn cubin(&self, text: &str) -> Result<Vec<u8>> {
        self.load(text, |cubin| Ok(cubin.to_vec()))
    }

    /// Returns the result of `load` for the cubin of a source text. If `load` refuses the cached cubin,
    /// compiles the text again.
    pub(crate) fn load<T>(&self, text: &str, load: impl Fn(&[u8]) -> Result<T>) -> Result<T> {
        let kept = self.folder.as_ref().map(|folder| folder.join(self.name(text)));
        if let Some(found) = kept.as_deref().and_then(read) {
            match load(&found) {
                Ok(loaded) => return Ok(loaded),
                Err(error) => warn!(%error, file = ?kept, "a cached kernel is compiled again"),
            }
        }
        let cubin = self.compile(text)?;
        let loaded = load(&cubin)?;
        if let Some(path) = kept {
            if let Err(error) = write(&path, &cubin) {
                warn!(%error, file = ?path, "a kernel is not cached and will be compiled again");
            }
        }
        Ok(loaded)
    }

    /// Returns the file name of a source text's cubin.
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
        // SAFETY: the text outlives the program, each list has the stated number of elements, and the buffer
        // has the size that the compiler requests.
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

/// A source text in the compiler.
struct Program(nvrtcProgram);

impl Program {
    /// Returns the compiler's log, shortened.
    fn log(&self) -> String {
        let mut bytes = 0;
        // SAFETY: the program is live; the buffer has the size that the compiler requests.
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

/// Returns a cached cubin if it is complete. The hash that follows it in the file shows this.
fn read(path: &Path) -> Option<Vec<u8>> {
    let mut bytes = fs::read(path).ok()?;
    let (cubin, kept) = bytes.split_last_chunk::<16>()?;
    if u128::from_le_bytes(*kept) != hash(cubin) {
        warn!(file = ?path, "a cached kernel is damaged; it is compiled again");
        return None;
    }
    bytes.truncate(bytes.len() - 16);
    Some(bytes)
}

/// Caches a cubin. Writes it under a temporary name first, so that no reader sees an incomplete file.
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
        // It is not an error if the temporary file cannot be removed.
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
