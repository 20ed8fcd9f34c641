//! Where a sink collects a version before it switches.

use std::collections::{BTreeMap, BTreeSet};

use crate::layout::TensorSpec;
use crate::sync::{Bucket, BucketEntry, SyncError, WeightsManifest, WeightsVersion};

/// Collects the buckets of one version and checks everything about them.
///
/// It refuses a bucket as a whole or takes it as a whole.
#[derive(Debug)]
pub struct Staging {
    expected: Vec<TensorSpec>,
    incoming: Option<Incoming>,
}

/// A complete version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StagedWeights {
    /// The version.
    pub version: WeightsVersion,
    /// The bytes of each tensor, in the order of the model's tensors.
    pub tensors: Vec<Vec<u8>>,
}

/// A version of which parts have arrived.
#[derive(Debug)]
struct Incoming {
    version: WeightsVersion,
    buckets: usize,
    arrived: BTreeSet<usize>,
    tensors: Vec<Partial>,
}

/// A tensor of which parts have arrived.
#[derive(Debug)]
struct Partial {
    bytes: Vec<u8>,
    /// Starts and ends of intervals of cells that have arrived.
    cells: BTreeMap<usize, usize>,
}

impl Staging {
    /// For a model with these tensors.
    #[must_use]
    pub fn new(expected: Vec<TensorSpec>) -> Self {
        Staging {
            expected,
            incoming: None,
        }
    }

    /// See [`WeightSink::begin`](crate::WeightSink::begin). A manifest that is refused does not end the version that is
    /// being received.
    ///
    /// # Errors
    /// The manifest is damaged, or not of this model.
    pub fn begin(&mut self, manifest: &WeightsManifest) -> Result<(), SyncError> {
        let version = manifest.version.clone();
        let (expected, got) = (manifest.checksum, manifest.sum());
        if expected != got {
            return Err(SyncError::ManifestChecksum {
                version,
                expected,
                got,
            });
        }
        if let Some((tensor, reason)) = self.difference(&manifest.tensors) {
            return Err(SyncError::OtherModel {
                version,
                tensor,
                reason,
            });
        }
        // Free what has arrived of another version before the new buffers are allocated.
        self.incoming = None;
        let partial = |tensor: &TensorSpec| Partial {
            bytes: vec![0; tensor.bytes()],
            cells: BTreeMap::new(),
        };
        self.incoming = Some(Incoming {
            version,
            buckets: manifest.buckets,
            arrived: BTreeSet::new(),
            tensors: self.expected.iter().map(partial).collect(),
        });
        Ok(())
    }

    /// See [`WeightSink::accept`](crate::WeightSink::accept).
    ///
    /// # Errors
    /// The bucket is refused.
    pub fn accept(&mut self, bucket: &Bucket) -> Result<(), SyncError> {
        let incoming = self.incoming.as_mut().ok_or(SyncError::NotBegun)?;
        incoming.check(bucket)?;
        let mut places: Vec<(usize, &BucketEntry)> = Vec::with_capacity(bucket.entries.len());
        for entry in &bucket.entries {
            let refused = |reason: &str| SyncError::Entry {
                version: bucket.version.clone(),
                bucket: bucket.index,
                tensor: entry.tensor.name.clone(),
                reason: reason.to_owned(),
            };
            let at = self.expected.iter().position(|own| *own == entry.tensor);
            let at = at.ok_or_else(|| refused("is not a tensor of the manifest"))?;
            if entry.cells.start >= entry.cells.end || entry.cells.end > entry.tensor.cells() {
                return Err(refused("has no such cells"));
            }
            let size = entry.tensor.element.size();
            if bucket.bytes.len() < entry.offset.saturating_add(entry.cells.len() * size) {
                return Err(refused("is longer than the bucket"));
            }
            let twice = |(other, own): &(usize, &BucketEntry)| {
                *other == at
                    && own.cells.start < entry.cells.end
                    && entry.cells.start < own.cells.end
            };
            if incoming.tensors[at].overlaps(entry) || places.iter().any(twice) {
                return Err(refused("has cells that have arrived before"));
            }
            places.push((at, entry));
        }
        for (at, entry) in places {
            incoming.tensors[at].write(entry, &bucket.bytes);
        }
        incoming.arrived.insert(bucket.index);
        Ok(())
    }

