//! Python behaviour that templates rely on: how values print, `json.dumps`, `strftime`.

use std::fmt::Write as _;
use std::io;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind, Output, State};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};

/// Prints a value as Python does where minijinja differs: `True`, `False`, `None`.
pub(super) fn format(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let text = match value.kind() {
        ValueKind::Bool if value.is_true() => "True",
        ValueKind::Bool => "False",
        ValueKind::None => "None",
        _ => return minijinja::escape_formatter(out, state, value),
    };
    out.write_str(text).map_err(Error::from)
}

/// `json.dumps(value, ensure_ascii=False, indent=…, separators=…, sort_keys=…)`.
pub(super) fn tojson(value: Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let sort_keys: Option<bool> = options.get("sort_keys")?;
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let refuse = |text: String| Error::new(ErrorKind::InvalidOperation, text);
    if ensure_ascii == Some(true) {
        return Err(refuse(
            "tojson does not support ensure_ascii=true".to_owned(),
        ));
    }
    let (item, key) = match separators.as_deref() {
        None => (if indent.is_some() { "," } else { ", " }, ": "),
        Some([item, key]) => (item.as_str(), key.as_str()),
        Some(_) => return Err(refuse("tojson takes two separators".to_owned())),
    };
    let style = Style {
        item,
        key,
        indent,
        depth: 0,
        empty: true,
    };
    let mut json = serde_json::to_value(&value).map_err(|e| refuse(e.to_string()))?;
    if sort_keys == Some(true) {
        json.sort_all_objects();
    }
    let mut bytes = Vec::new();
    json.serialize(&mut Serializer::with_formatter(&mut bytes, style))
        .map_err(|e| refuse(e.to_string()))?;
    Ok(Value::from_safe_string(
        String::from_utf8_lossy(&bytes).into_owned(),
    ))
}

struct Style<'a> {
    item: &'a str,
    key: &'a str,
    indent: Option<usize>,
    depth: usize,
    empty: bool,
}

impl Style<'_> {
    fn line<W: ?Sized + io::Write>(&self, out: &mut W) -> io::Result<()> {
        match self.indent {
            Some(width) => write!(out, "\n{:1$}", "", width * self.depth),
            None => Ok(()),
        }
    }

    fn open<W: ?Sized + io::Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.empty = true;
        out.write_all(bracket)
    }

    fn close<W: ?Sized + io::Write>(&mut self, out: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if !self.empty {
            self.line(out)?;
        }
        self.empty = false;
        out.write_all(bracket)
    }

    fn next<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if !first {
            out.write_all(self.item.as_bytes())?;
        }
        self.empty = false;
        self.line(out)
    }
}

impl Formatter for Style<'_> {
    fn begin_array<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, b"[")
    }
    fn end_array<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, b"]")
    }
    fn begin_array_value<W: ?Sized + io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.next(out, first)
    }
    fn begin_object<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.open(out, b"{")
    }
    fn end_object<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        self.close(out, b"}")
    }
    fn begin_object_key<W: ?Sized + io::Write>(
        &mut self,
        out: &mut W,
        first: bool,
    ) -> io::Result<()> {
        self.next(out, first)
    }
    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.key.as_bytes())
    }
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = [
    "Thursday",
    "Friday",
    "Saturday",
    "Sunday",
    "Monday",
    "Tuesday",
    "Wednesday",
];

/// `strftime` of a moment in UTC, with the codes that templates use.
pub(super) fn strftime(format: &str, unix_seconds: u64) -> Result<String, Error> {
    let days = unix_seconds / 86_400;
    let (hour, minute, second) = (
        unix_seconds / 3600 % 24,
        unix_seconds / 60 % 60,
        unix_seconds % 60,
    );
    let (year, month, day) = civil(days);
    let month_name = MONTHS[month as usize - 1];
    let day_name = DAYS[(days % 7) as usize];
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let written = match chars.next() {
            Some('Y') => write!(out, "{year}"),
            Some('y') => write!(out, "{:02}", year % 100),
            Some('m') => write!(out, "{month:02}"),
            Some('d') => write!(out, "{day:02}"),
            Some('B') => out.write_str(month_name),
            Some('b') => out.write_str(&month_name[..3]),
            Some('A') => out.write_str(day_name),
            Some('a') => out.write_str(&day_name[..3]),
            Some('H') => write!(out, "{hour:02}"),
            Some('I') => write!(out, "{:02}", (hour + 11) % 12 + 1),
            Some('p') => out.write_str(if hour < 12 { "AM" } else { "PM" }),
            Some('M') => write!(out, "{minute:02}"),
            Some('S') => write!(out, "{second:02}"),
            Some('F') => write!(out, "{year}-{month:02}-{day:02}"),
            Some('T') => write!(out, "{hour:02}:{minute:02}:{second:02}"),
            Some('%') => out.write_str("%"),
            code => {
                let code = code.map(String::from).unwrap_or_default();
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("strftime_now does not support `%{code}`"),
                ));
            }
        };
        written.map_err(Error::from)?;
    }
    Ok(out)
}

/// Year, month and day of the date `days` after 1970-01-01, in the Gregorian calendar.
///
/// # Source
/// Howard Hinnant, "chrono-compatible low-level date algorithms", `civil_from_days`.
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let era = days / 146_097;
    let day_of_era = days % 146_097;
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 {
        shifted + 3
    } else {
        shifted - 9
    };
    let year = era * 400 + year_of_era + u64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::strftime;

    #[test]
    fn dates_match_the_calendar() {
        let cases = [
            (0, "%d %b %Y", "01 Jan 1970"),
            (951_782_400, "%Y-%m-%d %A", "2000-02-29 Tuesday"),
            (1_721_952_000, "%d %B %Y, %a", "26 July 2024, Fri"),
            (
                1_735_689_599,
                "%F %T %I%p %y %%",
                "2024-12-31 23:59:59 11PM 24 %",
            ),
        ];
        for (time, format, text) in cases {
            assert_eq!(strftime(format, time).unwrap(), text);
        }
        assert!(strftime("%Q", 0).unwrap_err().to_string().contains("`%Q`"));
    }
}
