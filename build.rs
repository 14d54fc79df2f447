//! Passes on the linker arguments of `mlx-sys`, because cargo applies those of a build script to its own package
//! only.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let of_mlx = |name: &str| std::env::var(format!("DEP_MLX_{name}")).unwrap_or_default();
    println!("cargo:rustc-env=ETKV_MLX_VERSION={}", of_mlx("VERSION"));
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", of_mlx("LIB"));
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo:rustc-link-arg=-Wl,-rpath-link,{}", of_mlx("RPATH_LINK"));
    }
}
