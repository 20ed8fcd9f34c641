//! What a sink refuses, and that it then stays as it was.

use std::ops::Range;

use proptest::prelude::*;
use verl_reshard::{
    Bucket, BucketSource, Element, StagedWeights, Staging, SyncError, TensorSpec, WeightSource,
    WeightsVersion,
};

fn version(step: u64) -> WeightsVersion {
    WeightsVersion {
        step,
        hash: format!("{step:064x}"),
    }
}

fn tensors() -> Vec<TensorSpec> {
    let tensor = |name: &str, element, shape: &[usize]| TensorSpec {
        name: name.to_owned(),
        element,
        shape: shape.to_vec(),
    };
    vec![
        tensor("embed", Element::F32, &[5, 7]),
        tensor("norm", Element::Bf16, &[7]),
        tensor("empty", Element::F32, &[0, 3]),
        tensor("scale", Element::F64, &[]),
        tensor("head", Element::F16, &[3, 2, 2]),
    ]
}

fn content(step: u64) -> Vec<Vec<u8>> {
    let bytes = |at: usize, length: usize| {
        let byte = move |byte: usize| (byte * 3 + at * 40 + step as usize * 17) as u8;
        (0..length).map(byte).collect()
    };
    let tensors = tensors().into_iter().enumerate();
    tensors.map(|(at, own)| bytes(at, own.bytes())).collect()
}

fn source(step: u64, bucket_bytes: usize) -> BucketSource {
    let (specs, content) = (tensors(), content(step));
    let read = move |tensor: usize, cells: Range<usize>, bytes: &mut Vec<u8>| {
        let size = specs[tensor].element.size();
        bytes.extend_from_slice(&content[tensor][cells.start * size..cells.end * size]);
        Ok(())
    };
    BucketSource::new(version(step), tensors(), bucket_bytes, read).expect("buckets of 8 bytes")
}

fn buckets(source: &BucketSource) -> Vec<Bucket> {
    let count = source.manifest().buckets;
    let buckets = (0..count).map(|index| source.bucket(index).expect("a bucket"));
    buckets.collect()
}

/// A staging area in which version 3 was begun.
fn begun() -> (Staging, Vec<Bucket>) {
    let source = source(3, 24);
    let mut staging = Staging::new(tensors());
    staging.begin(source.manifest()).expect("its own manifest");
    (staging, buckets(&source))
}

fn complete(mut staging: Staging, buckets: &[Bucket]) -> StagedWeights {
    for bucket in buckets {
        staging.accept(bucket).expect("a good bucket");
    }
    let staged = staging.finish().expect("all buckets");
    assert_eq!(staging.finish(), Err(SyncError::NotBegun));
    staged
}

proptest! {
    #[test]
    fn buckets_of_any_size_in_any_order_give_the_same_bytes(
        bucket_bytes in 8..300usize,
        order in any::<prop::sample::Index>(),
    ) {
        let source = source(3, bucket_bytes);
        let mut buckets = buckets(&source);
        prop_assert!(buckets.iter().all(|own| own.bytes.len() <= bucket_bytes));
        let middle = order.index(buckets.len());
        buckets.rotate_left(middle);
        buckets.reverse();
        let mut staging = Staging::new(tensors());
        staging.begin(source.manifest()).expect("its own manifest");
        let staged = complete(staging, &buckets);
        prop_assert_eq!(staged, StagedWeights { version: version(3), tensors: content(3) });
    }

    /// Whatever is changed in a bucket on its way, it is refused and the good one is still taken.
    #[test]
    fn a_damaged_bucket_is_refused_and_leaves_no_trace(
        at in any::<prop::sample::Index>(),
        byte in any::<prop::sample::Index>(),
        bit in 0..8u32,
        field in 0..8usize,
    ) {
        let (mut staging, buckets) = begun();
        let index = at.index(buckets.len());
        let mut damaged = buckets[index].clone();
        let flip = 1usize << bit;
        match field {
            0 => damaged.version.step ^= flip as u64,
            1 => damaged.index ^= flip,
            2 => damaged.count ^= flip,
            3 => damaged.checksum ^= flip as u64,
            4 => damaged.entries[0].offset ^= flip,
            5 => damaged.entries[0].cells.end ^= flip,
            6 => damaged.entries[0].tensor.name.push('x'),
            _ => {
                let byte = byte.index(damaged.bytes.len());
                damaged.bytes[byte] ^= flip as u8;
            }
        }
        let refused = staging.accept(&damaged).expect_err("a damaged bucket");
        let named = match refused {
            SyncError::ForeignVersion { bucket, .. } | SyncError::Checksum { bucket, .. } => bucket,
            other => panic!("{other:?}"),
        };
        prop_assert_eq!(named, damaged.index);
        let staged = complete(staging, &buckets);
        prop_assert_eq!(staged.tensors, content(3));
    }
}

