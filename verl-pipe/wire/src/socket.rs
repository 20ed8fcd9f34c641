//! Listeners and streams: Unix sockets in a private folder, and TCP on the loopback device where sockets have no paths.

use std::fmt;
use std::io::{self, IoSlice, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
#[cfg(unix)]
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use tempfile::TempDir;

/// How a run and a worker on the same machine are connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transport {
    /// A Unix socket, which only the same user can open; TCP where no folder has a path that is short enough.
    #[default]
    Path,
    /// TCP on the loopback device.
    Tcp,
}

/// Where a listener waits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// The path of a Unix socket.
    Path(PathBuf),
    /// A port of the loopback device.
    Tcp(SocketAddr),
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Path(path) => write!(f, "path:{}", path.display()),
            Address::Tcp(address) => write!(f, "tcp:{address}"),
        }
    }
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("path", path)) => Ok(Address::Path(path.into())),
            Some(("tcp", address)) => {
                let address = address.parse().map(Address::Tcp);
                address.map_err(|e| format!("`{text}` is not an address: {e}"))
            }
            _ => Err(format!(
                "`{text}` is not an address; use `path:FILE` or `tcp:HOST:PORT`"
            )),
        }
    }
}

/// Longest path of a socket in bytes; the system's limit is 108 with a zero at the end, or 104.
const LONGEST_PATH: usize = 100;

enum Socket {
    #[cfg(unix)]
    Path(UnixListener),
    Tcp(TcpListener),
}

/// Waits for one worker. Dropping it removes the socket and its folder.
pub struct Listener {
    socket: Socket,
    address: Address,
    /// The private folder of a Unix socket.
    folder: Option<TempDir>,
}

impl Listener {
    /// Starts to listen.
    ///
    /// # Errors
    /// When no socket can be made.
    pub fn bind(transport: Transport) -> io::Result<Listener> {
        #[cfg(unix)]
        if transport == Transport::Path {
            let folders = [std::env::temp_dir(), "/tmp".into(), "/dev/shm".into()];
            // Socket and folder have short names; a path that is too long is tried elsewhere.
            if let Some(listener) = folders.iter().find_map(|parent| bind_in(parent).ok()) {
                return Ok(listener);
            }
        }
        let _ = transport;
        let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        socket.set_nonblocking(true)?;
        Ok(Listener {
            address: Address::Tcp(socket.local_addr()?),
            socket: Socket::Tcp(socket),
            folder: None,
        })
    }

    /// Where it waits.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// The private folder of its socket, if it has one.
    pub fn folder(&self) -> Option<&std::path::Path> {
        self.folder.as_ref().map(TempDir::path)
    }

    /// The next connection, if one is made before `deadline`.
    ///
    /// # Errors
    /// When the socket fails.
    pub fn accept(&self, deadline: Instant) -> io::Result<Option<Stream>> {
        loop {
            let accepted = match &self.socket {
                #[cfg(unix)]
                Socket::Path(socket) => socket.accept().map(|(stream, _)| Stream::Path(stream)),
                Socket::Tcp(socket) => socket.accept().map(|(stream, _)| Stream::Tcp(stream)),
            };
            match accepted {
                Ok(stream) => {
                    stream.set_nonblocking(false)?;
                    return Ok(Some(stream));
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                // A connection that was closed before it was accepted.
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => continue,
                Err(error) => return Err(error),
            }
            let rest = deadline.saturating_duration_since(Instant::now());
            if rest.is_zero() {
                return Ok(None);
            }
            std::thread::sleep(rest.min(Duration::from_millis(2)));
        }
    }
}

#[cfg(unix)]
fn bind_in(parent: &std::path::Path) -> io::Result<Listener> {
    use std::os::unix::fs::PermissionsExt;

    let private = std::fs::Permissions::from_mode(0o700);
    let mut folder = tempfile::Builder::new();
    let folder = folder
        .prefix("verl-")
        .permissions(private)
        .tempdir_in(parent)?;
    let path = folder.path().join("s");
    if path.as_os_str().len() > LONGEST_PATH {
        return Err(io::ErrorKind::InvalidFilename.into());
    }
    let socket = UnixListener::bind(&path)?;
    socket.set_nonblocking(true)?;
    Ok(Listener {
        address: Address::Path(path),
        socket: Socket::Path(socket),
        folder: Some(folder),
    })
}

/// A connection.
#[derive(Debug)]
pub enum Stream {
    /// Over a Unix socket.
    #[cfg(unix)]
    Path(UnixStream),
    /// Over TCP.
    Tcp(TcpStream),
}

/// Applies an expression to the socket of either kind.
macro_rules! with_socket {
    ($stream:expr, $socket:ident => $work:expr) => {
        match $stream {
            #[cfg(unix)]
            Stream::Path($socket) => $work,
            Stream::Tcp($socket) => $work,
        }
    };
}

impl Stream {
    /// Connects to a listener.
    ///
    /// # Errors
    /// When nothing listens there.
    pub fn connect(address: &Address) -> io::Result<Stream> {
        match address {
            #[cfg(unix)]
            Address::Path(path) => UnixStream::connect(path).map(Stream::Path),
            #[cfg(not(unix))]
            Address::Path(_) => Err(io::ErrorKind::Unsupported.into()),
            Address::Tcp(address) => TcpStream::connect_timeout(address, CONNECT).map(Stream::Tcp),
        }
    }

