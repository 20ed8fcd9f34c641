//! The `trace` folder of a run: its format, what writes it and what reads it. Knows neither the recorder nor replay.
//!
//! | file | content |
//! |---|---|
//! | `format.json` | [`TraceFormat`]: format, version, pipeline, its stages in order |
//! | `conditions.json` | [`Conditions`]: settings, machine, what the stages declare |
//! | `stats/part-<first step>.parquet`, `stats/live.arrows` | statistics: one row per step, stage, side and key |
//! | `steps/<step>/<stage>.parquet` | all rows that entered and left a stage in a step; [`StageManifest`] as file metadata |
//! | `steps/<step>/step.json` | [`StepManifest`], written last: a step without it is incomplete |
//! | `state/<sha256>.safetensors`, `.json` | state of models and stages at the start of a traced step, shared between steps |
//! | `anomalies.jsonl` | what the rules found |
//!
//! Step numbers in names have eight digits. Every file is written under a temporary name that begins with a dot and
//! then renamed, so a file under its final name is complete. Only `anomalies.jsonl` and `stats/live.arrows` grow in
//! place. Every JSON document repeats the format number.

mod altered;
mod anomalies;
mod atomic;
mod columns;
mod conditions;
mod documents;
mod error;
mod pipeline_schema;
mod recorded_step;
mod row_groups;
mod stage_reader;
mod stand_in;
mod states;
mod stats_reader;
mod stats_writer;
mod trace_dir;
mod trace_writer;

pub use altered::AlteredKey;
pub(crate) use altered::altered_keys;
pub use atomic::write_atomically;
pub(crate) use atomic::write_json;
pub use columns::{Column, ColumnType, STAT_COLUMNS, STEP_COLUMNS};
pub(crate) use conditions::of_versions;
pub use conditions::{Conditions, Machine};
pub use documents::{
    KeyColumn, Layout, MANIFEST_KEY, ROWS_MISSING, Reason, SliceSpan, StageFile, StageInfo,
    StageManifest, StateRef, StepManifest, TraceFormat, parse, stage_file,
};
pub use error::TraceError;
pub use pipeline_schema::{RowsOfStep, TracedKey, TracedPipeline, TracedStage, describe_pipeline};
pub use recorded_step::{RecordedBatch, RecordedStage, RecordedStep, StepStart};
pub use row_groups::ROW_GROUP_BYTES;
pub use stage_reader::read_stage;
pub use stand_in::{StageShape, read_recorded};
pub use states::Beside;
pub(crate) use states::write_state;
pub use stats_writer::StatsWriter;
pub use trace_dir::ranges;
#[cfg(test)]
pub(crate) use trace_dir::tests as samples;
pub use trace_dir::{DamagedFile, SliceTrace, StageTrace, StepTrace, TraceDir};
pub use trace_writer::{SliceAt, StageWriter, TraceWriter};
