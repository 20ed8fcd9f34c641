//! Observers: stages that run between steps, without rows. Also isolated calls, during which nothing else runs.

use std::sync::Arc;
use std::time::{Duration, Instant};

use verl_plan::schedule::placement::Place;
use verl_words::batch::Batch;
use verl_words::stage::Cadence;

use crate::call_error::call_error;
use crate::channel::{CallEnv, CallReport, Event, TICK};
use crate::error::RunError;
use crate::host_calls::describe_rows;
use crate::host_pool::{Cell, HostJob};
use crate::metrics::{StepMetrics, now, reduce};
use crate::records::{OBSERVE_S, STAGE_S, of_stage};
use crate::runner::{GRACE, Run, StepOutput};
use crate::span_log::SpanLog;
use crate::spans::SpanKind;
use crate::start::{HostStage, seconds};
use crate::watch::Wait;
use crate::worker::DeviceCall;

/// Output of an isolated call.
pub(super) struct IsolatedOutput {
    pub report: CallReport,
    /// Thread of the host pool that ran it; 0 on a device worker.
    pub lane: usize,
    pub batches: Vec<Batch>,
}

impl Run {
    /// Whether an observer is due after step `step` (0: before the first).
    pub fn observes(&self, step: u64) -> bool {
        !self.observers(step).is_empty()
    }

    fn observers(&self, step: u64) -> Vec<usize> {
        let steps = self.schedule.plan().context().steps;
        let due = |cadence| match cadence {
            Cadence::Step => false,
            Cadence::Observer { every } => {
                step == 0 || step == steps || (every > 0 && step.is_multiple_of(every))
            }
        };
        let stages = self.schedule.plan().stages().iter().enumerate();
        stages
            .filter(|(_, stage)| due(stage.spec().cadence))
            .map(|(index, _)| index)
            .collect()
    }

    /// Runs the observers that are due after step `step` (0: before the first), one after another.
    ///
    /// # Errors
    /// The error of the first one that fails.
    pub fn observe(&mut self, step: u64) -> Result<StepOutput, RunError> {
        let start = Instant::now();
        let mut reports = Vec::new();
        let mut spans = SpanLog::new(start);
        for stage in self.observers(step) {
            let dispatched = Instant::now();
            let output = self.call_observer(stage, step)?;
            let began = output.report.began.unwrap_or(dispatched);
            let lane = (self.schedule.places()[stage], output.lane);
            let time = (began, began + seconds(output.report.seconds));
            spans.work(SpanKind::Observe, self.name(stage), lane, time);
            reports.push(((stage, 0, 0), output.report));
        }
        let mut values = reduce(
            reports
                .iter()
                .flat_map(|(_, report): &(_, CallReport)| &report.records),
        );
        for ((stage, ..), report) in &reports {
            values.insert(of_stage(&STAGE_S, self.name(*stage)), report.seconds);
        }
        if !reports.is_empty() {
            values.insert(OBSERVE_S.name.to_owned(), start.elapsed().as_secs_f64());
        }
        let samples = reports
            .into_iter()
            .flat_map(|(_, report)| report.samples)
            .collect();
        Ok(StepOutput {
            metrics: StepMetrics {
                step,
                epoch: 0,
                timestamp: now(),
                values,
                roles: self.roles.clone(),
            },
            samples,
            spans: spans.finish(&self.schedule),
        })
    }

    /// Runs an observer: a single call without rows, which must not emit any.
    fn call_observer(&mut self, stage: usize, step: u64) -> Result<IsolatedOutput, RunError> {
        let env = self.env(step);
        let waiting = self.watch.begin(Wait {
            step,
            who: self.name(stage).to_owned(),
            pending: "what it observes".to_owned(),
            on: self.place_name(stage),
            deadline: self.deadline,
        });
        let output = self.call_isolated(stage, &env, 0, Batch::with_rows(&[]), self.deadline);
        let output = waiting.finish(output)?;
        match output.batches.first() {
            None => Ok(output),
            Some(batch) => Err(RunError::Guard {
                step,
                source: Box::new(crate::guard::GuardError::NoOutput {
                    stage: self.name(stage).to_owned(),
                    rows: batch.num_rows(),
                }),
            }),
        }
    }

    /// Calls one stage once, with nothing else running.
    ///
    /// # Errors
    /// The failure of the call, or [`RunError::Deadline`] if it exceeds `deadline`.
    pub(super) fn call_isolated(
        &mut self,
        stage: usize,
        env: &Arc<CallEnv>,
        wave: u64,
        input: Batch,
        deadline: Duration,
    ) -> Result<IsolatedOutput, RunError> {
        loop {
            match self.call_isolated_once(stage, env, wave, input.clone(), deadline) {
                Ok(output) => {
                    self.log_call(stage, &input, wave, env);
                    return Ok(output);
                }
                Err(error @ RunError::Lost { .. }) => self.revive_any(error)?,
                Err(error) => return Err(error),
            }
        }
    }

