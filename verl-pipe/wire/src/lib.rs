//! Workers in other processes: everything below the executor's messages.
//!
//! A run starts a worker process and speaks with it over a Unix socket, or over TCP on the loopback device where sockets have
//! no paths. Nothing here knows which messages are exchanged: a [`Message`](message::Message) is a head, which serde writes
//! as CBOR, and parts, which are bytes: batches as Arrow IPC, tensors.
//!
//! | module | content |
//! |---|---|
//! | [`message`] | a head and its parts; [`batch`] turns batches into parts and back without copying values |
//! | [`frame`] | messages as bytes: a header with checksum, kind, incarnation and request, then the body |
//! | [`socket`] | listeners and streams, over a path or a port |
//! | [`handshake`] | who may connect: token, protocol, version, executable, run, worker, incarnation |
//! | [`link`](mod@link) | an established connection: a thread that reads, heartbeats, deadlines |
//! | [`client`] | the run's end of a link: requests, replies, events |
//! | [`serve`] | the worker's end: one request after the other, signals at once |
//! | [`process`] | starting, watching and ending a worker process |
//! | [`child`] | being a worker process: from the environment to the serving loop |
//!
//! # Failure rules
//! - A worker whose connection closes is lost at once. One that sends nothing for the deadline is lost too: heartbeats are
//!   sent and read by threads of their own, so a long call is not silence, but a stopped process is.
//! - Silence is measured in ticks of the waiting thread, so a process that was itself stopped does not blame the other one.
//! - Each start of a worker has another incarnation. A frame of any other is dropped.
//! - A worker ends when its connection closes, when the run is silent for the deadline, or when its standard input ends:
//!   no worker outlives a run that was killed.
//! - Bytes that are not a frame are an error before anything of the claimed size is allocated.

pub mod batch;
pub mod child;
pub mod client;
pub mod frame;
pub mod handshake;
pub mod link;
pub mod message;
pub mod process;
pub mod serve;
pub mod socket;
