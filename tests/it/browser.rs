//! A headless Chromium that opens a page and tells what became of it.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

/// A browser that has not ended by then never will.
const DEADLINE: Duration = Duration::from_secs(300);

/// A Chromium, and a folder for what it writes.
pub struct Browser {
    path: PathBuf,
    scratch: tempfile::TempDir,
    /// The colour scheme that it prefers, as Blink numbers them; its own where absent.
    scheme: Option<u8>,
}

impl Browser {
    /// The one that `CHROMIUM` names, or that is on the path. Where there is none the test goes without, and says so,
    /// unless `VERL_NEED_CHROMIUM=1`.
    pub fn find() -> Option<Browser> {
        let named = env::var_os("CHROMIUM").filter(|path| !path.is_empty());
        let path = named.map(PathBuf::from).or_else(on_path);
        let Some(path) = path else {
            let needed = env::var("VERL_NEED_CHROMIUM").is_ok_and(|value| value == "1");
            assert!(
                !needed,
                "no Chromium is on the path, and CHROMIUM names none"
            );
            say("no Chromium: the page is not looked at in a browser");
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

    /// The same, for someone who prefers dark pages.
    pub fn dark(&self) -> Browser {
        Browser::at(self.path.clone(), Some(0))
    }

    /// The same, for someone who prefers light pages.
    pub fn light(&self) -> Browser {
        Browser::at(self.path.clone(), Some(1))
    }

    /// The document as it is after its scripts have run for some seconds of the page's own time.
    pub fn document(&self, page: &Path) -> String {
        self.run(page, &["--virtual-time-budget=15000", "--dump-dom"])
    }

    /// The document as it is when it has just been loaded, with true times.
    pub fn loaded(&self, page: &Path) -> String {
        self.run(page, &["--dump-dom"])
    }

    /// Bytes of a picture (PNG) of the page in a window of 1280 × 2400.
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

/// A line for whoever reads the test's output.
#[expect(
    clippy::print_stderr,
    reason = "a figure or a gap that no assertion tells"
)]
pub fn say(line: &str) {
    eprintln!("{line}");
}
