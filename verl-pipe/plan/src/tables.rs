//! Tables: which rows each stage works on; [`crate`] describes the rules.

use verl_words::diagnostic::{Diagnostic, quoted};
use verl_words::stage::{RowRule, StageSpec};

use crate::Table;
use crate::build::{Draft, Link};

/// The tables of a draft.
pub(crate) struct Tables {
    pub list: Vec<Table>,
    /// By declaration: table of the input rows.
    pub input: Vec<Option<usize>>,
    /// By declaration: table of the output rows.
    pub output: Vec<Option<usize>>,
    /// By table: for each stage whether it comes before the table's maker.
    carried: Vec<Vec<bool>>,
    depth: Vec<usize>,
}

/// Letters of the factors of expansions, in order.
const FACTORS: [&str; 4] = ["n", "m", "k", "l"];

impl Tables {
    fn add(&mut self, table: Table, carried: Vec<bool>) -> usize {
        self.depth
            .push(table.parent.map_or(0, |parent| self.depth[parent] + 1));
        self.list.push(table);
        self.carried.push(carried);
        self.list.len() - 1
    }

    /// Whether `coarse` is `fine` or one of the tables that it was made from.
    pub fn descends(&self, fine: usize, coarse: usize) -> bool {
        let mut at = fine;
        loop {
            if at == coarse {
                return true;
            }
            match self.list[at].parent {
                Some(parent) if self.depth[at] > self.depth[coarse] => at = parent,
                _ => return false,
            }
        }
    }

    /// Whether keys that `writer` writes onto table `from` are visible on table `on` too: `writer` runs before the rows
    /// are repeated, or the rows are only filtered.
    pub fn visible(&self, writer: usize, from: usize, on: usize) -> bool {
        let mut at = on;
        while at != from && self.list[at].filtered {
            match self.list[at].parent {
                Some(parent) => at = parent,
                None => break,
            }
        }
        at == from || (self.carried[on][writer] && self.descends(on, from))
    }

    /// The source's table that `table` was made from.
    pub fn root(&self, table: usize) -> usize {
        let up = |table: &usize| self.list[*table].parent;
        std::iter::successors(Some(table), up)
            .last()
            .unwrap_or(table)
    }

    /// Sets the number of waves of the tables between the source of a filter's rows and its own table, `kept`.
    fn set_waves(&mut self, input: usize, kept: usize, waves: usize) {
        let root = self.root(input);
        for table in 0..self.list.len() {
            if self.descends(table, root) && !self.descends(table, kept) {
                self.list[table].waves = waves;
            }
        }
    }

    /// Rows that one prompt has on the table; 1 without a table.
    pub fn rows_per_prompt(&self, table: Option<usize>) -> usize {
        let mut rows = 1usize;
        let mut at = table;
        while let Some(index) = at {
            rows = rows.saturating_mul(self.list[index].factor.max(1));
            at = self.list[index].parent;
        }
        rows
    }

    fn expansions_above(&self, table: usize) -> usize {
        let mut count = 0;
        let mut at = Some(table);
        while let Some(index) = at {
            let table = &self.list[index];
            count += usize::from(table.parent.is_some() && !table.filtered);
            at = table.parent;
        }
        count
    }
}

/// Assigns each stage its tables, in order, and reports stages whose rows do not fit together.
pub(crate) fn lay_out(
    draft: &Draft<'_>,
    order: &[usize],
    findings: &mut Vec<Diagnostic>,
) -> Tables {
    let n = draft.stages.len();
    let mut tables = Tables {
        list: Vec::new(),
        input: vec![None; n],
        output: vec![None; n],
        carried: Vec::new(),
        depth: Vec::new(),
    };
    for &index in order {
        let Some(spec) = &draft.stages[index].spec else {
            continue;
        };
        if !draft.stages[index].in_step() {
            findings.extend(observer_with_keys(draft.name(index), spec));
            continue;
        }
        tables.input[index] = input_table(draft, index, &tables);
        check_rows(draft, index, spec, &tables, findings);
        tables.output[index] = output_table(draft, index, spec, &mut tables);
    }
    for (index, stage) in draft.stages.iter().enumerate() {
        let refill = stage.spec.as_ref().and_then(|spec| spec.refill);
        let (input, output) = (tables.input[index], tables.output[index]);
        if let (Some(refill), Some(input), Some(output)) = (refill, input, output) {
            tables.set_waves(input, output, refill.waves.max(1));
        }
    }
    tables
}

/// The finest table among the keys that the stage reads and that are not broadcast; of all keys when all are.
fn input_table(draft: &Draft<'_>, index: usize, tables: &Tables) -> Option<usize> {
    let finest = |broadcast: bool| {
        draft.links[index]
            .iter()
            .filter(|link| link.broadcast == broadcast)
            .filter_map(|link| tables.output[link.writer])
            .max_by_key(|&table| (tables.depth[table], std::cmp::Reverse(table)))
    };
    finest(false).or_else(|| finest(true))
}

