//! Diagnostics for errors in a pipeline: code, what, where, why, help.

use std::fmt;

/// The severity of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// A run is possible.
    Warning,
    /// A plan is possible, but no run on this machine. Printed as a warning until a run is started, which it ends as an
    /// error.
    Blocking,
    /// No run is possible.
    Error,
}

/// One finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnostic {
    /// Code such as `P003`; `docs/errors/<CODE>.md` explains it.
    pub code: &'static str,
    /// Its severity.
    pub severity: Severity,
    /// What is wrong, in one line.
    pub what: String,
    /// Where: a stage, an edge `writer -> reader`, a section of the file.
    pub location: String,
    /// Why it is wrong.
    pub why: String,
    /// What to do.
    pub help: String,
}

impl Diagnostic {
    /// An error; add where, why and help with [`at`](Self::at), [`because`](Self::because), [`help`](Self::help).
    ///
    /// ```
    /// use verl_pipe::diagnostic::Diagnostic;
    ///
    /// let finding = Diagnostic::error("P001", "two stages are called `reward`")
    ///     .at("stages 3 and 4")
    ///     .because("a stage is addressed by its name")
    ///     .help("give one of them another name");
    /// assert!(finding.is_error());
    /// assert!(finding.to_string().starts_with("error[P001]: two stages"));
    /// ```
    pub fn error(code: &'static str, what: impl Into<String>) -> Self {
        Diagnostic {
            code,
            severity: Severity::Error,
            what: what.into(),
            location: String::new(),
            why: String::new(),
            help: String::new(),
        }
    }

    /// A warning.
    pub fn warning(code: &'static str, what: impl Into<String>) -> Self {
        Diagnostic {
            severity: Severity::Warning,
            ..Diagnostic::error(code, what)
        }
    }

    /// A warning that becomes an error when the plan is run.
    pub fn blocking(code: &'static str, what: impl Into<String>) -> Self {
        Diagnostic {
            severity: Severity::Blocking,
            ..Diagnostic::error(code, what)
        }
    }

    /// The error that it becomes when the plan is run; `None` if it does not prevent a run.
    pub fn when_run(&self) -> Option<Diagnostic> {
        (self.severity > Severity::Warning).then(|| Diagnostic {
            severity: Severity::Error,
            ..self.clone()
        })
    }

    /// Says where.
    pub fn at(mut self, location: impl Into<String>) -> Self {
        self.location = location.into();
        self
    }

    /// Says why.
    pub fn because(mut self, why: impl Into<String>) -> Self {
        self.why = why.into();
        self
    }

    /// Says what to do.
    pub fn help(mut self, help: impl Into<String>) -> Self {
        self.help = help.into();
        self
    }

    /// Whether it prevents a plan.
    pub fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }
}

/// All findings as one error, for `?`.
///
/// ```
/// use verl_pipe::diagnostic::Findings;
/// use verl_pipe::pipe::DataPipe;
/// use verl_pipe::plan::Plannable;
///
/// fn check() -> Result<(), Box<dyn std::error::Error>> {
///     let plan = DataPipe::new("empty").plan().map_err(Findings)?;
///     assert!(plan.stages().is_empty());
///     Ok(())
/// }
/// # check().unwrap();
/// ```
///
/// When `main` returns them, they are printed as `pipe check` prints them: `Debug` writes the same text as `Display`,
/// starting on a new line.
#[derive(Clone, PartialEq, Eq)]
pub struct Findings(pub Vec<Diagnostic>);

impl fmt::Debug for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\n{self}")
    }
}

impl fmt::Display for Findings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = self.0.iter().map(ToString::to_string).collect();
        f.write_str(&texts.join("\n\n"))
    }
}

impl std::error::Error for Findings {}

