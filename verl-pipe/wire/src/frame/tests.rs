//! Frames are read as they were written, and nothing else is read as a frame.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;

const TICK: Duration = Duration::from_secs(1);

fn bytes_of(message: &Message) -> Vec<u8> {
    let mut bytes = Vec::new();
    let never = || -> Result<(), FrameError> { panic!("a vector does not block") };
    write(&mut bytes, (Kind::Request, 7, 9), message, never).expect("written");
    bytes
}

fn read(bytes: &[u8], limit: u64) -> Result<Frame, FrameError> {
    FrameReader::new(bytes, limit, TICK, 3 * TICK).read()
}

fn sample() -> Message {
    let mut message = Message::new(&("head", 1.5f64)).expect("a head");
    for part in [vec![1u8; 100], vec![], vec![2; 64]] {
        message.push_bytes(part);
    }
    message
}

fn parts(message: &Message) -> Vec<Vec<u8>> {
    let parts = message.parts().iter().cloned();
    parts.map(|part| part.into_buffer().to_vec()).collect()
}

#[test]
fn a_frame_arrives_as_it_was_sent_whatever_the_pieces() {
    let sent = sample();
    let bytes = bytes_of(&sent);
    assert_eq!(bytes.len() % ALIGNMENT, 0);
    for size in [1, 7, 64, 1000] {
        let pieces = bytes.chunks(size).map(|piece| Ok(piece.to_vec()));
        let frame = FrameReader::new(Pieces(pieces.collect()), 1 << 20, TICK, 3 * TICK).read();
        let frame = frame.expect("a frame");
        let header = frame.header;
        assert_eq!(
            (header.kind, header.incarnation, header.request),
            (Kind::Request, 7, 9)
        );
        assert_eq!(frame.message.head_bytes(), sent.head_bytes());
        assert_eq!(parts(&frame.message), parts(&sent));
        for part in frame.message.parts() {
            assert_eq!(part.buffers()[0].as_ptr() as usize % ALIGNMENT, 0);
        }
    }
}

#[test]
fn every_truncation_is_reported() {
    let bytes = bytes_of(&sample());
    assert!(matches!(read(&[], 1 << 20), Err(FrameError::Closed)));
    for len in 1..bytes.len() {
        let error = read(&bytes[..len], 1 << 20).expect_err("truncated");
        let FrameError::Truncated { got, of } = error else {
            panic!("{len}: {error}");
        };
        let announced = if len < HEADER_BYTES {
            HEADER_BYTES
        } else {
            bytes.len()
        };
        assert_eq!((got, of), (len as u64, announced as u64));
    }
}

#[test]
fn every_damaged_bit_of_a_header_is_reported() {
    let bytes = bytes_of(&sample());
    for bit in 0..56 * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        let error = read(&damaged, 1 << 20).expect_err("damaged");
        let expected = matches!(error, FrameError::Garbage(_)) == (bit < 64);
        assert!(
            expected && (bit < 64 || matches!(error, FrameError::Checksum)),
            "{bit}: {error}"
        );
    }
}

#[test]
fn what_is_not_a_frame_is_shown() {
    let garbage = b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: everything and some more\r\n\r\n";
    let error = read(garbage, 1 << 20).expect_err("garbage").to_string();
    assert!(error.contains("GET / HTTP/1.1"), "{error}");
    let mut other = bytes_of(&sample());
    other[8] = 2;
    let sum = xxh3_64(&other[..48]).to_le_bytes();
    other[48..56].copy_from_slice(&sum);
    let error = read(&other, 1 << 20)
        .expect_err("another protocol")
        .to_string();
    assert!(
        error.contains("version 2") && error.contains("same build"),
        "{error}"
    );
}

#[test]
fn a_claimed_size_is_refused_or_at_least_not_allocated() {
    let header = |body_bytes| Header {
        kind: Kind::Event,
        incarnation: 1,
        request: 1,
        head_bytes: 4,
        parts: 1,
        body_bytes,
    };
    let bytes = header(1 << 60).to_bytes();
    let error = read(&bytes, 1 << 20).expect_err("too large").to_string();
    assert_eq!(
        error,
        "a message has 1152921504606846976 bytes, more than the limit of 1048576"
    );
    // An allocation of this size would end the test.
    let mut bytes = bytes.to_vec();
    bytes.extend([0; 1000]);
    let error = read(&bytes, u64::MAX).expect_err("truncated");
    assert!(
        matches!(error, FrameError::Truncated { got: 1064, .. }),
        "{error}"
    );
    let error = read(&header(8).to_bytes(), 1 << 20).expect_err("impossible");
    assert!(matches!(error, FrameError::Invalid(_)), "{error}");
}

