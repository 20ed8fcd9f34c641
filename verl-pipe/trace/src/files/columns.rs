//! Columns of the trace's tables: the writer and the documentation use the same constants.

use arrow_schema::{DataType, Field};
use serde_json::{Value, json};
use verl_rules::stats::StatRow;
use verl_words::batch::{GROUP_ID, SAMPLE_ID};

/// Type of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColumnType {
    /// Text in UTF-8.
    Text,
    /// A whole number of 32 bits.
    U32,
    /// A whole number of 64 bits.
    U64,
    /// A number of 64 bits.
    F64,
    /// A list of whole numbers of 16 bits.
    U16List,
    /// A list of whole numbers of 32 bits.
    U32List,
}

impl ColumnType {
    /// Its name in the documentation.
    pub fn name(self) -> &'static str {
        match self {
            ColumnType::Text => "text",
            ColumnType::U32 => "u32",
            ColumnType::U64 => "u64",
            ColumnType::F64 => "f64",
            ColumnType::U16List => "list of u16",
            ColumnType::U32List => "list of u32",
        }
    }

    /// Its Arrow type.
    pub fn arrow(self) -> DataType {
        let list = |of| DataType::List(Field::new_list_field(of, true).into());
        match self {
            ColumnType::Text => DataType::Utf8,
            ColumnType::U32 => DataType::UInt32,
            ColumnType::U64 => DataType::UInt64,
            ColumnType::F64 => DataType::Float64,
            ColumnType::U16List => list(DataType::UInt16),
            ColumnType::U32List => list(DataType::UInt32),
        }
    }

    /// JSON Schema of a value.
    pub fn schema(self) -> Value {
        match self {
            ColumnType::Text => json!({ "type": "string" }),
            ColumnType::U32 | ColumnType::U64 => json!({ "type": "integer", "minimum": 0 }),
            ColumnType::F64 => json!({ "type": "number" }),
            ColumnType::U16List | ColumnType::U32List => {
                json!({ "type": "array", "items": { "type": "integer", "minimum": 0 } })
            }
        }
    }
}

/// A column of a table.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    /// Its name.
    pub name: &'static str,
    /// Its type.
    pub holds: ColumnType,
    /// Whether it may be null.
    pub nullable: bool,
    /// Unit; empty if there is none or it is that of the key.
    pub unit: &'static str,
    /// What it means.
    pub meaning: &'static str,
}

const fn always(
    name: &'static str,
    holds: ColumnType,
    unit: &'static str,
    meaning: &'static str,
) -> Column {
    Column {
        name,
        holds,
        nullable: false,
        unit,
        meaning,
    }
}

/// Columns of a stage's file before its keys.
pub const STEP_COLUMNS: [Column; 5] = [
    always(
        "side",
        ColumnType::Text,
        "",
        "`input` where the row entered the stage, `output` where it left it",
    ),
    always(
        "wave",
        ColumnType::U32,
        "",
        "wave of the step that a source drew the row in, from 0; 0 for any other stage",
    ),
    always(
        "slice",
        ColumnType::U32,
        "",
        "call of the stage that the row belongs to, from 0",
    ),
    always(
        SAMPLE_ID,
        ColumnType::U64,
        "",
        "identity of the row: epoch, wave, row of the data set and sample, packed",
    ),
    always(
        GROUP_ID,
        ColumnType::U64,
        "",
        "identity of the row's prompt: that of its sample 0",
    ),
];

/// Where the value of a statistics column comes from.
#[derive(Clone, Copy)]
pub(crate) enum Of {
    Text(fn(&StatRow) -> Option<&str>),
    Integer(fn(&StatRow) -> Option<u64>),
    Real(fn(&StatRow) -> Option<f64>),
    /// Numbers of the sketch's buckets.
    Buckets,
    /// Counts of the sketch's buckets.
    Counts,
}

