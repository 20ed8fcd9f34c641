//! The cost of the engine itself: steps through stages that do nothing.
//!
//! Targets: at most 20 µs per stage and 1 µs per row. Divide a result by the stages (or rows times stages) in its name.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::Arc;

use arrow_array::{ArrayRef, UInt64Array};
use criterion::{Criterion, criterion_group, criterion_main};
use verl_pipe::batch::arrow::ArrowBatch;
use verl_pipe::batch::{Batch, RowId};
use verl_pipe::field::{Field, Key, Scalar};
use verl_pipe::pipe::{DataPipe, StageDecl};
use verl_pipe::plan::Plannable;
use verl_pipe::run::runner::{Run, RunOptions};
use verl_pipe::schedule::batching::BatchConfig;
use verl_pipe::stage::{Cardinality, RowRule, Stage, StageContext, StageError, StageSpec};

const LINK: Key<Scalar<u64>> = Key::new("link", "[B]", "", "passed on unchanged");

/// Passes its input on under the next name.
#[derive(Clone)]
struct Link {
    from: Option<String>,
    to: String,
    rows: usize,
    cardinality: Cardinality,
    column: ArrayRef,
}

fn key(name: &str) -> Field {
    LINK.field().renamed(name.to_owned())
}

impl Stage for Link {
    fn spec(&self) -> StageSpec {
        let spec = StageSpec::new()
            .writes(key(&self.to))
            .cardinality(self.cardinality);
        match &self.from {
            Some(from) => spec.reads(key(from)),
            None => spec.rows(RowRule::Source),
        }
    }

    fn run(&mut self, input: Batch, context: &mut StageContext<'_>) -> Result<(), StageError> {
        let output = match &self.from {
            Some(from) => input.rename(&[(from.as_str(), self.to.as_str())]),
            None => {
                let ids = (0..self.rows as u64)
                    .map(|row| RowId::prompt(0, row))
                    .collect::<Result<Vec<_>, _>>()?;
                let mut batch = Batch::with_rows(&ids);
                batch.put_array(&self.to, self.column.clone())?;
                batch
            }
        };
        context.emit(output)
    }

    fn duplicate(&self) -> Option<Box<dyn Stage>> {
        Some(Box::new(self.clone()))
    }
}

fn chain(stages: usize, rows: usize, cardinality: Cardinality) -> Run {
    let mut pipe = DataPipe::new("chain").batch(BatchConfig {
        prompts: rows,
        ..BatchConfig::default()
    });
    for index in 0..=stages {
        let link = Link {
            from: index.checked_sub(1).map(|before| format!("link_{before}")),
            to: format!("link_{index}"),
            rows,
            cardinality,
            column: Arc::new(UInt64Array::from_iter_values(0..rows as u64)),
        };
        pipe.stages.push(StageDecl {
            name: format!("stage_{index}"),
            kind: "custom".to_owned(),
            config: serde_json::Value::Null,
            rename: BTreeMap::new(),
            stated_reads: None,
            stated_writes: None,
            debug: false,
            group: None,
            build: Arc::new(move |_| Ok(Box::new(link.clone()))),
        });
    }
    let schedule = pipe
        .plan()
        .and_then(|plan| plan.schedule())
        .expect("a valid chain");
    Run::start(schedule, RunOptions::default()).expect("nothing to load")
}

fn engine(criterion: &mut Criterion) {
    for (name, stages, rows, cardinality) in [
        ("32 stages of 1 row", 32, 1, Cardinality::Batch),
        (
            "32 stages of 512 rows, whole batch",
            32,
            512,
            Cardinality::Batch,
        ),
        ("8 stages of 512 rows, streaming", 8, 512, Cardinality::Row),
        (
            "8 stages of 8192 rows, streaming",
            8,
            8192,
            Cardinality::Row,
        ),
    ] {
        let mut run = chain(stages, rows, cardinality);
        criterion.bench_function(name, |bencher| {
            bencher.iter(|| black_box(run.step().expect("a step")));
        });
    }
}

criterion_group!(benches, engine);
criterion_main!(benches);
