//! Messages: a head of any type that serde writes, and parts, which are raw bytes.
//!
//! The head is CBOR, since JSON has neither NaN nor infinities. Parts are read in the order in which they were added:
//!
//! ```
//! use serde::{Deserialize, Serialize};
//! use verl_wire::message::{Message, Parts};
//! use verl_words::batch::{Batch, RowId};
//!
//! #[derive(Debug, PartialEq, Serialize, Deserialize)]
//! struct Rows {
//!     call: u64,
//! }
//!
//! let batch = Batch::with_rows(&[RowId::prompt(0, 7)?]);
//! let mut message = Message::new(&Rows { call: 3 })?;
//! message.push_batch(&batch)?;
//! message.push_bytes(vec![1, 2, 3]);
//!
//! assert_eq!(message.head::<Rows>()?, Rows { call: 3 });
//! let mut parts = Parts::of(message);
//! assert_eq!(parts.batch()?, batch);
//! assert_eq!(parts.bytes()?.as_slice(), [1, 2, 3]);
//! parts.end()?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use arrow_buffer::Buffer;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use verl_words::batch::{Batch, BatchError};
use verl_words::resource::StoredState;

use crate::batch;

/// Why a message cannot be written or read.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum MessageError {
    /// A head that serde cannot write or read.
    #[error(
        "a message cannot be {action}: {reason}; run and worker must be the same build of the same program"
    )]
    Head {
        /// `written` or `read`.
        action: &'static str,
        /// What serde reports.
        reason: String,
    },
    /// A batch that cannot be written or read.
    #[error("a batch in a message is invalid: {0}")]
    Batch(#[from] BatchError),
    /// A message with another number of parts than its reader expects.
    #[error("a message has {0}; run and worker must be the same build of the same program")]
    Parts(String),
}

/// A part as it is sent: buffers whose bytes follow one another.
#[derive(Debug, Clone, Default)]
pub struct Part(Vec<Buffer>);

impl Part {
    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.0.iter().map(Buffer::len).sum()
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The buffers in order.
    pub fn buffers(&self) -> &[Buffer] {
        &self.0
    }

    /// All bytes as one buffer; copies only if there are several.
    pub fn into_buffer(mut self) -> Buffer {
        match self.0.len() {
            1 => self.0.remove(0),
            _ => {
                let mut all = AlignedBytes::new(self.len());
                for buffer in &self.0 {
                    all.bytes.extend_from_slice(buffer);
                }
                all.finish()
            }
        }
    }
}

impl From<Buffer> for Part {
    fn from(buffer: Buffer) -> Self {
        Part(vec![buffer])
    }
}

/// A head and its parts; see the module.
#[derive(Debug, Clone, Default)]
pub struct Message {
    head: Vec<u8>,
    parts: Vec<Part>,
}

impl Message {
    /// A message without parts.
    ///
    /// # Errors
    /// When serde cannot write `head`.
    pub fn new<T: Serialize>(head: &T) -> Result<Message, MessageError> {
        let mut bytes = Vec::new();
        ciborium::into_writer(head, &mut bytes).map_err(|e| MessageError::Head {
            action: "written",
            reason: e.to_string(),
        })?;
        Ok(Message {
            head: bytes,
            parts: Vec::new(),
        })
    }

    pub(crate) fn from_bytes(head: Vec<u8>, parts: Vec<Buffer>) -> Message {
        let parts = parts.into_iter().map(Part::from).collect();
        Message { head, parts }
    }

    /// The head.
    ///
    /// # Errors
    /// When the bytes are not a `T`.
    pub fn head<T: DeserializeOwned>(&self) -> Result<T, MessageError> {
        ciborium::from_reader(self.head.as_slice()).map_err(|e| MessageError::Head {
            action: "read",
            reason: e.to_string(),
        })
    }

