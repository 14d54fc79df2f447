//! Gives the library a name of its own, so that what links it by path finds it
//! by run path.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let name = match std::env::var("CARGO_CFG_TARGET_OS").as_deref() {
        Ok("macos") => "-Wl,-install_name,@rpath/libetkv_text.dylib",
        _ => "-Wl,-soname,libetkv_text.so",
    };
    println!("cargo:rustc-cdylib-link-arg={name}");
}
