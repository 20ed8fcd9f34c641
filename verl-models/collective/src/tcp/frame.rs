//! Messages as bytes: a header of fixed size with its checksum, then the payload with its own.

use std::io::{self, ErrorKind, Read};
use std::sync::Arc;

use crate::transport::{Message, Payload};
use crate::{Data, Operation};

/// First bytes of a frame, with the version of the format.
const MAGIC: [u8; 4] = *b"vcf1";
/// Bytes of the header: magic, operation, type, two of padding; epoch, sequence, bytes of the payload; checksums of
/// payload and header.
const HEADER: usize = 48;
/// The operation of an abort; messages have those of [`OPERATIONS`].
const ABORT: u8 = 255;
/// Operations by their number in a frame.
const OPERATIONS: [Operation; 5] = [
    Operation::Join,
    Operation::ReduceScatter,
    Operation::AllGather,
    Operation::Broadcast,
    Operation::Barrier,
];

/// Types of payloads.
const EMPTY: u8 = 0;
const F32: u8 = 1;
const F64: u8 = 2;
const BYTES: u8 = 3;

/// What a connection carries.
#[derive(Debug)]
pub enum Frame {
    /// A message of an operation.
    Message(Message),
    /// The sender's group of this epoch was aborted.
    Abort {
        /// The epoch.
        epoch: u64,
    },
}

/// The bytes of a frame.
pub fn encode(frame: &Frame) -> Vec<u8> {
    let nothing = Payload::Empty;
    let (operation, epoch, sequence, payload) = match frame {
        Frame::Abort { epoch } => (ABORT, *epoch, 0, &nothing),
        Frame::Message(message) => {
            let number = OPERATIONS.iter().position(|own| *own == message.operation);
            let number = number.unwrap_or_default() as u8;
            (number, message.epoch, message.sequence, &message.payload)
        }
    };
    let mut bytes = vec![0; HEADER];
    let kind = put(payload, &mut bytes);
    let length = (bytes.len() - HEADER) as u64;
    let sum = checksum(&bytes[HEADER..]);
    bytes[..4].copy_from_slice(&MAGIC);
    (bytes[4], bytes[5]) = (operation, kind);
    for (place, number) in [epoch, sequence, length, sum].into_iter().enumerate() {
        let start = 8 + 8 * place;
        bytes[start..start + 8].copy_from_slice(&number.to_le_bytes());
    }
    let sum = checksum(&bytes[..HEADER - 8]);
    bytes[HEADER - 8..HEADER].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// Appends the numbers of a payload; returns their type.
fn put(payload: &Payload, bytes: &mut Vec<u8>) -> u8 {
    match payload {
        Payload::Empty => EMPTY,
        Payload::Part(data, part) => {
            let all = data.as_f32().unwrap_or_default();
            let part = all.get(part.clone()).unwrap_or_default();
            bytes.extend(part.iter().flat_map(|value| value.to_le_bytes()));
            F32
        }
        Payload::Whole(data) => match data.as_ref() {
            Data::F32(values) => {
                bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
                F32
            }
            Data::F64(values) => {
                bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
                F64
            }
            Data::Bytes(values) => {
                bytes.extend_from_slice(values);
                BYTES
            }
        },
    }
}

impl Frame {
    /// Reads the next frame.
    ///
    /// # Errors
    /// The connection ended, also in the middle of a frame; bytes that are not a frame or whose checksum is wrong.
    pub fn read(stream: &mut impl Read) -> io::Result<Frame> {
        let mut header = [0; HEADER];
        stream.read_exact(&mut header)?;
        let number = |place: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&header[8 + 8 * place..16 + 8 * place]);
            u64::from_le_bytes(bytes)
        };
        let [epoch, sequence, length, sum, of_header] = [0, 1, 2, 3, 4].map(number);
        if header[..4] != MAGIC || checksum(&header[..HEADER - 8]) != of_header {
            return Err(damaged("header"));
        }
        let mut bytes = Vec::new();
        // Reads as it arrives, so that memory is taken only for bytes that were sent.
        stream.take(length).read_to_end(&mut bytes)?;
        if bytes.len() as u64 != length {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        if checksum(&bytes) != sum {
            return Err(damaged("payload"));
        }
        let (operation, kind) = (header[4], header[5]);
        if operation == ABORT {
            return Ok(Frame::Abort { epoch });
        }
        let operation = OPERATIONS.get(usize::from(operation));
        Ok(Frame::Message(Message {
            epoch,
            sequence,
            operation: *operation.ok_or_else(|| damaged("operation"))?,
            payload: match kind {
                EMPTY => Payload::Empty,
                F32 => whole(Data::F32(numbers(&bytes, f32::from_le_bytes))),
                F64 => whole(Data::F64(numbers(&bytes, f64::from_le_bytes))),
                BYTES => whole(Data::Bytes(bytes)),
                _ => return Err(damaged("type")),
            },
        }))
    }
}

fn whole(data: Data) -> Payload {
    Payload::Whole(Arc::new(data))
}

fn numbers<T, const N: usize>(bytes: &[u8], of: impl Fn([u8; N]) -> T) -> Vec<T> {
    let (chunks, _) = bytes.as_chunks::<N>();
    chunks.iter().map(|chunk| of(*chunk)).collect()
}

fn damaged(what: &str) -> io::Error {
    io::Error::new(
        ErrorKind::InvalidData,
        format!("a frame with an invalid {what}"),
    )
}

/// A checksum against damage, not against an attacker: 64-bit words, multiplied and rotated in turn.
fn checksum(bytes: &[u8]) -> u64 {
    const FACTOR: u64 = 0x9E37_79B9_7F4A_7C15;
    let (words, rest) = bytes.as_chunks::<8>();
    let step = |sum: u64, word: u64| (sum ^ word).wrapping_mul(FACTOR).rotate_left(29);
    let start = step(bytes.len() as u64, FACTOR);
    let sum = words
        .iter()
        .fold(start, |sum, word| step(sum, u64::from_le_bytes(*word)));
    rest.iter()
        .fold(sum, |sum, byte| step(sum, u64::from(*byte) | 1 << 8))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message() -> Frame {
        Frame::Message(Message {
            epoch: 3,
            sequence: 7,
            operation: Operation::AllGather,
            payload: whole(Data::F64(vec![0.5, -0.0, f64::MAX])),
        })
    }

    #[test]
    fn a_frame_is_read_as_it_was_written() {
        let mut bytes = encode(&message());
        bytes.extend(encode(&Frame::Abort { epoch: 9 }));
        let mut stream = bytes.as_slice();
        let Ok(Frame::Message(found)) = Frame::read(&mut stream) else {
            panic!("not a message");
        };
        assert_eq!((found.epoch, found.sequence), (3, 7));
        assert_eq!(found.operation, Operation::AllGather);
        let Payload::Whole(data) = found.payload else {
            panic!("no data");
        };
        let bits = data.as_f64().unwrap().iter().map(|value| value.to_bits());
        assert!(bits.eq([0.5, -0.0, f64::MAX].map(f64::to_bits)));
        assert!(matches!(
            Frame::read(&mut stream),
            Ok(Frame::Abort { epoch: 9 })
        ));
        assert!(Frame::read(&mut stream).is_err());
    }

    #[test]
    fn every_damaged_byte_and_every_early_end_is_found() {
        let bytes = encode(&message());
        for place in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[place] ^= 0x10;
            assert!(
                Frame::read(&mut damaged.as_slice()).is_err(),
                "byte {place}"
            );
            assert!(Frame::read(&mut &bytes[..place]).is_err(), "end at {place}");
        }
    }
}
