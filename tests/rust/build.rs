//! Sets the run path of the tests to the folder of MLX's library.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    #[cfg(feature = "mlx")]
    link_mlx();
}

#[cfg(feature = "mlx")]
fn link_mlx() {
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
