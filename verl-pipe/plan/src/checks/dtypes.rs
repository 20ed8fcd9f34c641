//! Writer and reader agree on the dtype of a key, or every value can be converted losslessly.

use verl_words::diagnostic::Diagnostic;
use verl_words::field::DType;

use crate::build::Draft;

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    for link in draft.links.iter().flatten() {
        let (have, want) = (link.written.dtype, link.read.dtype);
        if have == want || is_lossless(have, want) {
            continue;
        }
        let (writer, reader) = (draft.name(link.writer), draft.name(link.reader));
        findings.push(
            Diagnostic::error("P004", format!("`{reader}` cannot use `{}` as {have}", link.key))
                .at(format!("{writer} -> {reader}"))
                .because(format!(
                    "`{writer}` writes {have}, `{reader}` reads {want}, and not every {have} is a {want}"
                ))
                .help(format!(
                    "make `{writer}` write {want}, or `{reader}` read {have}; only u8 -> u32 -> u64, i64 and f32 -> \
                     f64 are converted automatically"
                )),
        );
    }
}

/// Whether each value of `from` is a value of `to`.
pub(crate) fn is_lossless(from: DType, to: DType) -> bool {
    use DType::{F32, F64, I64, U8, U32, U64};
    matches!(
        (from, to),
        (U8, U32 | U64 | I64) | (U32, U64 | I64) | (F32, F64)
    )
}
