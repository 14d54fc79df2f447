//! Refuses a `tokenizer.json` whose steps could make a text too long.
//!
//! `python/etkv/_pipeline.py` has the same rule. A step may write two characters for each one that it reads, and so
//! double a text. Forty such steps exhaust the memory of a process. So the maximum growth of a text is computed before
//! a file is loaded.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

/// The maximum growth factor of a text in one part of a tokenizer. Published tokenizers stay below 200.
const MAX: f64 = 1024.0;

/// The names of the fields in which a sequence lists its steps.
const STEPS: [&str; 4] = ["normalizers", "pretokenizers", "processors", "decoders"];

/// The parts of a `tokenizer.json` that have steps.
#[derive(Deserialize)]
struct Parts {
    normalizer: Option<Value>,
    pre_tokenizer: Option<Value>,
    post_processor: Option<Value>,
    decoder: Option<Value>,
}

/// Returns an error if a tokenizer could make texts too long. Accepts a file that cannot be read, because loading it
/// reports the error.
pub fn check(path: &Path) -> Result<(), String> {
    let parts = File::open(path).ok().map(BufReader::new);
    let Some(parts) = parts.and_then(|file| serde_json::from_reader::<_, Parts>(file).ok()) else {
        return Ok(());
    };
    let named = [
        ("normalizer", parts.normalizer),
        ("pre_tokenizer", parts.pre_tokenizer),
        ("post_processor", parts.post_processor),
        ("decoder", parts.decoder),
    ];
    for (name, part) in named {
        let growth = growth(&part.unwrap_or_default());
        if growth > MAX {
            return Err(format!(
                "its {name} makes a text up to {growth:.0} times as long, the maximum is {MAX}"
            ));
        }
    }
    Ok(())
}

/// Returns the largest ratio of the bytes that a step writes to the bytes that it reads.
fn growth(step: &Value) -> f64 {
    let inner = STEPS.iter().filter_map(|name| step[*name].as_array()).flatten();
    inner.map(growth).product::<f64>().min(1e300) * own_growth(step)
}

fn own_growth(step: &Value) -> f64 {
    let bytes = |name: &str| step[name].as_str().map_or(0.0, |text| text.len() as f64);
    match step["type"].as_str() {
        Some("Replace") => {
            let exact = step["pattern"]["String"].as_str().map_or(0.0, |text| text.len() as f64);
            // A regular expression may match a single character, or the empty text before each character.
            match exact > 0.0 {
                true => (bytes("content") / exact).max(1.0),
                false => 1.0 + bytes("content"),
            }
        }
        Some("Prepend") => 1.0 + bytes("prepend"),
        Some("Metaspace") => 1.0 + bytes("replacement"),
        // These steps write a space, or the text of a special token, between tokens.
        Some("WordPiece" | "BPEDecoder" | "CTC") => {
            let written = ["prefix", "suffix", "pad_token", "word_delimiter_token"];
            1.0 + written.into_iter().map(bytes).fold(0.0, f64::max)
        }
        Some("Precompiled") => step["precompiled_charsmap"].as_str().map_or(1.0, longest),
        Some("TemplateProcessing") => {
            let pieces = step["single"].as_array().into_iter().flatten();
            pieces.filter(|piece| piece.get("Sequence").is_some()).count().max(1) as f64
        }
        Some("ByteLevel") => 2.0,
        Some("BertNormalizer" | "Lowercase") => 3.0,
        _ => 1.0,
    }
}

/// Returns the bytes of the longest replacement text in a base64 map of characters. The texts are stored after its
/// trie.
fn longest(charsmap: &str) -> f64 {
    let data = decoded(charsmap);
    let (Some(length), rest) = (data.first_chunk::<4>(), data.get(4..).unwrap_or_default()) else {
        return 1.0;
    };
    let written = rest.get(u32::from_le_bytes(*length) as usize..).unwrap_or_default();
    written.split(|&byte| byte == 0).map(<[u8]>::len).max().unwrap_or(1).max(1) as f64
}

/// Decodes base64, and stops at the first byte that is not base64.
fn decoded(text: &str) -> Vec<u8> {
    let (mut bits, mut n_bits, mut bytes) = (0u32, 0, Vec::new());
    for byte in text.bytes() {
        let digit = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => break,
        };
        bits = bits << 6 | u32::from(digit);
        n_bits += 6;
        if n_bits >= 8 {
            n_bits -= 8;
            bytes.push((bits >> n_bits) as u8);
            bits &= (1 << n_bits) - 1;
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn doubling(times: usize) -> Value {
        let step = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aa"});
        json!({"type": "Sequence", "normalizers": vec![step; times]})
    }

    #[test]
    fn growth_multiplies() {
        assert_eq!(growth(&doubling(8)), 256.0);
        let nested = json!({"type": "Sequence", "normalizers": [doubling(8), doubling(3)]});
        assert_eq!(growth(&nested), 2048.0);
        let any = json!({"type": "Replace", "pattern": {"Regex": "x*"}, "content": "abc"});
        assert_eq!(growth(&any), 4.0);
        let piece = json!({"Sequence": {"id": "A", "type_id": 0}});
        let thrice = json!({"type": "TemplateProcessing", "single": [piece, piece, piece]});
        assert_eq!(growth(&json!({"type": "Sequence", "processors": [thrice, thrice]})), 9.0);
        assert_eq!(growth(&Value::Null), 1.0);
    }

    #[test]
    fn a_map_of_characters_writes_its_longest_text() {
        // A trie of 4 bytes, then "ab", "abcde" and "c".
        assert_eq!(decoded("BAAAAAAAAABhYgBhYmNkZQBjAA=="), b"\x04\0\0\0\0\0\0\0ab\0abcde\0c\0");
        assert_eq!(longest("BAAAAAAAAABhYgBhYmNkZQBjAA=="), 5.0);
        assert_eq!(longest("!"), 1.0);
    }

    #[test]
    fn a_file_that_grows_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        let write = |times| {
            let file = json!({"normalizer": doubling(times), "model": {"type": "BPE"}});
            std::fs::write(&path, file.to_string()).unwrap();
        };
        write(10);
        check(&path).unwrap();
        write(40);
        let told = check(&path).unwrap_err();
        assert_eq!(
            told,
            "its normalizer makes a text up to 1099511627776 times as long, the maximum is 1024"
        );
        std::fs::write(&path, "no JSON").unwrap();
        check(&path).unwrap();
    }
}
