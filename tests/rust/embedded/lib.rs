//! A library that uses etkv from Rust, and exports one C symbol of its own.

/// Makes a cache, and tells how many positions it holds.
#[no_mangle]
pub extern "C" fn embedded_capacity() -> i32 {
    let config = etkv::CacheConfig::uniform(1, 1, 4, 8);
    let session = etkv::Session::new(etkv::builders(), etkv::MLX_BACKEND, "tree", config);
    let found = session.and_then(|session| Ok(session.cache().lock()?.capacity()));
    // So that the interpreter of programs is linked as well.
    let checked = etkv::program::Program::check(&[]);
    found.map_or(-1, |capacity| capacity + i32::from(checked.is_ok()))
}