/// The known name that is most similar to `name`, if one is similar enough.
///
/// Similar: at most a third of the letters differ (one edit is always allowed), or one name begins with the other.
///
/// ```
/// use verl_pipe::diagnostic::nearest;
///
/// assert_eq!(nearest("temprature", ["seed", "temperature"]), Some("temperature"));
/// assert_eq!(nearest("lr", ["temperature", "seed"]), None);
/// ```
pub fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let wanted = name.to_lowercase();
    known
        .into_iter()
        .filter_map(|candidate| {
            let other = candidate.to_lowercase();
            let distance = strsim::damerau_levenshtein(&wanted, &other);
            let allowed = (wanted.chars().count().max(other.chars().count()) / 3).max(1);
            let prefix = wanted.len().min(other.len()) >= 3
                && (wanted.starts_with(&other) || other.starts_with(&wanted));
            (distance <= allowed || prefix).then_some((distance, candidate))
        })
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// "did you mean …" and the known names, for a help line.
pub fn suggest<'a>(
    name: &str,
    what: &str,
    known: impl IntoIterator<Item = &'a str> + Clone,
) -> String {
    let list = quoted(known.clone());
    let list = if list.is_empty() {
        format!("there are no {what}")
    } else {
        format!("known {what}: {list}")
    };
    match nearest(name, known) {
        Some(near) => format!("did you mean `{near}`? {list}"),
        None => list,
    }
}

/// Names in backticks, separated by commas.
pub fn quoted<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let names: Vec<String> = names.into_iter().map(|name| format!("`{name}`")).collect();
    names.join(", ")
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = match self.severity {
            Severity::Warning | Severity::Blocking => "warning",
            Severity::Error => "error",
        };
        let lines = [
            (format!("{word}[{}]: ", self.code), &self.what),
            ("  where: ".to_owned(), &self.location),
            ("  why:   ".to_owned(), &self.why),
            ("  help:  ".to_owned(), &self.help),
        ];
        let text: Vec<String> = lines
            .iter()
            .map(|(head, text)| wrapped(head, text))
            .collect();
        f.write_str(&text.join("\n"))
    }
}

/// Maximum line width of a finding; only a longer word exceeds it.
const WIDTH: usize = 100;

/// `head` and `text`, broken between words; further lines are indented.
fn wrapped(head: &str, text: &str) -> String {
    let mut out = String::new();
    for (index, paragraph) in text.lines().enumerate() {
        let mut column = if index == 0 {
            out.push_str(head);
            head.chars().count()
        } else {
            out.push_str("\n         ");
            9
        };
        for (index, word) in paragraph.split(' ').enumerate() {
            let width = word.chars().count();
            if index > 0 && column + 1 + width > WIDTH {
                out.push_str("\n         ");
                column = 9;
            } else if index > 0 {
                out.push(' ');
                column += 1;
            }
            out.push_str(word);
            column += width;
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_broken_between_words() {
        let finding = Diagnostic::error("P001", "short")
            .at("a -> b")
            .because("word ".repeat(30).trim_end())
            .help("x\ny");
        let expected = format!(
            "error[P001]: short\n  where: a -> b\n  why:   {}\n         {}\n  help:  x\n         y",
            ["word"; 18].join(" "),
            ["word"; 12].join(" ")
        );
        assert_eq!(finding.to_string(), expected);
    }

    #[test]
    fn a_blocking_finding_is_a_warning_until_the_plan_is_run() {
        let blocking = Diagnostic::blocking("S012", "no such device");
        assert!(!blocking.is_error());
        assert!(blocking.to_string().starts_with("warning[S012]"));
        let error = blocking.when_run().expect("it prevents a run");
        assert!(error.is_error() && error.to_string().starts_with("error[S012]"));
        assert_eq!(Diagnostic::warning("P018", "unused").when_run(), None);
    }

    /// `main` that returns an error prints its `Debug`.
    #[test]
    fn findings_returned_from_main_are_readable() {
        let finding = Diagnostic::error("P001", "short")
            .at("a")
            .because("b")
            .help("c");
        let boxed: Box<dyn std::error::Error> = Box::new(Findings(vec![finding.clone()]));
        assert_eq!(format!("Error: {boxed:?}"), format!("Error: \n{finding}"));
    }

    #[test]
    fn nearest_names() {
        let known = ["rewards", "responses", "prompts"];
        assert_eq!(nearest("reward", known), Some("rewards"));
        assert_eq!(nearest("Prompts", known), Some("prompts"));
        assert_eq!(nearest("values", known), None);
        assert_eq!(suggest("valu", "keys", []), "there are no keys");
    }
}