fn output_table(
    draft: &Draft<'_>,
    index: usize,
    spec: &StageSpec,
    tables: &mut Tables,
) -> Option<usize> {
    let input = tables.input[index];
    match spec.rows {
        RowRule::Source => {
            let sources = tables
                .list
                .iter()
                .filter(|table| table.parent.is_none())
                .count();
            let rows = if sources == 0 {
                "P".to_owned()
            } else {
                format!("P{}", sources + 1)
            };
            let table = Table {
                rows,
                num_rows: draft.context.batch.prompts,
                waves: 1,
                made_by: index,
                parent: None,
                factor: 1,
                filtered: false,
            };
            Some(tables.add(table, vec![false; draft.stages.len()]))
        }
        RowRule::Same => input,
        RowRule::Sink => None,
        RowRule::Expand(_) | RowRule::Filter => {
            let parent = input?;
            let (factor, filtered) = match spec.rows {
                RowRule::Expand(factor) => (factor, false),
                _ => (1, true),
            };
            let above = &tables.list[parent];
            let rows = if filtered {
                format!("F({})", above.rows)
            } else {
                let depth = tables.expansions_above(parent);
                let letter = FACTORS
                    .get(depth)
                    .map_or_else(|| format!("n{}", depth + 1), |s| (*s).to_owned());
                format!("{}·{letter}", above.rows)
            };
            let num_rows = match spec.refill {
                Some(refill) => {
                    let most = above.num_rows.saturating_mul(refill.waves);
                    let wanted = tables.rows_per_prompt(input).saturating_mul(refill.groups);
                    most.min(wanted)
                }
                None => above.num_rows.saturating_mul(factor),
            };
            let table = Table {
                rows,
                num_rows,
                waves: 1,
                made_by: index,
                parent: Some(parent),
                factor,
                filtered,
            };
            Some(tables.add(table, draft.graph.ancestors(index)))
        }
    }
}

fn check_rows(
    draft: &Draft<'_>,
    index: usize,
    spec: &StageSpec,
    tables: &Tables,
    findings: &mut Vec<Diagnostic>,
) {
    let name = draft.name(index);
    let mut report = |what: String, why: &str, help: &str| {
        findings.push(
            Diagnostic::error("P015", what)
                .at(format!("stage `{name}`"))
                .because(why)
                .help(help),
        );
    };
    match spec.rows {
        RowRule::Source if !spec.reads.is_empty() => report(
            format!("`{name}` is a source but reads {}", read_names(spec)),
            "a source has no input rows, so it cannot read keys",
            "use another row rule for the stage, or remove the keys that it reads",
        ),
        RowRule::Expand(0) => report(
            format!("`{name}` makes 0 samples of each row"),
            "an expansion by 0 leaves no rows for later stages",
            "set the number of samples to 1 or more",
        ),
        RowRule::Expand(_) | RowRule::Filter if spec.writes.is_empty() => report(
            format!("`{name}` changes the rows but writes no key"),
            "a later stage works on the new rows by reading a key of these rows; without such a key no stage can follow",
            "make the stage write at least one key, for example the score by which it selects the rows",
        ),
        RowRule::Source => {}
        _ if draft.complete() && draft.links[index].is_empty() && spec.reads.is_empty() => report(
            format!("`{name}` has no rows to work on because it reads no key"),
            "a stage works on the rows of the keys that it reads",
            "make it read a key, or give it the row rule `Source`",
        ),
        _ => {}
    }
    if let Some(on) = tables.input[index] {
        for link in &draft.links[index] {
            findings.extend(foreign_rows(draft, link, on, tables));
        }
    }
}

/// An observer runs between steps, where there are no rows.
fn observer_with_keys(name: &str, spec: &StageSpec) -> Option<Diagnostic> {
    let keys = spec
        .reads
        .iter()
        .chain(&spec.writes)
        .map(|field| field.name.as_ref());
    let keys = quoted(keys);
    (!keys.is_empty()).then(|| {
        Diagnostic::error(
            "P015",
            format!("`{name}` runs between steps but has keys: {keys}"),
        )
        .at(format!("stage `{name}`"))
        .because("there are no rows to read or write between steps")
        .help("run it in every step, or make it use only its model and data")
    })
}

fn read_names(spec: &StageSpec) -> String {
    quoted(spec.reads.iter().map(|field| field.name.as_ref()))
}

/// Reports a key whose rows are not the rows that the stage works on.
fn foreign_rows(
    draft: &Draft<'_>,
    link: &Link<'_>,
    on: usize,
    tables: &Tables,
) -> Option<Diagnostic> {
    let from = tables.output[link.writer]?;
    let is_visible = if link.broadcast {
        tables.descends(on, from)
    } else {
        tables.visible(link.writer, from, on)
    };
    if is_visible {
        return None;
    }
    let (writer, reader) = (draft.name(link.writer), draft.name(link.reader));
    let (have, want) = (&tables.list[from], &tables.list[on]);
    let finest = draft.links[link.reader]
        .iter()
        .find(|other| tables.output[other.writer] == Some(on))
        .map_or(String::new(), |other| {
            format!(" (those of `{}`)", other.key)
        });
    let why = format!(
        "`{writer}` writes {} rows ({}), `{reader}` works on {} rows ({}){finest}",
        have.rows, have.num_rows, want.rows, want.num_rows
    );
    let help = if tables.descends(on, from) {
        let maker = draft.name(want.made_by);
        format!(
            "`{writer}` does not run before `{maker}`, which makes the {} rows: read the key with `reads_broadcast` \
             to repeat it, or make `{maker}` read it so that it is carried along",
            want.rows
        )
    } else {
        format!("compute `{}` from keys of the {} rows", link.key, want.rows)
    };
    Some(
        Diagnostic::error(
            "P008",
            format!(
                "`{reader}` cannot use `{}`: it belongs to other rows",
                link.key
            ),
        )
        .at(format!("{writer} -> {reader}"))
        .because(why)
        .help(help),
    )
}
