use super::Number;

fn is(text: &str, wanted: &str) -> bool {
    let wanted = Number::read(wanted).expect("a number");
    Number::read(text) == Some(wanted)
}

#[track_caller]
fn same(wanted: &str, texts: &[&str]) {
    let missed: Vec<_> = texts.iter().filter(|text| !is(text, wanted)).collect();
    assert!(missed.is_empty(), "not {wanted}: {missed:?}");
}

#[track_caller]
fn other(wanted: &str, texts: &[&str]) {
    let passed: Vec<_> = texts.iter().filter(|text| is(text, wanted)).collect();
    assert!(passed.is_empty(), "taken for {wanted}: {passed:?}");
}

#[test]
fn marks_and_units_around_a_number_do_not_matter() {
    same(
        "18",
        &[
            "18",
            " 18 ",
            "18.",
            "18.0",
            "18.00",
            "018",
            "+18",
            "18 eggs",
            "18 dollars per day.",
            "18 dollars/day",
            "$18/day",
            "$18 / hour",
            "18 km/h",
            "18km/h",
            "18 km/h.",
            "18%",
            "18 %",
            r"18\%",
            "18 percent",
            "18°",
            r"18^\circ",
            r"18^{\circ}\text{C}",
            "18 m^2",
            "18 m²",
            "18 cm2",
            "18m",
            "18 m",
            "18 square feet",
            "18 feet squared",
            "18 year-olds",
            "18-year-old",
            "18th",
            "**18**",
            "**18** eggs",
            "*18*",
            "_18_",
            "`18`",
            "\"18\"",
            "__18__.",
            "**18.**",
            "£18",
            "€18",
            "¥18",
            "18€",
            "18 €",
            "18$",
            "$18",
            r"\$18",
            "$18$",
            "$ 18 $",
            "US$18",
            "USD 18",
            "18 USD",
            "Rs. 18",
            r"\pounds 18",
            r"\boxed{18}",
            r"$\boxed{18}$",
            r"\boxed{18}.",
            r"\boxed{\$18}",
            r"\boxed{18 \text{ eggs}}",
            r"$\boxed{\text{18}}$",
            r"\(18\)",
            r"\[18\]",
            r"\mathbf{18}",
            r"18\,\text{km}",
            r"18\text{ km}",
            r"18 \mathrm{cm}^2",
            "= 18",
            "=18",
            "x = 18",
            "x=18",
            "x = y = 18",
            ": 18",
            "Answer: 18",
            "The answer is 18",
            "the final answer is: 18.",
            "Total: $18",
            "Total cost = $18",
            "≈ 18",
            "~18",
            "about 18",
            "(18)",
            "[18]",
            "1.8e1",
            "1.8E+1",
            "180e-1",
            "1.8 × 10^1",
            r"1.8 \times 10^{1}",
            r"1.8\cdot 10^1",
            "1.8 x 10¹",
            "36/2",
            "36 / 2",
            r"\frac{36}{2}",
            "18/1",
            "１８",
            "18!",
            "18 boys and girls",
            "18 a day",
            "18 times",
            "18 each",
            "18 [eggs]",
            "18 🎉",
            "18 ##",
            "18</answer>",
            "<answer>18</answer>",
            "18 eggs.<|im_end|>",
            "18个苹果",
            "18 元。",
            "18 students with pets",
            "18,",
            "'18'",
        ],
    );
}

