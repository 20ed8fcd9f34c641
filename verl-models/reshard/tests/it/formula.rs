//! The planner against the table of HybridFlow: every training layout up to 16 ranks, every generation layout of it.

use verl_reshard::{
    Distance, Grid, Grouping, Layout, Mesh, PlanSettings, RankFigures, Ranks, Reuse, Topology,
    Transfers, Weight, plan,
};

use crate::kit::{grid, layout, matrices, ranks};

/// A training grid with a generation grid: (p, t, d), p_g, t_g.
type Case = (Grid, usize, usize);

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let divisors = |n: usize| (1..=n).filter(move |own| n.is_multiple_of(*own));
    for n in 1..=16 {
        for p in divisors(n) {
            for t in divisors(n / p) {
                for p_g in divisors(p) {
                    cases.extend(divisors(t).map(|t_g| (grid(p, t, n / p / t), p_g, t_g)));
                }
            }
        }
    }
    cases
}

/// Weights that every part of the case divides evenly, and their bytes.
fn weights(training: Grid) -> (Vec<Weight>, u64) {
    let (p, t, n) = (training.pipeline, training.tensor, training.ranks());
    let weights = matrices(2 * p, t * n, t);
    let bytes = weights.iter().map(|own| own.spec.bytes() as u64).sum();
    (weights, bytes)
}

fn transfers(from: &Layout, to: &Layout, per_host: usize, reuse: Reuse) -> Transfers {
    let topology = Topology::colocated(from.ranks(), per_host);
    let settings = PlanSettings {
        reuse,
        ..PlanSettings::default()
    };
    plan(from, to, &topology, &settings).expect("layouts of the same weights")
}

fn generation((training, p_g, t_g): Case, grouping: Grouping) -> Ranks {
    Ranks::generation(training, p_g, t_g, grouping).expect("divisors")
}

#[test]
fn stride_grouping_receives_and_keeps_what_the_paper_states_in_every_layout() {
    let cases = cases();
    // Ordered products of five factors, for all N up to 16.
    assert_eq!(cases.len(), 341);
    for case in cases {
        let (training, p_g, t_g) = case;
        let (weights, m) = weights(training);
        let from = layout(&weights, &ranks(training));
        let to = layout(&weights, &generation(case, Grouping::Stride));
        let block = training.pipeline * training.tensor;
        let transfers = transfers(&from, &to, block, Reuse::InPlace);
        let (tp, gen_tp) = (block as u64, (p_g * t_g) as u64);
        let expected = RankFigures {
            received: m * (tp - gen_tp) / (gen_tp * tp),
            reused: m / tp,
            peak: m / gen_tp,
            redundant: 0,
        };
        assert_eq!(m * (tp - gen_tp) % (gen_tp * tp), 0);
        for own in &transfers.ranks {
            assert_eq!(*own, expected, "{case:?}");
        }
        // Every rank finds what it lacks in its own block of p·t ranks, here a host.
        assert_eq!(transfers.bytes_over(Distance::Network), 0, "{case:?}");
    }
}

#[test]
fn gathering_over_the_model_parallel_block_costs_what_the_paper_states_for_hybridflow_v() {
    for (training, ..) in cases() {
        let (weights, m) = weights(training);
        let all = Ranks::data_parallel(training.ranks()).expect("ranks");
        let from = layout(&weights, &ranks(training));
        let to = layout(&weights, &all);
        let tp = (training.pipeline * training.tensor) as u64;
        let expected = RankFigures {
            received: m * (tp - 1) / tp,
            reused: m / tp,
            peak: m,
            redundant: m / tp,
        };
        let transfers = transfers(&from, &to, tp as usize, Reuse::Copied);
        assert!(
            transfers.ranks.iter().all(|own| *own == expected),
            "{training:?}"
        );
        assert_eq!(transfers.bytes_over(Distance::Network), 0, "{training:?}");
    }
}

#[test]
fn gathering_over_all_ranks_costs_what_the_paper_states_for_deepspeed_chat() {
    for n in 1..=16 {
        let (weights, m) = weights(grid(1, 1, n));
        let replicas = Ranks::data_parallel(n).expect("ranks");
        let to = layout(&weights, &replicas);
        let from = to.clone().sharded(&replicas);
        let transfers = transfers(&from, &to, 8, Reuse::Copied);
        let n = n as u64;
        let expected = RankFigures {
            received: m * (n - 1) / n,
            reused: m / n,
            peak: m,
            redundant: m / n,
        };
        assert!(transfers.ranks.iter().all(|own| *own == expected), "{n}");
    }
}

#[test]
fn consecutive_grouping_receives_more_and_keeps_parts_that_it_does_not_use() {
    let figures = |case: Case, grouping| {
        let (weights, m) = weights(case.0);
        let from = layout(&weights, &ranks(case.0));
        let to = layout(&weights, &generation(case, grouping));
        (transfers(&from, &to, 8, Reuse::InPlace), m)
    };
    let (worst, m) = figures((grid(1, 4, 1), 1, 2), Grouping::Consecutive);
    assert_eq!(worst.largest().received, m / 2);
    assert_eq!(worst.largest().redundant, m / 4);
    for case in cases() {
        let (stride, m) = figures(case, Grouping::Stride);
        let (consecutive, _) = figures(case, Grouping::Consecutive);
        let peaks = |of: &Transfers| of.ranks.iter().map(|own| own.peak).collect::<Vec<_>>();
        assert_eq!(peaks(&stride), peaks(&consecutive), "{case:?}");
        // What is not reused is redundant, and has to be received instead.
        let tp = (case.0.pipeline * case.0.tensor) as u64;
        for (own, best) in consecutive.ranks.iter().zip(&stride.ranks) {
            assert_eq!(own.received, best.received + own.redundant, "{case:?}");
            assert_eq!(own.reused + own.redundant, m / tp, "{case:?}");
        }
    }
}

/// What docs/dispatch.md shows of the meshes of this example is what they print.
#[test]
fn the_page_shows_the_meshes_that_are_printed() {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/dispatch.md");
    let page = std::fs::read_to_string(page).expect("the page");
    let training = grid(1, 4, 1);
    let actor = Mesh::of(&ranks(training));
    let rollout = Mesh::of(&generation((training, 1, 2), Grouping::Stride));
    for mesh in [&actor, &rollout] {
        let own: Vec<String> = mesh.dp_rank.iter().map(usize::to_string).collect();
        assert!(page.contains(&format!("`{}`", own.join(" "))), "{mesh:?}");
    }
    assert!(page.contains(&rollout.to_string()), "{rollout}");
}
