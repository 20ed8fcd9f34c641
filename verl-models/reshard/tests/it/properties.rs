//! Properties of plans between any two layouts.

use std::collections::HashMap;
use std::ops::Range;
use std::time::Duration;

use proptest::prelude::*;
use verl_reshard::{
    Block, Depth, Element, Exchange, Grid, InMemory, Layout, Place, PlanSettings, Ranks, Reuse,
    Shard, TensorSpec, Topology, Transfers, execute, plan,
};

use crate::kit::{cells, grid, layout, matrices, ragged, ranks, whole};

/// An interval within 0..`length`, possibly empty.
fn interval(length: usize) -> impl Strategy<Value = Range<usize>> {
    (0..=length, 0..=length).prop_map(|(a, b)| a.min(b)..a.max(b))
}

fn shard(shape: Vec<usize>) -> impl Strategy<Value = Option<Shard>> {
    let axes: Vec<_> = shape.into_iter().map(interval).collect();
    let block = axes.prop_map(Block);
    let shard = block.prop_flat_map(|block| {
        let cells = prop::option::of(interval(block.cells()));
        cells.prop_map(move |cells| Shard {
            block: block.clone(),
            cells,
        })
    });
    prop::option::of(shard)
}

/// A tensor with the shards of the source's ranks, one of which has all of it, and those of the destination's.
type Tensor = (TensorSpec, Vec<Option<Shard>>, Vec<Option<Shard>>);

fn tensor(source: usize, destination: usize) -> impl Strategy<Value = Tensor> {
    let shape = prop::collection::vec(1..5usize, 0..4);
    let element = prop::sample::select(vec![Element::F32, Element::Bf16, Element::F64]);
    (shape, element, 0..source).prop_flat_map(move |(shape, element, complete)| {
        let from = prop::collection::vec(shard(shape.clone()), source);
        let to = prop::collection::vec(shard(shape.clone()), destination);
        (from, to).prop_map(move |(mut from, to)| {
            from[complete] = Some(Shard {
                block: Block::whole(&shape),
                cells: None,
            });
            let spec = TensorSpec {
                name: String::new(),
                element,
                shape: shape.clone(),
            };
            (spec, from, to)
        })
    })
}

/// Any two layouts of the same tensors, anywhere.
fn change() -> impl Strategy<Value = (Layout, Layout, Topology)> {
    (1..5usize, 1..5usize).prop_flat_map(|(source, destination)| {
        let tensors = prop::collection::vec(tensor(source, destination), 1..4);
        let place = (0..2usize, 0..2usize).prop_map(|(host, device)| Place { host, device });
        let topology = (
            prop::collection::vec(place.clone(), source),
            prop::collection::vec(place, destination),
            prop::collection::vec(prop::option::of(0..source), destination),
        );
        (tensors, topology).prop_map(move |(tensors, (from, to, own))| {
            let mut specs = Vec::new();
            let (mut of_source, mut of_destination) = (Vec::new(), Vec::new());
            for (at, (mut spec, from, to)) in tensors.into_iter().enumerate() {
                spec.name = format!("tensor {at}");
                specs.push(spec);
                of_source.push(from);
                of_destination.push(to);
            }
            let new = |ranks, shards| Layout::new(specs.clone(), ranks, shards).expect("a layout");
            let topology = Topology {
                source: from,
                destination: to,
                own,
            };
            (
                new(source, of_source),
                new(destination, of_destination),
                topology,
            )
        })
    })
}

/// Tensor, rank and cell.
type Cell = (usize, usize, Vec<usize>);

fn count(written: &mut HashMap<Cell, usize>, tensor: usize, rank: usize, block: &Block) {
    for cell in cells(block) {
        *written.entry((tensor, rank, cell)).or_default() += 1;
    }
}

fn has(layout: &Layout, tensor: usize, rank: usize, cell: &[usize]) -> bool {
    let is_in = |block: &Block| block.0.iter().zip(cell).all(|(axis, at)| axis.contains(at));
    layout.blocks(tensor, rank).iter().any(is_in)
}

