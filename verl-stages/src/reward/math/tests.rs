use proptest::prelude::*;
use serde::Deserialize;

use super::{answer_of, same_answer};

/// Whether a response answers a reference.
fn answers(reference: &str, response: &str) -> bool {
    answer_of(response).is_some_and(|answer| same_answer(reference, &answer))
}

#[derive(Deserialize)]
struct Golden {
    pairs: Vec<Pair>,
}

#[derive(Deserialize)]
struct Pair {
    reference: String,
    response: String,
    math_verify: bool,
}

/// Intended differences from Math-Verify, by reason: reference, and the answer in the box or the whole response.
const DIFFERENCES: &[(&str, &[(&str, &str)])] = &[
    (
        "thin spaces between groups of three digits separate thousands",
        &[("1000", r"1\,000"), (r"1{,}234{,}567", r"1\,234\,567")],
    ),
    (
        "numbers are compared exactly, in whatever way they are written",
        &[
            (r"6.02 \times 10^{23}", "602000000000000000000000"),
            (r"6.02 \times 10^{23}", r"60.2 \times 10^{22}"),
            (r"2\sqrt{2}", "2^{1.5}"),
            ("18", "The answer is 1.8e1"),
            (r"\frac{1}{3}", r"0.\overline{3}"),
            (r"\pi", r"\pi + 10^{-60}"),
            ("x^2", "x^2+10^{-20}"),
            ("0.0000001", "0.0000002"),
        ],
    ),
    (
        "i is the imaginary unit in every answer",
        &[
            ("3+4i", "3 + 4 i"),
            ("3+4i", "(2+i)^2"),
            ("i", r"\sqrt{-1}"),
            ("i", "i^5"),
            ("-1", "i^2"),
            ("-1", r"e^{i\pi}"),
        ],
    ),
    (
        "roots of odd order of negative numbers are real",
        &[("-2", r"\sqrt[3]{-8}")],
    ),
    (
        "signs and words mean the same however they are written",
        &[
            (r"90^\circ", "90°"),
            (r"\infty", r"\text{infinity}"),
            (r"\emptyset", r"\varnothing"),
            ("x^{10}", "x**{10}"),
        ],
    ),
    (
        "a letter after the number of the reference is a variable",
        &[("2c", "2")],
    ),
    (
        "sets are equal when they have the same members, values when they are of the same variables",
        &[
            ("[1,4]", r"[0,4]\cap[1,5]"),
            ("1<x<2", "1,2"),
            ("x=1, y=2", "2,1"),
        ],
    ),
    (
        "equations and inequalities are equal when one is a multiple of the other, or has the same solutions",
        &[("x=3", "2x=6"), ("x>2", "2x>4"), ("1<x<2", "2>x>1")],
    ),
    (
        "a full stop, and delimiters without a bracket, belong to the sentence",
        &[
            (r"\frac{3}{4}", r"\frac{3}{4}."),
            (r"\frac{3}{4}", r"\left\frac{3}{4}\right."),
        ],
    ),
    (
        "the last box that is not empty counts, however it is written, unless boxes are items of one list",
        &[
            (
                "18",
                r"First \boxed{17}. Checking again, that was wrong by one, so the result is \boxed{18}.",
            ),
            ("18", r"\boxed{17}? No: \boxed{18}"),
            ("18", r"\fbox{18}"),
            ("18", r"\boxed {18}"),
            ("18", r"Put it in \boxed{}: \boxed{18}."),
            ("18", r"\boxed{18} Remember to use \boxed{}."),
        ],
    ),
    (
        "a negated answer, or one of two alternatives, is not an answer",
        &[
            ("18", "The answer is not 18."),
            ("18", "It is not 18."),
            ("18", "The answer is 18 or 19."),
            ("18", r"\boxed{\neq 18}"),
        ],
    ),
    (
        "`####` marks an answer",
        &[("18", "#### 19\nnot 18 as first thought")],
    ),
];

#[test]
fn verdicts_match_math_verify_except_for_listed_differences() {
    let golden: Golden =
        serde_json::from_str(include_str!("../../../tests/golden/math_verify.json")).unwrap();
    assert!(golden.pairs.len() > 1000);
    let mut listed: Vec<(&str, String)> = Vec::new();
    for (reference, answer) in DIFFERENCES.iter().flat_map(|(_, pairs)| pairs.iter()) {
        listed.push((reference, (*answer).to_owned()));
    }
    let mut unlisted = Vec::new();
    for pair in &golden.pairs {
        if answers(&pair.reference, &pair.response) == pair.math_verify {
            continue;
        }
        let own = |(reference, answer): &(&str, String)| {
            *reference == pair.reference
                && (*answer == pair.response || pair.response == format!("$\\boxed{{{answer}}}$"))
        };
        match listed.iter().position(own) {
            Some(at) => drop(listed.swap_remove(at)),
            None => unlisted.push(format!("{} <- {}", pair.reference, pair.response)),
        }
    }
    assert_eq!(unlisted, Vec::<String>::new());
    assert_eq!(listed, Vec::new(), "listed, but equal");
}