#[test]
fn texts_that_state_more_than_the_number_are_not_read() {
    other(
        "18",
        &[
            "",
            "eggs",
            "18 or 19",
            "18 or nineteen",
            "18 and 19",
            "18, 19",
            "18,19",
            "18;19",
            "1 8",
            "1, 8",
            "1,8",
            "1_8",
            "1'8",
            "not 18",
            "x ≠ 18",
            "x != 18",
            "x < 18",
            "x <= 18",
            "> 18",
            "≥ 18",
            "at least 18",
            "more than 18",
            "under 18",
            "-18",
            "−18",
            "–18",
            "- 18",
            "minus 18",
            "negative 18",
            "$-18",
            "-$18",
            "($18)",
            "--18",
            "18x",
            "18 x",
            "18i",
            "18e",
            "18π",
            "18 pi",
            "18xy",
            "18k",
            "18K",
            "18M",
            "18 million",
            "18 hundred",
            "18<19>",
            "18 < x >",
            "<18",
            "18万",
            "18 或者十九",
            "18 dozen",
            "18 and a half",
            "18 half",
            "18½",
            "18 1/2",
            "18 squared",
            "18²",
            "18^2",
            "18**2",
            "18*2",
            "18 + 1",
            "18-1",
            "18 - 1",
            "18–19",
            "18/2",
            "18 / 0",
            "18:30",
            "18 = 19",
            "18 out of 20",
            "18 ± 1",
            "√18",
            r"\sqrt{18}",
            "|18|",
            "f(18)",
            "18.5",
            "18.0.1",
            "18.000000000000000001",
            "1.8",
            "180",
            "0.18",
            "18e1",
            "18 000",
            "18,000",
            "0x12",
            "18 is wrong",
            "18 is not right",
            "no, 18",
            "18? no",
            "18 minus 1",
            "18 plus x",
            "18 thirds",
            "one 18",
            "2 18",
            "18 18",
            "-18 18",
            r"\frac{18}{2}",
            r"\alpha 18",
            r"\lnot 18",
            "18 × 10^1",
            "18 \\\\ 19",
            "$18 and $19",
            "١٨",
        ],
    );
}

#[test]
fn thousands_decimals_and_signs() {
    same(
        "70000",
        &[
            "70,000",
            "70 000",
            "70\u{a0}000",
            "70\u{202f}000",
            "70\u{2009}000",
            "70_000",
            "70'000",
            r"70{,}000",
            r"70\,000",
            r"70,\!000",
            "$70,000.00",
            "7e4",
            "7×10⁴",
            "70,000 people",
        ],
    );
    same(
        "1234567.5",
        &[
            "1,234,567.5",
            "1 234 567.5",
            "12,34,567.50",
            "$1,234,567.50.",
        ],
    );
    other("123", &["1,23", "12,3", "1,2,3", "0,123", ",123"]);
    other(
        "1234",
        &["12,34", "1,2,34", "1 ,234", "1,,234", "1,234,5", "01,234"],
    );
    other(
        "1000000",
        &[
            "1,000,00",
            "1,0000,00",
            "1000,000",
            "1 000,000",
            "1,000 000",
        ],
    );
    same(
        "-5",
        &[
            "−5",
            "–5",
            "- 5",
            "-$5",
            "$-5",
            "minus 5",
            "negative 5",
            "-5.0",
            "(-5)",
            r"-\boxed{5}",
            "-5 degrees",
        ],
    );
    same(
        "0.5",
        &[
            ".5",
            "1/2",
            "½",
            r"\frac12",
            r"\frac{1}{2}",
            r"\dfrac{1}{2}",
            "5e-1",
            "5 × 10⁻¹",
            "0.50",
            "2/4",
            "$.50",
        ],
    );
    same(
        "1.5",
        &["1 1/2", "1½", "1 ½", r"1\frac{1}{2}", r"1 \tfrac12", "3/2"],
    );
    same("-3/4", &[r"-\frac{3}{4}", r"\frac{-3}{4}", "-0.75", "-3/4"]);
    same("0", &["-0", "0.000", "0/5", "0e999999999999"]);
}

/// Row "compare exactly": no digit is lost, and no exponent costs anything.
#[test]
fn numbers_compare_exactly() {
    other(
        "123456789012345678901234567890",
        &["123456789012345678901234567891", "1.2345678901234568e29"],
    );
    same(
        "123456789012345678901234567890",
        &[
            "123,456,789,012,345,678,901,234,567,890",
            "1.2345678901234567890123456789e29",
        ],
    );
    other("0.3", &["0.30000000000000004", "0.1", "0.333333"]);
    same("1/3", &["2/6", "10/30"]);
    other("1/3", &["0.3333333333333333333333"]);
    same("1e999999999", &["10e999999998", "0.1e1000000000"]);
    other("1e999999999", &["1e999999998", "1e-999999999", "0"]);
    assert_eq!(Number::read("1e99999999999999999999"), None);
    assert_eq!(Number::read(&"9".repeat(1 << 20)), None);
    assert_eq!(Number::read(&"{".repeat(4000)), None);
    assert_eq!(Number::read(&r"\frac".repeat(800)), None);
}
