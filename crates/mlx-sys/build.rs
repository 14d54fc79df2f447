//! Compiles the mlx-c sources of the published mlx-sys against the headers of a
//! pip-installed MLX, links that MLX dynamically, and generates the bindings.
//!
//! Environment:
//! - `ETKV_PYTHON`: the Python whose packages are used (default: `.venv/bin/python` of the workspace, then
//!   `python3`).
//! - `ETKV_MLX_DIR`: the folder `mlx` of an installed MLX, instead of the one of Python's package.
//! - `LIBCLANG_PATH`: the libclang for bindgen, instead of the one of Python's package `libclang`.

// A build script reports errors by panicking.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

use pip_packages::package as python_package;

/// The MLX release for which the bound mlx-c was written.
const MLX_VERSION: &str = "0.32.2";

fn main() {
    for name in ["ETKV_MLX_DIR", "LIBCLANG_PATH"] {
        println!("cargo:rerun-if-env-changed={name}");
    }
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=shim");
    println!("cargo:rerun-if-changed=published/Cargo.toml");

    let python = pip_packages::python();
    let mlx = mlx_dir(&python);
    check_version(&mlx);
    let mlx_c = published_mlx_c();

    if !links_nothing() {
        compile_mlx_c(&mlx_c, &mlx.join("include"));
    }
    generate_bindings(&mlx_c, &python);
    if env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        link_blas(&python);
    }
    link_mlx(&mlx);
}

/// The folder of this crate.
fn manifest_dir() -> PathBuf {
    env::var_os("CARGO_MANIFEST_DIR").expect("cargo sets it").into()
}

fn mlx_dir(python: &Path) -> PathBuf {
    let dir =
        env::var_os("ETKV_MLX_DIR").map(PathBuf::from).or_else(|| python_package(python, "mlx"));
    match dir {
        Some(dir) if dir.join("include/mlx/version.h").exists() => dir,
        Some(dir) => panic!("{} contains no MLX: include/mlx/version.h is missing", dir.display()),
        None => panic!(
            "no MLX found: `{} -c 'import mlx'` fails; run `make setup`, or set ETKV_MLX_DIR",
            python.display()
        ),
    }
}

/// Panics if the installed MLX is another release. mlx-c follows MLX's C++ interface release by release.
fn check_version(mlx: &Path) {
    let header = mlx.join("include/mlx/version.h");
    let text = std::fs::read_to_string(&header).expect("version.h is readable");
    let number = |name: &str| {
        text.lines()
            .find_map(|line| {
                line.strip_prefix("#define ")?.strip_prefix(name)?.trim().parse::<u32>().ok()
            })
            .unwrap_or_else(|| panic!("{} does not define {name}", header.display()))
    };
    let found = format!(
        "{}.{}.{}",
        number("MLX_VERSION_MAJOR"),
        number("MLX_VERSION_MINOR"),
        number("MLX_VERSION_PATCH")
    );
    assert_eq!(
        found,
        MLX_VERSION,
        "MLX in {} is {found}, but this build needs {MLX_VERSION}",
        mlx.display()
    );
}

/// The folder `mlx-c` inside the unpacked published crate.
fn published_mlx_c() -> PathBuf {
    let manifest = Path::new("published/Cargo.toml");
    let cargo = env::var_os("CARGO").expect("cargo sets it");
    let output = Command::new(cargo)
        .args(["metadata", "--format-version=1", "--locked", "--manifest-path"])
        .arg(manifest)
        .output()
        .expect("cargo runs");
    assert!(
        output.status.success(),
        "cargo metadata could not unpack the published mlx-sys:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let metadata: serde_json::Value =
        serde_json::from_slice(&output.stdout).expect("cargo metadata prints JSON");
    let package = metadata["packages"]
        .as_array()
        .into_iter()
        .flatten()
        .find(|package| package["name"] == "mlx-sys")
        .and_then(|package| package["manifest_path"].as_str())
        .expect("mlx-sys is a dependency of published/Cargo.toml");
    Path::new(package).parent().expect("a manifest has a folder").join("src/mlx-c")
}

/// Whether this build is `cargo clippy`, which checks crates and links none. Cargo runs this script again for other
/// builds.
fn links_nothing() -> bool {
    env::var_os("RUSTC_WORKSPACE_WRAPPER").is_some_and(|wrapper| {
        Path::new(&wrapper).file_stem().is_some_and(|name| name == "clippy-driver")
    })
}

fn compile_mlx_c(mlx_c: &Path, mlx_include: &Path) {
    // Rust's default is macOS 11, which lacks std::format. MLX needs macOS 14.
    if env::var_os("MACOSX_DEPLOYMENT_TARGET").is_none() {
        env::set_var("MACOSX_DEPLOYMENT_TARGET", "14.0");
    }
    let mut sources: Vec<PathBuf> = std::fs::read_dir(mlx_c.join("mlx/c"))
        .expect("mlx-c is unpacked")
        .map(|entry| entry.expect("the folder is readable").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "cpp"))
        .collect();
    sources.sort();
    let shim = manifest_dir().join("shim");
    sources
        .extend(["exit.cpp", "host.cpp", "kernels.cpp", "writes.cpp"].map(|name| shim.join(name)));
    if env::var("CARGO_CFG_TARGET_ARCH").as_deref() != Ok("aarch64") {
        sources.push(shim.join("half.cpp"));
    }
    // All sources are compiled as a single file. This takes a seventh of the time, because nearly all of the time is
    // spent on MLX's headers.
    let include = |source: &PathBuf| format!("#include \"{}\"\n", source.display());
    let together = out_dir().join("mlx-c.cpp");
    std::fs::write(&together, sources.iter().map(include).collect::<String>())
        .expect("OUT_DIR is writable");
    // The library is a thin layer over MLX, so it is optimized even in debug builds.
    let opt_level = if env::var("OPT_LEVEL").as_deref() == Ok("0") { 0 } else { 2 };
    cc::Build::new()
        .cpp(true)
        .std("c++20")
        .opt_level(opt_level)
        .debug(false)
        .warnings(false)
        .include(mlx_c)
        .include(mlx_include)
        .flag("-include")
        .flag(manifest_dir().join("shim/format.h").to_str().expect("the path is UTF-8"))
        .file(&together)
        .compile("mlxc");
}

