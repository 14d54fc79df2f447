use std::cell::RefCell;

use super::*;
use crate::step::plan::Element;
use crate::step::source::Source;
use crate::Error;
use etkv_core::KvFormat;

const FORMATS: [KvFormat; 6] = [
    KvFormat::Affine { bits: 4, group: 64 },
    KvFormat::Mxfp8,
    KvFormat::Mxfp4,
    KvFormat::Nvfp4,
    KvFormat::RowInt4,
    KvFormat::RowFp4,
];

/// Returns the compiler, or `None` if its library is missing.
fn found(capability: usize, folder: Option<&Path>) -> Option<Compiler> {
    let compiler = Compiler::for_capability(capability, folder);
    if let Err(error) = &compiler {
        eprintln!("skipped: {error}");
    }
    compiler.ok()
}

#[test]
fn all_kernels_compile_without_headers() {
    for capability in [80, 90, 100] {
        let Some(compiler) = found(capability, None) else {
            return;
        };
        for element in [Element::F16, Element::Bf16] {
            let attend = |dim, tiles: usize, masked| {
                let (row_warps, blocks) = [(4, 2), (1, 3), (2, 2)][tiles - 1];
                Source::Attend { element, dim, tiles, row_warps, blocks, masked }
            };
            let packed = |bits| Source::Packed { element, bits };
            let sources = [
                Source::Product(element),
                attend(64, 2, false),
                attend(64, 2, true),
                packed(4),
                packed(8),
                Source::Norm(element),
                Source::Many { element, depth: 9 },
                attend(128, 2, false),
                attend(256, 1, true),
            ];
            // Compiling all sources for all combinations would take a minute.
            let count = match (capability, element) {
                (90, _) => 9,
                (_, Element::Bf16) => 7,
                _ => 0,
            };
            for source in &sources[..count] {
                let cubin = compiler.compile(&source.text(capability)).unwrap();
                assert_eq!(&cubin[..4], b"\x7fELF", "{source:?}");
            }
        }
    }
}

#[test]
fn heads_are_placed_in_every_format() {
    let Some(compiler) = found(90, None) else {
        return;
    };
    let affine = |bits| Some(KvFormat::Affine { bits, group: 64 });
    let (keys, values) = (FORMATS, [affine(2), affine(3), affine(5), affine(6), affine(8), None]);
    for (n, (keys, values)) in keys.into_iter().zip(values).enumerate() {
        let element = if n % 2 == 0 { Element::F16 } else { Element::Bf16 };
        let source = Source::PlaceHeads { element, keys: Some(keys), values };
        let cubin = compiler.compile(&source.text(90)).unwrap();
        assert_eq!(&cubin[..4], b"\x7fELF", "{source:?}");
    }
}

#[test]
fn attention_reads_every_format() {
    let affine = |bits, group| Some(KvFormat::Affine { bits, group });
    let [a, b, c, d, e, f] = FORMATS.map(Some);
    let cases = [
        (64, 1, a, a),
        (128, 4, a, a),
        (128, 2, b, b),
        (64, 1, c, c),
        (128, 4, d, e),
        (64, 2, e, d),
        (128, 1, f, f),
        (256, 2, affine(8, 128), affine(8, 64)),
        (96, 4, affine(3, 32), affine(5, 32)),
        (64, 1, affine(6, 64), affine(2, 64)),
        (128, 2, None, a),
        (64, 1, b, None),
    ];
    for (capability, few) in [(90, false), (80, true), (100, true)] {
        let Some(compiler) = found(capability, None) else {
            return;
        };
        for (n, (dim, row_tiles, keys, values)) in cases.into_iter().enumerate() {
            if few && n > 5 {
                continue;
            }
            let element = if n % 2 == 0 { Element::Bf16 } else { Element::F16 };
            let (stages, masked) = (2 + n % 3, n % 4 < 2);
            let (row_warps, blocks) =
                [(1, 4), (1 + n % 2, 3), (1, 3), (1 + n % 2, 2)][row_tiles - 1];
            let source = Source::AttendPacked {
                element,
                dim,
                stages,
                row_tiles,
                row_warps,
                blocks,
                masked,
                keys,
                values,
            };
            let cubin = compiler.compile(&source.text(capability)).unwrap();
            assert_eq!(&cubin[..4], b"\x7fELF", "{source:?}");
        }
    }
}

#[test]
fn a_text_that_is_none_is_refused_with_the_log() {
    let Some(compiler) = found(90, None) else {
        return;
    };
    let Err(Error::Compiler(text)) = compiler.compile("int main(") else {
        panic!("compiled");
    };
    assert!(text.contains("etkv.cu"), "{text}");
}

#[test]
fn a_kept_kernel_is_loaded_and_a_bad_one_compiled_anew() {
    let folder = std::env::temp_dir().join(format!("etkv-cubins-{}", std::process::id()));
    let Some(compiler) = found(90, Some(&folder)) else {
        return;
    };
    let source = Source::Product(Element::F16);
    let path = folder.join(compiler.name(&source.text(90)));
    let text = source.text(90);
    let first = compiler.cubin(&text).unwrap();
    assert_eq!(read(&path).unwrap(), first);
    // A complete cubin that the driver refuses.
    write(&path, b"other").unwrap();
    let seen = RefCell::new(Vec::new());
    let load = |cubin: &[u8]| {
        seen.borrow_mut().push(cubin.to_vec());
        if cubin == b"other" {
            fail!(Compiler, "refused");
        }
        Ok(())
    };
    compiler.load(&text, load).unwrap();
    assert_eq!(*seen.borrow(), [b"other".to_vec(), first.clone()]);
    // A damaged cubin, and an empty one.
    for bytes in [&[1u8; 100][..], &[]] {
        fs::write(&path, bytes).unwrap();
        assert_eq!(compiler.cubin(&text).unwrap(), first);
        assert_eq!(read(&path).unwrap(), first);
    }
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1);
    fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn only_devices_that_overlap_get_the_instructions() {
    for source in [
        Source::Product(Element::F16),
        Source::Packed { element: Element::F16, bits: 4 },
        Source::Attend {
            element: Element::Bf16,
            dim: 64,
            tiles: 2,
            row_warps: 1,
            blocks: 3,
            masked: true,
        },
    ] {
        assert!(!source.text(80).contains("#define ETKV_OVERLAPS"));
        assert!(source.text(90).contains("#define ETKV_OVERLAPS"));
        assert!(!source.text(90).contains("#include"));
    }
}