/// Every cell of the destination is written once, from a rank that has it; nobody closer has it; the bytes are the optimum.
fn check(source: &Layout, destination: &Layout, topology: &Topology, transfers: &Transfers) {
    let mut written = HashMap::new();
    for kept in &transfers.kept {
        assert_eq!(topology.own[kept.destination], Some(kept.source));
        for cell in cells(&kept.block) {
            assert!(has(source, kept.tensor, kept.source, &cell));
        }
        count(&mut written, kept.tensor, kept.destination, &kept.block);
    }
    for package in &transfers.packages {
        let mut end = 0;
        for piece in &package.pieces {
            assert_eq!(piece.offset, end);
            end += piece.block.cells() * source.tensors()[piece.tensor].element.size();
            for cell in cells(&piece.block) {
                assert!(has(source, piece.tensor, package.source, &cell));
                let own = topology.own[package.destination];
                assert!(!own.is_some_and(|own| has(source, piece.tensor, own, &cell)));
                let to = topology.destination[package.destination];
                let from = topology.source[package.source];
                for rank in (0..source.ranks()).filter(|&r| has(source, piece.tensor, r, &cell)) {
                    let other = topology.source[rank];
                    assert!(from.host == to.host || other.host != to.host);
                    assert!(from == to || other != to);
                }
            }
            count(
                &mut written,
                piece.tensor,
                package.destination,
                &piece.block,
            );
        }
        assert_eq!(package.bytes, end);
        assert!(package.bytes <= transfers.bucket_bytes && package.bytes > 0);
    }
    let mut optimum = vec![0u64; destination.ranks()];
    let mut needed = 0;
    for (tensor, spec) in destination.tensors().iter().enumerate() {
        for (rank, optimum) in optimum.iter_mut().enumerate() {
            for cell in cells(&Block::whole(&spec.shape)) {
                if has(destination, tensor, rank, &cell) {
                    needed += 1;
                    let own = topology.own[rank];
                    if !own.is_some_and(|own| has(source, tensor, own, &cell)) {
                        *optimum += spec.element.size() as u64;
                    }
                    assert_eq!(written.get(&(tensor, rank, cell)), Some(&1));
                }
            }
        }
    }
    assert_eq!(written.len(), needed);
    let received: Vec<u64> = transfers.ranks.iter().map(|own| own.received).collect();
    assert_eq!(received, optimum);
    let packages = transfers.packages.iter();
    assert_eq!(
        transfers.bytes(),
        packages.map(|own| own.bytes as u64).sum::<u64>()
    );
    for (rank, own) in transfers.ranks.iter().enumerate() {
        assert_eq!(own.received + own.reused, own.peak);
        assert_eq!(own.peak, destination.bytes(rank));
    }
}

/// Two packages in a row between two ranks do not fit into one.
fn check_packing(transfers: &Transfers) {
    for pair in transfers.packages.windows(2) {
        let [one, two] = pair else { continue };
        if (one.source, one.destination) == (two.source, two.destination) {
            assert!(one.bytes + two.bytes > transfers.bucket_bytes);
        } else {
            assert!((one.source, one.destination) < (two.source, two.destination));
        }
    }
}

proptest! {
    #[test]
    fn every_cell_is_written_once_with_the_fewest_bytes(
        (source, destination, topology) in change(),
        bucket_bytes in 8..200usize,
    ) {
        let settings = PlanSettings { bucket_bytes, reuse: Reuse::InPlace };
        let transfers = plan(&source, &destination, &topology, &settings).expect("complete");
        check(&source, &destination, &topology, &transfers);
        check_packing(&transfers);
        // And the bytes arrive: the destination's ranks have what they would have been cut.
        let whole = whole(&source);
        let ranks = source.cut(&whole).expect("whole tensors");
        let exchange = Exchange {
            transfers: &transfers,
            source: &source,
            destination: &destination,
        };
        let transport = InMemory::new(destination.ranks());
        let arrived = execute(exchange, &ranks, &transport, Duration::from_secs(60));
        prop_assert_eq!(arrived, destination.cut(&whole));
        prop_assert_eq!(source.join(&ranks), Ok(whole));
    }

    #[test]
    fn replicas_share_the_load(
        (parts, replicas, to) in (1..4usize, 2..5usize, 1..7usize),
        stages in 1..3usize,
    ) {
        let training = grid(stages, parts, replicas);
        let weights = matrices(3, 12, 5);
        let from = ranks(training);
        let source = layout(&weights, &from);
        let destination = layout(&weights, &ranks(grid(1, to, 2)));
        let topology = Topology::separate(source.ranks(), destination.ranks(), 100);
        let settings = PlanSettings::default();
        let transfers = plan(&source, &destination, &topology, &settings).expect("complete");
        check(&source, &destination, &topology, &transfers);
        let size = |piece: &verl_reshard::Piece| {
            (piece.block.cells() * source.tensors()[piece.tensor].element.size()) as u64
        };
        let pieces = transfers.packages.iter().flat_map(|own| &own.pieces);
        let largest = pieces.map(size).max().unwrap_or(0);
        let mut loads: HashMap<(usize, usize), Vec<u64>> = HashMap::new();
        for (at, sent) in from.coordinates.iter().zip(&transfers.sent) {
            loads.entry((at.pipeline, at.tensor)).or_default().push(*sent);
        }
        for loads in loads.values() {
            let most = loads.iter().max().expect("replicas");
            let least = loads.iter().min().expect("replicas");
            prop_assert!(most - least <= largest, "{loads:?}, largest piece {largest}");
        }
    }
}

