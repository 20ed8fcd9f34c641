//! Rows as a run would see them, as text: `pipe check --rows`.
//!
//! Tokens are separated by bars, so that leading and trailing spaces are visible; newlines and other control characters
//! are escaped. After a prompt, `+` marks tokens that are trained and `-` tokens that are only read.

use std::io::{self, Write};

use verl_plan::look::{ShownRow, ShownTarget, ShownToken, Spread, StageRows};

use super::number;

/// Most lines of a text that are printed.
const LINES: usize = 20;
/// Most characters of a line that are printed.
const COLUMNS: usize = 160;
/// Most tokens that are printed.
const TOKENS: usize = 120;

/// Writes a summary of the rows of a source, in one line.
///
/// # Errors
/// If `out` cannot be written.
pub(super) fn write_summary(rows: &StageRows, out: &mut dyn Write) -> io::Result<()> {
    let part = if rows.is_complete { "" } else { "the first " };
    write!(
        out,
        "{}: {part}{} read by `{}`, {} rendered and tokenised",
        rows.data,
        number(rows.rows, "row"),
        rows.stage,
        rows.tokenised
    )?;
    let prompt = rows.prompt_tokens.iter().map(|spread| ("prompt", *spread));
    let targets = rows.target_tokens.iter();
    let spreads = prompt.chain(targets.map(|(name, spread)| (name.as_str(), *spread)));
    for (
        name,
        Spread {
            least,
            median,
            most,
        },
    ) in spreads
    {
        match least == most {
            true => write!(out, "; {name} {}", number(most, "token"))?,
            false => write!(out, "; {name} {least} to {most} tokens (median {median})")?,
        }
    }
    if rows.too_long > 0 {
        write!(out, "; {} too long", rows.too_long)?;
    }
    writeln!(out)
}

/// Writes the requested rows.
///
/// # Errors
/// If `out` cannot be written.
pub(super) fn write_rows(rows: &StageRows, out: &mut dyn Write) -> io::Result<()> {
    for row in &rows.shown {
        writeln!(
            out,
            "{}, row {} as `{}` writes it",
            rows.data, row.row, rows.stage
        )?;
        write_row(row, out)?;
        writeln!(out)?;
    }
    Ok(())
}

fn write_row(row: &ShownRow, out: &mut dyn Write) -> io::Result<()> {
    if let Some(reason) = &row.refused {
        return writeln!(out, "  cannot be used: {reason}");
    }
    writeln!(out, "  prompt")?;
    write_text(&row.prompt_text, out)?;
    writeln!(out, "  {} of the prompt", number(row.prompt.len(), "token"))?;
    write_tokens("    ", &row.prompt, out)?;
    for target in &row.targets {
        write_target(target, out)?;
    }
    if let Some(answer) = &row.answer {
        writeln!(out, "  answer")?;
        write_text(answer, out)?;
    }
    if let Some(reason) = &row.too_long {
        writeln!(out, "  too long: {reason}")?;
    }
    for note in &row.notes {
        writeln!(out, "  note: {note}")?;
    }
    Ok(())
}

fn write_target(target: &ShownTarget, out: &mut dyn Write) -> io::Result<()> {
    let trained = target.tokens.iter().filter(|token| token.trained).count();
    writeln!(out, "  {}", target.name)?;
    write_text(&target.text, out)?;
    writeln!(
        out,
        "  {} of the {}, {trained} trained",
        number(target.tokens.len(), "token"),
        target.name
    )?;
    // Runs of tokens that are either all trained or all not trained.
    for run in target
        .tokens
        .chunk_by(|one, next| one.trained == next.trained)
    {
        let sign = if run[0].trained { "  + " } else { "  - " };
        write_tokens(sign, run, out)?;
    }
    Ok(())
}

/// The first lines of a text, each cut to the width of a terminal.
fn write_text(text: &str, out: &mut dyn Write) -> io::Result<()> {
    let lines: Vec<&str> = text.split('\n').collect();
    for line in lines.iter().take(LINES) {
        let line = visible(line);
        let short: String = line.chars().take(COLUMNS).collect();
        let more = if short.len() < line.len() { " …" } else { "" };
        writeln!(out, "    {short}{more}")?;
    }
    match lines.len().saturating_sub(LINES) {
        0 => Ok(()),
        more => writeln!(out, "    … {more} more lines; use `--json` to print all"),
    }
}

/// Tokens separated by bars, after `before`; the middle of a long list is left out.
fn write_tokens(before: &str, tokens: &[ShownToken], out: &mut dyn Write) -> io::Result<()> {
    let half = TOKENS / 2;
    let left_out = match tokens.len() > TOKENS {
        true => tokens.len() - 2 * half,
        false => 0,
    };
    let (first, last) = match left_out {
        0 => (tokens, &tokens[..0]),
        _ => (&tokens[..half], &tokens[half + left_out..]),
    };
    write!(out, "{before}│")?;
    let mut column = 0;
    let mut write = |tokens: &[ShownToken], out: &mut dyn Write| {
        for token in tokens {
            let text = match token.text.is_empty() {
                true => format!("[{}]", token.id),
                false => visible(&token.text),
            };
            let width = text.chars().count() + 1;
            if column > 0 && column + width > COLUMNS {
                write!(out, "\n    │")?;
                column = 0;
            }
            column += width;
            write!(out, "{text}│")?;
        }
        io::Result::Ok(())
    };
    write(first, out)?;
    if left_out > 0 {
        write!(out, " … {left_out} more tokens … │")?;
    }
    write(last, out)?;
    writeln!(out)
}

/// A text whose control characters are written as escapes.
fn visible(text: &str) -> String {
    let escaped = text.chars().map(|character| match character.is_control() {
        true => character.escape_default().to_string(),
        false => character.to_string(),
    });
    escaped.collect()
}
