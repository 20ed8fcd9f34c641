//! Files of model folders and data sets: detects files that are not what their name says, and writes files.

use std::collections::HashMap;
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use safetensors::{SafeTensorError, View};
use serde_json::{Map, Value};

/// The start of a Git LFS pointer.
const LFS_POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";
/// The byte-order mark of UTF-8.
const BOM: &[u8] = b"\xef\xbb\xbf";

/// Why a file that starts with `bytes` is not the file that its name says; `None` if nothing suggests so.
///
/// ```
/// use verl_text::files::stand_in;
///
/// let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n";
/// assert!(stand_in(pointer).is_some_and(|reason| reason.contains("git lfs pull")));
/// assert_eq!(stand_in(b"{}"), None);
/// ```
pub fn stand_in(bytes: &[u8]) -> Option<&'static str> {
    let bytes = bytes.strip_prefix(BOM).unwrap_or(bytes);
    bytes
        .starts_with(LFS_POINTER)
        .then_some("it is a Git LFS pointer, not the file; run `git lfs pull` in its folder")
}

/// [`stand_in`] of the file at `path`; also `None` if it cannot be read.
pub fn stand_in_at(path: &Path) -> Option<&'static str> {
    let mut start = Vec::new();
    let file = File::open(path).ok()?;
    file.take(64).read_to_end(&mut start).ok()?;
    stand_in(&start)
}

/// The bytes of a text file without its byte-order mark.
pub(crate) fn without_bom(mut bytes: Vec<u8>) -> Vec<u8> {
    if bytes.starts_with(BOM) {
        bytes.drain(..BOM.len());
    }
    bytes
}

/// A text file's content.
///
/// # Errors
/// Why it is not UTF-8 text.
pub(crate) fn text(bytes: &[u8]) -> Result<&str, String> {
    if let Some(reason) = stand_in(bytes) {
        return Err(reason.to_owned());
    }
    if bytes.starts_with(b"\xff\xfe") || bytes.starts_with(b"\xfe\xff") {
        return Err("it is UTF-16 text; save it as UTF-8".to_owned());
    }
    let bytes = bytes.strip_prefix(BOM).unwrap_or(bytes);
    std::str::from_utf8(bytes).map_err(|e| format!("invalid UTF-8 at byte {}", e.valid_up_to()))
}

/// The JSON object in a file's bytes. A byte-order mark is skipped.
///
/// # Errors
/// Why it is not a JSON object.
pub fn json_object(bytes: &[u8]) -> Result<Map<String, Value>, String> {
    match serde_json::from_str(text(bytes)?) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err("it does not contain a JSON object".to_owned()),
        Err(_) if bytes.is_empty() => Err("it is empty".to_owned()),
        Err(error) => Err(format!("malformed JSON: {error}")),
    }
}

/// Writes tensors like [`safetensors::serialize_to_file`], but with the default mode of new files: that function writes
/// through a temporary file that only its owner may read.
///
/// # Errors
/// The file cannot be written.
pub fn write_safetensors<S, V>(
    tensors: impl IntoIterator<Item = (S, V)>,
    metadata: HashMap<String, String>,
    path: &Path,
) -> Result<(), SafeTensorError>
where
    S: AsRef<str> + Ord + Display,
    V: View,
{
    let is_new = !path.exists();
    let permissions = match is_new {
        true => File::create(path)?.metadata()?.permissions(),
        false => fs::metadata(path)?.permissions(),
    };
    let written = safetensors::serialize_to_file(tensors, Some(metadata), path);
    if written.is_err() && is_new {
        // Only the error of writing matters.
        let _ = fs::remove_file(path);
    }
    written?;
    Ok(fs::set_permissions(path, permissions)?)
}

/// Copies a file's content without its mode, so that copies from a read-only folder are writable.
///
/// # Errors
/// As [`fs::copy`].
pub fn copy_content(from: &Path, to: &Path) -> io::Result<()> {
    io::copy(&mut File::open(from)?, &mut File::create(to)?).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_are_not_json_text_are_reported() {
        let refused = |bytes: &[u8]| json_object(bytes).unwrap_err();
        assert_eq!(
            json_object(b"\xef\xbb\xbf{\"a\": 1}").unwrap()["a"],
            Value::from(1)
        );
        assert_eq!(refused(b""), "it is empty");
        assert_eq!(refused(b"[]"), "it does not contain a JSON object");
        assert_eq!(
            refused(b"\xff\xfe{\0}\0"),
            "it is UTF-16 text; save it as UTF-8"
        );
        assert_eq!(refused(b"{\"\xff\": 1}"), "invalid UTF-8 at byte 2");
        assert!(refused(b"{").starts_with("malformed JSON: "));
        for pointer in [
            &b"version https://git-lfs.github.com/spec/v1\n"[..],
            b"\xef\xbb\xbfversion https://git-lfs.github.com/spec/v1\r\n",
        ] {
            assert!(refused(pointer).contains("git lfs pull"));
        }
    }

    #[cfg(unix)]
    #[test]
    fn written_tensors_have_the_default_file_mode() {
        use safetensors::tensor::TensorView;
        use std::os::unix::fs::PermissionsExt;

        let dir = tempfile::tempdir().unwrap();
        let mode = |name: &str| {
            let metadata = fs::metadata(dir.path().join(name)).unwrap();
            metadata.permissions().mode() & 0o777
        };
        let path = dir.path().join("model.safetensors");
        let bytes = [0u8; 4];
        let write = || {
            let view = TensorView::new(safetensors::Dtype::F32, vec![1], &bytes).unwrap();
            write_safetensors([("a", view)], HashMap::new(), &path).unwrap();
        };
        fs::write(dir.path().join("plain"), "").unwrap();
        write();
        assert_eq!(mode("model.safetensors"), mode("plain"));
        // An existing file keeps its mode.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o640)).unwrap();
        write();
        assert_eq!(mode("model.safetensors"), 0o640);
        // A copy does not inherit the mode of its source.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
        copy_content(&path, &dir.path().join("copy")).unwrap();
        assert_eq!(mode("copy"), mode("plain"));
    }
}
