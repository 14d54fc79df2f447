//! Finds the folders of installed Python packages for build scripts. MLX, ExecuTorch and libclang come from pip, so
//! that the library and the Python code use the same ones.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Returns the Python whose packages a build uses: `ETKV_PYTHON`, else the nearest `.venv/bin/python` in a folder
/// above the package that is being built, else `python3`.
pub fn python() -> PathBuf {
    println!("cargo:rerun-if-env-changed=ETKV_PYTHON");
    if let Some(python) = env::var_os("ETKV_PYTHON") {
        return python.into();
    }
    let manifest = env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from).unwrap_or_default();
    manifest
        .ancestors()
        .map(|folder| folder.join(".venv/bin/python"))
        .find(|python| python.exists())
        .unwrap_or_else(|| "python3".into())
}

/// Returns the folder of the importable package `name`, or `None` if `python` cannot import it.
pub fn package(python: &Path, name: &str) -> Option<PathBuf> {
    let script = format!(
        "import importlib.util as u; s = u.find_spec('{name}'); \
         print(list(s.submodule_search_locations)[0] if s else '')"
    );
    let output = Command::new(python).args(["-c", &script]).output().ok()?;
    let path = String::from_utf8(output.stdout).ok()?;
    let path = path.trim();
    (output.status.success() && !path.is_empty()).then(|| PathBuf::from(path))
}
