//! Frames: a message as bytes on a stream.
//!
//! | bytes of the header | content |
//! |---|---|
//! | 0..8 | `verlwire` |
//! | 8..10, 10..12 | version of the protocol, [`Kind`] |
//! | 12..16 | zero |
//! | 16..24, 24..32 | incarnation of the worker, number of the request |
//! | 32..36, 36..40 | bytes of the head, number of parts |
//! | 40..48 | bytes of the body |
//! | 48..56 | xxh3 of the bytes before |
//! | 56..64 | zero |
//!
//! The body is the head, the lengths of the parts (8 bytes each) and the parts, each starting at a multiple of 64 bytes. All
//! numbers are little-endian.

use std::io::{self, IoSlice, Read, Write};
use std::time::Duration;

use arrow_buffer::Buffer;
use xxhash_rust::xxh3::xxh3_64;

use crate::message::{ALIGNMENT, AlignedBytes, Message};

/// Version of the protocol: changes whenever a frame or a message of an older version would be misread.
pub const PROTOCOL: u16 = 1;
/// Bytes of a header.
pub const HEADER_BYTES: usize = 64;
const MAGIC: [u8; 8] = *b"verlwire";
/// Bytes that are reserved before any byte of a body has arrived; the system provides them as they are written.
const FIRST_BYTES: usize = 64 << 20;
/// By how much more is reserved when these have arrived.
const GROWTH: usize = 8;
static PADDING: [u8; ALIGNMENT] = [0; ALIGNMENT];

/// What a frame is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Kind {
    /// A worker introduces itself.
    Hello = 1,
    /// The run accepts it.
    Welcome = 2,
    /// The other side is not what was expected; the head is the reason as a text.
    Refused = 3,
    /// The sender is alive.
    Heartbeat = 4,
    /// A request to the worker; requests are processed one after the other.
    Request = 5,
    /// The end of a request.
    Reply = 6,
    /// Something that happened during a request.
    Event = 7,
    /// For the worker, to be processed at once, even during a request.
    Signal = 8,
    /// A request panicked, after which the worker ends; the head is the message as a text.
    Panicked = 9,
}

impl Kind {
    const ALL: [Kind; 9] = [
        Kind::Hello,
        Kind::Welcome,
        Kind::Refused,
        Kind::Heartbeat,
        Kind::Request,
        Kind::Reply,
        Kind::Event,
        Kind::Signal,
        Kind::Panicked,
    ];
}

/// What a stream contains instead of a frame.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The stream ended between two frames.
    #[error("it closed the connection")]
    Closed,
    /// The stream ended within a frame.
    #[error("it closed the connection within a message, after {got} of {of} bytes")]
    Truncated {
        /// Bytes that arrived.
        got: u64,
        /// Bytes that were announced.
        of: u64,
    },
    /// Nothing arrived for too long.
    #[error("it sent nothing for {:.1} s, not even a heartbeat; its process is stopped, or the machine is overloaded", .0.as_secs_f64())]
    Silent(Duration),
    /// Not verl's protocol.
    #[error(
        "it does not speak the protocol of verl's workers: a message starts with {0:?} instead of \"verlwire\""
    )]
    Garbage(String),
    /// Another version of the protocol.
    #[error(
        "it speaks version {0} of the worker protocol, and this program version {PROTOCOL}; use the same build for both"
    )]
    Protocol(u16),
    /// A header whose checksum is wrong.
    #[error("the header of a message is damaged: its checksum is wrong")]
    Checksum,
    /// A header with impossible content.
    #[error("the header of a message is invalid: {0}")]
    Invalid(String),
    /// A body that is larger than allowed.
    #[error("a message has {bytes} bytes, more than the limit of {limit}")]
    TooLarge {
        /// Its bytes.
        bytes: u64,
        /// The limit.
        limit: u64,
    },
    /// An error of the system.
    #[error("the connection failed: {0}")]
    Io(#[from] io::Error),
}

/// The header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// What the frame is for.
    pub kind: Kind,
    /// Incarnation of the worker that the connection belongs to.
    pub incarnation: u64,
    /// Number of the request that it belongs to; 0 if it belongs to none.
    pub request: u64,
    head_bytes: u32,
    parts: u32,
    body_bytes: u64,
}

