//! Compiled kernels as files of one folder: the hash of what follows, a line end, a JSON object.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::made_with::{MadeWith, hash};

/// Folders of other compilers, drivers and versions that are kept.
const KEPT: usize = 8;
/// A file that stands aside for longer was left by a process that ended.
const ASIDE: Duration = Duration::from_secs(3600);
/// Name of what the kernels of a folder were made with.
const MADE_WITH: &str = "made_with.txt";

/// A compiled kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Kernel {
    /// Identity of text, definitions, entry and block, as cubecl hashes it: 32 hexadecimal digits.
    pub id: String,
    /// Identity of the build, as cubecl hashes it: 32 hexadecimal digits.
    pub build: String,
    /// The function's name.
    pub entry: String,
    /// Bytes of dynamic shared memory.
    pub shared: usize,
    /// What the kernel does with its buffers, where that is known.
    pub io: Option<Vec<Value>>,
    /// What NVRTC made, with the zero at its end.
    pub ptx: String,
}

impl Kernel {
    fn file_name(&self) -> String {
        format!("{}-{}.kernel", self.id, self.build)
    }
}

/// The folder of the kernels that are made with one compiler for one sort of device.
#[derive(Debug, Clone)]
pub(crate) struct Files {
    folder: PathBuf,
    made_with: String,
}

impl Files {
    /// Below `root`, for kernels that are made with `made`. Nothing is touched yet.
    pub fn new(root: &Path, made: &MadeWith) -> Files {
        Files {
            folder: root.join(made.name()),
            made_with: made.text(),
        }
    }

    /// Where they are.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// All whole kernels; those that are damaged are removed, and so is what others left half written long ago.
    pub fn load(&self) -> Vec<Kernel> {
        let Ok(found) = fs::read_dir(&self.folder) else {
            return Vec::new();
        };
        let paths: Vec<PathBuf> = found.flatten().map(|entry| entry.path()).collect();
        paths
            .into_par_iter()
            .filter_map(|path| load(&path))
            .collect()
    }

    /// Writes a kernel that is not there yet; returns whether it was not.
    ///
    /// # Errors
    /// When the disk refuses; then there is no file of that name.
    pub fn add(&self, kernel: &Kernel) -> io::Result<bool> {
        let path = self.folder.join(kernel.file_name());
        if path.exists() {
            return Ok(false);
        }
        if !self.folder.exists() {
            fs::create_dir_all(&self.folder)?;
            self.prune();
        }
        let about = self.folder.join(MADE_WITH);
        if !about.exists() {
            write_aside(&about, self.made_with.as_bytes())?;
        }
        let body = serde_json::to_string(kernel)?;
        let text = format!("{}\n{body}", hash(body.as_bytes()));
        write_aside(&path, text.as_bytes()).map(|()| true)
    }

    /// Removes the folders that nothing was added to for longest, beyond [`KEPT`].
    fn prune(&self) {
        let Some(Ok(found)) = self.folder.parent().map(fs::read_dir) else {
            return;
        };
        let mut others: Vec<(SystemTime, PathBuf)> = found
            .flatten()
            .map(|entry| entry.path())
            .filter(|path| *path != self.folder && path.join(MADE_WITH).is_file())
            .filter_map(|path| Some((fs::metadata(&path).ok()?.modified().ok()?, path)))
            .collect();
        others.sort();
        let surplus = others.len().saturating_sub(KEPT);
        for (_, path) in others.drain(..surplus) {
            // Whoever uses it compiles again.
            let _ = fs::remove_dir_all(path);
        }
    }
}

/// The kernel of a file.
fn load(path: &Path) -> Option<Kernel> {
    let kind = path.extension()?.to_str()?;
    if kind == "partial" {
        let written = fs::metadata(path).ok()?.modified().ok()?;
        if written.elapsed().is_ok_and(|age| age > ASIDE) {
            let _ = fs::remove_file(path);
        }
        return None;
    }
    if kind != "kernel" {
        return None;
    }
    // One that cannot be read, for lack of rights say, is not damaged.
    let bytes = fs::read(path).ok()?;
    let kernel = parse(&bytes).filter(|kernel| path.ends_with(kernel.file_name()));
    if kernel.is_none() {
        tracing::debug!("removes a damaged kernel: {}", path.display());
        let _ = fs::remove_file(path);
    }
    kernel
}

fn parse(bytes: &[u8]) -> Option<Kernel> {
    let text = std::str::from_utf8(bytes).ok()?;
    let (told, body) = text.split_once('\n')?;
    if told != hash(body.as_bytes()) {
        return None;
    }
    serde_json::from_str(body).ok()
}