    fn call_isolated_once(
        &mut self,
        stage: usize,
        env: &Arc<CallEnv>,
        wave: u64,
        input: Batch,
        deadline: Duration,
    ) -> Result<IsolatedOutput, RunError> {
        let call = self.new_call();
        let cell = Arc::new(Cell::default());
        let rows = describe_rows(&input);
        match self.schedule.places()[stage] {
            Place::Group(group) => {
                self.sync_copies_of(stage)?;
                self.note_changed_weights(stage);
                self.workers[group].call(DeviceCall {
                    call,
                    stage,
                    input,
                    wave,
                    env: env.clone(),
                })?;
            }
            Place::Host => {
                let object = self.hosts.get_mut(&stage).and_then(HostStage::take);
                let object = object.ok_or_else(|| RunError::Lost {
                    worker: format!("stage `{}`", self.name(stage)),
                    reason: "its object is lost".to_owned(),
                })?;
                self.pool.submit(HostJob {
                    call,
                    name: self.name(stage).into(),
                    stage: object,
                    units: vec![input],
                    wave,
                    stream: false,
                    env: env.clone(),
                    cell: cell.clone(),
                });
            }
        }
        self.await_isolated(stage, call, env, &cell, &rows, deadline)
    }

    fn await_isolated(
        &mut self,
        stage: usize,
        call: u64,
        env: &CallEnv,
        cell: &Cell,
        rows: &str,
        deadline: Duration,
    ) -> Result<IsolatedOutput, RunError> {
        let since = Instant::now();
        let (step, name) = (env.step, self.name(stage).to_owned());
        let mut lane = 0;
        let mut emitted = Vec::new();
        let mut cancelled_at = None;
        loop {
            let event = crossbeam_channel::select! {
                recv(self.host_events) -> event => event.ok(),
                recv(self.device_events) -> event => event.ok(),
                default(TICK) => None,
            };
            let ended = match event {
                Some(Event::Done {
                    call: c,
                    report,
                    result,
                }) if c == call => Some((Some(report), result.err())),
                Some(Event::HostDone { call: c }) if c == call => {
                    let mut cell = cell.lock();
                    let result = cell.finished.pop();
                    let (failure, object) = (cell.failure.take(), cell.stage.take());
                    lane = cell.ran.map_or(0, |ran| ran.thread);
                    drop(cell);
                    self.return_object(stage, object)?;
                    let report = result.map(|result| {
                        emitted.extend(result.batches);
                        result.report
                    });
                    Some((report, failure.map(|(failure, _)| failure)))
                }
                Some(Event::Rows { call: c, batch }) if c == call => {
                    emitted.push(batch);
                    None
                }
                _ => None,
            };
            if let Some((report, failure)) = ended {
                let rows = rows.to_owned();
                return match failure {
                    None => Ok(IsolatedOutput {
                        report: report.unwrap_or_default(),
                        lane,
                        batches: emitted,
                    }),
                    Some(failure) => Err(call_error(&self.schedule, step, stage, rows, failure)),
                };
            }
            if self.options.cancel.is_cancelled() && cancelled_at.is_none() {
                env.cancel.cancel();
                cancelled_at = Some(Instant::now());
            }
            let on_host = self.schedule.places()[stage] == Place::Host;
            let abandoned = on_host && cancelled_at.is_some_and(|at: Instant| at.elapsed() > GRACE);
            if since.elapsed() > deadline || abandoned {
                self.abandon_isolated(stage, cell)?;
                if abandoned {
                    return Err(RunError::Cancelled { step });
                }
                return Err(RunError::Deadline {
                    step,
                    stage: name,
                    rows: rows.to_owned(),
                    waited_s: since.elapsed().as_secs_f64(),
                    deadline_s: deadline.as_secs_f64(),
                    awaited: "its end".to_owned(),
                });
            }
        }
    }

    /// Abandons an isolated call.
    fn abandon_isolated(&mut self, stage: usize, cell: &Cell) -> Result<(), RunError> {
        if self.schedule.places()[stage] != Place::Host {
            self.abandon_worker(stage);
            return Ok(());
        }
        let runs = {
            let mut cell = cell.lock();
            cell.abandoned = true;
            cell.unit_since.is_some()
        };
        if runs {
            self.replace_thread(stage)?;
        }
        self.return_object(stage, None)
    }
}
