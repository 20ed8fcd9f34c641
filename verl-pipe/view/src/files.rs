//! The readable content of the JSON files of a run folder; unreadable content is reported and left out.

use std::fs;
use std::path::Path;

use serde::de::DeserializeOwned;
use verl_rules::Anomaly;
use verl_run::records::{MetricsLine, SampleLine, Status, StatusFile};
use verl_trace::text::count;
use verl_train::folder_lock::is_locked;

/// The content of the files of a run, and notes about what could not be read.
#[derive(Debug, Default)]
pub(crate) struct RunFiles {
    /// `status.json`, if there is one.
    pub status: Option<StatusFile>,
    /// Lines of `metrics.jsonl`, in ascending order of steps.
    pub metrics: Vec<MetricsLine>,
    /// Lines of `samples.jsonl`.
    pub samples: Vec<SampleLine>,
    /// Lines of `trace/anomalies.jsonl`.
    pub anomalies: Vec<Anomaly>,
    /// Whether the run is in progress.
    is_running: bool,
    /// What was left out.
    pub notes: Vec<String>,
}

impl RunFiles {
    /// Reads the files of the run in `dir`.
    pub(crate) fn read(dir: &Path) -> RunFiles {
        let mut files = RunFiles::default();
        files.is_running = is_locked(dir) == Some(true);
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
            .map_err(|error| self.note(path, &format!("has invalid content ({error})")))
            .ok()
    }

    /// The lines that can be read. A missing file has none. An incomplete last line is left out, and reported unless
    /// the run may still be writing it.
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
        // Without its newline the last line may be incomplete.
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
                &format!("has {n} that cannot be read, starting with line {first}"),
            );
        }
        if half && !self.is_running {
            let what = "ends with an incomplete line, which is left out: the run was interrupted while writing it, or the file was truncated later";
            self.note(path, what);
        }
        lines
    }

    /// Why there are no metrics.
    pub(crate) fn no_metrics_note(&self, dir: &Path) -> Option<String> {
        self.metrics.is_empty().then(|| {
            let status = self.status.as_ref();
            let what = match status.map(|status| (status.status, status.step)) {
                _ if !dir.join("metrics.jsonl").exists() => {
                    "is missing, so the page has no curves of metrics"
                }
                Some((Status::Running, 0)) => "contains no steps yet",
                Some((_, 0)) => "contains no steps",
                _ => "contains no readable steps",
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
    use verl_train::folder::RunFolder;

    #[test]
    fn unreadable_content_is_left_out_and_reported() {
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
        assert!(files.notes[0].starts_with("status.json has invalid content"));
        assert_eq!(
            files.notes[1],
            "metrics.jsonl has 1 line that cannot be read, starting with line 2"
        );
        assert_eq!(
            files.notes[2],
            "metrics.jsonl ends with an incomplete line, which is left out: the run was interrupted while writing it, or the file was truncated later"
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
    fn an_incomplete_line_of_a_running_run_is_not_reported() {
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