    /// The version, if it is complete; nothing is staged afterwards.
    ///
    /// # Errors
    /// Buckets or cells are missing; those that have arrived remain.
    pub fn finish(&mut self) -> Result<StagedWeights, SyncError> {
        let incoming = self.incoming.as_ref().ok_or(SyncError::NotBegun)?;
        let version = incoming.version.clone();
        let count = incoming.buckets;
        if incoming.arrived.len() < count {
            let missing = (0..count).filter(|at| !incoming.arrived.contains(at));
            return Err(SyncError::Missing {
                version,
                missing: missing.collect(),
                count,
            });
        }
        for (tensor, partial) in self.expected.iter().zip(&incoming.tensors) {
            let got = partial.cells.iter().map(|(start, end)| end - start).sum();
            let expected = tensor.cells();
            if got != expected {
                return Err(SyncError::Cells {
                    version,
                    tensor: tensor.name.clone(),
                    got,
                    expected,
                });
            }
        }
        let incoming = self.incoming.take().ok_or(SyncError::NotBegun)?;
        let tensors = incoming.tensors.into_iter();
        Ok(StagedWeights {
            version,
            tensors: tensors.map(|partial| partial.bytes).collect(),
        })
    }

    /// The first tensor that is not in both this model and a manifest, and how it differs.
    fn difference(&self, tensors: &[TensorSpec]) -> Option<(String, String)> {
        for own in &self.expected {
            let mut named = tensors.iter().filter(|other| other.name == own.name);
            let reason = match (named.next(), named.next()) {
                (None, _) => "is missing".to_owned(),
                (Some(_), Some(_)) => "is listed twice".to_owned(),
                (Some(other), None) if other == own => continue,
                (Some(other), None) => format!(
                    "is {:?} {:?}, but this model has {:?} {:?}",
                    other.element, other.shape, own.element, own.shape
                ),
            };
            return Some((own.name.clone(), reason));
        }
        let unknown = |other: &&TensorSpec| !self.expected.iter().any(|own| own.name == other.name);
        let unknown = tensors.iter().find(unknown)?;
        Some((unknown.name.clone(), "is unknown to this model".to_owned()))
    }
}

impl Incoming {
    /// Whether the bucket is of this version, new and undamaged.
    fn check(&self, bucket: &Bucket) -> Result<(), SyncError> {
        let version = bucket.version.clone();
        let (expected, got) = (bucket.checksum, bucket.sum());
        let bucket_index = bucket.index;
        if version != self.version {
            return Err(SyncError::ForeignVersion {
                version,
                bucket: bucket_index,
                expected: self.version.clone(),
            });
        }
        if expected != got {
            return Err(SyncError::Checksum {
                version,
                bucket: bucket_index,
                expected,
                got,
            });
        }
        if bucket.count != self.buckets || bucket_index >= self.buckets {
            return Err(SyncError::Index {
                version,
                bucket: bucket_index,
                count: bucket.count,
                expected: self.buckets,
            });
        }
        if self.arrived.contains(&bucket_index) {
            return Err(SyncError::Repeated {
                version,
                bucket: bucket_index,
            });
        }
        Ok(())
    }
}

impl Partial {
    /// Whether a cell of the entry has arrived before.
    fn overlaps(&self, entry: &BucketEntry) -> bool {
        let before = self.cells.range(..entry.cells.end).next_back();
        before.is_some_and(|(_, &end)| end > entry.cells.start)
    }

    fn write(&mut self, entry: &BucketEntry, bytes: &[u8]) {
        let size = entry.tensor.element.size();
        let source = &bytes[entry.offset..][..entry.cells.len() * size];
        self.bytes[entry.cells.start * size..][..source.len()].copy_from_slice(source);
        self.cells.insert(entry.cells.start, entry.cells.end);
    }
}
