//! A library that uses etkv from Rust, and exports one C symbol itself.

/// Creates a cache, and returns its capacity.
#[no_mangle]
pub extern "C" fn embedded_capacity() -> i32 {
    let config = etkv::CacheConfig::uniform(1, 1, 4, 8);
    let session = etkv::Session::new(etkv::builders(), etkv::MLX_BACKEND, "tree", config);
    let found = session.and_then(|session| Ok(session.cache().lock()?.capacity()));
    // Links the interpreter of programs as well.
    let checked = etkv_mlx_program::Program::check(&[]);
    found.map_or(-1, |capacity| capacity + i32::from(checked.is_ok()))
}
