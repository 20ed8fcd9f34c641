//! Extracts the text of one kernel from a CUDA C++ file that contains several.
//!
//! NVRTC compiles every `extern "C" __global__` function of its input, and each kernel is compiled separately, so a
//! file of five kernels would be compiled completely five times. [`one_entry`] removes all kernels but one. Line ends
//! of the removed text stay, so that the compiler's line numbers match the file.

use std::ops::Range;

const MARK: &str = "extern \"C\" __global__";

/// `text` without the definitions of kernels other than `entry`.
///
/// If a kernel has several definitions under preprocessor conditions, all of them stay. A definition that cannot be
/// isolated stays too: one in which a brace or condition is opened but not closed.
pub(crate) fn one_entry(text: &str, entry: &str) -> String {
    let code = blanked(text);
    let mut kept = String::with_capacity(text.len());
    let mut from = 0;
    let mut at = 0;
    while let Some(found) = find(&code, at, MARK.as_bytes()) {
        at = found + MARK.len();
        let Some(kernel) = definition(&code, found) else {
            continue;
        };
        if &text[kernel.name] != entry && conditions_are_closed(&code[found..kernel.end]) {
            kept.push_str(&text[from..found]);
            kept.extend(text[found..kernel.end].chars().filter(|c| *c == '\n'));
            from = kernel.end;
        }
        at = kernel.end;
    }
    kept.push_str(&text[from..]);
    kept
}

/// The position of a kernel's name, and the end of its body.
struct Definition {
    name: Range<usize>,
    end: usize,
}

/// The definition that starts at `start`; `None` for a declaration.
fn definition(code: &[u8], start: usize) -> Option<Definition> {
    let mut at = start + MARK.len();
    let name = loop {
        let open = at + code[at..].iter().position(|byte| *byte == b'(')?;
        let word_end = code[..open]
            .iter()
            .rposition(|byte| !byte.is_ascii_whitespace())?
            + 1;
        let word = code[..word_end].iter().rposition(|byte| !is_word(*byte))? + 1;
        // Attributes such as `__launch_bounds__(256)` start with `__`, and may be enclosed in preprocessor conditions.
        let first_of_line = code[..word].iter().rposition(|byte| *byte == b'\n')? + 1;
        let directive = code[first_of_line..word].trim_ascii_start().first() == Some(&b'#');
        if !code[word..].starts_with(b"__") && !directive && word < word_end {
            break word..word_end;
        }
        at = matching(code, open)? + 1;
    };
    let open = name.end + code[name.end..].iter().position(|byte| *byte == b'(')?;
    let after = matching(code, open)? + 1;
    let body = after
        + code[after..]
            .iter()
            .position(|byte| !byte.is_ascii_whitespace())?;
    if code[body] != b'{' {
        return None;
    }
    let end = matching(code, body)? + 1;
    Some(Definition { name, end })
}

/// The position of the bracket that closes the one at `open`.
fn matching(code: &[u8], open: usize) -> Option<usize> {
    let mut depth = 0_usize;
    for (at, byte) in code.iter().enumerate().skip(open) {
        match byte {
            b'(' | b'{' | b'[' => depth += 1,
            b')' | b'}' | b']' => {
                depth = depth.checked_sub(1)?;
                if depth == 0 {
                    return Some(at);
                }
            }
            _ => {}
        }
    }
    None
}

/// Whether every preprocessor condition that starts in `code` also ends there, and no other ends there.
fn conditions_are_closed(code: &[u8]) -> bool {
    let mut depth = 0_i32;
    for line in code.split(|byte| *byte == b'\n') {
        let Some(directive) = line.trim_ascii_start().strip_prefix(b"#") else {
            continue;
        };
        let directive = directive.trim_ascii_start();
        if directive.starts_with(b"if") {
            depth += 1;
        } else if directive.starts_with(b"endif") {
            depth -= 1;
        } else if directive.starts_with(b"el") && depth == 0 {
            return false;
        }
        if depth < 0 {
            return false;
        }
    }
    depth == 0
}

/// The bytes of `text` with comments and quoted text replaced by blanks; `extern "C"` stays.
fn blanked(text: &str) -> Vec<u8> {
    let mut code = text.as_bytes().to_vec();
    let mut at = 0;
    while at < code.len() {
        let rest = &code[at..];
        let end = if rest.starts_with(b"//") {
            at + position(rest, b"\n").unwrap_or(rest.len())
        } else if rest.starts_with(b"/*") {
            at + position(&rest[2..], b"*/").map_or(rest.len(), |found| found + 4)
        } else if rest.starts_with(b"\"C\"") {
            at += 3;
            continue;
        } else if rest[0] == b'"' || (rest[0] == b'\'' && !(at > 0 && is_word(code[at - 1]))) {
            at + quoted(rest)
        } else {
            at += 1;
            continue;
        };
        for byte in &mut code[at..end] {
            if *byte != b'\n' {
                *byte = b' ';
            }
        }
        at = end;
    }
    code
}