/// A column of the table of statistics.
#[derive(Clone, Copy)]
pub struct StatColumn {
    /// Name in the file.
    pub name: &'static str,
    pub(crate) of: Of,
    /// Whether it may be null.
    pub nullable: bool,
    /// Its unit; empty if it has none.
    pub unit: &'static str,
    /// What it is.
    pub meaning: &'static str,
}

impl StatColumn {
    /// The column for the documentation.
    pub fn column(&self) -> Column {
        let holds = match self.of {
            Of::Text(_) => ColumnType::Text,
            Of::Integer(_) => ColumnType::U64,
            Of::Real(_) => ColumnType::F64,
            Of::Buckets => ColumnType::U16List,
            Of::Counts => ColumnType::U32List,
        };
        Column {
            name: self.name,
            holds,
            nullable: self.nullable,
            unit: self.unit,
            meaning: self.meaning,
        }
    }
}

const fn stat(name: &'static str, of: Of, unit: &'static str, meaning: &'static str) -> StatColumn {
    StatColumn {
        name,
        of,
        nullable: false,
        unit,
        meaning,
    }
}

/// A column that is null where it does not apply: for texts, for keys that are not ragged, for keys without a
/// counterpart.
const fn maybe(
    name: &'static str,
    of: Of,
    unit: &'static str,
    meaning: &'static str,
) -> StatColumn {
    StatColumn {
        nullable: true,
        ..stat(name, of, unit, meaning)
    }
}