#[test]
fn a_body_that_does_not_match_its_table_is_invalid() {
    let bytes = bytes_of(&sample());
    let table = HEADER_BYTES + sample().head_bytes().len();
    for len in [0u64, 1, 63, 200, 1 << 40, u64::MAX] {
        let mut wrong = bytes.clone();
        wrong[table..table + 8].copy_from_slice(&len.to_le_bytes());
        let error = read(&wrong, 1 << 20).expect_err("invalid");
        assert!(matches!(error, FrameError::Invalid(_)), "{len}: {error}");
    }
}

/// A stream that returns these results.
struct Pieces(VecDeque<Result<Vec<u8>, io::ErrorKind>>);

impl Read for Pieces {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let Some(next) = self.0.pop_front() else {
            return Ok(0);
        };
        let mut piece = next.map_err(io::Error::from)?;
        let taken = piece.len().min(into.len());
        into[..taken].copy_from_slice(&piece[..taken]);
        let rest = piece.split_off(taken);
        if !rest.is_empty() {
            self.0.push_front(Ok(rest));
        }
        Ok(taken)
    }
}

#[test]
fn silence_counts_from_the_last_byte() {
    let bytes = bytes_of(&sample());
    let timeout = || Err(io::ErrorKind::WouldBlock);
    // Two silent ticks before each piece are within the deadline of three.
    let slow = bytes
        .chunks(40)
        .flat_map(|piece| [timeout(), timeout(), Ok(piece.to_vec())]);
    let frame = FrameReader::new(Pieces(slow.collect()), 1 << 20, TICK, 3 * TICK).read();
    assert_eq!(
        parts(&frame.expect("slow, not silent").message),
        parts(&sample())
    );
    let silent = [Ok(bytes[..80].to_vec()), timeout(), timeout(), timeout()];
    let error = FrameReader::new(Pieces(silent.into()), 1 << 20, TICK, 3 * TICK).read();
    let error = error.expect_err("silent");
    assert!(matches!(error, FrameError::Silent(_)), "{error}");
}

/// A stream that takes a few bytes, then nothing for a while, and so on.
struct Sluggish {
    taken: Vec<u8>,
    is_blocked: bool,
}

impl Write for Sluggish {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.is_blocked = !self.is_blocked;
        if self.is_blocked {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        self.taken.extend(&bytes[..bytes.len().min(13)]);
        Ok(bytes.len().min(13))
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_slow_reader_gets_the_same_bytes_and_a_stuck_one_ends_the_write() {
    let mut stream = Sluggish {
        taken: Vec::new(),
        is_blocked: false,
    };
    write(&mut stream, (Kind::Request, 7, 9), &sample(), || Ok(())).expect("written");
    assert_eq!(stream.taken, bytes_of(&sample()));
    let stop = || Err(FrameError::Silent(TICK));
    let error = write(&mut stream, (Kind::Request, 7, 9), &sample(), stop);
    assert!(matches!(error, Err(FrameError::Silent(_))));
}

proptest! {
    #[test]
    fn any_message_is_read_as_it_was_written(
        head in prop::collection::vec(any::<u8>(), 0..200),
        all in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..6),
    ) {
        let mut message = Message::new(&head).expect("a head");
        all.iter().for_each(|part| message.push_bytes(part.clone()));
        let frame = read(&bytes_of(&message), 1 << 20).expect("a frame");
        prop_assert_eq!(frame.message.head::<Vec<u8>>().expect("a head"), head);
        prop_assert_eq!(parts(&frame.message), all);
    }

    #[test]
    fn arbitrary_bytes_are_an_error(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(read(&bytes, 1 << 20).is_err());
    }

    #[test]
    fn arbitrary_bodies_do_not_panic(
        head_bytes in 0u32..300, parts in 0u32..40, body in prop::collection::vec(any::<u8>(), 0..400),
    ) {
        let header = Header { kind: Kind::Event, incarnation: 1, request: 1, head_bytes, parts, body_bytes: body.len() as u64 };
        let mut bytes = header.to_bytes().to_vec();
        bytes.extend(body);
        let _ = read(&bytes, 1 << 20);
    }
}
