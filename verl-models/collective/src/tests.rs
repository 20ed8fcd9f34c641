//! One suite for both transports: results against serial ones bit for bit, and every fault.

use std::io::Write;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::tcp::{Group, TcpMember};
use crate::transport::{Message, Payload, Transport};
use crate::{Collective, CollectiveError, Data, Member, Operation, threads};

/// Long enough for a busy machine.
const LONG: Duration = Duration::from_secs(60);
/// For operations that have to reach their deadline.
const SHORT: Duration = Duration::from_millis(100);

fn over_tcp(world: usize, epoch: u64, timeout: Duration) -> Vec<TcpMember> {
    let listeners: Vec<TcpListener> = (0..world)
        .map(|_| TcpListener::bind("127.0.0.1:0").expect("a port"))
        .collect();
    let group = Group {
        addresses: listeners
            .iter()
            .map(|own| own.local_addr().expect("an address"))
            .collect(),
        epoch,
        key: *b"key of the group",
        timeout: LONG,
    };
    let members = on_each(
        listeners.into_iter().enumerate().collect(),
        |(rank, listener)| group.join(rank, &listener).expect("all join"),
    );
    members
        .into_iter()
        .map(|member| Member { timeout, ..member })
        .collect()
}

/// Runs `work` on a thread for each member; results by rank.
fn on_each<M: Send, R: Send>(members: Vec<M>, work: impl Fn(M) -> R + Sync) -> Vec<R> {
    std::thread::scope(|scope| {
        let each = members.into_iter().map(|member| {
            let work = &work;
            scope.spawn(move || work(member))
        });
        let each: Vec<_> = each.collect();
        each.into_iter()
            .map(|thread| thread.join().expect("no panic"))
            .collect()
    })
}

