//! GB/s of batches between two processes' ends, beside copies of the same bytes in memory.
//!
//! ```text
//! cargo bench -p verl-wire --bench batches
//! ```
//!
//! A batch of 512 rows with 8 keys of 2,048 tokens (33 MB) is sent as Arrow IPC over a link in one direction; a second
//! line sends it back as well, decoded on both sides. The other lines copy the same bytes: `memcpy` within memory, and
//! through a file in `/dev/shm` that is written by one side and read by the other, once new and once reused, which is
//! what shared memory would cost.

#![expect(clippy::print_stdout, reason = "a bench prints its result")]

use std::error::Error;
use std::fs::File;
use std::hint::black_box;
use std::io::{Read, Seek, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use verl_wire::client::{Client, FromWorker};
use verl_wire::handshake::{Identity, Token, accept, introduce};
use verl_wire::link::{LinkError, LinkSettings};
use verl_wire::message::{Message, MessageError, Parts};
use verl_wire::serve::{Events, Serve, Signals, serve};
use verl_wire::socket::{Listener, Stream, Transport};
use verl_words::batch::{Batch, RaggedColumn, RowId};
use verl_words::field::{Key, Ragged};

const SOON: Duration = Duration::from_secs(60);
const TIMES: u32 = 30;

/// The batch of verl's measured data path.
fn batch(rows: u64, tokens: usize) -> Result<Batch, Box<dyn Error>> {
    let ids: Result<Vec<RowId>, _> = (0..rows).map(|row| RowId::prompt(0, row)).collect();
    let mut batch = Batch::with_rows(&ids?);
    const NAMES: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];
    for (at, name) in NAMES.into_iter().enumerate() {
        let values: Vec<f32> = (0..tokens).map(|token| (token * at) as f32).collect();
        let rows = (0..rows).map(|_| values.as_slice());
        let key: Key<Ragged<f32>> = Key::new(name, "[B, T~]", "", "");
        batch.put(&key, RaggedColumn::from_rows(rows))?;
    }
    Ok(batch)
}

/// Decodes the batch that it gets, and sends it back if the head is true.
struct Echo;

impl Serve for Echo {
    fn handle(&mut self, request: Message, _events: &Events) -> Result<Message, MessageError> {
        let back: bool = request.head()?;
        let batch = Parts::of(request).batch()?;
        let mut reply = Message::new(&batch.num_rows())?;
        if back {
            reply.push_batch(&batch)?;
        }
        Ok(reply)
    }
}

struct Nothing(Arc<AtomicBool>);

impl Signals for Nothing {
    fn signal(&mut self, _message: Message) {}

    fn lost(&mut self, _reason: &LinkError) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Seconds of `work`: the shortest of several times.
fn seconds(mut work: impl FnMut() -> Result<(), Box<dyn Error>>) -> Result<f64, Box<dyn Error>> {
    let mut best = f64::INFINITY;
    for _ in 0..TIMES {
        let since = Instant::now();
        work()?;
        best = best.min(since.elapsed().as_secs_f64());
    }
    Ok(best)
}

fn report(what: &str, seconds: f64, bytes: usize) {
    let rate = bytes as f64 / seconds / 1e9;
    println!("{what:<44}{:>9.3} ms{rate:>9.2} GB/s", seconds * 1e3);
}

fn links(transport: Transport, batch: &Batch, bytes: usize) -> Result<(), Box<dyn Error>> {
    let settings = LinkSettings::default();
    let token = Token::random()?;
    let identity = Identity::of_this_program("run", "bench", 1)?;
    let listener = Listener::bind(transport)?;
    let stream = Stream::connect(listener.address())?;
    let (own, own_token, own_settings) = (identity.clone(), token.clone(), settings.clone());
    let worker = thread::spawn(move || {
        let connection = introduce(stream, &own_token, &own, SOON).expect("accepted");
        let ended = Nothing(Arc::default());
        serve(connection, &own_settings, &mut Echo, ended).expect("threads")
    });
    let stream = listener
        .accept(Instant::now() + SOON)?
        .ok_or("no connection")?;
    let connection = accept(stream, &token, &identity, SOON)?;
    let client = Client::start(connection, &settings, |report: FromWorker| drop(report))?;
    let ask = |back: bool, batch: &Batch| -> Result<(), Box<dyn Error>> {
        let mut message = Message::new(&back)?;
        message.push_batch(batch)?;
        let reply = client.ask(&message, "to echo", SOON)?;
        if back {
            black_box(Parts::of(reply).batch()?);
        }
        Ok(())
    };
    let name = format!("{transport:?}").to_lowercase();
    report(
        &format!("{name}: sent and decoded"),
        seconds(|| ask(false, batch))?,
        bytes,
    );
    report(
        &format!("{name}: there and back (bytes counted twice)"),
        seconds(|| ask(true, batch))?,
        2 * bytes,
    );
    let small = batch.slice(0..1)?.rows_only();
    println!(
        "{name}: a call with one row without keys, and its reply {:>6.0} µs",
        seconds(|| ask(true, &small))? * 1e6
    );
    drop(client);
    worker.join().map_err(|_| "the worker panicked")?;
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    let batch = batch(512, 2048)?;
    let mut message = Message::default();
    message.push_batch(&batch)?;
    let encoded = message.parts()[0].clone().into_buffer();
    let bytes = encoded.len();
    println!("{} rows, {:.1} MB", batch.num_rows(), bytes as f64 / 1e6);
    let mut copy = encoded.to_vec();
    let memcpy = seconds(|| {
        copy.copy_from_slice(black_box(&encoded));
        black_box(&copy);
        Ok(())
    })?;
    report("memcpy, memory reused", memcpy, bytes);
    let fresh = seconds(|| {
        black_box(black_box(&encoded).to_vec());
        Ok(())
    })?;
    report("memcpy, new memory", fresh, bytes);
    if let Ok(folder) = tempfile::tempdir_in("/dev/shm") {
        let path = folder.path().join("new");
        let new = seconds(|| {
            let mut file = File::create_new(&path)?;
            file.write_all(&encoded)?;
            let mut read = Vec::with_capacity(bytes);
            File::open(&path)?.read_to_end(&mut read)?;
            black_box(read);
            Ok(std::fs::remove_file(&path)?)
        })?;
        report("/dev/shm: a new file written and read", new, bytes);
        let write = seconds(|| {
            let mut file = File::create_new(&path)?;
            file.write_all(&encoded)?;
            Ok(std::fs::remove_file(&path)?)
        })?;
        report("/dev/shm: a new file written (lower bound)", write, bytes);
        let mut file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)?;
        let reused = seconds(|| {
            file.rewind()?;
            Ok(file.write_all(&encoded)?)
        })?;
        report(
            "/dev/shm: a reused file written (lower bound)",
            reused,
            bytes,
        );
    }
    links(Transport::Path, &batch, bytes)?;
    links(Transport::Tcp, &batch, bytes)
}