    /// Adds a batch, whose buffers are shared.
    ///
    /// # Errors
    /// When Arrow cannot write one of its types.
    pub fn push_batch(&mut self, batch: &Batch) -> Result<(), MessageError> {
        self.parts.push(Part(batch::encode(batch)?));
        Ok(())
    }

    /// Adds bytes, without copying them.
    pub fn push_bytes(&mut self, bytes: Vec<u8>) {
        self.push_buffer(Buffer::from_vec(bytes));
    }

    /// Adds the bytes of a buffer, which is shared.
    pub fn push_buffer(&mut self, buffer: Buffer) {
        self.parts.push(Part::from(buffer));
    }

    /// Adds the state of a model or a stage: its tensors without copying them, everything else as CBOR.
    ///
    /// # Errors
    /// When serde cannot write what is not a tensor.
    pub fn push_state(&mut self, state: StoredState) -> Result<(), MessageError> {
        let about = Message::new(&state.about)?;
        self.push_bytes(about.head);
        self.push_bytes(state.tensors);
        Ok(())
    }

    /// Bytes of the head.
    pub fn head_bytes(&self) -> &[u8] {
        &self.head
    }

    /// The parts.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }
}

/// Reads the parts of a message in the order in which they were added.
#[derive(Debug)]
pub struct Parts(std::vec::IntoIter<Part>);

impl Parts {
    /// The parts of `message`.
    pub fn of(message: Message) -> Parts {
        Parts(message.parts.into_iter())
    }

    /// The next part as bytes.
    ///
    /// # Errors
    /// When there is none.
    pub fn bytes(&mut self) -> Result<Buffer, MessageError> {
        let part = self.0.next();
        let part = part.ok_or_else(|| MessageError::Parts("too few parts".to_owned()))?;
        Ok(part.into_buffer())
    }

    /// The next part as a batch.
    ///
    /// # Errors
    /// When there is none, or it is not a valid batch.
    pub fn batch(&mut self) -> Result<Batch, MessageError> {
        Ok(batch::decode(self.bytes()?)?)
    }

    /// The next two parts as the state of a model or a stage.
    ///
    /// # Errors
    /// When they are missing or are not a state.
    pub fn state(&mut self) -> Result<StoredState, MessageError> {
        let about = Message::from_bytes(self.bytes()?.to_vec(), Vec::new());
        Ok(StoredState {
            about: about.head::<Value>()?,
            tensors: self.bytes()?.to_vec(),
        })
    }

    /// Checks that all parts were read.
    ///
    /// # Errors
    /// When some were not.
    pub fn end(self) -> Result<(), MessageError> {
        match self.0.len() {
            0 => Ok(()),
            further => Err(MessageError::Parts(format!("{further} parts too many"))),
        }
    }
}

/// Alignment of parts in memory and in a frame; that of Arrow.
pub(crate) const ALIGNMENT: usize = 64;

/// Bytes under construction whose start is aligned, so that Arrow can share them. They are never zeroed first.
pub(crate) struct AlignedBytes {
    /// Bytes up to the aligned start, then the content.
    pub bytes: Vec<u8>,
    start: usize,
}

impl AlignedBytes {
    /// No bytes yet, with space for `capacity`.
    pub fn new(capacity: usize) -> AlignedBytes {
        let mut bytes: Vec<u8> = Vec::with_capacity(capacity + ALIGNMENT);
        let start = bytes.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
        bytes.resize(start, 0);
        AlignedBytes { bytes, start }
    }

    /// Number of bytes of the content.
    pub fn len(&self) -> usize {
        self.bytes.len() - self.start
    }

    /// The same content with space for `capacity` bytes.
    pub fn grown(self, capacity: usize) -> AlignedBytes {
        let mut next = AlignedBytes::new(capacity);
        next.bytes.extend_from_slice(&self.bytes[self.start..]);
        next
    }

    /// The content.
    pub fn finish(self) -> Buffer {
        let len = self.len();
        Buffer::from_vec(self.bytes).slice_with_length(self.start, len)
    }
}
