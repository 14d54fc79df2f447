//! The fingerprint of a program, which identifies the contents of its file.

use std::io::Read;
use std::path::Path;

use etkv_core::{Error, Result};

use crate::checksum::Sum;
use crate::header::refused;
use crate::read::opened;

/// The number of bytes of one read.
const CHUNK: usize = 1 << 20;

/// Returns `xxh3-` and 32 hexadecimal digits. Files with the same bytes have the same fingerprint.
///
/// # Errors
/// [`File`](etkv_core::Status::File) if the file cannot be read.
pub fn fingerprint(path: &Path) -> Result<String> {
    let unread = |error: std::io::Error| -> Error {
        refused(format_args!("cannot read {}: {error}", path.display())).caused_by(error)
    };
    let (mut file, _) =
        opened(path).map_err(|error| error.at(format_args!("cannot read {}", path.display())))?;
    let mut chunk = vec![0; CHUNK];
    let mut sum = Sum::new();
    loop {
        match file.read(&mut chunk) {
            Ok(0) => break,
            Ok(n) => sum.add(&chunk[..n]),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(unread(error)),
        }
    }
    Ok(format!("xxh3-{:032x}", u128::from_le_bytes(sum.take())))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use etkv_core::Status;

    #[test]
    fn files_of_the_same_bytes_have_one_fingerprint() {
        let of = |bytes: &[u8]| {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            file.write_all(bytes).unwrap();
            fingerprint(file.path()).unwrap()
        };
        // The test vector of XXH3 for empty input.
        assert_eq!(of(b""), "xxh3-99aa06d3014798d86001c324468d497f");
        let long: Vec<u8> = (0..CHUNK + 5).map(|at| at as u8).collect();
        assert_eq!(of(&long), of(&long));
        assert_ne!(of(&long), of(&long[1..]));
    }

    #[test]
    fn errors_name_unreadable_files() {
        let error = fingerprint(Path::new("/no/such/file")).unwrap_err();
        assert_eq!(error.status(), Status::File);
        assert!(error.message().starts_with("cannot read /no/such/file: "), "{error}");
    }
}
