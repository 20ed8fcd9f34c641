//! From one layout to another with the fewest bytes.
//!
//! For each rank of the destination and each tensor: what the rank's own source shard contains is used, and the rest is cut
//! into blocks that some source rank has. A choice among several is decided by distance, then by what they already send.
//! Source and destination may have different numbers of ranks, shapes of shards and devices.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};

use crate::block::Block;
use crate::layout::Layout;
use crate::packed::packed;

/// Where a rank is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Place {
    /// The host.
    pub host: usize,
    /// The device on the host.
    pub device: usize,
}

/// How far apart two ranks are; less is closer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Distance {
    /// On one device.
    Device,
    /// On two devices of one host.
    Host,
    /// On two hosts.
    Network,
}

/// Where the ranks of both layouts are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Topology {
    /// Places of the source's ranks.
    pub source: Vec<Place>,
    /// Places of the destination's ranks.
    pub destination: Vec<Place>,
    /// For each rank of the destination, the source rank whose memory it shares, if any.
    pub own: Vec<Option<usize>>,
}

impl Topology {
    /// Two layouts of the same ranks, each on its own device.
    #[must_use]
    pub fn colocated(ranks: usize, devices_per_host: usize) -> Self {
        let places = places(0..ranks, devices_per_host);
        Topology {
            source: places.clone(),
            destination: places,
            own: (0..ranks).map(Some).collect(),
        }
    }

    /// Two groups of ranks without common devices: the destination's devices follow those of the source.
    #[must_use]
    pub fn separate(source: usize, destination: usize, devices_per_host: usize) -> Self {
        Topology {
            source: places(0..source, devices_per_host),
            destination: places(source..source + destination, devices_per_host),
            own: vec![None; destination],
        }
    }

    fn distance(&self, source: usize, destination: usize) -> Distance {
        let (from, to) = (self.source[source], self.destination[destination]);
        match (from.host == to.host, from.device == to.device) {
            (true, true) => Distance::Device,
            (true, false) => Distance::Host,
            (false, _) => Distance::Network,
        }
    }

    fn check(&self, source: &Layout, destination: &Layout) -> Result<(), PlanError> {
        for (what, got, expected) in [
            ("source", self.source.len(), source.ranks()),
            ("destination", self.destination.len(), destination.ranks()),
            ("own", self.own.len(), destination.ranks()),
        ] {
            if got != expected {
                return Err(PlanError::Topology {
                    what,
                    got,
                    expected,
                });
            }
        }
        let mut own = self.own.iter().flatten();
        match own.find(|&&rank| rank >= source.ranks()) {
            Some(&rank) => Err(PlanError::Own {
                rank,
                ranks: source.ranks(),
            }),
            None => Ok(()),
        }
    }
}

fn places(devices: std::ops::Range<usize>, devices_per_host: usize) -> Vec<Place> {
    let per_host = devices_per_host.max(1);
    let place = |at: usize| Place {
        host: at / per_host,
        device: at % per_host,
    };
    devices.map(place).collect()
}

/// What a rank does with cells that it already has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reuse {
    /// Source and destination use the same memory for them.
    #[default]
    InPlace,
    /// They are copied, and the source's memory stays: two engines with separate weights.
    Copied,
}

/// Settings of [`plan`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanSettings {
    /// Size of a package; smaller than this only if nothing more is to be sent.
    pub bucket_bytes: usize,
    /// What a rank does with cells that it already has.
    pub reuse: Reuse,
}

impl Default for PlanSettings {
    fn default() -> Self {
        PlanSettings {
            bucket_bytes: 256 << 20,
            reuse: Reuse::InPlace,
        }
    }
}

/// Cells that a rank already has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// Position of the tensor.
    pub tensor: usize,
    /// Rank of the source.
    pub source: usize,
    /// Rank of the destination, which shares its memory.
    pub destination: usize,
    /// The cells.
    pub block: Block,
}

/// Cells in a package.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Position of the tensor.
    pub tensor: usize,
    /// The cells, packed densely in row-major order.
    pub block: Block,
    /// First byte in the package.
    pub offset: usize,
}

/// Bytes that one rank sends to another at once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Package {
    /// Rank of the source.
    pub source: usize,
    /// Rank of the destination.
    pub destination: usize,
    /// How far the bytes travel.
    pub distance: Distance,
    /// Contents, without gaps.
    pub pieces: Vec<Piece>,
    /// Length.
    pub bytes: usize,
}

/// What a change of layout means for a rank of the destination, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankFigures {
    /// Received from other ranks.
    pub received: u64,
    /// Already there.
    pub reused: u64,
    /// Weights of the destination. At most one package per sender is in flight in addition.
    pub peak: u64,
    /// Weights of the source that the rank must keep next to those of the destination.
    pub redundant: u64,
}

