//! Versions of weights in checked buckets, from a source to a sink.
//!
//! A source describes a version in a manifest and cuts its tensors into buckets. A sink collects them, in any order, and
//! switches to the version when all have arrived: see [`Staging`](crate::Staging). What is interrupted, damaged, repeated or
//! of another version is refused and changes nothing.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::layout::TensorSpec;
use crate::packed::{Slot, packed};

/// Which weights: the number of optimiser steps taken and a hash of their content.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub struct WeightsVersion {
    /// Optimiser steps taken since the model was loaded.
    pub step: u64,
    /// Hash of the weights' bytes, in hexadecimal; empty where it was not computed.
    pub hash: String,
}

impl fmt::Display for WeightsVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let short = self.hash.get(..12).unwrap_or(&self.hash);
        write!(f, "{}@{short}", self.step)
    }
}

/// What a version consists of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WeightsManifest {
    /// The version.
    pub version: WeightsVersion,
    /// Its tensors.
    pub tensors: Vec<TensorSpec>,
    /// Number of buckets.
    pub buckets: usize,
    /// [`WeightsManifest::sum`] of the fields above.
    pub checksum: u64,
}

impl WeightsManifest {
    /// Checksum of all other fields.
    #[must_use]
    pub fn sum(&self) -> u64 {
        let mut sum = Sum::of(&self.version);
        sum.number(self.tensors.len());
        for tensor in &self.tensors {
            sum.tensor(tensor);
        }
        sum.number(self.buckets);
        sum.0.digest()
    }
}

/// Cells of a tensor in a bucket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BucketEntry {
    /// The tensor.
    pub tensor: TensorSpec,
    /// Which of its cells, in row-major order.
    pub cells: Range<usize>,
    /// First byte in the bucket.
    pub offset: usize,
}

/// A part of a version.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bucket {
    /// The version.
    pub version: WeightsVersion,
    /// Position of the bucket.
    pub index: usize,
    /// Number of buckets of the version.
    pub count: usize,
    /// Contents.
    pub entries: Vec<BucketEntry>,
    /// The cells. Not serialised: a message carries them as they are, next to the other fields. A bucket without its bytes
    /// has the wrong checksum.
    #[serde(skip)]
    pub bytes: Vec<u8>,
    /// [`Bucket::sum`] of the fields above.
    pub checksum: u64,
}

impl Bucket {
    /// Checksum of all other fields.
    #[must_use]
    pub fn sum(&self) -> u64 {
        let mut sum = Sum::of(&self.version);
        for number in [self.index, self.count, self.entries.len()] {
            sum.number(number);
        }
        for entry in &self.entries {
            sum.tensor(&entry.tensor);
            for number in [entry.cells.start, entry.cells.end, entry.offset] {
                sum.number(number);
            }
        }
        sum.bytes(&self.bytes);
        sum.0.digest()
    }
}

/// A hash of fields, each with its length where that varies.
struct Sum(Xxh3);

impl Sum {
    fn of(version: &WeightsVersion) -> Self {
        let mut sum = Sum(Xxh3::new());
        sum.0.update(&version.step.to_le_bytes());
        sum.bytes(version.hash.as_bytes());
        sum
    }

    fn number(&mut self, number: usize) {
        self.0.update(&(number as u64).to_le_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len());
        self.0.update(bytes);
    }

    fn tensor(&mut self, tensor: &TensorSpec) {
        self.bytes(tensor.name.as_bytes());
        self.bytes(format!("{:?}", tensor.element).as_bytes());
        self.number(tensor.shape.len());
        for &length in &tensor.shape {
            self.number(length);
        }
    }
}

