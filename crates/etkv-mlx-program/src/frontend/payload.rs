//! The payload of the delegate in a `.pte` file: a header and a flatbuffer.

use flatbuffers::VerifierOptions;

use crate::error::{fail, Error, Result, Status};
use crate::fb;

/// The size of the header in bytes. The header consists of 4 bytes of padding, the magic, and the offset and size of
/// the data that follows the flatbuffer.
const HEADER: usize = 24;
const MAGIC: &[u8] = b"MLX0";
/// The newest format that this build reads.
const MAX_VERSION: u32 = 1;

/// Verifies a payload and returns its program.
///
/// # Errors
/// [`Program`](Status::Program) for a payload that is damaged or foreign, and [`Version`](Status::Version)
/// for a payload of a newer format.
pub fn read(payload: &[u8]) -> Result<fb::MLXGraph<'_>> {
    if payload.len() < HEADER {
        fail!(Program, "the payload has {} bytes, its header alone has {HEADER}", payload.len());
    }
    if &payload[4..8] != MAGIC {
        fail!(Program, "expected a payload of the MLX delegate: its magic is not MLX0");
    }
    let number = |at: usize| {
        payload[at..at + 8].iter().rev().fold(0u64, |number, &byte| number << 8 | u64::from(byte))
    };
    let data = number(8);
    let end = match usize::try_from(data) {
        // Without data the flatbuffer extends to the end.
        Ok(0) => payload.len(),
        Ok(end) if end >= HEADER && end <= payload.len() => end,
        _ => fail!(
            Program,
            "the payload has {} bytes, but its header says that its data start at {data}",
            payload.len()
        ),
    };
    let flatbuffer = &payload[HEADER..end];
    let options = limits(flatbuffer.len());
    let graph =
        flatbuffers::root_with_opts::<fb::MLXGraph>(&options, flatbuffer).map_err(|error| {
            let words = error.to_string();
            let first = words.lines().next().unwrap_or_default();
            Error::new(Status::Program, format!("the payload is damaged: {first}")).caused_by(error)
        })?;
    check_version(graph.version())?;
    Ok(graph)
}

/// Returns the verifier's limits for a flatbuffer of at most `n_bytes`. The verifier counts bytes each time they are
/// referenced.
///
/// The exporter references every table, list and name once. A small payload could reference a list many times, and
/// cause any amount of work and memory. So the number of bytes read is bounded by the payload's size. A table has at
/// least 8 bytes. A byte of the exporter's payload counts at most 5 times: tables share lists of fields, and a list
/// counts once for each table.
fn limits(n_bytes: usize) -> VerifierOptions {
    VerifierOptions {
        max_depth: 64,
        max_tables: n_bytes / 4,
        max_apparent_size: n_bytes.saturating_mul(16).saturating_add(1 << 16),
        ..VerifierOptions::default()
    }
}

fn check_version(version: Option<&str>) -> Result<()> {
    match version.filter(|text| !text.is_empty()).map(str::parse::<u32>) {
        None => Ok(()),
        Some(Ok(number)) if number <= MAX_VERSION => Ok(()),
        Some(Ok(number)) => {
            fail!(Version, "the program has format {number}, this build reads formats of at most {MAX_VERSION}")
        }
        Some(Err(_)) => {
            fail!(Program, "the program's format `{}` is not a number", version.unwrap_or_default())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(payload: &[u8]) -> String {
        match read(payload) {
            Ok(_) => panic!("{payload:?} was read"),
            Err(error) => {
                assert_eq!(error.status(), Status::Program);
                error.to_string()
            }
        }
    }

    #[test]
    fn what_is_no_program_is_refused() {
        assert!(message(b"").contains("0 bytes"));
        assert!(message(&[0; 100]).contains("MLX0"));
        let mut payload = vec![0u8; 100];
        payload[4..8].copy_from_slice(MAGIC);
        assert!(message(&payload).contains("damaged"));
        payload[8..16].copy_from_slice(&1000u64.to_le_bytes());
        assert!(message(&payload).contains("start at 1000"));
        payload[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        assert!(message(&payload).contains("100 bytes"));
    }

    #[test]
    fn newer_formats_are_refused() {
        assert!(check_version(None).is_ok());
        assert!(check_version(Some("1")).is_ok());
        let error = check_version(Some("2")).unwrap_err();
        assert_eq!(error.status(), Status::Version);
        assert!(error.message().contains("format 2"));
        assert!(check_version(Some("x")).unwrap_err().message().contains("`x`"));
    }
}
