//! A headless Chromium that opens a page and returns the resulting document.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

/// Time after which a browser is considered hung.
const DEADLINE: Duration = Duration::from_secs(300);

/// A Chromium, and a folder for its files.
pub struct Browser {
    path: PathBuf,
    scratch: tempfile::TempDir,
    /// The preferred colour scheme, as numbered by Blink; the default if absent.
    scheme: Option<u8>,
}

impl Browser {
    /// The executable in `CHROMIUM`, or the one on the path. Without one, the test skips the browser and reports it,
    /// unless `VERL_NEED_CHROMIUM=1`.
    pub fn find() -> Option<Browser> {
        let named = env::var_os("CHROMIUM").filter(|path| !path.is_empty());
        let path = named.map(PathBuf::from).or_else(on_path);
        let Some(path) = path else {
            let needed = env::var("VERL_NEED_CHROMIUM").is_ok_and(|value| value == "1");
            assert!(
                !needed,
                "no Chromium on the path, and CHROMIUM is not set to one"
            );
            say("no Chromium: the page is not opened in a browser");
            return None;
        };
        Some(Browser::at(path, None))
    }

    fn at(path: PathBuf, scheme: Option<u8>) -> Browser {
        let scratch = tempfile::tempdir().expect("a temporary folder");
        Browser {
            path,
            scratch,
            scheme,
        }
    }

    /// The same browser with a preference for dark pages.
    pub fn dark(&self) -> Browser {
        Browser::at(self.path.clone(), Some(0))
    }

    /// The same browser with a preference for light pages.
    pub fn light(&self) -> Browser {
        Browser::at(self.path.clone(), Some(1))
    }

    /// The document after its scripts have run for some seconds of virtual time.
    pub fn document(&self, page: &Path) -> String {
        self.run(page, &["--virtual-time-budget=15000", "--dump-dom"])
    }

    /// The document just after loading, in real time.
    pub fn loaded(&self, page: &Path) -> String {
        self.run(page, &["--dump-dom"])
    }

    /// Bytes of a screenshot (PNG) of the page in a window of 1280 × 2400.
    pub fn picture(&self, page: &Path) -> Vec<u8> {
        let path = self.scratch.path().join("picture.png");
        let shot = format!("--screenshot={}", path.display());
        self.run(page, &["--virtual-time-budget=15000", &shot]);
        fs::read(path).expect("a picture")
    }

    fn run(&self, page: &Path, more: &[&str]) -> String {
        let file = |name: &str| self.scratch.path().join(name);
        let create = |name: &str| fs::File::create(file(name)).expect("a file");
        let mut child = Command::new(&self.path)
            .args([
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--window-size=1280,2400",
            ])
            .args([
                "--hide-scrollbars",
                "--enable-logging=stderr",
                "--disable-dev-shm-usage",
            ])
            .arg(format!("--user-data-dir={}", file("profile").display()))
            .args(
                self.scheme
                    .map(|scheme| format!("--blink-settings=preferredColorScheme={scheme}")),
            )
            .args(more)
            .arg(format!("file://{}", page.display()))
            .stdin(Stdio::null())
            .stdout(create("out"))
            .stderr(create("err"))
            .spawn()
            .expect("Chromium starts");
        let began = Instant::now();
        while child.try_wait().expect("a process").is_none() {
            if began.elapsed() > DEADLINE {
                child.kill().expect("killed");
                panic!("Chromium has not ended in {DEADLINE:?}");
            }
            thread::sleep(Duration::from_millis(50));
        }
        let read = |name: &str| {
            String::from_utf8_lossy(&fs::read(file(name)).expect("a file")).into_owned()
        };
        let log = read("err");
        let spoken: Vec<&str> = log
            .lines()
            .filter(|line| line.contains("CONSOLE"))
            .collect();
        assert!(
            spoken.is_empty(),
            "the page wrote to the console: {spoken:#?}"
        );
        read("out")
    }
}

fn on_path() -> Option<PathBuf> {
    let folders = env::var_os("PATH")?;
    let names = ["chromium", "chromium-browser", "google-chrome"];
    let mut paths = env::split_paths(&folders).flat_map(|dir| names.map(|name| dir.join(name)));
    paths.find(|path| path.is_file())
}

/// Prints a line in the output of the test.
#[expect(
    clippy::print_stderr,
    reason = "a figure or a gap that no assertion reports"
)]
pub fn say(line: &str) {
    eprintln!("{line}");
}