/// Why weights did not travel. The sink's own weights are unchanged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SyncError {
    /// A tensor of a type that cannot be sent.
    #[error(
        "`{tensor}` has weights of type {element}, which cannot be sent; load the model in f32, bf16 or f16"
    )]
    Element {
        /// The tensor.
        tensor: String,
        /// Its type.
        element: String,
    },
    /// A bucket size that is too small for a cell.
    #[error("buckets of {bytes} bytes are smaller than a cell of `{tensor}`; use at least {size}")]
    BucketSize {
        /// The size.
        bytes: usize,
        /// A tensor.
        tensor: String,
        /// Size of its cells.
        size: usize,
    },
    /// A bucket that the source does not have.
    #[error("version {version} has {count} buckets, but bucket {bucket} was requested")]
    NoBucket {
        /// The version.
        version: WeightsVersion,
        /// The bucket.
        bucket: usize,
        /// Number of buckets.
        count: usize,
    },
    /// A source that cannot read a tensor.
    #[error("bucket {bucket} of version {version}: cannot read `{tensor}`: {reason}")]
    Read {
        /// The version.
        version: WeightsVersion,
        /// The bucket.
        bucket: usize,
        /// The tensor.
        tensor: String,
        /// Why.
        reason: String,
    },
    /// A manifest that was damaged.
    #[error(
        "the manifest of version {version} has checksum {got:016x}, not {expected:016x}; send it again"
    )]
    ManifestChecksum {
        /// The version.
        version: WeightsVersion,
        /// Checksum in the manifest.
        expected: u64,
        /// Checksum of its content.
        got: u64,
    },
    /// A version of another model.
    #[error(
        "version {version} does not fit this model: `{tensor}` {reason}; send weights of the same model"
    )]
    OtherModel {
        /// The version.
        version: WeightsVersion,
        /// The first tensor that differs.
        tensor: String,
        /// How it differs.
        reason: String,
    },
    /// A bucket or an end without a manifest.
    #[error("no version was begun; send its manifest first")]
    NotBegun,
    /// A bucket of another version than the manifest's.
    #[error(
        "bucket {bucket} is of version {version}, but version {expected} is being received; send buckets of one version"
    )]
    ForeignVersion {
        /// The bucket's version.
        version: WeightsVersion,
        /// The bucket.
        bucket: usize,
        /// The manifest's version.
        expected: WeightsVersion,
    },
    /// A bucket that the manifest does not contain.
    #[error(
        "bucket {bucket} of {count} of version {version} does not fit its manifest, which has {expected} buckets"
    )]
    Index {
        /// The version.
        version: WeightsVersion,
        /// The bucket.
        bucket: usize,
        /// Number of buckets that it states.
        count: usize,
        /// Number of buckets in the manifest.
        expected: usize,
    },
    /// A bucket that has arrived before.
    #[error("bucket {bucket} of version {version} has arrived before; send each once")]
    Repeated {
        /// The version.
        version: WeightsVersion,
        /// The bucket.
        bucket: usize,
    },
    /// A bucket that was damaged.
    #[error(
        "bucket {bucket} of version {version} has checksum {got:016x}, not {expected:016x}; send it again"
    )]
    Checksum {
        /// The version.
        version: WeightsVersion,
        /// The bucket.
        bucket: usize,
        /// Checksum in the bucket.
        expected: u64,
        /// Checksum of its content.
        got: u64,
    },
    /// A bucket with cells that do not fit the manifest.
    #[error("bucket {bucket} of version {version}: `{tensor}` {reason}")]
    Entry {
        /// The version.
        version: WeightsVersion,
        /// The bucket.
        bucket: usize,
        /// The tensor.
        tensor: String,
        /// What does not fit.
        reason: String,
    },
    /// An end before all buckets have arrived.
    #[error(
        "version {version} is incomplete: {} of {count} buckets are missing, the first is {first}; \
         send them or begin again",
        missing.len(),
        first = missing.first().copied().unwrap_or_default()
    )]
    Missing {
        /// The version.
        version: WeightsVersion,
        /// The missing buckets.
        missing: BTreeSet<usize>,
        /// Number of buckets.
        count: usize,
    },
    /// A version whose buckets do not contain all cells.
    #[error(
        "version {version} is incomplete: its buckets contain {got} of {expected} cells of `{tensor}`"
    )]
    Cells {
        /// The version.
        version: WeightsVersion,
        /// The tensor.
        tensor: String,
        /// Cells that arrived.
        got: usize,
        /// Cells of the tensor.
        expected: usize,
    },
}

/// Weights that can be sent. What it returns never changes, whatever happens to the model that it was taken from.
pub trait WeightSource: Send {
    /// What the version consists of.
    fn manifest(&self) -> &WeightsManifest;

    /// A bucket of the version.
    ///
    /// # Errors
    /// There is no such bucket, or its tensors cannot be read.
    fn bucket(&self, index: usize) -> Result<Bucket, SyncError>;
}

/// A model that can switch to weights that arrive. On an error its weights are unchanged.
pub trait WeightSink {
    /// Starts to receive a version and discards what has arrived of another one.
    ///
    /// # Errors
    /// The manifest is damaged, or not of this model.
    fn begin(&mut self, manifest: &WeightsManifest) -> Result<(), SyncError>;

