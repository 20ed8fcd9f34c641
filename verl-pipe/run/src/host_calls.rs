//! Calls on the host pool: splitting them into units, dispatching them, and handling units that failed.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use verl_words::batch::Batch;
use verl_words::stage::{Cardinality, Models, RowRule, Stage};

use crate::call_error::call_error;
use crate::channel::CallFailure;
use crate::error::RunError;
use crate::host_pool::{Cell, HostJob};
use crate::row_errors::RowFailure;
use crate::runner::{HostFlight, InFlight, Progress, Run};
use crate::start::HostStage;
use crate::step::CallId;
use crate::worker::start_stage;

impl Run {
    /// The calls that a slice is split into: its rows or groups if the stage has a deadline, otherwise a single call.
    pub(super) fn units(&self, stage: usize, input: &Batch) -> Vec<Batch> {
        let spec = self.schedule.plan().stages()[stage].spec();
        if spec.deadline.is_some() {
            self.atoms(stage, input)
        } else {
            vec![input.clone()]
        }
    }

    pub(super) fn atoms(&self, stage: usize, input: &Batch) -> Vec<Batch> {
        match self.schedule.plan().stages()[stage].spec().cardinality {
            Cardinality::Row if input.num_rows() > 1 => input.split(1),
            Cardinality::Group => input
                .group_ranges()
                .into_iter()
                .filter_map(|group| input.slice(group).ok())
                .collect(),
            _ => vec![input.clone()],
        }
    }

    pub(super) fn submit(
        &mut self,
        progress: &mut Progress,
        id: CallId,
        input: Batch,
        units: Vec<Batch>,
        first_row: usize,
    ) -> Result<(), RunError> {
        let host = self.hosts.get_mut(&id.0).and_then(HostStage::take);
        let stage = host.ok_or_else(|| RunError::Lost {
            worker: format!("stage `{}`", self.name(id.0)),
            reason: "it cannot be copied, although it could be copied before".to_owned(),
        })?;
        let call = self.new_call();
        let planned = &self.schedule.plan().stages()[id.0];
        let cell = Arc::new(Cell::default());
        self.pool.submit(HostJob {
            call,
            name: planned.name().into(),
            stage,
            units: units.clone(),
            wave: progress.state.wave(id),
            stream: matches!(planned.spec().rows, RowRule::Source | RowRule::Expand(_)),
            env: progress.env.clone(),
            cell: cell.clone(),
        });
        progress.host_running += 1;
        let host = Some(HostFlight {
            units,
            first_row,
            cell,
        });
        progress.in_flight.insert(
            call,
            InFlight {
                id,
                since: Instant::now(),
                input,
                host,
                incarnation: 0,
                emitted: Vec::new(),
                before: HashSet::new(),
            },
        );
        Ok(())
    }

    pub(super) fn take_rows(
        &self,
        progress: &mut Progress,
        id: CallId,
        input: &Batch,
        batch: &Batch,
    ) -> Result<(), RunError> {
        let rows = progress.state.rows_of(id);
        let emitted = progress.state.emit(id, input, batch);
        let point = self.point(progress, id, &rows);
        match &emitted {
            Ok(()) => self.options.tap.output(point, batch),
            Err(error) => self.options.tap.refused(point, batch, &error.to_string()),
        }
        emitted
    }

