//! Text for terminals: tables, counts, short numbers, quoted words.

use std::fmt;

/// Alignment of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Align {
    /// Starts at the left edge of the column.
    Left,
    /// Ends at the right edge of the column.
    Right,
}

/// Rows of cells under headings; printed with two spaces between columns and without trailing spaces.
#[derive(Debug, Clone)]
pub struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows.
    pub fn new<S: AsRef<str>>(columns: &[(S, Align)]) -> Table {
        let columns = columns
            .iter()
            .map(|(name, align)| (name.as_ref().to_owned(), *align));
        Table {
            columns: columns.collect(),
            rows: Vec::new(),
        }
    }

    /// Adds a row.
    pub fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        self.rows.push(cells.into_iter().collect());
    }
}

/// Approximate width of a text in a terminal: one column per character, two per wide (East Asian) character.
pub fn width(text: &str) -> usize {
    let wide = |c: char| matches!(c as u32, 0x1100..=0x115f | 0x2e80..=0xa4cf | 0xac00..=0xd7a3 | 0xf900..=0xfaff | 0xfe30..=0xfe6f | 0xff00..=0xff60 | 0x1f300..=0x1faff);
    text.chars().map(|c| 1 + usize::from(wide(c))).sum()
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head: Vec<String> = self.columns.iter().map(|(name, _)| name.clone()).collect();
        let lines: Vec<&Vec<String>> = std::iter::once(&head).chain(&self.rows).collect();
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|at| {
                let cells = lines.iter().filter_map(|line| line.get(at));
                cells.map(|cell| width(cell)).max().unwrap_or(0)
            })
            .collect();
        for line in lines {
            let mut text = String::new();
            for (at, cell) in line.iter().enumerate() {
                let blanks = " ".repeat(widths[at].saturating_sub(width(cell)));
                match self.columns[at].1 {
                    Align::Left => text += &format!("  {cell}{blanks}"),
                    Align::Right => text += &format!("  {blanks}{cell}"),
                }
            }
            writeln!(f, "{}", text.trim_end())?;
        }
        Ok(())
    }
}

/// `1 row`, `2 rows`.
pub fn count(n: u64, what: &str) -> String {
    format!("{n} {what}{}", if n == 1 { "" } else { "s" })
}

/// A text on one line: line breaks and tabs are escaped, and the text is cut off after `most` columns.
pub(crate) fn one_line(text: &str, most: usize) -> String {
    let mut line = String::new();
    for c in text.chars() {
        let shown = match c {
            '\n' => "\\n".to_owned(),
            '\r' => "\\r".to_owned(),
            '\t' => "\\t".to_owned(),
            c if c.is_control() => format!("\\u{{{:x}}}", c as u32),
            c => c.to_string(),
        };
        if width(&line) + width(&shown) > most {
            line.push('…');
            break;
        }
        line += &shown;
    }
    line
}

/// A number for a table: four significant digits, an exponent only if needed.
pub(crate) fn short(value: f64) -> String {
    if !value.is_finite() {
        return value.to_string();
    }
    let size = value.abs();
    if value == 0.0 || (value.fract() == 0.0 && size < 1e6) {
        format!("{value}")
    } else if (1e-3..1e5).contains(&size) {
        let digits = 3 - (libm::log10(size).floor() as i32);
        format!("{value:.*}", digits.max(0) as usize)
    } else {
        format!("{value:.3e}")
    }
}

/// Quotes a text as one shell word.
pub fn shell_word(text: &str) -> String {
    let plain = |c: char| c.is_alphanumeric() || "/._-+=:@%,".contains(c);
    match !text.is_empty() && text.chars().all(plain) {
        true => text.to_owned(),
        false => format!("'{}'", text.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_aligned_with_their_headings() {
        let mut table = Table::new(&[("key", Align::Left), ("n", Align::Right)]);
        table.row(["a".to_owned(), "12".to_owned()]);
        table.row(["数".to_owned(), "3".to_owned()]);
        assert_eq!(table.to_string(), "  key   n\n  a    12\n  数    3\n");
    }

    #[test]
    fn numbers_and_texts_are_shortened() {
        for (value, expected) in [
            (0.0, "0"),
            (-0.123_456, "-0.1235"),
            (12.345_6, "12.35"),
            (3.0, "3"),
            (1.5e-5, "1.500e-5"),
            (f64::NAN, "NaN"),
            (123_456.7, "1.235e5"),
        ] {
            assert_eq!(short(value), expected);
        }
        assert_eq!(one_line("a\nb\u{7}", 20), "a\\nb\\u{7}");
        assert_eq!(one_line("abcdef", 3), "abc…");
    }

    #[test]
    fn folders_are_quoted_as_one_shell_word() {
        for (dir, word) in [
            ("runs/a-1.b", "runs/a-1.b"),
            ("my runs/a", "'my runs/a'"),
            ("it's", r"'it'\''s'"),
            ("$(x)", "'$(x)'"),
            ("", "''"),
        ] {
            assert_eq!(shell_word(dir), word);
        }
    }
}
