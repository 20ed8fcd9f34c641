//! Plans carried out over transports that lose, repeat or damage packages.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use verl_reshard::{
    Exchange, ExchangeError, Grouping, InMemory, Layout, PlanSettings, RankBuffers, Ranks, Reuse,
    Topology, Transfers, Transport, execute, plan,
};

use crate::kit::{grid, layout, ragged, ranks, whole};

/// Long enough for any machine, for exchanges in which everything arrives.
const PATIENT: Duration = Duration::from_secs(60);

/// Something happens to package 1.
#[derive(Clone, Copy)]
enum Fault {
    Lost,
    Repeated,
    Cut,
    Misdirected,
    Refused,
}

struct Faulty {
    inner: InMemory,
    fault: Fault,
    sent: Mutex<usize>,
}

impl Transport for Faulty {
    fn send(&self, package: usize, destination: usize, bytes: Vec<u8>) -> Result<(), String> {
        *self.sent.lock().expect("a count") += 1;
        let send = |to, bytes| self.inner.send(package, to, bytes);
        match self.fault {
            _ if package != 1 => send(destination, bytes),
            Fault::Lost => Ok(()),
            Fault::Repeated => {
                send(destination, bytes.clone())?;
                send(destination, bytes)
            }
            Fault::Cut => send(destination, bytes[1..].to_vec()),
            Fault::Misdirected => send(destination ^ 1, bytes),
            Fault::Refused => Err("the link is down".to_owned()),
        }
    }

    fn receive(
        &self,
        destination: usize,
        deadline: Instant,
    ) -> Result<Option<(usize, Vec<u8>)>, String> {
        self.inner.receive(destination, deadline)
    }
}

fn change() -> (Layout, Layout, Transfers) {
    let training = grid(2, 2, 1);
    let weights = ragged(4);
    let source = layout(&weights, &ranks(training));
    let generation = Ranks::generation(training, 1, 2, Grouping::Stride).expect("divisors");
    let destination = layout(&weights, &generation);
    let settings = PlanSettings {
        bucket_bytes: 64,
        reuse: Reuse::InPlace,
    };
    let topology = Topology::colocated(4, 4);
    let transfers = plan(&source, &destination, &topology, &settings).expect("complete");
    (source, destination, transfers)
}

fn run(fault: Fault, timeout: Duration) -> (Result<Vec<RankBuffers>, ExchangeError>, Transfers) {
    let (source, destination, transfers) = change();
    let transport = Faulty {
        inner: InMemory::new(4),
        fault,
        sent: Mutex::new(0),
    };
    let buffers = source.cut(&whole(&source)).expect("whole tensors");
    let exchange = Exchange {
        transfers: &transfers,
        source: &source,
        destination: &destination,
    };
    let result = execute(exchange, &buffers, &transport, timeout);
    assert!(*transport.sent.lock().expect("a count") > 2);
    (result, transfers)
}

#[test]
fn a_lost_package_is_reported_with_its_sender() {
    let (result, transfers) = run(Fault::Lost, Duration::from_millis(50));
    let Err(ExchangeError::Deadline {
        rank,
        package,
        source_rank,
        ..
    }) = result
    else {
        panic!("{result:?}")
    };
    let lost = &transfers.packages[1];
    assert_eq!(
        (rank, package, source_rank),
        (lost.destination, 1, lost.source)
    );
}

#[test]
fn a_repeated_package_changes_nothing_or_is_refused() {
    // The repetition may arrive after the last package that the rank waits for.
    let (result, transfers) = run(Fault::Repeated, PATIENT);
    match result {
        Ok(buffers) => {
            let (source, destination, _) = change();
            assert_eq!(Ok(buffers), destination.cut(&whole(&source)));
        }
        Err(error) => {
            let rank = transfers.packages[1].destination;
            let bytes = transfers.packages[1].bytes;
            let package = 1;
            let unexpected = ExchangeError::Unexpected {
                rank,
                package,
                bytes,
            };
            assert_eq!(error, unexpected);
        }
    }
}

#[test]
fn a_short_or_misdirected_package_is_refused() {
    for fault in [Fault::Cut, Fault::Misdirected] {
        let (result, _) = run(fault, Duration::from_millis(50));
        let error = result.expect_err("a wrong package");
        let unexpected = matches!(error, ExchangeError::Unexpected { package: 1, .. });
        assert!(
            unexpected || matches!(error, ExchangeError::Deadline { package: 1, .. }),
            "{error}"
        );
    }
}

#[test]
fn a_link_that_is_down_is_reported() {
    let (result, transfers) = run(Fault::Refused, Duration::from_millis(50));
    let rank = transfers.packages[1].source;
    let error = result.expect_err("no link").to_string();
    assert_eq!(
        error,
        format!("rank {rank} could not send: the link is down")
    );
}

#[test]
fn buffers_of_another_layout_are_refused() {
    let (source, destination, transfers) = change();
    let whole = whole(&source);
    assert!(source.cut(&whole[1..]).is_err());
    let buffers = source.cut(&whole).expect("whole tensors");
    let exchange = Exchange {
        transfers: &transfers,
        source: &source,
        destination: &destination,
    };
    let transport = InMemory::new(4);
    assert!(execute(exchange, &buffers[1..], &transport, PATIENT).is_err());
    let mut short = buffers.clone();
    short[2][0].pop();
    let error = exchange.send_from(2, &short[2], &transport);
    assert_eq!(
        error.expect_err("a byte is missing").to_string(),
        format!(
            "rank 2 has {} bytes of `embed`, but its shard has {}; pass the buffers of this layout",
            short[2][0].len(),
            buffers[2][0].len()
        )
    );
}

#[test]
fn ranks_that_disagree_or_lack_cells_cannot_be_joined() {
    let (source, ..) = change();
    let whole = whole(&source);
    let buffers = source.cut(&whole).expect("whole tensors");
    assert_eq!(source.join(&buffers).as_ref(), Ok(&whole));
    // Stages 0 and 1 both have the embedding.
    let mut changed = buffers.clone();
    changed[2][0][5] ^= 1;
    let error = source.join(&changed).expect_err("two embeddings");
    assert!(matches!(error, ExchangeError::Replica { rank: 0, tensor } if tensor == "embed"));
    let half = layout(&ragged(4), &ranks(grid(2, 2, 1)));
    let mut shards = vec![vec![None; 4]; half.tensors().len()];
    shards[0] = (0..4).map(|rank| half.shard(0, rank).cloned()).collect();
    let only_embedding = Layout::new(half.tensors().to_vec(), 4, shards).expect("a layout");
    let buffers = only_embedding.cut(&whole).expect("whole tensors");
    let error = only_embedding
        .join(&buffers)
        .expect_err("nobody has the layers");
    assert!(matches!(error, ExchangeError::Missing { tensor, .. } if tensor == "0.q"));
}
