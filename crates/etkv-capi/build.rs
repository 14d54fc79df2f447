//! Compiles the C++ half of the bridge to ExecuTorch's backends.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // Cargo applies a build script's linker arguments only to the script's package.
    if let Ok(mlx) = std::env::var("DEP_MLX_LIB") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{mlx}");
    }
    #[cfg(feature = "delegate")]
    bridge();
}

/// Writes the headers to `<target>/cxxbridge`, where CMake finds them.
#[cfg(feature = "delegate")]
fn bridge() {
    // The repository's root, which has `cpp/` and `include/`.
    let root = std::path::Path::new("../..");
    println!("cargo:rerun-if-changed=src/bridge.rs");
    for header in ["cpp/interpreter.hpp", "include/etkv"] {
        println!("cargo:rerun-if-changed={}", root.join(header).display());
    }
    cxx_build::bridge("src/bridge.rs")
        .include(root)
        .include(root.join("include"))
        .define("ETKV_BUILDING", None)
        .std("c++17")
        .compile("etkv_bridge");
}