/// Everything to do for a change of layout. Every cell of the destination occurs exactly once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transfers {
    /// Cells that need no transfer.
    pub kept: Vec<Kept>,
    /// Packages, by source rank, then by destination rank, then in the order of the tensors.
    pub packages: Vec<Package>,
    /// Figures of each rank of the destination.
    pub ranks: Vec<RankFigures>,
    /// Bytes that each rank of the source sends.
    pub sent: Vec<u64>,
    /// Largest size of a package.
    pub bucket_bytes: usize,
}

/// Layouts between which nothing can be planned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Layouts of different tensors.
    #[error(
        "tensor {at} is {source_is} in the source and {destination_is} in the destination; \
         use layouts of the same tensors in one order"
    )]
    Tensors {
        /// Position.
        at: usize,
        /// The source's.
        source_is: String,
        /// The destination's.
        destination_is: String,
    },
    /// Places that do not match the ranks.
    #[error(
        "the topology lists {got} ranks as `{what}`, but the layout has {expected}; list each once"
    )]
    Topology {
        /// The list.
        what: &'static str,
        /// Its length.
        got: usize,
        /// Ranks of the layout.
        expected: usize,
    },
    /// Memory of a rank that does not exist.
    #[error(
        "the topology lists source rank {rank} in `own`, but the source has {ranks} ranks; use ranks below that"
    )]
    Own {
        /// The rank.
        rank: usize,
        /// Ranks of the source.
        ranks: usize,
    },
    /// Cells that the destination needs, but nobody has.
    #[error(
        "no rank of the source has cells {block} of `{tensor}`, which rank {rank} of the destination needs; add them to the source"
    )]
    Missing {
        /// The tensor.
        tensor: String,
        /// The cells.
        block: Block,
        /// Rank of the destination.
        rank: usize,
    },
    /// Buckets too small for a single cell.
    #[error("buckets of {bytes} bytes are smaller than a cell of `{tensor}`; use at least {size}")]
    Bucket {
        /// Size of a bucket.
        bytes: usize,
        /// A tensor.
        tensor: String,
        /// Size of its cells.
        size: usize,
    },
}

/// Plans the change from `source` to `destination`.
///
/// ```
/// use verl_reshard::*;
///
/// let weights: Vec<Weight> = (0..4)
///     .map(|layer| Weight {
///         spec: TensorSpec {
///             name: format!("layers.{layer}.weight"),
///             element: Element::Bf16,
///             shape: vec![64, 32],
///         },
///         depth: Depth::Layer(layer),
///         split: Some(Split { axis: 0, unit: 1 }),
///     })
///     .collect();
/// let training = Grid { pipeline: 1, tensor: 4, data: 2 };
/// let generation = Ranks::generation(training, 1, 2, Grouping::Stride)?;
/// let source = Layout::of(&weights, &Ranks::grid(training)?)?;
/// let destination = Layout::of(&weights, &generation)?;
/// let topology = Topology::colocated(8, 8);
/// let transfers = plan(&source, &destination, &topology, &PlanSettings::default())?;
/// // Each rank has a quarter of the 16 KiB and needs half of them.
/// assert_eq!(transfers.ranks[0].received, 4096);
/// assert_eq!(transfers.ranks[0].redundant, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// The layouts have different tensors, the topology does not match them, cells are missing in the source, or buckets are
/// smaller than a cell.
pub fn plan(
    source: &Layout,
    destination: &Layout,
    topology: &Topology,
    settings: &PlanSettings,
) -> Result<Transfers, PlanError> {
    check_tensors(source, destination, settings.bucket_bytes)?;
    topology.check(source, destination)?;
    let mut planner = Planner {
        topology,
        sent: vec![0; source.ranks()],
        kept: Vec::new(),
        pieces: BTreeMap::new(),
    };
    let mut ranks = vec![RankFigures::default(); destination.ranks()];
    for tensor in 0..source.tensors().len() {
        let holders = (0..source.ranks()).map(|rank| (rank, source.blocks(tensor, rank)));
        let holders: Vec<_> = holders.filter(|(_, own)| !own.is_empty()).collect();
        let size = source.tensors()[tensor].element.size();
        for (rank, figures) in ranks.iter_mut().enumerate() {
            let needed = destination.blocks(tensor, rank);
            let own = topology.own[rank];
            let rest = match own {
                Some(own) => planner.keep(tensor, own, rank, needed, &source.blocks(tensor, own)),
                None => needed,
            };
            let received = planner.fetch(tensor, rank, rest, &holders, size);
            let received = received.map_err(|block| PlanError::Missing {
                tensor: source.tensors()[tensor].name.clone(),
                block,
                rank,
            })?;
            let bytes = destination.tensor_bytes(tensor, rank) as u64;
            let reused = bytes - received;
            let own = own.map_or(0, |own| source.tensor_bytes(tensor, own) as u64);
            figures.received += received;
            figures.reused += reused;
            figures.peak += bytes;
            figures.redundant += match settings.reuse {
                Reuse::InPlace => own - reused,
                Reuse::Copied => own,
            };
        }
    }
    let sizes: Vec<usize> = source.tensors().iter().map(|t| t.element.size()).collect();
    Ok(Transfers {
        packages: planner.packages(&sizes, settings.bucket_bytes),
        kept: planner.kept,
        ranks,
        sent: planner.sent,
        bucket_bytes: settings.bucket_bytes,
    })
}

