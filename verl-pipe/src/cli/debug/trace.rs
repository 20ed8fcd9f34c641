//! `pipe debug trace`: a recorded step, one of its stages, one of the stage's samples.

use std::io::Write;

use clap::Args;
use verl_declare::registry::Registry;
use verl_trace::replay::{InspectError, ReplayScope, TracedRun, find_stage};
use verl_trace::show::{ShownStep, step_summary};
use verl_words::batch::RowId;

use super::replay::replay_step;
use super::{Failure, RunArg, SAME, write, write_json, write_notes};

/// Arguments of `pipe debug trace`.
#[derive(Debug, Clone, Args)]
pub struct TraceArgs {
    /// The run.
    #[command(flatten)]
    pub run: RunArg,
    /// Step to show; if omitted, lists the recorded steps.
    #[arg(long)]
    pub step: Option<u64>,
    /// Stage to show; if omitted, shows all stages with their statistics.
    #[arg(long, requires = "step")]
    pub stage: Option<String>,
    /// Sample to show token by token, as `epoch.row#sample`; if omitted, the first one.
    #[arg(long, requires = "stage")]
    pub sample: Option<String>,
    /// Prints JSON.
    #[arg(long)]
    pub json: bool,
    /// Runs the step, or the stage, again and compares, as `pipe debug replay` does.
    #[arg(long, requires = "step")]
    pub replay: bool,
}

pub(super) fn trace(
    args: &TraceArgs,
    registry: &Registry,
    out: &mut dyn Write,
) -> Result<u8, Failure> {
    let traced = TracedRun::open(&args.run.dir, registry)?;
    let Some(step) = args.step else {
        return list_steps(&traced, args.json, out);
    };
    if args.replay {
        let scope = match &args.stage {
            Some(stage) => ReplayScope::Stage(stage.clone()),
            None => ReplayScope::Step,
        };
        return replay_step(&traced, step, &scope, args.json, out);
    }
    let recorded = traced.step(step)?;
    let schedule = traced.schedule();
    let Some(name) = &args.stage else {
        let summary = step_summary(schedule, &recorded);
        match args.json {
            true => write_json(out, &summary)?,
            false => write(out, &summary)?,
        }
        return Ok(SAME);
    };
    if let Some(error) = recorded.damage_of(name) {
        return Err(error.clone().into());
    }
    let stage = find_stage(schedule, &recorded, name)?;
    let view = ShownStep::new(schedule, &recorded);
    let words = traced.token_texts(stage);
    let notes = || {
        let altered = recorded.altered.iter().filter(|key| key.stage == *name);
        let altered = altered.map(|key| format!("{}: {}", key.side.as_str(), key.what(step)));
        let unread = words.is_none() && !schedule.plan().models().is_empty();
        let unread = unread.then(|| {
            "tokens are shown as ids because no tokenizer of the run's models can be read"
                .to_owned()
        });
        altered.chain(unread).collect::<Vec<String>>()
    };
    let show = |id: RowId| view.sample(stage, id, words.as_deref());
    let Some(wanted) = &args.sample else {
        let list = view.row_list(stage);
        if args.json {
            let samples: Vec<_> = view
                .rows(stage)
                .iter()
                .map(|id| show(*id).to_json())
                .collect();
            write_json(out, &samples)?;
            return Ok(SAME);
        }
        write(out, &list)?;
        if let Some(first) = view.rows(stage).first() {
            write(out, format_args!("\n{}", show(*first)))?;
            write(out, "\nuse --sample ID to show another sample\n")?;
        }
        write_notes(&notes(), out)?;
        return Ok(SAME);
    };
    let id = find_sample(view.rows(stage), wanted, (step, name))?;
    match args.json {
        true => write_json(out, &show(id).to_json())?,
        false => {
            write(out, show(id))?;
            write_notes(&notes(), out)?;
        }
    }
    Ok(SAME)
}

fn list_steps(traced: &TracedRun, json: bool, out: &mut dyn Write) -> Result<u8, Failure> {
    let steps = traced.trace().steps();
    if json && !steps.is_empty() {
        write_json(out, &steps)?;
        return Ok(SAME);
    }
    if !json {
        write_notes(traced.trace().notes(), out)?;
    }
    if steps.is_empty() {
        return Err(Failure::Nothing("no step is recorded in full"));
    }
    let shown: Vec<String> = steps.iter().map(u64::to_string).collect();
    write(out, format_args!("recorded steps: {}\n", shown.join(", ")))?;
    Ok(SAME)
}

/// The row `wanted`, written as `epoch.row#sample` or as the number in files.
fn find_sample(rows: &[RowId], wanted: &str, at: (u64, &str)) -> Result<RowId, InspectError> {
    let named = |id: &&RowId| id.to_string() == wanted || id.0.to_string() == wanted;
    if let Some(id) = rows.iter().find(named) {
        return Ok(*id);
    }
    // First those of the same prompt, then those with the most similar names.
    let (prompt, _) = wanted.split_once('#').unwrap_or((wanted, ""));
    let mut near: Vec<String> = rows.iter().map(ToString::to_string).collect();
    near.sort_by_key(|name| {
        let same = name.split_once('#').is_some_and(|(own, _)| own == prompt);
        (!same, strsim::damerau_levenshtein(name, wanted))
    });
    near.truncate(4);
    Err(InspectError::Sample {
        step: at.0,
        stage: at.1.to_owned(),
        sample: wanted.to_owned(),
        help: match near.is_empty() {
            true => "; it has no samples".to_owned(),
            false => format!("; the nearest samples are {}", near.join(", ")),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_found_by_both_names_and_errors_list_the_nearest() {
        let row = |row, sample| {
            let id = RowId::prompt(0, row).and_then(|id| id.sample(sample));
            id.expect("in range")
        };
        let rows = [row(7, 0), row(7, 1), row(12, 0)];
        let find = |wanted: &str| find_sample(&rows, wanted, (3, "generate"));
        assert_eq!(find("0.7#1").ok(), Some(rows[1]));
        assert_eq!(find(&rows[2].0.to_string()).ok(), Some(rows[2]));
        let message = find("0.7#4").expect_err("no such sample").to_string();
        assert_eq!(
            message,
            "stage `generate` of step 3 has no sample `0.7#4`; the nearest samples are 0.7#0, 0.7#1, 0.12#0"
        );
    }
}
