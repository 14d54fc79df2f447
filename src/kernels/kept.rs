//! Compiles kernels to files that later processes can use.
//!
//! MLX compiles a custom kernel in each process, with CUDA's headers, in one to five seconds, and does not cache it.
//! But MLX first looks for the kernel in its folder. So etkv compiles the same text without these headers, caches the
//! result, and writes it to the folder of this process under MLX's name. If this fails, MLX compiles the kernel.

use std::ffi::CStr;
use std::fmt::{Display, Write};
use std::fs;
use std::path::Path;
use std::sync::OnceLock;
use std::time::Instant;

use etkv_cuda::{text, Compiler};
use mlx_rs::Array;
use tracing::{debug, warn};

use crate::error::{Error, Result, Status};
use crate::mlx::{self, check};

const TARGET: &str = "etkv::kernels";

/// Writes the kernel of an array that is not computed yet to the folder where MLX looks for it.
pub fn provide(made: &Array) {
    let Some(folder) = mlx::kernel_folder() else {
        return;
    };
    let began = Instant::now();
    match provide_in(folder, made) {
        Ok(name) => {
            let seconds = began.elapsed().as_secs_f32();
            debug!(target: TARGET, name, seconds, "MLX need not compile a kernel");
        }
        Err(error) => {
            warn!(target: TARGET, %error, "MLX compiles a kernel in each process");
        }
    }
}

fn provide_in(folder: &Path, made: &Array) -> Result<String> {
    let Kernel { name, text, number } = Kernel::of(made)?;
    let text = whole(&name, &text, |path| {
        path.starts_with(folder).then(|| fs::read_to_string(path).ok()).flatten()
    });
    let text =
        text.ok_or_else(|| failed(format!("{name}: its text does not define the kernel")))?;
    let compiler = compiler().ok_or_else(|| failed("there is no compiler"))?;
    let cubin = compiler.cubin(&text).map_err(failed)?;
    let file = |ending: &str| folder.join(format!("{name}_{number:x}.{ending}"));
    // MLX looks for the second file first.
    fs::write(file("txt"), format!("mlx::core::cu::{name}\t{name}\n"))
        .and_then(|()| fs::write(file("ptx"), cubin))
        .map_err(|error| failed(format!("{}: {error}", file("ptx").display())))?;
    Ok(name)
}

fn failed(what: impl Display) -> Error {
    Error::new(Status::Backend, what)
}

/// Returns the compiler, or `None` if there is none.
fn compiler() -> Option<&'static Compiler> {
    static COMPILER: OnceLock<Option<Compiler>> = OnceLock::new();
    let open = || match Compiler::open(mlx::compiled_folder().as_deref()) {
        Ok(compiler) => Some(compiler),
        Err(error) => {
            warn!(target: TARGET, %error, "cannot cache kernels");
            None
        }
    };
    COMPILER.get_or_init(open).as_ref()
}

/// The source of a kernel, as MLX would compile it.
struct Kernel {
    name: String,
    text: String,
    /// The number at the end of the names of the kernel's files.
    number: u64,
}

impl Kernel {
    fn of(made: &Array) -> Result<Self> {
        let mut number = 0;
        // SAFETY: the strings are made, read and freed here; the array is live.
        unsafe {
            let (mut name, mut text) = (mlx_sys::mlx_string_new(), mlx_sys::mlx_string_new());
            let status =
                mlx_sys::etkv_mlx_kernel_text(&mut name, &mut text, &mut number, made.as_ptr());
            let [found_name, found_text] = [name, text].map(|string| {
                let data = mlx_sys::mlx_string_data(string);
                let known = (status == 0 && number != 0 && !data.is_null())
                    .then(|| CStr::from_ptr(data).to_string_lossy().into_owned());
                mlx_sys::mlx_string_free(string);
                known.unwrap_or_default()
            });
            check(status)?;
            Ok(Self { name: found_name, text: found_text, number })
        }
    }
}

/// Returns a kernel's text without `#include`, and with an unmangled name. A header file that `read` returns is
/// included in the text, and [`text::MLX_HEADERS`] replaces all others. Returns `None` if the text does not define
/// the kernel `name`.
fn whole(name: &str, text: &str, read: impl Fn(&Path) -> Option<String>) -> Option<String> {
    let head = format!("__global__ void {name}(");
    let (before, body) = text.split_once(&head)?;
    let mut whole = [text::PRELUDE, text::MLX_HEADERS].concat();
    for line in before.lines() {
        let included = line.trim().strip_prefix("#include");
        match included.map(|named| read(Path::new(named.trim().trim_matches(['"', '<', '>'])))) {
            Some(Some(file)) => whole.push_str(&file),
            // `MLX_HEADERS` already replaces this header of MLX or CUDA.
            Some(None) => {}
            None => whole.push_str(line),
        }
        whole.push('\n');
    }
    write!(whole, "extern \"C\" {head}{body}").ok()?;
    Some(whole)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "custom_kernel_etkv_twice";

    /// The text as MLX generates it.
    const TEXT: &str = r#"
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

#include "/folder/etkv_twice.cuh"
namespace mlx::core::cu {

namespace cg = cooperative_groups;

__global__ void custom_kernel_etkv_twice(
    const __half* x,
    const __grid_constant__ Shape x_shape,
    const __grid_constant__ Strides x_strides,
    const bool* mask,
    const __grid_constant__ int mask_ndim,
    uint32_t* out) {
  out[threadIdx.x] = etkv::twice(x_shape[0] + int(x_strides[mask_ndim]));

}

} // namespace mlx::core::cu
"#;

    fn own(path: &Path) -> Option<String> {
        let function = "namespace etkv {\n__device__ int twice(int x) { return 2 * x; }\n}\n";
        (path == Path::new("/folder/etkv_twice.cuh")).then(|| function.to_owned())
    }

    #[test]
    fn a_text_needs_no_other_file() {
        let whole = whole(NAME, TEXT, own).unwrap();
        assert!(!whole.contains("#include"), "{whole}");
        assert!(whole.contains("__device__ int twice"));
        assert!(whole.contains("extern \"C\" __global__ void custom_kernel_etkv_twice(\n"));
        assert_eq!(super::whole("another", TEXT, own), None);
    }

    #[test]
    fn declarations_of_mlx_are_known() {
        // The compiler needs a device only to find out the kind of GPU.
        let text = whole(NAME, TEXT, own).unwrap();
        match Compiler::for_capability(90, None) {
            Ok(compiler) => assert_eq!(&compiler.cubin(&text).unwrap()[..4], b"\x7fELF"),
            Err(error) => eprintln!("skipped: {error}"),
        }
    }
}
