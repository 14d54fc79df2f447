//! Generates the reader of MLX programs' payloads, from the schema of the installed ExecuTorch and the nodes that
//! etkv adds.

// A build script reports errors by panicking.
#![allow(clippy::expect_used, clippy::panic, clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    link_mlx();
    make_reader();
}

/// Passes on the location of MLX from `mlx-sys`, because cargo applies a build script's linker arguments only to the
/// script's package.
fn link_mlx() {
    let of_mlx = |name: &str| std::env::var(format!("DEP_MLX_{name}")).unwrap_or_default();
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", of_mlx("LIB"));
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo:rustc-link-arg=-Wl,-rpath-link,{}", of_mlx("RPATH_LINK"));
    }
}

/// Generates the reader of a delegate's payload in the format of the installed ExecuTorch.
fn make_reader() {
    let python = pip_packages::python();
    let executorch = pip_packages::package(&python, "executorch").unwrap_or_else(|| {
        panic!(
            "no ExecuTorch found: `{} -c 'import executorch'` fails; run `make setup`",
            python.display()
        )
    });
    let schema = executorch.join("backends/mlx/serialization/schema.fbs");
    let flatc = executorch.join("data/bin/flatc");
    println!("cargo:rerun-if-changed={}", schema.display());
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it"));
    let nodes = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python/etkv/mlx_nodes.fbs");
    println!("cargo:rerun-if-changed={}", nodes.display());
    let read = |path: &Path| {
        std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let schema = {
        let joined = with_nodes(&read(&schema), &read(&nodes));
        let path = out.join("schema.fbs");
        std::fs::write(&path, joined).expect("the build folder can be written");
        path
    };
    let status = Command::new(&flatc)
        .args(["--rust", "-o"])
        .args([out.as_path(), schema.as_path()])
        .status()
        .unwrap_or_else(|error| panic!("{} does not run: {error}", flatc.display()));
    assert!(status.success(), "{} cannot read {}", flatc.display(), schema.display());
}

/// Returns a schema with the tables of `nodes` added. The members of the union of `nodes` follow those of the
/// schema's union.
fn with_nodes(schema: &str, nodes: &str) -> String {
    const UNION: &str = "union OpNode {";
    let (tables, members) = nodes.split_once(UNION).expect("the nodes have a union");
    let members = members.split_once('}').expect("the union ends").0;
    let (before, union) = schema.split_once(UNION).expect("the schema has a union of nodes");
    let (of_schema, after) = union.split_once('}').expect("the union ends");
    format!("{before}{tables}{UNION}{of_schema}, {members}}}{after}")
}