impl Header {
    fn of(
        kind: Kind,
        incarnation: u64,
        request: u64,
        message: &Message,
    ) -> Result<Header, FrameError> {
        let (head_bytes, parts) = (message.head_bytes().len(), message.parts().len());
        let too_large = || FrameError::TooLarge {
            bytes: (head_bytes + parts) as u64,
            limit: u32::MAX.into(),
        };
        let table = padded(head_bytes + 8 * parts);
        let bodies = message.parts().iter().map(|part| padded(part.len()));
        Ok(Header {
            kind,
            incarnation,
            request,
            head_bytes: u32::try_from(head_bytes).map_err(|_| too_large())?,
            parts: u32::try_from(parts).map_err(|_| too_large())?,
            body_bytes: (table + bodies.sum::<usize>()) as u64,
        })
    }

    /// The bytes of the header.
    pub fn to_bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&PROTOCOL.to_le_bytes());
        bytes[10..12].copy_from_slice(&(self.kind as u16).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.incarnation.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.request.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.head_bytes.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.parts.to_le_bytes());
        bytes[40..48].copy_from_slice(&self.body_bytes.to_le_bytes());
        let sum = xxh3_64(&bytes[..48]);
        bytes[48..56].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// The header in `bytes`, whose body may have up to `limit` bytes.
    ///
    /// # Errors
    /// Bytes that are not a header, or a header that is impossible or not allowed.
    pub fn from_bytes(bytes: &[u8; HEADER_BYTES], limit: u64) -> Result<Header, FrameError> {
        if bytes[..8] != MAGIC {
            let start = bytes[..16].escape_ascii().to_string();
            return Err(FrameError::Garbage(start));
        }
        if u64_at(bytes, 48) != xxh3_64(&bytes[..48]) {
            return Err(FrameError::Checksum);
        }
        let protocol = u64_at(bytes, 8) as u16;
        if protocol != PROTOCOL {
            return Err(FrameError::Protocol(protocol));
        }
        let number = (u64_at(bytes, 8) >> 16) as u16;
        let kind = Kind::ALL.into_iter().find(|kind| *kind as u16 == number);
        let header = Header {
            kind: kind.ok_or_else(|| FrameError::Invalid(format!("kind {number} is unknown")))?,
            incarnation: u64_at(bytes, 16),
            request: u64_at(bytes, 24),
            head_bytes: u64_at(bytes, 32) as u32,
            parts: (u64_at(bytes, 32) >> 32) as u32,
            body_bytes: u64_at(bytes, 40),
        };
        if header.body_bytes > limit {
            return Err(FrameError::TooLarge {
                bytes: header.body_bytes,
                limit,
            });
        }
        let table = u64::from(header.head_bytes) + 8 * u64::from(header.parts);
        if table > header.body_bytes {
            return Err(FrameError::Invalid(format!(
                "a head and a table of {table} bytes do not fit into a body of {}",
                header.body_bytes
            )));
        }
        Ok(header)
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(number)
}

fn padded(bytes: usize) -> usize {
    bytes.next_multiple_of(ALIGNMENT)
}

/// A received frame.
#[derive(Debug)]
pub struct Frame {
    /// Its header.
    pub header: Header,
    /// Its body.
    pub message: Message,
}