/// Writes a file under another name and renames it, so that it is there whole or not at all.
pub(super) fn write_aside(path: &Path, bytes: &[u8]) -> io::Result<()> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let aside = path.with_file_name(format!(".{name}.{}.{number}.partial", std::process::id()));
    let written = fs::File::create(&aside)
        .and_then(|mut file| file.write_all(bytes))
        .and_then(|()| fs::rename(&aside, path));
    if written.is_err() {
        let _ = fs::remove_file(&aside);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(driver: &str) -> MadeWith {
        MadeWith {
            capability: 90,
            compiler: "release 13.0".to_owned(),
            driver: driver.to_owned(),
            headers: String::new(),
            executable: String::new(),
        }
    }

    fn kernel(number: u64) -> Kernel {
        Kernel {
            id: format!("{number:032x}"),
            build: format!("{:032x}", 7),
            entry: "rms_norm".to_owned(),
            shared: 3,
            io: Some(vec![Value::from("read")]),
            ptx: format!("// {number}\n.version 9.0\0"),
        }
    }

    fn sorted(files: &Files) -> Vec<Kernel> {
        let mut all = files.load();
        all.sort_by(|a, b| a.id.cmp(&b.id));
        all
    }

    #[test]
    fn kernels_come_back_as_they_were_and_are_written_once() {
        let temp = tempfile::tempdir().unwrap();
        let files = Files::new(temp.path(), &made("1"));
        assert!(files.load().is_empty());
        for number in [1, 2] {
            assert!(files.add(&kernel(number)).unwrap());
            assert!(!files.add(&kernel(number)).unwrap());
        }
        assert_eq!(sorted(&files), [kernel(1), kernel(2)]);
        let other = Files::new(temp.path(), &made("2"));
        assert!(other.load().is_empty());
        let about = fs::read_to_string(files.folder().join(MADE_WITH)).unwrap();
        assert_eq!(about, made("1").text());
    }

    #[test]
    fn what_is_damaged_is_removed_and_never_used() {
        let temp = tempfile::tempdir().unwrap();
        let files = Files::new(temp.path(), &made("1"));
        files.add(&kernel(1)).unwrap();
        files.add(&kernel(2)).unwrap();
        let path = files.folder().join(kernel(1).file_name());
        let whole = fs::read(&path).unwrap();
        let mut changed = whole.clone();
        *changed.last_mut().unwrap() ^= 1;
        let renamed = fs::read(files.folder().join(kernel(2).file_name())).unwrap();
        let cases = [&whole[..0], &whole[..whole.len() - 1], &changed, &renamed];
        for damaged in cases {
            fs::write(&path, damaged).unwrap();
            assert_eq!(sorted(&files), [kernel(2)]);
            assert!(!path.exists());
        }
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] = changed[at].wrapping_add(1);
            assert_eq!(parse(&changed), None, "byte {at}");
        }
        assert!(files.add(&kernel(1)).unwrap());
        assert_eq!(sorted(&files), [kernel(1), kernel(2)]);
    }

    #[test]
    fn a_file_that_stands_aside_is_not_read() {
        let temp = tempfile::tempdir().unwrap();
        let files = Files::new(temp.path(), &made("1"));
        files.add(&kernel(1)).unwrap();
        let aside = files.folder().join(".x.kernel.1.0.partial");
        let whole = fs::read(files.folder().join(kernel(1).file_name())).unwrap();
        fs::write(&aside, whole).unwrap();
        assert_eq!(files.load(), [kernel(1)]);
        assert!(aside.exists(), "another process may be at it");
        let long_ago = SystemTime::now() - 2 * ASIDE;
        let file = fs::File::options().write(true).open(&aside).unwrap();
        file.set_modified(long_ago).unwrap();
        assert_eq!(files.load(), [kernel(1)]);
        assert!(!aside.exists());
    }

    #[test]
    fn writers_side_by_side_leave_whole_files() {
        let temp = tempfile::tempdir().unwrap();
        let files = Files::new(temp.path(), &made("1"));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for number in 0..20 {
                        files.add(&kernel(number)).unwrap();
                        assert!(
                            files
                                .load()
                                .iter()
                                .all(|read| { (0..20).any(|known| *read == kernel(known)) })
                        );
                    }
                });
            }
        });
        assert_eq!(sorted(&files), (0..20).map(kernel).collect::<Vec<_>>());
        let names = fs::read_dir(files.folder()).unwrap().flatten();
        assert_eq!(names.count(), 21);
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_an_error() {
        let temp = tempfile::tempdir().unwrap();
        let file = temp.path().join("file");
        fs::write(&file, "").unwrap();
        let files = Files::new(&file, &made("1"));
        assert!(files.add(&kernel(1)).is_err());
        assert!(files.load().is_empty());
    }

    #[test]
    fn folders_of_long_ago_are_removed() {
        let temp = tempfile::tempdir().unwrap();
        let of = |number: usize| Files::new(temp.path(), &made(&number.to_string()));
        // Not one of ours.
        fs::create_dir(temp.path().join("jobs")).unwrap();
        for number in 0..KEPT + 3 {
            of(number).add(&kernel(1)).unwrap();
            let folder = fs::File::open(of(number).folder()).unwrap();
            let time = SystemTime::now() - Duration::from_secs(100 - number as u64);
            folder.set_modified(time).unwrap();
        }
        let kept = |number: usize| of(number).load().len() == 1;
        assert!((0..2).all(|number| !kept(number)));
        assert!((2..KEPT + 3).all(kept));
        assert!(temp.path().join("jobs").is_dir());
    }
}