#[track_caller]
fn same(reference: &str, texts: &[&str]) {
    let missed: Vec<_> = texts
        .iter()
        .filter(|text| !same_answer(reference, text))
        .collect();
    assert!(missed.is_empty(), "not {reference}: {missed:?}");
}

#[track_caller]
fn other(reference: &str, texts: &[&str]) {
    let passed: Vec<_> = texts
        .iter()
        .filter(|text| same_answer(reference, text))
        .collect();
    assert!(passed.is_empty(), "taken for {reference}: {passed:?}");
}

/// Row 13 of the usability findings.
#[test]
fn fractions_percents_and_units_in_a_box() {
    assert!(answers("0.5", r"\boxed{\frac{1}{2}}") && answers(r"\frac{1}{2}", r"\boxed{1/2}"));
    assert!(
        answers("0.5", r"\boxed{50\%}")
            && answers("1000", r"\boxed{1{,}000}")
            && answers("12", r"\boxed{12\text{ cm}}")
    );
}

#[test]
fn values_that_are_almost_equal_are_not() {
    other("262537412640768744", &[r"e^{\pi\sqrt{163}}"]);
    other(
        r"\pi",
        &[
            r"\pi+10^{-60}",
            r"\pi+10^{-600}",
            r"\pi+e^{-300}",
            "3.14159",
        ],
    );
    other(
        "0",
        &[
            "e^{-200}",
            "10^{-60}",
            r"10^{-600}",
            "0.0000001",
            "e^{-1000000}",
        ],
    );
    other("0.0000001", &["0.0000002", "0", "0.00000010001"]);
    other(
        r"\sqrt{5}+\sqrt{6}+\sqrt{18}",
        &[r"\sqrt{4}+\sqrt{12}+\sqrt{12}"],
    );
    other(
        "x",
        &[
            "x+10^{-50}",
            r"x+10^{-50}\sin y",
            "x^{1.0000000001}",
            r"\sqrt{x^2}",
        ],
    );
    same(r"\sqrt{2}+\sqrt{3}", &[r"\sqrt{5+2\sqrt{6}}"]);
    same(r"\sqrt[3]{2+\sqrt{5}}+\sqrt[3]{2-\sqrt{5}}", &["1"]);
    same(r"\cos\frac{\pi}{5}", &[r"\frac{1+\sqrt{5}}{4}"]);
    same(r"4\arctan\frac15-\arctan\frac1{239}", &[r"\frac{\pi}{4}"]);
    same(r"0.\overline{9}", &["1"]);
    same(r"0.1\overline{6}", &[r"\frac16"]);
}

#[test]
fn undefined_values_equal_nothing() {
    for text in [
        r"\frac{1}{0}",
        r"\frac{0}{0}",
        r"\ln 0",
        r"\tan\frac{\pi}{2}",
        r"\frac{1}{\sin\pi}",
        r"0^{-1}",
        r"\infty-\infty",
        r"\frac{\infty}{\infty}",
    ] {
        other("1", &[text]);
        other("0", &[text]);
        other(text, &["1", "0", "x"]);
    }
}

#[test]
fn digits_in_a_base_are_those_of_the_base() {
    same("1010_2", &["1010_2", "1010_{2}", "1010"]);
    other("1010_2", &["1010_3", "10", "1011_2"]);
}