fn generate_bindings(mlx_c: &Path, python: &Path) {
    if env::var_os("LIBCLANG_PATH").is_none() {
        if let Some(clang) = python_package(python, "clang") {
            env::set_var("LIBCLANG_PATH", clang.join("native"));
        }
    }
    let mut headers: Vec<PathBuf> = std::fs::read_dir(mlx_c.join("mlx/c"))
        .expect("mlx-c is unpacked")
        .map(|entry| entry.expect("the folder is readable").path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "h"))
        .collect();
    headers.sort();
    let mut builder = bindgen::Builder::default()
        .clang_arg(format!("-I{}", mlx_c.display()))
        // pip's libclang has no headers, so bindgen uses the compiler's headers.
        .clang_args(compiler_include().map(|dir| format!("-isystem{}", dir.display())))
        .blocklist_function("malloc")
        .blocklist_function("realloc");
    for header in &headers {
        builder = builder.header(header.to_string_lossy());
    }
    let out = out_dir().join("bindings.rs");
    builder
        .generate()
        .expect("bindgen reads mlx-c's headers")
        .write_to_file(out)
        .expect("OUT_DIR is writable");
}

fn out_dir() -> PathBuf {
    PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"))
}

/// Returns the folder in which the C compiler has `stddef.h` and similar headers.
fn compiler_include() -> Option<PathBuf> {
    let compiler = cc::Build::new().get_compiler();
    let output = Command::new(compiler.path()).arg("-print-file-name=include").output().ok()?;
    let path = PathBuf::from(String::from_utf8(output.stdout).ok()?.trim());
    path.join("stddef.h").exists().then_some(path)
}

/// Builds libetkv_blas (`shim/blas.c`), which is linked before MLX. Cargo's `LD_LIBRARY_PATH` contains its folder.
fn link_blas(python: &Path) {
    // This function is called only on Linux, so the suffix is Linux's.
    const LIBRARY: &str = "libetkv_blas.so";
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    let mut command = cc::Build::new().opt_level(2).get_compiler().to_command();
    command.args(["-shared", "-fPIC", "-fvisibility=hidden", "-Wall", "-Werror"]);
    command.arg(format!("-Wl,-soname,{LIBRARY}.0"));
    command.args(["shim/blas.c", "-ldl", "-pthread"]);
    if let Some(openblas) = python_package(python, "scipy_openblas32") {
        command.arg(format!("-Wl,-rpath,{}", openblas.join("lib").display()));
    }
    let library = out.join(format!("{LIBRARY}.0"));
    let status = command.arg("-o").arg(&library).status().expect("the C compiler runs");
    assert!(status.success(), "{command:?}: {status}");
    let link = out.join(LIBRARY);
    let _ = std::fs::remove_file(&link);
    std::os::unix::fs::symlink(&library, &link).expect("OUT_DIR is writable");
    println!("cargo:rustc-link-search=native={}", out.display());
    println!("cargo:rustc-link-lib=dylib=etkv_blas");
    println!("cargo:blas={}", out.display());
}

fn link_mlx(mlx: &Path) {
    let lib = mlx.join("lib");
    println!("cargo:rustc-link-search=native={}", lib.display());
    println!("cargo:rustc-link-lib=dylib=mlx");
    let apple = env::var("CARGO_CFG_TARGET_VENDOR").as_deref() == Ok("apple");
    println!("cargo:rustc-link-lib=dylib={}", if apple { "c++" } else { "stdc++" });

    // For the tests of this package: dyld requires the library even if nothing of it is used.
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", lib.display());

    // Dependents read these as DEP_MLX_*. They must set the run path again, because cargo applies a build script's
    // linker arguments to its own package only.
    println!("cargo:root={}", mlx.display());
    println!("cargo:include={}", mlx.join("include").display());
    println!("cargo:lib={}", lib.display());
    println!("cargo:version={MLX_VERSION}");
    // GNU ld also resolves the libraries that libmlx depends on.
    let site = mlx.parent().unwrap_or(mlx);
    println!("cargo:rpath_link={}", site.join("mlx_cpu.libs").display());
}