/// Grids, their shards and generation groupings of uneven sizes: all layouts of up to 8 ranks into each other.
#[test]
fn decoders_change_between_all_grids_and_shards() {
    let weights = ragged(3);
    let mut layouts = Vec::new();
    for (p, t, d) in [
        (1, 1, 1),
        (1, 2, 1),
        (2, 2, 2),
        (3, 1, 2),
        (1, 4, 2),
        (1, 1, 5),
        (1, 3, 1),
    ] {
        let training = ranks(grid(p, t, d));
        let own = layout(&weights, &training);
        layouts.push(own.clone().sharded(&training));
        layouts.push(own);
    }
    let training = Grid {
        pipeline: 2,
        tensor: 4,
        data: 1,
    };
    for grouping in [
        verl_reshard::Grouping::Stride,
        verl_reshard::Grouping::Consecutive,
    ] {
        let generation = Ranks::generation(training, 1, 2, grouping).expect("divisors");
        layouts.push(layout(&weights, &generation));
    }
    let settings = PlanSettings {
        bucket_bytes: 100,
        reuse: Reuse::InPlace,
    };
    for source in &layouts {
        for destination in &layouts {
            let (from, to) = (source.ranks(), destination.ranks());
            let mut topology = Topology::separate(from, to, 3);
            if from == to {
                topology = Topology::colocated(from, 3);
            }
            let transfers = plan(source, destination, &topology, &settings).expect("complete");
            check(source, destination, &topology, &transfers);
            check_packing(&transfers);
            if source == destination {
                assert_eq!(transfers.bytes(), 0);
            }
        }
    }
}

#[test]
fn plans_that_are_impossible_are_refused() {
    let weights = matrices(1, 4, 4);
    let one = layout(&weights, &ranks(grid(1, 1, 1)));
    let two = layout(&weights, &ranks(grid(1, 2, 1)));
    let error = |source: &Layout, destination: &Layout, topology: &Topology, bucket_bytes| {
        let settings = PlanSettings {
            bucket_bytes,
            reuse: Reuse::InPlace,
        };
        let refused = plan(source, destination, topology, &settings);
        refused.expect_err("an impossible plan").to_string()
    };
    let separate = Topology::separate(1, 2, 8);
    let other = layout(&matrices(1, 4, 3), &ranks(grid(1, 2, 1)));
    assert_eq!(
        error(&one, &other, &separate, 64),
        "tensor 0 is `layers.0.cut_0` (F32 [4, 4]) in the source and `layers.0.cut_0` (F32 [4, 3]) in the destination; \
         use layouts of the same tensors in one order"
    );
    assert_eq!(
        error(&one, &two, &Topology::colocated(2, 8), 64),
        "the topology lists 2 ranks as `source`, but the layout has 1; list each once"
    );
    let mut own = separate.clone();
    own.own[1] = Some(1);
    assert!(error(&one, &two, &own, 64).contains("source rank 1"));
    assert_eq!(
        error(&one, &two, &separate, 3),
        "buckets of 3 bytes are smaller than a cell of `layers.0.cut_0`; use at least 4"
    );
    let half = Shard {
        block: Block(vec![0..4, 0..2]),
        cells: None,
    };
    let spec = weights[0].spec.clone();
    let new = |ranks, shard| Layout::new(vec![spec.clone()], ranks, vec![shard]).expect("one");
    let source = new(1, vec![Some(half)]);
    let whole = Shard {
        block: Block::whole(&spec.shape),
        cells: None,
    };
    let destination = new(2, vec![None, Some(whole)]);
    assert_eq!(
        error(&source, &destination, &separate, 64),
        "no rank of the source has cells [0..4, 2..4] of `layers.0.cut_0`, which rank 1 of the destination needs; \
         add them to the source"
    );
    assert!(matches!(weights[0].depth, Depth::Layer(0)));
}

#[test]
fn a_plan_prints_its_figures() {
    let weights = matrices(2, 64, 64);
    let training = grid(1, 4, 1);
    let source = layout(&weights, &ranks(training));
    let generation = Ranks::generation(training, 1, 2, verl_reshard::Grouping::Stride);
    let destination = layout(&weights, &generation.expect("divisors"));
    let topology = Topology::colocated(4, 2);
    let transfers = plan(&source, &destination, &topology, &PlanSettings::default());
    let text = transfers.expect("complete").to_string();
    let expected = "
 rank   received     reused    weights  redundant
    0   12.0 KiB   12.0 KiB   24.0 KiB        0 B
    1   12.0 KiB   12.0 KiB   24.0 KiB        0 B
    2   12.0 KiB   12.0 KiB   24.0 KiB        0 B
    3   12.0 KiB   12.0 KiB   24.0 KiB        0 B
sent 48.0 KiB in 4 packages of up to 256 MiB, 48.0 KiB within a host";
    assert_eq!(format!("\n{text}"), expected);
}