/// Writes one frame. `blocked` is called whenever the stream takes no bytes for the length of its timeout.
///
/// # Errors
/// A message that is too large, an error of the stream, or that of `blocked`.
pub fn write(
    stream: &mut impl Write,
    (kind, incarnation, request): (Kind, u64, u64),
    message: &Message,
    mut blocked: impl FnMut() -> Result<(), FrameError>,
) -> Result<(), FrameError> {
    let header = Header::of(kind, incarnation, request, message)?.to_bytes();
    let lengths = message.parts().iter().map(|part| part.len() as u64);
    let mut table = message.head_bytes().to_vec();
    table.extend(lengths.flat_map(u64::to_le_bytes));
    table.resize(padded(table.len()), 0);
    let mut slices = vec![IoSlice::new(&header), IoSlice::new(&table)];
    for part in message.parts() {
        slices.extend(part.buffers().iter().map(|buffer| IoSlice::new(buffer)));
        let padding = padded(part.len()) - part.len();
        slices.push(IoSlice::new(&PADDING[..padding]));
    }
    slices.retain(|slice| !slice.is_empty());
    let mut rest = slices.as_mut_slice();
    while !rest.is_empty() {
        match stream.write_vectored(rest) {
            Ok(0) => return Err(FrameError::Io(io::ErrorKind::WriteZero.into())),
            Ok(written) => IoSlice::advance_slices(&mut rest, written),
            Err(error) if is_timeout(&error) => blocked()?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Whether an error says that a timeout of a stream passed.
fn is_timeout(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut
    )
}

/// Reads frames from a stream.
#[derive(Debug)]
pub struct FrameReader<R> {
    stream: R,
    limit: u64,
    tick: Duration,
    deadline: Duration,
    silence: Duration,
}

impl<R: Read> FrameReader<R> {
    /// Reads frames of up to `limit` bytes from `stream`, whose timeout for reading is `tick`, until nothing arrives for
    /// `deadline`.
    pub fn new(stream: R, limit: u64, tick: Duration, deadline: Duration) -> Self {
        FrameReader {
            stream,
            limit,
            tick,
            deadline,
            silence: Duration::ZERO,
        }
    }

    /// Changes the largest number of bytes of a body.
    pub fn set_limit(&mut self, limit: u64) {
        self.limit = limit;
    }

    /// Changes how long nothing may arrive.
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    /// Waits for the next frame.
    ///
    /// # Errors
    /// The end of the stream, silence, or bytes that are not a frame; the stream cannot be used further.
    pub fn read(&mut self) -> Result<Frame, FrameError> {
        // The time that its caller took is not silence of the other side.
        self.silence = Duration::ZERO;
        let mut start = AlignedBytes::new(HEADER_BYTES);
        match self.fill(&mut start, HEADER_BYTES) {
            Err(FrameError::Truncated { got: 0, .. }) => return Err(FrameError::Closed),
            result => result?,
        }
        let mut bytes = [0; HEADER_BYTES];
        bytes.copy_from_slice(&start.finish());
        let header = Header::from_bytes(&bytes, self.limit)?;
        let size = usize::try_from(header.body_bytes).map_err(|_| FrameError::TooLarge {
            bytes: header.body_bytes,
            limit: usize::MAX as u64,
        })?;
        // Memory grows with what has arrived, not with what was announced.
        let mut body = AlignedBytes::new(size.min(FIRST_BYTES));
        let mut wanted = size.min(FIRST_BYTES);
        loop {
            self.fill(&mut body, wanted).map_err(|error| match error {
                FrameError::Truncated { got, .. } => FrameError::Truncated {
                    got: got + HEADER_BYTES as u64,
                    of: header.body_bytes + HEADER_BYTES as u64,
                },
                other => other,
            })?;
            if wanted == size {
                break;
            }
            wanted = size.min(wanted.saturating_mul(GROWTH));
            body = body.grown(wanted);
        }
        let message = split(&header, body.finish())?;
        Ok(Frame { header, message })
    }

    /// Reads until `into` has `wanted` bytes.
    fn fill(&mut self, into: &mut AlignedBytes, wanted: usize) -> Result<(), FrameError> {
        while into.len() < wanted {
            let before = into.len();
            let mut rest = (&mut self.stream).take((wanted - before) as u64);
            let result = rest.read_to_end(&mut into.bytes);
            if into.len() > before {
                self.silence = Duration::ZERO;
            }
            match result {
                Ok(_) if into.len() < wanted => {
                    return Err(FrameError::Truncated {
                        got: into.len() as u64,
                        of: wanted as u64,
                    });
                }
                Ok(_) => {}
                Err(error) if is_timeout(&error) => {
                    // One tick, however long this process was itself stopped.
                    self.silence += self.tick;
                    if self.silence >= self.deadline {
                        return Err(FrameError::Silent(self.deadline));
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The other side ended without reading everything.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return Err(match into.len() {
                        0 => FrameError::Closed,
                        got => FrameError::Truncated {
                            got: got as u64,
                            of: wanted as u64,
                        },
                    });
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Takes a body apart.
fn split(header: &Header, body: Buffer) -> Result<Message, FrameError> {
    let invalid = |reason: &str| FrameError::Invalid(reason.to_owned());
    let head_bytes = header.head_bytes as usize;
    let head = body[..head_bytes].to_vec();
    let mut at = padded(head_bytes + 8 * header.parts as usize);
    // The table fits into the body, so the parts that it lists are not more than the body has bytes.
    let mut parts = Vec::with_capacity(header.parts as usize);
    for part in 0..header.parts as usize {
        let len = u64_at(&body, head_bytes + 8 * part);
        let end = usize::try_from(len)
            .ok()
            .and_then(|len| at.checked_add(len));
        let end = end.filter(|end| *end <= body.len());
        let end = end.ok_or_else(|| invalid("a part passes the end of the body"))?;
        parts.push(body.slice_with_length(at, end - at));
        at = padded(end);
    }
    if at != body.len() {
        return Err(invalid("the parts are shorter than the body"));
    }
    Ok(Message::from_bytes(head, parts))
}

#[cfg(test)]
mod tests;
