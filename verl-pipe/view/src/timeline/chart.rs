//! A step as text: a line of blocks for each lane, a table of the stages, idle times.

use std::fmt;

use verl_run::spans::{CallSpan, RUN, SpanOutcome, TimelineLine};
use verl_trace::text::{Align, Table, count};

use super::blocks::{StageTime, axis, lane_blocks, stage_times};
use super::idle::{group_times, overlaps};
use super::intervals::{both, clip, total};
use super::lanes::{Lane, busy, is_in_step, label, lanes};
use super::units::{Unit, duration, percent};

/// Minimum number of columns of the time axis.
const MIN_COLUMNS: usize = 20;

/// Maximum number of lanes that are drawn.
const MAX_LANES: usize = 40;

/// A step of a run, for a terminal with `width` columns.
#[derive(Debug, Clone, Copy)]
pub struct StepChart<'a> {
    /// The step.
    pub line: &'a TimelineLine,
    /// Columns of the terminal; a narrow one is exceeded.
    pub width: usize,
}

impl fmt::Display for StepChart<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = self.line;
        let unit = Unit::of(line.step_s);
        let inside: Vec<&CallSpan> = line.spans.iter().filter(|s| is_in_step(s, line)).collect();
        self.head(f, &inside)?;
        if inside.is_empty() {
            writeln!(f, "no call is recorded")?;
        } else {
            let stages = stage_times(&inside);
            self.blocks(f, &inside, &stages, unit)?;
            self.table(f, &inside, &stages, unit)?;
            self.idle(f, &inside, unit)?;
        }
        self.between(f)?;
        for (names, seconds) in overlaps(&group_times(&inside, line.step_s), &inside) {
            let (seconds, of) = (duration(seconds), duration(line.step_s));
            writeln!(f, "{names} were both busy for {seconds} of {of}")?;
        }
        Ok(())
    }
}