    /// Two connected streams within this process.
    ///
    /// # Errors
    /// When no sockets can be made.
    pub fn pair() -> io::Result<(Stream, Stream)> {
        #[cfg(unix)]
        {
            let (left, right) = UnixStream::pair()?;
            Ok((Stream::Path(left), Stream::Path(right)))
        }
        #[cfg(not(unix))]
        {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
            let left = TcpStream::connect(listener.local_addr()?)?;
            Ok((Stream::Tcp(left), Stream::Tcp(listener.accept()?.0)))
        }
    }

    /// Another handle of the same connection.
    ///
    /// # Errors
    /// When the process has too many open files.
    pub fn try_clone(&self) -> io::Result<Stream> {
        match self {
            #[cfg(unix)]
            Stream::Path(socket) => socket.try_clone().map(Stream::Path),
            Stream::Tcp(socket) => socket.try_clone().map(Stream::Tcp),
        }
    }

    /// Makes reading and writing return after `tick` without progress.
    ///
    /// # Errors
    /// When the system refuses it.
    pub fn set_tick(&self, tick: Duration) -> io::Result<()> {
        if let Stream::Tcp(socket) = self {
            socket.set_nodelay(true)?;
        }
        with_socket!(self, socket => {
            socket.set_read_timeout(Some(tick))?;
            socket.set_write_timeout(Some(tick))
        })
    }

    /// Ends the connection for both sides, all handles included.
    pub fn close(&self) {
        // An error means that it is closed already.
        let _ = with_socket!(self, socket => socket.shutdown(Shutdown::Both));
    }

    fn set_nonblocking(&self, on: bool) -> io::Result<()> {
        with_socket!(self, socket => socket.set_nonblocking(on))
    }
}

/// Longest wait for a connection on the same machine.
const CONNECT: Duration = Duration::from_secs(10);

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        with_socket!(self, socket => socket.read(bytes))
    }

    // Without copying through a second buffer, and without zeroing the space first.
    fn read_to_end(&mut self, bytes: &mut Vec<u8>) -> io::Result<usize> {
        with_socket!(self, socket => socket.read_to_end(bytes))
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        with_socket!(self, socket => socket.write(bytes))
    }

    fn write_vectored(&mut self, slices: &[IoSlice<'_>]) -> io::Result<usize> {
        with_socket!(self, socket => socket.write_vectored(slices))
    }

    fn flush(&mut self) -> io::Result<()> {
        with_socket!(self, socket => socket.flush())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_written_and_read() {
        let tcp = Address::Tcp((Ipv4Addr::LOCALHOST, 7).into());
        for address in [tcp, Address::Path("/tmp/a:b/s".into())] {
            assert_eq!(address.to_string().parse(), Ok(address));
        }
        let error = "here".parse::<Address>().expect_err("not an address");
        assert!(error.contains("path:FILE"), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn only_its_user_can_open_a_socket_and_nothing_of_it_stays() {
        use std::os::unix::fs::PermissionsExt;

        let listener = Listener::bind(Transport::Path).expect("binds");
        let folder = listener.folder().expect("a folder").to_owned();
        let mode = folder.metadata().expect("exists").permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        let _stream = Stream::connect(listener.address()).expect("connects");
        let soon = Instant::now() + Duration::from_secs(5);
        assert!(listener.accept(soon).expect("accepts").is_some());
        assert!(listener.accept(Instant::now()).expect("waits").is_none());
        drop(listener);
        assert!(!folder.exists());
    }

    #[cfg(unix)]
    #[test]
    fn a_path_that_is_too_long_is_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let long = folder.path().join("x".repeat(100));
        std::fs::create_dir(&long).expect("created");
        assert!(bind_in(&long).is_err());
        assert_eq!(std::fs::read_dir(&long).expect("lists").count(), 0);
    }
}