/// Any response is judged quickly and without a panic.
#[test]
fn hostile_responses_are_wrong() {
    let nested = |open: &str, inner: &str, close: &str, times: usize| {
        format!("{}{inner}{}", open.repeat(times), close.repeat(times))
    };
    let boxed = |text: String| format!("\\boxed{{{text}}}");
    let responses = [
        "{".repeat(1 << 20),
        "(".repeat(1 << 20),
        "$".repeat(1 << 20),
        "\\(".repeat(1 << 19),
        "$\\$".repeat(1 << 18),
        "\\".repeat(1 << 20),
        "#### ".repeat(1 << 18),
        "1,".repeat(1 << 19),
        "answer ".repeat(1 << 17),
        "\\boxed{".repeat(1 << 17),
        "\\text{".repeat(1 << 17),
        format!("#### {}", "9".repeat(1 << 20)),
        boxed("9".repeat(1 << 20)),
        boxed("9".repeat(3900)),
        boxed("2^{2^{2^{100}}}".into()),
        boxed("9^{9^{9^{9}}}".into()),
        boxed("1000000!".into()),
        boxed(format!("3{}", "!".repeat(1000))),
        boxed(nested("(", "2", ")", 1900)),
        boxed(nested("{", "2", "}", 1900)),
        boxed(nested("\\sqrt{", "2", "}", 39)),
        boxed(nested("\\sqrt{", "2", "}", 500)),
        boxed(nested("\\frac{1}{1+", "x", "}", 38)),
        boxed(nested("|", "x", "|", 900)),
        boxed("-".repeat(1900) + "1"),
        boxed("x^".repeat(900) + "2"),
        boxed("1\\pm".repeat(30) + "2"),
        boxed("\\sin(\\cos(\\ln(x+1)))+".repeat(150) + "1"),
        boxed("\\frac{1}{\\sin x}+".repeat(200) + "10^{-1000}"),
        boxed(r"\binom{1000}{500}+\binom{100000}{50000}".into()),
        boxed((0..64).map(|i| format!("\\sin x + {i},")).collect()),
        boxed("İ¼²𝟏\u{0}".into()),
        "−10^{".into(),
        "\\text{cm}−1,000 ".into(),
    ];
    for response in &responses {
        for reference in ["1", r"\sqrt{2}", "x", r"\{1,2\}", "[0,1)", "A"] {
            assert!(
                !answers(reference, response),
                "{reference}: {}",
                &response.chars().take(40).collect::<String>()
            );
        }
    }
    other(&"\\sin x,".repeat(60), &[&"\\cos x,".repeat(60)]);
}

/// The answers of GSM8K, if it is next to the workspace: each solution answers itself, and the next one only if the numbers
/// are the same.
#[test]
fn gsm8k_answers_itself() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/gsm8k");
    let mut solutions = Vec::new();
    for name in ["train.jsonl", "test.jsonl"] {
        let text = std::fs::read_to_string(folder.join(name)).unwrap_or_default();
        let rows = text
            .lines()
            .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
        solutions.extend(rows.map(|row| row["answer"].as_str().unwrap().to_owned()));
    }
    assert!(solutions.is_empty() || solutions.len() == 8792);
    let number = |solution: &str| {
        let (_, number) = solution.rsplit_once("#### ").unwrap();
        number.replace(',', "").parse::<f64>().unwrap()
    };
    for pair in solutions.windows(2) {
        assert!(answers(&pair[0], &pair[0]), "{}", pair[0]);
        assert_eq!(
            answers(&pair[0], &pair[1]),
            number(&pair[0]) == number(&pair[1])
        );
    }
}

/// Pieces of answers and of texts that look like answers.
const PIECES: &[&str] = &[
    "\\frac",
    "\\sqrt",
    "{",
    "}",
    "(",
    ")",
    "[",
    "]",
    "1",
    "23",
    "0",
    "x",
    "y",
    "e",
    "i",
    "^",
    "_",
    "+",
    "-",
    "*",
    "/",
    "=",
    "<",
    ">",
    "\\le",
    ",",
    ";",
    "\\{",
    "\\}",
    "|",
    "\\left",
    "\\right",
    "\\text{cm}",
    "\\text{a",
    "\\pi",
    "\\infty",
    "\\cup",
    "\\setminus",
    "\\mathbb{R}",
    "\\pm",
    "\\sin",
    "\\log",
    "\\binom",
    "!",
    "%",
    "\\%",
    "°",
    "^\\circ",
    "\\begin{matrix}",
    "\\end{matrix}",
    "\\\\",
    "&",
    " ",
    "$",
    "$$",
    "\\(",
    "\\)",
    "\\boxed{",
    "####",
    "\n",
    "answer",
    "final answer is",
    " or ",
    "not",
    "é",
    "½",
    "−",
    "\u{202f}",
    ".",
    ".5",
    "1,000",
    "\\,",
    "\\!",
    "\\overline{3}",
    "\\lfloor",
    "\\rfloor",
    "\\max",
    "'",
    ":",
    "≈",
    "\\in",
    "10^{",
    "\\",
];

proptest! {
    /// No text that a model writes causes a panic, and the same text gets the same verdict.
    #[test]
    fn no_text_panics(
        reference in prop::collection::vec(prop::sample::select(PIECES), 0..12),
        response in prop::collection::vec(prop::sample::select(PIECES), 0..12),
    ) {
        let (reference, response) = (reference.concat(), response.concat());
        let first = answers(&reference, &response);
        prop_assert_eq!(first, answers(&reference, &response));
    }
}
