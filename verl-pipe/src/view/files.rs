//! The JSON files of a run folder, as far as they can be read: what cannot is told and left out.

use std::fs;
use std::path::Path;

use serde::de::DeserializeOwned;

use crate::run::held::is_held;
use crate::run::records::{MetricsLine, SampleLine, Status, StatusFile};
use crate::trace::rules::Anomaly;
use crate::trace::text::count;

/// What the files of a run say, and what a reader should be told of them.
#[derive(Debug, Default)]
pub(crate) struct RunFiles {
    /// `status.json`, where there is one.
    pub status: Option<StatusFile>,
    /// Lines of `metrics.jsonl`, steps rising.
    pub metrics: Vec<MetricsLine>,
    /// Lines of `samples.jsonl`.
    pub samples: Vec<SampleLine>,
    /// Lines of `trace/anomalies.jsonl`.
    pub anomalies: Vec<Anomaly>,
    /// The run goes on.
    grows: bool,
    /// What was left out.
    pub notes: Vec<String>,
}

impl RunFiles {
    /// Reads the files of the run in `dir`.
    pub(crate) fn read(dir: &Path) -> RunFiles {
        let mut files = RunFiles::default();
        files.grows = is_held(dir) == Some(true);
        files.status = files.document(&dir.join("status.json"));
        files.metrics = files.lines(&dir.join("metrics.jsonl"));
        files.metrics.sort_by_key(|line| line.step);
        files.samples = files.lines(&dir.join("samples.jsonl"));
        files.anomalies = files.lines(&dir.join("trace").join("anomalies.jsonl"));
        files
    }

    fn document<T: DeserializeOwned>(&mut self, path: &Path) -> Option<T> {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) => {
                self.note(path, &format!("cannot be read ({error})"));
                return None;
            }
        };
        serde_json::from_str(&text)
            .map_err(|error| self.note(path, &format!("is not what a run writes ({error})")))
            .ok()
    }

    /// The lines that can be read. A file that is not there has none; half a line at the end is left out, and told
    /// unless the run may still be writing it.
    fn lines<T: DeserializeOwned>(&mut self, path: &Path) -> Vec<T> {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Vec::new(),
            Err(error) => {
                self.note(path, &format!("cannot be read ({error})"));
                return Vec::new();
            }
        };
        let text = String::from_utf8_lossy(&bytes);
        // Without its newline the last line may be half of one.
        let open = (!text.ends_with('\n')).then(|| text.lines().count());
        let mut lost: Vec<usize> = Vec::new();
        let lines = text.lines().enumerate().filter_map(|(at, line)| {
            let read = serde_json::from_str(line);
            read.inspect_err(|_| lost.push(at + 1)).ok()
        });
        let lines: Vec<T> = lines.collect();
        let half = lost.pop_if(|line| Some(*line) == open).is_some();
        if let Some(first) = lost.first() {
            let n = count(lost.len() as u64, "line");
            self.note(
                path,
                &format!("has {n} that cannot be read, the first is line {first}"),
            );
        }
        if half && !self.grows {
            let what = "ends in half a line, which is left out: the run was interrupted while it wrote it, or the file was cut afterwards";
            self.note(path, what);
        }
        lines
    }

    /// Why there are no metrics of any step.
    pub(crate) fn told_of_no_step(&self, dir: &Path) -> Option<String> {
        self.metrics.is_empty().then(|| {
            let status = self.status.as_ref();
            let what = match status.map(|status| (status.status, status.step)) {
                _ if !dir.join("metrics.jsonl").exists() => {
                    "is not there, and with it every curve of a metric"
                }
                Some((Status::Running, 0)) => "holds no step yet",
                Some((_, 0)) => "holds no step",
                _ => "holds no step that can be read",
            };
            format!("metrics.jsonl {what}")
        })
    }

    fn note(&mut self, path: &Path, what: &str) {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        self.notes.push(format!("{name} {what}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(unix)]
    use crate::run::folder::RunFolder;

    #[test]
    fn what_cannot_be_read_is_left_out_and_told() {
        let temp = tempfile::tempdir().expect("a folder");
        let write =
            |name: &str, text: &str| fs::write(temp.path().join(name), text).expect("a file");
        write("status.json", "{\"status\": \"finished\"");
        write(
            "metrics.jsonl",
            "{\"step\":2,\"epoch\":0,\"timestamp\":1.0,\"actor/loss\":0.5}\nrubbish\n{\"step\":1,\"epoch\":0,\"timestamp\":1.0}\n{\"step\":3,\"epo",
        );
        let files = RunFiles::read(temp.path());
        let steps: Vec<u64> = files.metrics.iter().map(|line| line.step).collect();
        assert_eq!(steps, [1, 2]);
        assert!(files.status.is_none() && files.samples.is_empty());
        assert_eq!(files.notes.len(), 3, "{:?}", files.notes);
        assert!(files.notes[0].starts_with("status.json is not what a run writes"));
        assert_eq!(
            files.notes[1],
            "metrics.jsonl has 1 line that cannot be read, the first is line 2"
        );
        assert_eq!(
            files.notes[2],
            "metrics.jsonl ends in half a line, which is left out: the run was interrupted while it wrote it, or the file was cut afterwards"
        );
    }

    #[test]
    fn a_last_line_that_lacks_only_its_newline_is_kept() {
        let temp = tempfile::tempdir().expect("a folder");
        let line = "{\"step\":1,\"epoch\":0,\"timestamp\":1.0}";
        fs::write(temp.path().join("metrics.jsonl"), line).expect("a file");
        let files = RunFiles::read(temp.path());
        assert_eq!(files.metrics.len(), 1);
        assert!(files.notes.iter().all(|note| !note.contains("metrics")));
    }

    #[cfg(unix)]
    #[test]
    fn half_a_line_of_a_run_that_goes_on_is_still_being_written() {
        let temp = tempfile::tempdir().expect("a folder");
        let dir = temp.path().join("run");
        let folder = RunFolder::create(&dir, 5).expect("a run");
        fs::write(dir.join("samples.jsonl"), "{\"step\":1}\n{\"st").expect("a file");
        let read = || {
            let files = RunFiles::read(&dir);
            (files.samples.len(), files.notes.len())
        };
        assert_eq!(read(), (1, 0));
        drop(folder);
        assert_eq!(read(), (1, 1));
    }
}