/// Numbers of very different sizes, so that every order of addition gives other bits.
fn numbers(rank: usize, count: usize) -> Vec<f32> {
    let number = |i: usize| {
        let x = ((rank * 7919 + i) as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let exponent = (x >> 59) as i32 - 16;
        ((x >> 20) as u16 as f32 - 32768.0) * 2f32.powi(exponent)
    };
    (0..count).map(number).collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Results of operations on `world` members equal serial ones.
fn agrees_with_serial<T: Transport>(make: impl Fn(usize, u64, Duration) -> Vec<Member<T>>) {
    for world in [1, 2, 3, 5] {
        let count = 1000;
        // Parts of different sizes, an empty one included.
        let cut = |rank: usize| (rank * rank * count) / (world * world);
        let parts: Vec<_> = (0..world).map(|rank| cut(rank)..cut(rank + 1)).collect();
        // In the second round the last ranks have no values.
        let rounds = [world, world.div_ceil(2)];
        let mut expected = numbers(99, count);
        for taking_part in rounds {
            for rank in 0..taking_part {
                let values = numbers(rank, count);
                expected
                    .iter_mut()
                    .zip(values)
                    .for_each(|(sum, value)| *sum += value);
            }
        }
        let found = on_each(make(world, 4, LONG), |mut member| {
            let rank = member.rank();
            assert_eq!((member.world(), member.epoch()), (world, 4));
            let mut sum = numbers(99, count)[parts[rank].clone()].to_vec();
            for taking_part in rounds {
                let own = (rank < taking_part).then(|| numbers(rank, count));
                member
                    .reduce_scatter_ordered(own, &parts, &mut sum)
                    .expect("a sum");
            }
            member.barrier().expect("all arrive");
            let all = member.all_gather(Data::F32(sum)).expect("all sums");
            let texts = member
                .all_gather(Data::Bytes(vec![rank as u8; rank]))
                .expect("all texts");
            let doubles = member
                .all_gather(Data::F64(vec![rank as f64 / 3.0]))
                .expect("all");
            for other in 0..world {
                assert_eq!(
                    texts[other].as_ref(),
                    &Data::Bytes(vec![other as u8; other])
                );
                assert_eq!(doubles[other].as_f64(), Some(&[other as f64 / 3.0][..]));
            }
            for root in 0..world {
                let own = (root == rank).then(|| Data::F32(vec![root as f32, -0.0]));
                let got = member.broadcast(root, own).expect("the root's data");
                assert_eq!(bits(got.as_f32().unwrap()), bits(&[root as f32, -0.0]));
            }
            all.iter()
                .flat_map(|part| part.as_f32().unwrap().to_vec())
                .collect::<Vec<f32>>()
        });
        for sums in found {
            assert_eq!(bits(&sums), bits(&expected), "{world} members");
        }
    }
}

/// One of several members ends without a word: the others fail and name it, or were aborted by one that does.
fn a_lost_member_ends_the_group<T: Transport>(
    make: impl Fn(usize, u64, Duration) -> Vec<Member<T>>,
) {
    for operation in [
        Operation::Barrier,
        Operation::AllGather,
        Operation::ReduceScatter,
    ] {
        let errors = on_each(make(3, 0, LONG), |mut member| {
            if member.rank() == 1 {
                return None;
            }
            let error = call(&mut member, operation).expect_err("a member is missing");
            // The group is not used again.
            assert_eq!(member.barrier(), Err(CollectiveError::Aborted));
            Some(error)
        });
        check_cause(&errors, &CollectiveError::PeerLost { rank: 1 });
    }
}

/// At least one member reports the cause, all others it or the abort.
#[track_caller]
fn check_cause(errors: &[Option<CollectiveError>], cause: &CollectiveError) {
    let errors: Vec<_> = errors.iter().flatten().collect();
    assert!(errors.contains(&cause), "{errors:?}");
    for error in errors {
        assert!(
            error == cause || *error == CollectiveError::Aborted,
            "{error}"
        );
    }
}

fn call<T: Transport>(member: &mut Member<T>, operation: Operation) -> Result<(), CollectiveError> {
    let (rank, world) = (member.rank(), member.world());
    match operation {
        Operation::Join => Ok(()),
        Operation::Barrier => member.barrier(),
        Operation::AllGather => member.all_gather(Data::F32(vec![1.0])).map(drop),
        Operation::Broadcast => {
            let own = (rank == 0).then(|| Data::F32(vec![1.0]));
            member.broadcast(0, own).map(drop)
        }
        Operation::ReduceScatter => {
            let parts: Vec<_> = (0..world).map(|rank| rank..rank + 1).collect();
            member.reduce_scatter_ordered(Some(vec![1.0; world]), &parts, &mut [0.0])
        }
    }
}

/// A member that is there but calls nothing: the other one reaches its deadline.
fn a_hanging_member_is_reported<T: Transport>(
    make: impl Fn(usize, u64, Duration) -> Vec<Member<T>>,
) {
    for operation in [
        Operation::Barrier,
        Operation::AllGather,
        Operation::ReduceScatter,
    ] {
        let done = std::sync::Barrier::new(2);
        let errors = on_each(make(2, 0, SHORT), |mut member| {
            let error = match member.rank() {
                1 => None,
                _ => Some(call(&mut member, operation).expect_err("the other hangs")),
            };
            done.wait();
            // The member that hung finds the group ended, too. What it has received already may complete one operation.
            assert!((0..2).any(|_| call(&mut member, operation).is_err()));
            error
        });
        check_cause(&errors, &CollectiveError::Timeout { rank: 1, operation });
    }
}

/// A message of an earlier epoch is dropped: alone it does not complete an operation, and it does not disturb a valid one.
fn messages_of_another_epoch_are_dropped<T: Transport>(
    make: impl Fn(usize, u64, Duration) -> Vec<Member<T>>,
) {
    let stale = |payload| Message {
        epoch: 6,
        sequence: 1,
        operation: Operation::AllGather,
        payload,
    };
    let wrong = || Payload::Whole(Arc::new(Data::F32(vec![666.0])));
    let found = on_each(make(2, 7, LONG), |mut member| {
        let to = 1 - member.rank();
        let sent = member
            .transport
            .send(to, stale(wrong()), Instant::now() + LONG);
        assert_eq!(sent, Ok(()));
        let own = Data::F32(vec![member.rank() as f32]);
        let all = member.all_gather(own).expect("valid messages");
        all.iter()
            .map(|data| data.as_f32().unwrap()[0])
            .collect::<Vec<f32>>()
    });
    assert_eq!(found, [[0.0, 1.0], [0.0, 1.0]]);
    let done = std::sync::Barrier::new(2);
    let errors = on_each(make(2, 7, SHORT), |mut member| {
        let error = match member.rank() {
            0 => Some(call(&mut member, Operation::AllGather).expect_err("nothing valid arrives")),
            _ => {
                let sent = member
                    .transport
                    .send(0, stale(wrong()), Instant::now() + LONG);
                assert_eq!(sent, Ok(()));
                None
            }
        };
        done.wait();
        error
    });
    let cause = CollectiveError::Timeout {
        rank: 1,
        operation: Operation::AllGather,
    };
    check_cause(&errors, &cause);
}

/// Another operation, or other sizes, are reported and end the group.
fn members_that_disagree_are_reported<T: Transport>(
    make: impl Fn(usize, u64, Duration) -> Vec<Member<T>>,
) {
    let errors = on_each(make(2, 0, LONG), |mut member| match member.rank() {
        0 => call(&mut member, Operation::AllGather).expect_err("another operation"),
        _ => call(&mut member, Operation::Barrier).expect_err("another operation"),
    });
    let named =
        |error: &CollectiveError| error.to_string().contains("does not follow the protocol");
    assert!(errors.iter().any(named), "{errors:?}");
    let errors = on_each(make(2, 0, LONG), |mut member| {
        let parts = [0..1 + member.rank(), 2..4];
        let mut sum = vec![0.0; parts[member.rank()].len()];
        let done = member.reduce_scatter_ordered(Some(vec![1.0; 4]), &parts, &mut sum);
        done.map(|()| sum)
    });
    let sizes = |error: &CollectiveError| {
        error
            .to_string()
            .contains("2 values for the part of rank 0, which has 1")
    };
    assert!(
        errors.iter().any(|error| error.as_ref().is_err_and(sizes)),
        "{errors:?}"
    );
    let mut alone = make(1, 0, LONG).remove(0);
    let parts = std::slice::from_ref(&(0..2));
    let outside = alone.reduce_scatter_ordered(Some(vec![1.0]), parts, &mut [0.0, 0.0]);
    assert!(
        outside
            .unwrap_err()
            .to_string()
            .contains("0..2 is not a part of 1 values")
    );
}

/// An abort from another thread ends operations that wait; the next epoch works.
fn an_abort_ends_waiting_members<T: Transport>(
    make: impl Fn(usize, u64, Duration) -> Vec<Member<T>>,
) {
    let members = make(3, 0, LONG);
    let aborter = members[0].aborter();
    let errors = on_each(members, |mut member| {
        if member.rank() == 2 {
            aborter.abort();
            // It stays until the others have failed, so nobody is lost.
            while call(&mut member, Operation::Broadcast).is_ok() {}
            return CollectiveError::Aborted;
        }
        call(&mut member, Operation::Barrier).expect_err("the group was aborted")
    });
    assert_eq!(errors[0], CollectiveError::Aborted);
    assert!(
        errors[1] == CollectiveError::Aborted || errors[1] == CollectiveError::PeerLost { rank: 0 }
    );
    let again = on_each(make(3, 1, LONG), |mut member| member.barrier());
    assert_eq!(again, [Ok(()), Ok(()), Ok(())]);
}

macro_rules! suite {
    ($module:ident, $make:expr) => {
        mod $module {
            #[test]
            fn agrees_with_serial() {
                super::agrees_with_serial($make);
            }
            #[test]
            fn a_lost_member_ends_the_group() {
                super::a_lost_member_ends_the_group($make);
            }
            #[test]
            fn a_hanging_member_is_reported() {
                super::a_hanging_member_is_reported($make);
            }
            #[test]
            fn messages_of_another_epoch_are_dropped() {
                super::messages_of_another_epoch_are_dropped($make);
            }
            #[test]
            fn members_that_disagree_are_reported() {
                super::members_that_disagree_are_reported($make);
            }
            #[test]
            fn an_abort_ends_waiting_members() {
                super::an_abort_ends_waiting_members($make);
            }
        }
    };
}

suite!(of_threads, crate::threads);
suite!(of_processes, super::over_tcp);

/// The beginning of a frame, or a damaged one, followed by the end of the connection.
#[test]
fn a_connection_that_breaks_in_a_frame_is_a_lost_member() {
    let whole = crate::tcp::encode(&crate::tcp::Frame::Message(Message {
        epoch: 0,
        sequence: 1,
        operation: Operation::AllGather,
        payload: Payload::Whole(Arc::new(Data::F32(vec![1.0; 100]))),
    }));
    let mut damaged = whole.clone();
    damaged[100] ^= 1;
    for bytes in [&whole[..30], &whole[..200], &damaged] {
        let errors = on_each(over_tcp(2, 0, LONG), |mut member| match member.rank() {
            0 => Some(call(&mut member, Operation::AllGather).expect_err("half a frame")),
            _ => {
                let mut stream = member.transport.stream(0).expect("a connection");
                stream.write_all(bytes).expect("it is open");
                None
            }
        });
        check_cause(&errors, &CollectiveError::PeerLost { rank: 1 });
    }
}

/// Large messages in both directions at once exceed what a connection buffers.
#[test]
fn members_that_send_to_each_other_do_not_block() {
    let count = 3 << 20;
    let found = on_each(over_tcp(2, 0, LONG), |mut member| {
        let own = Data::F32(vec![member.rank() as f32; count]);
        let all = member.all_gather(own).expect("large data");
        all.iter()
            .map(|data| data.as_f32().unwrap().len())
            .sum::<usize>()
    });
    assert_eq!(found, [2 * count, 2 * count]);
}

/// Connections with another key or epoch, or that stay silent, are closed; the right ones are accepted afterwards.
#[test]
fn strangers_and_old_members_do_not_join() {
    let listeners = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").expect("a port"));
    let addresses: Vec<_> = listeners
        .iter()
        .map(|own| own.local_addr().expect("an address"))
        .collect();
    let group = |epoch, key: &[u8; 16], timeout| Group {
        addresses: addresses.clone(),
        epoch,
        key: *key,
        timeout,
    };
    let right = b"0123456789abcdef";
    let silent = std::net::TcpStream::connect(addresses[0]).expect("it listens");
    std::thread::scope(|scope| {
        let first = scope.spawn(|| group(2, right, LONG).join(0, &listeners[0]));
        for (epoch, key) in [(1, right), (2, b"another key.....")] {
            let refused = group(epoch, key, SHORT).join(1, &listeners[1]);
            let expected = CollectiveError::Timeout {
                rank: 0,
                operation: Operation::Join,
            };
            assert_eq!(refused.err(), Some(expected));
        }
        let mut second = group(2, right, LONG)
            .join(1, &listeners[1])
            .expect("the right group");
        let mut first = first.join().expect("no panic").expect("rank 1 joined");
        let other = scope.spawn(move || first.barrier());
        assert_eq!(second.barrier(), Ok(()));
        assert_eq!(other.join().expect("no panic"), Ok(()));
    });
    drop(silent);
}

#[test]
fn a_group_of_threads_has_one_member_for_each_rank() {
    let ranks = threads(3, 5, LONG);
    let ranks: Vec<_> = ranks
        .iter()
        .map(|member| (member.rank(), member.world()))
        .collect();
    assert_eq!(ranks, [(0, 3), (1, 3), (2, 3)]);
}
