//! The documentation pages list every rule.

use super::*;

fn page(name: &str) -> String {
    let path = format!("{}/../../docs/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(path).expect("the page")
}

fn severity(rule: &BuiltIn) -> &'static str {
    match rule.severity {
        RuleSeverity::Off => "off",
        RuleSeverity::Warn => "warn",
        RuleSeverity::Stop => "stop",
    }
}

#[test]
fn the_table_lists_every_rule() {
    let page = page("trace.md");
    for rule in RULES {
        let BuiltIn {
            name,
            limit,
            unit,
            meaning,
            ..
        } = rule;
        let severity = severity(rule);
        let line =
            format!("| [`{name}`](rules.md#{name}) | {severity} | {limit} | {unit} | {meaning} |");
        assert!(page.contains(&line), "docs/trace.md lacks\n{line}");
    }
    let listed = page.lines().filter(|line| line.contains("](rules.md#"));
    assert_eq!(listed.count(), RULES.len());
}

#[test]
fn each_rule_has_a_section() {
    let sections: Vec<String> = RULES
        .iter()
        .map(|rule| {
            let BuiltIn {
                name,
                limit,
                unit,
                meaning,
                causes,
                advice,
                source,
                ..
            } = rule;
            let severity = severity(rule);
            let follows = match rule.follows_from {
                [] => String::new(),
                causes => {
                    let causes: Vec<String> = causes.iter().map(|c| format!("`{c}`")).collect();
                    format!("- Not reported beside: {}\n", causes.join(", "))
                }
            };
            format!(
                "### {name}\n\n- Fires when: {meaning}\n- Default: {severity}, limit {limit} ({unit})\n- Why this limit: {source}\n- Likely causes: {causes}\n- Next: {advice}\n{follows}"
            )
        })
        .collect();
    let page = page("rules.md");
    let missing = sections
        .iter()
        .find(|section| !page.contains(section.as_str()));
    assert_eq!(missing, None, "docs/rules.md lacks this section");
    let listed = page.lines().filter(|line| line.starts_with("### "));
    assert_eq!(listed.count(), RULES.len());
}