/// Bytes from a quote up to and including the next unescaped quote of the same kind.
fn quoted(rest: &[u8]) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != rest[0] {
        at += if rest[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(rest.len())
}

fn find(code: &[u8], from: usize, what: &[u8]) -> Option<usize> {
    position(&code[from..], what).map(|found| from + found)
}

fn position(code: &[u8], what: &[u8]) -> Option<usize> {
    code.windows(what.len()).position(|window| window == what)
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    /// Names of the kernels that `text` defines.
    fn entries(text: &str) -> Vec<String> {
        let code = blanked(text);
        let mut names = Vec::new();
        let mut at = 0;
        while let Some(found) = find(&code, at, MARK.as_bytes()) {
            at = found + MARK.len();
            if let Some(kernel) = definition(&code, found) {
                names.push(text[kernel.name].to_owned());
                at = kernel.end;
            }
        }
        names
    }

    const TWO: &str = "#define T float
// extern \"C\" __global__ void comment() { {
__device__ float half(float x) { return x / 2; }
extern \"C\" __global__ void __launch_bounds__(256)
    first(T* x) {
    if (x[0] == '{') { x[0] = half(1'000.0f); } /* } */
}
#if WIDE > (2)
extern \"C\" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(64, (WIDE > 1 ? 2 : 1))
second(const T* x, const __grid_constant__ S s) { asm(\"}\"); }
#else
extern \"C\" __global__ void second(const T* x) { }
#endif
";

    #[test]
    fn other_kernels_are_removed_and_line_numbers_stay() {
        assert_eq!(entries(TWO), ["first", "second", "second"]);
        let first = one_entry(TWO, "first");
        assert_eq!(entries(&first), ["first"]);
        let second = one_entry(TWO, "second");
        assert_eq!(entries(&second), ["second", "second"]);
        for cut in [&first, &second] {
            assert_eq!(cut.lines().count(), TWO.lines().count());
            assert!(cut.contains("float half(float x)") && cut.contains("void comment() { {"));
            for (line, whole) in cut.lines().zip(TWO.lines()) {
                assert!(whole.starts_with(line) || whole.ends_with(line), "{line}");
            }
        }
        assert!(second.contains("#if WIDE > (2)") && second.contains("#if CLUSTER > 1"));
        assert!(!first.contains("#if CLUSTER > 1") && first.contains("#else"));
    }

    #[test]
    fn definitions_that_cannot_be_isolated_stay() {
        for text in [
            "extern \"C\" __global__ void declared(int x);\n",
            "extern \"C\" __global__ void open(int x) { if (x) {\n",
            "#if A\nextern \"C\" __global__ void half(int x) {\n#else\nvoid whole() {\n#endif\n}\n",
        ] {
            assert_eq!(one_entry(text, "other"), text);
        }
    }

    /// The kernel of all layers follows other files, from which it uses only the functions that are not kernels.
    #[test]
    fn the_kernel_of_all_layers_is_extracted_without_attention_kernels() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda");
        let files = [
            "gemm_tile.cuh",
            "attention_decode.cu",
            "philox.cuh",
            "decode_layers.cu",
        ];
        let texts = files.map(|file| fs::read_to_string(folder.join(file)).unwrap());
        let joined = texts.concat();
        let all = entries(&joined);
        for other in ["kv_store", "kv_copy_blocks", "attention_decode_step"] {
            assert!(all.iter().any(|name| name == other), "{all:?}");
        }
        let alone = one_entry(&joined, "decode_layers");
        assert_eq!(entries(&alone), ["decode_layers"]);
        assert!(alone.contains("void settle_rows(") && alone.contains("bool attend("));
        assert_eq!(alone.lines().count(), joined.lines().count());
    }

    /// Every kernel of the tree can be extracted, together with everything around it that is not a kernel.
    #[test]
    fn every_kernel_of_every_file_can_be_extracted() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/cuda");
        let mut found = 0;
        for file in fs::read_dir(folder).unwrap() {
            let path = file.unwrap().path();
            if path.extension().is_none_or(|kind| kind != "cu") {
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            let all = entries(&text);
            let marks = text.lines().filter(|line| line.starts_with(MARK));
            assert_eq!(all.len(), marks.count(), "{}", path.display());
            for entry in all.iter().collect::<BTreeSet<_>>() {
                let alone = one_entry(&text, entry);
                let left = entries(&alone);
                assert!(
                    !left.is_empty() && left.iter().all(|name| name == entry),
                    "{}: {entry} leaves {left:?}",
                    path.display()
                );
                assert_eq!(alone.lines().count(), text.lines().count());
                found += 1;
            }
        }
        assert!(found > 30, "{found} kernels");
    }
}