#[test]
fn a_bucket_without_a_manifest_is_refused() {
    let bucket = source(3, 24).bucket(0).expect("a bucket");
    let mut staging = Staging::new(tensors());
    assert_eq!(staging.accept(&bucket), Err(SyncError::NotBegun));
    assert_eq!(staging.finish(), Err(SyncError::NotBegun));
}

#[test]
fn a_bucket_of_another_version_is_refused() {
    let (mut staging, good) = begun();
    staging.accept(&good[0]).expect("a good bucket");
    let foreign = source(4, 24).bucket(1).expect("a bucket");
    assert_eq!(
        staging.accept(&foreign).expect_err("version 4").to_string(),
        "bucket 1 is of version 4@000000000000, but version 3@000000000000 is being received; send buckets of one version"
    );
    // Also one of the same step with other content.
    let mut other = good[1].clone();
    other.version.hash.replace_range(0..1, "f");
    other.checksum = other.sum();
    let refused = staging.accept(&other);
    assert!(matches!(
        refused,
        Err(SyncError::ForeignVersion { bucket: 1, .. })
    ));
    assert_eq!(complete(staging, &good[1..]).tensors, content(3));
}

#[test]
fn a_repeated_bucket_is_refused() {
    let (mut staging, good) = begun();
    staging.accept(&good[2]).expect("a good bucket");
    assert_eq!(
        staging.accept(&good[2]).expect_err("twice").to_string(),
        "bucket 2 of version 3@000000000000 has arrived before; send each once"
    );
}

#[test]
fn missing_buckets_are_listed_and_may_still_be_sent() {
    let (mut staging, good) = begun();
    for bucket in good.iter().filter(|own| ![1, 3].contains(&own.index)) {
        staging.accept(bucket).expect("a good bucket");
    }
    let error = staging.finish().expect_err("two are missing").to_string();
    let expected = format!(
        "version 3@000000000000 is incomplete: 2 of {} buckets are missing, the first is 1; send them or begin again",
        good.len()
    );
    assert_eq!(error, expected);
    assert_eq!(
        complete(staging, &[good[3].clone(), good[1].clone()]).tensors,
        content(3)
    );
}

#[test]
fn a_new_version_discards_what_has_arrived() {
    let (mut staging, good) = begun();
    staging.accept(&good[0]).expect("a good bucket");
    let newer = source(4, 24);
    staging.begin(newer.manifest()).expect("its own manifest");
    assert_eq!(complete(staging, &buckets(&newer)).tensors, content(4));
}

#[test]
fn a_manifest_of_another_model_is_refused_and_the_version_continues() {
    let (mut staging, good) = begun();
    staging.accept(&good[0]).expect("a good bucket");
    let refused = |staging: &mut Staging, change: &dyn Fn(&mut Vec<TensorSpec>)| {
        let mut other = source(4, 24).manifest().clone();
        change(&mut other.tensors);
        other.checksum = other.sum();
        staging
            .begin(&other)
            .expect_err("another model")
            .to_string()
    };
    assert_eq!(
        refused(&mut staging, &|all| all[1].shape[0] = 8),
        "version 4@000000000000 does not fit this model: `norm` is Bf16 [8], but this model has Bf16 [7]; \
         send weights of the same model"
    );
    let missing = refused(&mut staging, &|all| drop(all.remove(0)));
    assert!(missing.contains("`embed` is missing"), "{missing}");
    let twice = refused(&mut staging, &|all| all.push(all[0].clone()));
    assert!(twice.contains("`embed` is listed twice"), "{twice}");
    let more = refused(&mut staging, &|all| {
        let mut other = all[0].clone();
        other.name = "value_head".to_owned();
        all.push(other);
    });
    assert!(
        more.contains("`value_head` is unknown to this model"),
        "{more}"
    );
    let mut damaged = source(4, 24).manifest().clone();
    damaged.buckets += 1;
    let refused = staging.begin(&damaged);
    assert!(matches!(refused, Err(SyncError::ManifestChecksum { .. })));
    assert_eq!(complete(staging, &good[1..]).tensors, content(3));
}

