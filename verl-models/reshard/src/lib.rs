//! Which rank has which part of the weights, what to send when that changes, and how weights travel between device groups.
//!
//! | module | what |
//! |---|---|
//! | [`block`] | hyper-rectangles of cells |
//! | [`ranks`] | coordinates of ranks: pipeline, tensor and data parallel, the two groupings for generation |
//! | [`layout`] | the part of each tensor that each rank has |
//! | [`plan`](mod@plan) | from one layout to another with the fewest bytes |
//! | [`exchange`] | a plan carried out on byte buffers |
//! | [`mesh`] | which rows a rank gets, and whose outputs count |
//! | [`sync`] | versions of weights in checked buckets, from a source to a sink |
//! | [`staging`] | where a sink collects a version before it switches |
//!
//! Nothing here knows a model, a device or a file: tensors are names, element types, shapes and bytes.

pub mod block;
mod buffers;
pub mod exchange;
mod figures;
pub mod layout;
pub mod mesh;
mod packed;
pub mod plan;
pub mod ranks;
pub mod staging;
pub mod sync;

pub use block::Block;
pub use buffers::RankBuffers;
pub use exchange::{Exchange, ExchangeError, InMemory, Transport, execute};
pub use layout::{Depth, Element, Layout, LayoutError, Shard, Split, TensorSpec, Weight};
pub use mesh::{Mesh, MeshError};
pub use plan::{
    Distance, Kept, Package, Piece, Place, PlanError, PlanSettings, RankFigures, Reuse, Topology,
    Transfers, plan,
};
pub use ranks::{Coordinates, Grid, Grouping, Ranks, RanksError};
pub use staging::{StagedWeights, Staging};
pub use sync::{
    Bucket, BucketEntry, BucketSource, SyncError, WeightSink, WeightSource, WeightsManifest,
    WeightsVersion, synchronise,
};
