//! A Rust program that uses etkv exports none of etkv's C symbols.

use std::path::PathBuf;
use std::process::Command;

/// Returns the library of the example `embedded`, which `cargo test` builds with the tests.
fn library() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let name = format!("{}embedded{}", std::env::consts::DLL_PREFIX, std::env::consts::DLL_SUFFIX);
    let library = test.ancestors().nth(2).unwrap().join("examples").join(name);
    assert!(
        library.exists(),
        "{} is missing: build it with `cargo build --release -p etkv-tests --example embedded`",
        library.display()
    );
    library
}

#[test]
fn a_rust_library_exports_its_own_symbols_only() {
    let listed = Command::new("nm")
        .args(if cfg!(target_os = "macos") { ["-gU"] } else { ["-D"] })
        .args(if cfg!(target_os = "macos") { &[][..] } else { &["--defined-only"] })
        .arg(library())
        .output()
        .expect("nm runs");
    assert!(listed.status.success(), "{}", String::from_utf8_lossy(&listed.stderr));
    let listed = String::from_utf8(listed.stdout).unwrap();
    let symbols = listed.lines().filter_map(|line| line.split_whitespace().last());
    let foreign: Vec<&str> = symbols
        .clone()
        .filter(|name| name.contains("etkv") || name.contains("cxxbridge"))
        .collect();
    assert!(foreign.is_empty(), "{foreign:?}");
    assert!(symbols.into_iter().any(|name| name.trim_start_matches('_') == "embedded_capacity"));
}