impl StepChart<'_> {
    fn head(&self, f: &mut fmt::Formatter<'_>, inside: &[&CallSpan]) -> fmt::Result {
        let calls: usize = inside
            .iter()
            .filter(|s| s.place != RUN)
            .map(|s| s.calls)
            .sum();
        let step_s = duration(self.line.step_s);
        let calls = count(calls as u64, "call");
        let failed = match self.line.failed {
            true => "; the step failed",
            false => "",
        };
        writeln!(f, "step {}: {step_s}, {calls}{failed}", self.line.step)
    }

    /// A line of blocks for each lane.
    fn blocks(
        &self,
        f: &mut fmt::Formatter<'_>,
        inside: &[&CallSpan],
        stages: &[StageTime<'_>],
        unit: Unit,
    ) -> fmt::Result {
        let step_s = self.line.step_s;
        let lanes = lanes(inside.iter().copied());
        let drawn = &lanes[..lanes.len().min(MAX_LANES)];
        let names: Vec<String> = drawn.iter().map(|lane| lane.name(&lanes)).collect();
        let names_width = names.iter().map(|name| name.chars().count()).max();
        let names_width = names_width.unwrap_or_default();
        // Two blanks before the name and two after it, and ` 100 %` at the end.
        let columns = self
            .width
            .saturating_sub(names_width + 4 + 7)
            .max(MIN_COLUMNS);
        writeln!(
            f,
            "\n{:names_width$}    {}",
            "",
            axis(columns, step_s, unit)
        )?;
        for (lane, name) in drawn.iter().zip(&names) {
            let own = inside
                .iter()
                .copied()
                .filter(|span| Lane::of(span) == *lane);
            let share = percent(total(&clip(&busy(own), (0.0, step_s))), step_s);
            let blocks = lane_blocks(lane, stages, columns, step_s);
            writeln!(f, "  {name:names_width$}  {blocks} {share:>6}")?;
        }
        if let Some(more) = lanes.len().checked_sub(MAX_LANES).filter(|more| *more > 0) {
            writeln!(f, "  {} not drawn", count(more as u64, "more thread"))?;
        }
        Ok(())
    }

    fn table(
        &self,
        f: &mut fmt::Formatter<'_>,
        inside: &[&CallSpan],
        stages: &[StageTime<'_>],
        unit: Unit,
    ) -> fmt::Result {
        let step_s = self.line.step_s;
        let timed = |what: &str| format!("{what} ({})", unit.name);
        let mut table = Table::new(&[
            (String::new(), Align::Left),
            ("stage".to_owned(), Align::Left),
            ("place".to_owned(), Align::Left),
            ("calls".to_owned(), Align::Right),
            ("rows".to_owned(), Align::Right),
            ("emitted".to_owned(), Align::Right),
            ("busy".to_owned(), Align::Right),
            ("of step".to_owned(), Align::Right),
            (timed("start"), Align::Right),
            (timed("end"), Align::Right),
            ("overlap".to_owned(), Align::Right),
        ]);
        for stage in stages {
            let spans = || stage.spans.iter().copied();
            let own = busy(spans());
            let others = inside.iter().copied().filter(|span| {
                (label(span), span.place.as_str()) != (stage.label.clone(), stage.place)
            });
            let overlap = total(&both(&own, &busy(others)));
            let sum = |of: fn(&CallSpan) -> usize| spans().map(of).sum::<usize>().to_string();
            let start = spans()
                .map(|span| span.start_s)
                .fold(f64::INFINITY, f64::min);
            let end = spans()
                .map(|span| span.end_s)
                .fold(f64::NEG_INFINITY, f64::max);
            table.row([
                stage.letter.to_string(),
                stage.label.clone(),
                stage.place.to_owned(),
                sum(|span| span.calls),
                sum(|span| span.rows),
                sum(|span| span.rows_emitted),
                duration(spans().map(CallSpan::busy_s).sum()),
                percent(total(&clip(&own, (0.0, step_s))), step_s),
                unit.number(start),
                unit.number(end),
                percent(overlap, total(&own)),
            ]);
        }
        write!(f, "\n{table}")?;
        for stage in stages {
            let ended = |outcome| stage.spans.iter().filter(|s| s.outcome == outcome).count();
            for (n, how) in [
                (ended(SpanOutcome::Failed), "failed"),
                (ended(SpanOutcome::Abandoned), "abandoned"),
            ] {
                if n > 0 {
                    writeln!(f, "  {}: {} {how}", stage.label, count(n as u64, "time"))?;
                }
            }
        }
        let merged: usize = inside.iter().map(|span| span.merged).sum();
        if merged > 0 {
            writeln!(
                f,
                "  {} merged with the one before",
                count(merged as u64, "call")
            )?;
        }
        Ok(())
    }

    /// The longest gaps of each group.
    fn idle(&self, f: &mut fmt::Formatter<'_>, inside: &[&CallSpan], unit: Unit) -> fmt::Result {
        let step_s = self.line.step_s;
        for time in group_times(inside, step_s) {
            let idle = step_s - total(&clip(&time.busy, (0.0, step_s)));
            let share = percent(idle, step_s);
            write!(
                f,
                "\ngroup {} was idle for {} ({share})",
                time.group,
                duration(idle)
            )?;
            if time.gaps.is_empty() {
                writeln!(f)?;
                continue;
            }
            writeln!(f, ":")?;
            let timed = |what: &str| (format!("{what} ({})", unit.name), Align::Right);
            let mut table = Table::new(&[
                timed("from"),
                timed("to"),
                ("idle".to_owned(), Align::Right),
                ("before".to_owned(), Align::Left),
                ("what ran meanwhile".to_owned(), Align::Left),
            ]);
            for gap in &time.gaps {
                let length = gap.time.1 - gap.time.0;
                let ran = gap.meanwhile.iter();
                let ran = ran.map(|(name, seconds)| format!("{name} {}", duration(*seconds)));
                let mut ran: Vec<String> = ran.collect();
                // Handing over a batch takes some time, too.
                if gap.nothing_s > 0.1 * length {
                    ran.push(format!("no call {}", duration(gap.nothing_s)));
                }
                table.row([
                    unit.number(gap.time.0),
                    unit.number(gap.time.1),
                    duration(length),
                    gap.next.clone().unwrap_or_else(|| "end of step".to_owned()),
                    ran.join(", "),
                ]);
            }
            write!(f, "{table}")?;
            if time.others > 0 {
                writeln!(f, "  and {}", count(time.others as u64, "shorter gap"))?;
            }
        }
        writeln!(f)
    }

    /// What ran before and after the step.
    fn between(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = self.line;
        let outside = || line.spans.iter().filter(|span| !is_in_step(span, line));
        let before: Vec<&CallSpan> = outside().filter(|span| span.start_s < 0.0).collect();
        let after: Vec<&CallSpan> = outside().filter(|span| span.start_s >= 0.0).collect();
        for (when, spans) in [("before", before), ("after", after)] {
            let stages = stage_times(&spans);
            let texts = stages.iter().map(|stage| {
                let seconds: f64 = stage.spans.iter().map(|span| span.busy_s()).sum();
                format!("{} ({}) {}", stage.label, stage.place, duration(seconds))
            });
            let texts: Vec<String> = texts.collect();
            if !texts.is_empty() {
                writeln!(f, "{when} the step: {}", texts.join(", "))?;
            }
        }
        Ok(())
    }
}
