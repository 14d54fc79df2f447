//! Generates the C++ interface of `src/bridge.rs`. The header is written to `<target>/cxxbridge`, where CMake finds
//! it.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=src/bridge.rs");
    cxx_build::bridge("src/bridge.rs").std("c++17").compile("etkv_tokenizer_bridge");
}