fn check_tensors(
    source: &Layout,
    destination: &Layout,
    bucket_bytes: usize,
) -> Result<(), PlanError> {
    let (from, to) = (source.tensors(), destination.tensors());
    if let Some(at) = (0..from.len().max(to.len())).find(|&at| from.get(at) != to.get(at)) {
        let text = |tensors: &[crate::TensorSpec]| match tensors.get(at) {
            Some(own) => format!("`{}` ({:?} {:?})", own.name, own.element, own.shape),
            None => "absent".to_owned(),
        };
        return Err(PlanError::Tensors {
            at,
            source_is: text(from),
            destination_is: text(to),
        });
    }
    match from.iter().find(|own| own.element.size() > bucket_bytes) {
        Some(own) => Err(PlanError::Bucket {
            bytes: bucket_bytes,
            tensor: own.name.clone(),
            size: own.element.size(),
        }),
        None => Ok(()),
    }
}

struct Planner<'a> {
    topology: &'a Topology,
    /// Bytes that each source rank sends so far.
    sent: Vec<u64>,
    kept: Vec<Kept>,
    /// What goes from a source rank to a destination rank: tensors and blocks.
    pieces: BTreeMap<(usize, usize), Vec<(usize, Block)>>,
}

impl Planner<'_> {
    /// Lists the cells of `needed` that the rank has as rank `own` of the source, in `blocks`; returns the others.
    fn keep(
        &mut self,
        tensor: usize,
        own: usize,
        rank: usize,
        mut needed: Vec<Block>,
        blocks: &[Block],
    ) -> Vec<Block> {
        for block in blocks {
            let mut rest = Vec::new();
            for needed in needed {
                if let Some(common) = needed.intersection(block) {
                    self.kept.push(Kept {
                        tensor,
                        source: own,
                        destination: rank,
                        block: common,
                    });
                }
                rest.extend(needed.without(block));
            }
            needed = rest;
        }
        needed
    }

    /// Assigns the cells of `needed` to source ranks, of which `holders` have some; returns their bytes, or cells that nobody
    /// has.
    fn fetch(
        &mut self,
        tensor: usize,
        rank: usize,
        needed: Vec<Block>,
        holders: &[(usize, Vec<Block>)],
        size: usize,
    ) -> Result<u64, Block> {
        let mut waiting = VecDeque::from(needed);
        let mut received = 0;
        while let Some(block) = waiting.pop_front() {
            let offers = holders.iter().filter_map(|&(source, ref own)| {
                let own = own.iter().find(|own| block.overlaps(own))?;
                let distance = self.topology.distance(source, rank);
                Some(((distance, self.sent[source], source), own))
            });
            let best = offers.min_by_key(|(order, _)| *order);
            let best =
                best.and_then(|((.., source), own)| Some((source, block.intersection(own)?)));
            let Some((source, common)) = best else {
                return Err(block);
            };
            waiting.extend(block.without(&common));
            let bytes = (common.cells() * size) as u64;
            self.sent[source] += bytes;
            received += bytes;
            let pieces = self.pieces.entry((source, rank)).or_default();
            pieces.push((tensor, common));
        }
        Ok(received)
    }

    fn packages(&self, sizes: &[usize], capacity: usize) -> Vec<Package> {
        let mut packages = Vec::new();
        for (&(source, destination), pieces) in &self.pieces {
            let items = pieces
                .iter()
                .map(|(tensor, own)| (own.cells(), sizes[*tensor]));
            for slots in packed(items, capacity) {
                let mut package = Package {
                    source,
                    destination,
                    distance: self.topology.distance(source, destination),
                    pieces: Vec::new(),
                    bytes: 0,
                };
                for slot in slots {
                    let (tensor, block) = &pieces[slot.item];
                    for block in block.run(slot.cells) {
                        let offset = package.bytes;
                        package.bytes += block.cells() * sizes[*tensor];
                        package.pieces.push(Piece {
                            tensor: *tensor,
                            block,
                            offset,
                        });
                    }
                }
                packages.push(package);
            }
        }
        packages
    }
}