    /// Accepts the results of a host call. The remaining units are dispatched again, without the unit that failed.
    pub(super) fn end_host_call(
        &mut self,
        progress: &mut Progress,
        flight: InFlight,
        hung: Option<(RunError, f64)>,
    ) -> Result<(), RunError> {
        self.note_host_job(progress, &flight, hung.is_some());
        let InFlight {
            id,
            input,
            host:
                Some(HostFlight {
                    units,
                    mut first_row,
                    cell,
                }),
            ..
        } = flight
        else {
            return Ok(());
        };
        let (finished, failure, stage) = {
            let mut cell = cell.lock();
            (
                std::mem::take(&mut cell.finished),
                cell.failure.take(),
                cell.stage.take(),
            )
        };
        let lost_object = stage.is_none();
        self.return_object(id.0, stage)?;
        let mut rest = units.into_iter();
        let deadline = self.schedule.plan().stages()[id.0].spec().deadline;
        for result in finished {
            let Some(unit) = rest.next() else { break };
            if let Some(deadline) = deadline {
                let seconds = result.report.seconds;
                progress.rows.add_time(id.0, &unit, seconds, deadline);
            }
            for batch in &result.batches {
                if self.schedule.tolerates_row_errors(id.0) {
                    let written = self.schedule.wiring().stages[id.0].outputs.iter();
                    let written = written.map(|out| out.local.as_str());
                    progress.rows.count_nulls(id.0, batch, written);
                }
                self.take_rows(progress, id, &unit, batch)?;
            }
            progress
                .reports
                .push(((id.0, id.1, first_row), result.report));
            first_row += unit.num_rows();
        }
        if failure.is_none() && hung.is_none() {
            return progress.state.finish(id);
        }
        let Some(unit) = rest.next() else {
            return progress.state.finish(id);
        };
        let (row_failure, error) = match (failure, hung) {
            (Some((failure, seconds)), _) => {
                let row_failure = RowFailure::of(&failure, seconds);
                (row_failure, self.failed(progress, id, &unit, failure))
            }
            (None, Some((hung, waited))) => (RowFailure::timed_out(waited, &hung), hung),
            (None, None) => return progress.state.finish(id),
        };
        let ends_step = matches!(error, RunError::Cancelled { .. })
            || !self.schedule.tolerates_row_errors(id.0);
        if ends_step || (lost_object && self.hosts[&id.0].has_state) {
            return Err(error);
        }
        let atoms = self.atoms(id.0, &unit);
        let mut left = if atoms.len() > 1 {
            atoms
        } else {
            self.tolerate(progress, id, &unit, &row_failure)?;
            first_row += unit.num_rows();
            Vec::new()
        };
        left.extend(rest);
        if left.is_empty() {
            progress.state.finish(id)
        } else {
            self.submit(progress, id, input, left, first_row)
        }
    }

    /// Returns a stage's object; an object that is lost is built again from the stage's configuration.
    pub(super) fn return_object(
        &mut self,
        stage: usize,
        object: Option<Box<dyn Stage>>,
    ) -> Result<(), RunError> {
        let Some(host) = self.hosts.get_mut(&stage) else {
            return Ok(());
        };
        match object {
            Some(object) => host.free.push(object),
            None if host.prototype.is_none() => {
                let again = start_stage(&self.schedule, stage, &self.data, &mut Models::new())?;
                host.free.push(again);
            }
            None => {}
        }
        Ok(())
    }

    pub(super) fn tolerate(
        &mut self,
        progress: &mut Progress,
        id: CallId,
        unit: &Batch,
        failure: &RowFailure,
    ) -> Result<(), RunError> {
        progress.rows.add_lost(id.0, unit, failure);
        let nulls = progress.state.nulls(id, unit)?;
        self.take_rows(progress, id, unit, &nulls)
    }

    pub(super) fn failed(
        &self,
        progress: &Progress,
        id: CallId,
        input: &Batch,
        failure: CallFailure,
    ) -> RunError {
        let step = progress.env.step;
        call_error(&self.schedule, step, id.0, describe_rows(input), failure)
    }
}

/// The rows of a batch, for messages.
pub(super) fn describe_rows(input: &Batch) -> String {
    let ids = input.ids();
    match (ids.first(), ids.last()) {
        (Some(first), Some(last)) if ids.len() > 1 => {
            format!("{} rows, samples {first} to {last}", ids.len())
        }
        (Some(first), _) => first.in_words(),
        _ => "without rows".to_owned(),
    }
}
