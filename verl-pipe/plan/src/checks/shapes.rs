//! Writer and reader agree on the shape of a key, apart from its letters.

use verl_words::diagnostic::{Diagnostic, quoted};
use verl_words::field::Field;
use verl_words::shape::{Dim, Shape};

use crate::build::{Draft, Link};

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    for stage in draft.stages {
        let fields = stage.spec.iter().flat_map(|spec| {
            spec.reads
                .iter()
                .chain(&spec.reads_optional)
                .chain(&spec.writes)
        });
        findings.extend(fields.filter_map(|field| malformed(&stage.decl.name, field)));
    }
    for link in draft.links.iter().flatten() {
        if let (Ok(read), Ok(written)) = (link.read.parsed_shape(), link.written.parsed_shape())
            && !fits(&read, &written)
        {
            findings.push(mismatch(draft, link, &read, &written));
        }
    }
}

/// Reports a shape that the engine cannot use: invalid text, no dim for rows, or ragged rows.
fn malformed(stage: &str, field: &Field) -> Option<Diagnostic> {
    let why = match field.parsed_shape() {
        Err(error) => error.to_string(),
        Ok(shape) => match shape.rows() {
            None => "it has no dim, but the first dim of a key counts rows".to_owned(),
            Some(Dim::Ragged(_)) => {
                format!("the first dim of {shape} counts rows and cannot be ragged")
            }
            Some(_) => return None,
        },
    };
    Some(
        Diagnostic::error("P003", format!("invalid shape of `{}`", field.name))
            .at(format!("stage `{stage}`"))
            .because(why)
            .help("use for example `[B]` for one value a row, or `[B, T~]` for one a token"),
    )
}

/// Letters are local to a stage; what must match is the number of dims, and which of them are ragged or fixed.
pub(super) fn fits(read: &Shape, written: &Shape) -> bool {
    read.0.len() == written.0.len()
        && read
            .0
            .iter()
            .zip(&written.0)
            .skip(1)
            .all(|(read, written)| match (read, written) {
                (Dim::Fixed(read), Dim::Fixed(written)) => read == written,
                (Dim::Ragged(_), Dim::Ragged(_))
                | (Dim::Symbol(_), Dim::Symbol(_) | Dim::Fixed(_)) => true,
                _ => false,
            })
}

fn mismatch(draft: &Draft<'_>, link: &Link<'_>, read: &Shape, written: &Shape) -> Diagnostic {
    let (writer, reader) = (draft.name(link.writer), draft.name(link.reader));
    let alike = draft.written.iter().filter(|(key, by)| {
        **key != link.key
            && by.field.dtype == link.read.dtype
            && by.field.unit == link.read.unit
            && by
                .field
                .parsed_shape()
                .is_ok_and(|shape| fits(read, &shape))
    });
    let alike = quoted(alike.map(|(key, _)| key.as_str()));
    let between = format!("insert a stage between the two that makes {read} from {written}");
    let help = if alike.is_empty() {
        between
    } else {
        format!("read a key that has this shape (rename): {alike}; or {between}")
    };
    Diagnostic::error(
        "P003",
        format!(
            "`{reader}` cannot use `{}` as `{writer}` writes it",
            link.key
        ),
    )
    .at(format!("{writer} -> {reader}"))
    .because(format!(
        "`{writer}` writes {written} ({}), `{reader}` reads {read} ({})",
        in_words(written),
        in_words(read)
    ))
    .help(help)
}

fn in_words(shape: &Shape) -> String {
    match shape.0.get(1..) {
        None | Some([]) => "one value a row".to_owned(),
        Some([Dim::Ragged(name)]) => format!("one value for each {name} of a row"),
        Some(dims) => {
            let dims: Vec<String> = dims.iter().map(ToString::to_string).collect();
            format!("{} values a row", dims.join(" · "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(read: &str, written: &str, expected: bool) {
        let parse = |text: &str| text.parse::<Shape>().expect("a shape");
        assert_eq!(
            fits(&parse(read), &parse(written)),
            expected,
            "{read} {written}"
        );
    }

    #[test]
    fn kinds_of_dims_matter_but_letters_do_not() {
        check("[B, T~]", "[P, S~]", true);
        check("[B]", "[P]", true);
        check("[B, T~]", "[B]", false);
        check("[B]", "[B, T~]", false);
        check("[B, 4]", "[B, 4]", true);
        check("[B, 4]", "[B, 5]", false);
        check("[B, D]", "[B, 5]", true);
        check("[B, 5]", "[B, D]", false);
        check("[B, D]", "[B, T~]", false);
    }
}