/// A sender with a fault of its own: its checksums are right, but its cells are not.
#[test]
fn entries_that_do_not_fit_are_refused_although_their_checksum_is_right() {
    let (mut staging, good) = begun();
    staging.accept(&good[0]).expect("a good bucket");
    let refused = |staging: &mut Staging, change: &dyn Fn(&mut Bucket)| {
        let mut bucket = good[1].clone();
        change(&mut bucket);
        bucket.checksum = bucket.sum();
        staging
            .accept(&bucket)
            .expect_err("cells that do not fit")
            .to_string()
    };
    let text = refused(&mut staging, &|own| own.entries[0].cells = 0..6);
    assert_eq!(
        text,
        "bucket 1 of version 3@000000000000: `embed` has cells that have arrived before"
    );
    let text = refused(&mut staging, &|own| own.entries[0].cells = 30..36);
    assert!(text.contains("has no such cells"), "{text}");
    let text = refused(&mut staging, &|own| own.entries[0].offset = usize::MAX);
    assert!(text.contains("is longer than the bucket"), "{text}");
    let text = refused(&mut staging, &|own| {
        own.entries[0].tensor.shape = vec![7, 5]
    });
    assert!(text.contains("is not a tensor of the manifest"), "{text}");
    let text = refused(&mut staging, &|own| {
        own.entries.push(own.entries[0].clone())
    });
    assert!(text.contains("have arrived before"), "{text}");
    let text = refused(&mut staging, &|own| own.index = 99);
    assert!(text.contains("does not fit its manifest"), "{text}");
    // Fewer cells than the manifest states are found at the end.
    let mut short = good[1].clone();
    short.entries[0].cells.end -= 1;
    short.checksum = short.sum();
    staging.accept(&short).expect("a bucket without faults");
    for bucket in &good[2..] {
        staging.accept(bucket).expect("a good bucket");
    }
    assert_eq!(
        staging.finish().expect_err("a cell is missing").to_string(),
        "version 3@000000000000 is incomplete: its buckets contain 34 of 35 cells of `embed`"
    );
}

#[test]
fn a_source_refuses_buckets_that_it_cannot_fill() {
    let new = |bucket_bytes, fails: bool| {
        let read = move |_: usize, cells: Range<usize>, bytes: &mut Vec<u8>| {
            bytes.resize(bytes.len() + cells.len(), 0);
            match fails {
                true => Err("the device is gone".to_owned()),
                false => Ok(()),
            }
        };
        BucketSource::new(version(3), tensors(), bucket_bytes, read)
    };
    let error = new(7, false).err().expect("a cell has 8 bytes").to_string();
    assert_eq!(
        error,
        "buckets of 7 bytes are smaller than a cell of `scale`; use at least 8"
    );
    let error = new(24, true)
        .expect("a source")
        .bucket(0)
        .expect_err("a failed read");
    assert_eq!(
        error.to_string(),
        "bucket 0 of version 3@000000000000: cannot read `embed`: the device is gone"
    );
    let error = new(24, false)
        .expect("a source")
        .bucket(0)
        .expect_err("too few bytes");
    assert!(
        error.to_string().contains("6 bytes instead of 24"),
        "{error}"
    );
    let error = source(3, 24).bucket(99).expect_err("no such bucket");
    assert!(matches!(error, SyncError::NoBucket { bucket: 99, .. }));
}

#[test]
fn messages_keep_everything_but_the_bytes() {
    let sent = source(3, 24);
    let text = serde_json::to_string(sent.manifest()).expect("JSON");
    let manifest = serde_json::from_str(&text).expect("a manifest");
    assert_eq!(sent.manifest(), &manifest);
    let bucket = sent.bucket(0).expect("a bucket");
    let text = serde_json::to_string(&bucket).expect("JSON");
    let mut arrived: Bucket = serde_json::from_str(&text).expect("a bucket");
    let mut staging = Staging::new(tensors());
    staging.begin(&manifest).expect("its own manifest");
    let refused = staging.accept(&arrived);
    assert!(matches!(
        refused,
        Err(SyncError::Checksum { bucket: 0, .. })
    ));
    arrived.bytes.clone_from(&bucket.bytes);
    assert_eq!(arrived, bucket);
    staging.accept(&arrived).expect("a good bucket");
}
