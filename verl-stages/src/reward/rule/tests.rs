use super::*;

#[track_caller]
fn check(config: Reward, response: &str, answer: &str, wanted: (f32, bool, bool)) {
    let verdict = Rule::new(&config)
        .expect("a sound rule")
        .judge(response, answer, response.len());
    assert_eq!(
        (verdict.reward, verdict.well_formed, verdict.correct),
        wanted
    );
}

fn scored(rule: RuleKind) -> Reward {
    Reward {
        rule,
        correct: 1.0,
        well_formed: 0.1,
        wrong: -1.0,
        ..Reward::default()
    }
}

#[test]
fn final_answers() {
    let rule = || scored(RuleKind::FinalAnswer);
    check(rule(), "2+2=4\n#### 4", "so 4.\n#### 4", (1.0, true, true));
    check(rule(), "#### 5 #### 4", "#### 4", (1.0, true, true));
    check(rule(), "#### $1,234.", "#### 1234", (1.0, true, true));
    check(rule(), "#### 5", "4", (0.1, true, false));
    check(rule(), "####", "4", (-1.0, false, false));
    check(rule(), "4", "4", (-1.0, false, false));
    check(rule(), "#### NaN", "#### NaN", (1.0, true, true));
    check(rule(), "#### Paris", "Paris", (1.0, true, true));
    check(rule(), "#### paris", "Paris", (0.1, true, false));
}

/// Row 7 of the usability findings: forms of 18, and answers that are not 18.
#[test]
fn final_answers_in_all_forms() {
    let rule = || scored(RuleKind::FinalAnswer);
    for form in [
        "18",
        "18 eggs",
        "18 dollars per day.",
        "**18**",
        "18 ####",
        "£18",
        "$18",
        "18€",
        "18%",
        "= 18",
        "x = 18",
        "$18.00",
        "18.0",
        r"\boxed{18}",
        r"$\boxed{18}$",
        r"\$18",
        "$18$",
        "`18`",
        "*18*",
        "\n18",
        "\n\n**18**\n",
        "18 km/h",
        "18\n####",
        "36/2",
        "18\nThat is 3 more than 15.",
    ] {
        check(
            rule(),
            &format!("9 * 2 = 18\n#### {form}"),
            "#### 18",
            (1.0, true, true),
        );
    }
    for form in [
        "18 #### 19",
        "18 or 19",
        "18 and 19",
        "1 8",
        "not 18",
        "19\n18",
        "-18",
        "1.8",
        "180",
        "18 hundred",
        "18x",
        "> 18",
        "18, 19",
    ] {
        check(
            rule(),
            &format!("9 * 2 = 18\n#### {form}"),
            "#### 18",
            (0.1, true, false),
        );
    }
    check(rule(), "#### 70,000", "#### 70000", (1.0, true, true));
    check(rule(), "#### 70000", "#### 70,000", (1.0, true, true));
    check(rule(), "#### 1,23", "#### 123", (0.1, true, false));
    let large = "123456789012345678901234567890";
    check(rule(), &format!("#### {large}"), large, (1.0, true, true));
    check(
        rule(),
        "#### 123456789012345678901234567891",
        large,
        (0.1, true, false),
    );
}

/// The answers of GSM8K, if it is next to the workspace: each one is a number and answers itself.
#[test]
fn gsm8k_answers_are_numbers() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/data/gsm8k");
    for (name, count) in [("train.jsonl", 7473), ("test.jsonl", 1319)] {
        let Ok(text) = std::fs::read_to_string(folder.join(name)) else {
            return;
        };
        assert_eq!(text.lines().count(), count);
        for line in text.lines() {
            let row: serde_json::Value = serde_json::from_str(line).unwrap();
            let solution = row["answer"].as_str().unwrap();
            let number = final_answer(solution).unwrap();
            assert!(Number::read(number).is_some(), "{number}");
            check(
                scored(RuleKind::FinalAnswer),
                solution,
                solution,
                (1.0, true, true),
            );
        }
    }
}

#[test]
fn mathematics() {
    let rule = || scored(RuleKind::Math);
    check(rule(), r"so \boxed{\frac{1}{2}}", "0.5", (1.0, true, true));
    check(rule(), r"so \boxed{\frac{1}{3}}", "0.5", (0.1, true, false));
    check(rule(), "I do not know", "0.5", (-1.0, false, false));
    check(
        rule(),
        "#### 18 eggs",
        "9 * 2 = 18\n#### 18",
        (1.0, true, true),
    );
}

#[test]
fn exact_answers() {
    check(scored(RuleKind::Exact), " 4\n", "4", (1.0, true, true));
    check(scored(RuleKind::Exact), "4.0", "4", (0.1, true, false));
    check(scored(RuleKind::Exact), "  ", "4", (-1.0, false, false));
}

#[test]
fn regex_answers() {
    let rule = || Reward {
        pattern: Some(r"\\boxed\{([^}]*)\}".to_owned()),
        ..scored(RuleKind::Regex)
    };
    check(
        rule(),
        r"\boxed{3} then \boxed{ 4 }",
        "4",
        (1.0, true, true),
    );
    check(rule(), "4", "4", (-1.0, false, false));
}

/// Row A2 of the usability findings: the group that took part counts, whichever it is.
#[test]
fn the_first_group_that_took_part_is_compared() {
    let rule = |pattern: &str| Reward {
        pattern: Some(pattern.to_owned()),
        ..scored(RuleKind::Regex)
    };
    let two = r"\\boxed\{([^}]*)\}|answer is (\d+)";
    let response = "The final answer is 18";
    check(rule(two), response, "18", (1.0, true, true));
    check(rule(two), r"\boxed{18}", "18", (1.0, true, true));
    check(
        rule(two),
        r"\boxed{17}, so the answer is 18",
        "18",
        (1.0, true, true),
    );
    check(
        rule(r"answer is \d+"),
        response,
        "answer is 18",
        (1.0, true, true),
    );
    // A match without any of the pattern's groups is not an answer.
    check(
        rule(r"answer is (-)?\d+"),
        response,
        "answer is 18",
        (-1.0, false, false),
    );
}

#[test]
fn lengths() {
    let rule = || Reward {
        target_tokens: Some(4),
        ..scored(RuleKind::Length)
    };
    check(rule(), "abcd", "", (1.0, true, true));
    check(rule(), "abcdef", "", (0.5, true, false));
    check(rule(), &"x".repeat(40), "", (-1.0, true, false));
}

#[test]
fn bad_settings_are_all_reported() {
    let config = Reward {
        rule: RuleKind::Exact,
        pattern: Some("(".to_owned()),
        correct: f32::NAN,
        deadline_s: 0.0,
        ..Reward::default()
    };
    let faults = Rule::new(&config).expect_err("four faults");
    let settings: Vec<_> = faults.iter().map(|fault| fault.setting.as_str()).collect();
    assert_eq!(settings, ["correct", "deadline_s", "pattern", "pattern"]);
}
