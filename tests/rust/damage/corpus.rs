//! The programs of the campaign, in the format of `tests/upstream_ops/payloads.py`.

use std::path::Path;

const MARK: &[u8] = b"etkv-damage-4\n";

/// The offset of a number in a payload.
#[derive(Clone, Copy)]
pub struct Site {
    pub at: usize,
    pub kind: Kind,
    /// Whether the number is part of an instruction.
    pub inside: bool,
}

/// The meaning of a number of a payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Byte,
    Int32,
    Uint32,
    Int64,
    Float,
    Double,
    /// The index of a tensor or of a value.
    Slot,
    /// The length of a list or of a text.
    Length,
    /// The offset of a table, a list or a text.
    Offset,
    /// The offset of a field in its table, or 0 if the field is absent.
    Field,
    /// The type of an operation.
    Type,
    /// The first byte of a text.
    Text,
}

const KINDS: [Kind; 12] = [
    Kind::Byte,
    Kind::Int32,
    Kind::Uint32,
    Kind::Int64,
    Kind::Float,
    Kind::Double,
    Kind::Slot,
    Kind::Length,
    Kind::Offset,
    Kind::Field,
    Kind::Type,
    Kind::Text,
];

/// A tensor that a host passes to a program.
#[derive(Clone)]
pub struct Tensor {
    pub scalar_type: i8,
    pub shape: Vec<i32>,
    pub bytes: Vec<u8>,
}

/// An exported program.
#[derive(Clone)]
pub struct ExportedProgram {
    pub name: String,
    /// `capacity,n_layers,n_kv_heads,head_dim[,dtype]`, or empty if there is no cache.
    pub cache: String,
    pub ops: Vec<String>,
    pub payload: Vec<u8>,
    pub sites: Vec<Site>,
    pub constants: Vec<(String, Vec<u8>)>,
    pub inputs: Vec<Tensor>,
    pub outputs: Vec<i8>,
}

pub fn read(path: &Path) -> Vec<ExportedProgram> {
    let data = std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut reader = Reader(&data);
    assert_eq!(reader.take(MARK.len()), MARK, "{} is of another version", path.display());
    reader.text();
    reader.list(|reader| ExportedProgram {
        name: reader.text(),
        cache: reader.text(),
        ops: reader.list(Reader::text),
        payload: reader.bytes(),
        sites: reader.list(|reader| Site {
            at: reader.number() as usize,
            kind: KINDS[usize::from(reader.byte())],
            inside: reader.byte() != 0,
        }),
        constants: reader.list(|reader| (reader.text(), reader.bytes())),
        inputs: reader.list(|reader| Tensor {
            scalar_type: reader.byte() as i8,
            shape: (0..reader.byte()).map(|_| reader.number() as i32).collect(),
            bytes: reader.bytes(),
        }),
        outputs: reader.list(|reader| reader.byte() as i8),
    })
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(n);
        self.0 = rest;
        taken
    }

    fn byte(&mut self) -> u8 {
        self.take(1)[0]
    }

    fn number(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().unwrap())
    }

    fn bytes(&mut self) -> Vec<u8> {
        let n = self.number() as usize;
        self.take(n).to_vec()
    }

    fn text(&mut self) -> String {
        String::from_utf8(self.bytes()).unwrap()
    }

    fn list<T>(&mut self, mut one: impl FnMut(&mut Self) -> T) -> Vec<T> {
        (0..self.number()).map(|_| one(self)).collect()
    }
}
