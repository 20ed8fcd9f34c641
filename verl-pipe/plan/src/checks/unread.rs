//! No key is written without being read.
//!
//! Stages offer more keys than a pipeline needs (`generate` writes log-probs that only some algorithms read), so an
//! unread key is reported only if it suggests a mistake: none of the stage's keys is read, the pipeline renamed the
//! key, or the key is not one of the [standard ones](verl_words::keys) and so was added for a particular reader. Sources,
//! and stages that update a model, are useful anyway. Custom rules may read any key.

use verl_words::diagnostic::{Diagnostic, quoted};
use verl_words::keys::STANDARD;
use verl_words::stage::{Access, RowRule};

use crate::build::Draft;

pub(crate) fn check(draft: &Draft<'_>, findings: &mut Vec<Diagnostic>) {
    // If a stage could not be built, it is not known which keys are read.
    if !draft.complete() {
        return;
    }
    let read: std::collections::HashSet<&str> = draft
        .links
        .iter()
        .flatten()
        .map(|link| link.key.as_str())
        .collect();
    for stage in draft.stages.iter().filter(|stage| stage.in_step()) {
        let Some(spec) = &stage.spec else { continue };
        if spec.rows == RowRule::Source
            || spec
                .models
                .iter()
                .any(|(_, access)| *access == Access::Update)
        {
            continue;
        }
        let keys: Vec<&str> = spec
            .writes
            .iter()
            .map(|field| stage.key(&field.name))
            .collect();
        let own = |key: &str| !STANDARD.contains(&key) && draft.pipe.rules.is_empty();
        let idle = !keys.iter().any(|key| read.contains(key));
        let named = |key: &str| stage.decl.rename.values().any(|name| name == key);
        let unread: Vec<&str> = keys
            .into_iter()
            .filter(|key| !read.contains(key) && (idle || named(key) || own(key)))
            .collect();
        if unread.is_empty() {
            continue;
        }
        let name = &stage.decl.name;
        findings.push(
            Diagnostic::warning(
                "P013",
                format!("no stage reads {}", quoted(unread.iter().copied())),
            )
            .at(format!("stage `{name}`"))
            .because(if idle {
                format!("no stage reads any key of `{name}`, so it has no effect")
            } else if unread.iter().all(|key| named(key)) {
                "the pipeline renamed the key, but no stage reads the new name".to_owned()
            } else {
                format!("other keys of `{name}` are read, but nothing in this pipeline uses these")
            })
            .help(format!(
                "make a stage read {}, or remove it",
                quoted(unread.iter().copied())
            )),
        );
    }
}

#[cfg(test)]
mod tests {
    use verl_declare::pipe::{DataPipe, stage_fn};
    use verl_words::diagnostic::Findings;
    use verl_words::field::{Key, Scalar};
    use verl_words::keys::{RESPONSES, REWARDS};
    use verl_words::stage::{RowRule, StageSpec};

    use crate::Plannable;

    const POLITENESS: Key<Scalar<f32>> =
        Key::new("politeness", "[B]", "reward", "how polite a response is");

    /// Warnings of a plan in which a judge writes rewards and a custom key, and `last` reads keys.
    fn warnings(last: StageSpec) -> String {
        let source = StageSpec::new().rows(RowRule::Source).writes(RESPONSES);
        let judge = StageSpec::new().reads(RESPONSES).writes(REWARDS);
        let plan = DataPipe::new("judged")
            .add_stage("source", stage_fn(source, |batch, ctx| ctx.emit(batch)))
            .add_stage(
                "judge",
                stage_fn(judge.writes(POLITENESS), |batch, ctx| ctx.emit(batch)),
            )
            .add_stage("last", stage_fn(last.rows(RowRule::Sink), |_, _| Ok(())))
            .plan();
        Findings(plan.map_err(Findings).expect("a plan").warnings).to_string()
    }

    /// Part 3, item 12 of the findings from use.
    #[test]
    fn an_unread_custom_key_is_reported_with_its_writer() {
        let text = warnings(StageSpec::new().reads(REWARDS));
        for words in [
            "warning[P013]: no stage reads `politeness`",
            "where: stage `judge`",
        ] {
            assert!(text.contains(words), "{text}");
        }
        assert_eq!(
            warnings(StageSpec::new().reads(REWARDS).reads(POLITENESS)),
            ""
        );
        // An unread standard key among other keys is not reported.
        let text = warnings(StageSpec::new().reads(POLITENESS));
        assert_eq!(text, "");
    }
}
