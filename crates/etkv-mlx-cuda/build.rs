//! Passes linker arguments of `mlx-sys` on: cargo applies the arguments of a build script only to the
//! script's package.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let of_mlx = |name: &str| std::env::var(format!("DEP_MLX_{name}")).unwrap_or_default();
    println!("cargo:rustc-link-arg=-Wl,-rpath,{}", of_mlx("LIB"));
    if std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux") {
        println!("cargo:rustc-link-arg=-Wl,-rpath-link,{}", of_mlx("RPATH_LINK"));
    }
}
