//! CUDA kernels for calls that are too slow in MLX. They are compiled on first use, and cached for later processes.
//!
//! On other devices, and for calls that a kernel does not support, functions return `None` and MLX computes the
//! result.

mod attention;
mod by_text;
mod elementwise;
mod finite;
#[cfg(target_os = "linux")]
mod kept;
mod linear;
mod norm;
mod raw;
pub mod recurrent;
mod rotary;
#[cfg(test)]
pub(crate) mod testing;
mod unpack;

use std::collections::HashMap;
use std::ffi::CString;
use std::fs;
use std::hash::Hash;
use std::path::Path;

use mlx_rs::Dtype;
use tracing::warn;

pub use self::attention::{attend, compile_masked, several_queries};
pub use self::elementwise::{ElementwiseKernel, Function};
pub use self::finite::{non_finite, MAX_ARRAYS};
pub use self::linear::{few_rows, Gate, Product, RmsNorm, Rotation, MAX_ROWS};
pub use self::norm::{norm, Norm};
use self::raw::Kernel;
pub use self::rotary::rotary;
pub use self::unpack::{unpack, AffineWeights};
use crate::error::{Error, Result, Status};
use crate::mlx;

/// The maximum number of kernels of one kind that a process compiles. A program needs one to six. Without the limit, a
/// program with a different scale in each layer would compile a kernel for each layer.
const MAX_KERNELS: usize = 64;

/// Returns whether kernels can run here: on the shared stream of a GPU. A host may use several streams, even a stream
/// on a CPU. Kernels of two streams would share their counters.
pub fn can_run() -> Result<bool> {
    Ok(!cfg!(target_os = "macos") && mlx::on_gpu()? && mlx::is_stream_shared()?)
}

/// The kernels of one kind. `None` stands for a kernel that cannot be compiled. Used only under the lock of MLX.
struct CompiledKernels<T>(HashMap<T, Option<Kernel>>);

impl<T> Default for CompiledKernels<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T: Eq + Hash> CompiledKernels<T> {
    /// Returns the kernel of `template`. On first use `make` compiles the kernel and runs it once.
    fn get(
        &mut self,
        template: T,
        make: impl FnOnce(&T) -> Result<Option<Kernel>>,
    ) -> Option<&Kernel> {
        if !self.0.contains_key(&template) {
            if self.0.len() >= MAX_KERNELS {
                return None;
            }
            let kernel = make(&template).unwrap_or_else(|error| {
                warn!(%error, "cannot compile a kernel; MLX computes instead");
                None
            });
            return self.0.entry(template).or_insert(kernel).as_ref();
        }
        self.0.get(&template)?.as_ref()
    }

    /// Returns the templates of the kernels that run.
    fn templates(&self) -> impl Iterator<Item = &T> {
        self.0.iter().filter(|(_, kernel)| kernel.is_some()).map(|(template, _)| template)
    }
}

/// Returns the name of a float dtype in CUDA, and the bytes of an element.
pub fn element(dtype: Dtype) -> Option<(&'static str, i32)> {
    match dtype {
        Dtype::Float16 => Some(("__half", 2)),
        Dtype::Bfloat16 => Some(("__nv_bfloat16", 2)),
        Dtype::Float32 => Some(("float", 4)),
        _ => None,
    }
}

/// Returns the names of float dtypes in CUDA.
fn elements_of<const N: usize>(dtypes: [Dtype; N]) -> Option<[&'static str; N]> {
    let mut names = [""; N];
    for (name, dtype) in names.iter_mut().zip(dtypes) {
        *name = element(dtype)?.0;
    }
    Some(names)
}

/// Returns the header of an MLX kernel. It provides the functions of `text`.
///
/// MLX copies and hashes a kernel's text in each call. If the text is long, this takes as long as the rest of the
/// call. So the text is in a file in the folder of this process, and the kernel includes that file.
fn header(name: &str, text: &str) -> Result<CString> {
    let bare = bare(text);
    let included = mlx::kernel_folder().and_then(|folder| included(folder, name, &bare));
    c_text(included.unwrap_or(bare))
}

/// Writes `text` to a file of `folder` and returns the line that includes it, or `None` if the file cannot be
/// written.
fn included(folder: &Path, name: &str, text: &str) -> Option<String> {
    let path = folder.join(format!("etkv_{name}.cuh"));
    let named = path.to_str().filter(|path| !path.contains(['"', '\\', '\n']))?;
    let line = format!("#include \"{named}\"\n");
    if fs::read_to_string(&path).is_ok_and(|found| found == text) {
        return Some(line);
    }
    match fs::write(&path, text) {
        Ok(()) => Some(line),
        Err(error) => {
            warn!(%error, file = named, "cannot write a kernel's text to a file, so its calls take longer");
            None
        }
    }
}

/// Returns the text of the function that a kernel consists of.
fn source(text: &str) -> Result<CString> {
    c_text(bare(text))
}

/// Returns a kernel's text without comments and indentation.
fn bare(text: &str) -> String {
    text.lines()
        .map(|line| line.split("//").next().unwrap_or_default().trim())
        .filter(|line| !line.is_empty())
        .flat_map(|line| [line, "\n"])
        .collect()
}

fn c_text(text: String) -> Result<CString> {
    CString::new(text).map_err(|_| Error::new(Status::Internal, "a zero byte in a kernel"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_included_from_a_file_of_the_folder() {
        let folder = std::env::temp_dir().join(format!("etkv-kernels-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        for text in ["int one();\n", "int two();\n"] {
            for _ in 0..2 {
                let line = included(&folder, "numbers", text).unwrap();
                let path = line.trim().strip_prefix("#include \"").unwrap();
                assert_eq!(fs::read_to_string(path.trim_end_matches('"')).unwrap(), text);
            }
        }
        assert_eq!(included(&folder.join("missing"), "numbers", "x"), None);
        assert_eq!(included(&folder.join("a\"b"), "numbers", "x"), None);
        fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn mlx_gets_no_comments() {
        assert_eq!(bare("// why\n  a;  // b\n\n\tc;\n"), "a;\nc;\n");
    }
}
