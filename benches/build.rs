//! Sets run paths, so that benchmarks load the MLX that they were built against.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let mlx = pip_packages::package(&pip_packages::python(), "mlx");
    if let Some(mlx) = mlx {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{}", mlx.join("lib").display());
        let linux = std::env::var("CARGO_CFG_TARGET_OS").as_deref() == Ok("linux");
        if let (true, Some(site)) = (linux, mlx.parent()) {
            let libraries = site.join("mlx_cpu.libs");
            println!("cargo:rustc-link-arg=-Wl,-rpath-link,{}", libraries.display());
        }
    }
}
