//! Decoders whose weights went through other layouts compute the same bits.

use std::path::{Path, PathBuf};
use std::time::Duration;

use burn::tensor::{Device, Int, Tensor};
use verl_models::Decoder;
use verl_models::bench::preset;
use verl_models::model::ModelInterface;
use verl_models::random::{DrawKey, Purpose};
use verl_models::reshard::{
    Exchange, Grid, Grouping, InMemory, Layout, PlanSettings, RankBuffers, Ranks, Reuse, Topology,
    decoder_weights, execute, parameter_bytes, plan, with_parameter_bytes,
};
use verl_models::rollout::Decoding;
use verl_models::rollout::engine::{RolloutRequest, SamplingSettings};

/// Bits of logits, and the sampled tokens.
type Output = (Vec<u32>, Vec<Vec<u32>>);

fn output(decoder: &Decoder) -> Output {
    let vocab = decoder.config.vocab_size as u32;
    let prompt: Vec<u32> = (0..9).map(|at| (at * 37 + 5) % vocab).collect();
    let ids: Vec<i32> = prompt.iter().map(|&id| id as i32).collect();
    let ids = Tensor::<1, Int>::from_data(ids.as_slice(), &Device::flex());
    let logits = decoder.forward(ids.unsqueeze::<2>()).into_data();
    let bits = logits.as_slice::<f32>().expect("f32");
    let bits = bits.iter().map(|logit| logit.to_bits()).collect();
    let request = |row: u64| RolloutRequest {
        prompt: prompt.clone(),
        key: DrawKey {
            seed: 7,
            purpose: Purpose::Rollout,
            step: 1,
            row,
            attempt: 0,
        },
        max_new_tokens: 8,
    };
    let requests: Vec<_> = (0..3).map(request).collect();
    let mut tokens = vec![Vec::new(); requests.len()];
    let sampled = Decoding::Batched.generate(
        decoder,
        &requests,
        &SamplingSettings::default(),
        &mut |at, output| {
            tokens[at] = output.tokens;
            Ok(())
        },
    );
    sampled.expect("valid requests");
    (bits, tokens)
}

fn ranks((pipeline, tensor, data): (usize, usize, usize)) -> Ranks {
    let grid = Grid {
        pipeline,
        tensor,
        data,
    };
    Ranks::grid(grid).expect("sizes above 0")
}

fn changed(
    from: &Layout,
    to: &Layout,
    topology: &Topology,
    buffers: &[RankBuffers],
) -> Vec<RankBuffers> {
    let settings = PlanSettings {
        bucket_bytes: 4096,
        reuse: Reuse::InPlace,
    };
    let transfers = plan(from, to, topology, &settings).expect("the same weights");
    let exchange = Exchange {
        transfers: &transfers,
        source: from,
        destination: to,
    };
    let transport = InMemory::new(to.ranks());
    let timeout = Duration::from_secs(60);
    execute(exchange, buffers, &transport, timeout).expect("all packages arrive")
}

/// The decoder from the ranks of each replica alone.
fn replicas(
    decoder: &Decoder,
    layout: &Layout,
    ranks: &Ranks,
    buffers: &[RankBuffers],
) -> Vec<Decoder> {
    let replica = |data: usize| {
        let own = ranks.coordinates.iter().enumerate();
        let own = own.filter(|(_, at)| at.data == data);
        let own: Vec<usize> = own.map(|(rank, _)| rank).collect();
        let of_replica: Vec<_> = own.iter().map(|&rank| buffers[rank].clone()).collect();
        let whole = layout.subset(&own).join(&of_replica);
        // Start from other weights, so that each one has to come from the ranks.
        let blank = Decoder::random(decoder.config.clone(), 99, &Device::flex());
        with_parameter_bytes(blank, &whole.expect("a replica has all weights"))
    };
    (0..ranks.grid.data).map(replica).collect()
}

/// From a training layout to a generation layout and back; the decoder of each replica gives the same bits.
fn check(decoder: &Decoder, training: &Ranks, sharded: bool, generation: &Ranks) {
    let weights = decoder_weights(decoder).expect("f32");
    let whole = parameter_bytes(decoder);
    let mut from = Layout::of(&weights, training).expect("cuts that fit");
    if sharded {
        from = from.sharded(training);
    }
    let to = Layout::of(&weights, generation).expect("cuts that fit");
    let topology = if training.len() == generation.len() {
        Topology::colocated(training.len(), 2)
    } else {
        Topology::separate(training.len(), generation.len(), 2)
    };
    let trained = from.cut(&whole).expect("whole tensors");
    let generating = changed(&from, &to, &topology, &trained);
    let expected = output(decoder);
    for replica in replicas(decoder, &to, generation, &generating) {
        assert_eq!(output(&replica), expected, "{training:?} to {generation:?}");
    }
    let mut back = topology.clone();
    std::mem::swap(&mut back.source, &mut back.destination);
    back.own = match training.len() == generation.len() {
        true => topology.own,
        false => vec![None; training.len()],
    };
    let again = changed(&to, &from, &back, &generating);
    assert_eq!(again, trained, "{generation:?} to {training:?}");
}

/// Four layers, four heads, two of keys and values: parts that outnumber the heads share them.
fn decoder() -> Decoder {
    let mut config = preset("tiny").expect("a preset");
    config.layers = 4;
    config.vocab_size = 70;
    Decoder::random(config, 3, &Device::flex())
}

#[test]
fn generation_groups_of_a_training_grid_compute_the_same_bits() {
    let decoder = decoder();
    for (training, p_g, t_g) in [
        ((1, 4, 1), 1, 2),
        ((2, 2, 2), 1, 1),
        ((4, 2, 1), 2, 1),
        ((1, 8, 1), 1, 4),
    ] {
        let training = ranks(training);
        for grouping in [Grouping::Stride, Grouping::Consecutive] {
            let generation = Ranks::generation(training.grid, p_g, t_g, grouping);
            check(&decoder, &training, false, &generation.expect("divisors"));
        }
    }
}

#[test]
fn shards_and_groups_of_other_sizes_compute_the_same_bits() {
    let decoder = decoder();
    // ZeRO-3 over all, over the replicas of a tensor-parallel grid, and other numbers of ranks that divide nothing.
    for (training, sharded, generation) in [
        ((1, 1, 4), true, (1, 2, 2)),
        ((1, 2, 3), true, (1, 3, 1)),
        ((3, 1, 1), false, (1, 1, 2)),
        ((1, 3, 1), false, (2, 2, 1)),
    ] {
        check(&decoder, &ranks(training), sharded, &ranks(generation));
    }
}

#[test]
fn every_family_of_decoders_can_be_cut() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models");
    let entries = std::fs::read_dir(models).expect("models of the tree");
    let folders = entries.map(|entry| entry.expect("an entry").path());
    let folders: Vec<PathBuf> = folders.filter(|path| path.is_dir()).collect();
    assert!(folders.len() >= 5);
    let training = ranks((2, 2, 1));
    let generation = Ranks::generation(training.grid, 1, 1, Grouping::Stride).expect("divisors");
    for folder in folders {
        let decoder = Decoder::load(&folder, &Device::flex()).expect("a model");
        check(&decoder, &training, false, &generation);
        // Only norms and biases of sums are on several ranks of a stage.
        let weights = decoder_weights(&decoder).expect("f32");
        let matrices = weights.iter().filter(|own| own.spec.shape.len() > 1);
        assert!(
            matrices.clone().all(|own| own.split.is_some()),
            "{folder:?}"
        );
    }
}
