//! Checks `general.alignment` before `candle_core` reads the file and divides by it.

use std::fs::File;
use std::io::{self, BufReader, ErrorKind, Read};

/// Deepest nesting of arrays; `candle_core` refuses deeper ones too.
const MAX_DEPTH: usize = 64;

/// Whether the header of a file sets the alignment to 0. Truncated or invalid headers are left to the reader, which
/// reports the error.
pub(super) fn is_zero(reader: &mut BufReader<File>) -> bool {
    Header::open(reader)
        .and_then(|mut header| header.has_zero_alignment())
        .unwrap_or(false)
}

struct Header<'a> {
    reader: &'a mut BufReader<File>,
    version: u32,
}

impl<'a> Header<'a> {
    fn open(reader: &'a mut BufReader<File>) -> io::Result<Self> {
        let mut header = Header { reader, version: 0 };
        let _magic: [u8; 4] = header.bytes()?;
        header.version = header.kind()?;
        Ok(header)
    }

    fn has_zero_alignment(&mut self) -> io::Result<bool> {
        let _tensors = self.length()?;
        for _ in 0..self.length()? {
            let mut key = Vec::new();
            let length = self.length()?;
            self.reader.by_ref().take(length).read_to_end(&mut key)?;
            let kind = self.kind()?;
            // Trailing zeros of a name are ignored.
            while key.pop_if(|byte| *byte == 0).is_some() {}
            let zero = match (key.as_slice(), kind) {
                (b"general.alignment", 0 | 1) => self.bytes()? == [0],
                (b"general.alignment", 2 | 3) => self.bytes()? == [0; 2],
                (b"general.alignment", 4 | 5) => self.bytes()? == [0; 4],
                _ => {
                    self.skip(kind, 0)?;
                    false
                }
            };
            if zero {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn bytes<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.reader.read_exact(&mut bytes)?;
        Ok(bytes)
    }

    fn kind(&mut self) -> io::Result<u32> {
        self.bytes().map(u32::from_le_bytes)
    }

    /// A count of items or bytes.
    fn length(&mut self) -> io::Result<u64> {
        match self.version {
            1 => self.kind().map(u64::from),
            _ => self.bytes().map(u64::from_le_bytes),
        }
    }

    /// Skips a value of type `kind`.
    fn skip(&mut self, kind: u32, depth: usize) -> io::Result<()> {
        match kind {
            8 => {
                let length = self.length()?;
                self.pass(1, length)
            }
            9 if depth < MAX_DEPTH => {
                let (kind, length) = (self.kind()?, self.length()?);
                match width(kind) {
                    Some(width) => self.pass(width, length),
                    None => (0..length).try_for_each(|_| self.skip(kind, depth + 1)),
                }
            }
            kind => match width(kind) {
                Some(width) => self.pass(width, 1),
                None => Err(ErrorKind::InvalidData.into()),
            },
        }
    }

    fn pass(&mut self, width: u64, length: u64) -> io::Result<()> {
        let bytes = width.checked_mul(length);
        let bytes = bytes.and_then(|bytes| i64::try_from(bytes).ok());
        self.reader
            .seek_relative(bytes.ok_or(ErrorKind::InvalidData)?)
    }
}

/// Bytes of a value of fixed width; `None` for other types.
fn width(kind: u32) -> Option<u64> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}