    /// Collects a bucket; buckets may arrive in any order.
    ///
    /// # Errors
    /// The bucket is refused: it is damaged, repeated, or not of the version that was begun. Those that arrived before remain.
    fn accept(&mut self, bucket: &Bucket) -> Result<(), SyncError>;

    /// Switches to the version, all tensors at once.
    ///
    /// # Errors
    /// Buckets are missing; they may still be sent.
    fn finish(&mut self) -> Result<WeightsVersion, SyncError>;
}

/// Sends a version within a process.
///
/// # Errors
/// As the methods of source and sink.
pub fn synchronise(
    source: &dyn WeightSource,
    sink: &mut dyn WeightSink,
) -> Result<WeightsVersion, SyncError> {
    let manifest = source.manifest();
    sink.begin(manifest)?;
    for index in 0..manifest.buckets {
        sink.accept(&source.bucket(index)?)?;
    }
    sink.finish()
}

/// Appends cells of a tensor, by its position, to bytes.
type Read = Box<dyn Fn(usize, Range<usize>, &mut Vec<u8>) -> Result<(), String> + Send>;

/// A source of tensors that are read when their bucket is requested.
pub struct BucketSource {
    manifest: WeightsManifest,
    buckets: Vec<Vec<Slot>>,
    read: Read,
}

impl BucketSource {
    /// Cuts `tensors` into buckets of `bucket_bytes`: a tensor that does not fit into the rest of a bucket starts the next
    /// one, and a tensor that is larger than a bucket is cut. `read(tensor, cells, bytes)` appends cells of a tensor, by its
    /// position, to the bytes of a bucket.
    ///
    /// # Errors
    /// A bucket is smaller than a cell.
    pub fn new(
        version: WeightsVersion,
        tensors: Vec<TensorSpec>,
        bucket_bytes: usize,
        read: impl Fn(usize, Range<usize>, &mut Vec<u8>) -> Result<(), String> + Send + 'static,
    ) -> Result<Self, SyncError> {
        if let Some(tensor) = tensors.iter().find(|own| own.element.size() > bucket_bytes) {
            return Err(SyncError::BucketSize {
                bytes: bucket_bytes,
                tensor: tensor.name.clone(),
                size: tensor.element.size(),
            });
        }
        let items = tensors.iter().map(|own| (own.cells(), own.element.size()));
        let buckets = packed(items, bucket_bytes);
        let mut manifest = WeightsManifest {
            version,
            tensors,
            buckets: buckets.len(),
            checksum: 0,
        };
        manifest.checksum = manifest.sum();
        Ok(BucketSource {
            manifest,
            buckets,
            read: Box::new(read),
        })
    }
}

impl WeightSource for BucketSource {
    fn manifest(&self) -> &WeightsManifest {
        &self.manifest
    }

    fn bucket(&self, index: usize) -> Result<Bucket, SyncError> {
        let version = self.manifest.version.clone();
        let count = self.buckets.len();
        let Some(slots) = self.buckets.get(index) else {
            return Err(SyncError::NoBucket {
                version,
                bucket: index,
                count,
            });
        };
        let mut bucket = Bucket {
            version,
            index,
            count,
            entries: Vec::with_capacity(slots.len()),
            bytes: Vec::new(),
            checksum: 0,
        };
        let tensors = &self.manifest.tensors;
        let length = |slot: &Slot| slot.cells.len() * tensors[slot.item].element.size();
        bucket.bytes.reserve_exact(slots.iter().map(length).sum());
        for slot in slots {
            let tensor = tensors[slot.item].clone();
            let mut read = (self.read)(slot.item, slot.cells.clone(), &mut bucket.bytes);
            let got = bucket.bytes.len().saturating_sub(slot.offset);
            let expected = length(slot);
            if read.is_ok() && got != expected {
                read = Err(format!("{got} bytes instead of {expected}"));
            }
            read.map_err(|reason| SyncError::Read {
                version: bucket.version.clone(),
                bucket: index,
                tensor: tensor.name.clone(),
                reason,
            })?;
            bucket.entries.push(BucketEntry {
                tensor,
                cells: slot.cells.clone(),
                offset: slot.offset,
            });
        }
        bucket.checksum = bucket.sum();
        Ok(bucket)
    }
}
