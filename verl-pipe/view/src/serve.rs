//! Serves the page over HTTP, only to this machine; every request renders it again.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use tiny_http::{Header, Method, Request, Response, Server as Http, StatusCode};
use verl_trace::replay::InspectError;

/// The server cannot start.
#[derive(Debug, thiserror::Error)]
#[error(
    "cannot serve on {address}: {reason}; use another port, or omit it to let the system choose one"
)]
pub struct ServeError {
    /// The requested address.
    pub address: SocketAddr,
    /// The system's error.
    pub reason: String,
}

impl ServeError {
    /// Code of the error; `docs/errors/<CODE>.md` says what happened and what to do.
    pub fn code(&self) -> &'static str {
        "T020"
    }
}

/// A server that listens on the loopback interface.
pub struct Server {
    http: Arc<Http>,
    address: SocketAddr,
}

impl Server {
    /// Listens on `port` of 127.0.0.1; 0 lets the system choose a port.
    ///
    /// # Errors
    /// The port is in use.
    pub fn listen(port: u16) -> Result<Server, ServeError> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let failed = |reason: String| ServeError { address, reason };
        let http = Http::http(address).map_err(|e| failed(e.to_string()))?;
        let address = http.server_addr().to_ip();
        let address = address.ok_or_else(|| failed("it has no address".to_owned()))?;
        Ok(Server {
            http: Arc::new(http),
            address,
        })
    }

    /// The address that it listens on.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// A function that ends [`Server::run`] from another thread.
    pub fn stopper(&self) -> impl Fn() + Send + 'static {
        let http = self.http.clone();
        move || http.unblock()
    }

    /// Answers every request for `/` with the result of `page`, until it is stopped.
    pub fn run(&self, page: impl Fn() -> Result<String, InspectError>) {
        for request in self.http.incoming_requests() {
            if let Err(error) = self.answer(request, &page) {
                // The browser closed the connection.
                tracing::debug!("cannot send a response: {error}");
            }
        }
    }

    fn answer(
        &self,
        request: Request,
        page: &impl Fn() -> Result<String, InspectError>,
    ) -> io::Result<()> {
        let (status, kind, body) = match (self.is_for_us(&request), request.method(), request.url())
        {
            (false, ..) => (
                403,
                "text/plain",
                "this server answers only requests for 127.0.0.1\n".to_owned(),
            ),
            (_, Method::Get | Method::Head, "/") => match page() {
                Ok(html) => (200, "text/html", html),
                Err(error) => (
                    500,
                    "text/plain",
                    format!("error[{}]: {error}\n", error.code()),
                ),
            },
            _ => (
                404,
                "text/plain",
                "not found; the page is at /\n".to_owned(),
            ),
        };
        // The length is known, so the page does not have to be sent in chunks.
        let mut response = Response::from_string(body)
            .with_status_code(StatusCode(status))
            .with_chunked_threshold(usize::MAX);
        for (name, value) in [
            ("Content-Type", format!("{kind}; charset=utf-8")),
            ("Cache-Control", "no-store".to_owned()),
            ("X-Content-Type-Options", "nosniff".to_owned()),
        ] {
            if let Ok(header) = Header::from_bytes(name, value) {
                response.add_header(header);
            }
        }
        request.respond(response)
    }

    /// Whether `Host` is this machine: otherwise a foreign domain that resolves to it could read the run.
    fn is_for_us(&self, request: &Request) -> bool {
        let mut headers = request.headers().iter();
        let host = headers.find(|header| header.field.equiv("Host"));
        let port = self.address.port();
        host.is_some_and(|host| {
            let host = host.value.as_str();
            host == format!("127.0.0.1:{port}") || host == format!("localhost:{port}")
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;

    use super::*;

    fn ask(address: SocketAddr, line: &str, host: &str) -> String {
        let mut stream = TcpStream::connect(address).expect("connects");
        write!(
            stream,
            "{line} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        )
        .expect("sends");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).expect("an answer");
        answer
    }

    #[test]
    fn every_request_renders_the_page_and_foreign_hosts_are_refused() {
        let server = Server::listen(0).expect("listens");
        let address = server.address();
        assert!(address.ip().is_loopback());
        let stop = server.stopper();
        let asked = std::thread::spawn(move || {
            let host = address.to_string();
            let answers = [
                ask(address, "GET /", &host),
                ask(address, "GET /", &format!("localhost:{}", address.port())),
                ask(address, "GET /", "elsewhere.example"),
                ask(address, "GET /etc/passwd", &host),
                ask(address, "POST /", &host),
            ];
            stop();
            answers
        });
        let made = std::cell::Cell::new(0);
        server.run(|| {
            made.set(made.get() + 1);
            match made.get() {
                1 => Ok("<p>first</p>".to_owned()),
                _ => Err(InspectError::NoRun {
                    dir: "gone".into(),
                    reason: "there is no such folder".to_owned(),
                    near: None,
                }),
            }
        });
        let [first, second, stranger, file, post] = asked.join().expect("answers");
        assert!(
            first.starts_with("HTTP/1.1 200") && first.ends_with("<p>first</p>"),
            "{first}"
        );
        assert!(first.contains("text/html; charset=utf-8"), "{first}");
        assert!(
            second.starts_with("HTTP/1.1 500") && second.contains("error[T010]"),
            "{second}"
        );
        assert!(stranger.starts_with("HTTP/1.1 403"), "{stranger}");
        assert!(file.starts_with("HTTP/1.1 404"), "{file}");
        assert!(post.starts_with("HTTP/1.1 404"), "{post}");
        assert_eq!(made.get(), 2);
        // The port is in use.
        let error = Server::listen(address.port())
            .err()
            .map(|error| error.to_string());
        let error = error.unwrap_or_default();
        assert!(
            error.starts_with(&format!("cannot serve on {address}: ")),
            "{error}"
        );
    }
}