/// The columns of `trace/stats`, in order; the table has one row per step, stage, side and key.
pub const STAT_COLUMNS: [StatColumn; 40] = {
    use Of::{Buckets, Counts, Integer, Real, Text};
    [
        stat(
            "step",
            Integer(|row| Some(row.step)),
            "",
            "step of the run, from 1",
        ),
        stat(
            "stage",
            Text(|row| Some(&row.stage)),
            "",
            "name of the stage",
        ),
        stat(
            "side",
            Text(|row| Some(row.side.as_str())),
            "",
            "`input` or `output` of the stage",
        ),
        stat(
            "key",
            Text(|row| Some(&row.key)),
            "",
            "the stage's own name of the key",
        ),
        stat(
            "name",
            Text(|row| Some(&row.name)),
            "",
            "the pipeline's name of the key",
        ),
        stat(
            "rows",
            Integer(|row| Some(row.rows)),
            "rows",
            "rows of the step",
        ),
        stat(
            "nulls",
            Integer(|row| Some(row.nulls)),
            "rows",
            "rows that are null",
        ),
        stat(
            "count",
            Integer(|row| Some(row.count)),
            "values",
            "values: list items of a ragged key, else rows that are not null",
        ),
        stat(
            "tokens",
            Integer(|row| Some(row.tokens)),
            "list items",
            "list items of a ragged key, else 0",
        ),
        stat(
            "zeros",
            Integer(|row| Some(row.zeros)),
            "values",
            "values that are zero",
        ),
        stat(
            "non_finite",
            Integer(|row| Some(row.non_finite)),
            "values",
            "values that are NaN or infinite",
        ),
        maybe(
            "min",
            Real(|row| row.min),
            "unit of the key",
            "smallest finite value; null for text and if there is none",
        ),
        maybe(
            "max",
            Real(|row| row.max),
            "unit of the key",
            "largest finite value",
        ),
        maybe(
            "mean",
            Real(|row| row.mean),
            "unit of the key",
            "mean of the finite values",
        ),
        maybe(
            "std",
            Real(|row| row.std),
            "unit of the key",
            "standard deviation of the finite values; divides by their number",
        ),
        maybe(
            "p01",
            Real(|row| row.quantiles[0]),
            "unit of the key",
            "1 % of the finite values lie below it; from the sketch, too close to zero by at most 1/16 of the value",
        ),
        maybe(
            "p05",
            Real(|row| row.quantiles[1]),
            "unit of the key",
            "5 % lie below it",
        ),
        maybe(
            "p25",
            Real(|row| row.quantiles[2]),
            "unit of the key",
            "25 % lie below it",
        ),
        maybe(
            "p50",
            Real(|row| row.quantiles[3]),
            "unit of the key",
            "half of them lie below it",
        ),
        maybe(
            "p75",
            Real(|row| row.quantiles[4]),
            "unit of the key",
            "75 % lie below it",
        ),
        maybe(
            "p95",
            Real(|row| row.quantiles[5]),
            "unit of the key",
            "95 % lie below it",
        ),
        maybe(
            "p99",
            Real(|row| row.quantiles[6]),
            "unit of the key",
            "99 % lie below it",
        ),
        stat(
            "sketch_buckets",
            Buckets,
            "",
            "numbers of the sketch's buckets that have values; sketches are merged by adding the counts of equal buckets",
        ),
        stat(
            "sketch_counts",
            Counts,
            "values",
            "number of values in each of these buckets",
        ),
        stat(
            "hash",
            Integer(|row| Some(row.hash)),
            "",
            "sum over the rows, modulo 2^64, of XXH3-64 of the row's bytes with `sample_id` as seed; equal content has equal hashes",
        ),
        maybe(
            "length_min",
            Integer(|row| row.length_min),
            "list items or characters",
            "shortest row: list items of a ragged key, characters of a text",
        ),
        maybe(
            "length_mean",
            Real(|row| row.length_mean),
            "list items or characters",
            "mean length of a row",
        ),
        maybe(
            "length_max",
            Integer(|row| row.length_max),
            "list items or characters",
            "longest row",
        ),
        maybe(
            "truncated_share",
            Real(|row| row.truncated_share),
            "share of rows",
            "rows whose response reached the token limit or the end of the context; for texts, `responses` and `finish_reasons`",
        ),
        maybe(
            "counterpart",
            Text(|row| Some(row.ratio.as_ref()?.counterpart.as_str())),
            "",
            "for `old_log_probs` and `ref_log_probs`: the log-probs that they are compared with, over action tokens",
        ),
        maybe(
            "ratio_tokens",
            Integer(|row| Some(row.ratio.as_ref()?.tokens)),
            "tokens",
            "tokens that were compared with the counterpart",
        ),
        maybe(
            "ratio_rows",
            Integer(|row| Some(row.ratio.as_ref()?.rows)),
            "rows",
            "rows with a token that was compared with the counterpart",
        ),
        maybe(
            "diff_mean",
            Real(|row| Some(row.ratio.as_ref()?.diff_mean)),
            "nats",
            "mean absolute difference from the counterpart",
        ),
        maybe(
            "diff_max",
            Real(|row| Some(row.ratio.as_ref()?.diff_max)),
            "nats",
            "largest absolute difference from the counterpart",
        ),
        maybe(
            "k1",
            Real(|row| Some(row.ratio.as_ref()?.k1)),
            "nats",
            "mean of counterpart minus key, which estimates a KL divergence",
        ),
        maybe(
            "k1_error",
            Real(|row| row.ratio.as_ref()?.k1_error),
            "nats",
            "standard error of `k1`, with rows as sampling units",
        ),
        maybe(
            "ratio_min",
            Real(|row| Some(row.ratio.as_ref()?.ratio_min)),
            "",
            "smallest ratio e^(key − counterpart)",
        ),
        maybe(
            "ratio_max",
            Real(|row| Some(row.ratio.as_ref()?.ratio_max)),
            "",
            "largest ratio",
        ),
        maybe(
            "probability_diff",
            Real(|row| Some(row.ratio.as_ref()?.probability_diff)),
            "probability",
            "mean absolute difference of the sampled tokens' probabilities",
        ),
        maybe(
            "ess",
            Real(|row| Some(row.ratio.as_ref()?.ess)),
            "share of tokens",
            "effective sample size of the ratios as weights: (Σr)² / (N Σr²)",
        ),
    ]
};
