//! Times and shares as text.

/// The unit of all positions in a step: a thousandth of the step is visible.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unit {
    pub name: &'static str,
    per_second: f64,
    digits: usize,
}

impl Unit {
    pub(super) fn of(step_s: f64) -> Unit {
        let (name, per_second, digits) = match step_s {
            s if s >= 100.0 => ("s", 1.0, 1),
            s if s >= 10.0 => ("s", 1.0, 2),
            s if s >= 1.0 => ("s", 1.0, 3),
            s if s >= 0.1 => ("ms", 1e3, 1),
            s if s >= 0.01 => ("ms", 1e3, 2),
            _ => ("ms", 1e3, 3),
        };
        Unit {
            name,
            per_second,
            digits,
        }
    }

    /// The number without its unit.
    pub(super) fn number(self, seconds: f64) -> String {
        let text = format!("{:.*}", self.digits, seconds * self.per_second);
        // No minus sign before a zero.
        match text.trim_start_matches(['-', '0', '.']).is_empty() {
            true => text.trim_start_matches('-').to_owned(),
            false => text,
        }
    }
}

/// A duration with three significant digits, in its own unit.
pub(super) fn duration(seconds: f64) -> String {
    match seconds {
        s if s >= 100.0 => format!("{s:.0} s"),
        s if s >= 10.0 => format!("{s:.1} s"),
        s if s >= 1.0 => format!("{s:.2} s"),
        s if s >= 0.1 => format!("{:.0} ms", s * 1e3),
        s if s >= 0.01 => format!("{:.1} ms", s * 1e3),
        s if s >= 0.001 => format!("{:.2} ms", s * 1e3),
        s if s >= 0.5e-6 => format!("{:.0} µs", s * 1e6),
        _ => "0 s".to_owned(),
    }
}

pub(super) fn percent(part: f64, whole: f64) -> String {
    match part / whole {
        share if share.is_nan() => "–".to_owned(),
        share if share > 0.0 && share < 0.005 => "<1 %".to_owned(),
        share => format!("{:.0} %", 100.0 * share),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_have_three_digits_and_positions_one_unit() {
        let texts = [0.0, 4e-6, 0.000_25, 0.0125, 0.352, 1.0625, 12.06, 345.6].map(duration);
        let expected = [
            "0 s", "4 µs", "250 µs", "12.5 ms", "352 ms", "1.06 s", "12.1 s", "346 s",
        ];
        assert_eq!(texts, expected);
        let position = |step: f64, at: f64| Unit::of(step).number(at);
        assert_eq!(position(0.352, 0.1), "100.0");
        assert_eq!(
            (position(6.5, 1e-5), position(6.5, -1e-5)),
            ("0.000".to_owned(), "0.000".to_owned())
        );
        assert_eq!(
            (position(200.0, 0.26), position(0.002, 0.001)),
            ("0.3".to_owned(), "1.000".to_owned())
        );
        let shares = [(0.0, 1.0), (1e-6, 1.0), (0.5, 2.0), (0.0, 0.0)];
        assert_eq!(
            shares.map(|(a, b)| percent(a, b)),
            ["0 %", "<1 %", "25 %", "–"]
        );
    }
}
